"""Layouts of an activation on the devices of one TP group: whole, terms of a sum, or slices.

They are along the one dimension that may be cut; of the others each device has all.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from elasticd_planner.spec.box import Box, Holding, TensorLayout


def whole(devices: Sequence[str], length: int = 1) -> TensorLayout:
    """Each device has all of it; `length` matters where it becomes slices, or has been some."""
    return _layout(devices, length, [(0, length)] * len(devices))


def terms(devices: Sequence[str], length: int = 1) -> TensorLayout:
    """Each device has a term of the sum, of the full length."""
    return _layout(devices, length, [(0, length)] * len(devices), terms=True)


def slices(devices: Sequence[str], widths: Sequence[int]) -> TensorLayout:
    """Devices have consecutive slices, of these widths in their order."""
    return _layout(devices, sum(widths), list(pairwise(accumulate(widths, initial=0))))


def _layout(
    devices: Sequence[str], length: int, ranges: Sequence[tuple[int, int]], *, terms: bool = False
) -> TensorLayout:
    holdings = tuple(
        Holding(device=device, box=Box(start=(start,), stop=(stop,)), partial=device if terms else None)
        for device, (start, stop) in zip(devices, ranges, strict=True)
    )
    return TensorLayout(name="activation", shape=(length,), dtype="any", holdings=holdings)
