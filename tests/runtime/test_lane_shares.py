"""Shares of tokens follow what lanes took, as the votes say it: within four steps, the same on every rank."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest
import torch
from elasticd_planner.batching.batch_summary import lane_work
from elasticd_planner.spec.batch import Sampler
from elasticd_planner.spec.plan import Plan
from elasticd_planner.spec.sample_packing import linear_of

from elasticd.runtime.comm.in_memory import MemoryPlanGroups, run_threads
from elasticd.runtime.data.options import DataOptions
from elasticd.runtime.data.packing import Packing
from elasticd.runtime.data.prefetch import SamplePrefetcher
from elasticd.runtime.data.step_samples import MapStyleSamples
from elasticd.runtime.engine.batches_ahead import BatchesAhead
from elasticd.runtime.threads import DaemonThreads
from tests.runtime.test_engine import engine_on
from tests.runtime.test_engine_parity import CONFIG, make_recipe, plan_of, stage

LINEAR = 1000
LANES = plan_of(
    ((2, 2, 2, 2), [stage(0, 6, *((f"n{i // 2}/{i % 2}", 1) for i in range(4)), lanes=(1, 1, 1, 1))])
)


def length(index: int) -> int:
    return 200 + 97 * index % 600


def batches(plan: Plan, count: int = 8) -> BatchesAhead:
    feed = MapStyleSamples(
        Sampler(size=1000, global_batch=count, seed=1),
        cast(SamplePrefetcher, None),
        length,
        LINEAR,
        Packing(least=16),
    )
    return BatchesAhead(feed, plan, LINEAR, DaemonThreads("batches"), plan.members)


def run(made: BatchesAhead, plan: Plan, factors: list[float], steps: range) -> list[list[float]]:
    """Each lane's part of the work, step by step, where lanes take so many times their normal time."""
    parts = []
    for step in steps:
        batch = made.of(step)
        work = lane_work(plan, batch, LINEAR)
        parts.append([each / sum(work) for each in work])
        made.voted(batch, [each * factor * 1e-9 for each, factor in zip(work, factors, strict=True)])
    return parts


def test_a_lane_that_becomes_slow_gets_its_share_within_four_steps_and_it_back() -> None:
    made = batches(LANES)
    steady = run(made, LANES, [1, 1, 1, 1], range(10))
    assert all(part == pytest.approx(0.25, abs=0.02) for parts in steady for part in parts)
    slow = run(made, LANES, [1, 2, 1, 1], range(10, 20))
    follows = next(step for step, parts in enumerate(slow) if parts[1] == pytest.approx(1 / 7, rel=0.1))
    assert follows <= 4
    assert all(parts[1] == pytest.approx(1 / 7, rel=0.1) for parts in slow[follows:])
    again = run(made, LANES, [1, 1, 1, 1], range(20, 30))
    assert all(parts[1] == pytest.approx(0.25, rel=0.1) for parts in again[4:])


def test_all_ranks_have_the_same_batches() -> None:
    one, two = batches(LANES), batches(LANES)
    for made in (one, two):
        run(made, LANES, [1, 1.7, 0.8, 1.05], range(12))
    assert [one.next(11), one.of(12)] == [two.next(11), two.of(12)]


def test_a_device_that_the_plan_knows_to_be_slow_has_its_share_from_the_first_step() -> None:
    plan = plan_of(((6, 2), [stage(0, 6, ("a/0", 1), ("b/0", 1), lanes=(1, 1))]))
    (first,) = run(batches(plan), plan, [1, 3], range(1))
    assert first[1] == pytest.approx(0.25, abs=0.03)


class Long:
    """Samples long enough to be cut."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(self.lengths[index] + 1) % CONFIG.vocabulary
        return {"inputs": ids[:-1], "targets": ids[1:]}

    lengths = tuple(30 + 13 * index % 50 for index in range(64))


def test_shares_follow_the_seconds_that_engines_bring_to_the_vote() -> None:
    """One of two lanes takes twice as long for its work. (Their clocks stand still; `make bench NAME=batch` has
    emulated devices.)"""
    plan = plan_of(((4, 4), [stage(0, 6, ("a/0", 1), ("b/0", 1), lanes=(1, 1))]))
    linear = linear_of(make_recipe().model.spec)

    def work(memory: MemoryPlanGroups) -> list[list[int]]:
        made = replace(make_recipe(), dataset=Long(), data=DataOptions(packing=Packing(least=8)))
        engine = engine_on(memory, made, plan)
        place = plan.members.index(memory.me)
        found: list[list[int]] = []
        engine._telemetry.block_seconds = lambda: 1e-6 * found[-1][place] * (1 + place)  # type: ignore[method-assign]
        for step in range(7):
            found.append(lane_work(plan, engine._batches.of(step), linear))
            engine.step(step, lambda: 0)
        return found

    found = run_threads(plan.members, work)
    assert found["a/0"] == found["b/0"]
    parts = [each[1] / sum(each) for each in found["a/0"]]
    assert parts[0] == pytest.approx(1 / 2, rel=0.1)
    assert parts[4:] == pytest.approx([1 / 3] * 3, rel=0.2), "as near as eight sequences can be dealt"
