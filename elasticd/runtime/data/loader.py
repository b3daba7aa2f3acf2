"""`Loader`: makes the batches of a rank, and records the ids of the samples in them.

`pad` makes a batch of samples unless the user gives a function for it. Sample ids pass from stage to stage with
the activations, so that the hash in the vote proves which samples a forward pass saw.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import nullcontext, suppress
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from elasticd_planner.spec.batch import MicroBatch, ids_of
from elasticd_planner.spec.item_batch import SampleItem
from torch import Tensor

from elasticd.runtime.data.collate import Batch, Collate, Unlike, fresh, pad, untokenized
from elasticd.runtime.data.item_places import PieceRows, mask_of, piece_rows, whole_rows
from elasticd.runtime.data.packing import blank, pack
from elasticd.runtime.data.prefetch import (
    NO_ROWS,
    Dataset,
    NothingRead,
    SampleError,
    SampleKey,
    SamplePart,
)
from elasticd.runtime.data.sample_ledger import entries
from elasticd.runtime.data.step_samples import Samples
from elasticd.runtime.model.batch_format import BatchFormat, ItemPlaces
from elasticd.runtime.model.rng import DATASET, ModelRng
from elasticd.system.user_line import described

_Made = TypeVar("_Made")

#: The number of first samples that can stand in for a micro-batch of which none can be read.
_STAND_INS = 16


def length_of(dataset: Dataset) -> Callable[[int], int] | None:
    """The tokens of a sample by its index, from the dataset's attribute `lengths`; None: it has none.

    Raises:
        TypeError: the attribute gives no length for an index.
        ValueError: it has fewer lengths than there are samples.
    """
    lengths: Sequence[int] | None = getattr(dataset, "lengths", None)
    if lengths is None:
        return None
    if not hasattr(lengths, "__getitem__"):
        raise TypeError(
            f"the dataset's attribute lengths is of type {type(lengths).__name__}: it must have the tokens of "
            "each sample, lengths[index]; or give DataOptions(length=...)"
        )
    if isinstance(lengths, Sized) and len(lengths) < len(dataset):
        raise ValueError(
            f"the dataset's attribute lengths has {len(lengths)} entries, and the dataset {len(dataset)} "
            "samples: it must have the tokens of each"
        )
    return lambda index: int(lengths[index])


def item_counts(dataset: object, items: str) -> Sequence[int]:
    """The number of these items that each sample of a dataset has, by its index: its attribute `counts`.

    Raises:
        ValueError: the dataset does not say it.
    """
    known = getattr(dataset, "counts", None)
    if not isinstance(known, Mapping) or items not in known:
        kind, wraps = type(dataset).__name__, hasattr(getattr(dataset, "dataset", None), "counts")
        own = (
            f"; {kind} does not pass on that of the dataset that it is made of, nor rows and part"
            if wraps
            else ""
        )
        raise ValueError(
            f"the dataset does not say how many {items} each sample has: give it an attribute counts, as in "
            f"dataset.counts = {{{items!r}: [2, 0, 1, ...]}}, with a number for each sample, by its index{own}"
        )
    counts: Sequence[int] = known[items]
    if isinstance(dataset, Sized) and len(counts) != len(dataset):
        raise ValueError(
            f"the dataset's counts have {len(counts)} numbers of {items}, and it has {len(dataset)} samples: "
            "give it one for each"
        )
    return counts


def item_rows(dataset: object, items: str) -> Sequence[Sequence[int]] | None:
    """The rows [tokens] of each of these items, by sample and number: what the dataset's attribute `rows` says;
    None: it says nothing. They may be those that the module's blocks work on, or those that it gives.

    Raises:
        ValueError: it has fewer entries than there are samples.
    """
    known = getattr(dataset, "rows", None)
    if not isinstance(known, Mapping) or items not in known:
        return None
    rows: Sequence[Sequence[int]] = known[items]
    if isinstance(dataset, Sized) and len(rows) != len(dataset):
        raise ValueError(
            f"the dataset's rows have {len(rows)} entries of {items}, and it has {len(dataset)} samples: give "
            f"it one for each, as in dataset.rows = {{{items!r}: [[256, 64], [], [256], ...]}}"
        )
    return rows


class ItemSizes(NamedTuple):
    """The items of one kind in some samples."""

    counts: Mapping[int, int]  #: by sample id
    rows: Mapping[SampleItem, int] | None  #: of each item [tokens], see `engine.item_rows`; None: not known

    def costs(self, rise: float) -> ItemSizes:
        """The same with what each item costs in the place of its rows: the rows of items of the mean size that
        take as long. The same on all ranks.

        Args:
            rise: by what a row costs more for each row of its item.
        """
        if not self.rows:
            return self
        each = 1 + rise * sum(self.rows.values()) / len(self.rows)
        costs = {item: max(1, round(size * (1 + rise * size) / each)) for item, size in self.rows.items()}
        return ItemSizes(self.counts, costs)


def item_sizes(dataset: object, items: str, samples: Iterable[int], ratio: float = 1.0) -> ItemSizes:
    """The items of some samples, as a dataset says.

    Args:
        dataset: says how many items its samples have, and may say their rows.
        items: of which kind.
        samples: ids of the samples.
        ratio: rows that the module's blocks work on, for each that the dataset says.

    Raises:
        ValueError: as `item_counts` and `item_rows`.
        SampleError: a sample's rows do not fit its items.
    """
    counts = item_counts(dataset, items)
    mine = {sample: int(counts[sample]) for sample in samples}
    for sample, count in mine.items():
        if count < 0:
            raise SampleError(sample, f"the dataset's counts say that it has {count} {items}", NO_ROWS)
    if (rows := item_rows(dataset, items)) is None:
        return ItemSizes(mine, None)
    for sample, count in mine.items():
        if len(rows[sample]) != count:
            raise SampleError(
                sample,
                f"the dataset's counts say that it has {count} {items}, and its rows have {len(rows[sample])} "
                "numbers: give the rows of each",
                NO_ROWS,
            )
        if any(int(each) < 1 for each in rows[sample]):
            raise SampleError(
                sample, f"its rows are {list(rows[sample])}: each of its {items} has 1 at least", NO_ROWS
            )
    known = {
        SampleItem(each, at): max(1, round(int(size) * ratio))
        for each in mine
        for at, size in enumerate(rows[each])
    }
    return ItemSizes(mine, known)


def sample_tokens(
    dataset: Dataset,
    collate: Collate = pad,
    reads: BatchFormat | None = None,
    most: int = 64,
    *,
    kinds: Collection[str] = (),
) -> float:
    """The mean number of tokens of the first `most` samples, which the planner takes for all. Of samples that
    are read with their items as many have so many items.

    Args:
        dataset: has samples whose first tensor has an entry for each token.
        collate: of a model that reads its own samples: makes the tokens of those that have none.
        reads: reads a model's samples; None: they are tensors.
        most: samples that are looked at.
        kinds: of items that the model takes apart from the tokens, by which `dataset.counts` has their numbers.

    Raises:
        ValueError: the dataset is empty.
        TypeError: a sample has no tokens.
    """
    count = min(len(dataset), most)
    if count == 0:
        raise ValueError("dataset is empty: it must hold at least one sample")
    total = 0
    part = getattr(dataset, "part", None) if kinds else None
    if part is None and kinds:
        counts = getattr(dataset, "counts", None) or {}
        count = _having({kind: counts[kind] for kind in kinds if kind in counts}, count, most)
    for index in range(count):
        sample = dataset[index] if part is None else part(index, ())
        if kinds and isinstance(sample, Mapping):
            sample = {key: part for key, part in sample.items() if key not in kinds}
        tokens = reads.tokens(sample) if reads is not None else 0
        if not tokens:
            whole = collate([sample]) if reads is not None and collate is not pad else sample
            first = next(_tensors(whole), None)
            tokens = 0 if first is None else first.numel()
        if not tokens:
            raise TypeError(
                f"sample {index} is a {type(sample).__name__} without tokens: "
                + (
                    "its input_ids are empty or not there: leave such samples out"
                    if reads is not None
                    else untokenized(sample)
                    or 'a sample must hold its tokens first, as in {"inputs": ..., "targets": ...}'
                )
            )
        total += tokens
    return total / count


def _having(counts: Mapping[str, Sequence[int]], samples: int, most: int) -> int:
    """Of so many samples the first ones that have as many items as `most`; all where they have fewer."""
    read = 0
    for index in range(samples):
        read += sum(int(each[index]) for each in counts.values())
        if read >= most:
            return index + 1
    return samples


def _tensors(part: Any) -> Iterator[Tensor]:
    """The tensors of a sample, in order."""
    if isinstance(part, Tensor | np.ndarray):
        yield torch.as_tensor(part)
    elif isinstance(part, Mapping | tuple):
        for inner in part.values() if isinstance(part, Mapping) else part:
            yield from _tensors(inner)


def reading(reads: BatchFormat | None, collate: Collate) -> Collate:
    """A collate whose batches are as the model reads them."""
    if reads is None:
        return collate
    if collate is pad:
        return lambda samples: reads.batch(pad([reads.sample(each) for each in samples]))
    return lambda samples: reads.batch(collate(samples))


class Loader:
    """Makes batches, and records what was asked for, for the ledger of samples.

    A sample that cannot be read, or makes no batch with the others, does not end the step at once, because
    other ranks would wait for ever. Another sample, or one of zeros, takes its place, `failure` reports it, and
    the vote drops the step on all ranks.
    """

    def __init__(
        self,
        reader: Samples,
        collate: Collate,
        reads: BatchFormat | None = None,
        drawing: ModelRng | None = None,
        *,
        counts: Mapping[str, Sequence[int]] | None = None,
        part: Collection[str] | None = None,
        places: Mapping[str, ItemPlaces] = MappingProxyType({}),
    ) -> None:
        """
        Args:
            reader: gives samples by their ids.
            collate: makes a padded batch of samples.
            reads: makes of samples and batches what the model reads; None: they are that.
            drawing: keys what `collate` and the dataset draw; None: by no seed and no step.
            counts: of the items that other modules take, and that batches have not: by key of the sample how
                many each sample has, by its id.
            part: the kinds of items that samples are read with, by the dataset's method `part`; None: samples
                are read whole.
            places: by key of the sample the tokens that take rows of its items, if the model says so; else it
                is what `reads` says.
        """
        self._places = places
        self._reader, self._collate, self._reads = reader, reading(reads, collate), reads
        self._drawing = drawing if drawing is not None else ModelRng()
        self._own = collate is not pad  # it may draw, and change its samples
        self._items, self._part = counts or {}, None if part is None else tuple(part)
        self.asked: list[int] = []
        self.failure: SampleError | None = None
        #: Of the last batch: by key of the items what each of its samples, or parts of samples, takes of them;
        #: without those of which nobody says it.
        self.item_rows: dict[str, list[PieceRows]] = {}
        self.stood_in = False  #: in the last batch something has the place of what could not be read

    def key(self, index: int) -> SampleKey:
        """A sample, or the part of it, that is read for it."""
        return index if self._part is None else SamplePart(index, self._part)

    def prepare(self, keys: Sequence[SampleKey]) -> None:
        """Has these samples read ahead, in this order, and drops all others that were."""
        self._reader.want(keys)

    def batch(self, micro_batch: MicroBatch, *, packed: bool = False) -> Batch:
        """The batch of these samples, padded or packed in one row.

        Raises:
            NothingRead: none of them can be read, and no other one can take their place.
        """
        self.asked += entries(micro_batch, packed=packed)
        self.stood_in, self.item_rows = False, {}
        found: dict[int, Any] = {}
        for place, piece in enumerate(micro_batch):
            try:
                found[place] = self._sample(piece.sample)
            except SampleError as error:
                self._fail(error)
        return self._packed(found, micro_batch) if packed else self._padded(found, micro_batch)

    def refuse_rows(self, key: str, rows: Sequence[int], micro_batch: MicroBatch) -> bool:
        """Notes a failure where a sample of the last batch has places for other rows of items than they have.

        Args:
            key: of the items in a batch.
            rows: that the items of each sample of the micro-batch have.
            micro_batch: that of the batch.

        Returns:
            True if there is such a sample.
        """
        for place, (wanted, there) in enumerate(zip(self.item_rows.get(key, ()), rows, strict=False)):
            if wanted.places != there:
                why = (
                    f"its text has places for {wanted.places} rows of {key}, and its {key} have {there} rows: "
                    f"give it the {key} that its text was made for, in that order"
                )
                self._fail(SampleError(micro_batch[place].sample, why))
                return True
        return False

    def _sample(self, index: int) -> Any:
        """A sample for one use.

        Raises:
            SampleError: it cannot be read.
        """
        sample = self._read(index)
        if self._items:
            for key, counts in self._items.items():
                if self._part is None or (isinstance(sample, Mapping) and key in sample):
                    items_of(sample, index, key, counts)
            if isinstance(sample, Mapping):
                sample = {key: part for key, part in sample.items() if key not in self._items}
        return fresh(sample) if self._own else sample

    def _read(self, index: int) -> Any:
        """A sample as the dataset has it."""
        key = self.key(index)
        sample = self._reader.take(key) if not self._reader.here else None
        if self._reader.here:  # perhaps found by taking that one
            with self._drawing.keyed(DATASET, (index,)):
                sample = self._reader.take(key)
        return sample

    def _padded(self, found: dict[int, Any], micro_batch: MicroBatch) -> Batch:
        count = len(micro_batch)
        if len(found) < count:
            # The same one on every member of a TP group, since they read the same samples.
            stand_in = next(iter(found.values())) if found else self._stand_in(self._sample)
            found = {place: found[place] if place in found else fresh(stand_in) for place in range(count)}
        samples = [*found.values()]
        try:
            masks = self._masks(samples)
            batch = self._collated(samples, micro_batch)
            if self._reads is not None:
                masks |= {key: list(mask) for key, mask in self._reads.item_places(batch).items()}
            self.item_rows = {key: list(map(whole_rows, listed)) for key, listed in masks.items()}
            return batch
        except Exception as error:
            self._refuse(error, micro_batch)
            return self._stand_in(
                lambda index: self._collated([self._sample(index) for _ in range(count)], micro_batch)
            )

    def _collated(self, samples: Sequence[Any], micro_batch: MicroBatch) -> Batch:
        """A batch of samples in the place of those of a micro-batch, whose draws are the same on every rank."""
        with self._drawing.keyed("collate", ids_of(micro_batch)) if self._own else nullcontext():
            return self._collate(samples)

    def _packed(self, found: dict[int, Any], micro_batch: MicroBatch) -> Batch:
        if len(found) == len(micro_batch):
            try:
                return self._row([*found.values()], micro_batch)
            except Exception as error:
                self._refuse(error, micro_batch)

        def zeros(like: Any) -> Batch:  # a row must have its length, with which other ranks count
            (row,) = self._rows([like])
            return pack([blank(row, piece) for piece in micro_batch], micro_batch)

        for like in found.values():
            with suppress(Exception):
                return zeros(like)
        return self._stand_in(lambda index: zeros(self._sample(index)))

    def _row(self, samples: Sequence[Any], micro_batch: MicroBatch) -> Batch:
        """The packed row of these parts of samples, and what it takes of their items."""
        rows = self._rows(samples)
        masks = self._masks(samples)
        if self._reads is not None:
            for row in rows:
                for key, mask in self._reads.item_places(row).items():
                    masks.setdefault(key, []).append(mask)
        for key, listed in masks.items():
            self.item_rows[key] = [
                _at(place, partial(piece_rows, mask, piece))
                for place, (mask, piece) in enumerate(zip(listed, micro_batch, strict=True))
            ]
        return pack(rows, micro_batch)

    def _masks(self, samples: Sequence[Any]) -> dict[str, list[Tensor]]:
        """By key of the items, of each sample the mask that a function of the user's gives."""
        return {
            key: [_at(place, partial(mask_of, mask, key, sample)) for place, sample in enumerate(samples)]
            for key, mask in self._places.items()
        }

    def _rows(self, samples: Sequence[Any]) -> list[Any]:
        """Samples as a packed row takes them."""
        if self._reads is None:
            return list(samples)
        return [_at(place, partial(self._reads.row, sample)) for place, sample in enumerate(samples)]

    def _refuse(self, error: Exception, micro_batch: MicroBatch) -> None:
        """Notes that these samples make no batch, unless an earlier failure is noted."""
        place = error.place if isinstance(error, Unlike) else 0
        why = str(error) if isinstance(error, Unlike) else f"collate: {described(error)}"
        failure = SampleError(micro_batch[place].sample, why)
        failure.__cause__ = error
        self._fail(failure)

    def _fail(self, failure: SampleError) -> None:
        """Notes that something stands in for a sample."""
        self.failure, self.stood_in = self.failure or failure, True

    def _stand_in(self, make: Callable[[int], Any], among: Iterable[int] = range(_STAND_INS)) -> Any:
        """The result of `make` for the first sample of the dataset that it can use, among a few.

        Raises:
            NothingRead: it can use none.
        """
        for index in among:
            with suppress(Exception):
                return make(index)
        raise NothingRead(f"{self.failure}; nor can any of the first samples stand in for it") from self.failure

    def take(self) -> tuple[list[int], SampleError | None]:
        """The ids asked for since the last call, in order, and the first failure among them."""
        asked, failure = self.asked, self.failure
        self.asked, self.failure = [], None
        return asked, failure


