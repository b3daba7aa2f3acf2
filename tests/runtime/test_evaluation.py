"""Evaluation on a held-out set: the exact mean over all of it under any plan, and training as without it."""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from dataclasses import replace
from itertools import product
from typing import Any, ClassVar

import pytest
import torch
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.plan import Plan, StatePolicy
from torch import Tensor
from torch.utils.data import DataLoader

import elasticd
from elasticd.models import Decoder, next_token_loss
from elasticd.runtime.api.ema import MeasureError
from elasticd.runtime.api.evaluation import Evaluation, HeldOut, evaluate, rounds
from elasticd.runtime.api.full_state_dict import gathered
from elasticd.runtime.comm.in_memory import MemoryPlanGroups, run_threads
from elasticd.runtime.data.collate import pad
from elasticd.runtime.data.options import DataOptions
from elasticd.runtime.data.prefetch import SampleError
from elasticd.runtime.engine.mixed_precision import Precision
from elasticd.runtime.engine.parallelism import ParallelismOptions
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.model.validation import ModelError
from tests import sizes
from tests.models.test_sequence_parallel import sliced
from tests.runtime.state_reader import StateReader
from tests.runtime.test_engine import TWO_STAGES, UNEQUAL, Torn, engine_on
from tests.runtime.test_engine_parity import CONFIG, SEED, Text, make_recipe, plan_of, stage
from tests.runtime.test_lanes import PLANS as LANES
from tests.runtime.test_pipeline_stage_interleaved import PLANS as INTERLEAVED

DECAY, STEPS = 0.75, sizes.number(full=3, quick=2)
PLANS = {
    "two stages": TWO_STAGES,
    "unequal pipelines and groups": UNEQUAL,
    "zero 2": UNEQUAL.replace(state=StatePolicy(zero=2, replicas=1)),
    "interleaved": INTERLEAVED["three stages, two chunks, unequal groups"],
    "lanes": LANES["2 + 1, uneven, in two stages"],
    "sequence parallel": sliced(UNEQUAL),
}


class Held(Text):
    """Fewer samples than a whole number of steps, of other indices than the training's."""

    def __len__(self) -> int:
        return 27

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return super().__getitem__(1000 + index)


class Known(Held):
    """With their lengths."""

    lengths = tuple(5 + (1000 + index) % 9 for index in range(27))


