"""Packed rows: sequences of unequal length in rows without padding train as one process does, one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, cast

import numpy as np
import pytest
import torch
from elasticd_planner.spec.batch import BatchPlan, BatchRow, SequencePiece
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.plan import Plan
from torch import Tensor

from elasticd.models import Decoder, next_token_loss
from elasticd.models.decoder import Block, DecoderConfig
from elasticd.runtime.api.evaluation import HeldOut, evaluate, rounds
from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.in_memory import MemoryPlanGroups, run_threads
from elasticd.runtime.data.collate import Unlike, pad
from elasticd.runtime.data.loader import Loader
from elasticd.runtime.data.options import DataOptions
from elasticd.runtime.data.packing import Packing, pack
from elasticd.runtime.data.prefetch import SampleError, SamplePrefetcher
from elasticd.runtime.data.sample_ledger import LedgerError
from elasticd.runtime.data.step_samples import MapStyleSamples
from elasticd.runtime.engine.parallelism import ParallelismOptions
from elasticd.runtime.engine.recipe import Recipe
from tests import sizes
from tests.runtime import gang, test_engine_parity, test_lanes
from tests.runtime.test_engine import engine_on
from tests.runtime.test_engine_parity import Text, make_recipe, plan_of, reference, stage

PLANS = {
    "one device": plan_of((8, [stage(0, 6, ("a/0", 1))])),
    **test_engine_parity.PLANS,
    **test_lanes.PLANS,
}
POLICIES = test_lanes.POLICIES
SOME = [
    ("one device", "zero 0"),
    ("tp3+tp1 beside tp2", "zero 0"),
    ("sequence parallel, interleaved, beside a group without", "zero 1"),
    ("three lanes of unlike width beside a deeper pipeline", "zero 2"),
    ("interleaved, fewer rows than stages in one lane", "zero 0"),
]


def length(index: int) -> int:
    """Tokens of a sample of `Text`."""
    return 5 + index % 9


def packed(tokens: int | None = 30, **changes: Any) -> Recipe:
    return replace(
        make_recipe(), data=DataOptions(length=length, packing=Packing(tokens=tokens, cut=False)), **changes
    )


def trained(device: str, plan: Plan, groups: PlanGroups, recipe: Recipe, steps: int) -> dict[str, Any]:
    engine = engine_on(groups, recipe, plan)
    done = [engine.step(step, lambda: 0) for step in range(steps)]
    engine.settle()
    return {
        "losses": [each.outcome.vote.loss for each in done],
        "tokens": [each.outcome.vote.tokens for each in done],
        "samples": [each.samples for each in done],
        "measured": done[-1].measurement,
        "weights": {
            n: (box.start, box.stop, p.detach().cpu().numpy())
            for n, ((box,), p) in engine.module.local.parameters.items()
        },
    }


def in_threads(plan: Plan, make: Callable[[], Recipe] = packed) -> dict[str, dict[str, Any]]:
    return run_threads(
        plan.members,
        lambda memory: trained(memory.me, plan, cast(PlanGroups, memory), make(), test_engine_parity.STEPS),
    )


def worker(device: str, store: Any, plan: Plan) -> dict[str, Any]:
    """As one of several processes, over gloo."""
    return trained(
        device, plan, PlanGroups("plan/1", device, "127.0.0.1", store), packed(), test_engine_parity.STEPS
    )


def check(plan: Plan, found: dict[str, dict[str, Any]], recipe: Recipe | None = None) -> None:
    losses, _, weights = reference(test_engine_parity.STEPS, recipe)
    sampler = (recipe or make_recipe()).sampler
    for device, result in found.items():
        assert result["losses"] == pytest.approx(losses, abs=1e-10)
        assert [sorted(each) for each in result["samples"]] == [
            sorted(sampler.samples(step)) for step in range(test_engine_parity.STEPS)
        ]
        assert result["tokens"] == [
            sum(map(length, sampler.samples(step))) for step in range(test_engine_parity.STEPS)
        ], "no padding"
        for name, (start, stop, value) in result["weights"].items():
            whole = weights[name][tuple(map(slice, start, stop))]
            apart = float((torch.from_numpy(value) - whole).abs().max())
            assert apart < 1e-10, f"{device} {name}: {apart}"


@pytest.mark.parametrize(("name", "policy"), sizes.beside(SOME, list(product(PLANS, POLICIES))))
def test_packed_rows_train_like_one_process(name: str, policy: str) -> None:
    plan = PLANS[name].replace(state=POLICIES[policy])
    check(plan, in_threads(plan))


def by_tokens(cut: bool = False) -> Recipe:
    """Steps of 70 tokens, and of as many samples as these are."""
    data = DataOptions(length=length, packing=Packing(tokens=30, cut=cut, least=1), global_tokens=70)
    return replace(make_recipe(), data=data)


@pytest.mark.parametrize("name", ["one device", "three lanes of unlike width beside a deeper pipeline"])
def test_steps_of_so_many_tokens_train_like_one_process(name: str) -> None:
    found = in_threads(PLANS[name], by_tokens)
    check(PLANS[name], found, by_tokens())
    steps = next(iter(found.values()))["samples"]
    assert len({len(samples) for samples in steps}) > 1, "they differ in samples"
    assert all(abs(sum(map(length, samples)) - 70) < 14 for samples in steps)


def test_a_step_of_so_many_tokens_is_the_same_when_a_job_resumes_at_it() -> None:
    """Another process, which has drawn no step before; also the ledger's hash of it."""
    whole = by_tokens().sampler
    drawn = [whole.samples(step) for step in range(30)]
    assert [by_tokens().sampler.samples(step) for step in (29, 3, 17)] == [drawn[29], drawn[3], drawn[17]]


