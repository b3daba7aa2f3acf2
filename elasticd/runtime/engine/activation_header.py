"""What goes before an activation: its type, shape and sample ids, as a tensor that both ends can size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

#: Dimensions that an activation may have.
DIMS = 4
#: Types that an activation may have, by their number in a header; 0 is the model's own (`Model.dtype`).
_TYPES = (None, torch.float64, torch.float32, torch.bfloat16, torch.float16)
#: The first number of a header: the count of dimensions, and the type's number times this.
_TYPE = 1 << 8


class Header(NamedTuple):
    """Of an activation: its type, its shape, and the ids of its samples."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    ids: tuple[int, ...]


def empty_header(samples: int) -> Tensor:
    """Room for the header of a micro-batch of so many samples."""
    return torch.empty(1 + DIMS + samples, dtype=torch.int64)


def pack_header(x: Tensor, ids: Sequence[int], own: torch.dtype) -> Tensor:
    """The header of an activation; `own` is the type of the model that both ends run.

    Raises ValueError for an activation that cannot pass between stages."""
    if x.dim() > DIMS:
        raise ValueError(f"an activation between blocks may have {DIMS} dimensions, not {x.dim()}")
    if x.dtype != own and x.dtype not in _TYPES:
        known = ", ".join(str(dtype) for dtype in _TYPES[1:])
        raise ValueError(f"an activation between blocks may be of {known}, not of {x.dtype}")
    kind = 0 if x.dtype == own else _TYPES.index(x.dtype)
    return torch.tensor([x.dim() + _TYPE * kind, *x.shape, *([0] * (DIMS - x.dim())), *ids], dtype=torch.int64)


def unpack_header(header: Tensor, own: torch.dtype) -> Header:
    """What `pack_header` made, with the same `own`."""
    first, *values = header.tolist()
    kind, dims = divmod(first, _TYPE)
    return Header(_TYPES[kind] or own, tuple(values[:dims]), tuple(values[DIMS:]))
