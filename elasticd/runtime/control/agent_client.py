"""The worker's one socket to its agent, and the one control thread that reads it.

Training never waits for the agent: a report that does not fit into the socket is dropped, an outcome is kept
until it does. When the agent is gone, training goes on under the plan in force, and the thread comes back to
the next agent, which is told again what still holds of what was said. If none listens within two minutes,
nothing more is heard.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from elasticd.backoff import jittered
from elasticd.codec.decoding import shown, skip
from elasticd.codec.message import Message, encode
from elasticd.runtime.control.outbox import Outbox, PlanMemory
from elasticd.system import process_mark
from elasticd.wire import unix_socket
from elasticd.wire.snapshots import Fetch, Fetched, Held
from elasticd.wire.worker import (
    Closed,
    Finished,
    Hello,
    Ping,
    Pong,
    Report,
    Shutdown,
    StoreAnswer,
    StoreCall,
    ToWorker,
    Welcome,
    to_worker,
)

log = logging.getLogger(__name__)

#: Extra seconds that a store call waits for its answer beyond what the leader was told.
_STORE_GRACE_SECONDS = 5.0
#: Seconds that an agent has to listen; and one that is started again: a worker's torchrun had an agent.
_CONNECT_SECONDS, _RETURN_SECONDS = 10.0, 120.0
#: Seconds until an agent is called again that hung up.
_AGAIN_SECONDS = 0.1
#: Seconds that a worker which made the last step waits, while there is an agent, for the end of its job.
_END_SECONDS = 5.0


class RejectedByAgent(RuntimeError):
    """The agent does not take this worker; the message says why and what to do."""


class HungUp(RejectedByAgent):
    """It closed the connection without a word: it is ending, and the next agent may answer."""


class AgentClient:
    """The `Control` of a worker that has an agent: a connection that said hello and was welcomed. `start` hands
    every further message to `handler`, on the control thread; `handler` must not block. It gets a `Welcome`
    whenever a new connection stands: to another agent, or for another incarnation. connect_seconds: how long an
    agent is waited for that is not there, or is just ending. Raises OSError or RejectedByAgent."""

    def __init__(self, path: str, hello: Hello, *, connect_seconds: float | None = None) -> None:
        self._path, self._hello = path, hello
        if connect_seconds is None:
            connect_seconds = _RETURN_SECONDS if process_mark.VARIABLE in os.environ else _CONNECT_SECONDS
        self._socket, self.welcome = _open_first(path, hello, connect_seconds)
        self._socket.setblocking(False)
        self._said = Outbox()
        self._running = PlanMemory()
        self._renewing: threading.Event | None = None
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._outbox: deque[tuple[bytes, int | None]] = deque()
        self._calls: dict[int, Future[StoreAnswer]] = {}
        self._fetches: dict[_Wanted, Future[tuple[Held, int]]] = {}
        self._next_call = 0
        self.lost = False
        self.dropped = 0
        self._closing, self._away = False, False
        self._over = threading.Event()  # the job's end is written, or no agent will say so
        self._thread = threading.Thread(target=self._run, name="elasticd-control", daemon=True)
        self._handler: Callable[[ToWorker], None] = lambda message: None

    #: There may be other ranks, and signals come as a `PreemptionNotice`.
    alone, ending = False, ""

    def start(self, handler: Callable[[ToWorker], None]) -> None:
        """Starts the control thread. From now on it calls `handler` with each message of the agent."""
        self._handler = handler
        self._thread.start()

    def send(self, message: Message, fd: int | None = None) -> None:
        """Hands a message over without waiting, and a descriptor with it, which stays the caller's too. Reports
        may be dropped (and are counted), others are not."""
        data = encode(message)
        with self._lock:
            self._said.add(message, data)
            self._running.said(message)
            if self.lost:
                return
            if not self._outbox:
                # It may be full; or at its end, which the control thread sees, and comes back.
                with contextlib.suppress(OSError):
                    unix_socket.send(self._socket, data, fd)
                    return
            if isinstance(message, Report):
                self.dropped += 1
                return
            self._outbox.append((data, None if fd is None else os.dup(fd)))
        os.eventfd_write(self._wake, 1)

    def call(self, op: str, key: str, value: bytes = b"", seconds: float = 30.0) -> StoreAnswer:
        """One call on the bootstrap store. Raises TimeoutError where it cannot be answered in time."""
        return self.call_all(op, [key], value, seconds)[0]

    def call_all(
        self, op: str, keys: Sequence[str], value: bytes = b"", seconds: float = 30.0
    ) -> list[StoreAnswer]:
        """The same call for several keys, all under way at once. Raises as `call`."""
        begun: dict[int, Future[StoreAnswer]] = {}
        deadline = time.monotonic() + seconds + _STORE_GRACE_SECONDS
        try:
            for key in keys:
                with self._lock:
                    if self.lost:
                        raise TimeoutError("the agent is gone: the bootstrap store cannot be reached")
                    self._next_call += 1
                    number = self._next_call
                    self._calls[number] = begun[number] = Future()
                self.send(StoreCall(id=number, op=op, key=key, value=value, seconds=seconds))
            answers = [future.result(max(0.0, deadline - time.monotonic())) for future in begun.values()]
        finally:
            for number in begun:
                self._calls.pop(number, None)
        for answer in answers:
            if answer.error is not None:
                raise TimeoutError(answer.error)
        return answers

    def key_value(self) -> AgentKeyValue:
        """The job's bootstrap store, over this connection."""
        return AgentKeyValue(self)

    def fetch(self, held: Held, seconds: float = 30.0) -> tuple[Held, int]:
        """A snapshot that this node's agent keeps, found by job, device, plan and step: what it is, and a
        memory file that is the caller's. Raises OSError with the agent's reason, a TimeoutError without."""
        future: Future[tuple[Held, int]] = Future()
        key = _wanted(held)
        with self._lock:
            if self.lost:
                raise TimeoutError("the agent is gone, and its snapshots with it")
            if key in self._fetches:
                raise RuntimeError(f"the snapshot of {held.device}, step {held.step}, is being fetched already")
            self._fetches[key] = future
        self.send(Fetch(held=held))
        try:
            return future.result(seconds)
        except TimeoutError:
            with self._lock:  # an answer that comes from now on finds nobody
                late = self._fetches.pop(key, None) is None and future.done() and future.exception() is None
            if late:
                return future.result()
            raise
        finally:
            self._fetches.pop(key, None)

    def renew(self) -> None:
        """Leaves this incarnation behind: returns when the agent has welcomed another, or is gone for good."""
        with self._lock:
            if self.lost:
                return
            self._said.clear()
            self._running = PlanMemory()
            self._empty_outbox()
            done = self._renewing = threading.Event()
            with contextlib.suppress(OSError):  # it is gone already: the control thread is on its way back
                self._socket.shutdown(socket.SHUT_RDWR)
        os.eventfd_write(self._wake, 1)
        done.wait(_RETURN_SECONDS)

    def close(self, farewell: Message) -> None:
        """Says goodbye and waits a moment until all is sent. A worker that made the last step waits before it
        until the end of the job is written: an agent that dies first has told nobody, and is told again."""
        if Finished in self._said:
            self._await_end()
        self.send(farewell)
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(5.0)

    def _await_end(self) -> None:
        """Waits while the agent is away, and some seconds for each that comes."""
        while True:
            connection = self._socket
            if self._over.wait(_END_SECONDS) or (not self._away and self._socket is connection):
                return

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
        if self._renewing is None:
            log.warning("the agent is gone; training goes on under the plan in force until it returns")
        with self._lock:
            self._away = True
            self._socket.close()
        self._fail("the connection to the agent broke")
        deadline = time.monotonic() + _RETURN_SECONDS
        while True:
            renewing = self._renewing
            same = "" if renewing is not None else self.welcome.incarnation
            try:
                running = self._running.plan if same else None
                hello = msgspec.structs.replace(self._hello, incarnation=same, running=running)
                opened, welcome = _open(self._path, hello, _RETURN_SECONDS)
            except (OSError, RejectedByAgent) as error:
                # An agent that was killed resets what it had not read.
                if isinstance(error, ConnectionError | HungUp) and time.monotonic() < deadline:
                    time.sleep(jittered(_AGAIN_SECONDS))
                    continue
                log.warning("the agent did not return: %s", error)
                return False
            if self._take(opened, welcome, renewing):
                break
            opened.close()
        self._handle(welcome)
        if welcome.pace is not None:  # what was said while nobody was here to hear it
            self._handle(welcome.pace)
        if renewing is not None:
            renewing.set()
        return True

    def _take(self, opened: socket.socket, welcome: Welcome, renewing: threading.Event | None) -> bool:
        """The connection to go on with; False where this worker was to leave the incarnation that it is for
        behind meanwhile."""
        opened.setblocking(False)
        with self._lock:
            if self._renewing is not renewing:
                return False
            self._socket, self.welcome, self._renewing, self._away = opened, welcome, None, False
            waiting = {data for data, _ in self._outbox}
            again = [(data, None) for data in self._said if data not in waiting]
            self._outbox.extendleft(reversed(again))
        return True

    def _flush(self) -> None:
        with self._lock:
            while self._outbox:
                try:
                    unix_socket.send(self._socket, *self._outbox[0])
                except BlockingIOError:
                    return
                except OSError:
                    self._empty_outbox()
                    return
                _close(self._outbox.popleft()[1])

    def _empty_outbox(self) -> None:
        for _, fd in self._outbox:
            _close(fd)
        self._outbox.clear()

    def _read(self) -> bool:
        """Handles one message; False at the end of the connection."""
        try:
            data, fd = unix_socket.accept(self._socket)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if data is None:
            return False
        try:
            message = to_worker(data)
        except msgspec.DecodeError as error:
            why = f"a message of the agent cannot be read and is skipped: {shown(str(error))}"
            skip("content", ("agent", why), why)
            message = None
        if isinstance(message, Fetched):
            self._fetched(message, fd)
            return True
        _close(fd)
        if message is None:
            return True
        if isinstance(message, Ping):
            self.send(Pong())
        elif isinstance(message, StoreAnswer):
            future = self._calls.get(message.id)
            if future is not None and not future.done():
                future.set_result(message)
        else:
            self._handle(message)
        return True

    def _handle(self, message: ToWorker) -> None:
        """A defect costs the message. It must not end this thread, without which the worker is deaf."""
        with self._lock:
            self._running.heard(message)
        if isinstance(message, Closed | Shutdown):
            self._over.set()
        try:
            self._handler(message)
        except Exception:
            log.exception("elasticd failed on %s of the agent, which is skipped", type(message).__name__)

    def _fetched(self, message: Fetched, fd: int | None) -> None:
        with self._lock:
            future = self._fetches.pop(_wanted(message.held), None)
            if future is None:
                _close(fd)
            elif fd is None:
                future.set_exception(OSError(message.error or "a snapshot came without its memory file"))
            else:
                future.set_result((message.held, fd))

    def _fail(self, why: str) -> None:
        """Nothing that is waited for will be answered."""
        with self._lock:
            waiting: list[Future[Any]] = [*self._calls.values(), *self._fetches.values()]
            self._calls, self._fetches = {}, {}
        for future in waiting:
            if not future.done():
                future.set_exception(TimeoutError(why))

    def _lose(self) -> None:
        with self._lock:
            self.lost = True
            renewing = self._renewing
            self._empty_outbox()
            if self._closing:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
        self._over.set()
        self._fail("the agent is gone, and with it the way to the bootstrap store")
        if renewing is not None:
            renewing.set()
        if not self._closing:
            log.warning("no agent came back: training goes on under the plan in force, and hears nothing more")


