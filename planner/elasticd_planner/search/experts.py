"""Experts placed in the plan that the search found: by measured load and by slowdown, lane by lane.

The search divides experts by shares, and counts them as even as these. A placement makes that nearly true: the
devices of a lane compute its experts' rows in proportion to their speed, or as near to it as memory allows.
Blocks whose devices are even enough stay as they are. The running plan is placed anew, too: where the layout
that was found is no better, experts alone move. After a device was lost the others keep their experts. Packed
plans keep shares: their rows follow from the memory that experts would take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from elasticd_planner.cost.memory import fits, memory_by_device
from elasticd_planner.cost.model import step_seconds
from elasticd_planner.cost.profile_cost import ProfileCost
from elasticd_planner.numeric import EQUAL
from elasticd_planner.placement.expert_placement import WHOLE, arrivals, busiest, least_busiest, placed
from elasticd_planner.problem import Answer, Problem
from elasticd_planner.search.given_plan import missing
from elasticd_planner.search.options import setting_of, task_of
from elasticd_planner.spec.cluster import rate_of
from elasticd_planner.spec.expert_load import ExpertLoad, blocks_of, held_by_device, held_in
from elasticd_planner.spec.plan import HeldExperts, Plan, SplitExperts, Stage, Strategy
from elasticd_planner.spec.plan_summary import describe

#: A block whose busiest device is within this of the bound stays as it is.
EVEN = 0.02

#: By device, by block: the experts that it has.
Held = Mapping[str, Mapping[int, tuple[int, ...]]]


def answer(problem: Problem, found: Answer, tolerance: float) -> Answer:
    """The answer with experts placed. Its seconds, and those of the running plan, are those of the load. Where
    none are placed any more, the reason says so.

    Args:
        problem: with a load of experts; without one the answer stays.
        found: for it, of a search that knew no load.
        tolerance: plans within this fraction count as equal if there is a running one: the one that moves less
            is taken.
    """
    made = _answer(problem, found, tolerance)
    if made.plan is None or problem.current is None or not _places(problem.current) or _places(made.plan):
        return made
    why = "no load of them is known" if problem.experts is None else "that is even enough"
    if problem.packed is not None or len(made.plan.modules) > 1:
        why = "plans of packed rows, and of several modules, place none"
    reason = f"{made.plan.reason}; experts are divided by shares again: {why}"
    return msgspec.structs.replace(made, plan=made.plan.replace(reason=reason))


def _places(plan: Plan) -> bool:
    return any(stage.experts for _, _, stage in plan.walk())


def _answer(problem: Problem, found: Answer, tolerance: float) -> Answer:
    load, plan = problem.experts, found.plan
    if load is None or plan is None or plan.prediction is None or len(plan.modules) > 1:
        return found
    if problem.packed is not None:
        return found
    running = problem.current if found.current_seconds is not None else None
    now = _seconds(problem, running, load) if running is not None else None
    before = problem.current  # be it of devices that are gone
    held = held_by_device(before, load) if before is not None and len(before.modules) == 1 else {}
    options = [_placed(problem, plan, load, held)]
    if running is not None and not missing(running, problem):
        kept = plan.replace(
            strategies=running.strategies,
            micro_batch=running.micro_batch,
            carriers=running.carriers,
            idle=tuple(d.name for d in problem.cluster.devices if d.name not in set(running.members)),
        )
        options.append(_placed(problem, kept, load, held))
    timed = [(each, _seconds(problem, each, load)) for each in options]
    timed = [pair for pair in timed if fits(_memory(problem, pair[0], load), problem.cluster)] or timed[:1]
    least = min(seconds for _, seconds in timed)
    slack = tolerance if running is not None else 0.0
    near = [pair for pair in timed if pair[1] <= least * (1 + slack) * (1 + EQUAL)]
    chosen, seconds = near[-1]  # the running layout, if it is as good
    prediction = msgspec.structs.replace(
        plan.prediction,
        step_seconds=seconds,
        bound_seconds=min(_bound(problem, chosen), seconds),
        memory=_memory(problem, chosen, load),
    )
    reason = plan.reason
    if chosen.strategies != plan.strategies:
        reason = f"{describe(chosen, problem.rates)}{_words(chosen, held, load)}"
    made = chosen.replace(prediction=prediction, reason=reason)
    return msgspec.structs.replace(found, plan=made, current_seconds=now)


def _words(plan: Plan, before: Held, load: ExpertLoad) -> str:
    """The placement in words; nothing where experts are divided by shares."""
    if not _places(plan):
        return ""
    after = held_by_device(plan, load)
    moved = sum(
        arrivals((own.get(block, ()),), (experts,))
        for device, blocks in after.items()
        if (own := before.get(device))
        for block, experts in blocks.items()
    )
    return "; experts placed by load" + (f", {moved} moved" if before else "")


def _cost(problem: Problem, plan: Plan, load: ExpertLoad) -> ProfileCost:
    cost = task_of(setting_of(plan, problem).problem(problem)).cost
    assert isinstance(cost, ProfileCost)
    return replace(cost, load=load)


def _seconds(problem: Problem, plan: Plan, load: ExpertLoad) -> float:
    return step_seconds(plan, problem.cluster, problem.rates, _cost(problem, plan, load))


def _bound(problem: Problem, plan: Plan) -> float:
    """Seconds that no placement beats: all work over all speed. The search's own bound is of even experts."""
    return task_of(setting_of(plan, problem).problem(problem), hopeful=True).work_bound


