"""The order of the passes of several modules: all are in it, each behind what it needs, and no rank waits for
ever, whatever the plan."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise, product

import msgspec
import pytest
from elasticd_planner.cost.schedule import passes
from elasticd_planner.layout.gradient_buckets import buckets
from elasticd_planner.layout.gradient_reduction import reductions
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.layout.message_places import EARLY
from elasticd_planner.layout.module_order import (
    ModuleAct,
    module_order,
    module_pass_times,
    step_microseconds,
)
from elasticd_planner.layout.module_passes import ModulePass
from elasticd_planner.layout.pass_order import Act
from elasticd_planner.spec.batch import BatchPlan, passes_of_rows
from elasticd_planner.spec.item_batch import GroupId, ItemBatch, item_batch
from elasticd_planner.spec.plan import Plan
from elasticd_planner.value import Invalid

from tests.planner.drawn_modules import LOSS, ModuleStep, drawn_step, logs, pass_of
from tests.planner.launch_order import Join, Launch, deadlock, in_one_queue
from tests.planner.played_modules import ITEMS, best_lead, colocated, microseconds, most_kept, three_phases
from tests.sizes import number

#: Drawn plans in blocks, so that workers share them.
BLOCKS, BLOCK = 10, number(100, 6)
#: In few of them devices are in several components.
LARGER_BLOCK = number(100, 30)


def expected(step: ModuleStep, *, backward: bool = True) -> dict[ModuleAct, set[ModuleAct]]:
    """Every pass of a step, and the passes that it needs."""
    needs: dict[ModuleAct, set[ModuleAct]] = {}
    kinds = ("forward", "backward") if backward else ("forward",)
    for module in step.plan.modules:
        batch = step.batches[module.module]
        for p, pipeline in enumerate(module.pipelines):
            for j, lane in enumerate(pipeline.by_lane):
                stages, places = len(lane.stages), len(lane.stages) * lane.chunks
                if isinstance(batch, ItemBatch):
                    groups = batch.pipelines[p][j]
                    count = len(groups)
                else:
                    groups, count = (), sum(bool(row.lanes[j]) for row in batch.pipelines[p])

                def at(kind: str, place: int, index: int) -> ModuleAct:
                    act = Act("pass", kind, index, place // stages)  # noqa: B023
                    return ModuleAct(module.module, p, j, place % stages, act)  # noqa: B023

                for kind in kinds:
                    if kind == "backward" and not module.trainable and module.items:
                        continue
                    for index in range(count):
                        for place in range(places):
                            one = at(kind, place, index)
                            needs.setdefault(one, set())
                            before = place - 1 if kind == "forward" else place + 1
                            if 0 <= before < places:
                                needs[one].add(at(kind, before, index))
                            elif kind == "backward" and not groups:
                                needs[one].add(at("forward", place, index))
                for index, group in enumerate(groups):
                    for taking in group.lanes:
                        number = step.numbers(group.pipeline, taking).index(group.micro_batch)
                        taker = ModuleAct(LOSS, group.pipeline, taking, 0, Act("pass", "forward", number, 0))
                        needs.setdefault(taker, set()).add(at("forward", places - 1, index))
                        if backward and module.trainable:
                            back = taker._replace(act=taker.act._replace(kind="backward"))
                            needs[at("backward", places - 1, index)].add(back)
    return needs


def check(step: ModuleStep, order: Sequence[ModuleAct], *, backward: bool = True) -> None:
    """All passes once, each behind what it needs; a message for each need that is of another TP group, sent and
    received at one place, close before the pass that needs it."""
    needs = expected(step, backward=backward)
    where = {act: index for index, act in enumerate(order) if act.act.what == "pass"}
    assert where.keys() == needs.keys()
    # A gradient of items is received once from each lane that gives a term of it.
    once = [act for act in order if not (act.group and act.act[:2] == ("receive", "backward"))]
    assert len(once) == len({*once})
    number: dict[ModuleAct, int] = {}  # of a pass among those of its TP group
    counts: dict[tuple[object, ...], int] = defaultdict(int)
    for act in order:
        if act.act.what == "pass":
            number[act] = counts[act[:4]]
            counts[act[:4]] += 1
    messages = {(needed, one) for one, of in needs.items() for needed in of if needed[:4] != one[:4]}
    for one, of in needs.items():
        assert all(where[needed] < where[one] for needed in of)
    for index, sent, received in ends_of(order):
        sender, receiver = pass_of(sent), pass_of(received)
        assert sent.group == received.group
        if sent.module != received.module:
            assert sent.group is not None
            items = sent if sent.act.kind == "forward" else received
            assert sent.group == GroupId(items.module, items.pipeline, items.lane, items.act.micro_batch)
        else:
            assert sent.group is None
        messages.remove((sender, receiver))
        assert where[sender] < index < where[receiver]
        for device in step.devices(receiver):
            passed = [act for act in order[index : where[receiver]] if act.act.what == "pass"]
            assert sum(device in step.devices(act) for act in passed) <= EARLY
    assert not messages
    for group in {act[:4] for act in needs if act.module == LOSS}:
        own = [act.act[1:] for act in order if act[:4] == group and act.act.what == "pass"]
        lane = step.plan.view(LOSS).pipelines[group[1]].by_lane[group[2]]
        batch = step.batches[LOSS]
        assert isinstance(batch, BatchPlan)
        numbers = step.numbers(group[1], group[2])
        count = len(batch.pipelines[group[1]]) if batch.packed else len(numbers)
        scheduled = passes_of_rows(passes(len(lane.stages), group[3], count, lane.chunks), numbers)
        assert own == [tuple(each) for each in scheduled if backward or each[0] == "forward"]


def ends_of(order: Sequence[ModuleAct]) -> Iterator[tuple[int, ModuleAct, ModuleAct]]:
    """Both ends of each message, and its place: all that send stand before all that receive."""
    index = 0
    while index < len(order):
        ends: list[list[ModuleAct]] = []
        start = index
        for what in ("send", "receive"):
            ends.append([])
            while index < len(order) and order[index].act.what == what:
                ends[-1].append(order[index])
                index += 1
        assert bool(ends[0]) == bool(ends[1])
        for sent, received in product(*ends):
            if sent.group is not None or sent.lane == received.lane:
                yield start, sent, received
        index += index == start


def check_ahead(step: ModuleStep, order: Sequence[ModuleAct]) -> None:
    """No first pass of items stands more than `ahead` micro-batches before its taker."""
    ahead = {module.module: module.ahead for module in step.plan.modules}
    started: dict[tuple[int, int], int] = defaultdict(int)
    batch = step.batches[LOSS]
    packed = isinstance(batch, BatchPlan) and batch.packed
    for act in order:
        if (act.act.what, act.act.kind, act.stage, act.act.chunk) != ("pass", "forward", 0, 0):
            continue
        if act.module == LOSS:
            row = step.numbers(act.pipeline, act.lane)[act.act.micro_batch]
            lanes = range(len(step.plan.view(LOSS).pipelines[act.pipeline].by_lane))
            started |= dict.fromkeys(((act.pipeline, j) for j in lanes if packed or j == act.lane), row + 1)
            continue
        items = step.batches[act.module]
        assert isinstance(items, ItemBatch)
        group = items.pipelines[act.pipeline][act.lane][act.act.micro_batch]
        assert group.micro_batch < started[group.pipeline, group.lanes[0]] + ahead[act.module]


@pytest.mark.parametrize("block", range(BLOCKS))
def test_orders_of_drawn_plans_are_complete_and_no_rank_waits_for_ever(block: int) -> None:
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        step = drawn_step(seed)
        order = step.order()
        check(step, order)
        check_ahead(step, order)
        assert deadlock(in_one_queue(logs(step, order))) is None, seed


@pytest.mark.parametrize("block", range(2))
def test_so_are_those_of_an_evaluation_of_fewer_samples(block: int) -> None:
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        step = drawn_step(seed, short=True)
        order = step.order(backward=False)
        assert all(act.act.kind == "forward" for act in order)
        check(step, order, backward=False)
        check_ahead(step, order)
        assert deadlock(in_one_queue(logs(step, order))) is None, seed


@pytest.mark.parametrize("block", range(4))
def test_so_are_those_of_packed_rows_whose_lanes_share_sequences(block: int) -> None:
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        step = drawn_step(seed, packed=True)
        order = step.order()
        check(step, order)
        check_ahead(step, order)
        assert deadlock(in_one_queue(logs(step, order))) is None, seed


@pytest.mark.parametrize("block", range(number(2, 1)))
def test_ranks_of_components_with_orders_of_their_own_never_wait_for_ever(block: int) -> None:
    several = 0
    for seed in range(block * LARGER_BLOCK, (block + 1) * LARGER_BLOCK):
        step = drawn_step(seed)
        order, made = {pass_of(act) for act in step.order()}, {}
        found: dict[tuple[ModuleAct, ...], dict[str, list[Launch | Join]]] = {}
        for device in step.plan.members:
            own = step.component(device)
            if own not in found:
                found[own] = logs(step, own, component=True)
            made[device] = found[own][device]
            passes_here = {act for act in order if device in step.devices(act)}
            assert passes_here <= {pass_of(act) for act in own} <= order
        assert sum(len({pass_of(act) for act in own}) for own in found) == len(order)
        assert deadlock(in_one_queue(made)) is None, seed
        several += len(found) > 1
    assert several > 1


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_a_sum_stands_behind_the_last_backward_pass_of_its_sections_and_of_the_sums_before(
    seed: int, chained: bool
) -> None:
    step = drawn_step(seed)
    order = step.order()
    places, least = step.sum_places(order, chained=chained), -1
    for module in step.trained:
        least = least if chained else -1
        view, spec = step.plan.view(module), step.spec(module)
        last: dict[str, int] = {}
        for index, act in enumerate(order):
            if act.module == module and act.act[:2] == ("pass", "backward"):
                stage = view.pipelines[act.pipeline].by_lane[act.lane].stages[act.stage]
                last |= dict.fromkeys(spec.sections(*stage.chunks[act.act.chunk]), index)
        for name in reversed([*spec.parameters]):
            users = {name, *(alias for alias, owner in spec.ties if owner == name)}
            ends = [
                index for section, index in last.items() for user in users if user.startswith(f"{section}.")
            ]
            least = max(least, *ends) if last else len(order) - 1
            assert places[module][name] == least
        layouts = Layouts(spec, view)
        listed = buckets(layouts, reductions(layouts), most=1 << 12)
        found = [places[module][bucket.pieces[-1].name] for bucket in listed]
        assert found == sorted(found)


def test_with_sums_after_a_rank_s_own_passes_most_plans_wait_for_ever() -> None:
    """Why sums have a place in the order."""
    steps = [drawn_step(seed) for seed in range(40)]
    stuck = [deadlock(in_one_queue(logs(step, step.order(), "own"))) is not None for step in steps]
    assert sum(stuck) > len(steps) // 4


# -- by hand ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("depth", "micro_batches", "ahead", "over", "kept"),
    [
        (4, 8, 1, 0.955, 5),
        (4, 8, 4, 0.936, 8),
        (4, 8, 8, 0.878, 8),
        (8, 16, 1, 0.975, 9),
        (8, 16, 4, 0.968, 12),
        (8, 16, 16, 0.928, 16),
        (8, 64, 1, 0.992, 9),
        (8, 64, 64, 0.937, 64),
    ],
)
def test_passes_of_items_fill_the_bubbles_of_the_pipeline(
    depth: int, micro_batches: int, ahead: int, over: float, kept: int
) -> None:
    """In the time of three phases, which keep all outputs of items: the forward passes of all items, the
    pipeline, the backward passes of all items."""
    best = best_lead(colocated(depth, micro_batches, ahead=ahead))
    assert microseconds(best) / three_phases(best) == pytest.approx(over, abs=0.002)
    assert most_kept(best) == kept


@pytest.mark.parametrize(("depth", "micro_batches", "ahead"), [(4, 8, 1), (4, 8, 8), (8, 16, 4), (8, 64, 4)])
def test_messages_hold_up_next_to_nothing_in_one_queue(depth: int, micro_batches: int, ahead: int) -> None:
    step = best_lead(colocated(depth, micro_batches, ahead=ahead))
    assert microseconds(step) <= microseconds(step, one_queue=True) <= 1.05 * microseconds(step)


def test_times_in_one_queue_are_those_of_the_acts_one_after_the_other() -> None:
    for seed in range(20):
        step = drawn_step(seed)
        lengths = {
            each.act: each.stop - each.start for each in module_pass_times(step.plan, step.batches, passes)
        }
        free = dict.fromkeys(step.plan.members, 0)
        ends = []
        for act, after in pairwise((*step.order(), None)):
            if act.act.what == "pass":
                devices = step.devices(act)
                ends.append((act, max(free[device] for device in devices) + lengths[act]))
                free |= dict.fromkeys(devices, ends[-1][1])
            elif act.act.what == "send" and step.devices(act) != step.devices(after):
                both = {*step.devices(act), *step.devices(after)}
                free |= dict.fromkeys(both, max(free[device] for device in both))
        times = module_pass_times(step.plan, step.batches, passes, one_queue=True)
        assert [(each.act, each.stop) for each in times] == ends


def test_a_run_is_over_early_only_where_the_step_takes_longer_than_a_limit() -> None:
    def delay(sender: ModulePass, receiver: ModulePass, name: GroupId | None) -> int:
        return 0 if sender.group.devices == receiver.group.devices else 100 + 7 * receiver.index

    early = 0
    for seed in range(number(400, 40)):
        plan, batches = drawn_step(seed).plan, drawn_step(seed).batches
        end = max(one.stop for one in module_pass_times(plan, batches, passes, delay=delay))
        assert step_microseconds(plan, batches, passes, delay) == end
        assert step_microseconds(plan, batches, passes, delay, limit=end) == end
        found = [
            step_microseconds(plan, batches, passes, delay, limit=part * end) for part in (0.5, 0.9, 0.999)
        ]
        assert {*found} <= {end, math.inf}
        early += found.count(math.inf)
    assert early > 0


def test_a_frozen_encoder_has_no_backward_passes_and_gets_no_gradient() -> None:
    order = colocated(2, 3, trainable=False, ahead=2).order()
    assert {act.act.kind for act in order if act.module == "vision"} == {"forward"}
    assert all(act.act.kind == "forward" for act in order if act.group is not None)
    assert any(act.act.kind == "backward" for act in order if act.module == "language")


def test_a_plan_of_one_module_has_the_passes_of_its_schedule_and_no_items() -> None:
    step = colocated(3, 5)
    view = step.plan.view("language")
    order = module_order(view, {"language": step.batches["language"]}, passes)
    check(ModuleStep(view, {"language": step.batches["language"]}), order)


def test_batches_of_the_wrong_kind_are_refused() -> None:
    step = colocated(2, 3)
    with pytest.raises(Invalid, match="module vision takes images, and needs a batch of them"):
        module_order(step.plan, {"language": step.batches["language"]}, passes)
    with pytest.raises(Invalid, match="module language takes samples, and needs a batch plan"):
        module_order(step.plan, {**step.batches, "language": step.batches["vision"]}, passes)


def test_items_whose_rows_are_not_known_take_as_long_as_the_plan_says_in_the_mean() -> None:
    step = colocated(3, 5, ahead=3)
    vision, batch = step.plan.view(ITEMS).module, step.batches[ITEMS]
    assert isinstance(batch, ItemBatch)
    (mean,) = {group.rows // len(group.items) for _, group in batch.walk()}
    unknown = item_batch(step.plan, ITEMS, step.batches[LOSS], dict.fromkeys(range(step.plan.global_batch), 3))
    planned = with_item_rows(step.plan, mean)
    known = module_pass_times(step.plan, step.batches, passes)
    assert vision.item_rows == 0
    assert module_pass_times(planned, {**step.batches, ITEMS: unknown}, passes) == known
    assert module_pass_times(step.plan, {**step.batches, ITEMS: unknown}, passes) != known


def with_item_rows(plan: Plan, rows: int) -> Plan:
    """The plan with these rows of an item in the mean."""
    modules = tuple(
        msgspec.structs.replace(module, item_rows=rows) if module.items else module for module in plan.modules
    )
    return plan.replace(strategies=(msgspec.structs.replace(plan.strategies[0], modules=modules),))


def test_the_order_is_the_same_on_every_rank() -> None:
    """It follows from the plan and the batch alone."""
    for seed in range(5):
        assert drawn_step(seed).order() == drawn_step(seed).order()
