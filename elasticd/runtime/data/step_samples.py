"""`Feed`, the source of each step's samples: a map-style dataset in the job's order, or batches of the script.

Every rank asks its feed for the same steps. All members of the plan call `begin` before a step's first pass, in
the same order as their other collectives.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from numbers import Integral
from typing import Any, Protocol

import numpy as np
import torch
from elasticd_migration.text_codec import from_text, to_text
from elasticd_planner.spec.batch import BatchLengths, BatchPlan, Sampler, TokenBatchSampler
from elasticd_planner.spec.plan import Plan
from elasticd_planner.spec.sample_order import order_for
from msgspec import structs
from torch import Tensor

from elasticd.runtime.comm.groups import Group
from elasticd.runtime.data.packing import Packing, deal, row_tokens
from elasticd.runtime.data.prefetch import SampleError, SampleKey, index_of

#: Steps whose given batch is kept: the current one, and the one before, whose end may be heard late.
_REMEMBERED = 2


class Samples(Protocol):
    """Gives samples by their ids, as `elasticd.runtime.data.prefetch.SamplePrefetcher`."""

    @property
    def here(self) -> bool:
        """True where a sample is read by the thread that takes it."""

    def want(self, keys: Sequence[SampleKey]) -> None:
        """Has these samples read ahead, and drops all others."""

    def take(self, key: SampleKey) -> Any:
        """Waits for a sample. Raises SampleError if it cannot be read."""


class Feed(Samples, Protocol):
    """The source of each step's samples."""

    longest: int  #: tokens of the longest sequence so far, that of a step which could not be made included

    @property
    def ahead(self) -> bool:
        """True if `dealing` can be asked for later steps. In each step it is the same on all ranks, whose vote
        then compares the next step's batch plan."""

    def samples(self, step: int) -> tuple[int, ...]:
        """The ids of a step, once it has begun."""

    @property
    def packed(self) -> bool:
        """True if sequences are packed."""

    def dealing(self, plan: Plan, step: int, slowdown: Sequence[int] | None = None) -> Callable[[], BatchPlan]:
        """A function that gives the samples of a step as the plan's lanes take them. It asks for nothing of the
        user's, so that it may be called in another thread; it raises SampleError where a sample goes into no
        row. `slowdown`: of each lane, by which packed rows are shared."""

    def begin(
        self,
        step: int,
        plan: Plan,
        everyone: Group,
        carried: str | None,
        slowdown: Sequence[int] | None = None,
    ) -> str | None:
        """Begins a step, together with all members of the plan. If it raises, it raises on all of them.

        Args:
            step: its index.
            plan: the plan in force.
            everyone: the group of its members.
            carried: what the step before returned; it moves with the state.
            slowdown: of each lane, as in `dealing`.

        Returns:
            What the state is to carry after this step; None: nothing.
        """


class BatchesDiffer(RuntimeError):
    """Ranks gave different batches for one step."""


class MapStyleSamples:
    """The `Feed` of a map-style dataset: a step's samples are those of the sampler, or those of the script."""

    def __init__(
        self,
        sampler: Sampler | TokenBatchSampler,
        reader: Samples,
        length: Callable[[int], int] | None,
        linear: int,
        packing: Packing | None = None,
    ) -> None:
        """
        Args:
            sampler: draws the samples of each step.
            reader: gives samples by their indices.
            length: tokens of a sample by its index; None: samples are of equal length.
            linear: see `elasticd_planner.spec.sample_packing.linear_of`.
            packing: of sequences in rows; None: they are padded.
        """
        self._sampler, self._length, self._linear, self._packing = sampler, length, linear, packing
        self._reader = reader
        self.longest = 0
        self._given: dict[int, _Given] = {}
        self._now: _Given | None = None

    @property
    def ahead(self) -> bool:
        """True if later steps have the samples of the sampler.

        A script gives the batches of all its steps (`Job.step`) or of none (`Job.steps`), and a rank that joins
        gives the batch of its first step before it trains. So in each step this is the same on all ranks.
        """
        return not self._given

    @property
    def here(self) -> bool:
        """True where samples of the dataset are read by the thread that takes them."""
        return self._reader.here and (self._now is None or self._now.held is None)

    def want(self, keys: Sequence[SampleKey]) -> None:
        """Reads samples of the dataset ahead."""
        if self._now is None or self._now.held is None:
            self._reader.want(keys)

    def take(self, key: SampleKey) -> Any:
        """A sample of the current step.

        Raises:
            SampleError: it cannot be read, or the batch does not have it.
        """
        held = self._now.held if self._now is not None else None
        if held is None:
            return self._reader.take(key)
        if (index := index_of(key)) >= len(held):
            raise SampleError(index, "it is not in the batch that was given")
        return held[index]

    def give(self, step: int, batch: Sequence[Any]) -> None:
        """Makes a step train on a batch of the script.

        Args:
            step: its index.
            batch: the global batch, as indices of the dataset or as samples.

        Raises:
            ValueError, TypeError: it is no global batch.
        """
        given = _Given(batch, self._sampler)
        for at in [at for at in self._given if not step - _REMEMBERED < at < step]:
            del self._given[at]
        self._given[step] = given

    def samples(self, step: int) -> tuple[int, ...]:
        """The ids of a step."""
        given = self._given.get(step)
        return given.ids if given is not None else self._sampler.samples(step)

    @property
    def packed(self) -> bool:
        """True if sequences are packed."""
        return self._packing is not None

    def dealing(self, plan: Plan, step: int, slowdown: Sequence[int] | None = None) -> Callable[[], BatchPlan]:
        """A function that deals the samples of a step; those of known length are dealt by it."""
        samples, given = self.samples(step), self._given.get(step)
        tokens: tuple[int, ...] | None = None
        if given is not None and given.held is not None:
            tokens = tuple(map(row_tokens, given.held)) if self._packing is not None else None
        elif self._length is not None:
            tokens = tuple(map(self._length, samples))
        self.longest = max(self.longest, *(tokens or (0,)))
        lengths = None if tokens is None else BatchLengths(tokens=tokens, linear=self._linear)
        return partial(deal, self._packing, plan, step, samples, lengths, slowdown)

    def begin(
        self,
        step: int,
        plan: Plan,
        everyone: Group,
        carried: str | None,
        slowdown: Sequence[int] | None = None,
    ) -> str | None:
        """Compares the hash of the script's batch on all ranks.

        The state carries the order of a large dataset's samples. One that carries none after its first step was
        begun by a release that permuted every dataset as a whole; it keeps that order.

        Raises:
            BatchesDiffer: the ranks gave different batches.
        """
        order = self._order(step, carried)
        if not self._given:
            return order
        self._now = given = self._given.get(step)
        mine = given.hash if given is not None else 0
        hashes = [int(each) for each in everyone.all_gather(torch.tensor([mine]))]
        if len(set(hashes)) > 1:
            odd = [plan.members[rank] for rank, each in enumerate(hashes) if each != hashes[0]]
            raise BatchesDiffer(
                f"step {step}: {', '.join(odd)} gave another batch than {plan.members[0]}: give job.step() the "
                "same on every rank, a function of the index that job.next() gave"
            )
        return order

    def _order(self, step: int, carried: str | None) -> str | None:
        """Takes the order of samples that a state carries, and gives what it is to carry on."""
        sampler = self._sampler
        if not isinstance(sampler, Sampler) or order_for(sampler.size) == "permutation":
            return None
        if carried is None and not step:
            carried = to_text(order_for(sampler.size))
        order: Any = from_text(carried) if carried is not None else "permutation"
        if sampler.order != order:
            self._sampler = structs.replace(sampler, order=order)
        return carried


