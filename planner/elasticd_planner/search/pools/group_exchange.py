"""Pipelines that exchange groups: a found plan improved, each group counted as what it is.

The search counts groups of nearly equal cost as the worse one, so that all partitions can be looked at. Here
two pipelines exchange a group for a group, or one gives a group to another, while that makes the step shorter:
all such changes are costed at once, by the lines of `pipeline_candidates`. Where none makes it shorter the one
is taken that would if micro-batches could be divided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import permutations

import numpy as np

from elasticd_planner.grouping.group_types import Columns, Rules
from elasticd_planner.grouping.node_partitions import GroupType
from elasticd_planner.numeric import EQUAL, Floats, Ints
from elasticd_planner.search.pools.pipeline_candidates import PipelineCandidates
from elasticd_planner.search.task import Chained, Found, NamedGroup, Task

#: Plans that are improved: of so many pipelines and groups at most. Changes made at most.
PIPELINES, GROUPS, CHANGES = 8, 48, 12

#: Changes end at this relative distance from the bound.
CLOSE = 2e-4

#: Halvings of an interval of seconds.
HALVINGS = 40

#: Groups of a pipeline by column.
Counts = tuple[int, ...]


class Exchange:
    """One plan being improved. `types` of the groups of the plan, by group."""

    def __init__(self, task: Task, rules: Rules, found: Found, types: Mapping[NamedGroup, GroupType]) -> None:
        self.task, self.found = task, found
        groups = [group for chained in found.pipelines for group in chained.groups]
        columns = Columns(task.cost, rules, len(groups))
        self._column = {group: columns.of(types[group]) for group in groups}
        self.columns, self.rules = columns.columns, rules
        self._lines: dict[Counts, tuple[Floats, Floats]] = {}

    def improved(self, seconds: float, low: float) -> Found:
        """The plan after all changes, with its seconds before what comes after the pipelines: `seconds` now;
        `low` that cannot be beaten."""
        vectors = [self._counts(chained.groups) for chained in self.found.pipelines]
        self._cost(vectors)
        value = self._values([vectors])[0]
        for _ in range(CHANGES):
            if value[0] <= low * (1 + CLOSE):
                break
            listed = _changed(vectors)
            if not listed:
                break
            self._cost([v for change in listed for v in change])
            values = self._values(listed)
            best = min(range(len(listed)), key=lambda i: values[i])
            if not _less(values[best], value):
                break
            vectors, value = listed[best], values[best]
        if value[0] >= seconds * (1 - EQUAL):
            return replace(self.found, seconds=seconds)
        return self._made(vectors, value[0])

    def _counts(self, groups: Sequence[NamedGroup]) -> Counts:
        counts = [0] * len(self.columns)
        for group in groups:
            counts[self._column[group]] += 1
        return tuple(counts)

    def _cost(self, vectors: Sequence[Counts]) -> None:
        """Lines of pipelines that are not known yet."""
        new = [vector for vector in dict.fromkeys(vectors) if vector not in self._lines]
        if not new:
            return
        shapes = PipelineCandidates(self.columns, (1,) * len(self.columns), self.rules, listed=np.array(new).T)
        none = np.full(shapes.caps.shape[1], np.inf)
        self._lines.update(dict.fromkeys(new, (none, none)))
        for row, index in enumerate(shapes.rows.tolist()):
            self._lines[new[index]] = shapes.caps[row], shapes.sums[row]

    def _values(self, plans: Sequence[Sequence[Counts]]) -> list[tuple[float, float]]:
        """Seconds of plans, micro-batches being whole and not; inf where a pipeline is none."""
        lines = [[self._lines[vector] for vector in plan] for plan in plans]
        caps = np.array([[caps for caps, _ in plan] for plan in lines])
        sums = np.array([[sums for _, sums in plan] for plan in lines])
        least = np.array([[sum(v) if self.rules.deep else 1 for v in plan] for plan in plans])
        found = [self._seconds(caps, sums, least, whole=whole) for whole in (True, False)]
        return list(zip(*(values.tolist() for values in found), strict=True))

    def _seconds(self, caps: Floats, sums: Floats, least: Ints, *, whole: bool) -> Floats:
        """The least seconds in which each plan's pipelines take the batch: [plan, pipeline, line] to [plan]."""
        rules = self.rules
        lines = np.where(np.isfinite(caps), caps, 1.0)
        offset = np.where(np.isfinite(caps) & np.isfinite(sums), sums, np.inf)

        def enough(limit: Floats) -> Ints:
            done = (limit[:, None, None] * (1 + EQUAL) - offset) / lines + 1
            taken = (np.floor(done) if whole else done).max(axis=2)
            possible: Ints = (taken >= least).all(axis=1) & (taken.sum(axis=1) >= rules.most)
            return possible

        high = np.full(len(caps), float(rules.most * rules.layers * max(c.block for c in self.columns) * 2))
        low = np.zeros(len(caps))
        found = np.where(enough(high), high, np.inf)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            fits = enough(middle)
            low, high = np.where(fits, low, middle), np.where(fits, middle, high)
        return np.where(np.isfinite(found), high, np.inf)

    def _made(self, vectors: Sequence[Counts], seconds: float) -> Found:
        """The plan with its groups dealt to these pipelines."""
        free: dict[int, list[NamedGroup]] = {}
        for chained in self.found.pipelines:
            for group in chained.groups:
                free.setdefault(self._column[group], []).append(group)
        made = []
        for vector in vectors:
            groups = [free[i].pop(0) for i in self._order(vector)]
            caps, sums = (line[np.isfinite(self._lines[vector][0])] for line in self._lines[vector])
            limit = seconds * (1 + EQUAL)
            count = int(((limit - sums) / caps + 1).max())
            made.append(Chained(groups=tuple(groups), micro_batches=max(1, count)))
        return Found(pipelines=tuple(made), seconds=seconds)

    def _order(self, vector: Counts) -> list[int]:
        """Columns of the stages: slow ones first."""
        listed = [index for index, count in enumerate(vector) for _ in range(count)]
        return sorted(listed, key=lambda index: -self.columns[index].block)


def _changed(vectors: Sequence[Counts]) -> list[list[Counts]]:
    """Plans that differ by one group, or two exchanged: [plan][pipeline]."""
    found = []
    for p, q in permutations(range(len(vectors)), 2):
        mine, theirs = vectors[p], vectors[q]
        have = [i for i, n in enumerate(mine) if n]
        other = [i for i, n in enumerate(theirs) if n] if p < q else []
        for a in have:
            for b in (None, *other):
                if a == b or (b is None and sum(mine) == 1):
                    continue
                one, two = list(mine), list(theirs)
                one[a] -= 1
                two[a] += 1
                if b is not None:
                    one[b] += 1
                    two[b] -= 1
                changed = list(vectors)
                changed[p], changed[q] = tuple(one), tuple(two)
                found.append(changed)
    return found


def _less(one: tuple[float, float], two: tuple[float, float]) -> bool:
    """Whether one value is below another by more than rounding: whole micro-batches count first."""
    if one[0] < two[0] * (1 - 1e-7):
        return True
    return one[0] <= two[0] * (1 + 1e-7) and one[1] < two[1] * (1 - 1e-7)
