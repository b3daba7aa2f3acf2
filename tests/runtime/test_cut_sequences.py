"""Training with sequences that are cut over lanes is that of one process, to the last bits of float64."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from elasticd_planner.spec.batch import BatchPlan, BatchRow, SequencePiece
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.plan import Pipeline, Plan
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from elasticd.models import Decoder
from elasticd.models.decoder import IGNORED, Block
from elasticd.runtime.api.evaluation import HeldOut, evaluate
from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.in_memory import MemoryPlanGroups, run_threads
from elasticd.runtime.data.options import DataOptions
from elasticd.runtime.data.packing import Packing
from elasticd.runtime.data.prefetch import SamplePrefetcher
from elasticd.runtime.data.step_samples import MapStyleSamples
from elasticd.runtime.engine.parallelism import ParallelismOptions
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.parallel import context_parallel
from tests import sizes
from tests.planner.test_context_exchange import cut
from tests.runtime import gang, test_engine_parity, test_lanes
from tests.runtime.test_engine import engine_on
from tests.runtime.test_engine_parity import Text, make_recipe, plan_of, stage
from tests.runtime.test_packed import HeldOutText, check, dropping, in_threads, length, packed, trained

ONES = (1, 1, 1, 1)
PLANS = {
    **test_lanes.PLANS,
    "five lanes": plan_of(
        ((1, 2, 2, 2, 1), [stage(0, 6, *((f"{n}/0", 1) for n in "abcde"), lanes=(1, 1, 1, 1, 1))]),
    ),
    "TP 1 beside 3 + 1, two stages": plan_of(
        (
            (5, 3),
            [
                stage(0, 3, ("a/0", 1), ("b/0", 3), ("b/1", 1), lanes=(1, 2)),
                stage(3, 6, ("a/1", 1), ("b/2", 1), lanes=(1, 1)),
            ],
        ),
    ),
}
#: Keys of one node go to the other once for both its lanes.
PLANS["four lanes on two nodes, two stages"] = plan_of(
    (
        (2, 2, 3, 1),
        [
            stage(
                start, start + 3, *((f"{node}/{at + start}", 1) for node in "ab" for at in (0, 1)), lanes=ONES
            )
            for start in (0, 3)
        ],
    ),
)
POLICIES = test_lanes.POLICIES
#: Each layout without ZeRO, and each policy once.
SOME = [
    ("TP 1 beside 3 + 1, two stages", "zero 0"),
    ("2 + 1, uneven, in two stages", "zero 1"),
    ("two pipelines of lanes, micro-batches of two", "zero 2"),
]


class Cutting(MapStyleSamples):
    """Cuts sequences over drawn lanes in drawn shares, and gives lanes unequal numbers of rows."""

    shares: tuple[int, ...] = (1, 2, 3, 4, 5)
    length = staticmethod(length)

    def dealing(self, plan: Plan, step: int, slowdown: Sequence[int] | None = None) -> Callable[[], BatchPlan]:
        drawn, samples = random.Random(step), list(self.samples(step))
        parts: list[list[int]] = [[] for _ in plan.pipelines]
        for at, sample in enumerate(samples):
            parts[at % len(parts)].append(sample)
        rows = tuple(
            tuple(self._rows(drawn, pipeline, part))
            for pipeline, part in zip(plan.pipelines, parts, strict=True)
        )
        dealt = BatchPlan(step=step, plan=plan.number, pipelines=rows, packed=True)
        return lambda: dealt

    def _rows(self, drawn: random.Random, pipeline: Pipeline, samples: list[int]) -> Iterator[BatchRow]:
        lanes = len(pipeline.micro_batches_by_lane)
        left = list(samples)
        while left:
            row: list[list[SequencePiece]] = [[] for _ in range(lanes)]
            for sample in [left.pop() for _ in range(min(len(left), drawn.choice([1, 2, 3])))]:
                among = drawn.sample(range(lanes), drawn.randint(1, min(lanes, (self.length(sample) + 1) // 2)))
                shares = {lane: drawn.choice(self.shares) for lane in among}
                for lane, piece in cut(sample, self.length(sample), shares).items():
                    row[lane].append(piece)
            if not all(row) and drawn.random() < 0.5:  # else lanes are left out of the row
                row = [own or [self._whole(left)] if left else own for own in row]
            yield BatchRow(lanes=tuple(map(tuple, row)))

    def _whole(self, left: list[int]) -> SequencePiece:
        sample = left.pop()
        return SequencePiece.whole(sample, self.length(sample))


def cutting(**changes: Any) -> Recipe:
    data = DataOptions(length=length, packing=Packing())
    made = replace(make_recipe(), data=data, **changes)
    return replace(made, source=Cutting(made.sampler, SamplePrefetcher(made.dataset, 0), length, 1))


class Eights(Text):
    """Samples of 8 or 16 tokens."""

    @staticmethod
    def length(index: int) -> int:
        return 8 + 8 * (index % 2)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        drawn = torch.Generator().manual_seed(index)
        ids = torch.randint(0, test_engine_parity.CONFIG.vocabulary, (self.length(index) + 1,), generator=drawn)
        return {"inputs": ids[:-1], "targets": ids[1:]}


class Evenly(Cutting):
    """Cuts them in equal parts, so that two and four lanes can divide heads as tokens."""

    shares = (1,)
    length = staticmethod(Eights.length)


def by_heads(**changes: Any) -> Recipe:
    """A model whose heads have keys each, so that fewer bytes move if lanes divide heads."""
    with torch.device("meta"):
        model = Decoder(replace(test_engine_parity.CONFIG, kv_heads=test_engine_parity.CONFIG.heads)).describe()
    data = DataOptions(length=Eights.length, packing=Packing())
    made = replace(make_recipe(), **{"model": model, "data": data, "dataset": Eights(), **changes})
    return replace(made, source=Evenly(made.sampler, SamplePrefetcher(made.dataset, 0), Eights.length, 1))


def cut_by_memory(**changes: Any) -> Recipe:
    """A row holds less than most sequences have."""
    data = DataOptions(length=length, packing=Packing(tokens=8, least=1))
    return replace(make_recipe(), data=data, **changes)


@pytest.mark.parametrize(("name", "policy"), sizes.beside(SOME, list(product(PLANS, POLICIES))))
def test_drawn_cuts_train_like_one_process(name: str, policy: str) -> None:
    plan = PLANS[name].replace(state=POLICIES[policy])
    check(plan, in_threads(plan, cutting))


@pytest.mark.parametrize("policy", sizes.beside(["zero 2"], ["zero 0", "zero 2"]))
@pytest.mark.parametrize("name", sizes.beside(["TP 1 beside 3 + 1, two stages"], PLANS))
def test_sequences_that_memory_cuts_train_like_one_process(name: str, policy: str) -> None:
    plan = PLANS[name].replace(state=POLICIES[policy])
    dealt = [cut_by_memory().feed.dealing(plan, step)() for step in range(test_engine_parity.STEPS)]
    pieces = [p for each in dealt for row in each.pipelines[0] for lane in row.lanes for p in lane]
    assert any(piece.tokens < piece.length for piece in pieces)
    check(plan, in_threads(plan, cut_by_memory))


@pytest.mark.parametrize(
    "name", ["2 + 1, uneven, in two stages", "interleaved, fewer rows than stages in one lane"]
)
def test_blocks_that_recompute_train_like_one_process(name: str) -> None:
    def make() -> Recipe:
        return cutting(parallelism=ParallelismOptions(recompute=True))

    check(PLANS[name], in_threads(PLANS[name], make))


def test_some_blocks_that_recompute_train_like_one_process() -> None:
    def make() -> Recipe:
        return cutting(parallelism=ParallelismOptions(recompute=lambda layer: layer % 2 == 0))

    plan = PLANS["three lanes of unlike width beside a deeper pipeline"]
    check(plan, in_threads(plan, make))


class Checkpointing(Block):
    """Makes its attention again in the backward pass, by torch's own means."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + checkpoint(self.attention, self.attention_norm(x), use_reentrant=False)
        return x + self.feed_forward(self.feed_forward_norm(x))


