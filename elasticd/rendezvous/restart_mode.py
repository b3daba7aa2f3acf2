"""The rendezvous of the restart mode: torch's own DynamicRendezvousHandler, for any torchrun script unmodified.

torch restarts all workers when one fails or a node comes. What elasticd adds: no store to point every node at
(rounds are kept in etcd), a node's death is known within a moment and not after heartbeats, healthy workers
whose partner is gone are restarted without waiting for their collectives to fail, and a round begins as soon
as all that live have joined it. The workers' store is served anew in each round by its first node, so that no
node is one that the job depends on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import msgspec
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

from elasticd.rendezvous.agent_requests import AgentRequests
from elasticd.rendezvous.backend import Backend
from elasticd.rendezvous.device_slots import launched_slots, slots_of
from elasticd.rendezvous.errors import RendezvousOver, RendezvousRefusal
from elasticd.rendezvous.sigterm_echo import ignore_echoes
from elasticd.rendezvous.torch_state import first, name_methods_quickly, world_size
from elasticd.rendezvous.worker_failure import cause, ending, failure_of
from elasticd.rendezvous.workers_end import WorkersEnd
from elasticd.system.torchrun_outcome import end_signal
from elasticd.wire import unix_socket
from elasticd.wire.rendezvous import AtWork, WorkerFailure

#: Seconds for a connection to the store of a round, and for torchruns to meet there.
_STORE_SECONDS = timedelta(seconds=15)
_MEET_SECONDS = 60.0
#: Seconds that the first node serves the store on when it is done, for those that still read from it.
_LINGER_SECONDS = 3.0
#: Seconds for a last word to an agent that is away.
_FAREWELL_SECONDS = 2.0
_POLL_SECONDS = 0.05
_STANDBY_SECONDS = 0.5


class RoundBroken(RendezvousConnectionError):
    """A node was lost between its joining and the start of the workers: the round is made anew."""


class JobClosed(RendezvousRefusal, RendezvousClosedError):
    """Another torchrun ended the job. Uncaught it ends this one with a message and no traceback."""


def restart_handler(
    parameters: RendezvousParameters, agent_seconds: float, *, grace: float, settle: float
) -> RestartHandler:
    """The handler for torchrun's options; seconds are those of `AgentRequests` and `Backend`. Raises
    RendezvousRefusal for options that cannot work, or without an agent."""
    try:
        timeout = RendezvousTimeout(
            *(_seconds(parameters, f"{name}_timeout") for name in ("join", "last_call", "close", "heartbeat"))
        )
    except ValueError as error:
        raise RendezvousRefusal(f"--rdzv-conf: {error}") from None
    path = parameters.endpoint or unix_socket.default_path()
    # The workers, which torchrun starts from this process, are to find the same agent.
    os.environ[unix_socket.SOCKET_VARIABLE] = path
    name_methods_quickly()
    requests = AgentRequests(path, parameters.run_id, agent_seconds, launched_slots(os.environ))
    backend = Backend(requests, least=parameters.min_nodes, grace=grace, settle=settle)
    handler: RestartHandler = RestartHandler.from_backend(
        parameters.run_id,
        HashStore(),  # each round has a store of its own
        backend,
        parameters.min_nodes,
        parameters.max_nodes,
        parameters.local_addr or requests.address,
        timeout,
    )
    handler.equip(requests, backend)
    return handler


class RestartHandler(DynamicRendezvousHandler):
    """torch's handler with a store of each round's own, and with what agents know of who lives."""

    #: No leader hears of each worker: a script that fails the same way twice ends here.
    ends_repeated = True
    _requests: AgentRequests
    _backend: Backend

    def equip(self, requests: AgentRequests, backend: Backend) -> None:
        """Adds what torch's `from_backend` cannot pass to a constructor. Call it once, before the first round.
        It sets an environment variable that the workers inherit."""
        self._requests, self._backend = requests, backend
        self._backend.me = str(self._this_node)
        # By it the agent knows the workers, if this process is killed and leaves them behind.
        os.environ[unix_socket.TORCHRUN_VARIABLE] = self._backend.me
        self._partners: frozenset[str] = frozenset()
        self._workers = WorkersEnd()
        self._server: TCPStore | None = None
        self._address, self._at_work = "", AtWork(slots=launched_slots(os.environ))
        self._info: RendezvousInfo | None = None
        self._starts = 0

    def next_rendezvous(self) -> RendezvousInfo:
        """Blocks until a round is complete and its torchruns have met. Raises JobClosed or RendezvousOver."""
        self._workers.end_left()
        self._backend.patient = False
        self._requests.patience = self._settings.timeout.join.total_seconds()
        while True:
            try:
                self._stand_by()
                self._serve()
                info = super().next_rendezvous()
                self._partners = frozenset(map(str, self._state_holder.state.participants))
                self._meet(info)
                break
            except RoundBroken as broken:
                print(f"elasticd: {broken}; another round", file=sys.stderr, flush=True)
            except RendezvousOver:
                raise
            except RendezvousGracefulExitError as over:
                raise RendezvousOver(str(over)) from None
            except RendezvousClosedError:
                raise JobClosed(
                    f"job {self.get_run_id()!r} was ended by one of its torchruns: see the first error there"
                ) from None
        # For `elasticd.watch()`, in the workers that are started next.
        self._info = info
        place = (self._state_holder.state.round, info.world_size, self._settings.min_nodes)
        os.environ[unix_socket.ROUND_VARIABLE] = ",".join(map(str, place))
        self._backend.patient = True
        self._requests.patience = 0.0
        self._at_work = msgspec.structs.replace(
            self._at_work, phase="waits", round=self._state_holder.state.round, world=0
        )
        return info

    def num_nodes_waiting(self) -> int:
        """Nodes that wait to join, or that were lost: for either the workers start again. An agent or a store
        that is away restarts nobody."""
        ignore_echoes()
        self._workers.watch(leave=False)
        self._notice_workers()
        try:
            waiting = super().num_nodes_waiting()
        except RendezvousError:
            return 0
        if waiting or self._backend.out:
            return max(waiting, 1)
        if self._this_node not in self._state_holder.state.participants:
            return 1  # the others took us for dead and have gone on
        return len(self._backend.lost(self._partners))

    def workers_started(self, workers: int, world: int, restarts: int) -> None:
        """So many workers of this node, of `world` in all, run from now on, after so many restarts. Raises
        RendezvousRefusal where another job has their devices."""
        slots = slots_of(os.environ, workers)
        self._report(obeys=True, phase="runs", workers=workers, world=world, restarts=restarts, slots=slots)

    def _notice_workers(self) -> None:
        """Tells of workers that nobody told of: plain torchrun starts them, and says nothing."""
        if self._at_work.phase == "waits" and self._workers.count and self._info is not None:
            workers = self._workers.count
            self.workers_started(workers, world_size(self._info, workers), self._starts)
            self._starts += 1

    def worker_failed(self, failure: WorkerFailure, device: str, *, final: bool) -> None:
        """The worker of a device ended by this failure; `final`: no other is started."""
        if not final:
            again = self._at_work.restarts + 1
            text = f"elasticd: worker {device} {ending(failure)}: all start again ({again})"
            print(text, file=sys.stderr, flush=True)
        self._failed(failure, final=final)

    def _failed(self, failure: WorkerFailure, *, final: bool) -> None:
        failures = self._at_work.failures + 1
        self._report(phase="failed" if final else "waits", failure=failure, failures=failures)

    def ends_by(self, number: int) -> None:
        """A signal ends this torchrun and its workers."""
        self._report(ended_by=end_signal() or signal.Signals(number).name)

    def workers_finished(self) -> None:
        """The workers ended with exit code 0."""
        self._report(phase="finished")

    def _report_end(self, error: BaseException | None) -> None:
        """Tells how the workers ended where nobody told of it: by this exception of torchrun's, or none."""
        if self._at_work.phase != "runs":
            return
        if error is None:
            self.workers_finished()
        elif isinstance(error, ChildFailedError):
            failures = [failure_of("", failure.exitcode) for failure in error.failures.values()]
            self._failed(cause(failures), final=True)

    def _report(self, *, obeys: bool = False, **changes: Any) -> None:
        """For the status, and to hold the devices: an agent that is away costs nothing. obeys: raises
        RendezvousRefusal where the agent says no."""
        self._at_work = msgspec.structs.replace(self._at_work, **changes)
        try:
            self._requests.present(self._backend.me, self._address, at_work=self._at_work)
        except RendezvousRefusal:
            if obeys:
                raise
        except RendezvousError:
            pass

    def shutdown(self) -> bool:
        """Ends this torchrun's part; as with torch's own backends the job is over with it, if it had a part."""
        failed = sys.exc_info()[0] is not None
        self._report_end(sys.exception())
        if failed:
            self._workers.end_left()
        self._requests.patience = _FAREWELL_SECONDS
        self._backend.closing = True
        if self._partners:
            closed = super().shutdown()
        else:
            self._stop_heartbeats()
            closed = True
        if not failed:
            # A torchrun that failed dies without a word, and the others know it.
            with contextlib.suppress(RendezvousError, RendezvousRefusal):
                self._requests.present(self._backend.me, "", left=True, at_work=self._at_work)
                self._linger()
        self._requests.close()
        return closed

    def _stand_by(self) -> None:
        """A torchrun that was excluded waits here without workers, for the others' end or their need of it.
        Raises RendezvousOver."""
        self._backend.get_state()
        if not self._backend.out:
            return
        self._partners = frozenset()  # the round that the others are in is not this torchrun's to close
        print(f"elasticd: this node stands by: {self._backend.out}", file=sys.stderr, flush=True)
        while self._backend.out:
            time.sleep(_STANDBY_SECONDS)
            self._backend.get_state()
            # Looked at first: when the job is over nobody else is left, and this node would be needed.
            if self._backend.closed:
                raise RendezvousOver(f"job {self.get_run_id()!r} is over")

    def _serve(self) -> None:
        """A store for the next round, told to the others before it is joined; this node may be its first."""
        address = self._this_node.addr
        try:
            self._server = TCPStore(address, 0, is_master=True, multi_tenant=True, timeout=_STORE_SECONDS)
        except RuntimeError as error:
            raise RendezvousRefusal(
                f"cannot serve a store at {address} ({error}): set address in section [agent] of the "
                "configuration, or --local-addr, to one of this node's"
            ) from None
        self._bootstrap_store_info = None
        self._shared_tcp_store_server = None
        self._address = f"{address}:{self._server.port}"
        self._requests.present(self._backend.me, self._address, at_work=self._at_work)

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> TCPStore:
        assert self._server is not None
        return self._server

    def _get_store(self) -> Store:
        """torch's prefix over the store that the round's first node serves. Raises RoundBroken."""
        leader = first(self._state_holder.state)
        if leader == self._backend.me:
            assert self._server is not None
            return self._wrap_store(self._server)
        address = self._address_of(leader)
        host, _, port = address.rpartition(":")
        try:
            return self._wrap_store(TCPStore(host, int(port), is_master=False, timeout=_STORE_SECONDS))
        except RuntimeError as error:
            raise RoundBroken(f"the store of {leader} cannot be reached at {address} ({error})") from None

    def _address_of(self, leader: str) -> str:
        deadline = time.monotonic() + _STORE_SECONDS.total_seconds()
        while True:
            known = self._backend.torchruns.get(leader)
            if known is not None and known.store:
                return known.store
            if time.monotonic() >= deadline or (known is not None and known.status != "here"):
                raise RoundBroken(f"{leader} was lost, which was to serve the round's store")
            time.sleep(_POLL_SECONDS)
            self._backend.get_state()

    def _meet(self, info: RendezvousInfo) -> None:
        """All torchruns of the round wait for each other here, where one that is lost costs a round; later
        torch would wait for it in vain. Raises RoundBroken."""
        deadline = time.monotonic() + _MEET_SECONDS
        keys = [f"elasticd/met/{rank}" for rank in range(info.world_size)]
        try:
            info.store.set(keys[info.rank], "1")
            while not info.store.check(keys):
                self._backend.get_state()
                lost = self._backend.lost(self._partners)
                if lost or time.monotonic() >= deadline:
                    raise RoundBroken(f"{', '.join(lost) or 'a node'} did not come to the round's store")
                time.sleep(_POLL_SECONDS)
        except RuntimeError as error:
            raise RoundBroken(f"the round's store was lost ({error})") from None

    def _linger(self) -> None:
        if first(self._state_holder.state) != self._backend.me:
            return
        deadline = time.monotonic() + _LINGER_SECONDS
        while time.monotonic() < deadline:
            self._backend.get_state()
            if not any(self._backend.lives(name) for name in self._partners - {self._backend.me}):
                return
            time.sleep(_POLL_SECONDS)


def _seconds(parameters: RendezvousParameters, key: str) -> timedelta | None:
    value = parameters.get_as_int(key)
    return None if value is None else timedelta(seconds=value)
