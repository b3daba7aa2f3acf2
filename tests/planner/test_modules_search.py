"""Plans of several modules: they keep memory and the rules of plans, their predictions are of the order that
ranks carry out, and what cannot be is refused with a remedy."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from functools import cache

import msgspec
import numpy as np
import pytest
from elasticd_planner.cost.model_profile import ModelProfile
from elasticd_planner.cost.schedule import passes
from elasticd_planner.layout.module_order import module_pass_times
from elasticd_planner.problem import Problem, SearchSpace
from elasticd_planner.search import module_cost
from elasticd_planner.search.item_lanes import ItemLane, filled, weights
from elasticd_planner.search.module_cost import ModuleCosts
from elasticd_planner.search.modules import left_devices, with_pair
from elasticd_planner.search.planner import TOLERANCE, plan
from elasticd_planner.spec.plan import (
    NO_TIMES,
    Edge,
    ModulePlan,
    Pipeline,
    Plan,
    Stage,
    StatePolicy,
    Strategy,
)
from elasticd_planner.value import Invalid

from tests.planner.drawn_module_problems import GIB, LOSS, MIB, cluster_of, drawn_problem
from tests.sizes import number

#: Of each memory, and of one and of two modules of items. A plan of seed 0 takes ten times as long as another.
SEEDS = range(number(0, 1), number(40, 4))


#: What may be searched beside the layout.
LEAN = SearchSpace(recompute=True, sequence_parallel=True)
#: The part by which a plan may be slower than a layout of the same devices.
SLOWER = 0.005


def planned(problem: Problem) -> Plan:
    answer = plan(problem, 3)
    assert answer.plan is not None, answer.refusal
    return answer.plan


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_keeps_memory_and_says_what_it_is_played_as(seed: int) -> None:
    problem = drawn_problem(seed, memory=(60, 24, 12)[seed % 3] * GIB, modules=1 + seed % 2)
    answer = plan(problem, 3)
    if answer.plan is None:
        assert "add a node" in answer.refusal or "more on" in answer.refusal
        assert seed % 3
        return
    found, prediction = answer.plan, answer.plan.prediction
    assert prediction is not None
    assert [module.module for module in found.modules] == [*(m.name for m in problem.modules), LOSS]
    assert {(edge.source, edge.target) for edge in found.strategies[0].edges} == {
        (module.name, LOSS) for module in problem.modules
    }
    assert all(size <= problem.cluster.memory[device] for device, size in prediction.memory.items())
    assert {*prediction.memory} == {*found.members}
    assert all(stage.microseconds != NO_TIMES for _, _, stage in found.walk())
    costs = ModuleCosts(problem)
    assert costs.timed(found) == found
    assert prediction.step_seconds == costs.seconds(found)
    assert 0 < prediction.bound_seconds <= prediction.step_seconds
    busiest = max(costs.busy(found).values())
    assert busiest <= prediction.step_seconds * (1 + 1e-3)
    assert seed != SEEDS[0] or found == plan(problem, 3).plan
    assert Plan.from_json(found.to_json()) == found


@pytest.fixture(scope="module")
def plan_of() -> Callable[[int], Plan]:
    """Plans of drawn problems by their seeds, each searched once."""
    return cache(lambda seed: planned(drawn_problem(seed)))


@pytest.mark.parametrize("seed", SEEDS)
def test_no_lane_keeps_more_items_than_memory_is_counted_for(seed: int, plan_of: Callable[[int], Plan]) -> None:
    problem, made = drawn_problem(seed), plan_of(seed)
    costs, (module,) = ModuleCosts(problem), problem.modules
    if not module.trained:
        return
    for ahead in (1, 2, 8, made.global_batch):
        modules = tuple(
            msgspec.structs.replace(each, ahead=ahead, lead=0) if each.items else each for each in made.modules
        )
        found = made.replace(strategies=(msgspec.structs.replace(made.strategies[0], modules=modules),))
        batches = costs.batches(found)
        items = batches[module.name]
        kept: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        for act, start, stop in module_pass_times(found, batches, passes):
            if act.module == module.name:
                group = items.pipelines[act.pipeline][act.lane][act.act.micro_batch]  # type: ignore[union-attr]
                forward = act.act.kind == "forward"
                kept[act.pipeline, act.lane].append(
                    (start, len(group.items)) if forward else (stop, -len(group.items))
                )
        allowed = costs.kept_items(found, found.view(module.name).module)
        for (pipeline, _), changes in kept.items():
            most = max(np.cumsum([count for _, count in sorted(changes)]))
            assert most <= allowed[pipeline], (ahead, pipeline)


def test_items_take_the_time_that_other_modules_leave() -> None:
    lanes = [
        ItemLane(
            pipeline=Pipeline(
                stages=(Stage(start=0, stop=1, devices=(device,), shares=(1,)),), micro_batches=1
            ),
            seconds=(seconds,),
        )
        for device, seconds in (("n0/0", 1.0), ("n0/1", 1.0), ("n0/2", 2.0))
    ]
    found = filled(lanes, {"n0/0": 10.0, "n0/1": 4.0}, 12.0, 10.0)
    # (T - 10) + (T - 4) + T / 2 = 12
    assert found.seconds == pytest.approx(10.4)
    assert found.items == pytest.approx((0.4, 6.4, 5.2))
    easy = filled(lanes, {"n0/0": 10.0, "n0/1": 4.0}, 5.5, 10.0)
    assert easy.seconds == 10.0
    assert easy.items == pytest.approx((0.0, 3.0, 2.5))


def test_weights_are_whole_and_of_no_more_lanes_than_items() -> None:
    assert weights([8.0, 4.0, 2.0]) == [4, 2, 1]
    assert weights([0.5, 0.5, 0.5, 0.5]) == [1, 1, 0, 0]
    assert weights([100.0, 0.1]) == [1, 0]


def test_slow_devices_are_left_to_items_first_then_their_node() -> None:
    problem = msgspec.structs.replace(drawn_problem(0), cluster=cluster_of(3, 2), rates={"n1/1": 2.0})
    assert left_devices(problem, 1) == ["n1/1"]
    assert left_devices(problem, 3) == ["n1/1", "n1/0", "n2/0"]


@pytest.mark.full
def test_an_encoder_that_fits_no_device_gets_a_plan_of_its_own() -> None:
    problem = drawn_problem(1, memory=24 * GIB)
    (module,) = problem.modules
    block = msgspec.structs.replace(module.profile.block, cut_bytes=2 * GIB)
    profile = msgspec.structs.replace(module.profile, block=block, layers=8)
    large = msgspec.structs.replace(module, profile=profile, trained=True)
    found = planned(msgspec.structs.replace(problem, modules=(large,)))
    widest = max(len(stage.devices) for stage in found.view(large.name).pipelines[0].stages)
    assert widest > 1 or len(found.view(large.name).pipelines[0].stages) > 1


@pytest.mark.parametrize("seed", [4, 9, *range(number(20, 0))])
def test_a_plan_is_no_slower_than_a_layout_that_memory_just_holds(seed: int) -> None:
    """The best plan of the language model alone, and encoders in TP groups of two beside it: a device has the
    memory that this needs, and no more."""
    problem = drawn_problem(seed)
    (module,) = problem.modules
    block = msgspec.structs.replace(module.profile.block, cut_bytes=(100, 200, 400)[seed % 3] * MIB)
    module = msgspec.structs.replace(module, profile=msgspec.structs.replace(module.profile, block=block))
    space = LEAN if seed % 2 else msgspec.structs.replace(LEAN, fixed_tp=1, fixed_dp=4)
    problem = msgspec.structs.replace(
        problem, cluster=cluster_of(1, 4), rates={}, search_space=space, modules=(module,)
    )
    loss = planned(msgspec.structs.replace(problem, modules=()))
    devices, half = [device.name for device in problem.cluster.devices], module.profile.share_units // 2
    lanes = tuple(
        Pipeline(
            stages=(
                Stage(
                    start=0,
                    stop=module.profile.layers,
                    devices=tuple(devices[at : at + 2]),
                    shares=(half, half),
                    recompute=module.trained,
                    sequence_parallel=True,
                ),
            ),
            micro_batches=1,
        )
        for at in range(0, len(devices), 2)
    )
    modules = (
        ModulePlan(
            module=module.name,
            pipelines=lanes,
            items=module.items,
            trainable=module.trained,
            ahead=loss.global_batch // loss.micro_batch,
            lead=1,
        ),
        msgspec.structs.replace(loss.modules[0], module=LOSS),
    )
    edges = (Edge(source=module.name, target=LOSS),)
    layout = loss.replace(strategies=(Strategy(modules=modules, edges=edges),), idle=())
    costs = ModuleCosts(problem)
    layout = costs.timed(layout)
    tight = msgspec.structs.replace(problem, cluster=cluster_of(1, 4, max(costs.memory(layout).values())))
    found = planned(tight)
    assert found.prediction is not None
    assert found.prediction.step_seconds <= costs.seconds(layout) * (1 + SLOWER)


def test_what_does_not_fit_is_refused_with_a_remedy() -> None:
    problem = drawn_problem(1, memory=8 * GIB)
    (module,) = problem.modules
    block = msgspec.structs.replace(module.profile.block, cut_bytes=20 * GIB)
    large = msgspec.structs.replace(module, profile=msgspec.structs.replace(module.profile, block=block))
    answer = plan(msgspec.structs.replace(problem, modules=(large,)))
    assert answer.plan is None
    assert "do not fit beside language: encoder0 needs" in answer.refusal
    assert answer.refusal.endswith("add a node")


def test_modules_need_names_of_their_own_and_no_packed_rows() -> None:
    problem = drawn_problem(1)
    with pytest.raises(Invalid, match="two are named 'encoder0'"):
        msgspec.structs.replace(problem, modules=problem.modules * 2)
    with pytest.raises(Invalid, match="must be positive"):
        msgspec.structs.replace(problem.modules[0], items_a_sample=0.0)


@pytest.mark.parametrize("items", [0.99, 1.99, 5.9])
def test_the_part_of_an_item_in_the_mean_is_in_no_step_and_in_no_bound(items: float) -> None:
    """The items of a mean step are whole, so that it takes less than the mean of all items does."""
    problem = drawn_problem(3)
    (module,) = problem.modules
    few = msgspec.structs.replace(module, items_a_sample=items / 4, rows_an_item=module.rows_an_item * 40)
    found = planned(
        msgspec.structs.replace(problem, cluster=cluster_of(1, 2), rates={}, modules=(few,), global_batch=4)
    )
    assert found.prediction is not None
    assert found.prediction.bound_seconds <= found.prediction.step_seconds


def test_a_running_plan_stays_where_none_is_better(plan_of: Callable[[int], Plan]) -> None:
    for seed in range(number(0, 1), number(4, 3)):
        problem, first = drawn_problem(seed), plan_of(seed)
        again = plan(msgspec.structs.replace(problem, current=first), 4)
        assert again.plan is not None
        assert again.current_seconds == pytest.approx(first.prediction.step_seconds)  # type: ignore[union-attr]
        assert again.plan.strategies == first.strategies


def test_a_given_plan_is_answered_or_the_reason_why_not(plan_of: Callable[[int], Plan]) -> None:
    problem, given = drawn_problem(2), plan_of(2)
    answer = plan(msgspec.structs.replace(problem, given=given, only_given=True), 7)
    assert answer.plan is not None
    assert answer.plan.strategies == given.strategies
    assert answer.plan.reason.startswith("given by the job: ")
    small = msgspec.structs.replace(problem, cluster=cluster_of(2, 4, GIB), given=given, only_given=True)
    assert "the plan that the job gives cannot be: does not fit" in plan(small).refusal


def test_a_given_plan_whose_encoders_run_too_far_ahead_does_not_fit(plan_of: Callable[[int], Plan]) -> None:
    problem, first = drawn_problem(2), plan_of(2)

    def ahead(micro_batches: int) -> Plan:
        def module(each: ModulePlan) -> ModulePlan:
            return msgspec.structs.replace(each, ahead=micro_batches, lead=0) if each.items else each

        strategies = tuple(
            msgspec.structs.replace(strategy, modules=tuple(map(module, strategy.modules)))
            for strategy in first.strategies
        )
        return msgspec.structs.replace(first, strategies=strategies)

    few, many = (ModuleCosts(problem).memory(ahead(number)) for number in (1, 64))
    device = max(few, key=lambda name: many[name] - few[name])
    assert many[device] > few[device]
    middle = (few[device] + many[device]) // 2
    nodes = tuple(
        msgspec.structs.replace(
            node,
            devices=tuple(
                msgspec.structs.replace(each, memory=middle) if each.name == device else each
                for each in node.devices
            ),
        )
        for node in problem.cluster.nodes
    )
    small = msgspec.structs.replace(problem.cluster, nodes=nodes)
    small_problem = msgspec.structs.replace(problem, cluster=small, only_given=True)
    answer = plan(msgspec.structs.replace(small_problem, given=ahead(64)))
    assert "the plan that the job gives cannot be: does not fit" in answer.refusal
    most = re.search(r"it fits where modules of items are at most (\d+) micro-batches ahead", answer.refusal)
    assert most is not None, answer.refusal
    assert planned(msgspec.structs.replace(small_problem, given=ahead(int(most[1])))).strategies


def test_a_given_plan_has_what_holds_under_every_plan_of_the_job(plan_of: Callable[[int], Plan]) -> None:
    problem, given = drawn_problem(2), plan_of(2)
    state = StatePolicy(zero=1, replicas=2)
    space = SearchSpace(states=(state,), recompute="always", sequence_parallel="always")
    problem = msgspec.structs.replace(problem, search_space=space)
    found = planned(msgspec.structs.replace(problem, given=given, only_given=True))
    assert found.state == state
    assert [stage.devices for _, _, stage in found.walk()] == [stage.devices for _, _, stage in given.walk()]
    trained = {module.name for module in problem.modules if module.trained} | {LOSS}
    assert all(stage.recompute == (module.module in trained) for module, _, stage in found.walk())
    assert all(stage.sequence_parallel == (len(stage.devices) > 1) for _, _, stage in found.walk())
    searched = planned(problem)
    assert searched.state == state
    assert all(stage.recompute == (module.module in trained) for module, _, stage in searched.walk())


def test_idle_devices_carry_the_replicas_that_a_given_plan_needs() -> None:
    problem = drawn_problem(2)
    small = msgspec.structs.replace(problem, cluster=cluster_of(1, 4))
    given = planned(small)
    space = SearchSpace(states=(StatePolicy(zero=1, replicas=2),))
    asked = msgspec.structs.replace(problem, search_space=space, given=given, only_given=True)
    assert planned(asked).carriers == ("n1/0", "n1/1", "n1/2", "n1/3")


def test_only_problems_with_modules_need_a_newer_planner() -> None:
    problem = drawn_problem(0)
    assert problem.version == Problem.newest == 2
    assert msgspec.structs.replace(problem, modules=()).version == 1


def test_a_part_of_a_large_step_takes_about_as_long_as_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = msgspec.structs.replace(
        drawn_problem(5),
        cluster=cluster_of(4, 8, 60 * GIB),
        rates={},
        global_batch=128,
        search_space=SearchSpace(fixed_dp=8),
    )
    found = planned(problem)
    assert found.prediction is not None
    monkeypatch.setattr(module_cost, "MOST_PASSES", 256)
    costs = ModuleCosts(problem)
    part, _ = costs._part(found)
    assert len(part.loss_module.pipelines) < len(found.loss_module.pipelines)
    assert costs.seconds(found) == pytest.approx(found.prediction.step_seconds, rel=0.05)


def test_passes_of_a_few_microseconds_have_a_plan() -> None:
    """Times of passes are whole microseconds, so that an estimate may be above what is played."""

    def tiny(profile: ModelProfile) -> ModelProfile:
        sections = {
            name: msgspec.structs.replace(section, seconds=1e-8, fixed_seconds=0.0)
            for name, section in (("embed", profile.embed), ("block", profile.block), ("head", profile.head))
        }
        return msgspec.structs.replace(profile, **sections)

    problem = drawn_problem(0, modules=1)
    (module,) = problem.modules
    made = msgspec.structs.replace(
        problem,
        cluster=cluster_of(1, 2),
        profile=tiny(problem.profile),
        modules=(msgspec.structs.replace(module, profile=tiny(module.profile), items_a_sample=2 / 3),),
        rates={},
    )
    answer = plan(made, 1)
    assert answer.plan is not None, answer.refusal


def test_a_plan_without_times_has_the_order_of_those_of_now() -> None:
    """An answer's JSON says no times."""
    problem = drawn_problem(2)
    found = planned(problem)
    modules = tuple(
        msgspec.structs.replace(
            module,
            pipelines=tuple(
                msgspec.structs.replace(
                    lane,
                    stages=tuple(msgspec.structs.replace(s, microseconds=NO_TIMES) for s in lane.stages),
                )
                for lane in module.pipelines
            ),
        )
        for module in found.modules
    )
    untimed = found.replace(strategies=(msgspec.structs.replace(found.strategies[0], modules=modules),))
    assert found.prediction is not None
    assert ModuleCosts(problem).running_seconds(untimed) == found.prediction.step_seconds


