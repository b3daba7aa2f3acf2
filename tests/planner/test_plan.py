"""A plan's invariants, its JSON and its digest."""

import msgspec
import pytest
from elasticd_planner.spec.plan import ModulePlan, Pipeline, Place, Plan, Prediction, Stage, StatePolicy
from elasticd_planner.value import Invalid
from hypothesis import given, settings

from tests.planner.models import plan, plans
from tests.sizes import examples

SIMPLE = plan(
    (5, [(2, ["n0/0", "n0/1"], [6, 2]), (1, ["n1/0"], [1])]),
    (3, [(3, ["n1/1"], [1])]),
    idle=("n2/0",),
)


@settings(max_examples=examples(50))
@given(plans())
def test_a_plan_survives_json(made: Plan) -> None:
    again = Plan.from_json(made.to_json())
    assert again == made
    assert again.digest == made.digest
    assert again.members == made.members


def test_rank_follows_pipeline_stage_and_position() -> None:
    assert SIMPLE.members == ("n0/0", "n0/1", "n1/0", "n1/1")
    assert SIMPLE.places["n1/0"] == Place(module=0, pipeline=0, stage=1, position=0)
    assert SIMPLE.rank("n1/1") == 3
    assert SIMPLE.stage(SIMPLE.places["n0/1"]).fraction(1) == 0.25


def test_digest_is_the_same_in_every_process_and_release() -> None:
    assert SIMPLE.digest == DIGEST


DIGEST = "3df1e2b91f4cd00c"


def test_digest_covers_layout_batch_and_binding_and_nothing_else() -> None:
    same = SIMPLE.replace(
        number=7, reason="other words", prediction=Prediction(step_seconds=1, bound_seconds=1), idle=()
    )
    assert same.digest == SIMPLE.digest
    bound = SIMPLE.replace(binding={name: f"worker of {name}" for name in SIMPLE.members})
    other = bound.replace(binding={**bound.binding, "n0/0": "its next incarnation"})
    shares = plan((5, [(2, ["n0/0", "n0/1"], [5, 3]), (1, ["n1/0"], [1])]), (3, [(3, ["n1/1"], [1])]))
    batch = plan((4, [(2, ["n0/0", "n0/1"], [6, 2]), (1, ["n1/0"], [1])]), (4, [(3, ["n1/1"], [1])]))
    assert len({p.digest for p in (SIMPLE, bound, other, shares, batch)}) == 5


def test_digest_does_not_depend_on_the_order_in_which_bindings_were_made() -> None:
    names = SIMPLE.members
    forth = SIMPLE.replace(binding={name: name for name in names})
    back = SIMPLE.replace(binding={name: name for name in reversed(names)})
    assert forth.digest == back.digest


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Stage(start=1, stop=1, devices=("n0/0",), shares=(1,)), "must not be empty"),
        (lambda: Stage(start=0, stop=1, devices=("n0/0",), shares=(1, 1)), "1 devices need as many shares"),
        (lambda: Stage(start=0, stop=1, devices=("n0/0",), shares=(0,)), "positive integers"),
        (lambda: Pipeline(stages=(), micro_batches=1), "must start at layer 0"),
        (lambda: plan((0, [(1, ["n0/0"], [1])])), "micro_batches must be at least 1"),
        (
            lambda: Pipeline(
                stages=tuple(Stage(start=a, stop=a + 1, devices=(f"n0/{a}",), shares=(1,)) for a in (0, 2)),
                micro_batches=1,
            ),
            "ends at layer 1, the next starts at 2",
        ),
        (lambda: ModulePlan(module="model", pipelines=()), "needs at least one pipeline"),
        (
            lambda: plan((1, [(1, ["n0/0"], [1])]), (1, [(2, ["n0/1"], [1])])),
            "different numbers of layers",
        ),
        (lambda: plan((1, [(1, ["n0/0", "n0/0"], [1, 1])])), "device n0/0 is placed twice"),
        (lambda: SIMPLE.replace(idle=("n0/1",)), "device n0/1 is placed twice"),
        (lambda: SIMPLE.replace(global_batch=9), "takes 8 samples a step, the global batch is 9"),
        (lambda: SIMPLE.replace(strategies=()), "exactly one strategy"),
        (lambda: SIMPLE.replace(binding={"n0/0": "x"}), "binding must name exactly the members"),
        (lambda: SIMPLE.replace(version=3), "version 3 .* reads versions 1 to 2"),
        (lambda: StatePolicy(zero=1), "needs replicas"),
        (lambda: StatePolicy(zero=3, replicas=1), "must be 0, 1 or 2"),
        (lambda: StatePolicy(replicas=2), "go with zero 1 or 2"),
    ],
)
def test_a_wrong_plan_is_refused_by_name(make: object, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        make()  # type: ignore[operator]


def test_json_that_breaks_an_invariant_names_the_place() -> None:
    tree = msgspec.json.decode(SIMPLE.to_json())
    tree["strategies"][0]["modules"][0]["pipelines"][0]["stages"][0]["shares"] = [1, 0]
    with pytest.raises(msgspec.ValidationError, match=r"positive integers.*pipelines\[0\]\.stages\[0\]"):
        Plan.from_json(msgspec.json.encode(tree))


def test_the_gap_says_how_far_from_optimal_a_plan_can_be() -> None:
    assert Prediction(step_seconds=1.1, bound_seconds=1.0).gap == pytest.approx(0.1)
    assert Prediction(step_seconds=1.1, bound_seconds=0.0).gap == 0.0
