"""A plan that a job gives is answered with as it is, or the answer says why it cannot be."""

from __future__ import annotations

import math

import msgspec
import pytest
from elasticd_planner.cost.memory import memory_by_device
from elasticd_planner.cost.model import step_seconds
from elasticd_planner.cost.model_profile import derive
from elasticd_planner.cost.profile_cost import ProfileCost
from elasticd_planner.layout.annotated_plan import plan_of
from elasticd_planner.layout.annotations import Annotation
from elasticd_planner.problem import Problem, SearchSpace
from elasticd_planner.search.planner import plan
from elasticd_planner.spec.plan import Pipeline, Plan, StatePolicy
from elasticd_planner.spec.plan_checks import check_batch, check_model
from elasticd_planner.value import Invalid

from tests.planner.models import SPEC, cluster, profile

#: Two unlike pipelines on three of four devices: no search would leave the fourth idle.
GIVEN = plan_of(
    SPEC,
    {"*": Annotation(groups=[("n0/1", "n0/0"), ("n1/0",)], states=[{"tp": (3, 1)}, {}])},
    micro_batches=[1, 3],
    micro_batch=2,
)


def problem(*sizes: int, memory: int = 1 << 40, **changes: object) -> Problem:
    values = {
        "cluster": cluster(*sizes, memory=memory),
        "profile": derive(SPEC, 16.0, 2),
        "global_batch": 8,
        "micro_batch": 2,
        "given": GIVEN,
    }
    return Problem(**{**values, **changes})  # type: ignore[arg-type]


def planned(given: Problem) -> Plan:
    answer = plan(given, 7)
    assert answer.plan is not None, answer.refusal
    return answer.plan


def test_it_is_the_answer_as_it_is_with_what_the_cost_model_says_of_it() -> None:
    asked = problem(2, 2)
    found = planned(asked)
    assert found.pipelines == GIVEN.pipelines
    assert (found.number, found.idle, found.binding) == (7, ("n1/1",), {})
    cost = ProfileCost(asked.profile, pipelines=2, members=4)
    assert found.prediction is not None
    assert found.prediction.step_seconds == pytest.approx(step_seconds(found, asked.cluster, {}, cost))
    assert found.prediction.memory == memory_by_device(found, cost)
    assert found.prediction.bound_seconds <= found.prediction.step_seconds
    assert found.reason.startswith("given by the job: 2 pipelines")


def test_stragglers_are_priced_and_change_nothing() -> None:
    slow = profile(layers=3)  # its seconds are those of computing
    found = planned(problem(2, 2, rates={"n1/0": 3.0}, profile=slow))
    healthy = planned(problem(2, 2, profile=slow))
    assert found.pipelines == GIVEN.pipelines
    assert found.prediction is not None
    assert healthy.prediction is not None
    assert found.prediction.step_seconds > 2 * healthy.prediction.step_seconds


def test_what_holds_under_every_plan_of_the_job_holds_under_this_one() -> None:
    zero = StatePolicy(zero=1, replicas=2)
    space = SearchSpace(states=(zero,), recompute="always", sequence_parallel="always")
    found = planned(problem(2, 2, search_space=space))
    stages = [stage for _, _, stage in found.walk()]
    assert found.state == zero
    assert all(stage.recompute for stage in stages)
    assert [stage.sequence_parallel for stage in stages] == [True, False]
    assert [stage.devices for stage in stages] == [("n0/1", "n0/0"), ("n1/0",)]


def test_replicas_go_to_idle_devices_where_its_own_are_on_too_few_nodes() -> None:
    one = plan_of(
        SPEC, {"*": Annotation(groups=[("n0/0", "n0/1")], states=[{"tp": 2}])}, micro_batches=[4], micro_batch=2
    )
    space = SearchSpace(states=(StatePolicy(zero=1, replicas=2),))
    found = planned(problem(2, 1, given=one, search_space=space))
    assert (found.carriers, found.idle) == (("n1/0",), ())


@pytest.mark.parametrize(
    ("sizes", "memory", "rates", "words"),
    [
        ((2,), 1 << 40, {}, "it needs n1/0, and the devices that are there are n0/0, n0/1"),
        ((2, 1), 1 << 40, {"n1/0": math.inf}, "n1/0 cannot be used"),
        ((2, 2), 45_000, {}, "does not fit: n1/0 would need "),
    ],
)
def test_where_it_cannot_be_another_is_made_and_says_so(
    sizes: tuple[int, ...], memory: int, rates: dict[str, float], words: str
) -> None:
    asked = problem(*sizes, memory=memory, rates=rates)
    found = planned(asked)
    assert found.pipelines != GIVEN.pipelines
    assert f"; the plan that the job gives cannot be: {words}" in found.reason
    insisted = plan(msgspec.structs.replace(asked, only_given=True))
    assert insisted.plan is None
    assert insisted.refusal.startswith(f"the plan that the job gives cannot be: {words}")


def test_a_plan_of_another_model_or_batch_is_refused() -> None:
    check_model(GIVEN, SPEC)
    check_batch(GIVEN, 8, 2)
    short = msgspec.structs.replace(SPEC, layers=SPEC.layers[:2])
    with pytest.raises(Invalid, match="has 3 blocks in each pipeline, and the model has 2"):
        check_model(GIVEN, short)
    five = Annotation(groups=[tuple(f"n0/{i}" for i in range(5))], states=[{"same": 5}])
    whole = plan_of(SPEC, {"*": five}, micro_batches=[1] * 5)
    devices = tuple(device for pipeline in whole.pipelines for device in pipeline.stages[0].devices)
    stage = msgspec.structs.replace(whole.pipelines[0].stages[0], devices=devices, shares=(1,) * 5)
    pipeline = Pipeline(stages=(stage,), micro_batches=5)
    module = msgspec.structs.replace(whole.modules[0], pipelines=(pipeline,))
    wide = whole.replace(strategies=(msgspec.structs.replace(whole.strategies[0], modules=(module,)),))
    with pytest.raises(Invalid, match="blocks 0-2 over 5 devices, and the model has 4 heads: use narrower"):
        check_model(wide, SPEC)
    with pytest.raises(Invalid, match=r"takes 8 samples .* micro-batches of 2, and the job takes 16 .* of 2"):
        check_batch(GIVEN, 16, 2)
    with pytest.raises(Invalid, match="micro-batches of 4"):
        check_batch(GIVEN, 8, 4)
