"""The device that computes each pair of a row and an expert, where several devices may have an expert.

Members of a lane that has all experts know all rows of a pass. They divide the rows of experts on several of
them so that their work is even in that pass, by the slowdowns in the plan; the counts are the same on all.

Without slowdowns, and where lanes share experts, the rows of an expert on several devices are divided in the
parts that the plan says, by the rows' numbers: so nobody needs to know of others' rows. A multiplication
spreads numbers over [0, 2 ** 16) (Knuth, 1973, section 6.4), so that any run of rows is divided in these parts.

Either way a pass that is made again divides its rows as before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from elasticd_planner.spec.expert_load import divided, holders_of
from elasticd_planner.spec.plan import HeldExperts, SplitExperts
from torch import Tensor

#: Rows are told apart by so many numbers; an odd factor near their golden section spreads consecutive ones.
_WHOLE, _FACTOR = 1 << 16, 40503


class ExpertHolders:
    """The devices that have each expert of a block, and the rows of it that each takes."""

    def __init__(
        self, held: HeldExperts, splits: SplitExperts, count: int, slowdowns: Sequence[int] = ()
    ) -> None:
        """
        Args:
            held: by device its experts, in the order in which it has them.
            splits: of experts on several devices their parts; of those that are not named the parts are equal.
            count: of all experts.
            slowdowns: of the devices, by which `runs` divides rows; empty: it cannot.
        """
        self.held, self.count, self.slowdowns = held, count, tuple(slowdowns)
        holders = self._holders = holders_of(held, count)
        parts = {expert: [1] * len(places) for expert, places in enumerate(holders)}
        parts |= {expert: own for expert, *own in splits}
        most = max(map(len, holders))
        # Numbers that name no expert, as -1 or `count`, are nobody's.
        self._places = torch.full((count + 2, most), -1)
        self._ends = torch.full((count + 2, most - 1), _WHOLE)
        for expert, places in enumerate(holders):
            self._places[expert, : len(places)] = torch.tensor(places)
            total = sum(parts[expert])
            for at, end in enumerate([*accumulate(parts[expert])][:-1]):
                self._ends[expert, at] = round(_WHOLE * end / total)

    def runs(self, counts: Sequence[int], place: int) -> Iterator[tuple[int, int]]:
        """The pairs that a device computes of a pass, of all that name an expert in the order of the experts:
        where runs of them begin and end. Devices that give the same counts divide all pairs.

        Args:
            counts: the pairs of each expert.
            place: of the device.
        """
        parts = {expert: own for expert, *own in divided(counts, self.held, self.slowdowns)}
        begin = first = stop = 0  # of the expert, and of the run
        for expert, count in enumerate(counts):
            on = self._holders[expert]
            if place in on and count:
                at, own = on.index(place), parts.get(expert, [count])
                before = math.fsum(own[:at])
                start = begin + round(before)
                end = begin + (count if at == len(own) - 1 else round(before + own[at]))
                if start != stop:
                    if first < stop:
                        yield first, stop
                    first = start
                stop = end
            begin += count
        if first < stop:
            yield first, stop

    def of(self, index: Tensor) -> Tensor:
        """The place of the device that computes each pair; -1 of an expert that no device has.

        Args:
            index: the experts of each row [rows, k], from -1 to `count`.
        """
        if self._places.device != index.device:
            self._places, self._ends = self._places.to(index.device), self._ends.to(index.device)
        if not self._ends.shape[1]:
            return self._places[index, 0]
        number = torch.arange(len(index), device=index.device)[:, None, None] * _FACTOR % _WHOLE
        return self._places[index, (number >= self._ends[index]).sum(-1)]