@pytest.mark.parametrize("recompute", sizes.beside([True], [False, True]))
def test_attention_under_torchs_checkpoint_trains_like_one_process(recompute: bool) -> None:
    """Its second pass exchanges keys once more, on all lanes alike."""

    def make() -> Recipe:
        with torch.device("meta"):
            model = Decoder(test_engine_parity.CONFIG)
            model.blocks = torch.nn.ModuleList(Checkpointing(test_engine_parity.CONFIG) for _ in model.blocks)
        return cutting(model=model.describe(), parallelism=ParallelismOptions(recompute=recompute))

    check(PLANS["2 + 1, uneven, in two stages"], in_threads(PLANS["2 + 1, uneven, in two stages"], make))


@pytest.mark.full
def test_compiled_blocks_train_cut_sequences_like_one_process(traced: None) -> None:
    def make() -> Recipe:
        return cutting(parallelism=ParallelismOptions(compile=True))

    check(PLANS["1 + 1"], in_threads(PLANS["1 + 1"], make))


BY_HEADS = {
    "four lanes on two nodes, two stages": "zero 0",
    "1 + 1": "zero 2",
    "interleaved, fewer rows than stages in one lane": "zero 0",
}


@pytest.mark.parametrize(
    ("name", "recompute"),
    sizes.beside(
        [("four lanes on two nodes, two stages", True)],
        list(product(BY_HEADS, [False, True])),
    ),
)
def test_lanes_that_divide_heads_train_like_one_device(
    name: str, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = []

    class Counted(context_parallel.HeadsForward):
        def begin(self, *row: Tensor) -> None:
            passes.append(1)
            super().begin(*row)

    kept: list[float] = []

    class Kept(context_parallel.RowExchange):
        def keep(self, given: Any) -> None:
            super().keep(given)
            kept.append(activations(given))

    monkeypatch.setattr(context_parallel, "HeadsForward", Counted)
    monkeypatch.setattr(context_parallel, "RowExchange", Kept)
    options = {"parallelism": ParallelismOptions(recompute=recompute)}
    plan = PLANS[name].replace(state=POLICIES[BY_HEADS[name]])
    found, again = (in_threads(plan, lambda: by_heads(**options)) for _ in range(2))
    assert len(passes) > 50
    assert not recompute or 4 < max(kept) <= 5, "what the planner takes such blocks to keep"
    assert apart_from_one_device(by_heads, found) < 1e-10
    for device, result in found.items():
        assert result["losses"] == again[device]["losses"]
        for parameter, (_, _, value) in result["weights"].items():
            assert (value == again[device]["weights"][parameter][2]).all(), "a repeated step has the same bits"


def activations(given: Any) -> float:
    """What an attention keeps for its second pass, as a multiple of its output; log-sum-exps do not count."""
    tensors = [given.whole, given.q, given.k, given.v, given.out]
    for each in given.by_heads.values():
        tensors += [each.q, each.k, each.v, each.out]
    own = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(own.values()) / given.whole.nbytes


def apart_from_one_device(make: Callable[[], Recipe], found: dict[str, dict[str, Any]]) -> float:
    """The largest difference of a weight or of a loss."""
    alone = in_threads(plan_of((8, [stage(0, 6, ("a/0", 1))])), make)["a/0"]
    worst = 0.0
    for result in found.values():
        worst = max(worst, *map(abs, np.subtract(result["losses"], alone["losses"])))
        for parameter, (start, stop, value) in result["weights"].items():
            whole = alone["weights"][parameter][2][tuple(map(slice, start, stop))]
            worst = max(worst, float(abs(value - whole).max()))
    return worst


def test_slices_of_tokens_between_cut_modules_train_like_one_process() -> None:
    plan = test_engine_parity.plan_of(
        (
            (5, 3),
            [stage(0, 6, ("a/0", 5), ("a/1", 3), ("b/0", 1), lanes=(2, 1), sequence_parallel=True)],
        ),
    )
    check(plan, in_threads(plan, lambda: cutting(parallelism=ParallelismOptions(sequence_parallel=True))))


class Masked(Text):
    """Targets at both ends alone, so that a piece from the middle has none; some samples have no target."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        targets = sample["targets"].clone()
        targets[1:-1] = IGNORED
        if index % 5 == 0:
            targets[:] = IGNORED
        return sample | {"targets": targets}


@pytest.mark.parametrize("recompute", sizes.beside([True], [False, True]))
def test_pieces_without_targets_give_their_keys_gradients(recompute: bool) -> None:
    """Those of the queries of other lanes, and no lane waits for a backward pass that does not come."""
    options = {"dataset": Masked(), "parallelism": ParallelismOptions(recompute=recompute)}
    alone = in_threads(plan_of((8, [stage(0, 6, ("a/0", 1))])), lambda: packed(**options))["a/0"]
    for result in in_threads(PLANS["2 + 1, uneven, in two stages"], lambda: cutting(**options)).values():
        assert result["losses"] == pytest.approx(alone["losses"], abs=1e-10)
        for name, (start, stop, value) in result["weights"].items():
            whole = alone["weights"][name][2][tuple(map(slice, start, stop))]
            assert float(abs(value - whole).max()) < 1e-10, name


def test_single_precision_trains_as_one_device_does() -> None:
    options = {"parallelism": ParallelismOptions(precision="fp32")}
    alone = in_threads(plan_of((8, [stage(0, 6, ("a/0", 1))])), lambda: packed(**options))["a/0"]
    found = in_threads(PLANS["2 + 1, uneven, in two stages"], lambda: cutting(**options))
    for result in found.values():
        assert result["losses"] == pytest.approx(alone["losses"], abs=1e-5)
        apart = size = 0.0
        for parameter, (start, stop, value) in result["weights"].items():
            there = tuple(map(slice, start, stop))
            apart += float(np.square(value - alone["weights"][parameter][2][there], dtype=np.float64).sum())
            first = make_recipe().model.first_value(
                parameter, Box(start=start, stop=stop), test_engine_parity.SEED
            )
            size += float(np.square(value - first.numpy(), dtype=np.float64).sum())
        assert apart < 1e-8 * size, f"{math.sqrt(apart / size)} of the update"


def test_half_precision_trains_as_one_device_does() -> None:
    options = {"parallelism": ParallelismOptions(precision="bf16")}

    def losses(plan: Plan, make: Callable[..., Recipe]) -> list[float | None]:
        def run(memory: MemoryPlanGroups) -> list[float | None]:
            engine = engine_on(memory, make(**options), plan)
            return [engine.step(step, lambda: 0).outcome.vote.loss for step in range(test_engine_parity.STEPS)]

        return run_threads(plan.members, run)[plan.members[0]]

    alone = losses(plan_of((8, [stage(0, 6, ("a/0", 1))])), packed)
    assert losses(PLANS["2 + 1, uneven, in two stages"], cutting) == pytest.approx(alone, abs=1e-2)


def test_dropouts_drop_of_a_cut_sequence_what_they_drop_of_the_whole() -> None:
    whole = in_threads(plan_of((8, [stage(0, 6, ("a/0", 1))])), lambda: dropping(make_recipe))["a/0"]
    for result in in_threads(PLANS["2 + 1, uneven, in two stages"], lambda: dropping(cutting)).values():
        assert result["losses"] == pytest.approx(whole["losses"], abs=1e-10)


def test_a_repeated_step_has_the_same_bits() -> None:
    plan = PLANS["three lanes of unlike width beside a deeper pipeline"]
    one, other = (in_threads(plan, cutting) for _ in range(2))
    for device, result in one.items():
        assert result["losses"] == other[device]["losses"]
        for name, (_, _, value) in result["weights"].items():
            assert (value == other[device]["weights"][name][2]).all(), name


def test_an_evaluation_cuts_sequences_as_the_training_does() -> None:
    plan, alone = PLANS["2 + 1, uneven, in two stages"], plan_of((8, [stage(0, 6, ("a/0", 1))]))

    def run(memory: MemoryPlanGroups, plan: Plan, make: Callable[[], Recipe]) -> tuple[float, int]:
        recipe = make()
        engine = engine_on(memory, recipe, plan)
        done = evaluate(engine, HeldOut(dataset=HeldOutText()), "held", 0, recipe.loss, recipe.data, "value")
        return done.loss, int(done.counts["loss"])

    right = run_threads(alone.members, lambda memory: run(memory, alone, packed))["a/0"]
    for loss, count in run_threads(plan.members, lambda memory: run(memory, plan, cut_by_memory)).values():
        assert (loss, count) == (pytest.approx(right[0], abs=1e-12), right[1])


def worker(device: str, store: Any, plan: Plan) -> dict[str, Any]:
    """As one of several processes, over gloo."""
    return trained(
        device, plan, PlanGroups("plan/1", device, "127.0.0.1", store), cutting(), test_engine_parity.STEPS
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", sizes.beside(["three lanes of unlike width beside a deeper pipeline"], PLANS))
def test_processes_train_cut_sequences_like_one(name: str) -> None:
    check(PLANS[name], gang.run(__file__, "worker", PLANS[name].members, PLANS[name]))
