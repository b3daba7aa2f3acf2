"""Master weights, moments and the scale: what survives switches, checkpoints and overflows, to the bit."""

from __future__ import annotations

import random
from collections import UserDict
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from elasticd_migration.local_state import MASTER, VALUE, LocalState
from elasticd_migration.migrate import Moved, migrate
from elasticd_migration.transport import MemoryTransport
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.plan import Plan, StatePolicy

from elasticd.checkpoints.disk import LocalDisk
from elasticd.checkpoints.folder import look
from elasticd.checkpoints.manifest import Manifest, differences
from elasticd.records import JobSpec
from elasticd.runtime.checkpoint.loader import Types, load
from elasticd.runtime.comm.in_memory import MemoryPlanGroups, run_threads
from elasticd.runtime.engine.mixed_precision import LossScale, LossScaler, Precision, lowered, precision_of
from tests import sizes
from tests.checkpoints.support import task_of, write
from tests.migration.ranks import copy_of
from tests.migration.ranks import together as at_once
from tests.models.layouts import BATCH, SEED
from tests.models.precise import Course, alone, apart, engine_of, together, under, whole_planes
from tests.models.test_mixed_precision_matrix import NEAR, PLAIN, PRECISIONS, course

BEFORE = PLAIN["tp3 uneven beside a pipeline"]
AFTER = PLAIN["tp1 to tp4 and back"].replace(number=2, state=StatePolicy(zero=1, replicas=2))
#: Grows after each second step, so that a switch comes while it counts.
COUNTING = Precision(compute=torch.float16, scale=LossScale(first=16.0, interval=2))
HALVES = {"bf16": PRECISIONS["bf16"], "fp16": COUNTING}
States = dict[str, LocalState]


def course_in(precision: Precision | None, *, model: str = "gpt", steps: int = 4) -> Course:
    made, _ = course(model, "fp32", "adamw")
    return replace(made, training=replace(made.training, steps=steps), precision=precision)


def trained(
    made: Course, plan: Plan, first: int, last: int, given: Mapping[str, LocalState] | None = None
) -> tuple[list[float], States]:
    """Steps [first, last) under a plan, from what each member holds."""

    def worker(memory: MemoryPlanGroups) -> tuple[list[float], LocalState]:
        engine = engine_of(made, plan, memory, copy_of(given[memory.me]) if given is not None else None)
        losses = [engine.step(step, lambda: 0).outcome.vote.loss for step in range(first, last)]
        engine.settle()
        return losses, engine.state()

    found = run_threads(plan.members, worker)
    return found[plan.members[0]][0], {name: state for name, (_, state) in found.items()}


def layouts_of(made: Course, plan: Plan) -> Layouts:
    return Layouts(made.recipe().model.spec, plan)


def moved(made: Course, old: Plan, new: Plan, states: States) -> States:
    members = tuple(dict.fromkeys((*old.members, *new.members)))
    before, after = layouts_of(made, old), layouts_of(made, new)

    def work(end: MemoryTransport) -> Moved:
        me = end.members[end.rank]
        return migrate(before, after, states.get(me, LocalState()), end)

    found = at_once(MemoryTransport.connect(members), work)
    results = dict(zip(members, found, strict=True))
    states = {}
    for name in new.members:
        result = results[name]
        assert isinstance(result, Moved), result
        states[name] = result.state
    return states


def assert_same(made: Course, old: Plan, states: States, new: Plan, others: States) -> None:
    for plane in (VALUE, MASTER, "exp_avg", "exp_avg_sq"):
        one, two = (whole_planes(layouts_of(made, p), s, plane) for p, s in ((old, states), (new, others)))
        assert one, plane
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one), plane
    (extras,) = {str(sorted(state.extras.items())) for state in (*states.values(), *others.values())}
    assert ("scaler" in extras) == (made.precision is COUNTING)


@pytest.mark.parametrize("name", sizes.beside(["fp16"], HALVES))
def test_a_switch_keeps_every_bit_of_master_weights_moments_and_scale(name: str) -> None:
    made = course_in(HALVES[name])
    expected = alone(made)
    losses, states = trained(made, BEFORE, 0, 1)
    there = moved(made, BEFORE, AFTER, states)
    assert_same(made, BEFORE, states, AFTER, there)
    more, states = trained(made, AFTER, 1, 3, there)
    back = moved(made, AFTER, BEFORE, states)
    assert_same(made, AFTER, states, BEFORE, back)
    last, states = trained(made, BEFORE, 3, 4, back)
    assert [*losses, *more, *last] == pytest.approx(expected.losses, rel=NEAR[name])
    found = replace(expected, weights=whole_planes(layouts_of(made, BEFORE), states, MASTER))
    assert apart(made, found, expected) < NEAR[name]
    if made.precision is COUNTING:
        assert expected.scale == 64.0
        assert all('"scale",{"float":"0x1.0000000000000p+6"}' in s.extras["scaler"] for s in states.values())


