"""Rows of equal cost: sequences over the lanes of a pipeline of several stages, row by row.

A 1F1B pipeline wants rows of equal cost, because each row's time on a stage is waited for by the stages around
it. So each of m rows is balanced for itself, over all lanes:

  rows   The costliest sequences first, each to the row with the least work that has memory for it.
  lanes  In a row, the costliest first, down the tree of lanes (`LaneTree.levels`) for as long as one half
         alone can still take it within the row's time. Where that ends, the sequence is cut over the lanes that
         have time left, in proportion to it: all lanes of a row go through it together, so that shares need not
         go by speed alone. Sequences that are too short to cut come last, each to the lane that ends first.

Few rows make the pipeline's fill long, many rows cost their fixed time each: with p stages m equal rows take
(m + p - 1) (work / m + fixed). The numbers of rows for which this is least are tried, and played by the
schedule. All is in integers, so that all ranks have the same rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from elasticd_planner.batching import fold
from elasticd_planner.batching.division import SequenceDivision, SplitCost
from elasticd_planner.batching.lane_tree import NORMAL, SPEED, LaneTree, Vertex
from elasticd_planner.cost.schedule import passes
from elasticd_planner.layout.pass_order import timed_passes
from elasticd_planner.numeric import Ints

#: How many numbers of rows are tried, where they hold the sequences.
_TRIED = 3
#: A part of its own time: a sequence may take so much more than a lane has left.
_LATE = 100
#: Rows are filled to so many hundredths of their memory, so that short sequences find a lane with room.
_FULL = 97


def balanced(lengths: Ints, tree: LaneTree, cost: SplitCost, stages: int) -> SequenceDivision | None:
    """Divides sequences over lanes of a pipeline of several stages.

    Args:
        lengths: tokens of each sequence, at least 1 [sequences].
        tree: the lanes.
        cost: what the division is made for; a row's fixed time is that of all stages together.
        stages: of the pipeline, which are equally fast.

    Returns:
        The division; None where even rows do not hold the sequences.
    """
    work = int((lengths * (cost.linear + lengths)).sum()) * SPEED // tree.before[-1]
    best: tuple[int, SequenceDivision] | None = None
    for tried, rows in enumerate(_counts(lengths, tree, cost, work, stages), 1):
        found = _Rows(lengths, tree, cost, rows).division()
        if found is not None:
            made, times = found
            time = pipeline_time(times, stages)
            if best is None or time < best[0]:
                best = time, made
        if best is not None and tried >= _TRIED:
            break
    return best and best[1]


def _counts(lengths: Ints, tree: LaneTree, cost: SplitCost, work: int, stages: int) -> Iterator[int]:
    """Numbers of rows, the likely ones first."""
    least = -(-int(lengths.sum()) // sum(tree.capacity))
    most = max(least, len(lengths))
    likely = min(
        range(least, most + 1),
        key=lambda rows: (rows + stages - 1) * (work + rows * cost.fixed) * 1000 // rows,
    )
    # Where the longest sequence alone costs more than a row, larger rows are more even.
    longest = fold.cost(int(lengths.max()), int(lengths.max()), cost.linear) * SPEED // tree.before[-1]
    even = min(likely, max(least, work // max(1, longest)))
    yield from dict.fromkeys((likely, even, (even + likely) // 2))
    yield from range(likely + 1, most + 1)


def even_rows(lengths: Ints, tree: LaneTree, cost: SplitCost, rows: int) -> SequenceDivision | None:
    """The sequences in so many rows of equal cost; None where these do not hold them, or only with a piece that
    is too short."""
    found = _Rows(lengths, tree, cost, rows).division()
    if found is None:
        return None
    made, _ = found
    cut = np.bincount(made.sequence) > 1
    short = made.stop - made.start < cost.least
    return None if (short & cut[made.sequence]).any() else made


def pipeline_time(rows: Sequence[int], stages: int) -> int:
    """When a plain 1F1B pipeline of equal stages ends rows of these times (forward and backward, all stages
    together), in the same unit; a backward pass takes twice the forward one. Transfers take no time."""
    ended = timed_passes(passes, [rows] * stages, [[2 * each for each in rows]] * stages)
    return int(max(stage[-1].stop for stage in ended)) // (3 * stages)


class _Rows:
    """A division into so many rows under way. Sequences are numbered by falling length."""

    def __init__(self, lengths: Ints, tree: LaneTree, cost: SplitCost, rows: int) -> None:
        self.lengths, self.tree, self.cost, self.rows = lengths, tree, cost, rows
        self.order = np.argsort(-lengths, kind="stable")
        self.ls: list[int] = lengths[self.order].tolist()

    def division(self) -> tuple[SequenceDivision, list[int]] | None:
        """All sequences divided, and the time of each row; None where they do not fit."""
        times: list[tuple[int, list[tuple[int, int, int, int]]]] = []
        for numbers in self._dealt() or ():
            row = _Balance(self).fill(numbers)
            if row is None:
                return None
            times.append(row)
        if not times:
            return None
        # A lane without a piece in a row has none in later ones: such a row can only be the last.
        times.sort(key=lambda row: row[0])
        full = [row for row in times if len({piece[1] for piece in row[1]}) == len(self.tree)]
        if len(times) - len(full) > 1:
            return None
        times = [
            *full[0::2],
            *full[1::2][::-1],  # the longest rows in the middle: fill and drain wait for none
            *(row for row in times if row not in full),
        ]
        pieces = [(*piece, row) for row, (_, own) in enumerate(times) for piece in own]
        number, place, start, stop, row_of = np.array(pieces, dtype=np.int64).T
        made = SequenceDivision(sequence=self.order[number], place=place, row=row_of, start=start, stop=stop)
        return made, [time + self.cost.fixed for time, _ in times]

    def _dealt(self) -> list[list[int]] | None:
        """The sequences of each row: the costliest first, to the row with the least work that has room."""
        capacity = sum(self.tree.capacity)
        room = [capacity * _FULL // 100 if self.rows > 1 else capacity] * self.rows
        rows: list[list[int]] = [[] for _ in room]
        heap = [(0, row) for row in range(self.rows)]
        for number, length in enumerate(self.ls):
            passed = []
            while heap and room[heap[0][1]] < length and rows[heap[0][1]]:
                passed.append(heappop(heap))
            if not heap:
                return None
            load, row = heappop(heap)
            rows[row].append(number)
            room[row] -= length
            heappush(heap, (load + fold.cost(length, length, self.cost.linear), row))
            for entry in passed:
                heappush(heap, entry)
        return [each for each in rows if each]


class _Balance:
    """One row under way: the work that each lane still has time for, and the tokens that it has room for."""

    def __init__(self, rows: _Rows) -> None:
        self.of, self.tree = rows, rows.tree
        self.speed = rows.tree.speeds
        self.room = list(rows.tree.capacity)
        self.left: list[int] = []
        self.sums: dict[Vertex, list[int]] = {}  # of a vertex: work left, and room [pairs]
        self.pieces: dict[int, list[tuple[int, int, int]]] = {}  # of each sequence: place, start, stop

    def fill(self, numbers: list[int]) -> tuple[int, list[tuple[int, int, int, int]]] | None:
        """Gives the lanes the sequences of these numbers; returns the row's time and pieces, or None where they
        do not fit."""
        ls, linear = self.of.ls, self.of.cost.linear
        total = sum(ls[number] * (linear + ls[number]) for number in numbers)
        start = [total * speed // self.tree.before[-1] for speed in self.speed]
        self.left = list(start)
        for vertex in self.tree.vertices:
            a, b = vertex
            self.sums[vertex] = [sum(start[a:b]), sum([room // 2 for room in self.room[a:b]])]
        shortest = 4 * self.of.cost.least
        long = bisect_left(numbers, True, key=lambda number: ls[number] < shortest)
        if not all(map(self._long, numbers[:long])) or not self._short(numbers[long:]):
            return None
        # Once more, in the knowledge of all others: so that what the last ones left uneven becomes even.
        for number in reversed(numbers[:long]):
            if len(own := self.pieces[number]) > 1:
                self._take(number)
                if not self._cut(number, (own[0][0], own[-1][0] + 1)):
                    for piece in own:
                        self._give(number, *piece)
        used = {piece[0] for own in self.pieces.values() for piece in own}
        if self.of.rows > 1:
            for place in sorted({*range(len(self.tree))} - used):
                self._occupy(place)
        time = max(
            (before - after) * slowdown // NORMAL
            for before, after, slowdown in zip(start, self.left, self.tree.slowdown, strict=True)
        )
        return time, [(number, *piece) for number in numbers for piece in self.pieces[number]]

    def _short(self, numbers: list[int]) -> bool:
        """Sequences that are too short to cut: each to the lane that has most time left, of those with room."""
        heap = [(-left * SPEED // speed, at) for at, (left, speed) in enumerate(self._lanes())]
        heapify(heap)
        for number in numbers:
            passed = []
            while heap and self.room[heap[0][1]] < self.of.ls[number]:
                passed.append(heappop(heap))
            if heap:
                place = heappop(heap)[1]
                self._give(number, place, 0, fold.pair_count(self.of.ls[number]))
                heappush(heap, (-self.left[place] * SPEED // self.speed[place], place))
            elif not self._cut(number, (0, len(self.tree))):
                return False
            for entry in passed:
                heappush(heap, entry)
        return True

    def _lanes(self) -> list[tuple[int, int]]:
        return list(zip(self.left, self.speed, strict=True))

    def _long(self, number: int) -> bool:
        """A sequence that may be cut: to the narrowest vertex that has time and room for it."""
        length = self.of.ls[number]
        work = fold.cost(length, length, self.of.cost.linear)
        vertex = (0, len(self.tree))
        while vertex[1] - vertex[0] > 1:
            best = None
            for half in self.tree.halves(vertex):
                left, pairs = self.sums[half]
                if left < work - work // _LATE or pairs < length // 2:
                    continue
                if half[1] - half[0] == 1 and self.room[half[0]] < length:
                    continue
                if half[1] - half[0] > 1 and pairs < fold.pair_count(length):
                    continue
                if best is None or left * SPEED // self.tree.speed(half) > best[0]:
                    best = left * SPEED // self.tree.speed(half), half
            if best is None:
                break
            vertex = best[1]
        if vertex[1] - vertex[0] == 1:
            self._give(number, vertex[0], 0, fold.pair_count(length))
            return True
        return self._cut(number, vertex) or self._cut(number, (0, len(self.tree))) or self._short([number])

    def _cut(self, number: int, vertex: Vertex) -> bool:
        """Cuts a sequence over lanes of a vertex, so that all of them have as much time left. False where the
        vertex does not hold it."""
        length, cost = self.of.ls[number], self.of.cost
        work, piece = fold.cost(length, length, cost.linear), 2 * cost.least * (cost.linear + length)
        places = [at for at in range(*vertex) if self.room[at] >= 2 * cost.least]
        while places:
            speed = sum(self.speed[at] for at in places)
            after = sum(self.left[at] for at in places) - work  # of all of them, when they have it
            parts = [self.left[at] - after * self.speed[at] // speed for at in places]
            small = sorted((part, at) for part, at in zip(parts, places, strict=True) if part < piece)
            if not small or len(places) == 1:
                break
            # With fewer lanes each part is larger, so that some of the small ones may be large enough then.
            dropped = {at for _, at in small[: min(len(places) - 1, (len(small) + 1) // 2)]}
            places = [at for at in places if at not in dropped]
        if sum(self.room[at] // 2 for at in places) < fold.pair_count(length):
            places = [at for at in range(*vertex) if self.room[at] > 1]
            most = sorted(places, key=lambda at: (-self.room[at], at))[: max(1, length // 2)]
            places, parts = sorted(most), [self.speed[at] for at in sorted(most)]
        return self._share(number, places, parts)

    def _share(self, number: int, places: list[int], parts: list[int]) -> bool:
        """Cuts a sequence over lanes in these proportions, as far as they have room. False where they do not
        hold it."""
        length, rooms = self.of.ls[number], [self.room[at] for at in places]
        if sum(room // 2 for room in rooms) < fold.pair_count(length) or min(rooms) < 2:
            return False
        shift = max(0, max(parts).bit_length() - 24)
        borders = fold.shared(length, [max(1, part >> shift) for part in parts], rooms)
        for place, (start, stop) in zip(places, borders, strict=True):
            self._give(number, place, start, stop)
        return True

    def _occupy(self, place: int) -> None:
        """Gives a lane that has nothing a part of the sequence that has most pairs for each of its lanes."""
        number = max(self.pieces, key=lambda each: (self.of.ls[each] // (1 + len(self.pieces[each])), -each))
        own, length = self.pieces[number], self.of.ls[number]
        places = sorted([*(piece[0] for piece in own), place])
        if fold.pair_count(length) < len(places):
            return
        self._take(number)
        work = fold.cost(length, length, self.of.cost.linear)
        speed = sum(self.speed[at] for at in places)
        after = sum(self.left[at] for at in places) - work
        parts = [self.left[at] - after * self.speed[at] // speed for at in places]
        if not self._share(number, places, parts):
            for piece in own:
                self._give(number, *piece)

    def _give(self, number: int, place: int, start: int, stop: int) -> None:
        length = self.of.ls[number]
        tokens = 2 * (stop - start) - (2 * stop > length)
        self._move(place, -tokens * (self.of.cost.linear + length), -tokens)
        self.pieces.setdefault(number, []).append((place, start, stop))

    def _take(self, number: int) -> None:
        """Takes a sequence back from its lanes."""
        length = self.of.ls[number]
        for place, start, stop in self.pieces.pop(number):
            tokens = 2 * (stop - start) - (2 * stop > length)
            self._move(place, tokens * (self.of.cost.linear + length), tokens)

    def _move(self, place: int, work: int, tokens: int) -> None:
        """A lane has more time and room left, or less."""
        pairs = (self.room[place] + tokens) // 2 - self.room[place] // 2
        self.left[place] += work
        self.room[place] += tokens
        for vertex in self.tree.path(place):
            sums = self.sums[vertex]
            sums[0] += work
            sums[1] += pairs
