"""Packed plans: the search's choice against every plan of a small cluster, played as the job deals it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from elasticd_planner.batching.packed_batch import CutOptions, NoRoom, packed_batch_plan, planned_slowdown
from elasticd_planner.batching.row_balance import pipeline_time
from elasticd_planner.cost.memory import memory_by_device, pipeline_memory
from elasticd_planner.cost.model import after_seconds, stage_times
from elasticd_planner.cost.model_profile import ModelProfile, SectionProfile, derive
from elasticd_planner.cost.packed_cost import PackedCost
from elasticd_planner.cost.profile_cost import ProfileCost
from elasticd_planner.detection.lengths import attention_rise, evaluated
from elasticd_planner.numeric import EQUAL
from elasticd_planner.placement.state_movement import bytes_to_move
from elasticd_planner.policy.policy import PolicySettings, decide
from elasticd_planner.problem import Answer, Problem, SearchSpace
from elasticd_planner.search import planner
from elasticd_planner.search.lanes import joined
from elasticd_planner.search.packed import _PackedSearch, packed_lanes
from elasticd_planner.search.packed import answer as packed_answer
from elasticd_planner.search.planner import plan as search
from elasticd_planner.spec.batch import BatchLengths, BatchRow
from elasticd_planner.spec.cluster import Link
from elasticd_planner.spec.packed_sequences import PackedSequences
from elasticd_planner.spec.plan import Pipeline, Plan, Stage
from elasticd_planner.spec.sample_packing import linear_of
from elasticd_planner.spec.sequence_lengths import Lengths, even

from elasticd.simulator.scenarios.model_shapes import PRESETS, model_spec
from tests.planner import brute, packed_jobs, played_rows
from tests.planner.models import cluster, planned
from tests.sizes import beside

LINEAR, LEAST = 4096, 64
#: Two nodes of two devices.
SIZES = (2, 2)


def profile(effective: float) -> ModelProfile:
    """Four layers. A token keeps 1 kB in each, of which a TP group shares most; a layer's state takes 8 MB."""
    return ModelProfile(
        name="packed",
        layers=4,
        share_units=8,
        tokens=1000.0,
        block=SectionProfile(
            seconds=1e-6 * (1 + effective / LINEAR),
            cut_bytes=2_000_000,
            cut_activation=900.0,
            whole_activation=100.0,
            collectives=4,
        ),
        groups=2,
        boundary_bytes=1024.0,
        overhead_seconds=0.0,
    )


def sequences(lengths: np.ndarray, **changes: object) -> PackedSequences:
    """What is known of a step of these."""
    total = float(lengths.sum())
    found = Lengths(
        mean=total / len(lengths), effective=float((lengths**2).sum()) / total, longest=float(lengths.max())
    )
    values = {"row_tokens": 16_384, "least": LEAST, **changes}
    return PackedSequences(
        sequences=float(len(lengths)),
        lengths=found,
        longest=int(lengths.max()),
        linear=LINEAR,
        **values,  # type: ignore[arg-type]
    )


def problem(lengths: np.ndarray, memory: int, **changes: object) -> Problem:
    packed = sequences(lengths)
    here = cluster(*SIZES, memory=memory, inside=Link(bandwidth=5e10, latency=1e-6))
    here = msgspec.structs.replace(here, between=Link(bandwidth=1e10, latency=5e-6))
    values = {
        "cluster": here,
        "profile": profile(packed.lengths.effective),
        "global_batch": len(lengths),
        "micro_batch": 1,
        "packed": packed,
        "search_space": SearchSpace(lanes=4),
        **changes,
    }
    return Problem(**values)  # type: ignore[arg-type]


def cost_of(given: Problem) -> PackedCost:
    assert given.packed is not None
    return PackedCost(
        cost=ProfileCost(given.profile),
        cluster=given.cluster,
        rates=given.rates,
        packed=given.packed,
        micro_batch=given.micro_batch,
    )


