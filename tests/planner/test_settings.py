"""Settings of a search: ZeRO, micro-batch size, recomputation, links; against brute force by the formulas."""

import json
import math
import random
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from elasticd_planner.cost.memory import memory_by_device
from elasticd_planner.cost.model import step_seconds
from elasticd_planner.cost.model_profile import ModelProfile, SectionProfile
from elasticd_planner.cost.profile_cost import ProfileCost
from elasticd_planner.placement.state_movement import bytes_to_move
from elasticd_planner.problem import Answer, Problem, SearchSpace
from elasticd_planner.problem_files.file_format import load
from elasticd_planner.problem_files.solve import solve
from elasticd_planner.search import planner
from elasticd_planner.search.options import (
    OptionOrder,
    SearchProgress,
    Settings,
    listed,
    setting_of,
    task_of,
)
from elasticd_planner.search.planner import plan
from elasticd_planner.spec.cluster import Cluster, Device, Link, Node
from elasticd_planner.spec.plan import Plan, StatePolicy
from elasticd_planner.value import Invalid
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import sizes
from tests.planner import setting_brute
from tests.planner.models import replica_bytes
from tests.planner.real_models import ZERO, job
from tests.sizes import examples

STATES = (
    StatePolicy(),
    StatePolicy(zero=1, replicas=1),
    StatePolicy(zero=1, replicas=2),
    StatePolicy(zero=2, replicas=1),
)


def small(rng: random.Random, *, recompute: bool = False, sequence_parallel: bool = False) -> Problem:
    """Two to four devices of two speeds and two memory sizes, islands now and then, memory that often binds."""
    sizes = rng.choice([(1,), (2,), (2, 1)] if recompute else [(2,), (3,), (2, 1), (2, 2), (4,)])
    sizes = rng.choice([(2,), (3,), (2, 1)]) if sequence_parallel else sizes
    layers = rng.choice([2, 3])
    block = SectionProfile(
        seconds=1e-3,
        fixed_seconds=rng.choice([0.0, 0.02]),
        slowdown=rng.choice([{}, {1: 1.0, 2: 1.1, 3: 1.2, 4: 1.3}]),
        cut_bytes=1000,
        whole_bytes=rng.choice([0, 40]),
        cut_activation=rng.choice([0.0, 40.0]),
        whole_activation=rng.choice([100.0, 200.0]) if sequence_parallel else rng.choice([0.0, 20.0]),
        recomputed_activation=4.0,
        collectives=rng.choice([0, 4]),
    )
    model = ModelProfile(
        name="small",
        layers=layers,
        share_units=4,
        tokens=16.0,
        block=block,
        embed=SectionProfile(cut_bytes=300),
        head=SectionProfile(seconds=2e-4, cut_bytes=300),
        boundary_bytes=50.0 if sequence_parallel else 100.0,
        optimizer_seconds=rng.choice([0.0, 1e-6]),
    )
    whole = replica_bytes(model) / sum(sizes) * rng.choice([1.1, 1.4, 2.0, 4.0]) + rng.choice([0, 2000, 8000])
    nodes = tuple(
        Node(
            name=f"n{n}",
            devices=tuple(
                Device(name=f"n{n}/{i}", memory=int(whole * rng.choice([1.0, 1.0, 1.5]))) for i in range(size)
            ),
            island=rng.choice([0, 2]),
        )
        for n, size in enumerate(sizes)
    )
    return Problem(
        cluster=Cluster(
            nodes=nodes,
            within=Link(bandwidth=1e7, latency=1e-5),
            inside=Link(bandwidth=2e6, latency=1e-4),
            between=Link(bandwidth=rng.choice([1e5, 1e6]), latency=1e-3),
        ),
        profile=model,
        global_batch=4,
        micro_batch=1,
        rates={d.name: rng.choice([1.0, 1.0, 2.0, 2.57]) for node in nodes for d in node.devices},
        search_space=SearchSpace(
            micro_batches=rng.choice([(), (1, 2), (1, 2, 4)]),
            states=rng.choice([STATES, STATES[:2], STATES[1:2], STATES[2:]]),
            recompute=recompute,
            sequence_parallel=sequence_parallel,
        ),
    )