def _open_first(path: str, hello: Hello, seconds: float) -> tuple[socket.socket, Welcome]:
    deadline = time.monotonic() + seconds
    while True:
        try:
            return _open(path, hello, max(0.0, deadline - time.monotonic()))
        except (ConnectionError, HungUp) as error:  # an agent that was killed resets what it had not read
            if isinstance(error, unix_socket.NoAgent) or time.monotonic() >= deadline:
                raise
        time.sleep(jittered(_AGAIN_SECONDS))


def _open(path: str, hello: Hello, seconds: float) -> tuple[socket.socket, Welcome]:
    """A connection that said hello and was welcomed. Raises OSError or RejectedByAgent."""
    opened = unix_socket.connect(path, seconds)
    try:
        unix_socket.send(opened, encode(hello))
        answer = None
        while answer is None:  # a message that this release does not know
            data, fd = unix_socket.accept(opened)
            _close(fd)
            if data is None:
                raise HungUp(f"the agent at {path} closed the connection")
            answer = to_worker(data, first=True)
        if not isinstance(answer, Welcome):
            raise RejectedByAgent(getattr(answer, "reason", f"the agent at {path} said {answer}"))
    except msgspec.DecodeError as error:
        opened.close()
        raise RejectedByAgent(
            f"the answer of the agent at {path} cannot be read ({error}): install the same release of elasticd"
        ) from error
    except BaseException:
        opened.close()
        raise
    return opened, answer


