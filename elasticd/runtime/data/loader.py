"""A rank's view of the data: samples of a map-style dataset, collated, and a record of what was asked for.

`pad` makes a batch of samples where the user gives no function for it. Sample ids go with the activations from
stage to stage, so that the vote's hash proves which samples a forward pass really saw.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from elasticd.runtime.data.prefetch import Dataset, SampleError
from elasticd.runtime.data.step_samples import Samples

#: What pads each key of a sample: targets by what the loss leaves out, all else by zero.
PADDING = {"targets": -100, "labels": -100}

#: The key under which samples and batches count their modalities, as {"image": 3}.
MODALITIES = "modalities"

#: How many of the first samples may stand in for a micro-batch of which none can be read.
_STAND_INS = 16

Batch = Any
Collate = Callable[[Sequence[Any]], Batch]


class Unlike(ValueError):
    """Samples that make no batch; `place` is the one that is unlike the first."""

    def __init__(self, place: int, why: str) -> None:
        super().__init__(why)
        self.place = place


def pad(samples: Sequence[Any]) -> Any:
    """A batch as torch's `default_collate` makes it: tensors and arrays of one shape, numbers and labels are
    stacked, mappings and tuples are collated part by part, text is listed. Sequences, tensors of one
    dimension, may be of unequal length: they are padded at the end to the longest of them, [samples, tokens],
    by zero; those with the key "targets" or "labels" by -100. What samples count under "modalities", as
    {"image": 3}, is summed.

    Raises Unlike for samples that make no batch."""
    return _batch(samples, ())


def _batch(parts: Sequence[Any], keys: tuple[str, ...]) -> Any:
    """One part of all samples, which is at these keys of each."""
    first = parts[0]
    if isinstance(first, Mapping):
        if keys[-1:] == (MODALITIES,) and all(isinstance(part, Mapping) for part in parts):
            return _summed(parts)
        _alike(parts, keys, lambda part: isinstance(part, Mapping) and part.keys() == first.keys(), _described)
        return {key: _batch([part[key] for part in parts], (*keys, str(key))) for key in first}
    if isinstance(first, tuple):
        _alike(parts, keys, lambda part: isinstance(part, tuple) and len(part) == len(first), _described)
        made = [_batch(part, (*keys, str(place))) for place, part in enumerate(zip(*parts, strict=True))]
        return type(first)(*made) if hasattr(first, "_fields") else tuple(made)
    if isinstance(first, Tensor | np.ndarray):
        _alike(parts, keys, lambda part: isinstance(part, Tensor | np.ndarray), _described)
        try:
            tensors = [torch.as_tensor(part) for part in parts]
        except TypeError as error:  # an array of text or of objects
            raise Unlike(0, f"{_where(keys)}: {error}: {_REMEDY}") from error
        if all(tensor.dim() == 1 for tensor in tensors):
            value = PADDING.get(keys[-1], 0) if keys else 0
            common = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
            tensors = [tensor.to(common) for tensor in tensors]
            if value and len({len(tensor) for tensor in tensors}) > 1 and not _holds(common, value):
                text = str(common).removeprefix("torch.")
                raise Unlike(0, f"{_where(keys)}: {value} is no {text}, to pad the shorter with: {_REMEDY}")
            return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)
        shape = tensors[0].shape
        _alike(
            tensors, keys, lambda tensor: tensor.shape == shape, lambda tensor: f"shape {tuple(tensor.shape)}"
        )
        return torch.stack(tensors)
    kind = _NUMBERS if isinstance(first, _NUMBERS) else type(first)
    _alike(parts, keys, lambda part: isinstance(part, kind), _described)
    try:
        return default_collate(list(parts))
    except (TypeError, RuntimeError, ValueError) as error:
        raise Unlike(
            0, f"{_where(keys)}: a {type(first).__name__} goes into no batch ({error}): {_REMEDY}"
        ) from error


def _holds(dtype: torch.dtype, value: int) -> bool:
    """Whether tensors of this type can have the value."""
    if dtype.is_floating_point or dtype.is_complex:
        return True
    return dtype is not torch.bool and torch.iinfo(dtype).min <= value


def _alike(
    parts: Sequence[Any], keys: tuple[str, ...], like: Callable[[Any], bool], said: Callable[[Any], str]
) -> None:
    for place, part in enumerate(parts):
        if not like(part):
            raise Unlike(place, f"{_where(keys)}: {said(part)} beside {said(parts[0])}: {_REMEDY}")


#: Python's and numpy's go into one batch.
_NUMBERS = (int, float, np.number, np.bool_)
_REMEDY = "give DataOptions(collate=...) a function that makes a batch of them"


def _where(keys: tuple[str, ...]) -> str:
    return ".".join(keys) or "the sample"


def _described(part: Any) -> str:
    if isinstance(part, Mapping):
        return f"the keys {', '.join(map(str, part))}"
    if isinstance(part, Tensor | np.ndarray):
        return f"shape {tuple(part.shape)}"
    return f"a {type(part).__name__}" + (f" of {len(part)}" if isinstance(part, tuple) else "")


def _summed(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)


def length_of(dataset: Dataset) -> Callable[[int], int] | None:
    """The tokens of a sample by its index, from the dataset's own `lengths`; None where it has none."""
    lengths: Sequence[int] | None = getattr(dataset, "lengths", None)
    return None if lengths is None else lambda index: int(lengths[index])