def every(given: Problem) -> Iterator[Plan]:
    """Every plan whose memory holds the sequences: all TP groups, stages and layers, and pipelines of equal
    borders joined to every number of lanes."""
    cost, seen = cost_of(given), set[object]()
    for groups in brute.arrangements(given.cluster.devices):
        for pipelines in brute.product_of(groups, (1,) * len(groups), given):
            if not pipelines:
                continue
            for most in range(1, len(pipelines) + 1):
                made = joined(pipelines, most)
                if (shape := alike(made)) in seen:
                    continue
                seen.add(shape)
                draft = planned(*packed_lanes(made, [[1] * len(p.micro_batches_by_lane) for p in made]))
                capacity = cost.capacity(draft)
                if cost.holds(capacity):
                    yield planned(*packed_lanes(made, capacity, None, cost.slowdown(draft)))


def alike(pipelines: tuple[Pipeline, ...]) -> object:
    """Equal for plans that differ in names of equal devices alone."""
    found = []
    for pipeline in pipelines:
        nodes: dict[str, int] = {}
        for stage in pipeline.stages:
            places = tuple(nodes.setdefault(name.split("/")[0], len(nodes)) for name in stage.devices)
            found.append((stage.start, stage.stop, stage.lanes, stage.shares, places))
        found.append(())
    return tuple(found)


def played(made: Plan, given: Problem, lengths: np.ndarray) -> float:
    """Seconds of a step as the job deals it, played by events; infinite where a sequence goes into no row."""
    assert given.packed is not None
    try:
        batch = packed_batch_plan(
            made,
            0,
            range(len(lengths)),
            BatchLengths(tokens=tuple(lengths.tolist()), linear=LINEAR),
            given.packed.row_tokens,
            cut=CutOptions(least=LEAST, fixed=LEAST * LINEAR),
        )
    except NoRoom:
        return math.inf
    slowest = max(
        _pipeline(pipeline, rows, given)
        for pipeline, rows in zip(made.pipelines, batch.pipelines, strict=True)
        if rows
    )
    return slowest + after_seconds(made, given.cluster, ProfileCost(given.profile))


def _tokens(lane: Pipeline, given: Problem) -> tuple[float, ...]:
    """Seconds of a token of mean work on each stage, boundaries and all."""
    times = stage_times(lane, given.cluster, given.rates, ProfileCost(given.profile))
    return tuple((times.charged / given.profile.tokens).tolist())


def _pipeline(pipeline: Pipeline, rows: tuple[BatchRow, ...], given: Problem) -> float:
    lanes = [_tokens(lane, given) for lane in pipeline.by_lane]
    assert given.packed is not None
    unit = 1 / (LINEAR + given.packed.lengths.effective)  # of a token's attention to one other, in mean tokens
    stages = len(pipeline.stages)
    if stages == 1:
        nanoseconds = [round(64e9 * lane[0]) for lane in lanes]
        work = float(played_rows.seconds(rows, nanoseconds, LINEAR, 0)) / 1e9 * unit
        return work + len(rows) * LEAST * LINEAR * unit * max(lane[0] for lane in lanes)
    times = []
    for row in rows:
        works = [sum(p.tokens * (LINEAR + p.length) for p in lane) + LEAST * LINEAR for lane in row.lanes]
        times.append(max(work * unit * sum(lane) for work, lane in zip(works, lanes, strict=True)))
    uneven = max(stages * max(lane) / sum(lane) for lane in lanes)
    return pipeline_time([round(1e9 * time) for time in times], stages) / 1e9 * uneven


def no_plan(view: Problem, near: object) -> Answer:
    return Answer(plan=None)


def no_layouts(view: Problem) -> list[Plan]:
    return []


def long_tail(count: int = 60, seed: int = 1) -> np.ndarray:
    return np.clip(np.random.default_rng(seed).lognormal(6.2, 1.3, count), 16, 16_000).astype(np.int64)


def one_long() -> np.ndarray:
    """A sequence that takes more than all others together."""
    return np.array([300] * 40 + [16_000])


def short(count: int = 100, seed: int = 1) -> np.ndarray:
    return np.clip(np.random.default_rng(seed).lognormal(5.5, 0.3, count), 16, 800).astype(np.int64)


DRAWN = {"tail": long_tail(), "short": short(), "one": one_long(), "other tail": long_tail(seed=4)}
CASES = [(name, memory) for memory in (200_000_000, 48_000_000, 28_000_000) for name in DRAWN]