def test_global_tokens_are_refused_where_they_cannot_be() -> None:
    with pytest.raises(ValueError, match="must be packed: give packing"):
        DataOptions(length=length, global_tokens=90)
    with pytest.raises(ValueError, match="global_tokens is 0; it must be a whole number from 1 on"):
        DataOptions(packing=Packing(), global_tokens=0)
    with pytest.raises(ValueError, match="sample 8 alone has 13 tokens: a step must have room for any"):
        _ = replace(make_recipe(), data=DataOptions(length=length, packing=Packing(), global_tokens=12)).sampler


@pytest.mark.slow
def test_processes_train_packed_rows_like_one() -> None:
    plan = PLANS["interleaved and uneven beside a plain pipeline"]
    check(plan, gang.run(__file__, "worker", plan.members, plan))


def test_recomputed_blocks_know_their_row() -> None:
    plan = PLANS["tp1 to tp3 and back"]

    def make() -> Recipe:
        return packed(parallelism=ParallelismOptions(recompute=True))

    check(plan, in_threads(plan, make))


def test_telemetry_counts_each_sequence_once_and_no_padding() -> None:
    plan = PLANS["one device"]
    measured = in_threads(plan)["a/0"]["measured"]
    mine = [length(i) for i in make_recipe().sampler.samples(test_engine_parity.STEPS - 1)]
    assert measured.tokens == sum(mine)
    assert measured.squares == sum(n * n for n in mine)
    assert (measured.longest, sum(measured.lengths.values())) == (max(mine), len(mine))


def pieces(*lengths: int) -> tuple[SequencePiece, ...]:
    return tuple(SequencePiece.whole(i, n) for i, n in enumerate(lengths))


def test_a_row_has_the_tokens_of_its_samples_one_after_the_other() -> None:
    samples = [
        {"inputs": torch.arange(n), "vectors": torch.ones(n, 3) * n, "modalities": {"image": n}} for n in (3, 2)
    ]
    row = pack(samples, pieces(3, 2))
    assert row["inputs"].tolist() == [[0, 1, 2, 0, 1]]
    assert row["vectors"].shape == (1, 5, 3)
    assert row["modalities"] == {"image": 5}


