"""A rank's view of the data: samples of a map-style dataset, collated, and a record of what was asked for.

A sample is a mapping of 1-D tensors; `pad` makes a batch of them. Sample ids go with the activations from
stage to stage, so that the vote's hash proves which samples a forward pass really saw.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from elasticd.runtime.feed import Samples
from elasticd.runtime.reader import Dataset as Dataset
from elasticd.runtime.reader import SampleError
from elasticd.runtime.vote import hash_samples

#: What pads each key of a sample: targets by what the loss leaves out, all else by zero.
PADDING = {"targets": -100}

#: The key under which samples and batches count their modalities, as {"image": 3}.
MODALITIES = "modalities"

#: How many of the first samples may stand in for a micro-batch of which none can be read.
_STAND_INS = 16

Batch = Any
Collate = Callable[[Sequence[Any]], Batch]


def pad(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Stacks samples of 1-D tensors, padded at the end to the longest of them: [samples, tokens]. What samples
    count under "modalities", as {"image": 3}, is summed."""
    return {
        key: _summed([sample[key] for sample in samples])
        if key == MODALITIES
        else torch.nn.utils.rnn.pad_sequence(
            [sample[key] for sample in samples], batch_first=True, padding_value=PADDING.get(key, 0)
        )
        for key in samples[0]
    }


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
        sample = dataset[index]
        tensors = [v for v in sample.values() if isinstance(v, Tensor)] if isinstance(sample, Mapping) else []
        if not tensors:
            raise TypeError(
                f"sample {index} is {type(sample).__name__}: a sample must be a mapping of 1-D tensors, as in "
                '{"inputs": ..., "targets": ...}'
            )
        total += tensors[0].numel()
    return total / count


class Loader:
    """Batches of a dataset, and a record of what was asked of it: the ledger's word for a first stage.

    A sample that cannot be read does not end a step in the middle, where others would wait for ever: another
    one stands in for it, `failure` tells, and the vote drops the step on all ranks."""

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
        return self._collate(found)

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


def expected_hash(micro_batches: Sequence[Sequence[int]]) -> int:
    """The hash of a pipeline's samples in the order of its forward passes."""
    return hash_samples(chain.from_iterable(micro_batches))