@pytest.mark.parametrize(
    ("name", "memory"), beside([("tail", 28_000_000), ("tail", 48_000_000), ("one", 200_000_000)], CASES)
)
def test_the_search_finds_a_plan_that_is_as_good_as_any(name: str, memory: int) -> None:
    lengths = DRAWN[name]
    given = problem(lengths, memory)
    least = min((played(made, given, lengths) for made in every(given)), default=math.inf)
    answer = search(given)
    if answer.plan is None:
        assert least == math.inf, answer.refusal
        return
    assert played(answer.plan, given, lengths) <= 1.05 * least, answer.plan.reason


def wide(made: Plan) -> tuple[int, int]:
    """The most lanes of a pipeline, and the widest TP group."""
    return (
        max(len(pipeline.packed) for pipeline in made.pipelines),
        max(max(stage.widths) for pipeline in made.pipelines for stage in pipeline.stages),
    )


@pytest.mark.parametrize(("row_tokens", "most"), [(0, 2 * 300), (450, 450), (1 << 20, None)])
def test_a_plan_tells_of_rows_as_long_as_they_are_made_and_not_as_memory_holds(
    row_tokens: int, most: int | None
) -> None:
    lengths = np.array([300, 120, 60, 40] * 8)
    packed = sequences(lengths, row_tokens=row_tokens)
    found = search(problem(lengths, 64 << 20, packed=packed, micro_batch=2), 1).plan
    assert found is not None
    rooms = {lane.capacity for pipeline in found.pipelines for lane in pipeline.packed}
    told = max(rooms) if most is None else most
    assert f" of at most {told} tokens" in found.reason or f" to {told} tokens" in found.reason, found.reason
    if most is not None and not row_tokens:
        assert min(rooms) > most, "memory holds more"


def test_long_sequences_get_lanes_and_short_ones_pipelines() -> None:
    few, many = (search(problem(lengths, 200_000_000)).plan for lengths in (short(), one_long()))
    assert few is not None
    assert many is not None
    assert (len(few.pipelines), wide(few)) == (4, (1, 1))
    assert (len(many.pipelines), wide(many)) == (1, (4, 1))


@pytest.mark.full
@pytest.mark.parametrize(("effective", "longest", "lanes"), [(1100.0, 3000, 1), (14_000.0, 100_000, 8)])
def test_a_model_of_32_billion_gets_lanes_for_a_long_tail_alone(
    effective: float, longest: int, lanes: int
) -> None:
    """On 64 devices of 80 GiB, of which a TP group of four with two stages holds a copy of the model."""
    spec = model_spec("llama-32b", PRESETS["llama-32b"])
    lengths = Lengths(mean=1000.0, effective=effective, longest=float(longest))
    dense = derive(spec, 1000.0, 1, flops=1.5e14)
    packed = PackedSequences(sequences=512.0, lengths=lengths, longest=longest, linear=linear_of(spec))
    here = cluster(*[8] * 8, memory=80 << 30, inside=Link(bandwidth=2e11, latency=1e-5))
    answer = search(
        Problem(
            cluster=msgspec.structs.replace(here, between=Link(bandwidth=2.5e10, latency=2e-5)),
            profile=evaluated(dense, even(1000.0), lengths, attention_rise(spec), rows=True),
            global_batch=512,
            micro_batch=1,
            packed=packed,
            search_space=SearchSpace(lanes=64),
        )
    )
    assert answer.plan is not None
    assert wide(answer.plan)[0] == lanes
    assert len(answer.plan.by_lane) == 8


def test_where_no_lane_may_be_shared_long_sequences_get_wide_tp_groups() -> None:
    given = problem(one_long(), 200_000_000, search_space=SearchSpace(lanes=1))
    made = search(given).plan
    assert made is not None
    assert wide(made)[0] == 1
    assert len(made.pipelines) < 4  # fewer and stronger ones than the four of short sequences


