"""The header of an activation between stages: types, shapes, names and sample ids, in a tensor of a known size.

The header of a single tensor is its count of dimensions and its type, `DIMS` sizes, and the ids. That of a
bundle of named tensors is the negative count of its tensors, a record for each (dimensions, type, whether it
needs a gradient, and the length of its name; the sizes; the name), and the ids. A receiver has room for either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from elasticd.runtime.model.bundle import (
    DIMS,
    FLOATING,
    NAME,
    OTHERS,
    TENSORS,
    Bundle,
    unfit,
    unfit_tensor,
)

#: Types of a tensor, by their number in a header; 0 is the type of the model, `Model.dtype`.
_TYPES = (None, *FLOATING, *OTHERS)
#: A first number has the count of dimensions, and the others times these: the type, whether the tensor needs a
#: gradient, the bytes of its name.
_TYPE, _NEEDS, _LENGTH = 1 << 8, 1 << 16, 1 << 17
#: Numbers that hold a name.
_NAME = NAME // 8
#: Numbers of the record of a named tensor.
_RECORD = 1 + DIMS + _NAME


class TensorHeader(NamedTuple):
    """The description of a tensor that a stage has before the tensor arrives."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    needs: bool  #: whether it needs a gradient


class Header(NamedTuple):
    """The description of an activation that a stage has before the activation arrives."""

    parts: TensorHeader | dict[str, TensorHeader]  #: of a single tensor, or by name
    ids: tuple[int, ...]  #: of its samples


def empty_header(samples: int) -> Tensor:
    """A tensor with room for the header of a micro-batch of `samples` samples."""
    return torch.empty(1 + TENSORS * _RECORD + samples, dtype=torch.int64)


def pack_header(bundle: Bundle, ids: Sequence[int], own: torch.dtype) -> Tensor:
    """The header of an activation.

    Args:
        bundle: the activation.
        ids: of its samples.
        own: the type of the model, which both ends know.

    Raises:
        ValueError: this activation cannot pass between stages.
    """
    if isinstance(bundle, Tensor):
        return torch.tensor([*_numbers(bundle, own, FLOATING), *ids], dtype=torch.int64)
    if reason := unfit(bundle):
        raise ValueError(f"an activation has {reason}")
    numbers = [-len(bundle)]
    for name, x in bundle.items():
        first, *shape = _numbers(x, own, (*FLOATING, *OTHERS))
        text = name.encode()
        words = [
            int.from_bytes(text[at : at + 8].ljust(8, b"\0"), "little", signed=True) for at in range(0, NAME, 8)
        ]
        numbers += [first + _NEEDS * x.requires_grad + _LENGTH * len(text), *shape, *words]
    return torch.tensor([*numbers, *ids], dtype=torch.int64)


def _numbers(x: Tensor, own: torch.dtype, types: Sequence[torch.dtype]) -> list[int]:
    """Dimensions with the type, and the sizes."""
    dims, dtype = x.dim(), x.dtype
    if dims > DIMS or (dtype != own and dtype not in types):
        raise ValueError(f"an activation has {unfit_tensor(x, types)}")
    kind = 0 if dtype == own else _TYPES.index(dtype)
    return [dims + _TYPE * kind, *x.shape, *([0] * (DIMS - dims))]


def unpack_header(header: Tensor, samples: int, own: torch.dtype) -> Header:
    """Reads what `pack_header` made of so many samples, with the same `own`."""
    words = header.numpy()
    first, *values = words[: 1 + DIMS + samples].tolist()  # of a single tensor that is all
    if first >= 0:
        kind, dims = divmod(first, _TYPE)
        return Header(TensorHeader(_TYPES[kind] or own, tuple(values[:dims]), True), tuple(values[DIMS:]))
    end = 1 - first * _RECORD
    values = words[: end + samples].tolist()
    parts: dict[str, TensorHeader] = {}
    for at in range(1, end, _RECORD):
        about, *rest = values[at : at + _RECORD]
        length, about = divmod(about, _LENGTH)
        needs, about = divmod(about, _NEEDS)
        kind, dims = divmod(about, _TYPE)
        text = b"".join(word.to_bytes(8, "little", signed=True) for word in rest[DIMS:])
        parts[text[:length].decode()] = TensorHeader(_TYPES[kind] or own, tuple(rest[:dims]), bool(needs))
    return Header(parts, tuple(values[end:]))