def _memory(problem: Problem, plan: Plan, load: ExpertLoad) -> dict[str, int]:
    return memory_by_device(plan, _cost(problem, plan, load))


def _placed(problem: Problem, plan: Plan, load: ExpertLoad, held: Held) -> Plan:
    """The plan with experts placed, near to where they are."""
    bare = plan.replace(
        strategies=(
            Strategy(
                modules=(
                    msgspec.structs.replace(
                        plan.module,
                        pipelines=tuple(
                            msgspec.structs.replace(
                                pipeline,
                                stages=tuple(
                                    msgspec.structs.replace(stage, experts=(), splits=())
                                    for stage in pipeline.stages
                                ),
                            )
                            for pipeline in plan.pipelines
                        ),
                    ),
                )
            ),
        )
    )
    load = _alike(load)
    cost = _cost(problem, bare, load)
    needed = memory_by_device(bare, cost)
    each = load.expert_bytes * cost.profile.state_factor
    room = {
        name: max(0.0, problem.cluster.memory[name] - need) / each if each else float("inf")
        for name, need in needed.items()
        if name in problem.cluster.memory
    }
    pipelines = tuple(
        msgspec.structs.replace(
            pipeline, stages=tuple(_stage(problem, stage, load, held, room) for stage in pipeline.stages)
        )
        for pipeline in bare.pipelines
    )
    module = msgspec.structs.replace(bare.module, pipelines=pipelines)
    return bare.replace(strategies=(Strategy(modules=(module,)),))


def _alike(load: ExpertLoad) -> ExpertLoad:
    """The load with the rows of all blocks that share their experts in each of these."""
    rows = dict(load.rows)
    for group in load.same:
        together = tuple(map(sum, zip(*(load.rows[block] for block in group), strict=True)))
        rows.update(dict.fromkeys(group, together))
    return msgspec.structs.replace(load, rows=rows)


