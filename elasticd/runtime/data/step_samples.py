"""Where the samples of a step come from: the job's own order of a map-style dataset, or what a script gives.

A feed is asked by every rank alike. `begin` is called on all members of the plan before a step's first pass,
in the same order as all that they say to each other.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from elasticd_planner.spec.batch import BatchPlan, Lengths, Sampler, batch_plan
from elasticd_planner.spec.plan import Plan
from torch import Tensor

from elasticd.runtime.comm.groups import Group
from elasticd.runtime.data.prefetch import SampleError

#: Steps of which what was given is remembered: the one under way, and one whose end may be heard late.
_REMEMBERED = 2


class Samples(Protocol):
    """What gives samples by their ids (`reader.Reader`)."""

    def want(self, indices: Sequence[int]) -> None: ...
    def take(self, index: int) -> Any: ...


class Feed(Samples, Protocol):
    """`samples`: the ids of a step, known once it has begun; `take` gives what they stand for. `batch`: them
    dealt to a plan's pipelines; `ahead` tells whether it can be asked for steps to come. `begin`: by all
    members before each step; `carried` is what the last one gave, carried with the state, and it gives what is
    to be carried after this step (None: nothing is). It raises on all members alike."""

    @property
    def ahead(self) -> bool: ...
    def samples(self, step: int) -> tuple[int, ...]: ...
    def batch(self, plan: Plan, step: int) -> BatchPlan: ...
    def begin(self, step: int, plan: Plan, everyone: Group, carried: str | None) -> str | None: ...


class BatchesDiffer(RuntimeError):
    """Ranks gave different batches for one step."""


class Mapped:
    """Samples of a map-style dataset: those that `sampler` draws for a step, unless the script gave others.

    length: tokens of a sample by its index, where they are unequal; linear: see `sample_packing.linear_of`."""

    def __init__(
        self, sampler: Sampler, reader: Samples, length: Callable[[int], int] | None, linear: int
    ) -> None:
        self._sampler, self._length, self._linear = sampler, length, linear
        self._reader = reader
        self._given: dict[int, _Given] = {}
        self._now: _Given | None = None

    def reading(self, reader: Samples, length: Callable[[int], int] | None) -> Mapped:
        """The same samples as another reader gives them; what a script gives holds for both."""
        other = Mapped(self._sampler, reader, length, self._linear)
        other._given = self._given
        return other

    @property
    def ahead(self) -> bool:
        return not self._given

    def want(self, indices: Sequence[int]) -> None:
        if self._now is None or self._now.held is None:
            self._reader.want(indices)

    def take(self, index: int) -> Any:
        held = self._now.held if self._now is not None else None
        if held is None:
            return self._reader.take(index)
        if index >= len(held):
            raise SampleError(index, "it is not in the batch that was given")
        return held[index]

    def give(self, step: int, batch: Sequence[Any]) -> None:
        """This step trains on these: indices of the dataset, or samples. Raises ValueError, or TypeError, where
        it is no global batch."""
        given = _Given(batch, self._sampler)
        for at in [at for at in self._given if not step - _REMEMBERED < at < step]:
            del self._given[at]
        self._given[step] = given

    def samples(self, step: int) -> tuple[int, ...]:
        given = self._given.get(step)
        return given.ids if given is not None else self._sampler.samples(step)

    def batch(self, plan: Plan, step: int) -> BatchPlan:
        samples, given = self.samples(step), self._given.get(step)
        if self._length is None or (given is not None and given.held is not None):
            return batch_plan(plan, step, samples)
        lengths = Lengths(tokens=tuple(map(self._length, samples)), linear=self._linear)
        return batch_plan(plan, step, samples, lengths)

    def begin(self, step: int, plan: Plan, everyone: Group, carried: str | None) -> str | None:
        """What a script gave must be the same on all ranks: they tell each other its hash."""
        if not self._given:
            return None
        self._now = given = self._given.get(step)
        mine = given.hash if given is not None else 0
        told = [int(each) for each in everyone.all_gather(torch.tensor([mine]))]
        if len(set(told)) > 1:
            odd = [plan.members[rank] for rank, each in enumerate(told) if each != told[0]]
            raise BatchesDiffer(
                f"step {step}: {', '.join(odd)} gave another batch than {plan.members[0]}: give job.step() the "
                "same on every rank, a function of the index that job.next() gave"
            )
        return None


class _Given:
    """A global batch of a script: its ids, the samples themselves (None: they are the dataset's), a hash."""

    def __init__(self, batch: Sequence[Any], sampler: Sampler) -> None:
        if len(batch) != sampler.global_batch:
            raise ValueError(
                f"job.step() got {len(batch)} samples: a batch is the whole global one, {sampler.global_batch} "
                "indices or samples, the same on every rank"
            )
        self.held: Sequence[Any] | None = None
        indices = [isinstance(each, int) or (isinstance(each, Tensor) and not each.dim()) for each in batch]
        if all(indices):
            self.ids = tuple(int(each) for each in batch)
            wrong = [index for index in self.ids if not 0 <= index < sampler.size]
            if wrong:
                raise ValueError(f"job.step() got the index {wrong[0]} of a dataset of {sampler.size} samples")
            self.hash = _signed(struct.pack(f"<{len(self.ids)}q", *self.ids))
            return
        if any(indices) or not all(isinstance(each, Mapping) for each in batch):
            raise TypeError("job.step() takes indices of the dataset, or samples (mappings of tensors)")
        self.held, self.ids = batch, tuple(range(len(batch)))
        self.hash = _signed(*(part for sample in batch for part in _bytes(sample)))


def _bytes(sample: Mapping[str, Any]) -> list[bytes]:
    """All that two ranks' copies of a sample must agree in."""
    found = []
    for key in sorted(sample):
        value = sample[key]
        if isinstance(value, Tensor):
            raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            found += [f"{key} {value.dtype} {tuple(value.shape)}".encode(), raw]
        else:
            found.append(f"{key} {value!r}".encode())
    return found


def _signed(*parts: bytes) -> int:
    """63 bits, and never 0, which stands for nothing given."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest(), "little") >> 1 | 1
