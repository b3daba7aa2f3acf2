"""torch's rendezvous over our backend: who counts as alive, when a round begins, what is never unpickled."""

from __future__ import annotations

import inspect
import os
import pickle
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousStateError, dynamic_rendezvous
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousSettings,
    RendezvousTimeout,
    _BackendRendezvousStateHolder,
    _NodeDesc,
    _RendezvousState,
)

from elasticd.rendezvous import restart_mode
from elasticd.rendezvous.backend import Backend
from elasticd.rendezvous.errors import RendezvousOver
from elasticd.rendezvous.restart_mode import RestartHandler
from elasticd.rendezvous.torch_state import TorchRendezvousState, name_methods_quickly
from elasticd.wire import unix_socket
from elasticd.wire.rendezvous import RoundAnswer, Torchrun

#: Before any test has it replaced.
TORCHS_OWN = dynamic_rendezvous.get_method_name
A, B, C = (_NodeDesc(f"host-{name}", 7, 0) for name in "abc")


class Agent:
    """An agent and its store in a few lines: compare and set, and who is there."""

    def __init__(self) -> None:
        self.value, self.token = b"", 0
        self.torchruns: dict[str, Torchrun] = {}
        self.patience = 0.0
        self.written = 0
        self._after: list[Callable[[], None]] = []

    def after(self, reads: int, then: Callable[[], None]) -> None:
        """Calls `then` before the read that follows so many."""
        self._after = [then, *[lambda: None] * reads]

    def present(self, name: str, store: str, *, left: bool = False, at_work: object = None) -> None:
        """As `AgentRequests.present`; who is there is said by `be`."""

    def close(self) -> None:
        """As `AgentRequests.close`."""

    def be(self, status: str, *nodes: _NodeDesc) -> None:
        for node in nodes:
            self.torchruns[str(node)] = Torchrun(node="n", store="", status=status, reason="slow")  # type: ignore[arg-type]

    def read(self) -> RoundAnswer:
        if self._after:
            self._after.pop()()
        return RoundAnswer(id=1, value=self.value, token=self.token, torchruns=dict(self.torchruns))

    def write(self, value: bytes, token: int) -> RoundAnswer:
        self.written += 1
        done = token == self.token
        if done:
            self.value, self.token = value, self.token + 5
        return RoundAnswer(id=1, value=self.value, token=self.token, done=done, torchruns=dict(self.torchruns))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def agent() -> Agent:
    return Agent()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def backend(agent: Agent, clock: Clock) -> Backend:
    made = Backend(agent, least=1, grace=5.0, settle=1.0, clock=clock)  # type: ignore[arg-type]
    made.me = str(A)
    return made


def state(*nodes: _NodeDesc, complete: bool = False, closed: bool = False) -> _RendezvousState:
    """A round of these, whose heartbeats are of yesterday: nobody writes them any more."""
    made = _RendezvousState()
    made.complete, made.closed = complete, closed
    yesterday = datetime.now(UTC) - timedelta(days=1)
    for rank, node in enumerate(nodes):
        made.participants[node] = rank
        made.last_heartbeats[node] = yesterday
    if not complete:
        made.deadline = datetime.now(UTC) + timedelta(hours=1)
    return made


def holder(backend: Backend) -> _BackendRendezvousStateHolder:
    """torch's own: what it makes of what we say."""
    settings = RendezvousSettings(
        "job", 1, 3, RendezvousTimeout(), timedelta(seconds=5), keep_alive_max_attempt=3
    )
    return _BackendRendezvousStateHolder(backend, settings, cache_duration=0)


def seen(backend: Backend, agent: Agent, given: _RendezvousState) -> _RendezvousState:
    agent.value, agent.token = pickle.dumps(given), agent.token + 1
    torchs = holder(backend)
    torchs.sync()
    return torchs.state


def test_no_state_is_none_and_the_first_write_makes_it(backend: Backend) -> None:
    assert backend.get_state() is None
    written = backend.set_state(pickle.dumps(state(A)), None)
    assert written is not None
    _, token, done = written
    assert (token, done) == (5, True)


def test_write_with_an_old_token_changes_nothing_and_tells_what_is_there(
    backend: Backend, agent: Agent
) -> None:
    agent.be("here", A, B)
    _, token, _ = backend.set_state(pickle.dumps(state(A)), None) or (b"", 0, False)
    backend.set_state(pickle.dumps(state(A, B)), token)
    late = backend.set_state(pickle.dumps(state(A)), token)
    assert late is not None
    assert late[1:] == (10, False)
    assert TorchRendezvousState(late[0]).participants == {str(A), str(B)}


def test_torch_keeps_the_living_whatever_their_heartbeats_say_and_drops_the_dead_at_once(
    backend: Backend, agent: Agent
) -> None:
    agent.be("here", A, B)
    agent.be("died", C)
    assert set(seen(backend, agent, state(A, B, C, complete=True)).participants) == {A, B}
    agent.be("out", B)
    assert set(seen(backend, agent, state(A, B, C, complete=True)).participants) == {A}


