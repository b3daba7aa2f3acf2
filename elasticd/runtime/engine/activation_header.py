"""The header of an activation between stages: its type, shape and sample ids, in a tensor of a known size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

#: The most dimensions of an activation.
DIMS = 4
#: Types of an activation, by their number in a header; 0 is the type of the model, `Model.dtype`.
_TYPES = (None, torch.float64, torch.float32, torch.bfloat16, torch.float16)
#: The first number of a header is the count of dimensions plus the number of the type times this.
_TYPE = 1 << 8


class Header(NamedTuple):
    """What a stage knows of an activation before it is here."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    ids: tuple[int, ...]  #: of its samples


def empty_header(samples: int) -> Tensor:
    """A tensor to receive the header of a micro-batch of `samples` samples."""
    return torch.empty(1 + DIMS + samples, dtype=torch.int64)


def pack_header(x: Tensor, ids: Sequence[int], own: torch.dtype) -> Tensor:
    """The header of an activation.

    Args:
        x: the activation.
        ids: of its samples.
        own: the type of the model, which both ends know.

    Raises:
        ValueError: an activation of this type or number of dimensions cannot pass between stages.
    """
    if x.dim() > DIMS:
        raise ValueError(f"an activation between blocks may have {DIMS} dimensions, not {x.dim()}")
    if x.dtype != own and x.dtype not in _TYPES:
        known = ", ".join(str(dtype) for dtype in _TYPES[1:])
        raise ValueError(f"an activation between blocks may be of {known}, not of {x.dtype}")
    kind = 0 if x.dtype == own else _TYPES.index(x.dtype)
    return torch.tensor([x.dim() + _TYPE * kind, *x.shape, *([0] * (DIMS - x.dim())), *ids], dtype=torch.int64)


def unpack_header(header: Tensor, own: torch.dtype) -> Header:
    """Reads what `pack_header` made, with the same `own`."""
    first, *values = header.tolist()
    kind, dims = divmod(first, _TYPE)
    return Header(_TYPES[kind] or own, tuple(values[:dims]), tuple(values[DIMS:]))