def _stage(problem: Problem, stage: Stage, load: ExpertLoad, held: Held, room: Mapping[str, float]) -> Stage:
    """A stage with the experts of its blocks placed, in each lane of several devices."""
    experts: list[HeldExperts] = []
    splits: list[SplitExperts] = []
    placed_blocks: list[int] = []
    for block in blocks_of(stage):
        same = next((group for group in load.same if block in group), ())
        known_at = next((at for at, other in enumerate(placed_blocks) if other in same), None)
        placed_blocks.append(block)
        if known_at is not None:
            experts.append(experts[known_at])
            splits.append(splits[known_at])
            continue
        lanes = [_block(problem, lane, block, load, held, room) for lane in stage.by_lane]
        if block not in load.rows or all(lane is None for lane in lanes):
            experts.append(())
            splits.append(())
            continue
        count = len(load.rows[block])
        own: list[tuple[int, ...]] = []
        parts: dict[int, list[int]] = {}
        for lane, found in zip(stage.by_lane, lanes, strict=True):
            of_lane, divided = found if found is not None else (held_in(lane, block, count), ())
            own += of_lane
            known = {split[0]: split[1:] for split in divided}
            for expert in range(count):
                copies = sum(expert in each for each in of_lane)
                parts.setdefault(expert, []).extend(known.get(expert, (WHOLE // max(1, copies),) * copies))
        experts.append(tuple(own))
        splits.append(
            tuple((expert, *each) for expert, each in parts.items() if len(each) > 1 and len({*each}) > 1)
        )
    return msgspec.structs.replace(stage, experts=tuple(experts), splits=tuple(splits))


def _block(
    problem: Problem, lane: Stage, block: int, load: ExpertLoad, held: Held, room: Mapping[str, float]
) -> tuple[HeldExperts, SplitExperts] | None:
    """The placement of a block's experts in a lane; None: they stay divided by shares."""
    if len(lane.devices) == 1 or block not in load.rows:
        return None
    weights = load.weights(block)
    count = len(weights)
    slowdowns = [rate_of(problem.rates, device) for device in lane.devices]
    bound = least_busiest(weights, slowdowns)
    by_share = held_in(lane, block, count)
    spare = [int(room.get(device, 0.0) / max(1, lane.layers)) for device in lane.devices]
    slots = [min(count, len(own) + more) for own, more in zip(by_share, spare, strict=True)]
    before = tuple(held.get(device, {}).get(block, ()) for device in lane.devices)
    even = busiest(weights, slowdowns, by_share) <= bound * (1 + EVEN)
    if even and (before == by_share or not any(before)):
        return None
    most = load.replicas if load.replicas >= 0 else len(lane.devices) - 1
    now = _complete(before, weights, slowdowns, slots, most) if any(before) else by_share
    new = placed(weights, slowdowns, now, slots=slots, replicas=most, tolerance=EVEN)
    if even and arrivals(before, by_share) <= arrivals(before, new.held):
        return None
    return new.held, new.splits


def _complete(
    held: HeldExperts, weights: Sequence[float], slowdowns: Sequence[float], slots: Sequence[int], most: int
) -> HeldExperts:
    """The experts that devices have, without copies beyond the most, and each one that none of them has on the
    device that is done with it first.

    Args:
        held: by device; nothing of a new one.
        weights: of the experts.
        slowdowns: of the devices.
        slots: of the devices: experts that they have memory for.
        most: copies of experts that there may be.
    """
    own = [set(each) for each in held]
    copies = {expert: sum(expert in each for each in own) for expert in range(len(weights))}
    for expert in sorted(copies, key=lambda each: (weights[each], each)):
        while copies[expert] > 1 and sum(max(0, each - 1) for each in copies.values()) > most:
            holders = [place for place, each in enumerate(own) if expert in each]
            own[max(holders, key=lambda place: (len(own[place]), place))].discard(expert)
            copies[expert] -= 1
    seconds = [
        slowdown * sum(weights[expert] / copies[expert] for expert in each)
        for each, slowdown in zip(own, slowdowns, strict=True)
    ]
    for expert in sorted(copies, key=lambda each: (-weights[each], each)):
        free = [place for place, each in enumerate(own) if len(each) < slots[place]]
        if copies[expert] or not free:
            continue
        place = min(free, key=lambda at: (seconds[at] + weights[expert] * slowdowns[at], at))
        own[place].add(expert)
        seconds[place] += weights[expert] * slowdowns[place]
    return tuple(tuple(sorted(each)) for each in own)