def at_length(dataset: Dataset, tokens: int) -> Dataset:
    """The same samples in sequences of so many tokens, as the dataset itself gives them. Raises ValueError
    where it does not, or gives another number of samples: which of them a step has must stay a function of seed
    and step."""
    make: Callable[[int], Dataset] | None = getattr(dataset, "at_length", None)
    if make is None:
        raise ValueError("the dataset has no at_length(tokens), so that its lengths cannot be changed")
    made = make(tokens)
    if len(made) != len(dataset):
        raise ValueError(
            f"dataset.at_length({tokens}) has {len(made)} samples, the dataset {len(dataset)}: "
            "let it have as many"
        )
    return made


def sample_tokens(dataset: Dataset, most: int = 64) -> float:
    """The mean number of tokens of the first samples: what the planner expects of the rest."""
    count = min(len(dataset), most)
    if count == 0:
        raise ValueError("dataset is empty: it must hold at least one sample")
    total = 0
    for index in range(count):
        first = next(_tensors(dataset[index]), None)
        if first is None:
            raise TypeError(
                f"sample {index} is {type(dataset[index]).__name__} without a tensor: a sample must hold its "
                'tokens first, as in {"inputs": ..., "targets": ...}'
            )
        total += first.numel()
    return total / count


def _tensors(part: Any) -> Iterator[Tensor]:
    """The tensors of a sample, in order."""
    if isinstance(part, Tensor | np.ndarray):
        yield torch.as_tensor(part)
    elif isinstance(part, Mapping | tuple):
        for inner in part.values() if isinstance(part, Mapping) else part:
            yield from _tensors(inner)


class Loader:
    """Batches of a dataset, and a record of what was asked of it: the ledger's word for a first stage.

    A sample that cannot be read, or that makes no batch with the others, does not end a step in the middle,
    where others would wait for ever: another one stands in for it, `failure` tells, and the vote drops the step
    on all ranks."""

    def __init__(self, reader: Samples, collate: Collate) -> None:
        self._reader, self._collate = reader, collate
        self.asked: list[int] = []
        self.failure: SampleError | None = None

    def prepare(self, ids: Sequence[int]) -> None:
        """These are asked for next, in this order; what was prepared before and is not among them goes."""
        self._reader.want(ids)

    def batch(self, ids: Sequence[int]) -> Batch:
        """Raises SampleError where none of these can be read, and nothing can stand in for them."""
        found: list[Any] = []
        missing: list[int] = []
        for place, index in enumerate(ids):
            self.asked.append(index)
            try:
                found.append(self._reader.take(index))
            except SampleError as error:
                self.failure = self.failure or error
                missing.append(place)
        if missing:
            stand_in = found[0] if found else self._any()
            for place in missing:  # the same on every member of a group that read the same
                found.insert(place, stand_in)
        try:
            return self._collate(found)
        except Exception as error:
            place = error.place if isinstance(error, Unlike) else 0
            why = str(error) if isinstance(error, Unlike) else f"collate: {type(error).__name__}: {error}"
            if self.failure is None:
                self.failure = SampleError(ids[place], why)
                self.failure.__cause__ = error
            return self._stand_in(len(found), error)

    def _stand_in(self, count: int, error: Exception) -> Batch:
        """A batch of one sample, so many times. Raises SampleError where none makes one."""
        assert self.failure is not None
        for index in range(_STAND_INS):
            try:
                return self._collate([self._reader.take(index)] * count)
            except Exception:
                continue
        raise self.failure from error

    def _any(self) -> Any:
        """The first sample of the dataset that can be read, of a few."""
        assert self.failure is not None
        for index in range(_STAND_INS):
            try:
                return self._reader.take(index)
            except SampleError:
                continue
        raise self.failure

    def take(self) -> tuple[list[int], SampleError | None]:
        """The ids asked for since the last take, in order, and the first failure among them."""
        asked, failure = self.asked, self.failure
        self.asked, self.failure = [], None
        return asked, failure