def right(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    targets = batch["targets"]
    counted = targets != -100
    return ((output.argmax(-1) == targets) & counted).sum(), int(counted.sum())


def optimizer(named: Any) -> torch.optim.Optimizer:
    return elasticd.average(torch.optim.AdamW(named, lr=1e-2, weight_decay=0.1), DECAY)


def recipe() -> Recipe:
    return replace(make_recipe(), optimizer=optimizer, clip=None)


def plain() -> dict[str, list[tuple[float, float]]]:
    """Loss and accuracy after each step in one process, of the weights and of their running mean."""
    made = recipe()
    model, mean = Decoder(CONFIG), Decoder(CONFIG)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(made.model.first_value(name, Box.whole(parameter.shape), SEED))
    update = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    found: dict[str, list[tuple[float, float]]] = {"value": [], "average": []}
    for step in range(STEPS):
        batch = pad([Text()[i] for i in made.sampler.samples(step)])
        total, count = next_token_loss(model(batch), batch)
        update.zero_grad()
        (total / count).backward()
        update.step()
        with torch.no_grad():
            for kept, parameter in zip(mean.parameters(), model.parameters(), strict=True):
                kept.copy_(parameter if step == 0 else DECAY * kept + (1 - DECAY) * parameter)
            held = pad([Held()[i] for i in range(len(Held()))])
            for weights, each in (("value", model), ("average", mean)):
                output = each(held)
                (loss, targets), (hits, counted) = next_token_loss(output, held), right(output, held)
                found[weights].append((float(loss) / targets, float(hits) / counted))
    return found


def under(plan: Plan, dataset: Any, precision: Precision | None = None) -> dict[str, list[tuple[float, float]]]:
    """The same under a plan; every member has the same bits, and training goes on as without evaluations."""

    def worker(plan_groups: MemoryPlanGroups) -> dict[str, list[Evaluation]]:
        made = recipe()
        made = replace(made, parallelism=ParallelismOptions(precision=precision))
        engine = engine_on(plan_groups, made, plan)
        held, found = HeldOut(dataset=dataset, measures={"right": right}), dict[str, list[Evaluation]]()
        for step in range(STEPS):
            engine.step(step, lambda: 0)
            reader = StateReader(engine)
            for weights in ("average", "value"):
                done = evaluate(engine, held, "held", step + 1, next_token_loss, DataOptions(), weights)
                found.setdefault(weights, []).append(done)
            assert reader.waited_for, "parameters and averages are swapped in place"
        assert not engine.health.stale
        assert all(
            part.training for module in engine.module.local.modules.values() for part in module.modules()
        )
        return found

    results = run_threads(plan.members, worker)
    first = results[plan.members[0]]
    assert all(each == first for each in results.values()), "all members have the same bits"
    assert [each.samples for each in first["value"]] == [len(dataset)] * STEPS
    return {
        weights: [(each.loss, each.means["right"]) for each in evaluations]
        for weights, evaluations in first.items()
    }


@pytest.fixture(scope="module")
def expected() -> dict[str, list[tuple[float, float]]]:
    return plain()


@pytest.mark.parametrize("name", sizes.beside(["zero 2", "lanes"], PLANS))
def test_every_plan_gives_the_mean_over_the_whole_set_of_weights_and_of_their_average(
    name: str, expected: dict[str, list[tuple[float, float]]]
) -> None:
    found = under(PLANS[name], Held())
    for weights, values in expected.items():
        assert [pair for each in found[weights] for pair in each] == pytest.approx(
            [pair for each in values for pair in each], abs=1e-10
        )


@pytest.mark.parametrize("zero", [0, 1])
def test_average_of_master_weights_is_what_is_computed_with(
    zero: int, expected: dict[str, list[tuple[float, float]]]
) -> None:
    plan = UNEQUAL.replace(state=StatePolicy(zero=zero, replicas=1 if zero else None))
    found = under(plan, Held(), Precision(compute=torch.float32, master=torch.float64))
    for weights, values in expected.items():
        losses = [loss for loss, _ in values]
        assert [loss for loss, _ in found[weights]] == pytest.approx(losses, abs=1e-5)
        assert abs(losses[-1] - expected["value" if weights == "average" else "average"][-1][0]) > 1e-3


def test_weights_are_as_they_were_after_their_average_was_evaluated_in_bfloat16() -> None:
    precision = Precision(compute=torch.bfloat16)

    def worker(plan_groups: MemoryPlanGroups) -> None:
        made = replace(make_recipe(), optimizer=optimizer, clip=None)
        made = replace(made, parallelism=ParallelismOptions(precision=precision))
        engine = engine_on(plan_groups, made, TWO_STAGES)
        for step in range(2):
            engine.step(step, lambda: 0)
        before = {n: p.detach().clone() for n, (_, p) in engine.module.local.parameters.items()}
        masters = [part.parameter.detach().clone() for part in engine.owned]
        evaluate(engine, HeldOut(dataset=Held()), "held", 2, next_token_loss, DataOptions(), "average")
        assert all(torch.equal(before[n], p) for n, (_, p) in engine.module.local.parameters.items())
        assert all(torch.equal(a, b.parameter) for a, b in zip(masters, engine.owned, strict=True))

    run_threads(TWO_STAGES.members, worker)


def test_a_set_of_known_lengths_is_dealt_by_them_and_gives_the_same(
    expected: dict[str, list[tuple[float, float]]],
) -> None:
    found = under(UNEQUAL, Known())
    assert found["value"][-1] == pytest.approx(expected["value"][-1], abs=1e-10)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 27, 64])
@pytest.mark.parametrize("name", PLANS)
def test_every_sample_is_dealt_once(name: str, size: int) -> None:
    plan = PLANS[name]
    dealt = list(rounds(plan, [{}] * size, 1))
    assert sorted(i for each in dealt for i in each.samples()) == [*range(size)]
    for each in dealt:
        for place in plan.places.values():
            micro = each.of(place)
            assert len(micro) <= plan.pipeline(place).micro_batches
            assert all(len(samples) <= plan.micro_batch for samples in micro)