class _Given:
    """A global batch of the script: sample ids, the samples (None: those of the dataset), and a hash."""

    def __init__(self, batch: Sequence[Any], sampler: Sampler | TokenBatchSampler) -> None:
        if isinstance(sampler, TokenBatchSampler):
            if not len(batch):  # a tensor, whose truth is another
                raise ValueError("job.step() got no sample: a batch has one at least")
        elif len(batch) != sampler.global_batch:
            raise ValueError(
                f"job.step() got {len(batch)} samples: a batch is the whole global one, {sampler.global_batch} "
                "indices or samples, the same on every rank"
            )
        self.held: Sequence[Any] | None = None
        indices = [
            isinstance(each, Integral) or (isinstance(each, Tensor | np.ndarray) and not each.ndim)
            for each in batch
        ]
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
        self.hash = _signed(b"".join(_value(sample, (str(place),)) for place, sample in enumerate(batch)))


def _value(part: Any, keys: tuple[str, ...]) -> bytes:
    """A hash of a sample, or of a part of it, by its values: copies of it on other ranks have the same one.

    Args:
        part: mappings, sequences and dataclasses of tensors, arrays, images, numbers, texts and bytes.
        keys: where it is in the batch.

    Raises:
        TypeError: it is, or holds, something else.
    """
    inner: Iterable[tuple[Any, Any]] = ()
    match part:
        case Tensor():
            raw = part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            head = f"tensor {part.dtype} {tuple(part.shape)}"
        case np.ndarray() | np.generic() if part.dtype != object:
            raw, head = part.tobytes(), f"array {part.dtype.str} {part.shape}"
        case None | bool() | int() | float() | complex() | str():
            raw, head = repr(part).encode(), type(part).__name__
        case bytes() | bytearray():
            raw, head = bytes(part), "bytes"
        case Mapping():
            raw, head = b"", f"mapping {len(part)}"
            inner = sorted(part.items(), key=lambda item: _value(item[0], keys))
        case list() | tuple() if all(type(value) in (int, float, str) for value in part):
            raw, head = repr(part).encode(), "plain"
        case list() | tuple() | np.ndarray():
            raw, head, inner = b"", f"sequence {len(part)}", enumerate(part)
        case _ if is_dataclass(part):
            raw, head = b"", type(part).__qualname__
            inner = [(field.name, getattr(part, field.name)) for field in fields(part)]
        case _ if hasattr(part, "__array_interface__"):  # an image
            return _value(np.asarray(part), keys)
        case _:
            raise TypeError(
                f"job.step(): sample {keys[0]} has a {type(part).__name__} under {'.'.join(keys[1:])!r}, which "
                "ranks cannot compare by its value: give tensors, arrays, images, numbers, texts, lists and "
                "mappings of them; or indices of the dataset"
            )
    digest = hashlib.blake2b(f"{head}\n".encode(), digest_size=16)
    digest.update(raw)
    for key, value in inner:
        digest.update(_value(key, keys) + _value(value, (*keys, str(key))))
    return digest.digest()


def _signed(data: bytes) -> int:
    """A hash of 63 bits. It is never 0, which means that no batch was given."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1 | 1
