"""`pad`: makes a batch of samples, of which sequences are padded to the longest, as torch's `default_collate`
makes one of samples of like shape."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

#: Values that pad the keys of a sample: targets get the value that losses ignore. All other keys are padded by
#: zero.
PADDING = {"targets": -100, "labels": -100}

#: The key of a sample's, and a batch's, counts by modality, as {"image": 3}.
MODALITIES = "modalities"

Batch = Any
Collate = Callable[[Sequence[Any]], Batch]

#: What to do where samples make no padded batch.
REMEDY = "give DataOptions(collate=...) a function that makes a batch of them"


#: What makes tensors of the lists of a Hugging Face dataset.
LISTS = 'call dataset.set_format("torch") (of a stream with_format("torch"))'
_UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)


class Unlike(ValueError):
    """Samples that make no batch, because one differs from the first."""

    def __init__(self, place: int, why: str) -> None:
        super().__init__(why)
        self.place = place  # of the sample that differs


def pad(samples: Sequence[Any]) -> Any:
    """Makes a batch of samples, as torch's `default_collate` does, and pads sequences.

    Tensors and arrays of one shape, numbers and labels are stacked; mappings and tuples are collated part by
    part; text is listed. Tensors of one dimension may differ in length: they are padded at the end to the
    longest one, [samples, tokens], by zero, and by -100 under the keys "targets" and "labels". Counts under the
    key "modalities", as {"image": 3}, are summed.

    Raises:
        Unlike: the samples make no batch.
    """
    return _batch(samples, ())


def _batch(parts: Sequence[Any], keys: tuple[str, ...]) -> Any:
    """Collates one part of all samples, the one under `keys`."""
    first = parts[0]
    if isinstance(first, Mapping):
        if keys[-1:] == (MODALITIES,) and all(isinstance(part, Mapping) for part in parts):
            return summed(parts)
        _alike(parts, keys, lambda part: isinstance(part, Mapping) and part.keys() == first.keys(), described)
        return {key: _batch([part[key] for part in parts], (*keys, str(key))) for key in first}
    if isinstance(first, tuple):
        _alike(parts, keys, lambda part: isinstance(part, tuple) and len(part) == len(first), described)
        made = [_batch(part, (*keys, str(place))) for place, part in enumerate(zip(*parts, strict=True))]
        return type(first)(*made) if hasattr(first, "_fields") else tuple(made)
    if isinstance(first, Tensor | np.ndarray):
        _alike(parts, keys, lambda part: isinstance(part, Tensor | np.ndarray), described)
        try:
            tensors = [torch.as_tensor(part) for part in parts]
        except TypeError as error:  # an array of text or of objects
            raise Unlike(0, f"{where(keys)}: {error}: {REMEDY}") from error
        if all(tensor.dim() == 1 for tensor in tensors):
            value = PADDING.get(keys[-1], 0) if keys else 0
            if value:
                tensors = list(map(signed, tensors))
            try:
                common = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
            except RuntimeError as error:  # torch promotes no uint16 to other types
                raise Unlike(0, f"{where(keys)}: {error}: {REMEDY}") from error
            tensors = [tensor.to(common) for tensor in tensors]
            if value and len({len(tensor) for tensor in tensors}) > 1 and not _holds(common, value):
                text = str(common).removeprefix("torch.")
                raise Unlike(0, f"{where(keys)}: {value} is no {text}, to pad the shorter with: {REMEDY}")
            return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)
        shape = tensors[0].shape
        _alike(
            tensors, keys, lambda tensor: tensor.shape == shape, lambda tensor: f"shape {tuple(tensor.shape)}"
        )
        return torch.stack(tensors)
    kind = _NUMBERS if isinstance(first, _NUMBERS) else type(first)
    _alike(parts, keys, lambda part: isinstance(part, kind), described)
    try:
        return default_collate(list(parts))
    except (TypeError, RuntimeError, ValueError) as error:
        remedy = f"{REMEDY}, or {LISTS}" if isinstance(first, list) else REMEDY
        raise Unlike(
            0, f"{where(keys)}: a {type(first).__name__} goes into no batch ({error}): {remedy}"
        ) from error


def signed(targets: Tensor) -> Tensor:
    """Targets in a type that has -100, which losses ignore, and that torch's losses take: unsigned ones as
    int64."""
    return targets.to(torch.int64) if targets.dtype in _UNSIGNED else targets


def _holds(dtype: torch.dtype, value: int) -> bool:
    """Returns True if a tensor of this type can hold the value."""
    if dtype.is_floating_point or dtype.is_complex:
        return True
    return dtype is not torch.bool and torch.iinfo(dtype).min <= value


def _alike(
    parts: Sequence[Any], keys: tuple[str, ...], like: Callable[[Any], bool], said: Callable[[Any], str]
) -> None:
    for place, part in enumerate(parts):
        if not like(part):
            raise Unlike(place, f"{where(keys)}: {said(part)} beside {said(parts[0])}: {REMEDY}")


#: Python's and numpy's go into one batch.
_NUMBERS = (int, float, np.number, np.bool_)


def where(keys: tuple[str, ...]) -> str:
    """A part of a sample for people, by its keys."""
    return ".".join(keys) or "the sample"


def described(part: Any) -> str:
    """A part of a sample for people."""
    if isinstance(part, Mapping):
        return f"the keys {', '.join(map(str, part))}"
    if isinstance(part, Tensor | np.ndarray):
        return f"shape {tuple(part.shape)}"
    return f"a {type(part).__name__}" + (f" of {len(part)}" if isinstance(part, tuple) else "")


def fresh(part: Any) -> Any:
    """A copy of a sample, or of a part of it, that `collate` may change: of mappings, lists and tuples, and of
    tensors and arrays in them. Anything else is the same object."""
    if isinstance(part, Tensor | np.ndarray):
        return part.clone() if isinstance(part, Tensor) else part.copy()
    if isinstance(part, tuple):
        parts = map(fresh, part)
        return type(part)(*parts) if hasattr(part, "_fields") else tuple(parts)
    if isinstance(part, MutableMapping | list):
        copied = copy.copy(part)
        for key, inner in part.items() if isinstance(part, MutableMapping) else enumerate(part):
            if not isinstance(inner, int | float | str | bytes):
                copied[key] = fresh(inner)
        return copied
    return part


def is_text(part: Any) -> bool:
    """Returns True if a part of a sample is text, or has text in it; or is None, as an empty column has."""
    if isinstance(part, Mapping):
        return any(map(is_text, part.values()))
    if isinstance(part, list | tuple) and part:
        return is_text(part[0])
    return part is None or isinstance(part, str | bytes)


def untokenized(sample: Any) -> str:
    """Returns why columns of a dataset's sample are no tensors, with the remedy; or "" where all are."""
    named = sample.items() if isinstance(sample, Mapping) else ()
    text = text_parts(sample)
    lists = [str(name) for name, part in named if isinstance(part, list) and str(name) not in text]
    if lists:
        return f"{', '.join(lists)}: lists, no tensors: {LISTS}"
    return f"{', '.join(text)}: text, no tensors: tokenize it, then {LISTS}" if text else ""


def text_parts(sample: Any) -> list[str]:
    """The names of a sample's parts that are text."""
    named = sample.items() if isinstance(sample, Mapping) else ()
    return [str(name) for name, part in named if is_text(part)]


def summed(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """The counts of all samples together, by name."""
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)
