"""The worker's one socket to its agent, and the one control thread that reads it.

Training never waits for the agent: a report that does not fit into the socket is dropped, an outcome is kept
until it does. When the agent is gone, training goes on and nothing more is heard.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import msgspec

from elasticd import messages, packets
from elasticd.messages import Hello, Message, Report, StoreAnswer, StoreCall, ToWorker, Welcome

log = logging.getLogger(__name__)

#: Extra seconds that a store call waits for its answer beyond what the leader was told.
_GRACE = 5.0
#: Seconds that an agent that was started again has to listen.
_RETURN_SECONDS = 120.0
#: What an agent that was started again must hear: the newest of each.
AGAIN = (
    messages.Prepared,
    messages.Refused,
    messages.Swapped,
    messages.Kept,
    messages.Doubt,
    messages.Bereft,
    messages.Standing,
    messages.Saved,
    messages.Finished,
)


class RejectedByAgent(RuntimeError):
    """The agent does not take this worker; the message says why and what to do."""


class Control:
    """A connection that said hello and was welcomed. `start` hands every further message to `handler`, on
    the control thread; `handler` must not block."""

    def __init__(self, path: str, hello: Hello, *, connect_seconds: float = 10.0) -> None:
        self._path, self._hello = path, hello
        self._socket, self.welcome = _open(path, hello, connect_seconds)
        self._socket.setblocking(False)
        self._said: dict[type, bytes] = {}
        self._renewing: threading.Event | None = None
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._outbox: deque[bytes] = deque()
        self._calls: dict[int, Future[StoreAnswer]] = {}
        self._next_call = 0
        self.lost = False
        self.dropped = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="elasticd-control", daemon=True)
        self._handler: Callable[[ToWorker], None] = lambda message: None

    def start(self, handler: Callable[[ToWorker], None]) -> None:
        self._handler = handler
        self._thread.start()

    def send(self, message: Message) -> None:
        """Hands a message over without waiting. Reports may be dropped (and are counted), others are not."""
        data = messages.encode(message)
        with self._lock:
            if isinstance(message, AGAIN):
                self._said[type(message)] = data
            if self.lost:
                return
            if not self._outbox:
                try:
                    packets.send(self._socket, data)
                    return
                except BlockingIOError:
                    pass
                except OSError:
                    pass  # the control thread sees the end of the connection, and comes back
            if isinstance(message, Report):
                self.dropped += 1
                return
            self._outbox.append(data)
        os.eventfd_write(self._wake, 1)

    def call(self, op: str, key: str, value: bytes = b"", seconds: float = 30.0) -> StoreAnswer:
        """One call on the bootstrap store. Raises TimeoutError where it cannot be answered in time."""
        future: Future[StoreAnswer] = Future()
        with self._lock:
            if self.lost:
                raise TimeoutError("the agent is gone: the bootstrap store cannot be reached")
            self._next_call += 1
            number = self._next_call
            self._calls[number] = future
        self.send(StoreCall(id=number, op=op, key=key, value=value, seconds=seconds))  # type: ignore[arg-type]
        try:
            answer = future.result(seconds + _GRACE)
        finally:
            self._calls.pop(number, None)
        if answer.error is not None:
            raise TimeoutError(answer.error)
        return answer

    def renew(self) -> None:
        """Leaves this incarnation behind: returns when the agent has welcomed another."""
        with self._lock:
            if self.lost:
                return
            self._said.clear()
            self._outbox.clear()
            done = self._renewing = threading.Event()
            self._socket.shutdown(socket.SHUT_RDWR)
        os.eventfd_write(self._wake, 1)
        done.wait(_RETURN_SECONDS)

    def close(self, farewell: Message) -> None:
        """Says goodbye and waits a moment until all is sent."""
        self.send(farewell)
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(5.0)

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        try:
            while not (self._closing and not self._outbox):
                poller.register(self._socket, select.POLLIN | (select.POLLOUT if self._outbox else 0))
                for fd, event in poller.poll():
                    if fd == self._wake:
                        os.eventfd_read(self._wake)
                    elif event & select.POLLOUT:
                        self._flush()
                    elif not self._read():
                        poller.unregister(self._socket)
                        if self._closing or not self._return():
                            return
                        break
        finally:
            self._lose()

    def _return(self) -> bool:
        """A connection to the agent that is there now: another one, or the same for a new incarnation. What was
        said of switches and faults is said again."""
        renewing, known = self._renewing, self.welcome
        hello = self._hello
        if renewing is None:
            log.warning("the agent is gone; training goes on under the plan in force until it returns")
            hello = msgspec.structs.replace(hello, incarnation=known.incarnation)
        with self._lock:
            calls, self._calls = self._calls, {}
            self._socket.close()
        for future in calls.values():
            future.set_exception(TimeoutError("the connection to the agent broke"))
        try:
            opened, welcome = _open(self._path, hello, _RETURN_SECONDS)
        except (OSError, RejectedByAgent) as error:
            log.warning("the agent did not return: %s", error)
            return False
        opened.setblocking(False)
        with self._lock:
            self._socket, self.welcome, self._renewing = opened, welcome, None
            again = [data for data in self._said.values() if data not in self._outbox]
            self._outbox.extendleft(reversed(again))
        if welcome.pace is not None:  # what was said while nobody was here to hear it
            self._handler(welcome.pace)
        if renewing is not None:
            renewing.set()
        return True

    def _flush(self) -> None:
        with self._lock:
            while self._outbox:
                try:
                    packets.send(self._socket, self._outbox[0])
                except BlockingIOError:
                    return
                except OSError:
                    self._outbox.clear()
                    return
                self._outbox.popleft()

    def _read(self) -> bool:
        """Handles one message; False at the end of the connection."""
        try:
            data = packets.receive(self._socket)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if data is None:
            return False
        message = messages.to_worker(data)
        if isinstance(message, StoreAnswer):
            future = self._calls.get(message.id)
            if future is not None and not future.done():
                future.set_result(message)
        else:
            self._handler(message)
        return True

    def _lose(self) -> None:
        with self._lock:
            self.lost = True
            calls, self._calls = self._calls, {}
            if self._closing:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
        for future in calls.values():
            future.set_exception(TimeoutError("the agent is gone: the bootstrap store cannot be reached"))
        if self._renewing is not None:
            self._renewing.set()
        if not self._closing:
            log.warning("the agent is gone; training goes on under the plan in force, nothing is replanned")


def _open(path: str, hello: Hello, seconds: float) -> tuple[socket.socket, Welcome]:
    """A connection that said hello and was welcomed. Raises OSError or RejectedByAgent."""
    opened = packets.connect(path, seconds)
    try:
        packets.send(opened, messages.encode(hello))
        data = packets.receive(opened)
        answer = messages.to_worker(data) if data is not None else None
        if not isinstance(answer, Welcome):
            raise RejectedByAgent(getattr(answer, "reason", f"the agent at {path} closed the connection"))
    except BaseException:
        opened.close()
        raise
    return opened, answer


class AgentKeyValue:
    """The job's bootstrap store, over the agent, kept by the leader: a `groups.KeyValue`."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def set(self, key: str, value: bytes) -> None:
        self._control.call("set", key, value)

    def get(self, key: str, seconds: float) -> bytes:
        return self._control.call("get", key, seconds=seconds).value

    def add(self, key: str, amount: int) -> int:
        return self._control.call("add", key, str(amount).encode()).number

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._control.call("check", key).number for key in keys)
