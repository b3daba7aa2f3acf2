"""Under ZeRO a plan is checked by its layouts: one device may have to keep replicas for many."""

from __future__ import annotations

from elasticd_planner.plan import ModulePlan, Pipeline, Plan, Stage, StatePolicy, Strategy
from elasticd_planner.profiles import derive
from elasticd_planner.sharding import with_carriers

from elasticd.machines.job.room import lacks_room
from elasticd.machines.job.state import NodeState
from tests.machines.cast import model, node_record

SPEC = model()
PROFILE = derive(SPEC, 64.0, 1)


def plan(state: StatePolicy) -> Plan:
    """Three replicas on alpha; beta's one device is idle."""
    pipelines = tuple(
        Pipeline(stages=(Stage(start=0, stop=8, devices=(f"alpha/{i}",), shares=(1,)),), micro_batches=2)
        for i in range(3)
    )
    strategy = Strategy(modules=(ModulePlan(module="model", pipelines=pipelines),))
    made = Plan(number=1, strategies=(strategy,), micro_batch=1, global_batch=6, state=state, idle=("beta/0",))
    return with_carriers(made)


def nodes(memory: int) -> dict[str, NodeState]:
    records = (node_record("alpha", 3, memory=1 << 30), node_record("beta", 1, memory=memory))
    return {record.node: NodeState(record=record, connected=True, since=0.0) for record in records}


def test_a_carrier_without_room_for_its_replicas_is_named() -> None:
    carried = plan(StatePolicy(zero=1, replicas=2))
    assert carried.carriers == ("beta/0",)
    said = lacks_room(carried, SPEC, PROFILE, nodes(1 << 20))
    assert said.startswith("beta/0 would have to keep")
    assert "2 replicas" in said
    assert lacks_room(carried, SPEC, PROFILE, nodes(1 << 30)) == ""


def test_without_zero_the_planner_alone_counts() -> None:
    assert lacks_room(plan(StatePolicy()), SPEC, PROFILE, nodes(1 << 20)) == ""
