"""The packed batch of a step: sequences dealt to the lanes of a plan, in rows without padding.

A sequence of L tokens costs L x (linear + L), in units of one token's attention to one other; a row costs the
sum of its sequences, because attention does not look over their borders. A row has so many tokens as its lane
holds. First each pipeline gets its part of the sequences, by its speed; then its lanes share that part, as
whole sequences or cut: in a pipeline of one stage so that lanes end the step together (`sequence_split`), in
one of several so that each row is even (`row_balance`). All is a pure function of plan, samples, lengths and
slowdowns, in integers, so that every rank has the same batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import accumulate, islice, pairwise, repeat, zip_longest
from math import prod
from typing import NoReturn

import numpy as np

from elasticd_planner.batching import fold
from elasticd_planner.batching.division import SequenceDivision, SplitCost
from elasticd_planner.batching.lane_tree import NORMAL, LaneSet, LaneTree
from elasticd_planner.batching.row_balance import balanced
from elasticd_planner.batching.sequence_split import divided
from elasticd_planner.numeric import Ints
from elasticd_planner.spec.batch import BatchLengths, BatchPlan, BatchRow, MicroBatch, SequencePiece
from elasticd_planner.spec.cluster import node_of
from elasticd_planner.spec.plan import Pipeline, Plan
from elasticd_planner.value import Invalid, Value, refuse


class NoRoom(Invalid):
    """A sequence that no row holds."""

    def __init__(self, step: int, sample: int, why: str) -> None:
        super().__init__(f"step {step}: sample {sample} {why}")
        self.sample, self.why = sample, why


class CutOptions(Value, frozen=True, kw_only=True):
    """The options for cutting sequences."""

    least: int = 256  # [pairs] of a piece: shorter ones waste a kernel, so that only memory asks for them
    fixed: int = 0  # what a row takes whatever is in it, in units of one token's attention to one other

    def __post_init__(self) -> None:
        if self.least < 1 or self.fixed < 0:
            refuse("packing: the least piece must be at least 1 pair, and a row's fixed cost not negative")


def row_capacity(plan: Plan, lengths: BatchLengths, most: int | None = None) -> list[int]:
    """Tokens of a row that each lane takes, lane by lane over all pipelines: what its memory holds,
    as the plan has it, and no more than `most` (None: than a padded micro-batch of these sequences)."""
    limit = plan.micro_batch * max(1, *lengths.tokens) if most is None else most
    found: list[int] = []
    for pipeline in plan.pipelines:
        rooms = [min(limit, lane.capacity) for lane in pipeline.packed]
        found += rooms or [limit] * len(pipeline.micro_batches_by_lane)
    return found


def packed_batch_plan(
    plan: Plan,
    step: int,
    samples: Sequence[int],
    lengths: BatchLengths,
    most: int | None = None,
    *,
    cut: CutOptions | None = None,
    slowdown: Sequence[int] | None = None,
) -> BatchPlan:
    """Deals the samples of a step to the lanes of a plan, and to rows of those.

    Args:
        plan: the plan, of one module.
        step: its index.
        samples: their ids.
        lengths: tokens of each sample, and what they cost.
        most: the most tokens of a row, see `row_capacity`.
        cut: how sequences may be cut over the lanes of a pipeline; None: they stay whole.
        slowdown: the time of each lane for the same work, in order, in 64ths of a normal lane's;
            None: see `planned_slowdown`.

    Raises:
        NoRoom: a sequence has no token, or no set of lanes of a pipeline holds it.
        Invalid: samples and lengths are not as many, or lanes and slowdowns.
    """
    if len(lengths.tokens) != len(samples):
        refuse(f"step {step}: {len(lengths.tokens)} lengths for {len(samples)} samples")
    if 0 in lengths.tokens:
        sample = samples[lengths.tokens.index(0)]
        raise NoRoom(step, sample, "has 0 tokens: a packed sequence needs at least one")
    dealing = _Dealing(step, plan, samples, lengths, row_capacity(plan, lengths, most), cut, slowdown)
    return BatchPlan(step=step, plan=plan.number, pipelines=dealing.rows(), packed=True)


class _Dealing:
    """The dealing of a step's samples to the lanes of a plan."""

    def __init__(
        self,
        step: int,
        plan: Plan,
        samples: Sequence[int],
        lengths: BatchLengths,
        capacity: Sequence[int],
        cut: CutOptions | None,
        slowdown: Sequence[int] | None,
    ) -> None:
        self.step, self.pipelines, self.samples, self.lengths = step, plan.pipelines, samples, lengths
        self.options = cut
        slots = [count for pipeline in plan.pipelines for count in pipeline.micro_batches_by_lane]
        lanes = len(slots)
        self.capacity = list(capacity)
        self.slowdown = planned_slowdown(plan.pipelines) if slowdown is None else list(slowdown)
        # The time of a unit of work on each lane, in a unit that all have in common.
        common = prod({*slots})
        by_slots = slowdown is None and not plan.packed
        self.each = [common // slot for slot in slots] if by_slots else self.slowdown
        for name, given in (("capacities", self.capacity), ("slowdowns", self.slowdown)):
            if len(given) != lanes or min(given) < 1:
                said = f"has {lanes} lanes, which need {name} of at least 1"
                refuse(f"step {step}: module {plan.module.module} {said}")
        ends = [0, *accumulate(len(pipeline.micro_batches_by_lane) for pipeline in plan.pipelines)]
        self.lanes = [slice(*pair) for pair in pairwise(ends)]

    def rows(self) -> tuple[tuple[BatchRow, ...], ...]:
        """The rows of each pipeline."""
        if self.options is None:
            return self._whole()
        options = self.options
        cost = SplitCost(linear=self.lengths.linear, fixed=options.fixed, least=options.least)
        return tuple(
            self._cut(pipeline, own, mine, cost)
            for pipeline, own, mine in zip(self.pipelines, self.lanes, self._by_pipeline(), strict=True)
        )

    def _cut(self, pipeline: Pipeline, own: slice, mine: list[int], cost: SplitCost) -> tuple[BatchRow, ...]:
        """The rows of one pipeline that has these of the step's sequences."""
        if not mine:
            return ()
        capacity, slowdown = tuple(self.capacity[own]), tuple(self.slowdown[own])
        tree = _tree(LaneSet(nodes=nodes_of(pipeline), capacity=capacity, slowdown=slowdown))
        lengths = np.array(self.lengths.tokens)[mine]
        stages = len(pipeline.stages)
        even = balanced(lengths, tree, cost, stages) if stages > 1 else None
        # Sequences that no even rows hold are so few or so short that there is nothing to balance.
        found = divided(lengths, tree, cost) if even is None else even
        return rows_of(found, np.array(self.samples)[mine], lengths, tree)

    def _by_pipeline(self) -> list[list[int]]:
        """The sequences of each pipeline: the costliest first, to that which ends first with it, of those that
        hold it."""
        tokens, linear = self.lengths.tokens, self.lengths.linear
        rooms = [self.capacity[own] for own in self.lanes]
        if len(self.lanes) == 1:
            dealt = [list(range(len(tokens)))]
        else:
            speeds = [sum(2**40 // each for each in self.each[own]) for own in self.lanes]
            dealt, loads = [[] for _ in rooms], [0] * len(rooms)
            for index in sorted(range(len(tokens)), key=lambda i: (-tokens[i], i)):
                length = tokens[index]
                work = length * (linear + length) << 40
                held = [at for at, room in enumerate(rooms) if _holds(room, length)]
                at = min(held, key=lambda at: loads[at] + work // speeds[at], default=0)
                loads[at] += work // speeds[at]
                dealt[at].append(index)
        for room, mine in zip(rooms, dealt, strict=True):
            longest = mine[int(np.argmax(np.array(tokens)[mine]))] if mine else None
            if longest is not None and not _holds(room, tokens[longest]):
                most = max(map(sum, rooms))
                self._refuse(longest, f"and no pipeline's lanes hold more than {most} in a row")
        return dealt

    def _whole(self) -> tuple[tuple[BatchRow, ...], ...]:
        """Whole sequences: the costliest first, to the lane that is done first of those that hold it."""
        tokens, linear = self.lengths.tokens, self.lengths.linear
        taken: list[list[int]] = [[] for _ in self.each]
        free = [(0, lane) for lane in range(len(self.each))]
        heapify(free)
        for index in sorted(range(len(tokens)), key=lambda i: (-tokens[i], i)):
            passed = []
            while free and tokens[index] > self.capacity[free[0][1]]:
                passed.append(heappop(free))
            if not free:
                self._refuse(index, f"a row at most {max(self.capacity)}")
            load, lane = heappop(free)
            taken[lane].append(index)
            heappush(free, (load + fold.cost(tokens[index], tokens[index], linear) * self.each[lane], lane))
            for entry in passed:
                heappush(free, entry)
        rows = iter(
            [
                _whole_rows([SequencePiece.whole(self.samples[i], tokens[i]) for i in own], most, linear)
                for own, most in zip(taken, self.capacity, strict=True)
            ]
        )
        return tuple(
            tuple(BatchRow(lanes=row) for row in zip_longest(*islice(rows, own.stop - own.start), fillvalue=()))
            for own in self.lanes
        )

    def _refuse(self, index: int, held: str) -> NoReturn:
        """Refuses a sequence that nothing holds."""
        why = f"has {self.lengths.tokens[index]} tokens, {held}"
        raise NoRoom(self.step, self.samples[index], why)


def _holds(room: Sequence[int], length: int) -> bool:
    """Returns True if lanes of so many tokens hold a sequence in one row, whole or cut."""
    return length <= max(room) or sum(fold.held_pairs(length, room)) >= fold.pair_count(length)


def planned_slowdown(pipelines: Sequence[Pipeline]) -> list[int]:
    """The slowdown of each lane of all pipelines, as a plan has it [64ths of a normal lane's time]. Of one that
    is not packed: so that lanes get shares of the work as their shares of its micro-batches."""
    if pipelines[0].packed:
        return [lane.slowdown for pipeline in pipelines for lane in pipeline.packed]
    slots = [count for pipeline in pipelines for count in pipeline.micro_batches_by_lane]
    middle = sorted(slots)[len(slots) // 2]
    return [max(1, (2 * NORMAL * middle + slot) // (2 * slot)) for slot in slots]


@lru_cache(maxsize=64)
def nodes_of(pipeline: Pipeline) -> tuple[int, ...]:
    """The node of each lane of a pipeline, by the order in which nodes come up: that of its first device."""
    names = [node_of(lane.stages[0].devices[0]) for lane in pipeline.by_lane]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return tuple(numbers[name] for name in names)


@lru_cache(maxsize=64)
def _tree(lanes: LaneSet) -> LaneTree:
    """Kept, because most steps have the lanes of the step before."""
    return LaneTree(lanes)


def rows_of(
    found: SequenceDivision, samples: Sequence[int] | Ints, lengths: Ints, tree: LaneTree
) -> tuple[BatchRow, ...]:
    """The rows of a pipeline from the columns of a division."""
    count = len(tree)
    lane = np.array(tree.order)[found.place]
    cell = found.row * count + lane
    order = np.argsort(cell, kind="stable")
    sequence = found.sequence[order]
    ids: Iterable[int] = np.array(samples)[sequence].tolist()
    columns = (ids, lengths[sequence].tolist(), found.start[order].tolist(), found.stop[order].tolist())
    pieces = list(map(tuple.__new__, repeat(SequencePiece), zip(*columns, strict=True)))
    ends = np.searchsorted(cell[order], np.arange(count * (1 + int(found.row.max())) + 1)).tolist()
    cells = [tuple(pieces[start:stop]) for start, stop in pairwise(ends)]
    return tuple(BatchRow(lanes=tuple(cells[at : at + count])) for at in range(0, len(cells), count))


def _whole_rows(pieces: Sequence[SequencePiece], most: int, linear: int) -> list[MicroBatch]:
    """A lane's sequences, the costliest first, in rows of like cost: as few as hold their tokens."""
    count = -(-sum(piece.length for piece in pieces) // most)
    while True:
        rows: list[list[SequencePiece]] = [[] for _ in range(count)]
        tokens, costs = [0] * count, [0] * count
        for piece in pieces:
            fits = [row for row in range(count) if tokens[row] + piece.length <= most]
            if not fits:
                break
            row = min(fits, key=costs.__getitem__)
            rows[row].append(piece)
            tokens[row] += piece.length
            costs[row] += piece.length * (linear + piece.length)
        else:
            return [tuple(row) for row in rows if row]
        count += 1
