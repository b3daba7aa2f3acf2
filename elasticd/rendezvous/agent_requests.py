"""Requests of a torchrun to its agent: in restart mode over agents that end, and stores that rest."""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Callable

import msgspec
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from elasticd.backoff import Backoff
from elasticd.codec.message import encode
from elasticd.rendezvous.errors import RendezvousRefusal
from elasticd.version import __version__
from elasticd.wire import unix_socket
from elasticd.wire.rendezvous import Attend, Attending, AtWork, Present, ReadRound, RoundAnswer, WriteRound
from elasticd.wire.worker import Rejected, Shutdown, ToWorker, to_worker

#: Seconds for one answer; the agent itself waits for its store no longer than about that.
ANSWER_SECONDS = 10.0
#: Seconds between attempts: doubled from the first to the second.
_RETRY = (0.1, 1.0)
Question = Present | ReadRound | WriteRound


class AgentRequests:
    """Questions to the agent at `path`. `patience`: seconds for which a question is asked again while there is
    no agent, or the store behind it rests; at least once. `slots`: the devices that
    `elasticd run` chose for the workers. Thread-safe."""

    def __init__(self, path: str, job: str, agent_seconds: float, slots: tuple[int, ...] = ()) -> None:
        self.address = ""
        self.patience = 0.0
        self._path, self._job, self._slots = path, job, slots
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._present: Present | None = None
        self._sock: socket.socket | None = None
        try:
            self._connect(agent_seconds)
        except OSError as error:
            raise RendezvousRefusal(str(error)) from None

    def present(
        self, name: str, store: str, *, left: bool = False, at_work: AtWork | None = None
    ) -> RoundAnswer:
        """Say who this torchrun is; returns once the store has it. An agent that is started again hears it
        first."""
        known = self._present = Present(id=0, name=name, store=store, left=left, at_work=at_work)
        return self._ask(lambda number: msgspec.structs.replace(known, id=number))

    def read(self) -> RoundAnswer:
        """The state of the job's rendezvous, its token, and the torchruns that the store knows of. Raises
        RendezvousConnectionError without an answer in time, RendezvousRefusal where the agent says no."""
        return self._ask(lambda number: ReadRound(id=number))

    def write(self, value: bytes, token: int) -> RoundAnswer:
        """Writes the state if `token` is still its token (0: if there is none). The answer has the state that
        the store holds afterwards; its `done` says whether this one was written. Raises as `read`."""
        return self._ask(lambda number: WriteRound(id=number, value=value, token=token))

    def close(self) -> None:
        """Hangs up. A later question connects again."""
        with self._lock:
            self._hang_up()

    def _ask(self, question: Callable[[int], Question]) -> RoundAnswer:
        """Raises RendezvousConnectionError if no answer comes in time, RendezvousRefusal if it says no."""
        deadline = time.monotonic() + self.patience
        pause = Backoff(*_RETRY)
        with self._lock:
            while True:
                why = ""
                try:
                    if self._sock is None:
                        self._connect(0.0)
                    answer = self._exchange(question(next(self._ids)))
                    if not answer.error:
                        return answer
                    why = f"the store cannot be asked: {answer.error}"
                except OSError as error:
                    self._hang_up()
                    why = str(error)
                if time.monotonic() >= deadline:
                    raise RendezvousConnectionError(f"elasticd: {why}")
                time.sleep(pause.next())

    def _connect(self, seconds: float) -> None:
        self._sock = unix_socket.connect(self._path, seconds)
        self._sock.settimeout(ANSWER_SECONDS)
        attend = Attend(job=self._job, pid=os.getpid(), release=__version__, slots=self._slots)
        unix_socket.send(self._sock, encode(attend))
        welcome = self._receive(first=True)
        if not isinstance(welcome, Attending):
            raise ConnectionError(f"the agent said {type(welcome).__name__} where it was to say Attending")
        self.address = welcome.address
        if self._present is not None:
            answer = self._exchange(msgspec.structs.replace(self._present, id=next(self._ids)))
            if answer.error:  # the others would take this torchrun for lost: no question is asked before
                raise ConnectionError(f"the store does not know of this torchrun: {answer.error}")

    def _exchange(self, body: Question) -> RoundAnswer:
        assert self._sock is not None
        unix_socket.send(self._sock, encode(body))
        while True:
            answer = self._receive()
            if isinstance(answer, RoundAnswer) and answer.id == body.id:
                return answer

    def _receive(self, *, first: bool = False) -> ToWorker:
        assert self._sock is not None
        answer = None
        while answer is None:  # a message that this release does not know
            data = unix_socket.receive(self._sock)
            if data is None:
                raise ConnectionResetError("the agent ended")
            answer = heard(data, first=first)
        if isinstance(answer, Rejected | Shutdown):
            raise RendezvousRefusal(answer.reason)
        return answer

    def _hang_up(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None


def heard(data: bytes, *, first: bool = False) -> ToWorker | None:
    """A message of the agent; None for one to skip. Raises RendezvousRefusal for bytes that are none, and for
    the answer to the `first` message if its content cannot be decoded."""
    try:
        return to_worker(data, first=first)
    except msgspec.DecodeError as error:
        raise RendezvousRefusal(
            f"a message of the agent cannot be read ({error}): install the same release of elasticd for both"
        ) from None