def found(answer: Answer) -> Plan:
    assert answer.plan is not None
    assert answer.plan.prediction is not None
    return answer.plan


@settings(max_examples=examples(25))
@given(st.integers(0, 10**6))
def test_the_best_setting_is_what_brute_force_finds(seed: int) -> None:
    problem = small(random.Random(seed))
    least = setting_brute.best(problem)
    answer = plan(problem)
    if answer.plan is None:
        assert math.isinf(least)
        assert "does not fit" in answer.refusal
        return
    made = found(answer)
    assert made.prediction is not None
    assert made.prediction.step_seconds == pytest.approx(setting_brute.seconds(made, problem))
    assert made.prediction.memory == setting_brute.memory(made, problem)
    assert setting_brute.fits(made, problem)
    assert made.prediction.step_seconds == pytest.approx(least)
    assert made.prediction.bound_seconds <= least * (1 + 1e-9)


@pytest.mark.parametrize("seed", sizes.every(range(6), 2))
def test_settings_that_are_too_many_to_enumerate_are_searched(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = small(random.Random(seed))
    least = setting_brute.best(problem)
    monkeypatch.setattr(planner, "ENUMERATED_SETTINGS", 1)
    answer = plan(problem)
    if answer.plan is None:
        assert math.isinf(least)
        return
    made = found(answer)
    assert made.prediction is not None
    assert setting_brute.fits(made, problem)
    assert least * (1 - 1e-9) <= made.prediction.step_seconds <= least * 1.1
    assert made.prediction.bound_seconds <= least * (1 + 1e-9)


@pytest.mark.full
def test_eight_devices_of_two_kinds_in_all_settings_are_planned_in_seconds() -> None:
    """Each of some hundred settings takes seconds to enumerate."""
    raw = json.loads((Path(__file__).parents[2] / "examples" / "problems" / "mixed.json").read_text())
    raw["cluster"]["nodes"] = [
        {**node, "devices": 4, "island": 4} for node in raw["cluster"]["nodes"] if node["name"] in ("a0", "b0")
    ]
    raw["rates"] = {}
    start = time.process_time()
    planned = solve(load(json.dumps(raw)), ideal=False)
    assert time.process_time() - start < 60
    assert planned.figures is not None
    assert planned.figures.gap < 0.15


@settings(max_examples=examples(20))
@given(st.integers(0, 10**6))
def test_recomputation_is_where_memory_demands_it_and_the_bound_holds(seed: int) -> None:
    problem = small(random.Random(seed), recompute=True)
    least = setting_brute.best(problem)
    answer = plan(problem)
    if answer.plan is None:
        assert math.isinf(least)
        return
    made = found(answer)
    assert made.prediction is not None
    assert made.prediction.step_seconds == pytest.approx(setting_brute.seconds(made, problem))
    assert setting_brute.fits(made, problem)
    assert least * (1 - 1e-9) <= made.prediction.step_seconds <= least * 1.35
    assert made.prediction.bound_seconds <= least * (1 + 1e-9)
    for p, pipeline in enumerate(made.pipelines):  # no stage can simply be switched off
        for s, stage in enumerate(pipeline.stages):
            if stage.recompute:
                assert not setting_brute.fits(_without(made, p, s), problem)


@settings(max_examples=examples(15))
@given(st.integers(0, 10**6), st.booleans())
def test_sequence_parallelism_is_where_memory_demands_it(seed: int, recompute: bool) -> None:
    problem = small(random.Random(seed), recompute=recompute, sequence_parallel=True)
    least = setting_brute.best(problem)
    answer = plan(problem)
    if answer.plan is None:
        assert math.isinf(least)
        return
    made = found(answer)
    assert made.prediction is not None
    assert made.prediction.step_seconds == pytest.approx(setting_brute.seconds(made, problem))
    assert made.prediction.memory == setting_brute.memory(made, problem)
    assert setting_brute.fits(made, problem)
    assert least * (1 - 1e-9) <= made.prediction.step_seconds <= least * 1.35
    assert made.prediction.bound_seconds <= least * (1 + 1e-9)
    for p, pipeline in enumerate(made.pipelines):
        for s, stage in enumerate(pipeline.stages):
            if stage.sequence_parallel:
                assert len(stage.devices) > 1
                assert not setting_brute.fits(_without(made, p, s, "sequence_parallel"), problem)


def _without(made: Plan, p: int, s: int, flag: str = "recompute") -> Plan:
    module = made.modules[0]
    pipeline = module.pipelines[p]
    stage = msgspec.structs.replace(pipeline.stages[s], **{flag: False})
    stages = (*pipeline.stages[:s], stage, *pipeline.stages[s + 1 :])
    changed = msgspec.structs.replace(pipeline, stages=stages)
    pipelines = (*module.pipelines[:p], changed, *module.pipelines[p + 1 :])
    strategy = msgspec.structs.replace(
        made.strategies[0], modules=(msgspec.structs.replace(module, pipelines=pipelines),)
    )
    return made.replace(strategies=(strategy,))


def uniform(devices: int, memory: float, **changes: object) -> Problem:
    """Devices of one node each, so that pipelines of one device compete with deep ones."""
    model = ModelProfile(
        name="m",
        layers=4,
        share_units=4,
        tokens=10.0,
        widths=(1,),
        block=SectionProfile(
            seconds=1e-2, cut_bytes=1000, cut_activation=10.0, recomputed_activation=1.0, fixed_seconds=0.05
        ),
        boundary_bytes=10.0,
    )
    nodes = tuple(
        Node(name=f"n{i}", devices=(Device(name=f"n{i}/0", memory=int(memory)),)) for i in range(devices)
    )
    values: dict[str, object] = {
        "cluster": Cluster(nodes=nodes, between=Link(bandwidth=1e9, latency=0.0)),
        "profile": model,
        "global_batch": 4,
        "micro_batch": 1,
    }
    return Problem(**{**values, **changes})  # type: ignore[arg-type]


def test_zero_makes_room_for_more_pipelines() -> None:
    # Parameters, gradients and activations of all layers, half of the moments, and half of the values that are
    # being sent.
    tight = 4000 * 3 + 2000 + 400
    plain = found(plan(uniform(2, tight)))
    assert len(plain.pipelines) == 1
    search_space = SearchSpace(states=(StatePolicy(), StatePolicy(zero=1, replicas=1)))
    sharded = found(plan(uniform(2, tight, search_space=search_space)))
    assert len(sharded.pipelines) == 2
    assert sharded.state == StatePolicy(zero=1, replicas=1)
    assert "ZeRO 1, 1 replica of" in sharded.reason
    assert sharded.prediction is not None
    assert plain.prediction is not None
    assert sharded.prediction.step_seconds < plain.prediction.step_seconds
    # Two replicas on two devices are all there was without ZeRO, however many pipelines there are.
    twice = uniform(2, tight, search_space=SearchSpace(states=(StatePolicy(zero=1, replicas=2),)))
    assert plan(twice).plan is None


def test_larger_micro_batches_are_chosen_where_each_costs_a_fixed_time() -> None:
    free = SearchSpace(micro_batches=(1, 2, 4))
    made = found(plan(uniform(1, 1e9, search_space=free)))
    assert made.micro_batch == 4
    assert "micro-batches of 4" in made.reason
    small_memory = 4000 * 4 + 2 * 400 + 300  # what two samples keep, not four
    assert found(plan(uniform(1, small_memory, search_space=free))).micro_batch == 2


def test_recomputation_is_chosen_only_where_nothing_fits_without() -> None:
    free = SearchSpace(recompute=True)
    roomy = found(plan(uniform(1, 1e6, search_space=free)))
    assert not any(stage.recompute for p in roomy.pipelines for stage in p.stages)
    tight = 4000 * 4 + 4 * 10 + 100  # what recomputation keeps, and one block
    assert plan(uniform(1, tight)).plan is None
    made = found(plan(uniform(1, tight, search_space=free)))
    assert all(stage.recompute for p in made.pipelines for stage in p.stages)
    assert "recomputing" in made.reason


def test_sequence_parallelism_is_chosen_only_where_nothing_fits_without() -> None:
    def job(memory: float, **search_space: Any) -> Problem:
        made = uniform(1, memory, search_space=SearchSpace(**search_space))
        block = msgspec.structs.replace(made.profile.block, whole_activation=20.0, collectives=4)
        profile = msgspec.structs.replace(made.profile, widths=(2,), block=block)
        two = tuple(Device(name=f"n0/{i}", memory=int(memory)) for i in range(2))
        cluster = msgspec.structs.replace(made.cluster, nodes=(Node(name="n0", devices=two),))
        return msgspec.structs.replace(made, profile=profile, cluster=cluster)

    roomy = found(plan(job(1e6, sequence_parallel=True)))
    assert roomy.version == 1
    # Half of the parameters and all that belongs to them, half of all activations, and one gathered tensor.
    tight = 4 * 1000 * 4 / 2 + 4 * 10 * (10 + 20) / 2 + 10 * 10
    assert plan(job(tight)).plan is None
    made = found(plan(job(tight, sequence_parallel=True)))
    assert all(stage.sequence_parallel for _, _, stage in made.walk())
    assert "sequence parallel" in made.reason
    assert made.version == 3
    refused = plan(job(tight - 1024, sequence_parallel=True))
    assert "needs 1 KiB more" in refused.refusal
    assert "sequence parallelism" in refused.refusal
    for current in (None, roomy):
        always = found(plan(msgspec.structs.replace(job(1e6, sequence_parallel="always"), current=current)))
        assert all(stage.sequence_parallel for _, _, stage in always.walk())
    assert always.prediction is not None
    assert roomy.prediction is not None
    assert always.prediction.step_seconds >= roomy.prediction.step_seconds
    back = found(plan(msgspec.structs.replace(job(1e6), current=made)))
    assert not any(stage.sequence_parallel for _, _, stage in back.walk())


def test_what_fits_under_no_setting_is_refused_with_the_smallest_shortfall() -> None:
    free = SearchSpace(micro_batches=(1, 2), states=STATES, recompute=True)
    lacking = 4000 * 4 + 4 * 10 + (100 - 10) - 1024  # state, four inputs, and one block's other activations
    answer = plan(uniform(1, lacking, search_space=free))
    assert answer.plan is None
    assert "needs 1 KiB more on n0/0" in answer.refusal
    assert "micro-batches of 1, recomputation" in answer.refusal


def test_groups_stay_in_islands_while_the_link_between_them_is_slow() -> None:
    def widths(inside: float) -> set[int]:
        model = msgspec.structs.replace(
            uniform(1, 1e9).profile,
            widths=(1, 2, 4),
            boundary_bytes=1e4,
            block=SectionProfile(seconds=1e-2, cut_bytes=1000, collectives=4),
        )
        node = Node(name="n0", devices=tuple(Device(name=f"n0/{i}", memory=6000) for i in range(4)), island=2)
        cluster = Cluster(
            nodes=(node,),
            within=Link(bandwidth=1e9, latency=0.0),
            inside=Link(bandwidth=inside, latency=0.0),
        )
        problem = Problem(cluster=cluster, profile=model, global_batch=2, micro_batch=1)
        made = found(plan(problem))
        for pipeline in made.pipelines:
            for stage in pipeline.stages:
                if len(stage.devices) == 2:  # a pair lies in one island
                    assert len({int(name[-1]) // 2 for name in stage.devices}) == 1
        return {len(stage.devices) for p in made.pipelines for stage in p.stages}

    assert widths(1e9) == {4}
    assert widths(1e6) == {2}


def test_larger_problems_walk_the_settings_the_same_way_each_time_and_fit() -> None:
    nodes = tuple(
        Node(
            name=f"n{n}",
            devices=tuple(Device(name=f"n{n}/{i}", memory=9000 if n < 2 else 5000) for i in range(4)),
            island=2,
        )
        for n in range(sizes.number(full=4, quick=3))
    )
    search_space = SearchSpace(micro_batches=(1, 2), states=STATES[:2], recompute=True)
    problem = msgspec.structs.replace(
        uniform(1, 1e9, search_space=search_space),
        cluster=Cluster(nodes=nodes, within=Link(bandwidth=1e9)),
        profile=msgspec.structs.replace(uniform(1, 1e9).profile, layers=8, widths=(1, 2, 4)),
        global_batch=16,
        rates={device.name: 2.0 for node in nodes[2:] for device in node.devices},
    )
    first = found(plan(problem))
    assert setting_brute.fits(first, problem)
    assert first.digest == found(plan(problem)).digest
    assert first.prediction is not None
    assert first.prediction.step_seconds == pytest.approx(setting_brute.seconds(first, problem))
    plain = plan(msgspec.structs.replace(problem, search_space=SearchSpace()))
    if plain.plan is not None and plain.plan.prediction is not None:
        assert first.prediction.step_seconds <= plain.plan.prediction.step_seconds * (1 + 1e-9)


@pytest.mark.parametrize(
    ("job_here", "fewer"),
    [
        (job("SmolLM2-135M", (5, 4), batch=16, rates={"n0/1": 2.5, "n1/0": 1.6}, micro_batches=(1, 4)), True),
        pytest.param(
            job(
                "Qwen2.5-0.5B",
                (6, 4),
                batch=24,
                tokens=2048,
                links={"gigabytes": 6.08},
                states=ZERO[1:2],
                recompute=True,
                fixed_tp=1,  # beside slow devices groups are wider
                rates={"n0/1": 3.21, "n0/5": 2.89, "n0/0": 3.47},
            ),
            False,
            marks=pytest.mark.full,
        ),
    ],
)
def test_settings_that_healthy_devices_would_be_slow_under_are_not_searched(
    monkeypatch: pytest.MonkeyPatch, job_here: Problem, fewer: bool
) -> None:
    tried: list[SearchProgress] = []
    found = plan(job_here, watch=tried.append)
    few = len(tried)
    monkeypatch.setattr(OptionOrder, "_promising", lambda self, setting: True)
    all_tried = plan(job_here, watch=tried.append)
    assert not fewer or 2 * few < len(tried) - few, "as many settings were searched"
    assert found.plan is not None
    assert all_tried.plan is not None
    assert found.plan.prediction is not None
    assert all_tried.plan.prediction is not None
    assert found.plan.prediction.step_seconds <= all_tried.plan.prediction.step_seconds * (1 + 1e-9)


def test_settings_are_listed_simple_ones_first_and_a_size_that_does_not_divide_is_refused() -> None:
    problem = uniform(2, 1e9, search_space=SearchSpace(micro_batches=(1, 2), states=STATES, recompute=True))
    every = list(listed(problem))
    assert (every[0].micro_batch, every[0].state, every[0].recompute) == (1, StatePolicy(), False)
    assert len(set(every)) == len(every)
    assert all(Settings(problem).bound(setting) > 0 for setting in every)
    with pytest.raises(Invalid, match="micro-batches of 3"):
        uniform(2, 1e9, search_space=SearchSpace(micro_batches=(3,)))


def test_measured_collectives_and_overlap_are_what_the_cost_says() -> None:
    base = uniform(2, 1e9).profile
    model = msgspec.structs.replace(
        base, collective_seconds={2: 0.5}, collective_token_seconds={2: 0.01}, boundary_bytes=1e6
    )
    near, far = Link(bandwidth=1e9, latency=0.0), Link(bandwidth=1e8, latency=0.0)
    cost = ProfileCost(model, near=near)
    assert cost.collective(2, near) == pytest.approx(0.6)
    assert cost.collective(2, far) == pytest.approx(6.0)
    assert ProfileCost(model).collective(2, far) == pytest.approx(0.6)
    assert model.sized(20.0).tokens == 20
    assert ProfileCost(model.sized(20.0)).collective(2, near) == pytest.approx(0.7)
    slow = Link(bandwidth=4000.0, latency=0.0)
    hidden = msgspec.structs.replace(model, overlap=True)
    # R = 2 hops of 4000 / 2 bytes: 1 s; b = 2/3 x 10 x 0.01 x 4 s.
    assert ProfileCost(model).after(2, 1, slow, 1) == pytest.approx(1.0)
    assert ProfileCost(hidden).after(2, 1, slow, 1) == pytest.approx(max(1 / 4, 1 - 0.8 / 3 * 3 / 4))
    assert ProfileCost(hidden).after(2, 1, slow) <= ProfileCost(hidden).after(2, 1, slow, 1)
    made = found(plan(uniform(2, 1e9)))
    assert memory_by_device(made, ProfileCost(base))
    assert step_seconds(made, uniform(2, 1e9).cluster, {}, ProfileCost(base)) > 0


@pytest.mark.parametrize("seed", sizes.every(range(12), 3))
def test_a_plan_is_predicted_as_what_it_is_whatever_setting_it_was_found_under(seed: int) -> None:
    """With recomputation allowed, and in the end in few stages or in none; reductions are hidden in part."""
    problem = small(random.Random(seed), recompute=True)
    problem = msgspec.structs.replace(problem, profile=msgspec.structs.replace(problem.profile, overlap=True))
    made = plan(problem).plan
    if made is None:
        return
    assert made.prediction is not None
    alone = setting_of(made, problem).problem(problem)
    assert step_seconds(made, problem.cluster, problem.rates, task_of(alone).cost) == pytest.approx(
        made.prediction.step_seconds
    )


@pytest.mark.full
def test_mixed_clusters_are_predicted_as_their_plans_are_judged_alone() -> None:
    raw = json.loads((Path(__file__).parents[2] / "examples" / "problems" / "mixed.json").read_text())
    planned = solve(load(json.dumps(raw)))
    assert planned.plan is not None
    assert planned.figures is not None
    recomputing = any(stage.recompute for _, _, stage in planned.plan.walk())
    pinned = solve(load(json.dumps({**raw, "pins": {**raw.get("pins", {}), "recompute": recomputing}})))
    assert pinned.figures is not None
    assert planned.figures.step <= pinned.figures.step * (1 + 1e-9)


def test_a_plan_that_runs_under_another_setting_is_judged_as_it_is_and_kept_where_it_is_good() -> None:
    free = SearchSpace(micro_batches=(1, 2), states=STATES[:2])
    first = found(plan(uniform(2, 1e9, search_space=free)))
    again = plan(uniform(2, 1e9, search_space=free, current=first))
    assert first.prediction is not None
    assert again.current_seconds == pytest.approx(first.prediction.step_seconds)
    assert found(again).pipelines == first.pipelines
    other = found(plan(uniform(2, 1e9, search_space=SearchSpace(micro_batches=(4,), states=STATES[3:]))))
    judged = plan(uniform(2, 1e9, search_space=free, current=other))
    assert judged.current_seconds == pytest.approx(setting_brute.seconds(other, uniform(2, 1e9)))


def test_bytes_to_move_count_the_part_of_the_state_that_zero_leaves_to_a_member() -> None:
    problem = uniform(2, 1e9, search_space=SearchSpace(fixed_dp=2))
    model = problem.profile
    plain = found(plan(problem))
    sharded = plain.replace(state=StatePolicy(zero=1, replicas=1))
    whole = model.parameter_bytes
    assert bytes_to_move(model, None, plain) == 2 * whole * 3
    assert bytes_to_move(model, None, sharded) == 2 * whole * (1 + 2 / 2)
    assert bytes_to_move(model, plain, sharded) == 0
    assert bytes_to_move(model, sharded, plain) == 2 * whole * 2 / 2


@pytest.mark.parametrize("seed", range(6))
def test_who_watches_a_search_hears_of_plans_that_get_better_and_of_a_bound_that_holds(seed: int) -> None:
    problem = small(random.Random(seed), recompute=True)
    progress: list[SearchProgress] = []
    watched, alone = plan(problem, watch=progress.append), plan(problem)
    assert watched == alone, "watching changes nothing"
    best = [state.best for state in progress]
    assert best == sorted(best, reverse=True)
    assert [state.tried for state in progress] == list(range(1, len(progress) + 1))
    if watched.plan is not None and watched.plan.prediction is not None:
        assert best[-1] == pytest.approx(watched.plan.prediction.step_seconds)
        bounds = {state.bound for state in progress if math.isfinite(state.best)}
        assert max(bounds) <= watched.plan.prediction.step_seconds * (1 + 1e-9)