def guessed(problem: Problem, factor: float) -> Problem:
    """The problem with encoders that take so many times as long."""
    modules = []
    for module in problem.modules:
        block = msgspec.structs.replace(module.profile.block, seconds=module.profile.block.seconds * factor)
        profile = msgspec.structs.replace(module.profile, block=block)
        modules.append(msgspec.structs.replace(module, profile=profile))
    return msgspec.structs.replace(problem, modules=tuple(modules))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_running_plan_takes_what_its_passes_take_in_its_own_order(seed: int) -> None:
    """Each pass in the order of the times that the plan was made with, with the times of the problem."""
    true = drawn_problem(seed)
    made = with_pair(planned(true), 2, 1)
    for factor in (0.1, 10.0):
        guess = guessed(true, factor)
        running = ModuleCosts(guess).timed(made)
        costs = ModuleCosts(true)
        assert ModuleCosts(guess).running_seconds(running) == ModuleCosts(guess).seconds(running)
        batches, taken = costs.batches(running), costs.timed(running)
        order = [each.act for each in module_pass_times(running, batches, passes)]
        times = {each.act: each.stop - each.start for each in module_pass_times(taken, batches, passes)}
        played = module_pass_times(running, batches, passes, actual=taken)
        assert [each.act for each in played] == order
        assert all(each.stop - each.start == times[each.act] for each in played)
        busy: dict[str, int] = {}
        for each in played:
            own = running.view(each.act.module).pipelines[each.act.pipeline].by_lane[each.act.lane]
            for device in own.stages[each.act.stage].devices:
                assert each.start >= busy.get(device, 0), "a device runs one pass at a time, in this order"
                busy[device] = each.stop
        assert costs.running_seconds(running) >= max(each.stop for each in played) / 1e6


@pytest.mark.full
@pytest.mark.parametrize("seed", range(40))
def test_a_plan_with_the_times_of_a_guess_is_replaced_once_and_stays(seed: int) -> None:
    """By one that is quicker, which is the answer to the same question from then on."""
    true = drawn_problem(seed)
    running = ModuleCosts(guessed(true, (10.0, 0.1)[seed % 2])).timed(with_pair(planned(true), 2, 1))
    costs = ModuleCosts(true)
    answer = plan(msgspec.structs.replace(true, current=running), 4)
    found = answer.plan
    assert found is not None
    assert found.prediction is not None
    assert answer.current_seconds == costs.running_seconds(running)
    assert found.prediction.step_seconds <= answer.current_seconds * (1 + TOLERANCE)
    assert found.prediction.step_seconds == costs.running_seconds(found)
    again = plan(msgspec.structs.replace(true, current=found), 5)
    assert again.plan is not None
    assert again.plan.strategies == found.strategies
    assert again.current_seconds == found.prediction.step_seconds