def spec_of(made: Course) -> JobSpec:
    return JobSpec(
        job="job",
        model=layouts_of(made, BEFORE).spec,
        global_batch=BATCH,
        micro_batch=1,
        samples=64,
        sample_tokens=9.0,
        seed=SEED,
        numbers=made.precision.numbers if made.precision else None,
    )


def saved(made: Course, folder: Path) -> tuple[States, Path, Manifest]:
    """The checkpoint of two steps."""
    _, states = trained(made, BEFORE, 0, 2)
    layouts, spec = layouts_of(made, BEFORE), spec_of(made)
    tasks = [task_of(folder, layouts, device, 2, states[device], spec) for device in BEFORE.members]
    path = write(folder, tasks, LocalDisk())
    manifest = look(path).manifest
    assert manifest is not None
    return states, path, manifest


@pytest.mark.parametrize("name", sizes.beside(["fp16"], HALVES))
def test_a_checkpoint_is_gone_on_from_under_another_layout_to_the_bit(name: str, tmp_path: Path) -> None:
    made = course_in(HALVES[name])
    states, path, manifest = saved(made, tmp_path)
    held = {device: layouts_of(made, AFTER).held(device) for device in AFTER.members}
    loaded = {device: load(path, manifest, held[device]) for device in AFTER.members}
    assert_same(made, BEFORE, states, AFTER, loaded)
    again, _ = trained(made, AFTER, 2, 3, loaded)
    switched, _ = trained(made, AFTER, 2, 3, moved(made, BEFORE, AFTER, states))
    assert again == switched


TYPES = {"fp32": None, **HALVES, "fp64": Precision(compute=torch.float64, master=torch.float64)}


@pytest.mark.parametrize(
    ("before", "after"),
    sizes.beside([("bf16", "fp16")], product(("fp32", *HALVES), repeat=2)),
)
def test_a_checkpoint_is_gone_on_from_in_another_precision(before: str, after: str, tmp_path: Path) -> None:
    """With what the optimizer stepped on, to the bit, and its moments; computed with is that, rounded."""
    was, now = course_in(TYPES[before]), course_in(TYPES[after])
    states, path, manifest = saved(was, tmp_path)
    spec = spec_of(now)
    assert not differences(manifest, spec.model, spec.numbers.master if spec.numbers else None)
    layouts = layouts_of(now, AFTER)
    types = Types(layouts=layouts, master=now.recipe().master)
    there = {each: load(path, manifest, layouts.held(each), types) for each in AFTER.members}
    stepped = together(layouts_of(was, BEFORE), states)
    assert together(layouts, there).keys() == stepped.keys()
    for name, weight in together(layouts, there).items():
        assert torch.equal(weight, stepped[name]), name
    for plane in ("exp_avg", "exp_avg_sq"):
        one, two = whole_planes(layouts_of(was, BEFORE), states, plane), whole_planes(layouts, there, plane)
        assert all(torch.equal(one[name], two[name]) for name in one), plane
    losses, _ = trained(now, AFTER, 2, 4, there)
    assert losses == pytest.approx(alone(now).losses[2:], rel=2e-2), "as if it had been so all the time"


def test_a_checkpoint_of_what_was_stepped_on_in_another_type_is_refused(tmp_path: Path) -> None:
    _, _, manifest = saved(course_in(None), tmp_path)
    spec = spec_of(course_in(TYPES["fp64"]))
    assert "float32 in the checkpoint and" in differences(manifest, spec.model)
    assert "float64" in differences(manifest, spec.model)


OTHERS = {
    "no master weights": Precision(compute=torch.bfloat16, master=torch.bfloat16),
    "master weights of another type": Precision(compute=torch.bfloat16, master=torch.float64),
}


@pytest.mark.parametrize("name", OTHERS)
def test_master_weights_are_neither_dropped_nor_taken_for_others(name: str, tmp_path: Path) -> None:
    """Though what is computed in is the same."""
    _, _, manifest = saved(course_in(TYPES["bf16"]), tmp_path)
    spec = spec_of(course_in(OTHERS[name]))
    master = spec.numbers.master if spec.numbers else None
    wanted = "bfloat16" if master is None else "float64"
    found = differences(manifest, spec.model, master)
    assert "float32 in the checkpoint and" in found
    assert found.endswith(f" {wanted} in the model")