#: What a snapshot is found by: job, device, plan and step.
_Wanted = tuple[str, str, int, int]


def _wanted(held: Held) -> _Wanted:
    return held.job, held.device, held.plan, held.step


def _close(fd: int | None) -> None:
    if fd is not None:
        os.close(fd)


class AgentKeyValue:
    """The job's bootstrap store, over the agent, kept by the leader: a `groups.BootstrapKeyValue`."""

    def __init__(self, control: AgentClient) -> None:
        self._control = control

    def set(self, key: str, value: bytes) -> None:
        """Stores a value, in place of an earlier one. Raises TimeoutError if the store cannot be reached."""
        self._control.call("set", key, value)

    def get(self, key: str, seconds: float) -> bytes:
        """Waits for a key, for `seconds` at most. Raises TimeoutError after that, and as `set`."""
        return self._control.call("get", key, seconds=seconds).value

    def get_all(self, keys: Sequence[str], seconds: float) -> list[bytes]:
        """As `get`, for all of these keys at once."""
        return [answer.value for answer in self._control.call_all("get", keys, seconds=seconds)]

    def add(self, key: str, amount: int) -> int:
        """Adds to a whole number, which begins at 0, and returns the sum. Raises TimeoutError as `set`."""
        return self._control.call("add", key, str(amount).encode()).number

    def check(self, keys: Sequence[str]) -> bool:
        """Returns True if all keys are there, without waiting for them. Raises TimeoutError as `set`."""
        return all(self._control.call("check", key).number for key in keys)
