"""An exception where none may come: it costs the message, its client or its job's workers, not the agent."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from elasticd_agent import daemon, internal_errors
from elasticd_agent.daemon import Agent
from elasticd_agent.snapshots.service import SnapshotService
from elasticd_agent.worker_socket import Workers

from elasticd.machines.agent import machine
from elasticd.machines.agent.state import (
    AgentDrained,
    AgentPhase,
    AgentState,
    AgentTick,
    DoneRead,
    Ended,
    Event,
    HangUp,
    Heard,
    LinkDown,
    LinkUp,
    Opened,
    PlanRead,
    ProposalRead,
    Result,
    Said,
)
from elasticd.records import DoneRecord, Keys, NodeRecord, PlanRecord, encode
from elasticd.store.protocol import StoreError
from elasticd.testing.waiting import until
from elasticd.wire import unix_socket
from elasticd.wire.coordinator import Drain, ToClient
from elasticd.wire.rendezvous import Join, Joined, Leave
from elasticd.wire.worker import EmulatedSpeed, Hello, Rejected, Shutdown, StayedOnPlan, StoreAnswer, StoreCall
from tests.agent.support import CLUSTER, Leader, Node, Trainer, closing_all
from tests.agent.test_daemon import lost, plan
from tests.machines.agent_scene import hello, join, run, said
from tests.machines.hostile import Hostile

KEYS = Keys(cluster=CLUSTER)
Where = Callable[[AgentState, Any], bool]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with closing_all() as register:
        yield Node(register, tmp_path)


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch) -> Callable[[type, Where], None]:
    """Has the machine's handler of an event raise where this is true of the state and the event."""

    def inject(kind: type, where: Where) -> None:
        for (phase, known), handler in list(machine.TABLE.items()):
            if known is kind:
                monkeypatch.setitem(machine.TABLE, (phase, kind), raising(handler, where))  # type: ignore[arg-type]

    return inject


def raising(handler: machine.Handler, where: Where) -> machine.Handler:
    def handle(state: AgentState, event: Any, now: float) -> Result:
        if where(state, event):
            raise RuntimeError("a defect")
        return handler(state, event, now)

    return handle


def always(state: AgentState, event: Event) -> bool:
    return True


def tracebacks(caplog: pytest.LogCaptureFixture, what: str) -> int:
    return sum(record.exc_info is not None and what in record.message for record in caplog.records)


