"""Tensors that stand for a problem's bytes: over links goes what the model's own tensors put there."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from elasticd_planner.cost.model_profile import Numbers, derive, suited
from elasticd_planner.layout.explained_plan import explain_step
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.problem_files import file_format
from elasticd_planner.problem_files.shapes import Shapes, shapes_of, sizes_of
from elasticd_planner.problem_files.times import entry_of
from elasticd_planner.spec.model import Cut, ModelSpec, Parameter, Units
from elasticd_planner.spec.plan import ModulePlan, Pipeline, Plan, Stage, StatePolicy, Strategy
from elasticd_planner.value import Invalid

LAYERS, TOKENS = 4, 10


def parameter(name: str, *shape: int, cut: tuple[int, str] | None = None, **rest: Any) -> Parameter:
    rule = Cut(dim=cut[0], units=cut[1]) if cut else None
    return Parameter(name=name, shape=shape, dtype="bfloat16", cut=rule, **rest)


#: Every cut dimension is of eight units, or of a kv-head for each two of them: shares divide all alike.
SPEC = ModelSpec(
    name="even",
    embed=(parameter("tokens.weight", 64, 32, cut=(0, "vocabulary")),),
    kinds=(
        (
            parameter("norm.weight", 32),
            parameter("q.weight", 32, 32, cut=(0, "heads")),
            parameter("k.weight", 16, 32, cut=(0, "kv_heads"), replicas="add"),
            parameter("o.weight", 32, 32, cut=(1, "heads")),
            parameter("up.weight", 64, 32, cut=(0, "columns")),
            parameter("down.weight", 32, 64, cut=(1, "columns")),
        ),
    ),
    layers=(0,) * LAYERS,
    head=(parameter("norm.weight", 32), parameter("output.weight", 64, 32, cut=(0, "vocabulary"))),
    units=(
        Units(kind="heads", count=8),
        Units(kind="kv_heads", count=4, follows="heads"),
        Units(kind="columns", count=8),
        Units(kind="vocabulary", count=8),
    ),
    ties=(("head.output.weight", "embed.tokens.weight"),),
    width=32,
    dtype="bfloat16",
)


def stage(start: int, stop: int, *members: tuple[str, int]) -> Stage:
    devices, shares = zip(*members, strict=True)
    return Stage(start=start, stop=stop, devices=devices, shares=shares)


PLAN = Plan(
    number=1,
    strategies=(
        Strategy(
            modules=(
                ModulePlan(
                    module="model",
                    pipelines=(
                        Pipeline(
                            stages=(
                                stage(0, 1, ("a/0", 5), ("a/1", 3)),
                                stage(1, LAYERS, ("b/0", 4), ("b/1", 4)),
                            ),
                            micro_batches=3,
                        ),
                        Pipeline(stages=(stage(0, LAYERS, ("c/0", 8)),), micro_batches=1),
                    ),
                ),
            )
        ),
    ),
    micro_batch=1,
    global_batch=4,
)


def problem(spec: ModelSpec = SPEC, numbers: Numbers | None = None, **model: Any) -> file_format.TableProblem:
    entry = entry_of(suited(derive(spec, TOKENS, 1), numbers))
    for name, value in model.items():
        entry[name] = value
        if value is None:
            del entry[name]
    nodes = [{"name": name, "devices": 2, "memory_mib": 1000} for name in "abc"]
    batch = {"global_batch": 4, "micro_batch": 1, "sequence": TOKENS}
    return file_format.load(msgspec.json.encode({"cluster": {"nodes": nodes}, "model": entry, "batch": batch}))


def of_one(given: file_format.TableProblem, spec: ModelSpec | None = None) -> Shapes:
    """The shapes of a problem of one module."""
    (shapes,) = shapes_of(given, {"model": spec} if spec is not None else None).values()
    return shapes


@pytest.mark.parametrize("numbers", [None, Numbers(compute="bfloat16")])
@pytest.mark.parametrize("zero", [0, 1])
def test_bytes_over_links_are_those_of_the_model(numbers: Numbers | None, zero: int) -> None:
    plan = PLAN.replace(state=StatePolicy(zero=zero, replicas=1 if zero else None))
    given = problem(numbers=numbers)
    listed = []
    for shapes in (of_one(given, SPEC), of_one(given)):
        found = explain_step(Layouts(shapes.spec, plan), tokens=TOKENS, gradients=shapes.gradients)
        sums = {
            purpose: sum(each.size for each in found.operations if each.purpose == purpose)
            for purpose in found.purposes
        }
        listed.append(sums)
    exact, standing = listed
    if not zero:
        assert standing == exact
    else:  # whose tensors are dealt to keepers in other pieces
        assert standing == pytest.approx(exact, rel=0.2)
    assert exact["gradients"] == standing["gradients"]
    summed = (4 if numbers else 2) * 32 * (64 + 1 + LAYERS * (1 + 32 + 16 + 32 + 64 + 64))
    assert exact["gradients"] == pytest.approx(summed, rel=0.1)  # some kv-heads are on two devices


def test_an_element_of_the_state_weighs_what_the_problem_says() -> None:
    shapes = shapes_of(problem(numbers=Numbers(compute="bfloat16")), {"model": SPEC})
    sizes = sizes_of(shapes, Layouts(SPEC, PLAN))
    by_role = {item.role: size for item, size in sizes.items()}
    assert by_role == {"value": 2, "state": 12}  # master weights and two moments in float32


@pytest.mark.parametrize(
    ("given", "spec", "said"),
    [
        (problem(state=None), None, "give even a model.state, or name the model with --model"),
        (problem(), msgspec.structs.replace(SPEC, layers=(0, 0)), "has 2 layers, and the problem 4"),
        (
            problem(),
            msgspec.structs.replace(SPEC, head=SPEC.head[1:]),
            "the head of the model even has 4,096 bytes of parameters, and model.state of the problem 4,160",
        ),
    ],
)
def test_what_cannot_be_listed_is_refused_with_the_remedy(
    given: file_format.TableProblem, spec: ModelSpec | None, said: str
) -> None:
    with pytest.raises(Invalid) as refused:
        of_one(given, spec)
    assert said in str(refused.value)