def _at(place: int, make: Callable[[], _Made]) -> _Made:
    """Makes something of a sample; an error names the sample's place."""
    try:
        return make()
    except Unlike as error:
        raise Unlike(place, str(error)) from error


def items_of(sample: Any, index: int, key: str, counts: Sequence[int]) -> Sequence[Any]:
    """The items of a sample under a key.

    Raises:
        SampleError: it has not as many as counted, or none of that name.
    """
    items = sample.get(key) if isinstance(sample, Mapping) else None
    if items is None and not counts[index]:
        return ()
    if not isinstance(items, Sequence | Tensor | np.ndarray):
        raise SampleError(index, f"it must be a mapping with a list under {key!r}")
    if len(items) != counts[index]:
        raise SampleError(index, f"it has {len(items)} {key}, and the dataset's counts say {counts[index]}")
    return items  # type: ignore[return-value]


class ItemLoader(Loader):
    """Makes the batches of a module of items, an item each: tensors [1, ...]."""

    def __init__(
        self,
        reader: Samples,
        key: str,
        counts: Mapping[str, Sequence[int]],
        drawing: ModelRng,
        part: Collection[str] | None,
    ) -> None:
        """
        Args:
            reader: gives samples by their ids.
            key: under which a sample has the module's items, a list.
            counts: of each kind of items: how many each sample has, by its id.
            drawing: keys what the dataset draws.
            part: see `Loader`.
        """
        super().__init__(reader, pad, None, drawing, counts=counts, part=part)
        self._kind = key

    def batch(self, micro_batch: Sequence[Any], *, packed: bool = False) -> Batch:
        """The batch of these items (`SampleItem`), which are of one shape.

        Raises:
            NothingRead: one cannot be read, and no other one can take its place.
        """
        self.asked += entries(micro_batch, packed=packed)
        self.stood_in = False
        found = []
        for item in micro_batch:
            try:
                found.append(self._item(item.sample, item.number))
            except SampleError as error:
                self._fail(error)
                found.append(self._other())
        try:
            return pad(found)
        except Unlike as error:
            item = micro_batch[0]
            why = f"{self._kind}[{item.number}] is no tensor, nor a mapping of tensors: {error.args[0]}"
            self._fail(SampleError(item.sample, why))
            return pad([self._other()])

    def _other(self) -> Any:
        """The first item of the dataset that can be read, among a few."""
        having = (index for index, count in enumerate(self._items[self._kind]) if count)
        return self._stand_in(lambda index: pad([self._item(index, 0)])[0], islice(having, _STAND_INS))

    def _item(self, sample: int, number: int) -> Any:
        read = self._read(sample)
        return items_of(read, sample, self._kind, self._items[self._kind])[number]
