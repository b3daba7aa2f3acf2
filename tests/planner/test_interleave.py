"""Plans with interleaved stages: their values, what they take, hold and move, and when a search has them."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import msgspec
import numpy as np
import pytest
from elasticd_planner.cost.memory import memory_by_device
from elasticd_planner.cost.model import (
    after_seconds,
    pipeline_seconds,
    stage_seconds,
    stage_times,
    step_seconds,
)
from elasticd_planner.cost.model_profile import ModelProfile, SectionProfile
from elasticd_planner.cost.pipeline_time import Steady
from elasticd_planner.cost.profile_cost import ProfileCost
from elasticd_planner.cost.schedule import passes
from elasticd_planner.placement.state_movement import bytes_to_move, strategy
from elasticd_planner.problem import Answer, Problem, SearchSpace
from elasticd_planner.problem_files import file_format, solve
from elasticd_planner.search.interleave import Interleaving, chunked, flattened, plain
from elasticd_planner.search.options import task_of
from elasticd_planner.search.planner import plan
from elasticd_planner.spec.cluster import Cluster, Device, Link, Node
from elasticd_planner.spec.plan import Pipeline, Plan, Stage
from elasticd_planner.value import Invalid
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.longest_paths import ends
from tests.sizes import examples


def profile(layers: int = 8, **changes: Any) -> ModelProfile:
    block = SectionProfile(seconds=1e-3, whole_bytes=1000, whole_activation=10.0)
    values: dict[str, Any] = {
        "name": "m",
        "layers": layers,
        "share_units": 1,
        "tokens": 10.0,
        "block": block,
        "embed": SectionProfile(whole_bytes=300, whole_activation=3.0),
        "head": SectionProfile(seconds=5e-4, whole_bytes=300, whole_activation=30.0),
        "boundary_bytes": 4.0,
        **changes,
    }
    return ModelProfile(**values)


def problem(
    devices: int = 4, *, memory: float = 1e9, interleave: int = 4, dp: int | None = 1, **changes: Any
) -> Problem:
    """One pipeline of devices with one share unit: stages of one device each, if `dp` is 1."""
    nodes = tuple(
        Node(name=f"n{i}", devices=(Device(name=f"n{i}/0", memory=int(memory)),)) for i in range(devices)
    )
    link = Link(bandwidth=changes.pop("bandwidth", 1e9), latency=1e-6)
    values: dict[str, Any] = {
        "cluster": Cluster(nodes=nodes, inside=link, between=link),
        "profile": profile(),
        "global_batch": 8,
        "micro_batch": 1,
        "search_space": SearchSpace(interleave=interleave, fixed_dp=dp),
        **changes,
    }
    return Problem(**values)


def found(answer: Answer) -> Plan:
    assert answer.plan is not None, answer.refusal
    assert answer.plan.prediction is not None
    return answer.plan


def stages(*layers: int) -> Pipeline:
    edges = [0, *np.cumsum(layers).tolist()]
    return Pipeline(
        stages=tuple(
            Stage(start=edges[i], stop=edges[i + 1], devices=(f"n{i}/0",), shares=(1,))
            for i in range(len(layers))
        ),
        micro_batches=8,
    )


TWO = Pipeline(
    stages=(
        Stage(start=0, stop=2, later=((3, 4),), devices=("n0/0",), shares=(1,)),
        Stage(start=2, stop=3, later=((4, 8),), devices=("n1/0",), shares=(1,)),
    ),
    micro_batches=8,
)


def made(*pipelines: Pipeline) -> Plan:
    batch = sum(pipeline.micro_batches for pipeline in pipelines)
    return Plan(number=1, strategies=(strategy(pipelines),), micro_batch=1, global_batch=batch)


def test_interleaved_pipelines_that_are_alike_are_counted_once_and_others_each() -> None:
    alike, slow = (
        msgspec.structs.replace(
            TWO,
            stages=tuple(
                msgspec.structs.replace(s, devices=(f"n{at + i}/0",)) for i, s in enumerate(TWO.stages)
            ),
        )
        for at in (2, 4)
    )
    whole, here = made(TWO, alike, slow), problem(6).cluster
    rates, cost = {"n5/0": 2.0}, ProfileCost(profile())
    each = [pipeline_seconds(pipeline, here, rates, cost) for pipeline in (TWO, alike, slow)]
    assert each[0] == each[1] < each[2]
    assert step_seconds(whole, here, rates, cost) == each[2] + after_seconds(whole, here, cost)


# -- the value -------------------------------------------------------------------------------------------------


def test_a_plan_is_read_back_and_says_by_its_version_that_not_everyone_can() -> None:
    written = made(TWO)
    assert Plan.from_json(written.to_json()) == written
    tree = msgspec.json.decode(written.to_json())
    assert tree["version"] == 2
    first = tree["strategies"][0]["modules"][0]["pipelines"][0]["stages"][0]
    assert first == {"start": 0, "stop": 2, "later": [[3, 4]], "devices": ["n0/0"], "shares": [1]}
    assert made(stages(4, 4)).version == 1
    assert plain(written).version == 1
    assert b"later" not in plain(written).to_json()
    assert written.digest != plain(written).digest
    assert (TWO.layers, TWO.chunks, TWO.stages[1].layers, TWO.stages[1].named) == (8, 2, 5, "2, 4-7")


@pytest.mark.parametrize(
    ("later", "wrong"),
    [
        (((), ((4, 8),)), "same number of chunks"),
        ((((3, 5),), ((4, 8),)), "ends at layer 5, the next starts at 4"),
        ((((1, 4),), ((4, 8),)), r"layers \[1, 4\) must not be empty, and come after"),
    ],
)
def test_chunks_that_do_not_make_up_the_model_are_refused(later: Any, wrong: str) -> None:
    with pytest.raises(Invalid, match=wrong):
        Pipeline(
            stages=tuple(
                Stage(start=start, stop=stop, later=more, devices=(f"n{i}/0",), shares=(1,))
                for i, ((start, stop), more) in enumerate(zip(((0, 2), (2, 3)), later, strict=True))
            ),
            micro_batches=1,
        )


def test_a_single_stage_takes_no_turns() -> None:
    with pytest.raises(Invalid, match="nothing to interleave with"):
        Pipeline(
            stages=(Stage(start=0, stop=1, later=((1, 2),), devices=("a/0",), shares=(1,)),), micro_batches=1
        )


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(2, 5))
@settings(max_examples=examples(80))
def test_layers_are_dealt_in_even_chunks_and_put_together_again(layers: list[int], chunks: int) -> None:
    given_ = stages(*layers)
    options = list(chunked(given_, chunks))
    assert bool(options) == (len(layers) > 1 and min(layers) >= chunks)
    for option in options:
        assert option.chunks == chunks
        assert [stage.layers for stage in option.stages] == layers
        for stage in option.stages:
            sizes = [stop - start for start, stop in stage.chunks]
            assert max(sizes) - min(sizes) <= 1
        assert flattened([option]) == (given_,)


# -- seconds, memory, bytes ------------------------------------------------------------------------------------


def test_a_plan_takes_what_its_schedule_takes_played_out() -> None:
    job = problem(2)
    cost = task_of(job).cost
    times = stage_times(TWO, job.cluster, {}, cost)
    # By place: 2, 1, 1, 4 layers of 0.01 s; head 0.005 s.
    assert times.work == pytest.approx([0.02, 0.01, 0.01, 0.045])
    each = [[[seconds] * 8 for seconds in part.tolist()] for part in (times.forward, times.backward)]
    last = max(ends(each[0], each[1], times.boundary.tolist(), chunks=2).values())
    assert step_seconds(made(TWO), job.cluster, {}, cost) == pytest.approx(last)
    hop = times.boundary[0]
    assert stage_seconds(TWO, job.cluster, {}, cost) == pytest.approx([0.03 + 4 * hop, 0.055 + 2 * hop])
    steady = cost.timed(Steady())
    assert step_seconds(made(TWO), job.cluster, {}, steady) == pytest.approx(8 * (0.055 + 2 * hop))


def test_memory_is_that_of_the_activations_that_the_order_keeps() -> None:
    job = problem(2)
    cost = ProfileCost(job.profile)
    need = memory_by_device(made(TWO), cost)
    for index, (name, state, sizes) in enumerate(
        (
            ("n0/0", 3 * 1000 + 300, (2 * 100 + 30, 100)),
            ("n1/0", 5 * 1000 + 300, (100, 4 * 100 + 300)),
        )
    ):
        alive = most = 0
        for kind, _, chunk in passes(2, index, 8, 2):
            alive += sizes[chunk] if kind == "forward" else -sizes[chunk]
            most = max(most, alive)
        assert need[name] == state * 4 + most
    flat = memory_by_device(plain(made(TWO)), cost)
    assert need["n0/0"] > flat["n0/0"]


def test_what_moves_is_the_layers_that_a_device_lacks() -> None:
    model, whole = profile(), 1000 * 3  # a parameter and two moments
    flat = made(stages(3, 5))
    # n0 has 0-2 and wants 0, 1, 3; n1 has 3-7 and wants 2, 4-7.
    assert bytes_to_move(model, flat, made(TWO)) == 2 * whole
    assert bytes_to_move(model, made(TWO), flat) == 2 * whole
    assert bytes_to_move(model, made(TWO), made(TWO)) == 0


# -- the search ------------------------------------------------------------------------------------------------


def test_a_search_proposes_interleaved_stages_where_it_may_and_they_are_quicker() -> None:
    job = problem()
    before = found(plan(msgspec.structs.replace(job, search_space=SearchSpace(fixed_dp=1))))
    after = found(plan(job))
    assert before.version == 1
    assert after.pipelines[0].chunks == 2
    assert "2 layers in 2 chunks" in after.reason
    first, second = before.prediction, after.prediction
    assert first is not None
    assert second is not None
    assert second.step_seconds < 0.9 * first.step_seconds
    assert second.bound_seconds <= second.step_seconds
    assert second.step_seconds == pytest.approx(
        step_seconds(after, job.cluster, {}, task_of(job).cost), rel=1e-12
    )
    assert second.memory == memory_by_device(after, task_of(job).cost)


def test_no_other_even_chunks_are_quicker() -> None:
    """All numbers of chunks for each of two pipelines, of unequal devices."""
    rates = {"n1/0": 1.7, "n5/0": 2.5}
    job = problem(6, dp=2, profile=profile(12), rates=rates, global_batch=10)
    after = found(plan(job))
    assert after.prediction is not None
    task = task_of(job)
    options = []
    for pipeline in plain(after).pipelines:
        options.append([pipeline, *(o for n in range(2, 5) for o in chunked(pipeline, n))])
    best = min(step_seconds(made(*chosen), job.cluster, rates, task.cost) for chosen in product(*options))
    assert after.prediction.step_seconds == pytest.approx(best, rel=1e-9)
    assert len(options[0]) > 1


def test_fewer_and_deeper_pipelines_are_looked_at_since_they_fill_in_less_time() -> None:
    """Interleaving the best plain plan is not all: here four pipelines of one device each are best without."""
    job = problem(4, dp=None, bandwidth=3e5, profile=profile(12))

    def best(**search_space: Any) -> tuple[float, int]:
        made = found(plan(msgspec.structs.replace(job, search_space=SearchSpace(**search_space))))
        assert made.prediction is not None
        return made.prediction.step_seconds, len(made.pipelines)

    flat, count = best()
    free, fewer = best(interleave=4)
    pinned = {n: best(interleave=4, fixed_dp=n)[0] for n in (count // 2, count - 1, count)}
    assert (count, fewer) == (4, 2)
    assert free == pytest.approx(min(pinned.values()))
    assert free < 0.98 * min(flat, pinned[count])


def test_none_is_proposed_where_nobody_asked_where_links_are_slow_and_where_memory_is_short() -> None:
    assert found(plan(problem(interleave=1))).version == 1
    assert found(plan(problem(bandwidth=3e3))).version == 1
    job = problem()
    flat = found(plan(msgspec.structs.replace(job, search_space=SearchSpace(fixed_dp=1))))
    assert flat.prediction is not None
    tight = max(flat.prediction.memory.values())
    short = found(plan(problem(memory=tight)))
    assert short.version == 1, "more activations would have to be kept than there is room for"
    for option in chunked(short.pipelines[0], 2):
        assert max(memory_by_device(made(option), task_of(job).cost).values()) > tight


def test_a_running_interleaved_plan_stays_while_it_is_near_the_best_and_says_its_own_time() -> None:
    job = problem()
    running = found(plan(job))
    again = plan(msgspec.structs.replace(job, current=running))
    assert found(again).strategies == running.strategies
    assert running.prediction is not None
    assert again.current_seconds == pytest.approx(running.prediction.step_seconds)
    back = plan(msgspec.structs.replace(job, current=running, search_space=SearchSpace(fixed_dp=1)))
    assert found(back).version == 1
    assert back.current_seconds == pytest.approx(running.prediction.step_seconds)


def test_a_slow_device_is_planned_for_beside_interleaved_stages() -> None:
    job = problem(rates={"n2/0": 3.0}, profile=profile(16))
    running = found(plan(msgspec.structs.replace(job, rates={})))
    after = plan(msgspec.structs.replace(job, current=running))
    assert after.current_seconds is not None
    slow = next(s for s in found(after).pipelines[0].stages if s.devices == ("n2/0",))
    assert slow.layers < 4
    prediction = found(after).prediction
    assert prediction is not None
    assert prediction.step_seconds < 0.7 * after.current_seconds


@given(st.integers(0, 10**6))
@settings(max_examples=examples(40))
def test_interleaving_never_makes_a_plan_slower_or_too_large(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layers = rng.integers(1, 7, int(rng.integers(1, 6)))
    pipeline = msgspec.structs.replace(stages(*layers.tolist()), micro_batches=int(rng.integers(1, 20)))
    job = problem(
        len(layers),
        memory=float(rng.choice([1.2e5, 1e9])),
        bandwidth=float(rng.choice([1e4, 1e9])),
        profile=profile(int(layers.sum())),
        rates={f"n{i}/0": float(rng.uniform(1, 3)) for i in range(len(layers))},
        global_batch=pipeline.micro_batches,
    )
    task, before = task_of(job), made(pipeline)
    after = Interleaving(task=task, most=4).plan(before)
    assert plain(after).strategies == before.strategies
    given_ = (job.cluster, job.rates, task.cost)
    assert step_seconds(after, *given_) <= step_seconds(before, *given_)
    if after.strategies != before.strategies:
        room = job.cluster.devices[0].memory
        assert max(memory_by_device(after, task.cost).values()) <= room


# -- files -----------------------------------------------------------------------------------------------------

FILE: dict[str, Any] = {
    "cluster": {"nodes": [{"name": f"n{i}", "devices": 1, "memory_mib": 1000} for i in range(4)]},
    "model": {
        "name": "m",
        "layers": 8,
        "times": {"block": {"seconds_per_token": 1e-3, "tp_slowdown": {"1": 1.0}}},
    },
    "batch": {"global_batch": 8, "micro_batch": 1, "sequence": 10},
    "pins": {"dp": 1, "interleave": 2},
}


def test_a_problem_in_a_file_asks_for_them() -> None:
    given_ = file_format.load(msgspec.json.encode(FILE))
    planned = solve.solve(given_, "step")
    answered = file_format.answer(planned, 0.0)
    first = answered["plan"]["modules"][0]["pipelines"][0]["stages"][0]
    assert (first["layers"], first["later"]) == ([0, 1], [[4, 5]])
    assert planned.figures is not None
    # 8 micro-batches, and 3 / 2 to fill and drain, of 2 layers of 0.01 s.
    assert planned.figures.step == pytest.approx((8 + 3 / 2) * 0.02, rel=0.02)
    assert planned.figures.gap == pytest.approx(planned.figures.step / planned.figures.bound - 1)
    assert planned.plan is not None
    near = solve.solve_from_current(given_, "step", planned.plan)
    assert near.planned.plan is not None
    assert near.planned.plan.strategies == planned.plan.strategies
    assert near.current == pytest.approx(planned.figures.step)
    assert math.isclose(near.moved or 0, 0)


def test_a_problem_in_units_refuses_them_by_name() -> None:
    units = {"name": "m", "layers": 8, "tp_full": 1, "tp_slowdown": {"1": 1.0}}
    file = {**FILE, "model": units, "batch": {"global_batch": 8, "micro_batch": 1}}
    with pytest.raises(Invalid, match=r"pins\.interleave goes with model\.times"):
        file_format.load(msgspec.json.encode(file))
    given_ = file_format.load(msgspec.json.encode({**file, "pins": {}}))
    with pytest.raises(Invalid, match="of which units know no time"):
        solve.solve_from_current(given_, "step", made(TWO))