def test_a_piece_has_the_tokens_of_its_pairs() -> None:
    sample = {"inputs": torch.arange(7)}
    assert pack([sample], [SequencePiece(0, 7, 0, 2)])["inputs"].tolist() == [[0, 1, 5, 6]]
    assert pack([sample], [SequencePiece(0, 7, 2, 4)])["inputs"].tolist() == [[2, 3, 4]]


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        ({"inputs": torch.arange(4)}, r"inputs: shape \(4,\), and its length says 3 tokens"),
        ({"inputs": torch.arange(3), "label": torch.tensor(1)}, r"label: shape \(\), and its length says 3"),
        ({"inputs": torch.arange(3), "name": "x"}, "name: a str has no entry for each token"),
    ],
)
def test_what_has_no_entry_for_each_token_makes_no_row(sample: Any, said: str) -> None:
    with pytest.raises(Unlike, match=said + ".*packed samples have one entry for each token"):
        pack([sample], pieces(3))


class Lying(Text):
    """Sample 3 is longer than it says."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return super().__getitem__(index + 1 if index == 3 else index)


def test_a_sample_that_is_not_as_long_as_it_says_is_named_and_the_row_keeps_its_length() -> None:
    made = Loader(SamplePrefetcher(Lying(), 0), lambda _: None)
    row = made.batch(tuple(SequencePiece.whole(i, length(i)) for i in (2, 3)), packed=True)
    assert row["inputs"].shape == (1, length(2) + length(3))
    _, failure = made.take()
    assert failure is not None
    assert failure.index == 3
    assert "inputs: shape (9,), and its length says 8 tokens" in str(failure)


def test_a_step_with_such_a_sample_is_dropped_on_every_rank() -> None:
    plan = PLANS["pipelines of 2 and 3 stages"]
    found = {}

    def run(memory: MemoryPlanGroups) -> str:
        engine = engine_on(memory, replace(packed(), dataset=Lying()), plan)
        step = next(k for k in range(9) if 3 in make_recipe().sampler.samples(k))
        with pytest.raises(SampleError) as refused:
            engine.step(step, lambda: 0)
        return str(refused.value)

    found = run_threads(plan.members, run)
    assert all("sample 3 of the dataset could not be read" in said for said in found.values())
    assert any("its length says 8 tokens" in said for said in found.values())


def test_a_sequence_longer_than_a_row_is_named_on_every_rank_before_the_step() -> None:
    plan = PLANS["pipelines of 2 and 3 stages"]

    def run(memory: MemoryPlanGroups) -> str:
        engine = engine_on(memory, packed(tokens=12), plan)
        samples = make_recipe().sampler.samples
        step = next(k for k in range(9) if max(map(length, samples(k))) > 12)
        if step:
            engine.step(step - 1, lambda: 0)
        with pytest.raises(SampleError) as refused:
            engine.step(step, lambda: 0)
        return str(refused.value)

    (said,) = {said[said.index("goes") :] for said in run_threads(plan.members, run).values()}
    assert said.startswith("goes into no packed row: it has 13 tokens, a row at most 12: raise Packing(tokens=")


class OneSided(MapStyleSamples):
    """Gives all sequences to the first lane of all."""

    def dealing(self, plan: Plan, step: int, slowdown: Sequence[int] | None = None) -> Callable[[], BatchPlan]:
        samples = self.samples(step)
        rows = tuple((SequencePiece.whole(i, length(i)),) for i in samples)
        first, *others = (len(pipeline.micro_batches_by_lane) for pipeline in plan.pipelines)
        mine = tuple(BatchRow(lanes=(row, *[()] * (first - 1))) for row in rows)
        dealt = BatchPlan(step=step, plan=plan.number, pipelines=(mine, *[()] * len(others)), packed=True)
        return lambda: dealt


@pytest.mark.parametrize("policy", ["zero 0", "zero 2"])
def test_lanes_and_pipelines_without_a_sequence_add_nothing_and_hold_their_place(policy: str) -> None:
    plan = PLANS["three lanes of unlike width beside a deeper pipeline"].replace(state=POLICIES[policy])

    def make() -> Recipe:
        made = packed()
        return replace(made, source=OneSided(made.sampler, SamplePrefetcher(Text(), 0), length, 1))

    check(plan, in_threads(plan, make))


def test_a_rank_whose_dataset_says_other_lengths_is_named_before_it_trains() -> None:
    plan = PLANS["2 + 1, uneven, in two stages"]

    def run(memory: MemoryPlanGroups) -> str:
        def other(index: int) -> int:
            return length(index) + (memory.me == "b/0")

        data = DataOptions(length=other, packing=Packing(tokens=30))
        engine = engine_on(memory, replace(make_recipe(), data=data), plan)
        with pytest.raises(LedgerError) as refused:
            engine.step(0, lambda: 0)
        return str(refused.value)

    (said,) = set(run_threads(plan.members, run).values())
    assert "step 0: b/0 deal the samples otherwise than the others: do their nodes have other lengths" in said


def test_a_rank_that_saw_other_pieces_than_the_batch_plan_has_is_named_on_all() -> None:
    plan = PLANS["2 + 1, uneven, in two stages"]

    def run(memory: MemoryPlanGroups) -> str:
        data = DataOptions(length=length, packing=Packing(tokens=30))
        engine = engine_on(memory, replace(make_recipe(), data=data), plan)
        engine.step(0, lambda: 0)
        assert engine.module.runner is not None
        if memory.me == "b/0":
            passes = engine.module.runner.run
            engine.module.runner.run = lambda *args: replace(made := passes(*args), samples=made.samples + 1)  # type: ignore[method-assign]
        with pytest.raises(LedgerError) as refused:
            engine.step(1, lambda: 0)
        return str(refused.value)

    (said,) = set(run_threads(plan.members, run).values())
    assert said == f"step 1: ranks [{plan.rank('b/0')}] did not see the samples of the batch plan"


def test_lengths_may_be_numpys_own() -> None:
    lengths = np.array([length(i) for i in range(64)], dtype=np.uint8)
    plan = PLANS["pipelines of 2 and 3 stages"]

    def make() -> Recipe:
        data = DataOptions(length=lambda index: lengths[index], packing=Packing(tokens=30, cut=False))
        return replace(make_recipe(), data=data)

    check(plan, in_threads(plan, make))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"packing": Packing(), "collate": lambda samples: samples}, "give either collate or packing"),
        ({"packing": 3}, "packing"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        DataOptions(**options)


def test_packing_without_lengths_is_refused() -> None:
    with pytest.raises(ValueError, match="packing needs the tokens of each sample before it is read"):
        replace(make_recipe(), data=DataOptions(packing=Packing()))


class DroppingBlock(Block):
    """Dropouts behind the attention and behind the feed-forward."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.attention_dropout, self.feed_forward_dropout = torch.nn.Dropout(0.3), torch.nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention_dropout(self.attention(self.attention_norm(x)))
        return x + self.feed_forward_dropout(self.feed_forward(self.feed_forward_norm(x)))


