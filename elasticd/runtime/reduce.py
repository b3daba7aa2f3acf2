"""Gradient reduction by holder set: one all-reduce of a flat buffer for each set of devices.

The sets, their pieces and who counts come from the layouts (elasticd_planner.reduction), so that replicas,
unequal shards, tied copies and pipelines of any shape are one case.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from elasticd_planner.boxes import Box
from elasticd_planner.reduction import Reduction
from torch import Tensor, nn

from elasticd.runtime.groups import Group

Parameters = Mapping[str, tuple[Box, nn.Parameter]]


class GradientReducer:
    """Runs the reductions that one device takes part in."""

    def __init__(
        self,
        device: str,
        reductions: tuple[Reduction, ...],
        groups: Mapping[tuple[str, ...], Group],
        parameters: Parameters,
    ) -> None:
        self._device, self._groups, self._parameters = device, groups, parameters
        self._mine = reductions

    def __call__(self) -> None:
        """Makes every local gradient the sum over all that hold a term of it."""
        for reduction in self._mine:
            if len(reduction.devices) == 1:
                continue
            views = [(self._gradient(p.name, p.box), self._device in p.counting) for p in reduction.pieces]
            for dtype in dict.fromkeys(view.dtype for view, _ in views):
                self._reduce([v for v in views if v[0].dtype == dtype], self._groups[reduction.devices])

    @staticmethod
    def _reduce(views: list[tuple[Tensor, bool]], group: Group) -> None:
        flat = torch.cat(
            [view.reshape(-1) if counts else view.new_zeros(view.numel()) for view, counts in views]
        )
        group.all_reduce(flat)
        for (view, _), part in zip(views, flat.split([view.numel() for view, _ in views]), strict=True):
            view.copy_(part.view(view.shape))

    def squares(self) -> float:
        """The sum of squares of the gradients that this device owns: each piece counts once in the job."""
        total = torch.zeros((), dtype=torch.float64)
        for reduction in self._mine:
            if reduction.owner == self._device:
                for piece in reduction.pieces:
                    total += self._gradient(piece.name, piece.box).double().square().sum().cpu()
        return float(total)

    def _gradient(self, name: str, box: Box) -> Tensor:
        held, parameter = self._parameters[name]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad[box.slices(held)]
