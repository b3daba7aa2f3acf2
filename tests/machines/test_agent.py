"""The agent's machine, rule by rule: who is let in, what is forwarded, what is told again."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from elasticd_planner.value import Invalid

from elasticd.codec.message import WIRE_VERSION
from elasticd.machines.agent import machine
from elasticd.machines.agent.machine import MOST_REPORTS, TABLE, step
from elasticd.machines.agent.state import (
    AgentNote,
    AgentPhase,
    AgentState,
    AgentTick,
    ClearMember,
    Dismiss,
    DoneRead,
    Ended,
    Event,
    Heard,
    LeaderRead,
    LinkDown,
    LinkUp,
    Opened,
    PlanRead,
    SetMember,
    Stop,
    UnknownEvent,
)
from elasticd.records import DoneRecord, MemberRecord, PlanRecord
from elasticd.wire.coordinator import DEVICE_PREFIX, AgentHello, AgentRejected, WorkerLost
from elasticd.wire.rendezvous import Join, Joined, Leave
from elasticd.wire.worker import (
    Abort,
    Closed,
    EmulatedSpeed,
    Finished,
    Goodbye,
    Hello,
    Prepared,
    Propose,
    Recorded,
    Rejected,
    Report,
    Saved,
    Shutdown,
    StoreAnswer,
    StoreCall,
    Welcome,
    WorkerDevice,
)
from tests.machines.agent_scene import (
    JOB,
    RECORD,
    aborted,
    down,
    hello,
    join,
    plan,
    proposal,
    read_proposal,
    report,
    run,
    said,
    sent,
    told,
)

# -- who is let in -------------------------------------------------------------------------------------------


def test_worker_gets_its_device_an_incarnation_and_a_member_key() -> None:
    state, effects = run(LinkUp(), hello(1))
    assert sent(effects) == [("w1", Welcome(device="n0/1", incarnation="i1", address="127.0.0.1"))]
    assert SetMember(job=JOB, record=MemberRecord(device="n0/1", incarnation="i1", pid=101)) in effects
    assert isinstance(told(effects)[0], Hello)
    assert state.clients["w1"].device == "n0/1"


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (hello(2), "node 'n0' has 2; start torchrun with --nproc-per-node=2 at most"),
        (hello(-1), "local rank -1 has no device"),
        (hello(0, claims=999), "must share one PID namespace"),
        (hello(0, version=WIRE_VERSION + 2), "install the same release"),
        (join(pid=8), "process 8 says that it is 7"),
        (join(slot=2), "local rank 2 has no device: node 'n0' has 2"),
    ],
)
def test_client_that_cannot_be_served_is_told_why(event: Opened, reason: str) -> None:
    state, effects = run(LinkUp(), event)
    (dismissed,) = effects
    assert isinstance(dismissed, Dismiss)
    assert reason in dismissed.reason
    assert not state.clients


@pytest.mark.parametrize(
    ("one", "other", "refused"),
    [
        (("GPU-a", False), ("GPU-a", False), True),
        (("GPU-a", True), ("GPU-a", False), True),
        (("GPU-a", False), ("GPU-a", True), True),
        (("GPU-a", True), ("GPU-a", True), False),
        (("GPU-a", False), ("GPU-b", False), False),
        (("", False), ("", False), False),
    ],
)
def test_two_workers_compute_on_one_gpu_only_if_both_were_asked_to(
    one: tuple[str, bool], other: tuple[str, bool], refused: bool
) -> None:
    def on(rank: int, identity: str, shared: bool) -> Opened:
        return hello(
            rank,
            computes_on=WorkerDevice(name="cuda:0", model="H100", identity=identity, shared=shared),
        )

    _, effects = run(on(0, *one), on(1, *other))
    reasons = [effect.reason for effect in effects if isinstance(effect, Dismiss)]
    assert bool(reasons) == refused
    assert all("process 101 computes on cuda:0 (H100), as process 100 does" in reason for reason in reasons)


def test_the_device_of_a_worker_is_named_in_a_few_words() -> None:
    for words in ("x" * 201, "two\nlines", "\x1b[2J"):
        with pytest.raises(Invalid, match="at most 200 printable characters"):
            WorkerDevice(name=words)


def test_device_belongs_to_one_worker_until_its_process_ends() -> None:
    state, effects = run(hello(0), hello(0, client="other", job="second"))
    (dismissed,) = effects
    assert isinstance(dismissed, Dismiss)
    assert "n0/0 is driven by process 100 of job 'job'" in dismissed.reason
    state, _ = run(Ended(client="w0", how="x"), state=state)
    _, effects = run(hello(0, client="other"), state=state)
    assert sent(effects)[0][0] == "other"


def test_worker_that_comes_back_on_another_connection_is_not_told_as_lost() -> None:
    """Its connection broke, and it lives: it has the incarnation that it had."""
    first = hello(0)
    state, _ = run(LinkUp(), first)
    (known,) = state.clients.values()
    body = msgspec.structs.replace(first.body, incarnation=known.incarnation)
    again = replace(first, client="again", body=body, incarnation="another")
    state, effects = step(state, again, 1.0)
    assert [client.id for client in state.clients.values()] == ["again"]
    assert not [effect for effect in effects if isinstance(effect, ClearMember)]
    assert not [message for message in told(effects) if isinstance(message, WorkerLost)]
    assert state.departed == ()
    anew = replace(first, client="anew", incarnation="third")
    state, effects = step(state, anew, 2.0)
    assert [message.how for message in told(effects) if isinstance(message, WorkerLost)] == [
        "took a new incarnation"
    ]


def test_release_one_older_or_newer_is_let_in() -> None:
    for version in (WIRE_VERSION - 1, WIRE_VERSION + 1):
        assert not any(isinstance(e, Dismiss) for e in run(hello(0, version=version))[1])


# -- orders --------------------------------------------------------------------------------------------------


def test_proposal_reaches_members_of_old_and_new_alone() -> None:
    mine = proposal(2, {"n0/0": "i0"}, old={"n0/1": "i1"})
    _, effects = run(hello(0), hello(1), read_proposal(mine))
    assert sent(effects) == [("w0", Propose(proposal=mine)), ("w1", Propose(proposal=mine))]
    other = proposal(2, {"n0/0": "i0", "n1/0": "x"})
    _, effects = run(hello(0), hello(1), read_proposal(other))
    assert [client for client, _ in sent(effects)] == ["w0"]
    _, effects = run(hello(0), hello(1), read_proposal(mine, job="another"))
    assert sent(effects) == []


def test_proposal_is_not_for_another_incarnation_of_the_device() -> None:
    _, effects = run(hello(0), read_proposal(proposal(2, {"n0/0": "former"})))
    assert sent(effects) == []


def test_worker_that_connects_gets_the_open_proposal_after_its_welcome() -> None:
    mine = proposal(2, {"n0/0": "i0"})
    _, effects = run(read_proposal(mine), hello(0))
    assert [type(body) for _, body in sent(effects)] == [Welcome, Propose]
    for stranger in (hello(0, job="other"), hello(1)):
        _, effects = run(read_proposal(mine), stranger)
        assert [type(body) for _, body in sent(effects)] == [Welcome]


def test_abort_and_record_are_forwarded_and_the_leaver_hears_of_the_record() -> None:
    mine = proposal(2, {"n0/0": "i0"}, old={"n0/1": "i1"})
    begin = (hello(0), hello(1), read_proposal(mine))
    _, effects = run(*begin, read_proposal(aborted(mine)))
    assert sent(effects) == [(w, Abort(number=2, reason="why")) for w in ("w0", "w1")]
    record = PlanRecord(plan=mine.plan, epoch=5, step=3)
    _, effects = run(*begin, PlanRead(job=JOB, record=record))
    assert sent(effects) == [(w, Recorded(number=2)) for w in ("w0", "w1")]


@pytest.mark.parametrize("learned", ["leader", "proposal", "plan"])
def test_order_that_a_replaced_leader_gives_is_refused(learned: str) -> None:
    seen: dict[str, Event] = {
        "leader": LeaderRead(epoch=9),
        "proposal": read_proposal(proposal(1, {"n1/0": "z"}, epoch=9), job="x"),
        "plan": PlanRead(job="x", record=PlanRecord(plan=plan(1, {"n1/0": "z"}), epoch=9, step=0)),
    }
    mine = proposal(2, {"n0/0": "i0"}, epoch=8)
    for stale in (
        read_proposal(mine),
        read_proposal(aborted(mine, epoch=8)),
        PlanRead(job=JOB, record=PlanRecord(plan=mine.plan, epoch=8, step=1)),
        over("a leader that was replaced says so", epoch=8),
    ):
        state, effects = run(hello(0), seen[learned], stale)
        assert [type(effect) for effect in effects] == [AgentNote]
        assert state.epoch == 9
    current = proposal(2, {"n0/0": "i0"}, epoch=9)
    assert sent(run(hello(0), seen[learned], read_proposal(current))[1])


def test_open_proposal_that_outlasts_its_leader_is_handed_to_a_worker_that_comes_back() -> None:
    mine = proposal(2, {"n0/0": "i0"}, epoch=5)
    _, effects = run(read_proposal(mine), LeaderRead(epoch=6), hello(0))
    assert [type(body) for _, body in sent(effects)] == [Welcome, Propose]


@pytest.mark.parametrize(
    "order",
    [
        Propose(proposal=proposal(2, {"n0/0": "i0"})),
        Abort(number=2, reason=""),
        Recorded(number=2),
        Shutdown(reason="a leader that was replaced says so"),
        Closed(reason="done"),
    ],
)
def test_order_over_the_link_is_dropped(order: object) -> None:
    for address in ("w0", DEVICE_PREFIX + "n0/0"):
        _, effects = run(hello(0), LinkUp(), down(address, order))
        assert [type(effect) for effect in effects] == [AgentNote]


def over(reason: str = "", epoch: int = 5) -> DoneRead:
    return DoneRead(job=JOB, record=DoneRecord(step=9, epoch=epoch, reason=reason))


def test_end_of_a_job_that_cannot_go_on_reaches_all_its_workers_once_and_nobody_else() -> None:
    running = PlanRead(job=JOB, record=PlanRecord(plan=plan(1, {"n0/0": "i0"}), epoch=5, step=0))
    start = (hello(0), hello(1, job="other"), join(), running)
    state, effects = run(*start, over("n1/0 died"))
    assert sent(effects) == [("w0", Shutdown(reason="n1/0 died"))]
    again = over("n1/0 died", epoch=6)  # by a new leader
    assert run(over("n1/0 died"), again, state=state)[1] == []


def test_end_of_a_finished_job_is_told_to_all_its_workers_for_a_member_may_have_missed_the_last_vote() -> None:
    running = PlanRead(job=JOB, record=PlanRecord(plan=plan(1, {"n0/0": "i0"}), epoch=5, step=0))
    _, effects = run(hello(0), hello(1), running, over())
    assert sent(effects) == [
        (client, Closed(reason="the job finished after 9 steps")) for client in ("w0", "w1")
    ]


def test_worker_that_comes_after_the_end_hears_of_it_after_its_welcome() -> None:
    _, effects = run(over("n1/0 died"), hello(0))
    assert [type(body) for _, body in sent(effects)] == [Welcome, Shutdown]
    _, effects = run(over("n1/0 died"), DoneRead(job=JOB, record=None), hello(0))
    assert [type(body) for _, body in sent(effects)] == [Welcome]


def test_closed_over_the_link_is_an_answer_to_a_torchrun() -> None:
    _, effects = run(LinkUp(), join(), down("t", Closed(reason="it finished")))
    assert sent(effects) == [("t", Closed(reason="it finished"))]


def test_reason_of_a_goodbye_is_told_with_the_end_of_its_process_on_every_link() -> None:
    end = (said(Goodbye(reason="the script had enough")), Ended(client="w0", how="its process ended"))
    for events in ((LinkUp(), hello(0), *end), (hello(0), *end, LinkUp())):
        lost = told(run(*events)[1])[-1]
        assert isinstance(lost, WorkerLost)
        assert (lost.clean, lost.how) == (True, "the script had enough")


def test_same_record_read_again_is_forwarded_once() -> None:
    read = read_proposal(proposal(2, {"n0/0": "i0"}))
    assert run(hello(0), read, read)[1] == []


# -- the link ------------------------------------------------------------------------------------------------


def test_new_link_begins_with_the_agents_hello_then_each_client_again() -> None:
    _, effects = run(join(), hello(0), said(Prepared(number=2)), LinkUp())
    assert [type(word) for word in told(effects)] == [AgentHello, Join, Hello, Prepared]


def test_torchrun_that_left_while_the_link_was_away_is_not_spoken_of() -> None:
    _, effects = run(join(), said(Leave(job=JOB), "t"), LinkUp())
    assert [type(word) for word in told(effects)] == [AgentHello]
    _, effects = run(LinkUp(), join(), Ended(client="t", how="killed"))
    assert told(effects) == [Leave(job=JOB)]


def test_worker_that_ended_while_the_link_was_away_has_its_last_words_told() -> None:
    end = (said(Finished(step=9)), said(Goodbye()), Ended(client="w0", how="its process ended"))
    _, effects = run(LinkUp(), hello(0), LinkDown(), *end, LinkUp())
    words = told(effects)
    assert [type(word) for word in words] == [AgentHello, Hello, Finished, WorkerLost]
    assert isinstance(words[-1], WorkerLost)
    assert words[-1].clean
    _, effects = run(LinkUp(), hello(0), LinkDown(), *end, over(), LinkUp())
    assert [type(word) for word in told(effects)] == [AgentHello]


def test_death_is_told_and_the_member_key_goes() -> None:
    _, effects = run(LinkUp(), hello(0), Ended(client="w0", how="its process ended"))
    assert ClearMember(job=JOB, device="n0/0") in effects
    (lost,) = told(effects)
    assert isinstance(lost, WorkerLost)
    assert (lost.device, lost.incarnation, lost.clean) == ("n0/0", "i0", False)


def test_reports_wait_in_a_bounded_buffer_and_the_newest_stay() -> None:
    state, _ = run(hello(0))
    for n in range(MOST_REPORTS + 10):
        state, effects = step(state, said(report(n)), 0.0)
        assert effects == ()
    state, effects = step(state, LinkUp(), 0.0)
    reports = [word for word in told(list(effects)) if isinstance(word, Report)]
    assert [word.measurement.step for word in reports] == list(range(10, MOST_REPORTS + 10))
    assert state.reports == ()


def test_agent_that_the_leader_rejects_stops_and_minds_nothing_after() -> None:
    state, effects = run(LinkUp(), Heard(message=AgentRejected(reason="taken")))
    assert effects == [Stop(reason="taken")]
    assert run(hello(0), LinkDown(), AgentTick(), state=state) == (state, [])


def test_event_that_the_table_lacks_is_an_error() -> None:
    with pytest.raises(UnknownEvent, match="LinkDown may not come while away"):
        run(LinkDown())
    assert (AgentPhase.LINKED, LinkUp) not in TABLE


# -- the bootstrap store -------------------------------------------------------------------------------------


def call(number: int, op: str = "get") -> StoreCall:
    return msgspec.convert({"id": number, "op": op, "key": "k", "seconds": 2.0}, StoreCall)


def test_answer_of_the_leader_reaches_its_client_once() -> None:
    state, effects = run(LinkUp(), hello(0), said(call(1)))
    assert told(effects) == [call(1)]
    answer = StoreAnswer(id=1, value=b"v")
    state, effects = run(down("w0", answer), state=state)
    assert sent(effects) == [("w0", answer)]
    assert run(down("w0", answer), state=state)[1] == []


@pytest.mark.parametrize("linked", [True, False])
def test_call_without_an_answer_fails_at_its_deadline(linked: bool) -> None:
    state, _ = run(hello(0), *([LinkUp()] if linked else []), said(call(1)))
    assert step(state, AgentTick(), 2.9)[1] == ()
    state, effects = step(state, AgentTick(), 3.0)
    ((_, answer),) = sent(list(effects))
    assert isinstance(answer, StoreAnswer)
    assert "leader" in (answer.error or "")
    assert step(state, AgentTick(), 9.0)[1] == ()


def test_calls_are_asked_again_on_a_new_link_but_an_add_is_never_done_twice() -> None:
    state, effects = run(LinkUp(), hello(0), said(call(1)), said(call(2, "add")), LinkDown())
    ((_, answer),) = sent(effects)
    assert isinstance(answer, StoreAnswer)
    assert answer.id == 2
    assert "link" in (answer.error or "")
    _, effects = run(LinkUp(), state=state)
    assert call(1) in told(effects)
    assert call(2, "add") not in told(effects)


def test_calls_of_a_process_that_wait_are_bounded_and_another_process_has_its_own() -> None:
    many = [said(call(number)) for number in range(machine.MOST_CALLS)]
    state, _ = run(LinkUp(), hello(0), hello(1), *many)
    state, effects = run(said(call(777)), state=state)
    assert told(effects) == []
    ((client, answer),) = sent(effects)
    assert client == "w0"
    assert isinstance(answer, StoreAnswer)
    assert answer.id == 777
    assert "wait for answers already" in (answer.error or "")
    assert len(state.calls) == machine.MOST_CALLS
    state, effects = run(said(call(1), "w1"), state=state)
    assert told(effects) == [call(1)]
    state, _ = run(down("w0", StoreAnswer(id=0)), state=state)
    assert told(run(said(call(999)), state=state)[1]) == [call(999)]


def test_words_that_nothing_outdates_are_bounded_and_the_newest_stay() -> None:
    many = [said(Saved(name=f"c{number}", step=number, plan=1)) for number in range(machine.MOST_SAID + 5)]
    state, _ = run(hello(0), *many)
    assert len(state.clients["w0"].said) == machine.MOST_SAID
    assert state.clients["w0"].said[-1] == many[-1].body


def test_a_torchrun_joins_one_job() -> None:
    other = msgspec.structs.replace(join().body, job="other")
    state, effects = run(LinkUp(), join(), said(other, "t"))
    assert told(effects) == []
    ((client, answer),) = sent(effects)
    assert client == "t"
    assert isinstance(answer, Rejected)
    assert "takes part in job job" in answer.reason
    assert state.clients["t"].job == JOB
    assert told(run(said(join().body, "t"), state=state)[1]) == [join().body], "after a local restart"


def test_torchruns_are_told_of_before_workers_that_ended() -> None:
    gone = (hello(1), said(Goodbye(), "w1"), Ended(client="w1", how="exit status 0"))
    words = told(run(join(), *gone, LinkUp())[1])
    assert [type(word) for word in words] == [AgentHello, Join, Hello, WorkerLost]


def test_joined_reaches_its_torchrun_and_nobody_else() -> None:
    answer = Joined(node_rank=0, nodes=1)
    assert sent(run(LinkUp(), join(), hello(0), down("t", answer))[1]) == [("t", answer)]
    assert run(LinkUp(), join(), down("gone", answer))[1] == []


# -- emulation and chaos -------------------------------------------------------------------------------------


def test_chaos_paces_the_device_now_and_its_next_worker() -> None:
    slow = down(DEVICE_PREFIX + "n0/0", EmulatedSpeed(factor=3.0))
    state, effects = run(LinkUp(), hello(0), slow)
    assert sent(effects) == [("w0", EmulatedSpeed(factor=3.0))]
    _, effects = run(Ended(client="w0", how="x"), hello(0, client="next"), state=state)
    ((_, welcome),) = sent(effects)
    assert isinstance(welcome, Welcome)
    assert welcome.pace == EmulatedSpeed(factor=3.0)


def test_speeds_that_chaos_set_are_said_to_the_next_leader() -> None:
    slow, recovered = (down(DEVICE_PREFIX + "n0/0", EmulatedSpeed(factor=factor)) for factor in (3.0, 1.0))
    for orders, factors in (((slow,), {"n0/0": 3.0}), ((slow, recovered), {})):
        _, effects = run(LinkUp(), *orders, LinkDown(), LinkUp())
        greeting = told(effects)[-1]
        assert isinstance(greeting, AgentHello)
        assert greeting.factors == factors


def test_emulated_times_go_with_every_pace() -> None:
    speed = EmulatedSpeed(forward=1e-4, backward=2e-4, attention_tokens=4096)
    start = AgentState(record=RECORD, pace=speed)
    state, effects = run(LinkUp(), hello(0), state=start)
    ((_, welcome),) = sent(effects)
    assert isinstance(welcome, Welcome)
    assert welcome.pace == speed
    for factor in (3.0, 1.0):
        _, effects = run(down(DEVICE_PREFIX + "n0/0", EmulatedSpeed(factor=factor)), state=state)
        assert sent(effects) == [("w0", msgspec.structs.replace(speed, factor=factor))]
