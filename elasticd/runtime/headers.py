"""What goes before an activation: its shape and the ids of its samples, as a tensor that both ends can size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: Dimensions that an activation may have.
DIMS = 4


def empty_header(samples: int) -> Tensor:
    """Room for the header of a micro-batch of so many samples."""
    return torch.empty(1 + DIMS + samples, dtype=torch.int64)


def pack_header(shape: Sequence[int], ids: Sequence[int]) -> Tensor:
    if len(shape) > DIMS:
        raise ValueError(f"an activation between blocks may have {DIMS} dimensions, not {len(shape)}")
    return torch.tensor([len(shape), *shape, *([0] * (DIMS - len(shape))), *ids], dtype=torch.int64)


def unpack_header(header: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    values = header.tolist()
    return tuple(values[1 : 1 + values[0]]), tuple(values[1 + DIMS :])