def test_node_whose_agent_is_away_is_waited_for_while_workers_run_and_not_while_joining(
    backend: Backend, agent: Agent, clock: Clock
) -> None:
    agent.be("here", A)
    backend.patient = True
    partners = frozenset(map(str, (A, B)))
    assert set(seen(backend, agent, state(A, B, complete=True)).participants) == {A, B}
    assert backend.lost(partners) == ()
    clock.now += 4.9
    assert set(seen(backend, agent, state(A, B, complete=True)).participants) == {A, B}
    clock.now += 0.2
    assert set(seen(backend, agent, state(A, B, complete=True)).participants) == {A}
    assert backend.lost(partners) == (str(B),)
    agent.be("here", B)  # its agent came back
    seen(backend, agent, state(A, B, complete=True))
    assert backend.lost(partners) == ()
    del agent.torchruns[str(B)]
    backend.patient = False
    assert set(seen(backend, agent, state(A, B, complete=True)).participants) == {A}


def test_node_that_left_in_good_order_is_not_lost(backend: Backend, agent: Agent) -> None:
    agent.be("here", A)
    agent.be("left", B)
    backend.patient = True
    seen(backend, agent, state(A, B, complete=True))
    assert backend.lost(frozenset(map(str, (A, B)))) == ()


def test_round_begins_a_moment_after_all_that_live_have_joined_it(
    backend: Backend, agent: Agent, clock: Clock
) -> None:
    def due(given: _RendezvousState) -> bool:
        deadline = seen(backend, agent, given).deadline
        return deadline is not None and deadline < datetime.now(UTC)

    agent.be("here", A, B)
    clock.now += 50
    assert not due(state(A))  # b lives and has not joined
    clock.now += 50
    assert not due(state(A))
    assert not due(state(A, B))
    clock.now += 0.9
    assert not due(state(A, B))
    clock.now += 0.2
    assert due(state(A, B))
    agent.be("here", C)
    assert not due(state(A, B))
    agent.be("died", C)
    assert not due(state(A, B))
    clock.now += 1.1
    assert due(state(A, B))


def test_closed_round_that_nobody_is_left_of_is_a_new_one(backend: Backend, agent: Agent) -> None:
    agent.be("here", B)
    assert seen(backend, agent, state(B, C, closed=True, complete=True)).closed
    agent.be("left", B)
    fresh = seen(backend, agent, state(B, C, closed=True, complete=True))
    assert not fresh.closed
    assert fresh.participants == {}
    assert fresh.round == 1
    # One's own part in a closed round is no reason to begin anew.
    assert seen(backend, agent, state(A, closed=True, complete=True)).closed


def test_bytes_that_are_no_state_of_torchs_are_refused_and_nothing_of_them_runs(agent: Agent) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, ("exit 7",)

    for data in (pickle.dumps(Evil()), b"garbage", pickle.dumps([1, 2])):
        with pytest.raises(RendezvousStateError, match="cannot be read"):
            TorchRendezvousState(data)


@pytest.fixture
def handler(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> RestartHandler:
    """It had a part in the last round, with B."""
    monkeypatch.setenv(unix_socket.TORCHRUN_VARIABLE, "")  # the handler sets it
    monkeypatch.setattr(restart_mode, "_STANDBY_SECONDS", 0.0)
    backend = Backend(agent, least=1, grace=5.0, settle=1.0)  # type: ignore[arg-type]
    made: RestartHandler = RestartHandler.from_backend("job", HashStore(), backend, 1, 3, "127.0.0.1")
    made.equip(agent, backend)  # type: ignore[arg-type]
    made._partners = frozenset((backend.me, str(B)))
    return made


def test_one_that_stands_by_ends_with_the_job_and_closes_nothing(handler: RestartHandler, agent: Agent) -> None:
    me = handler._this_node
    agent.value, agent.token = pickle.dumps(state(B, complete=True)), 3
    agent.be("out", me)
    agent.be("here", B)

    def the_other_is_done() -> None:
        agent.be("left", B)
        agent.value = pickle.dumps(state(B, complete=True, closed=True))

    agent.after(3, the_other_is_done)
    with pytest.raises(RendezvousOver, match="is over"):
        handler.next_rendezvous()
    assert handler.shutdown()
    assert agent.written == 0


def test_closing_a_round_that_nobody_is_left_of_takes_one_write(handler: RestartHandler, agent: Agent) -> None:
    agent.value, agent.token = pickle.dumps(state(B, complete=True)), 3
    agent.be("left", B)
    assert handler.shutdown()
    assert agent.written == 1
    assert TorchRendezvousState(agent.value).closed


def test_torchs_events_are_named_as_torch_names_them_without_a_look_at_every_module(
    handler: RestartHandler, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    monkeypatch.setattr(
        dynamic_rendezvous, "construct_and_record_rdzv_event", lambda name, **_: names.append(name)
    )
    monkeypatch.setattr(dynamic_rendezvous, "get_method_name", TORCHS_OWN)  # put back in the end
    looks: list[object] = []
    frames = inspect.getouterframes  # `inspect.stack` calls it
    monkeypatch.setattr(inspect, "getouterframes", lambda *of: looks.append(of) or frames(*of))

    def closing() -> str:
        return record()

    def record() -> str:
        return str(dynamic_rendezvous.get_method_name())

    assert closing() == "closing"
    assert looks, "torch does without it: name_methods_quickly is not needed any more"
    looks.clear()
    name_methods_quickly()
    assert closing() == "closing"
    agent.value, agent.token = pickle.dumps(state(B, complete=True)), 3
    agent.be("left", B)
    assert handler.shutdown()
    assert "RestartHandler._close" in names
    assert not looks