@pytest.mark.parametrize("memory", [28_000_000, 40_000_000])
def test_full_rows_fit_into_memory_and_one_token_more_does_not(memory: int) -> None:
    given = problem(long_tail(), memory)
    made = search(given).plan
    assert made is not None
    assert made.prediction is not None
    assert max(made.prediction.memory.values()) <= memory
    assert made.prediction.memory.keys() == set(made.members)
    cost = ProfileCost(given.profile).under(made)
    for lane in made.by_lane:
        room = lane.packed[0].capacity
        deep = msgspec.structs.replace(lane, micro_batches=max(lane.micro_batches, len(lane.stages)))
        assert max(pipeline_memory(deep, cost.sized(room)).values()) <= memory + 1
        if room < 16_384:
            assert max(pipeline_memory(deep, cost.sized(room + 1)).values()) > memory
    assert memory_by_device(made, cost).keys() == made.prediction.memory.keys()


def test_blocks_that_make_activations_again_keep_what_attention_over_cut_sequences_gave() -> None:
    """They exchange keys once. Rows of lanes over which nothing is cut hold more tokens."""

    def room(*stages: Stage, cut: bool, rows: tuple[int, ...] = ()) -> int:
        lengths = long_tail()
        packed = sequences(lengths, cut=cut, row_tokens=1 << 30)
        made = planned(Pipeline(stages=stages, micro_batches=4, rows=rows))
        return cost_of(problem(lengths, 40_000_000, packed=packed)).capacity(made)[0][0]

    one = Stage(start=0, stop=4, devices=("n0/0",), shares=(8,), recompute=True)
    two = Stage(start=0, stop=4, devices=("n0/0", "n0/1"), shares=(8, 8), lanes=(1, 1), recompute=True)
    assert room(one, cut=True) == room(two, cut=False, rows=(2, 2)) > room(two, cut=True, rows=(2, 2))
    made = profile(1.0)
    inputs = made.block.recomputed_activation
    again = made.layers * inputs + 1000.0 - inputs  # and a block that is being made again, but for its input
    attention = made.boundary_bytes * (3 + 2 * made.groups / made.share_units)
    ratio = room(one, cut=True) / room(two, cut=True, rows=(2, 2))
    assert ratio == pytest.approx((again + made.layers * attention) / again, rel=5e-3)
    plain = [msgspec.structs.replace(each, recompute=False) for each in (one, two)]
    assert room(plain[0], cut=True) == room(plain[1], cut=True, rows=(2, 2)), "they keep it in any case"


def test_a_sequence_that_no_plan_holds_is_refused_with_what_would_help() -> None:
    lengths = np.array([300, 400, 30_000])
    answer = search(problem(lengths, 28_000_000))
    assert answer.plan is None
    said = "does not fit: a sequence has 30000 tokens, and the lanes of no pipeline hold more than "
    assert answer.refusal.startswith(said)
    given = problem(lengths, 1 << 34, packed=sequences(lengths, row_tokens=4096))
    assert "raise Packing(tokens=...), or add a node" in search(given).refusal
    given = problem(lengths, 1 << 34, packed=sequences(lengths, cut=False))
    assert "Packing(cut=True)" in search(given).refusal
    given = problem(lengths, 1 << 34, packed=sequences(lengths, row_tokens=30_000, cut=False))
    found = search(given).plan
    assert found is not None
    assert wide(found)[0] == 1


def test_a_running_plan_that_holds_too_little_cannot_run_any_more() -> None:
    made = search(problem(short(), 48_000_000)).plan
    assert made is not None
    same = search(problem(short(), 48_000_000, current=made))
    assert same.plan is not None
    assert same.plan.strategies == made.strategies
    assert same.current_seconds == pytest.approx(same.plan.prediction.step_seconds)  # type: ignore[union-attr]
    capacity = max(lane.capacity for pipeline in made.pipelines for lane in pipeline.packed)
    longer = np.array([*short().tolist(), capacity + 1000])
    grown = search(problem(longer, 48_000_000, current=made))
    assert grown.current_seconds is None
    assert grown.plan is not None
    assert grown.plan.strategies != made.strategies


