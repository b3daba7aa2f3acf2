"""Experts placed in the plan that the search found: by measured load and by slowdown, lane by lane.

The search divides experts by shares, and counts them as even as these. A placement makes that nearly true: the
devices of a lane compute its experts' rows in proportion to their speed, or as near to it as memory allows.
Blocks whose devices are even enough stay as they are. The running plan is placed anew, too: where the layout
that was found is no better, experts alone move. After a device was lost the others keep their experts. Of
several modules those of the module with the loss are placed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from elasticd_planner.cost.memory import fits
from elasticd_planner.numeric import EQUAL
from elasticd_planner.placement.expert_placement import (
    WHOLE,
    BlockPlacement,
    arrivals,
    busiest,
    least_busiest,
    placed,
)
from elasticd_planner.problem import Answer, Problem
from elasticd_planner.search.given_plan import missing
from elasticd_planner.search.placed_plans import PlacedPlans, placed_plans
from elasticd_planner.spec.cluster import Rates, rate_of
from elasticd_planner.spec.expert_load import ExpertLoad, blocks_of, held_by_device, held_in
from elasticd_planner.spec.plan import HeldExperts, Plan, SplitExperts, Stage

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
    reason = f"{made.plan.reason}; experts are divided by shares again: {why}"
    return msgspec.structs.replace(made, plan=made.plan.replace(reason=reason))


def _places(plan: Plan) -> bool:
    return any(stage.experts for _, _, stage in plan.walk())


def _answer(problem: Problem, found: Answer, tolerance: float) -> Answer:
    load, plan = problem.experts, found.plan
    if load is None or plan is None or plan.prediction is None:
        return found
    plans = placed_plans(problem)
    running = problem.current if found.current_seconds is not None else None
    before = problem.current  # be it of devices that are gone
    held = held_by_device(before.loss_view, load) if before is not None else {}
    options = _placed(problem, plans, plan, load, held)
    if running is not None and not missing(running, problem):
        kept = plan.replace(
            strategies=running.strategies,
            micro_batch=running.micro_batch,
            carriers=running.carriers,
            idle=tuple(d.name for d in problem.cluster.devices if d.name not in set(running.members)),
        )
        options += _placed(problem, plans, kept, load, held)
    timed = [(each, plans.seconds(each), plans.memory(each)) for each in options]
    timed = [each for each in timed if fits(each[2], problem.cluster)] or timed[:1]
    if not timed:
        return found
    least = min(seconds for _, seconds, _ in timed)
    slack = tolerance if running is not None else 0.0
    near = [each for each in timed if each[1] <= least * (1 + slack) * (1 + EQUAL)]
    chosen, seconds, memory = near[-1]  # the running layout, if it is as good
    prediction = msgspec.structs.replace(
        plan.prediction,
        step_seconds=seconds,
        bound_seconds=plans.bound(chosen, seconds),
        memory=memory,
    )
    reason = plan.reason
    if chosen.strategies != plan.strategies:
        reason = f"{plans.reason(chosen)}{_words(chosen.loss_view, held, load)}"
    now = plans.seconds(running) if running is not None else None
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


def _placed(problem: Problem, plans: PlacedPlans, plan: Plan, load: ExpertLoad, held: Held) -> list[Plan]:
    """The plan with experts placed, near to where they are: in each way that memory may be divided."""
    bare = plan.with_pipelines(pipeline.with_stages(_by_share) for pipeline in plan.loss_module.pipelines)
    each = load.expert_bytes * problem.profile.state_factor
    placing = _Placing(rates=problem.rates, load=_alike(load), held=held)
    options = []
    for room in plans.rooms(bare):
        experts = {name: size / each if each else math.inf for name, size in room.items()}
        pipelines = tuple(
            pipeline.with_stages(partial(placing.stage, room=experts))
            for pipeline in bare.loss_module.pipelines
        )
        options.append(plans.plan_with(plan, pipelines))
    return [option for option in options if option is not None]


def _by_share(stage: Stage) -> Stage:
    return msgspec.structs.replace(stage, experts=(), splits=())


def _alike(load: ExpertLoad) -> ExpertLoad:
    """The load with the rows of all blocks that share their experts in each of these."""
    rows = dict(load.rows)
    for group in load.same:
        together = tuple(map(sum, zip(*(load.rows[block] for block in group), strict=True)))
        rows.update(dict.fromkeys(group, together))
    return msgspec.structs.replace(load, rows=rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Placing:
    """Placements for one load, near to what devices have. Of many lanes that are alike one is made."""

    rates: Rates
    load: ExpertLoad
    held: Held
    #: By block, slowdowns, slots and what devices have now.
    known: dict[tuple[int, tuple[float, ...], tuple[int, ...], HeldExperts], BlockPlacement] = field(
        default_factory=dict
    )

    def stage(self, stage: Stage, room: Mapping[str, float]) -> Stage:
        """A stage with the experts of its blocks placed, in each lane of several devices.

        Args:
            stage: without placed experts.
            room: by device further experts that it has memory for, of all its blocks.
        """
        load = self.load
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
            lanes = [self._block(lane, block, room) for lane in stage.by_lane]
            if block not in load.rows or all(lane is None for lane in lanes):
                experts.append(())
                splits.append(())
                continue
            count = len(load.rows[block])
            own: list[tuple[int, ...]] = []
            parts: dict[int, list[int]] = {}
            for lane, placement in zip(stage.by_lane, lanes, strict=True):
                of_lane, divided = placement if placement is not None else (held_in(lane, block, count), ())
                own += of_lane
                known = {split[0]: split[1:] for split in divided}
                for expert in range(count):
                    copies = sum(expert in each for each in of_lane)
                    equal = (WHOLE // max(1, copies),) * copies
                    parts.setdefault(expert, []).extend(known.get(expert, equal))
            experts.append(tuple(own))
            splits.append(
                tuple((expert, *each) for expert, each in parts.items() if len(each) > 1 and len({*each}) > 1)
            )
        slowdowns = tuple(max(1, round(64 * rate_of(self.rates, device))) for device in stage.devices)
        return msgspec.structs.replace(stage, experts=tuple(experts), splits=tuple(splits), slowdowns=slowdowns)

    def _block(
        self, lane: Stage, block: int, room: Mapping[str, float]
    ) -> tuple[HeldExperts, SplitExperts] | None:
        """The placement of a block's experts in a lane; None: they stay divided by shares."""
        if len(lane.devices) == 1 or block not in self.load.rows:
            return None
        weights = self.load.weights(block)
        count = len(weights)
        slowdowns = [rate_of(self.rates, device) for device in lane.devices]
        bound = least_busiest(weights, slowdowns)
        by_share = held_in(lane, block, count)
        spare = [room.get(device, 0.0) / max(1, lane.layers) for device in lane.devices]
        slots = [int(min(count, len(own) + more)) for own, more in zip(by_share, spare, strict=True)]
        before = tuple(self.held.get(device, {}).get(block, ()) for device in lane.devices)
        even = busiest(weights, slowdowns, by_share) <= bound * (1 + EVEN)
        if even and (before == by_share or not any(before)):
            return None
        most = self.load.replicas if self.load.replicas >= 0 else len(lane.devices) - 1
        now = _complete(before, weights, slowdowns, slots, most) if any(before) else by_share
        key = block, tuple(slowdowns), tuple(slots), now
        if key not in self.known:
            self.known[key] = placed(weights, slowdowns, now, slots=slots, replicas=most, tolerance=EVEN)
        new = self.known[key]
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
