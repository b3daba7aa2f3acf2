"""The load of a model's experts as measured, and which part of it each device has under a plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

from elasticd_planner.spec.model import ModelSpec, Parameter, apportion, item_size
from elasticd_planner.spec.plan import HeldExperts, Plan, Stage
from elasticd_planner.spec.plan_checks import blocks_with_same_experts
from elasticd_planner.value import Value, refuse

#: The part of a block's computation that experts may have, at most: the rest of it is not nothing.
MOST_OF_EXPERTS = 0.99
#: Of experts on several devices: the expert, and the parts of its rows that each of these takes.
Parts = Sequence[tuple[float, ...]]
#: Exchanges of rows between any two devices with the same expert: after these parts are even within 1 %.
SWEEPS = 4


class ExpertLoad(Value, frozen=True, kw_only=True):
    """Rows of the experts of each block, and what experts cost."""

    rows: dict[int, tuple[float, ...]]  # by block with experts: rows of each one in a step, in the mean
    part: float  # the computation of a block's experts over that of a mean block, with experts or without
    expert_bytes: int  # of the parameters of one expert of a block
    replicas: int = -1  # that a block of a lane may have, at most; -1: one less than devices
    same: tuple[tuple[int, ...], ...] = ()  # blocks that share their experts, which are placed alike

    def __post_init__(self) -> None:
        if not 0 <= self.part <= 1 or self.expert_bytes < 0:
            refuse(
                f"experts: part must be from 0 to 1 and expert_bytes not negative, not {self.part} and "
                f"{self.expert_bytes}"
            )
        for block, rows in self.rows.items():
            if not rows or any(not 0 <= each < math.inf for each in rows):
                refuse(f"experts of block {block}: rows must be finite and not negative, one for each expert")

    def weights(self, block: int) -> tuple[float, ...]:
        """The parts of a block's rows that its experts have, which sum to 1."""
        rows = self.rows[block]
        total = math.fsum(rows)
        return tuple(each / total for each in rows) if total else (1 / len(rows),) * len(rows)


def costed(
    model: ModelSpec,
    sample_tokens: float,
    rows: Mapping[int, tuple[float, ...]],
    chosen: float,
    replicas: int = -1,
    part: float = 0.0,
) -> ExpertLoad | None:
    """A load with what experts cost by the model's shapes; None: no rule places experts of it.

    Blocks of several modules of experts, of unlike numbers, are left out: no placement is one of both.

    Args:
        model: with rules.
        sample_tokens: of a sample, for what attention costs beside experts.
        rows: of each expert of each block in a step.
        chosen: experts of a row.
        replicas: that a block may have, at most; -1: one less than devices.
        part: the computation of a block's experts over that of a mean block, as measured; 0: by the shapes.
    """
    counts = expert_counts(model)
    sparse = {block: own for block, own in rows.items() if counts.get(block) == len(own)}
    same: list[set[int]] = []
    for group in blocks_with_same_experts(model):
        apart = [each for each in same if each.isdisjoint(group)]
        same = [*apart, group.union(*(each for each in same if not each.isdisjoint(group)))]
    for group in same:
        if not group <= sparse.keys():
            sparse = {block: own for block, own in sparse.items() if block not in group}
    if not sparse:
        return None
    count = max(map(len, sparse.values()))
    size = sum(math.prod(p.shape) * item_size(p.dtype) for p in _sparsest(model) if p.experts)
    return ExpertLoad(
        rows=sparse,
        part=part or part_of_mean(model, sample_tokens, chosen),
        expert_bytes=round(size / count),
        replicas=replicas,
        same=tuple(tuple(sorted(group)) for group in same if group <= sparse.keys()),
    )


def expert_part(model: ModelSpec, sample_tokens: float, chosen: float, count: int) -> float:
    """The part of the computation of a block with experts that is theirs, by the model's shapes.

    Args:
        model: with rules for experts.
        sample_tokens: of a sample, for what attention costs beside experts.
        chosen: experts of a row.
        count: of a block's experts.
    """
    kind = _sparsest(model)
    routed = chosen * _elements(kind, experts=True) / count
    others = _elements(kind, experts=False) + model.width * sample_tokens
    return min(routed / (routed + others), MOST_OF_EXPERTS)


def part_of_mean(model: ModelSpec, sample_tokens: float, chosen: float) -> float:
    """The computation of a block's experts over that of a mean block, by the model's shapes. Blocks count as
    alike, and those without experts may be larger or smaller than those with some.

    Args:
        model: with rules for experts.
        sample_tokens: of a sample, for what attention costs beside experts.
        chosen: experts of a row.
    """
    counts = expert_counts(model)
    routed, work = [], []
    for block, kind in enumerate(model.layers):
        parameters = model.kinds[kind]
        own = chosen * _elements(parameters, experts=True) / counts[block] if block in counts else 0.0
        routed.append(own)
        # Of experts that no plan places all count, as of any other parameter.
        others = _elements(parameters, experts=False) + model.width * sample_tokens
        work.append(own + others + (0 if own else _elements(parameters, experts=True)))
    return min(max(routed) * len(work) / sum(work), MOST_OF_EXPERTS)


def _sparsest(model: ModelSpec) -> tuple[Parameter, ...]:
    """The parameters of the blocks with the most elements in experts."""
    return max(model.kinds, key=lambda kind: _elements(kind, experts=True))