def test_a_lasting_shift_of_lengths_replans_lanes_where_that_pays_and_stays_when_lengths_are_back() -> None:
    apart = search(problem(short(), 200_000_000)).plan
    assert apart is not None
    grown = search(problem(one_long(), 200_000_000, current=apart))
    joined_ = grown.plan
    assert joined_ is not None
    assert joined_.prediction is not None
    assert (wide(apart)[0], wide(joined_)[0]) == (1, 4)
    moved = bytes_to_move(profile(1.0), apart, joined_)
    assert moved == 0, "what is joined is where it was"
    policy = PolicySettings(pause_seconds=0.5)
    assert decide(policy, grown.current_seconds, joined_.prediction.step_seconds, moved).replan
    # Short sequences take as long in lanes as in pipelines: nothing is saved by going back.
    back = search(problem(short(), 200_000_000, current=joined_))
    assert back.plan is not None
    assert back.plan.strategies == joined_.strategies


@pytest.mark.parametrize("count", beside([1], [1, 2, 3]))
def test_where_devices_are_gone_there_is_a_plan_whatever_the_number_of_rows(count: int) -> None:
    dead = ("n1/1", "n1/0", "n0/1")[:count]
    apart = search(problem(long_tail(), 200_000_000)).plan
    joined_ = search(problem(one_long(), 200_000_000)).plan
    assert apart is not None
    assert joined_ is not None
    assert len(apart.by_lane) == len(joined_.by_lane) == 4
    gone = dict.fromkeys(dead, math.inf)
    for rows in range(1, 10):
        lengths = np.full(rows, 16_384)
        for running in (apart, joined_):
            found = search(problem(lengths, 1 << 34, current=running, rates=gone))
            assert found.plan is not None, (rows, found.refusal)
            assert not set(found.plan.members) & set(dead)


def test_a_slow_device_gets_a_lane_with_a_smaller_share_or_fewer_layers() -> None:
    lengths = long_tail()
    given = problem(lengths, 200_000_000, rates={"n1/0": 2.0})
    made = search(given).plan
    assert made is not None
    assert made.prediction is not None
    assert made.prediction.gap < 0.2
    assert max(planned_slowdown(made.pipelines)) == 128


def test_a_given_plan_is_packed_and_one_that_holds_too_little_is_refused() -> None:
    lengths = long_tail()
    made = search(problem(lengths, 200_000_000)).plan
    assert made is not None
    bare = tuple(msgspec.structs.replace(lane, packed=(), micro_batches=15) for lane in made.by_lane)
    given = planned(*bare)
    answer = search(problem(lengths, 200_000_000, given=given, only_given=True))
    assert answer.plan is not None
    assert answer.plan.packed
    assert answer.plan.reason.startswith("given by the job: ")
    refused = search(problem(lengths, 33_000_000, given=given, only_given=True))
    assert refused.plan is None
    assert refused.refusal.startswith("the plan that the job gives cannot be: does not fit: a sequence has")


def of_a_stream(likely: int) -> PackedSequences:
    """Of a stream nothing is known but the mean."""
    lengths = Lengths(mean=1000.0, effective=3000.0, longest=9000.0)
    return PackedSequences(
        sequences=64.0, lengths=lengths, longest=1000, likely=likely, linear=LINEAR, least=LEAST
    )


def test_a_sequence_that_may_come_is_held_where_some_plan_does() -> None:
    before, made = (
        search(problem(np.full(64, 1000), 40_000_000, packed=of_a_stream(likely))).plan for likely in (0, 9000)
    )
    assert before is not None
    assert made is not None
    assert longest_of(before) < 9000 <= longest_of(made)


def test_a_sequence_that_may_come_and_that_no_plan_holds_refuses_none() -> None:
    made = search(problem(np.full(64, 1000), 28_000_000, packed=of_a_stream(40_000))).plan
    assert made is not None
    assert longest_of(made) >= 10_000


def longest_of(made: Plan) -> int:
    return max(sum(lane.capacity for lane in pipeline.packed) for pipeline in made.pipelines)