def dropping(make: Callable[[], Recipe]) -> Recipe:
    """The same job with such blocks."""
    with torch.device("meta"):
        model = Decoder(test_engine_parity.CONFIG)
        model.blocks = torch.nn.ModuleList(DroppingBlock(test_engine_parity.CONFIG) for _ in model.blocks)
        return replace(make(), model=model.describe())


@pytest.mark.parametrize(
    "name",
    sizes.beside(
        ["2 + 1, uneven, in two stages"],
        ["sequence parallel, interleaved, beside a group without", "2 + 1, uneven, in two stages"],
    ),
)
def test_dropouts_drop_of_a_packed_row_what_they_drop_of_padded_samples(name: str) -> None:
    padded = in_threads(PLANS["one device"], lambda: dropping(make_recipe))["a/0"]
    for device, result in in_threads(PLANS[name], lambda: dropping(packed)).items():
        assert result["losses"] == pytest.approx(padded["losses"], abs=1e-10)
        for parameter, (start, stop, value) in result["weights"].items():
            whole = padded["weights"][parameter][2][tuple(map(slice, start, stop))]
            assert float(abs(value - whole).max()) < 1e-10, f"{device} {parameter}"


class HeldOutText(Text):
    """As many samples as make a whole round and a part of one."""

    lengths = tuple(length(i) for i in range(64))

    def __len__(self) -> int:
        return 21


