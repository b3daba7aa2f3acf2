"""Whom an agent has probed: workers that stand by, as they come and then now and again."""

from __future__ import annotations

from elasticd.machines.agent.state import (
    PROBE_SECONDS,
    AgentState,
    AgentTick,
    LinkDown,
    LinkUp,
    PlanRead,
)
from elasticd.records import PlanRecord
from elasticd.wire.worker import Probe, Probed
from tests.machines.agent_scene import JOB, hello, plan, proposal, read_proposal, run, said, sent, told


def asked(effects: list) -> list[str]:
    return [client for client, body in sent(effects) if isinstance(body, Probe)]


def there() -> AgentState:
    state, effects = run(hello(0, probes=True))
    assert asked(effects) == ["w0"], "before any plan can use it"
    return state


def test_a_worker_that_does_not_answer_probes_is_not_asked() -> None:
    state, effects = run(hello(0))
    assert asked(effects) == []
    assert asked(run(AgentTick(), state=state, now=1e6)[1]) == []


def test_a_device_that_stands_by_is_probed_again_and_again() -> None:
    state = there()
    assert asked(run(AgentTick(), state=state, now=PROBE_SECONDS / 2)[1]) == []
    state, effects = run(AgentTick(), state=state, now=PROBE_SECONDS)
    assert asked(effects) == ["w0"]
    assert asked(run(AgentTick(), state=state, now=PROBE_SECONDS + 1)[1]) == []


def test_a_member_of_a_plan_in_force_or_open_is_not_probed() -> None:
    state, late = there(), 10 * PROBE_SECONDS
    open_, _ = run(read_proposal(proposal(1, {"n0/0": "iw0"})), state=state)
    incarnation = next(iter(open_.clients.values())).incarnation
    for binding, expected in (({"n0/0": incarnation}, []), ({"n0/1": "other"}, ["w0"])):
        proposed, _ = run(read_proposal(proposal(1, binding)), state=state)
        assert asked(run(AgentTick(), state=proposed, now=late)[1]) == expected
        record = PlanRecord(plan=plan(1, binding), epoch=5, step=0)
        recorded, _ = run(PlanRead(job=JOB, record=record), state=state)
        assert asked(run(AgentTick(), state=recorded, now=late)[1]) == expected


def test_a_probe_is_told_the_leader_and_the_newest_again_on_a_new_link() -> None:
    state, _ = run(LinkUp(), state=there())
    state, effects = run(said(Probed(seconds=(1.0,))), state=state)
    assert told(effects) == [Probed(seconds=(1.0,))]
    state, _ = run(said(Probed(seconds=(2.0,))), LinkDown(), state=state)
    _, effects = run(LinkUp(), state=state)
    assert [body for body in told(effects) if isinstance(body, Probed)] == [Probed(seconds=(2.0,))]
