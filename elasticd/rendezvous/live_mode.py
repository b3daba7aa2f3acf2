"""The rendezvous of the live mode: one torchrun, its agent, and nobody else.

A torchrun asks its agent to take part in the job, starts its workers once the nodes are
complete, and is left alone from then on: nodes that come or go never restart it. What torchrun's agents would
exchange over a shared store (how many workers each starts, hence the ranks) goes through the leader's store,
where a late node finds it without the others; each computes the ranks for itself. The rest, the exit barrier
above all, stays in the process, so that a torchrun that ends waits for nobody.

A script that makes no `elasticd.Job` calls torch's `init_process_group`, which connects to MASTER_PORT. A
socket listens there for that alone: a worker that connects cannot train in this mode. One that is long in
coming to its Job does not connect, however long it takes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import socket
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Literal

import msgspec
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from elasticd.codec.message import encode
from elasticd.rendezvous.agent_requests import heard
from elasticd.rendezvous.errors import ModeSwitch, RendezvousOver, RendezvousRefusal
from elasticd.rendezvous.workers_end import WorkersEnd
from elasticd.system.launch_age import FRESH_VARIABLE, age_seconds
from elasticd.system.torchrun_outcome import OUTCOME_VARIABLE, signal_name
from elasticd.version import __version__
from elasticd.wire import unix_socket
from elasticd.wire.rendezvous import Join, Joined, Leave, WorkerFailure
from elasticd.wire.worker import Closed, Rejected, Shutdown, StoreAnswer, StoreCall, ToWorker

BACKEND = "elasticd"
#: Seconds to wait for an agent that is being started again. Its workers wait as long for it.
RETURN_SECONDS = 120.0
#: Seconds until the next question, while workers of the job's last start have not ended.
_LATER_SECONDS = 0.5
#: torch's own keys: what each agent says of itself, the ranks that follow, the end of the exit barrier.
ROLE_INFO = "torchelastic/role_info/"
ASSIGNED_RANKS = "torchelastic/assigned_ranks/"
EXIT_BARRIER = "torchelastic/agent/terminal_state/last_member"
#: In the leader's store; every round of a job says the same there.
PREFIX = "rdzv/"
_STORE_SECONDS = 60.0
#: Seconds for another torchrun to say what it is: all say it as soon as the job's nodes are complete.
_INFO_SECONDS = 10.0


class LiveHandler(RendezvousHandler):
    """One torchrun's part in a job. switches: a script without a Job is not refused, but ends this torchrun by
    `ModeSwitch`."""

    #: The leader compares the failures of all workers.
    ends_repeated = False

    def __init__(
        self, parameters: RendezvousParameters, agent_seconds: float, *, switches: bool = False
    ) -> None:
        self._job = parameters.run_id
        self._nodes = (parameters.min_nodes, parameters.max_nodes)
        self._path = parameters.endpoint or unix_socket.default_path()
        # The workers, which torchrun starts from this process, are to find the same agent.
        os.environ[unix_socket.SOCKET_VARIABLE] = self._path
        self._agent_seconds = agent_seconds
        self._agent: AgentCalls | None = None
        self._switches = switches
        self._failure: WorkerFailure | None = None
        self._how: Literal["", "finished", "restart"] = ""
        self._asked_for_group = _listener()
        self._workers = WorkersEnd()

    def get_backend(self) -> str:
        """As `RendezvousHandler.get_backend`: the value of `--rdzv-backend`."""
        return BACKEND

    def get_run_id(self) -> str:
        """As `RendezvousHandler.get_run_id`: the value of `--rdzv-id`, which is the job's name."""
        return self._job

    @property
    def use_agent_store(self) -> bool:
        """As `RendezvousHandler.use_agent_store`: always True."""
        # No worker is to serve a store at MASTER_ADDR: there is no group over the whole job.
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Blocks until the job's nodes are complete. Raises RendezvousRefusal or RendezvousOver, and SystemExit
        where a signal has told this torchrun to end."""
        self._workers.end_left()
        self._workers.leave_if_told()
        joined = self._join()
        assert self._agent is not None
        store = RankStore(self._agent, joined)
        host, port = self._asked_for_group.getsockname()
        return RendezvousInfo(store, joined.node_rank, joined.nodes, RendezvousStoreInfo(host, port))

    def is_closed(self) -> bool:
        """Always False: `next_rendezvous` raises RendezvousOver where the job is over."""
        return False

    def set_closed(self) -> None:
        """A job ends by its last step, not by one of its torchruns."""

    def num_nodes_waiting(self) -> int:
        """Always 0: nodes that come or go restart nobody. torchrun asks all the while its workers run.

        Raises ModeSwitch or RendezvousRefusal where a worker asks for torch's process group, and RendezvousOver
        or RendezvousRefusal where the job ended before this worker made its Job.
        """
        self._workers.watch(leave=True)
        if self._agent is not None and (news := self._agent.news()) is not None:
            self._turned_away(news)
        if select.select([self._asked_for_group], [], [], 0)[0]:
            self._without_job()
        return 0

    def _without_job(self) -> None:
        """The worker called `init_process_group` before it made a Job: it waits in vain. (Once there is a Job
        that call fails by itself: `elasticd.runtime.api.hello`.)"""
        self._how = "restart"
        if self._switches:
            raise ModeSwitch("the script makes no elasticd.Job or elasticd.live: it goes on in restart mode")
        raise RendezvousRefusal(
            "the script calls torch.distributed.init_process_group, and made no elasticd.Job before: such a "
            "script runs in restart mode ('elasticd run' without --mode, or torchrun "
            "--rdzv-conf=mode=restart); a script with a Job leaves that call out"
        )

    def workers_started(self, workers: int, world: int, restarts: int) -> None:
        """Nothing follows: each worker says itself that it is there."""

    def worker_failed(self, failure: WorkerFailure, device: str, *, final: bool) -> None:
        """The worker ended by this failure; the agent hears of it with what this torchrun says next."""
        self._failure = failure

    def ends_by(self, number: int) -> None:
        """A signal ends this torchrun, and torch leaves no rendezvous then: the agent hears of it."""
        self.leave(signal_name(number))

    def workers_finished(self) -> None:
        """The workers ended with exit code 0."""
        self._failure, self._how = None, "finished"

    def shutdown(self) -> bool:
        """Tells the agent that this torchrun leaves the job, and hangs up. True; harmless when called again.
        Raises SystemExit where a signal has told this torchrun to end."""
        self._asked_for_group.close()
        if sys.exc_info()[0] is not None:  # a worker failed for good
            self._workers.end_left()
        self.leave(self._workers.signal)
        self._workers.leave_if_told()
        return True

    def leave(self, signal: str) -> None:
        """Tells the agent that this torchrun leaves, by this signal or (empty) by itself; harmless when called
        again."""
        if self._agent is not None:
            failure = None if signal else self._failure
            self._agent.leave(Leave(job=self._job, failure=failure, how=self._how, signal=signal))
            self._agent = None

    def _join(self) -> Joined:
        slot = os.environ.get(unix_socket.SLOT_VARIABLE)
        join = Join(
            job=self._job,
            min_nodes=self._nodes[0],
            max_nodes=self._nodes[1],
            pid=os.getpid(),
            slot=int(slot) if slot else None,
            release=__version__,
            failure=self._failure,
            age=age_seconds(os.environ),
            fresh=bool(os.environ.get(FRESH_VARIABLE)),
        )
        patient_until = time.monotonic() + RETURN_SECONDS
        while True:
            if self._agent is None:
                self._agent = AgentCalls(self._path, self._agent_seconds)
                self._agent_seconds = max(self._agent_seconds, RETURN_SECONDS)
            answer = self._agent.join(join)
            if answer is None:
                # The agent ended; its successor is asked anew, if there is one.
                self._agent = None
            elif isinstance(answer, Joined):
                return answer
            elif isinstance(answer, Rejected) and answer.later and time.monotonic() < patient_until:
                time.sleep(_LATER_SECONDS)
            else:
                self._turned_away(answer)

    def _turned_away(self, answer: Closed | Rejected | Shutdown) -> None:
        self.shutdown()
        if isinstance(answer, Closed):
            if not os.environ.get(OUTCOME_VARIABLE):  # else `elasticd run` says so, once
                print(f"elasticd: nothing to do: {answer.reason}", file=sys.stderr, flush=True)
            raise RendezvousOver(answer.reason)
        if isinstance(answer, Rejected) and answer.restart and self._switches:
            raise ModeSwitch(answer.reason)
        raise RendezvousRefusal(answer.reason)


def _listener() -> socket.socket:
    """The socket at which workers ask for torch's process group. Nobody answers there."""
    return socket.create_server(("127.0.0.1", 0))


