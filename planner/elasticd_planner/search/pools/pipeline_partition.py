"""Groups into pipelines so that they take the most micro-batches: exact over counts of equal groups.

`f_d[k]` is the most that d pipelines take from at most `k` groups of each type: f_1 is the best single pipeline
inside k, f_{a+b}[k] = max over j <= k of f_a[j] + f_b[k - j]. Halving d needs about log2 of it. Of the whole
only the one entry at the end is needed, so that two pipelines cost one addition.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from elasticd_planner.grouping.group_types import NEVER
from elasticd_planner.numeric import Ints

Counts = tuple[int, ...]

#: Numbers in one array of a convolution.
AT_ONCE = 1 << 18


class Partition:
    """`single`: micro-batches of one pipeline by counts, NEVER where it is none."""

    def __init__(self, single: Ints) -> None:
        self.single = single
        self.full: Counts = tuple(n - 1 for n in single.shape)
        within = single
        for axis in range(single.ndim):
            within = np.maximum.accumulate(within, axis=axis)
        self._best: dict[int, Ints] = {1: within}

    def most(self, pipelines: int) -> int:
        """Micro-batches that `pipelines` pipelines take, negative where there are no so many."""
        if pipelines == 1:
            return int(self._best[1][self.full])
        half = pipelines // 2
        return int(self._joined(half, pipelines - half, self.full).max())

    def split(self, pipelines: int, within: Counts | None = None) -> list[Counts]:
        """The counts of each pipeline of a best split."""
        bound = self.full if within is None else within
        if pipelines == 1:
            inside = self.single[tuple(slice(0, n + 1) for n in bound)]
            where = np.unravel_index(int(inside.argmax()), inside.shape)
            return [tuple(int(i) for i in where)]
        half = pipelines // 2
        sums = self._joined(half, pipelines - half, bound)
        where = np.unravel_index(int(sums.argmax()), sums.shape)
        first = tuple(int(i) for i in where)
        rest = tuple(n - i for n, i in zip(bound, first, strict=True))
        return self.split(half, first) + self.split(pipelines - half, rest)

    def _joined(self, a: int, b: int, bound: Counts) -> Ints:
        """f_a[j] + f_b[bound - j] for all j."""
        inside = tuple(slice(0, n + 1) for n in bound)
        return self._table(a)[inside] + np.flip(self._table(b)[inside])

    def _table(self, pipelines: int) -> Ints:
        if pipelines not in self._best:
            half = pipelines // 2
            self._best[pipelines] = self._convolved(self._table(half), self._table(pipelines - half))
        return self._best[pipelines]

    def _convolved(self, a: Ints, b: Ints) -> Ints:
        """max over j of a[j] + b[k - j]; only j at which `a` grows count. Where `a` is `b`, j or k - j takes
        half of k at most along the longest axis."""
        grows = a > NEVER // 2
        for axis in range(a.ndim):
            before = np.full_like(a, NEVER)
            target = [slice(None)] * a.ndim
            source = [slice(None)] * a.ndim
            target[axis], source[axis] = slice(1, None), slice(0, -1)
            before[tuple(target)] = a[tuple(source)]
            grows &= a > before
        if a is b:
            longest = int(np.argmax(a.shape))
            grows[(slice(None),) * longest + (slice((a.shape[longest] + 1) // 2, None),)] = False
        # With room for sums behind each axis but the first, a shift by j is one shift of the flat arrays.
        shape = (a.shape[0], *(2 * n - 1 for n in a.shape[1:]))
        inside = tuple(slice(0, n) for n in a.shape)
        flat = np.full(2 * math.prod(shape) - 1, 2 * NEVER)
        flat[math.prod(shape) - 1 :].reshape(shape)[inside] = b
        shifts = np.ravel_multi_index(np.nonzero(grows), shape)
        values = a[grows]
        windows = sliding_window_view(flat, math.prod(shape))[::-1]  # [shift, at]: b[at - shift]
        found = np.full(math.prod(shape), 2 * NEVER)
        step = max(1, AT_ONCE // len(found))
        for start in range(0, len(shifts), step):
            some = windows[shifts[start : start + step]] + values[start : start + step, None]
            np.maximum(found, some.max(axis=0), out=found)
        return found.reshape(shape)[inside].copy()
