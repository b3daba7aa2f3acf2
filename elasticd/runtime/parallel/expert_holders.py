"""The device that computes each pair of a row and an expert, where several devices may have an expert.

The rows of an expert on several devices are divided in the parts that the plan says, by the rows' numbers: so
nobody needs to know of others' rows, and a pass that is made again divides them as before. A multiplication
spreads numbers over [0, 2 ** 16) (Knuth, 1973, section 6.4), so that any run of rows is divided in these parts.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from elasticd_planner.spec.plan import HeldExperts, SplitExperts
from torch import Tensor

#: Rows are told apart by so many numbers; an odd factor near their golden section spreads consecutive ones.
_WHOLE, _FACTOR = 1 << 16, 40503


class ExpertHolders:
    """The devices that have each expert of a block, and the rows of it that each takes."""

    def __init__(self, held: HeldExperts, splits: SplitExperts, count: int) -> None:
        """
        Args:
            held: by device its experts, in the order in which it has them.
            splits: of experts on several devices their parts; of those that are not named the parts are equal.
            count: of all experts.
        """
        self.held, self.count = held, count
        holders = [[place for place, own in enumerate(held) if expert in own] for expert in range(count)]
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