def _elements(kind: tuple[Parameter, ...], *, experts: bool) -> int:
    return sum(math.prod(p.shape) for p in kind if p.experts == experts)


def expert_counts(model: ModelSpec) -> dict[int, int]:
    """The number of experts of each block whose experts a plan may place."""
    by_kind = [
        {model.units_of(p.cut.units).count for p in kind if p.experts and p.cut is not None}
        for kind in model.kinds
    ]
    return {
        block: next(iter(by_kind[kind])) for block, kind in enumerate(model.layers) if len(by_kind[kind]) == 1
    }


def held_in(lane: Stage, block: int, count: int) -> HeldExperts:
    """The experts of a block that each device of a lane has: as the plan places them, else by shares.

    Args:
        lane: a stage of a single lane.
        block: of the model.
        count: of the block's experts.
    """
    if placed := lane.experts_of(block):
        return placed
    held, start = [], 0
    for units in apportion(count, lane.shares):
        held.append(tuple(range(start, start + units)))
        start += units
    return tuple(held)


def held_by_device(plan: Plan, load: ExpertLoad) -> dict[str, dict[int, tuple[int, ...]]]:
    """By device of a plan of one module and by block the experts that it has."""
    held: dict[str, dict[int, tuple[int, ...]]] = {}
    for _, _, lane in plan.walk():
        for block in blocks_of(lane):
            if block in load.rows:
                for device, own in zip(lane.devices, held_in(lane, block, len(load.rows[block])), strict=True):
                    held.setdefault(device, {})[block] = own
    return held


def blocks_of(stage: Stage) -> list[int]:
    """The blocks of the model that a stage has, chunk by chunk."""
    return [block for chunk in stage.chunks for block in range(*chunk)]


def rows_by_device(load: Sequence[float], held: HeldExperts, splits: Parts = ()) -> list[float]:
    """The rows that each device computes of a load.

    Args:
        load: rows of each expert.
        held: the experts of each device.
        splits: the parts of rows of experts on several devices, where these are not equal.
    """
    parts = {split[0]: split[1:] for split in splits}
    copies: dict[int, int] = {}
    for own in held:
        for expert in own:
            copies[expert] = copies.get(expert, 0) + 1
    seen = dict.fromkeys(parts, 0)
    rows = []
    for own in held:
        mine = 0.0
        for expert in own:
            if expert in parts:
                mine += load[expert] * parts[expert][seen[expert]] / sum(parts[expert])
                seen[expert] += 1
            else:
                mine += load[expert] / copies[expert]
        rows.append(mine)
    return rows


def divided(rows: Sequence[float], held: HeldExperts, slowdowns: Sequence[float]) -> Parts:
    """The parts of the rows of each expert on several devices that make these even, as nearly as few exchanges
    between two devices do. Devices that give the same numbers get the same parts.

    Args:
        rows: of each expert.
        held: the experts of each device.
        slowdowns: of each device.
    """
    holders = holders_of(held, len(rows))
    parts: dict[int, list[float]] = {}
    on_device = [0.0] * len(held)
    for count, on, expert in zip(rows, holders, range(len(rows)), strict=True):
        for place in on:
            on_device[place] += count / len(on)
        if len(on) > 1 and count:
            parts[expert] = [count / len(on)] * len(on)
    for _ in range(SWEEPS):
        for expert, own in parts.items():
            on = holders[expert]
            for one in range(len(on) - 1):
                for other in range(one + 1, len(on)):
                    a, b = on[one], on[other]
                    late = slowdowns[b] * on_device[b] - slowdowns[a] * on_device[a]
                    moved = min(max(late / (slowdowns[a] + slowdowns[b]), -own[one]), own[other])
                    own[one] += moved
                    own[other] -= moved
                    on_device[a] += moved
                    on_device[b] -= moved
    return tuple((expert, *own) for expert, own in parts.items())


def splits_in(group: Stage, block: int, rows: Sequence[float]) -> Parts:
    """The parts of rows of experts on several devices under a load.

    Args:
        group: a lane that has all experts of the block, or a stage whose lanes share them.
        block: of the model.
        rows: of each of its experts.
    """
    anew = group.slowdowns and not (group.lanes and block in group.shared_blocks)
    held = group.experts_of(block)
    return divided(rows, held, group.slowdowns) if anew and held else group.splits_of(block)


@lru_cache(maxsize=1024)
def holders_of(held: HeldExperts, count: int) -> tuple[tuple[int, ...], ...]:
    """The places of the devices that have each of so many experts."""
    own = [{*each} for each in held]
    return tuple(tuple(place for place, each in enumerate(own) if expert in each) for expert in range(count))


def fractions_in(lane: Stage, load: ExpertLoad) -> list[tuple[float, ...]]:
    """Of each block of a lane the part of its experts' rows that each device computes [blocks][devices]; of a
    block without experts its share.

    Where other lanes have some of its experts a lane's devices count as computing for it alone.
    """
    total, found = sum(lane.shares), []
    for block in blocks_of(lane):
        if block not in load.rows:
            found.append(tuple(share / total for share in lane.shares))
            continue
        weights, held = load.weights(block), held_in(lane, block, len(load.rows[block]))
        rows = rows_by_device(weights, held, splits_in(lane, block, weights))
        every = math.fsum(rows) or 1.0
        found.append(tuple(each / every for each in rows))
    return found