def test_a_sequence_that_all_memory_does_not_hold_is_refused_without_a_search() -> None:
    def none(view: Problem, _: object) -> Answer:
        raise AssertionError(f"a search for {view.global_batch} rows")

    refused = packed_answer(problem(np.array([300, 400, 1 << 20]), 28_000_000), none, no_layouts, 1, 0.02)
    assert refused.plan is None
    assert refused.refusal.startswith("does not fit: a sequence has 1048576 tokens")


@pytest.mark.parametrize("memory", [20_000_000, 28_000_000, 60_000_000])
def test_no_plan_holds_more_than_all_memory_does(memory: int) -> None:
    packed = sequences(np.array([2]), row_tokens=0)
    given = problem(np.array([2]), memory, packed=packed)
    making = _PackedSearch(problem=given, packed=packed, search=no_plan, regular=no_layouts, number=1)
    room = making._room()
    held = [longest_of(made) for made in every(given)]
    assert len(held) > 10
    assert 0.4 * room < max(held) <= room


def test_a_long_refusal_on_many_devices_tries_few_numbers_of_lanes() -> None:
    asked: list[Problem] = []

    def none(view: Problem, _: object) -> Answer:
        asked.append(view)
        return Answer(plan=None, refusal="does not fit", candidates=1)

    here = cluster(*[4] * 8, memory=28_000_000)
    given = problem(np.array([60_000]), 28_000_000, cluster=here, search_space=SearchSpace(lanes=32))
    assert packed_answer(given, none, no_layouts, 1, 0.02).plan is None
    counts = [view.search_space.fixed_dp for view in asked if view.search_space.fixed_dp is not None]
    assert set(counts) == {1, 2, 4, 8, 16}, "more copies of the state leave no memory for the sequence"


@pytest.mark.parametrize("sizes", beside([((4, 4),)], [((4, 4),), ((4, 4, 4, 4),)]))
def test_few_sizes_of_rows_are_searched_for_all_plans_with_a_slow_device_or_without(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[Problem] = []
    plain = planner._plain

    def counted(view: Problem, *args: object, **options: object) -> Answer:
        searched.append(view)
        return plain(view, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(planner, "_plain", counted)
    given = problem(one_long(), 200_000_000, cluster=cluster(*sizes, memory=200_000_000), rates={"n0/1": 1.7})
    assert search(given).plan is not None
    assert len(searched) <= 2
    assert not any(view.rates for view in searched)


#: (seed, number) of drawn jobs; the last two have memory for few plans.
JOBS = [*((seed, 0) for seed in range(11, 20)), (12652, 21), (12652, 35)]


@pytest.mark.parametrize(("seed", "number"), beside([(16, 0), (12652, 21)], JOBS))
def test_a_search_that_is_free_to_choose_tp_sizes_is_as_good_as_with_any_pinned(seed: int, number: int) -> None:
    *_, job = packed_jobs.drawn(seed, number + 1)
    free = seconds_of(job.problem)
    for width in (1, 2, 4, 8):
        assert free <= seconds_of(packed_jobs.pinned(job, width)) * (1 + EQUAL), (job.name, width)


@pytest.mark.parametrize(
    ("seed", "number", "limit"), beside([(12652, 21, 3.2)], [(12652, 21, 3.2), (187022, 25, 18.0)])
)
def test_where_few_layouts_hold_the_longest_sequence_more_lanes_and_slow_devices_count(
    seed: int, number: int, limit: float
) -> None:
    *_, job = packed_jobs.drawn(seed, number + 1)
    assert seconds_of(job.problem) < limit


@pytest.mark.parametrize(("seed", "number"), beside([(599667, 13)], [(599667, 12), (599667, 13), (599667, 25)]))
def test_a_sequence_that_memory_proves_too_long_is_refused_without_a_dense_search(
    seed: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dense(view: Problem, *args: object, **options: object) -> Answer:
        raise AssertionError(f"searched rows of {view.profile.tokens:g} tokens")

    monkeypatch.setattr(planner, "_plain", dense)
    *_, job = packed_jobs.drawn(seed, number + 1)
    answer = search(job.problem)
    assert answer.plan is None
    assert "the lanes of no pipeline hold more than" in answer.refusal


def seconds_of(given: Problem) -> float:
    found = search(given).plan
    return math.inf if found is None or found.prediction is None else found.prediction.step_seconds