@pytest.fixture
def defects(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """Those that the agent outlives, as they come."""
    outlived, raised_at = list[Exception](), internal_errors._raised_at

    def noted(error: Exception) -> tuple[str, int]:
        outlived.append(error)
        return raised_at(error)

    monkeypatch.setattr(internal_errors, "_raised_at", noted)
    return outlived


def test_a_message_costs_itself_and_its_traceback_is_logged_once(
    node: Node,
    fails: Callable[[type, Where], None],
    caplog: pytest.LogCaptureFixture,
    defects: list[Exception],
) -> None:
    fails(Said, lambda state, event: isinstance(event.body, StayedOnPlan) and event.body.number > 1)
    leader = node.leader()
    running = node.agent()
    trainer = node.trainer()
    trainer.welcomed(0)
    until(lambda: leader.bodies(Hello))
    for number in (2, 3, 1):
        trainer.say(StayedOnPlan(number=number, step=7))
    until(lambda: leader.bodies(StayedOnPlan))
    assert leader.bodies(StayedOnPlan) == [StayedOnPlan(number=1, step=7)]
    assert len(defects) == 2
    assert tracebacks(caplog, "elasticd failed on Said") == 1
    assert running.error is None


def test_a_call_that_the_agent_fails_on_is_answered(node: Node, fails: Callable[[type, Where], None]) -> None:
    fails(Said, lambda state, event: isinstance(event.body, StoreCall))
    node.leader()
    node.agent()
    trainer = node.trainer()
    trainer.welcomed(0)
    trainer.say(StoreCall(id=5, op="get", key="k", seconds=3600.0))
    answer = trainer.hear()
    assert isinstance(answer, StoreAnswer)
    assert (answer.id, "elasticd failed on Said" in answer.error) == (5, True)


def test_a_first_message_that_the_agent_fails_on_is_refused_and_others_are_let_in(
    node: Node, fails: Callable[[type, Where], None]
) -> None:
    fails(Opened, lambda state, event: event.body.local_rank == 1)
    node.agent()
    trainer = node.trainer()
    answer = trainer.hello(1)
    assert isinstance(answer, Rejected)
    assert "elasticd failed on Opened (RuntimeError: a defect)" in answer.reason
    assert trainer.hear() is None
    node.trainer().welcomed(0)


def test_an_end_that_the_agent_fails_on_frees_the_device(
    node: Node, fails: Callable[[type, Where], None]
) -> None:
    fails(Ended, always)
    leader = node.leader()
    node.agent()
    torchrun = node.trainer()
    torchrun.say(Join(job="job", min_nodes=1, max_nodes=1, pid=os.getpid()))
    assert isinstance(torchrun.hear(), Joined)
    trainer = node.trainer()
    trainer.welcomed(0)
    until(lambda: leader.bodies(Hello) and node.store.get(KEYS.member("job", "n0/0")))
    torchrun.close()
    trainer.close()
    (gone,) = until(lambda: lost(leader))
    assert (gone.device, gone.clean) == ("n0/0", False)
    until(lambda: leader.bodies(Leave))
    until(lambda: node.store.get(KEYS.member("job", "n0/0")) is None)


def two_jobs_that_end(node: Node) -> tuple[Leader, Trainer, Trainer]:
    """Workers of "bad" and of "job" on one node, each of which is to hear that its job stops."""
    leader = node.leader()
    node.agent()
    bad, good = node.trainer(), node.trainer()
    bad.welcomed(0, job="bad")
    good.welcomed(1)
    until(lambda: len(leader.bodies(Hello)) == 2)
    for job in ("bad", "job"):
        record = DoneRecord(step=3, epoch=leader.epoch, reason=f"{job} stops")
        node.store.put(KEYS.job(job, "done"), encode(record))
    return leader, bad, good


def test_an_order_that_the_agent_fails_on_costs_that_jobs_workers_on_the_node(
    node: Node, fails: Callable[[type, Where], None]
) -> None:
    fails(DoneRead, lambda state, event: event.job == "bad")
    leader, bad, good = two_jobs_that_end(node)
    answer = bad.hear()
    assert isinstance(answer, Rejected)
    assert "elasticd failed on DoneRead" in answer.reason
    assert good.hear() == Shutdown(reason="job stops")
    (gone,) = until(lambda: lost(leader))
    assert gone.device == "n0/0"
    assert "elasticd failed on DoneRead" in gone.how


@pytest.mark.parametrize("kind", [LinkUp, AgentTick])
def test_a_client_that_makes_everything_fail_is_let_go_and_the_others_stay(
    node: Node, fails: Callable[[type, Where], None], kind: type
) -> None:
    node.agent()
    bad, good = node.trainer(), node.trainer()
    bad.welcomed(0, job="bad")
    good.welcomed(1)
    fails(kind, lambda state, event: any(client.job == "bad" for client in state.clients.values()))
    leader = node.leader()
    answer = bad.hear()
    assert isinstance(answer, Rejected)
    assert f"elasticd failed on {kind.__name__}" in answer.reason
    good.say(StayedOnPlan(number=1, step=7))
    until(lambda: leader.bodies(StayedOnPlan))


def test_a_link_of_which_nothing_can_be_made_is_tried_anew(
    node: Node, fails: Callable[[type, Where], None]
) -> None:
    tries: list[int] = []
    fails(LinkUp, lambda state, event: tries.append(1) is None and len(tries) <= 5)
    leader = node.leader()
    node.agent()
    node.trainer().welcomed(0)
    until(lambda: leader.bodies(Hello))
    assert len(tries) > 5


@pytest.mark.parametrize("kind", [LinkDown, Heard, AgentDrained, AgentTick])
def test_an_event_of_no_client_costs_itself(
    node: Node, fails: Callable[[type, Where], None], kind: type
) -> None:
    failed: list[int] = []
    fails(kind, lambda state, event: failed.append(1) is None and len(failed) <= 1)
    leader = node.leader()
    running = node.agent()
    trainer = node.trainer()
    trainer.welcomed(0)
    until(lambda: leader.bodies(Hello))
    if kind is LinkDown:
        leader.hang_up()
        until(lambda: len(leader.bodies(Hello)) == 2)
    else:
        leader.send(Drain(on=True))
        leader.send(ToClient(client="device:n0/0", body=EmulatedSpeed(factor=2.0)))
        leader.send(ToClient(client="device:n0/0", body=EmulatedSpeed(factor=3.0)))
        while trainer.hear() != EmulatedSpeed(factor=3.0):
            pass
    until(lambda: failed)
    assert running.error is None


def test_a_worker_that_cannot_be_told_is_let_go(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    send = Workers.send

    def failing(self: Workers, client: str, body: Any, fd: int | None = None) -> None:
        if isinstance(body, Shutdown) and body.reason == "bad stops":
            raise RuntimeError("a defect")
        send(self, client, body, fd)

    monkeypatch.setattr(Workers, "send", failing)
    leader, bad, good = two_jobs_that_end(node)
    answer = bad.hear()
    assert isinstance(answer, Rejected)
    assert "elasticd failed to send it Shutdown" in answer.reason
    assert good.hear() == Shutdown(reason="job stops")
    (gone,) = until(lambda: lost(leader))
    assert gone.device == "n0/0"


@pytest.mark.parametrize("part", ["_beat", "_tick"])
def test_a_part_of_the_agent_that_fails_is_begun_again(
    node: Node, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    whole, begun = getattr(Agent, part), list[int]()

    async def failing(self: Agent) -> None:
        begun.append(1)
        if len(begun) == 1:
            raise RuntimeError("a defect")
        await whole(self)

    monkeypatch.setattr(Agent, part, failing)
    monkeypatch.setattr(daemon, "_AGAIN_SECONDS", 0.01)
    node.agent()
    until(lambda: len(begun) == 2)
    trainer = node.trainer()
    trainer.welcomed(0)


def test_a_record_that_the_agent_fails_on_costs_none_of_the_others(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = SnapshotService.read

    def failing(self: SnapshotService, name: str, record: NodeRecord | None) -> None:
        if name == "bad":
            raise RuntimeError("a defect")
        read(self, name, record)

    monkeypatch.setattr(SnapshotService, "read", failing)
    record = NodeRecord(node="bad", devices=(), address="127.0.0.1", agent="b")
    node.store.put(KEYS.node("bad"), encode(record))
    node.store.put(KEYS.job("job", "done"), encode(DoneRecord(step=3, epoch=1, reason="it stops")))
    node.agent()
    trainer = node.trainer()
    trainer.welcomed(0)
    assert trainer.hear() == Shutdown(reason="it stops")


def test_what_cannot_go_on_still_ends_the_agent(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Agent) -> str:
        raise StoreError("another store")

    monkeypatch.setattr(Agent, "_schema_refusal", refused)
    running = node.agent()
    running.join()
    assert isinstance(running.error, StoreError)


@pytest.mark.parametrize("seed", range(2))
def test_no_message_of_a_client_ends_the_agent_or_finds_a_defect(
    node: Node, seed: int, defects: list[Exception]
) -> None:
    """Whatever one says, another is served."""
    leader = node.leader()
    running = node.agent()
    drawn = Hostile(seed, ["n0/0"], ["job"], ["i0"])
    trainer = node.trainer()
    trainer.hello(0)
    for _ in range(200):
        body = msgspec.json.decode(drawn.raw()).get("body")
        try:
            unix_socket.send(trainer.sock, msgspec.json.encode(body or {}))
        except OSError:  # it was cut off
            trainer.close()
            trainer = node.trainer()
            trainer.hello(0)
    other = node.trainer()
    other.welcomed(1)
    until(lambda: [up for up in leader.bodies(Hello) if up.local_rank == 1])
    assert running.error is None
    assert defects == []


# -- the machine -------------------------------------------------------------------------------------------

EVENTS: tuple[Event, ...] = (
    hello(1, client="w1"),
    said(StayedOnPlan(number=1, step=1)),
    said(StoreCall(id=9, op="get", key="k")),
    Ended(client="w0", how="it ended"),
    Ended(client="nobody", how="it ended"),
    LinkUp(),
    LinkDown(),
    AgentTick(),
    AgentDrained(on=True),
    ProposalRead(job="job", proposal=None),
    PlanRead(job="job", record=PlanRecord(plan=plan(1, {"n0/0": "i0"}), epoch=5, step=0)),
    DoneRead(job="job", record=DoneRecord(step=1, epoch=5)),
)


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_whatever_fails_the_state_after_it_is_one_to_go_on_from(
    event: Event, linked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No call and no order is left of a client that is gone, the device is free, and a link can come."""
    begin = (hello(0), join(), said(StoreCall(id=1, op="get", key="k")))
    state, _ = run(*begin, *([LinkUp()] if linked else []))
    with monkeypatch.context() as within:
        for phase, kind in list(machine.TABLE):
            if kind is type(event):
                handler = raising(machine.TABLE[phase, kind], always)
                within.setitem(machine.TABLE, (phase, kind), handler)  # type: ignore[arg-type]
        state, _ = machine.failed(state, event, RuntimeError("a defect"), 0.0)
    assert all(client in state.clients for client, _ in state.calls)
    if state.phase is AgentPhase.LINKED:
        state, _ = run(LinkDown(), state=state)
    state, _ = run(LinkUp(), state=state)
    if "w0" not in state.clients:
        state, _ = run(hello(0, client="again"), state=state)
        assert "again" in state.clients


def test_a_link_comes_without_the_words_of_one_that_is_gone_where_these_make_it_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state, _ = run(hello(0), hello(1), said(StayedOnPlan(number=1, step=1)), Ended(client="w0", how="it ended"))
    handler = raising(machine.TABLE[AgentPhase.AWAY, LinkUp], lambda state, event: bool(state.departed))
    monkeypatch.setitem(machine.TABLE, (AgentPhase.AWAY, LinkUp), handler)  # type: ignore[arg-type]
    state, effects = machine.failed(state, LinkUp(), RuntimeError("a defect"), 0.0)
    assert (state.phase, {*state.clients}) == (AgentPhase.LINKED, {"w1"})
    assert not any(isinstance(effect, HangUp) for effect in effects)
