"""A rank's view of the data: samples of a map-style dataset, collated, and the header that travels with them.

A sample is a mapping of 1-D tensors; `pad` makes a batch of them. Sample ids go with the activations from
stage to stage, so that the vote's hash proves which samples a forward pass really saw.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from elasticd.runtime.vote import hash_samples

#: What pads each key of a sample: targets by what the loss leaves out, all else by zero.
PADDING = {"targets": -100}

Batch = Any
Collate = Callable[[Sequence[Any]], Batch]


class Dataset(Protocol):
    """A map-style dataset."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


def pad(samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Stacks samples of 1-D tensors, padded at the end to the longest of them: [samples, tokens]."""
    return {
        key: torch.nn.utils.rnn.pad_sequence(
            [sample[key] for sample in samples], batch_first=True, padding_value=PADDING.get(key, 0)
        )
        for key in samples[0]
    }


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
    """Batches of a dataset, and a record of what was asked of it: the ledger's word for a first stage."""

    def __init__(self, dataset: Dataset, collate: Collate) -> None:
        self._dataset, self._collate = dataset, collate
        self.asked: list[int] = []

    def batch(self, ids: Sequence[int]) -> Batch:
        samples = []
        for index in ids:
            samples.append(self._dataset[index])
            self.asked.append(index)
        return self._collate(samples)

    def take(self) -> list[int]:
        """The ids asked for since the last take, in order."""
        asked, self.asked = self.asked, []
        return asked


class Header:
    """The shape of an activation and the ids of its samples, as one tensor of a fixed size."""

    #: dimensions that an activation may have
    DIMS = 4

    def __init__(self, micro_batch: int) -> None:
        self.size = 1 + self.DIMS + micro_batch

    def empty(self) -> Tensor:
        return torch.empty(self.size, dtype=torch.int64)

    def pack(self, shape: Sequence[int], ids: Sequence[int]) -> Tensor:
        dims = [*shape, *([0] * (self.DIMS - len(shape)))]
        return torch.tensor([len(shape), *dims, *ids], dtype=torch.int64)

    def unpack(self, header: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        values = header.tolist()
        return tuple(values[1 : 1 + values[0]]), tuple(values[1 + self.DIMS :])


def expected_hash(micro_batches: Sequence[Sequence[int]]) -> int:
    """The hash of a pipeline's samples in the order of its forward passes."""
    return hash_samples(i for micro in micro_batches for i in micro)