def test_an_overflow_is_skipped_by_all_ranks_as_by_torchs_scaler() -> None:
    """The first steps overflow; then the scale holds, and grows until it overflows again."""
    rules = LossScale(first=2.0**30, backoff=2.0**-11, growth=2.0**11, interval=2)
    made = course_in(Precision(compute=torch.float16, scale=rules), steps=7)
    expected = alone(made)
    assert expected.applied[0] is False
    assert True in expected.applied
    assert False in expected.applied[expected.applied.index(True) :]
    for plan in (BEFORE, AFTER):
        found = under(made, plan)
        assert found.applied == expected.applied
        assert found.scale == expected.scale
        assert apart(made, found, expected) < NEAR["fp16"]


def test_the_scale_follows_torchs_rules() -> None:
    draw = random.Random(0)
    for _ in range(20):
        rules = LossScale(first=2.0 ** draw.randint(-4, 126), interval=draw.randint(1, 3))
        ours = LossScaler(rules)
        theirs = torch.amp.GradScaler(
            "cpu", init_scale=rules.first, growth_interval=rules.interval, backoff_factor=rules.backoff
        )
        weight = torch.nn.Parameter(torch.zeros(1))
        update = torch.optim.SGD([weight], lr=0.0)
        for _ in range(30):
            applied = draw.random() < 0.7
            theirs.scale(torch.zeros(1))
            weight.grad = torch.full((1,), 0.0 if applied else torch.inf)
            theirs.step(update)
            theirs.update()
            ours.after(applied=applied)
            assert ours.scale == theirs.get_scale()
        again = LossScaler(rules)
        again.load_state_dict(ours.state_dict())
        assert again.state_dict() == ours.state_dict()


def test_first_values_are_not_rounded_before_they_are_master_weights() -> None:
    made = course_in(PRECISIONS["bf16"], steps=0)
    weights, first = under(made, AFTER).weights, dict(made.whole.named_parameters())
    assert all(torch.equal(weight.reshape(-1), first[name].reshape(-1)) for name, weight in weights.items())


def test_types_are_those_of_the_precision() -> None:
    """Two bytes of a value, four of a master weight and of each moment, whatever the buffers are."""
    made = course_in(PRECISIONS["bf16"], steps=1)
    spec = made.recipe().model.spec
    assert spec.dtype == "bfloat16"
    assert made.training.model.spec.dtype == "float32", "the user's model is not changed"
    _, states = trained(made, BEFORE, 0, 1)
    for state in states.values():
        for item, tensor in state.tensors.items():
            planes = {name: plane.dtype for shard in tensor.shards for name, plane in shard.planes.items()}
            if item.role == "value":
                assert planes == {"value": torch.bfloat16}
            elif item.role == "state":
                assert planes == dict.fromkeys(("exp_avg", "exp_avg_sq", "master"), torch.float32)


class Pair(NamedTuple):
    pixels: Any
    labels: torch.Tensor


def test_what_is_floating_point_in_a_batch_enters_in_the_type_that_is_computed_in() -> None:
    half, ids, pixels = Precision(compute=torch.bfloat16), torch.arange(3), torch.ones(3)
    tokens = UserDict(inputs=ids, name="a")
    assert half.entering(tokens) is tokens
    pair = half.entering(Pair([pixels, 7], ids))
    assert isinstance(pair, Pair)
    assert (pair.pixels[0].dtype, pair.pixels[1]) == (torch.bfloat16, 7)
    assert pair.labels is ids
    assert half.entering({"x": (pixels,)})["x"][0].dtype == torch.bfloat16
    assert half.leaving(pixels.bfloat16()).dtype == torch.float32


def test_what_a_job_can_be_given() -> None:
    assert precision_of(None, 100) is None
    assert precision_of("bf16", 100) == Precision(compute=torch.bfloat16)
    whole = precision_of("fp32", 100)
    assert whole == Precision(compute=torch.float32)
    assert whole is not None
    assert whole.numbers is None
    half = precision_of("fp16", 4096)
    assert half is not None
    assert half.scale == LossScale(first=16.0), "65536 over the targets of a step"
    model = course_in(None).training.model
    assert lowered(model, None) is model
    wrong: Any = "int8"
    with pytest.raises(ValueError, match="precision must be one of 'fp32', 'bf16', 'fp16'"):
        precision_of(wrong, 100)
    with pytest.raises(ValueError, match="no finer"):
        Precision(compute=torch.bfloat16, master=torch.float16)
    with pytest.raises(ValueError, match="no type to train in"):
        Precision(compute=torch.int8)
    with pytest.raises(ValueError, match="backoff between 0 and 1"):
        LossScale(first=1.0, backoff=2.0)


def test_master_weights_of_another_type_are_refused() -> None:
    made = course_in(PRECISIONS["bf16"], steps=1)
    _, states = trained(made, BEFORE, 0, 1)
    other = replace(made, precision=Precision(compute=torch.bfloat16, master=torch.float64))
    with pytest.raises(ValueError, match=r"master weights are torch.float32, and this job's are torch.float64"):
        trained(other, BEFORE, 1, 2, states)