@pytest.mark.parametrize(
    ("name", "weights"),
    sizes.beside(
        [("two stages", "value"), ("zero 2", "average")],
        product(("two stages", "zero 2"), ("value", "average")),
    ),
)
def test_a_sample_that_cannot_be_read_is_named_on_every_member_and_the_weights_are_as_they_were(
    name: str, weights: str
) -> None:
    plan = PLANS[name]

    def worker(plan_groups: MemoryPlanGroups) -> tuple[str, bool, bool]:
        engine = engine_on(plan_groups, recipe(), plan)
        for step in range(2):
            engine.step(step, lambda: 0)
        engine.delivered()
        before = {n: p.detach().clone() for n, (_, p) in engine.module.local.parameters.items()}
        with pytest.raises(SampleError, match="sample 19 ") as caught:
            evaluate(engine, HeldOut(dataset=Torn(19)), "held", 2, next_token_loss, DataOptions(), weights)
        same = all(torch.equal(before[n], p) for n, (_, p) in engine.module.local.parameters.items())
        return str(caught.value), same, engine.health.stale

    found = run_threads(plan.members, worker)
    assert all(same and not stale for _, same, stale in found.values())
    assert any("the disk is gone" in text for text, _, _ in found.values())


class OneHandle(Text):
    """Two parts of one file, which threads read in turn. Those that read any of them are noted."""

    threads: ClassVar[dict[str, set[int]]] = {}
    handles: ClassVar[dict[str, threading.Lock]] = defaultdict(threading.Lock)

    def __init__(self, rank: str, size: int) -> None:
        self._rank, self._size = rank, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.threads.setdefault(self._rank, set()).add(threading.get_ident())
        handle = self.handles[self._rank]
        assert handle.acquire(blocking=False), "another thread reads"
        time.sleep(1e-5)  # others run meanwhile
        sample = super().__getitem__(index)
        handle.release()
        return sample


@pytest.mark.parametrize("readers", [0, 1])
def test_one_thread_at_a_time_reads_the_samples_of_the_training_and_of_held_out_sets(readers: int) -> None:
    def worker(plan_groups: MemoryPlanGroups) -> int:
        me = plan_groups.me
        made = replace(recipe(), dataset=OneHandle(me, 1000), data=DataOptions(readers=readers))
        OneHandle.threads.pop(me, None)  # the mean length of samples was asked for
        engine, held = engine_on(plan_groups, made, TWO_STAGES), HeldOut(dataset=OneHandle(me, 27))
        for step in range(4):
            engine.step(step, lambda: 0)
            evaluate(engine, held, "held", step + 1, next_token_loss, made.data, "value")
        return threading.get_ident()

    found = run_threads(TWO_STAGES.members, worker)
    for rank, trains in found.items():
        others = OneHandle.threads[rank] - {trains}
        assert len(others) == readers


