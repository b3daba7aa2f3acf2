"""The laminar division: sequences over the lanes of a pipeline of one stage, cut where that pays, in rows.

Lanes meet only in the rows in which they share a sequence. So sequences go to the vertices of a tree over the
lanes: all of them, halves of the nodes, nodes, halves of a node's lanes, single lanes. All lanes of a vertex
get parts by their speed (see `fold`), which take them equally long. Each lane runs its rows from the widest
vertex to its own, and by induction over the width all lanes of a vertex have done the same when they come to
its rows: no lane waits. What is balanced is each lane's sum over the step, not each row, and a sequence is cut
no more than memory and the end of the step ask.

  levels  From the top: the costliest sequences, each to the least busy vertex of a level, as long as they do
          not fit a vertex of the next one (its memory, or its time in the step). What their rows leave of the
          memory takes further sequences, cut alike, so that no row is half empty.
  lanes   The other sequences stay whole: the costliest first, to the lane that ends first with it. A sequence
          that would end too late on any is cut over the vertex on which it ends first.
  rows    A vertex's sequences in as few rows as its memory allows. Rows of a vertex have one index on all its
          lanes, because as many rows come before them on each.
  merged  If all that follows a vertex's last row on its lanes fits into that row, it goes there.

Uniform degrees (each sequence cut over as many lanes as every other, or over as many fewer as its least piece
asks) are divisions of the same kind, and are tried where the first division leaves a gap to the bound: they
need the fewest rows, for all lanes have like tokens in them. Where that, too, leaves much, rows that are even
for themselves are tried (`row_balance`). All times are integers, so that all ranks divide alike.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush, heapreplace
from itertools import pairwise

import numpy as np

from elasticd_planner.batching import fold
from elasticd_planner.batching.division import SequenceDivision, SplitCost, bound, seconds
from elasticd_planner.batching.lane_tree import SPEED, LaneTree, Vertex
from elasticd_planner.batching.row_balance import even_rows
from elasticd_planner.numeric import Ints
from elasticd_planner.value import refuse

#: Bits of the step's work: costs are scaled to so many, so that rounding is far below what balance is about.
_BITS = 40
#: Uniform degrees are tried where the laminar division is so many thousandths or more above the bound;
#: degrees that shorter sequences do not have, where it is further above, in steps of few sequences; and the
#: fewest rows, each even, where it is far above.
_GAP, _WIDE_GAP, _ROW_GAP, _FEW = 20, 50, 110, 2048
#: A whole sequence may end so many thousandths of the step late before it is cut.
_LATE = 10
#: A part of the step's time: sequences that take less stay whole, even if they end late.
_WORTH = 64
#: How many rows of a vertex are looked at for room.
_OPEN = 3
#: How many lanes are tried for a sequence, and how often cuts of sequences that end late may fail.
_TRIED = 4
#: Rows of a lane alone, up to which sequences are dealt to all lanes at once.
_OPEN_MOST = 8
#: So many sequences more than there are lanes are dealt one by one at the end, so that lanes end together.
_LAST = 256


def divided(lengths: Ints, tree: LaneTree, cost: SplitCost) -> SequenceDivision:
    """Divides sequences over lanes.

    Args:
        lengths: tokens of each sequence, at least 1 [sequences].
        tree: the lanes.
        cost: what the division is made for.

    Raises:
        Invalid: no vertex holds a sequence; the message has its place among the lengths.
    """
    found = _Laminar(lengths, tree, cost).division()
    least, best = bound(lengths, tree, cost), seconds(found, lengths, tree, cost)
    for gap, other in _others(lengths, tree, cost):
        if 1000 * (best - least) < gap * least:
            continue
        made = other()
        if made is not None and (time := seconds(made, lengths, tree, cost)) < best:
            found, best = made, time
    return found


def _others(
    lengths: Ints, tree: LaneTree, cost: SplitCost
) -> Iterator[tuple[int, Callable[[], SequenceDivision | None]]]:
    """Other divisions, and from which gap on (thousandths of the bound) each is worth its time."""

    def wide(width: int) -> Callable[[], SequenceDivision]:
        return lambda: _Laminar(lengths, tree, cost, width).division()

    shortest, widths = int(lengths.min()), {}
    for level in tree.levels[:-1]:
        width = max(b - a for a, b in level)
        widths[width] = shortest >= cost.least * max(tree.room(vertex)[1] for vertex in level)
    yield from ((_GAP, wide(width)) for width, uniform in widths.items() if uniform)
    if len(lengths) <= _FEW:
        node = max(b - a for a, b in zip([0, *tree.node_ends], tree.node_ends, strict=False))
        if widths.get(node) is False:
            yield _WIDE_GAP, wide(node)
        rows = -(-int(lengths.sum()) // sum(tree.capacity))
        yield _ROW_GAP, lambda: even_rows(lengths, tree, cost, rows)


class _Row:
    """A row of a vertex."""

    __slots__ = ("numbers", "room")

    def __init__(self, room: int) -> None:
        self.room = room  # [tokens] that it still holds
        self.numbers: list[int] = []  # its sequences


def _fitting(rooms: list[int], length: int) -> int:
    """The first row with room for so many tokens; -1: none."""
    for row, room in enumerate(rooms):
        if room >= length:
            return row
    return -1


class _Laminar:
    """One division under way. Sequences are numbered by falling length; `load` is when a lane, or all lanes of
    a vertex, end what they have so far.

    With a `width` every sequence goes to vertices of so many lanes, or of as many fewer as the least piece
    asks."""

    def __init__(self, lengths: Ints, tree: LaneTree, cost: SplitCost, width: int | None = None) -> None:
        self.lengths, self.tree, self.least, self.width = lengths, tree, cost.least, width
        self.order = np.argsort(-lengths, kind="stable")
        falling = lengths[self.order]
        work = falling * (cost.linear + falling)
        shift = _BITS - int(work.sum()).bit_length()
        self.costs = work << shift if shift >= 0 else work >> -shift
        self.fixed = cost.fixed << shift if shift >= 0 else cost.fixed >> -shift
        self.falling: Ints = falling
        self.ls: list[int] = falling.tolist()
        self.work: list[int] = self.costs.tolist()
        self.next = list(range(len(self.ls) + 1))  # from each on, a sequence that may have no place yet
        self.rows: dict[Vertex, list[_Row]] = {}
        # Sequences that fit by memory alone, each with a row of its own, and the time of these.
        self.limited: dict[Vertex, list[int]] = {}
        self.limited_time: dict[Vertex, int] = {}
        self.end = self._end([0] * len(tree), slice(None))

    def division(self) -> SequenceDivision:
        """All sequences divided."""
        levels, facts, load = self.tree.levels, self.tree.level_facts, [0]
        for number, (level, below) in enumerate(pairwise(levels)):
            (_, margin, _), (slowest, _, longest) = facts[number : number + 2]
            self._level(level, load, slowest, self.least * margin, longest)
            inherited, at = [], 0
            for start, _ in below:
                while level[at][1] <= start:
                    at += 1
                inherited.append(load[at])
            load = inherited
        return self._columns(self._lanes(load))

    def _end(self, load: Sequence[int], left: slice | Ints) -> int:
        """When all lanes would end if the sequences that are `left` were divided evenly."""
        done = sum(each * speed for each, speed in zip(load, self.tree.speeds, strict=True))
        work, tokens = int(self.costs[left].sum()), int(self.falling[left].sum())
        return (done + work * SPEED) // self.tree.before[-1] + self.fixed * tokens // sum(self.tree.capacity)

    def _untaken(self, number: int) -> int:
        """The first sequence from `number` on that has no place yet."""
        following = self.next
        while following[number] != number:
            following[number] = following[following[number]]
            number = following[number]
        return number

    # Vertices of several lanes.

    def _level(self, level: list[Vertex], load: list[int], slowest: int, shortest: int, fits: int) -> None:
        """Gives vertices of a level what those below cannot take: more than `fits` tokens, or too much work for
        the slowest of them, if the sequence is not too short to cut."""
        tree, ls, work, count = self.tree, self.ls, self.work, len(self.ls)
        late = self.end * slowest // SPEED
        if self.width is not None:
            late = -1 if max(b - a for a, b in level) <= self.width else work[0]
        if self.limited_time:
            load[:] = [each + self.limited_time.get(v, 0) for each, v in zip(load, level, strict=True)]
        at = self._untaken(0)
        if at == count or (ls[at] <= fits and (work[at] <= late or ls[at] < shortest)):
            return
        heap = [(load[place], place) for place, (a, b) in enumerate(level) if b - a > 1]
        heapify(heap)
        used: set[int] = set()
        while at < count and (ls[at] > fits or (work[at] > late and ls[at] >= shortest)):
            passed = []
            while heap:
                place = heap[0][1]
                holds, margin = tree.room(level[place])
                if ls[at] + margin <= holds:
                    break
                passed.append(heappop(heap))
            if heap:
                load[place] += self._put(at, level[place])
                heapreplace(heap, (load[place], place))
                used.add(place)
            elif ls[at] > fits:
                self._limit(at)
            else:
                late, shortest = work[at], ls[at] + 1  # the next level has room for it
            for entry in passed:
                heappush(heap, entry)
            at = self._untaken(at)
        for place in sorted(used, key=lambda place: (load[place], place)):
            load[place] = self._filled(level[place], load[place])

    def _put(self, number: int, vertex: Vertex) -> int:
        """Puts a sequence into the rows of a vertex; returns the time that this adds to each of its lanes."""
        self.next[number] = number + 1
        rows = self.rows.get(vertex)
        if rows is None:
            rows = self.rows[vertex] = []
        holds, margin = self.tree.room(vertex)
        took = self.ls[number] + margin
        added = self.work[number] * SPEED // self.tree.speed(vertex)
        for row in rows[-_OPEN:]:
            if row.room >= took:
                break
        else:
            row = _Row(holds)
            rows.append(row)
            added += self.fixed
        row.room -= took
        row.numbers.append(number)
        return added

    def _filled(self, vertex: Vertex, load: int) -> int:
        """Fills the room of a vertex's rows with further sequences; returns when its lanes then end."""
        (_, margin), speed, count = self.tree.room(vertex), self.tree.speed(vertex), len(self.ls)
        shortest = self.least * margin
        for row in self.rows[vertex]:
            while row.room - margin >= shortest:
                number = self._untaken(bisect_left(self.ls, margin - row.room, key=int.__neg__))
                if number == count or self.ls[number] < shortest:
                    break
                after = load + self.work[number] * SPEED // speed
                if after > self.end:
                    break
                load = after
                self.next[number] = number + 1
                row.room -= self.ls[number] + margin
                row.numbers.append(number)
        return load

    def _limit(self, number: int) -> None:
        """Gives a sequence, which no vertex holds in parts by speed, to one that holds it by memory alone. It
        has a row of its own."""
        length = self.ls[number]
        for vertex in dict.fromkeys(vertex for level in self.tree.levels[:-1] for vertex in level):
            held = fold.held_pairs(length, self.tree.capacity[slice(*vertex)])
            if min(held) > 0 and sum(held) >= fold.pair_count(length) >= len(held):
                self.next[number] = number + 1
                self.limited.setdefault(vertex, []).append(number)
                time = self.work[number] * SPEED // self.tree.speed(vertex) + self.fixed
                self.limited_time[vertex] = self.limited_time.get(vertex, 0) + time
                return
        refuse(f"sequence {self.order[number]} has {length} tokens, which no set of lanes holds")

    # Single lanes.

    def _lanes(self, load: list[int]) -> list[tuple[Ints, Ints, Ints]]:
        """Gives single lanes the sequences that are left: their numbers, lanes, and rows among those of the
        lane alone."""
        tree, count = self.tree, len(self.tree)
        left = np.flatnonzero(np.array(self.next[:-1]) == np.arange(len(self.ls)))
        if len(left) and self.ls[left[0]] > max(tree.capacity):
            self._limit(int(left[0]))
        # A lane's last row is half empty in the mean.
        self.end = self._end(load, left) + self.fixed // 2
        speed, capacity = np.array(tree.speeds), np.array(tree.capacity)
        rooms = np.zeros((count, _OPEN_MOST), dtype=np.int64)
        opened, loads = np.zeros(count, dtype=np.int64), np.array(load)
        found, kept = [], []
        while len(left) >= min(2 * count, count + _LAST) and opened.max() < _OPEN_MOST:
            block, left = left[:count], left[count:]
            mean = int(self.costs[block].sum()) // count * SPEED
            lane = np.argsort(loads + mean // speed, kind="stable")
            length = self.falling[block]
            fits = rooms[lane] >= length[:, None]
            row = np.where(fits.any(1), fits.argmax(1), opened[lane])
            new = row == opened[lane]
            end = loads[lane] + self.costs[block] * SPEED // speed[lane] + new * self.fixed
            good = (end <= self.end) & (length <= capacity[lane])
            kept.append(block[~good])
            block, lane, row, new, end, length = (x[good] for x in (block, lane, row, new, end, length))
            loads[lane] = end
            rooms[lane[new], row[new]] = capacity[lane[new]]
            rooms[lane, row] -= length
            opened[lane] += new
            found.append((block, lane, row))
        rest = np.concatenate([*kept, left]).tolist()
        open_ = [each[:stop] for each, stop in zip(rooms.tolist(), opened.tolist(), strict=True)]
        return [*found, self._one_by_one(rest, loads.tolist(), open_)]

    def _one_by_one(self, left: list[int], load: list[int], rooms: list[list[int]]) -> tuple[Ints, Ints, Ints]:
        """The sequences that are left, each to the lane that ends first with it, or cut."""
        tree, ls, work, capacity = self.tree, self.ls, self.work, self.tree.capacity
        speed, fastest = tree.speeds, tree.fastest
        latest = self.end * (1000 + _LATE) // 1000
        worth, failed = self.end // _WORTH, 0
        heap = [(each, lane) for lane, each in enumerate(load)]  # an entry is of old where its lane has more
        heapify(heap)
        found: list[tuple[int, int, int]] = []
        for number in left:
            length, cost = ls[number], work[number] * SPEED
            while heap[0][0] != load[heap[0][1]]:
                heappop(heap)
            end, lane = heap[0]
            row = _fitting(rooms[lane], length)
            if row < 0 or speed[lane] < fastest:
                end, lane, row = self._first(length, cost, heap, load, rooms)
                if end > latest and work[number] > worth and failed < _TRIED:
                    if vertex := self._cut(number, lane, load, end):
                        for place in range(*vertex):
                            heappush(heap, (load[place], place))
                        continue
                    failed += 1
            else:
                end += cost // fastest
            if row < 0:
                row = len(rooms[lane])
                rooms[lane].append(capacity[lane])
            rooms[lane][row] -= length
            if heap[0][1] == lane:
                heapreplace(heap, (end, lane))
            else:
                heappush(heap, (end, lane))
            load[lane] = end
            found.append((number, lane, row))
        numbers, lanes, rows = zip(*found, strict=True) if found else ((), (), ())
        return np.array(numbers, int), np.array(lanes, int), np.array(rows, int)

    def _first(
        self, length: int, cost: int, heap: list[tuple[int, int]], load: list[int], rooms: list[list[int]]
    ) -> tuple[int, int, int]:
        """When the lane that ends first with a sequence does, the lane, and the row with room for it (-1: a new
        one). A few of the least busy lanes are looked at."""
        speed, fastest = self.tree.speeds, self.tree.fastest
        first, lane, row = -1, -1, -1
        passed: list[tuple[int, int]] = []
        while heap and (first < 0 or (heap[0][0] < first and len(passed) < _TRIED)):
            each, other = entry = heappop(heap)
            if each != load[other]:
                continue
            passed.append(entry)
            if length > self.tree.capacity[other]:
                continue
            fits = _fitting(rooms[other], length)
            end = each + cost // speed[other] + (self.fixed if fits < 0 else 0)
            if first < 0 or end < first:
                first, lane, row = end, other, fits
            if fits >= 0 and speed[other] == fastest:
                break
        for entry in passed:
            heappush(heap, entry)
        return first, lane, row

    def _cut(self, number: int, lane: int, load: list[int], end: int) -> Vertex | None:
        """Cuts a sequence over the vertex in a lane's node, or around it, on which it ends first, if that is
        before `end`; returns the vertex."""
        tree, length = self.tree, self.ls[number]
        best: Vertex | None = None
        for vertex in tree.near(lane):
            holds, margin = tree.room(vertex)
            if length < self.least * margin or length + margin > holds:
                continue
            time = max(load[slice(*vertex)]) + self.work[number] * SPEED // tree.speed(vertex)
            if time >= end:
                continue
            if not any(row.room >= length + margin for row in self.rows.get(vertex, ())[-_OPEN:]):
                time += self.fixed
            if time < end:
                end, best = time, vertex
        if best is not None:
            added = self._put(number, best)
            load[slice(*best)] = [each + added for each in load[slice(*best)]]
        return best

    # Columns.

    def _columns(self, whole: list[tuple[Ints, Ints, Ints]]) -> SequenceDivision:
        """The pieces of all sequences."""
        numbers: list[int] = []
        spans: list[tuple[int, int, int]] = []  # lanes [first, stop), row
        behind = [0] * len(self.tree)  # the rows of each lane so far
        last: dict[Vertex, int] = {}
        for a, b in sorted({*self.rows, *self.limited}, key=lambda vertex: (vertex[0] - vertex[1], vertex)):
            vertex = a, b
            own = [[number] for number in self.limited.get(vertex, ())]
            own += [row.numbers for row in self.rows.get(vertex, ())]
            for row, members in enumerate(own, behind[a]):
                numbers += members
                spans += [(a, b, row)] * len(members)
            if own:
                last[vertex] = behind[a] + len(own) - 1
                behind[a:b] = [last[vertex] + 1] * (b - a)
        first, stop, rows = np.array(spans, dtype=np.int64).reshape(-1, 3).T
        number, lane, alone = (np.concatenate(each) for each in zip(*whole, strict=True))
        made = self._pieces(
            np.concatenate((np.array(numbers, dtype=np.int64), number)),
            np.concatenate((first, lane)),
            np.concatenate((stop, lane + 1)),
            np.concatenate((rows, alone + np.array(behind)[lane])),
        )
        return _merged(made, self.lengths, self.tree, last)

    def _pieces(self, number: Ints, first: Ints, stop: Ints, row: Ints) -> SequenceDivision:
        """Sequences cut over lanes [first, stop) by speed, or by memory where nothing else fits."""
        tree, sequence = self.tree, self.order[number]
        width = stop - first
        each = np.repeat(np.arange(len(number)), width)
        place = np.arange(len(each)) - np.repeat(np.cumsum(width) - width - first, width)
        before, pairs = np.array(tree.before), (self.lengths[sequence] + 1) // 2
        base, total = before[first][each], (before[stop] - before[first])[each]
        begin = fold.nearest(pairs[each], before[place] - base, total)
        end = fold.nearest(pairs[each], before[place + 1] - base, total)
        by_memory = {one for numbers in self.limited.values() for one in numbers}
        narrow = {*np.unique(each[begin >= end]).tolist()}
        if by_memory:
            narrow |= {*np.flatnonzero(np.isin(number, list(by_memory))).tolist()}
        for which in sorted(narrow):
            a, b = int(first[which]), int(stop[which])
            most = tree.capacity[a:b] if number[which] in by_memory else None
            borders = fold.shared(int(self.lengths[sequence[which]]), tree.speeds[a:b], most)
            begin[each == which], end[each == which] = np.array(borders).T
        return SequenceDivision(sequence=sequence[each], place=place, row=row[each], start=begin, stop=end)


def _merged(
    division: SequenceDivision, lengths: Ints, tree: LaneTree, last: dict[Vertex, int]
) -> SequenceDivision:
    """Merges all that follows the last row of a vertex into that row where all its lanes hold it.

    last: the last row of each vertex of several lanes that has one."""
    if not last:
        return division
    count, rows = len(tree), int(division.row.max()) + 1
    tokens = np.zeros(rows * count, dtype=np.int64)
    np.add.at(tokens, division.row * count + division.place, division.tokens(lengths))
    following = tokens.reshape(rows, count)[::-1].cumsum(0)[::-1]  # from a row on
    fits = following <= np.array(tree.capacity)
    limit = np.full(count, rows)
    for (a, b), row in last.items():
        if fits[row, a:b].all():
            limit[a:b] = np.minimum(limit[a:b], row)
    return replace(division, row=np.minimum(division.row, limit[division.place]))