@pytest.mark.parametrize("name", ["pipelines of 2 and 3 stages", "2 + 1, uneven, in two stages"])
def test_an_evaluation_packs_as_the_training_does_and_gives_the_same_mean(name: str) -> None:
    batch = pad([HeldOutText()[i] for i in range(21)])
    model = Decoder(test_engine_parity.CONFIG)
    with torch.no_grad():
        for each, parameter in model.named_parameters():
            value = make_recipe().model.first_value(each, Box.whole(parameter.shape), test_engine_parity.SEED)
            parameter.copy_(value)
        total, count = next_token_loss(model(batch), batch)
    plan = PLANS[name]

    def run(memory: MemoryPlanGroups) -> tuple[float, int]:
        recipe = packed()
        engine = engine_on(memory, recipe, plan)
        held = HeldOut(dataset=HeldOutText())
        dealt = list(rounds(plan, held.dataset, engine.linear, recipe.data.packing))
        assert all(each.packed for each in dealt)
        done = evaluate(engine, held, "held", 0, next_token_loss, recipe.data, "value")
        return done.loss, int(done.counts["loss"])

    for loss, counted in run_threads(plan.members, run).values():
        assert (loss, counted) == (pytest.approx(float(total) / count, abs=1e-12), count)


@pytest.mark.full  # test_attention.py compiles attention and positions of rows
def test_compiled_blocks_train_packed_rows_like_one_process(compiler: None) -> None:
    plan = PLANS["one device"]

    def make() -> Recipe:
        return packed(parallelism=ParallelismOptions(compile=True))

    check(plan, in_threads(plan, make))


def test_a_batch_of_the_script_is_packed_by_the_tokens_of_its_samples() -> None:
    plan = PLANS["pipelines of 2 and 3 stages"]
    batch = [Text()[i] for i in range(8)]

    def run(memory: MemoryPlanGroups) -> tuple[float | None, int]:
        engine = engine_on(memory, packed(), plan)
        feed = engine._recipe.feed
        assert isinstance(feed, MapStyleSamples)
        feed.give(0, batch)
        vote = engine.step(0, lambda: 0).outcome.vote
        return vote.loss, vote.tokens

    model, whole = Decoder(test_engine_parity.CONFIG), pad(batch)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = make_recipe().model.first_value(name, Box.whole(parameter.shape), test_engine_parity.SEED)
            parameter.copy_(value)
        total, count = next_token_loss(model(whole), whole)
    for loss, tokens in run_threads(plan.members, run).values():
        assert loss == pytest.approx(float(total) / count, abs=1e-12)
        assert tokens == sum(map(length, range(8)))


def test_a_rank_that_joins_a_script_with_batches_of_its_own_compares_what_the_others_do() -> None:
    """Survivors have given batches of earlier steps, and it has given none: no rank knows the next one."""
    plan = plan_of((5, [stage(0, 6, ("a/0", 1))]), (3, [stage(0, 6, ("b/0", 1))]))

    def run(memory: MemoryPlanGroups) -> list[float | None]:
        engine = engine_on(memory, packed(), plan)
        feed, votes = engine._recipe.feed, list[float | None]()
        assert isinstance(feed, MapStyleSamples)
        for step in range(2) if memory.me != "b/0" else ():
            feed.give(step, range(8))
        for step in range(2, 4):
            batch = range(step, step + 8)
            feed.give(step, batch)
            done = engine.step(step, lambda: 0)
            assert sorted(done.samples) == [*batch]
            votes.append(done.outcome.vote.loss)
        return votes

    found = run_threads(plan.members, run)
    assert all(losses == found["b/0"] for losses in found.values())


def test_a_rank_alone_whose_sample_goes_into_no_row_is_named_and_nobody_waits() -> None:
    plan = PLANS["2 + 1, uneven, in two stages"]

    def run(memory: MemoryPlanGroups) -> str:
        def other(index: int) -> int:
            return 99 if memory.me == "b/0" else length(index)

        data = DataOptions(length=other, packing=Packing(tokens=30))
        engine = engine_on(memory, replace(make_recipe(), data=data), plan)
        with pytest.raises(LedgerError) as refused:
            engine.step(0, lambda: 0)
        return str(refused.value)

    (said,) = set(run_threads(plan.members, run).values())
    assert "b/0 deal the samples otherwise" in said