@pytest.mark.parametrize("name", ["two stages", "zero 2"])
def test_a_measure_that_raises_on_one_member_raises_alike_on_all_and_weights_are_as_they_were(
    name: str,
) -> None:
    """A script that catches it on one rank alone trains on as the others do."""
    plan = PLANS[name]
    last = plan.pipelines[0].stages[-1].devices[0]

    def worker(plan_groups: MemoryPlanGroups) -> tuple[str, bool, bool, float]:
        engine = engine_on(plan_groups, recipe(), plan)
        for step in range(2):
            engine.step(step, lambda: 0)
        engine.delivered()
        before = {n: p.detach().clone() for n, (_, p) in engine.module.local.parameters.items()}

        def torn(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
            if engine.device == last:
                raise ValueError("no such class")
            return right(output, batch)

        held = HeldOut(dataset=Held(), measures={"torn": torn})
        with pytest.raises(MeasureError) as caught:
            evaluate(engine, held, "held", 2, next_token_loss, DataOptions(), "average")
        assert isinstance(caught.value.__cause__, ValueError) == (engine.device == last)
        same = all(torch.equal(before[n], p) for n, (_, p) in engine.module.local.parameters.items())
        again = evaluate(engine, HeldOut(dataset=Held()), "held", 2, next_token_loss, DataOptions(), "value")
        engine.step(2, lambda: 0)
        return str(caught.value), same, engine.health.stale, again.loss

    found = run_threads(plan.members, worker)
    assert all(same for _, same, _, _ in found.values())
    ((text, loss),) = {(text, loss) for text, _, _, loss in found.values()}
    assert "raised ValueError: no such class (" in text
    assert text.endswith(f"(on {last})")
    assert loss > 0


def test_a_buffer_that_an_evaluation_changes_on_one_member_is_refused_alike_on_all() -> None:
    """A script that catches it on one rank alone trains on as the others do."""
    last = TWO_STAGES.pipelines[0].stages[-1].devices[0]

    def worker(plan_groups: MemoryPlanGroups) -> str:
        engine = engine_on(plan_groups, recipe(), TWO_STAGES)

        def evaluated() -> None:
            raise ModelError("blocks.5.mean: forward changes this buffer")

        if engine.device == last:
            engine.evaluated = evaluated  # type: ignore[method-assign]
        with pytest.raises(ModelError) as caught:
            evaluate(engine, HeldOut(dataset=Held()), "held", 0, next_token_loss, DataOptions(), "value")
        engine.step(0, lambda: 0)
        return str(caught.value)

    assert set(run_threads(TWO_STAGES.members, worker).values()) == {
        "blocks.5.mean: forward changes this buffer"
    }


def test_a_rank_whose_evaluation_ends_alone_meets_the_others_before_its_next_step() -> None:
    """As one without memory for it, whose script goes on: its training would meet their evaluation."""

    def worker(plan_groups: MemoryPlanGroups) -> tuple[bool, bool]:
        engine = engine_on(plan_groups, recipe(), TWO_STAGES)
        held = HeldOut(dataset=Held())
        with pytest.raises(SampleError):
            evaluate(engine, HeldOut(dataset=Torn(19)), "held", 0, next_token_loss, DataOptions(), "value")
        alike = engine.after_recovery
        assert engine.module.runner is not None

        def forward(*arguments: Any) -> Any:
            raise torch.OutOfMemoryError("no memory")

        engine.module.runner.forward = forward  # type: ignore[method-assign]
        with pytest.raises(torch.OutOfMemoryError):
            evaluate(engine, held, "held", 0, next_token_loss, DataOptions(), "value")
        return alike, engine.after_recovery

    assert set(run_threads(TWO_STAGES.members, worker).values()) == {(False, True)}


def test_one_member_alone_evaluates_round_after_round() -> None:
    plan = plan_of((8, [stage(0, 6, ("a/0", 1))]))

    def worker(plan_groups: MemoryPlanGroups) -> int:
        engine = engine_on(plan_groups, recipe(), plan)
        held = HeldOut(dataset=Held(), measures={"right": right})
        return evaluate(engine, held, "held", 0, next_token_loss, DataOptions(), "value").samples

    assert run_threads(plan.members, worker) == {"a/0": 27}


def test_a_measure_without_a_finite_mean_has_none_and_the_evaluation_goes_on() -> None:
    def worker(plan_groups: MemoryPlanGroups) -> dict[str, float]:
        engine = engine_on(plan_groups, recipe(), TWO_STAGES)
        signs = iter((math.inf, -math.inf) * 100)
        held = HeldOut(dataset=Held(), measures={"odd": lambda output, batch: (next(signs), 1)})
        return dict(evaluate(engine, held, "held", 0, next_token_loss, DataOptions(), "value").means)

    for means in run_threads(TWO_STAGES.members, worker).values():
        assert math.isnan(means["odd"])
        assert means["loss"] > 0


def test_an_average_that_nobody_keeps_is_refused() -> None:
    def worker(plan_groups: MemoryPlanGroups) -> None:
        engine = engine_on(plan_groups, make_recipe(), TWO_STAGES)
        with pytest.raises(ValueError, match=r"elasticd.average\(optimizer, decay\)"):
            evaluate(engine, HeldOut(dataset=Held()), "held", 0, next_token_loss, DataOptions(), "average")
        with pytest.raises(ValueError, match=r"elasticd.average\(optimizer, decay\)"):
            gathered(engine, "average")

    run_threads(TWO_STAGES.members, worker)


def test_an_empty_set_and_a_measure_of_the_losss_name_are_refused() -> None:
    with pytest.raises(ValueError, match="the dataset is empty"):
        HeldOut(dataset=[])
    with pytest.raises(TypeError, match="of type DataLoader: give the loader's dataset, and its"):
        elasticd.EvaluationOptions(held_out=DataLoader(Held()))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"of type dict with 'validation': give one of them, dataset\[...\]"):
        HeldOut(dataset={"validation": Held()})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="of type generator, without a length or"):
        HeldOut(dataset=(i for i in range(3)))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="held_out: right is 1; it must be a function"):
        HeldOut(dataset=Held(), measures={"right": 1})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="give the measure another name"):
        HeldOut(dataset=[{}], measures={"loss": right})