class AgentCalls:
    """Questions to the agent, one at a time, over a connection of this torchrun's own."""

    def __init__(self, path: str, seconds: float) -> None:
        self._path, self._ids = path, itertools.count(1)
        self._end: Closed | None = None  # the job ended while something else was asked
        self._joined: Join | None = None
        try:
            self._sock = unix_socket.connect(path, seconds)
        except OSError as error:
            raise RendezvousRefusal(str(error)) from None

    def join(self, body: Join) -> Joined | Closed | Rejected | Shutdown | None:
        """Ask to take part and wait for the answer; None when the agent is gone."""
        self._joined = body
        # Whoever hung up may have said why before.
        with contextlib.suppress(OSError):
            unix_socket.send(self._sock, encode(body))
        for answer in self._answers(None, first=True):
            if isinstance(answer, Joined | Closed | Rejected | Shutdown):
                return answer
        self._sock.close()
        return None

    def call(self, op: Any, key: str, value: bytes = b"", seconds: float = _STORE_SECONDS) -> StoreAnswer:
        """A call on the leader's store. Raises RuntimeError, as torch's stores do, when it fails."""
        call = StoreCall(id=next(self._ids), op=op, key=key, value=value, seconds=seconds)
        unix_socket.send(self._sock, encode(call))
        # The agent answers for the leader a little after the deadline, at the latest.
        for answer in self._answers(seconds + 5.0):
            if isinstance(answer, StoreAnswer) and answer.id == call.id:
                if answer.error is not None:
                    raise RuntimeError(f"{op} {key} in the leader's store: {answer.error}")
                return answer
            if isinstance(answer, Rejected | Shutdown):
                raise RendezvousRefusal(answer.reason)
            if isinstance(answer, Closed):
                self._end = answer
        raise RuntimeError(f"{op} {key} in the leader's store: no answer from the agent")

    def news(self) -> Closed | Rejected | Shutdown | None:
        """The message that the agent sent unasked, if any: the job is over."""
        if self._end is not None:
            return self._end
        while select.select([self._sock], [], [], 0)[0]:
            data = unix_socket.receive(self._sock)
            if data is None:
                return None  # the agent ended: its successor is asked when there is a question
            answer = heard(data)
            if isinstance(answer, Closed | Rejected | Shutdown):
                return answer
        return None

    def leave(self, body: Leave) -> None:
        """Says that this torchrun ends, if anybody still listens. An agent that was started since knows this
        torchrun by its workers' environment alone, and would end what these left running on purpose."""
        try:
            unix_socket.send(self._sock, encode(body))
        except OSError:
            with contextlib.suppress(OSError):
                self._leave_anew(body)
        finally:
            self._sock.close()

    def _leave_anew(self, body: Leave) -> None:
        if self._joined is None:
            return
        known = msgspec.structs.replace(self._joined, age=None, fresh=False)  # it begins no job that is over
        with contextlib.closing(unix_socket.connect(self._path, 0.0)) as sock:
            for message in (known, body):
                unix_socket.send(sock, encode(message))

    def _answers(self, seconds: float | None, *, first: bool = False) -> Iterator[ToWorker]:
        """The messages of the agent, until it hangs up or `seconds` have passed."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            self._sock.settimeout(None if deadline is None else max(0.001, deadline - time.monotonic()))
            try:
                data = unix_socket.receive(self._sock)
            except TimeoutError:
                return
            finally:
                self._sock.settimeout(None)
            if data is None:
                return
            if (answer := heard(data, first=first)) is not None:
                yield answer


class RankStore(Store):
    """torchrun's own store: private to this process, but for `role_info`, which the leader keeps for all.

    The ranks of a node are computed from that (the workers of the nodes before it come first, as torch counts
    them), so that no node waits for node 0 to assign them. torch's own `multi_get` and `multi_set` call `get`
    and `set` key by key; no call here depends on torch's `timeout`. torchrun neither deletes nor counts keys.
    """

    def __init__(self, agent: AgentCalls, joined: Joined) -> None:
        super().__init__()
        self._agent = agent
        self._joined = joined
        self._values: dict[str, bytes] = {EXIT_BARRIER: b"1"}
        self._own = b""

    def set(self, key: str, value: str | bytes) -> None:
        """Keeps the value in this process. A value under `ROLE_INFO` goes to the leader's store too; if that
        fails it is printed, not raised."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = data
        if key.startswith(ROLE_INFO):
            self._own = data
            self._publish_workers(key, data)

    def _publish_workers(self, key: str, data: bytes) -> None:
        """The others are to know how many workers this node has. Who starts alone needs nobody to know."""
        try:
            self._agent.call("set", PREFIX + key, data)
        except (RuntimeError, OSError) as error:
            if self._joined.nodes > 1:
                warning = f"the other nodes do not hear how many workers this one has ({error})"
                print(f"elasticd: {warning}", file=sys.stderr, flush=True)

    def get(self, key: str) -> bytes:
        """The value. It waits for another node's `ROLE_INFO` for `_INFO_SECONDS` at most, and then takes that
        node to be like this one. Ranks are computed. Raises RuntimeError for any other key that is absent."""
        if key.startswith(ASSIGNED_RANKS):
            return self._assigned(int(key.removeprefix(ASSIGNED_RANKS)))
        if key not in self._values:
            if not key.startswith(ROLE_INFO):
                raise RuntimeError(f"{key} is not in this torchrun's private store, and nobody else sets it")
            self._values[key] = self._other(key)
        return self._values[key]

    def _other(self, key: str) -> bytes:
        """The values that another torchrun gave of itself. A leader that took over since has not heard it, and
        an agent may just be ending: then the other is taken to be like this one, for ranks are stale after a
        change."""
        try:
            return self._agent.call("get", PREFIX + key, seconds=_INFO_SECONDS).value
        except (RuntimeError, OSError):
            return self._own

    def add(self, key: str, amount: int) -> int:
        """The counter's new value; an absent one counts from 0. No other torchrun adds to it."""
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def check(self, keys: list[str]) -> bool:
        """Returns True if all keys are in this process or are ranks to compute. What only the leader's store
        has counts as absent."""
        return all(key in self._values or key.startswith(ASSIGNED_RANKS) for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Reads each key as `get`, with the waits and errors of `get`. `timeout` is not used."""
        for key in keys:
            self.get(key)

    def _assigned(self, node: int) -> bytes:
        """[first rank, world size, first rank in the role, role's size], as torch's own agents write it."""
        infos = [json.loads(self.get(f"{ROLE_INFO}{i}")) for i in range(self._joined.nodes)]
        role = infos[node]["role"]
        sizes = [int(info["local_world_size"]) for info in infos]
        alike = [size if info["role"] == role else 0 for size, info in zip(sizes, infos, strict=True)]
        return json.dumps([sum(sizes[:node]), sum(sizes), sum(alike[:node]), sum(alike)]).encode()
