"""A job's page shows the load of experts, the devices that have them, and the busiest device of each block."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest
from elasticd_planner.spec.plan import Edge, ModulePlan, Pipeline, Plan, Stage, Strategy

from elasticd.dashboard import views
from elasticd.dashboard.job_page import job_view
from elasticd.dashboard.subscription import Told
from elasticd.wire import live_types as live
from tests.dashboard.test_views import JOB, NOW, PLAN, board, job

#: Blocks 0 and 1 have four experts each, of which a/0 has more rows; block 2 has none.
ROWS = {0: (60.0, 20.0, 10.0, 10.0), 1: (25.0, 25.0, 25.0, 25.0)}
DEVICES = ("a/0", "a/1")
PLACED = Stage(
    start=0,
    stop=3,
    devices=DEVICES,
    shares=(1, 1),
    experts=(((0, 1), (0, 2, 3)), (), ()),
    splits=(((0, 1, 2),), (), ()),
)


def plan_with(*pipelines: Pipeline) -> Plan:
    module = msgspec.structs.replace(PLAN.module, pipelines=pipelines)
    micro_batches = sum(pipeline.micro_batches for pipeline in pipelines)
    return PLAN.replace(strategies=(Strategy(modules=(module,)),), global_batch=micro_batches, idle=())


def view_of(plan: Plan, rows: Mapping[int, tuple[float, ...]] = ROWS) -> views.ExpertsView | None:
    found = board(
        live.put("1:0", "job", JOB, live.LiveJob(job=job(), plan=3, over=False)),
        live.put("1:0", "plan", JOB, plan),
        live.append("1:0", "slowdowns", "", live.Slowdowns(rates={"a/1": 2.0}, slowness={})),
        *([live.put("1:0", "experts", JOB, dict(rows))] if rows else []),
    )
    shown = job_view(found.known, JOB, (), NOW).experts
    found.hear(Told(at=NOW, news=live.Drop(id="1:1", kind="job", key=JOB)))
    assert found.known.cluster.expert_rows == {}
    return shown


def test_placed_experts_and_those_by_shares_have_their_devices_and_the_busiest_one() -> None:
    shown = view_of(plan_with(Pipeline(stages=(PLACED,), micro_batches=4)))
    assert shown is not None
    assert shown.parts == {0: (0.6, 0.2, 0.1, 0.1), 1: (0.25,) * 4}
    (group,) = shown.groups
    assert (group.pipeline, group.lane, group.stage, group.devices) == (0, 0, 0, DEVICES)
    first, second = group.blocks
    assert (first.block, first.holders) == (0, ((0, 1), (0,), (1,), (1,)))
    # a/0 has a third of expert 0, and expert 1: 0.4; a/1 the rest, for each of which it takes twice as long.
    assert first.busiest == 1
    assert first.over == pytest.approx(2 * 0.6 / (1 / 1.5))
    assert (second.block, second.holders) == (1, ((0,), (0,), (1,), (1,)))
    assert second.over == pytest.approx(2 * 0.5 / (1 / 1.5))


def test_of_several_modules_the_experts_are_those_of_the_one_with_the_loss() -> None:
    alone = plan_with(Pipeline(stages=(PLACED,), micro_batches=4))
    encoder = Pipeline(stages=(Stage(start=0, stop=2, devices=("a/1",), shares=(1,)),), micro_batches=1)
    modules = (
        ModulePlan(module="vision", items="images", pipelines=(encoder,)),
        msgspec.structs.replace(alone.module, module="language"),
    )
    strategy = Strategy(modules=modules, edges=(Edge(source="vision", target="language"),))
    assert view_of(alone.replace(strategies=(strategy,))) == view_of(alone) is not None


def test_lanes_that_share_experts_are_one_group_and_others_one_each() -> None:
    stage = Stage(
        start=0,
        stop=3,
        devices=("a/0", "a/1", "b/0"),
        shares=(1, 1, 1),
        lanes=(2, 1),
        experts=(((0,), (1,), (2, 3)), (), ()),
    )
    shown = view_of(plan_with(Pipeline(stages=(stage,), micro_batches=4, rows=(3, 1))))
    assert shown is not None
    assert [(g.lane, g.devices, [b.block for b in g.blocks]) for g in shown.groups] == [
        (None, stage.devices, [0]),
        (0, ("a/0", "a/1"), [1]),
        (1, ("b/0",), [1]),
    ]
    assert shown.groups[0].blocks[0].holders == ((0,), (1,), (2,), (2,))
    assert shown.groups[2].blocks[0].over == 1.0


def test_a_job_without_a_known_load_has_no_such_panel() -> None:
    assert view_of(plan_with(Pipeline(stages=(PLACED,), micro_batches=4)), {}) is None
