"""`Loader`: makes the batches of a rank, and records the ids of the samples in them.

`pad` makes a batch of samples unless the user gives a function for it. Sample ids pass from stage to stage with
the activations, so that the hash in the vote proves which samples a forward pass saw.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from elasticd.runtime.data.prefetch import Dataset, SampleError
from elasticd.runtime.data.step_samples import Samples

#: Values that pad the keys of a sample: targets get the value that losses ignore. All other keys are padded by
#: zero.
PADDING = {"targets": -100, "labels": -100}

#: The key of a sample's, and a batch's, counts by modality, as {"image": 3}.
MODALITIES = "modalities"

#: The number of first samples that can stand in for a micro-batch of which none can be read.
_STAND_INS = 16

Batch = Any
Collate = Callable[[Sequence[Any]], Batch]


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
    """Whether a tensor of this type can hold the value."""
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
    """The tokens of a sample by its index, from the dataset's attribute `lengths`; None: it has none."""
    lengths: Sequence[int] | None = getattr(dataset, "lengths", None)
    return None if lengths is None else lambda index: int(lengths[index])


def sample_tokens(dataset: Dataset, most: int = 64) -> float:
    """The mean number of tokens of the first `most` samples, which the planner takes for all.

    Raises:
        ValueError: the dataset is empty.
        TypeError: a sample has no tensor.
    """
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
    """Makes batches, and records the ids that were asked for, for the ledger of samples.

    A sample that cannot be read, or makes no batch with the others, does not end the step at once, because
    other ranks would wait for ever. Another sample takes its place, `failure` reports it, and the vote drops
    the step on all ranks.
    """

    def __init__(self, reader: Samples, collate: Collate) -> None:
        self._reader, self._collate = reader, collate
        self.asked: list[int] = []
        self.failure: SampleError | None = None

    def prepare(self, ids: Sequence[int]) -> None:
        """Has these samples read ahead, in this order, and drops all others that were."""
        self._reader.want(ids)

    def batch(self, ids: Sequence[int]) -> Batch:
        """The batch of these samples.

        Raises:
            SampleError: none of them can be read, and no other one can take their place.
        """
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
            stand_in = found[0] if found else self._stand_in(self._reader.take)
            for place in missing:  # the same on every member of a TP group, since they read the same samples
                found.insert(place, stand_in)
        try:
            return self._collate(found)
        except Exception as error:
            place = error.place if isinstance(error, Unlike) else 0
            why = str(error) if isinstance(error, Unlike) else f"collate: {type(error).__name__}: {error}"
            if self.failure is None:
                self.failure = SampleError(ids[place], why)
                self.failure.__cause__ = error
            return self._stand_in(lambda index: self._collate([self._reader.take(index)] * len(found)))

    def _stand_in(self, make: Callable[[int], Any]) -> Any:
        """What `make` gives of the first sample of the dataset that it can use, among a few.

        Raises:
            SampleError: `failure`, if it can use none.
        """
        for index in range(_STAND_INS):
            with suppress(Exception):
                return make(index)
        assert self.failure is not None
        raise self.failure

    def take(self) -> tuple[list[int], SampleError | None]:
        """The ids asked for since the last call, in order, and the first failure among them."""
        asked, failure = self.asked, self.failure
        self.asked, self.failure = [], None
        return asked, failure
