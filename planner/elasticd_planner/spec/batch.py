"""The batch of a step: which samples each micro-batch of each pipeline trains on.

Made for each step, identically on every rank, never through the store: a pure function of plan, step, seed and,
where they are known, the samples' lengths. Everything that needs sample ids reads it and nothing else.

A pipeline's micro-batches are its rows: row i has a micro-batch of each lane, in pieces of samples. Lanes that
have fewer micro-batches than others have empty places in the last rows. Here all pieces are whole samples,
padded to the longest of a micro-batch; `elasticd_planner.batching` packs them without padding.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, islice, repeat, zip_longest
from typing import NamedTuple, TypeVar

import numpy as np

from elasticd_planner.numeric import Ints
from elasticd_planner.spec import sample_packing
from elasticd_planner.spec.plan import Place, Plan
from elasticd_planner.spec.sample_order import Order, permutation, samples_at
from elasticd_planner.value import Value, refuse


class SequencePiece(NamedTuple):
    """A part of a sample, in pairs of tokens {i, length - 1 - i}, of which a sequence has (length + 1) // 2.
    Each pair sees length + 1 keys under a causal mask, so that equal parts of the pairs are equal work. The
    token in the middle of an odd length is a pair by itself, and sees half as many."""

    sample: int  # its id
    length: int  # [tokens] of the whole sample; 0: not known
    start: int  # [pairs] the piece has pairs [start, stop)
    stop: int

    @classmethod
    def whole(cls, sample: int, length: int = 0) -> SequencePiece:
        """All of a sample."""
        return cls(sample, length, 0, (length + 1) // 2)

    @property
    def tokens(self) -> int:
        """The number of its tokens."""
        return sum(stop - start for start, stop in self.spans)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Its tokens, as ranges [start, stop) of the sequence: two, or one that the middle is in."""
        inner = self.length - self.start
        if 2 * self.stop >= self.length:
            return ((self.start, inner),) if self.start < inner else ()
        return ((self.start, self.stop), (self.length - self.stop, inner)) if self.start < self.stop else ()

    @classmethod
    def all_whole(cls, samples: Iterable[int]) -> list[SequencePiece]:
        """All of each sample; their lengths are not known."""
        none = repeat(0)
        fields = zip(samples, none, none, none, strict=False)
        return list(map(tuple.__new__, repeat(cls), fields))  # in few instructions: a batch is made each step


#: What a lane takes at once: pieces of samples.
MicroBatch = tuple[SequencePiece, ...]


def ids_of(pieces: Iterable[SequencePiece]) -> tuple[int, ...]:
    """The ids of the samples that these are pieces of, in order."""
    return tuple([piece.sample for piece in pieces])


_Kind = TypeVar("_Kind")


class BatchRow(Value, frozen=True, kw_only=True, gc=False):
    """The work of a pipeline's lanes in their micro-batches of one index."""

    lanes: tuple[MicroBatch, ...]  # by lane; empty: the lane has fewer micro-batches than others

    def connected(self, lane: int) -> tuple[int, ...]:
        """The lanes that a lane shares sequences with, those that these share sequences with, and so on, the
        lane among them; none if it has whole sequences alone."""
        parts = [{piece.sample for piece in pieces if piece.tokens < piece.length} for pieces in self.lanes]
        found, samples = {lane}, set(parts[lane])
        while more := {other for other in range(len(parts)) if other not in found and parts[other] & samples}:
            found |= more
            samples = samples.union(*(parts[other] for other in more))
        return tuple(sorted(found)) if parts[lane] else ()


def passes_of_rows(
    order: Iterable[tuple[_Kind, int, int]], rows: Sequence[int]
) -> Iterator[tuple[_Kind, int, int]]:
    """Of the passes of all rows (kind, row, chunk) those of a lane that has a part of these rows alone, which
    count as its micro-batches. So lanes pass the rows that they share in one order."""
    places = {row: place for place, row in enumerate(rows)}
    for kind, row, chunk in order:
        if row in places:
            yield kind, places[row], chunk


def sums_wait(rows: Sequence[BatchRow], lane: int, chunks: int) -> bool:
    """Returns True if a device launches the sums of its gradients after all its passes, and not during the last
    ones.

    Lanes that share sequences wait for each other in passes, too. At the last stages of a lane whose rows end
    before those of other lanes, sums would wait for the other lanes' last rows, and these for rows that the
    earlier stages of the first lane have yet to pass.

    Args:
        rows: of its pipeline; empty where samples are padded.
        lane: of the device.
        chunks: of its stage. An interleaved one has passes of other chunks after the last one of a chunk.
    """
    if not rows or all(rows[-1].lanes) or (chunks == 1 and rows[-1].lanes[lane]):
        return False
    return any(row.connected(each) for row in rows for each in range(len(row.lanes)))


class BatchPlan(Value, frozen=True, kw_only=True, dict=True):
    """The micro-batches of one step under one plan, which has one module (`Plan.view`)."""

    step: int
    plan: int  # its number
    pipelines: tuple[tuple[BatchRow, ...], ...]  # the rows of each
    packed: bool = False  # the sequences of a micro-batch follow each other in one row, without padding

    def __post_init__(self) -> None:
        for rows in self.pipelines:
            listed = [row.lanes for row in rows]
            if len(set(map(len, listed))) > 1:
                refuse(f"step {self.step}: each row of a pipeline must name all its lanes")
            for own in zip(*listed, strict=True):
                if not self.packed and not all(own[: len(own) - own.count(())]):
                    refuse(f"step {self.step}: the rows of a lane must have no gap")

    def of(self, place: Place) -> tuple[MicroBatch, ...]:
        """The micro-batches of the lane that a device is in."""
        lane = place.lane
        return tuple(row.lanes[lane] for row in self.pipelines[place.pipeline] if row.lanes[lane])

    def rows(self, place: Place) -> tuple[BatchRow, ...]:
        """The rows of the pipeline that a device is in, if they are packed; else none."""
        return self.pipelines[place.pipeline] if self.packed else ()

    @cached_property
    def digest(self) -> int:
        """A 64-bit hash of all pieces and their places; never 0."""
        digest = hashlib.blake2b(struct.pack("<qq", self.step, self.plan), digest_size=8)
        for rows in self.pipelines:
            for row in rows:
                for lane in row.lanes:
                    digest.update(struct.pack(f"<q{4 * len(lane)}q", len(lane), *chain.from_iterable(lane)))
            digest.update(b"/")
        return int.from_bytes(digest.digest(), "little") or 1

    def samples(self) -> tuple[int, ...]:
        """All sample ids of the step, in order; of a sample in pieces where the first of them is."""
        rows = chain.from_iterable(self.pipelines)
        return tuple(piece.sample for row in rows for lane in row.lanes for piece in lane if not piece.start)


class BatchSummary(Value, frozen=True, kw_only=True):
    """A packed batch in numbers."""

    sequences: int
    tokens: int
    rows: int  # of the lane that has most
    cut: int  # sequences that are on several lanes
    widest: int  # the most lanes that share a sequence
    imbalance: float  # time of the busiest lane over that of all work divided evenly by speed; 1: none is idle


class Sampler(Value, frozen=True, kw_only=True):
    """Samples of a map-style dataset without replacement, epoch by epoch, as a function of (seed, step)."""

    size: int
    global_batch: int
    seed: int
    order: Order = "permutation"

    def __post_init__(self) -> None:
        if self.size < 1:
            refuse("dataset is empty: it must hold at least one sample")
        if self.global_batch < 1:
            refuse(f"global_batch must be at least 1, not {self.global_batch}")

    def samples(self, step: int) -> tuple[int, ...]:
        """The ids of a step. Every epoch is a permutation of the dataset; a batch may span two epochs."""
        at, left = step * self.global_batch, self.global_batch
        found: list[int] = []
        while left:
            epoch, first = divmod(at, self.size)
            stop = min(self.size, first + left)
            part = samples_at(self.order, self.seed, epoch, self.size, first, stop).tolist()
            found += part
            at, left = at + len(part), left - len(part)
        return tuple(found)


class TokenBatchSampler:
    """The same for steps of about so many tokens: a function of (seed, step), too.

    The samples of all epochs, one after the other, lie along a line of tokens. A step has those that begin in
    its part of the line, [step x global_tokens, (step + 1) x global_tokens), so that steps have `global_tokens`
    on average. Since no sample is longer than that, each step has one at least.
    """

    def __init__(self, lengths: Sequence[int] | Ints, global_tokens: int, seed: int) -> None:
        """
        Args:
            lengths: tokens of each sample of the dataset; one without tokens counts as one.
            global_tokens: of a step, on average.
            seed: keys the order of samples.

        Raises:
            Invalid: the dataset is empty, or a sample is longer than a step.
        """
        self._lengths = np.maximum(1, np.asarray(lengths, dtype=np.int64))
        self.size, self.global_tokens, self.seed = len(self._lengths), global_tokens, seed
        if self.size < 1:
            refuse("dataset is empty: it must hold at least one sample")
        longest = int(self._lengths.argmax())
        if self._lengths[longest] > global_tokens:
            refuse(
                f"global_tokens is {global_tokens}, and sample {longest} alone has {self._lengths[longest]} "
                "tokens: a step must have room for any sample"
            )
        self._total = int(self._lengths.sum())
        self._known: dict[int, tuple[Ints, Ints]] = {}  # by epoch: its samples, and where each begins

    def samples(self, step: int) -> tuple[int, ...]:
        """The ids of a step; it may span epochs."""
        at, end = step * self.global_tokens, (step + 1) * self.global_tokens
        found: list[int] = []
        for epoch in range(at // self._total, -(-end // self._total)):
            samples, begins = self._of(epoch)
            first, stop = np.searchsorted(begins, (at - epoch * self._total, end - epoch * self._total))
            found += samples[first:stop].tolist()
        return tuple(found)

    def _of(self, epoch: int) -> tuple[Ints, Ints]:
        if epoch not in self._known:
            if len(self._known) > 1:
                del self._known[min(self._known)]
            samples = permutation(self.seed, epoch, self.size)
            ends = np.cumsum(self._lengths[samples])
            self._known[epoch] = samples, ends - self._lengths[samples]
        return self._known[epoch]


class BatchLengths(Value, frozen=True, kw_only=True):
    """The costs of a step's samples: tokens of each, in the order of the samples, and what a token's matrix
    products cost in units of its attention to one other (`sample_packing.linear_of`)."""

    tokens: tuple[int, ...]
    linear: int

    def __post_init__(self) -> None:
        if self.linear < 1 or any(count < 0 for count in self.tokens):
            refuse("lengths of samples must not be negative, and linear at least 1")


def batch_plan(plan: Plan, step: int, samples: Sequence[int], lengths: BatchLengths | None = None) -> BatchPlan:
    """Hands the samples of a step to the lanes of a plan of one module: in order, `micro_batch` at a time, row
    by row; with lengths so that all micro-batches cost alike, whatever the number of samples in each."""
    if len(samples) != plan.global_batch:
        refuse(f"step {step}: {len(samples)} samples for a global batch of {plan.global_batch}")
    if lengths is not None and len(lengths.tokens) != len(samples):
        refuse(f"step {step}: {len(lengths.tokens)} lengths for {len(samples)} samples")
    if plan.packed:  # its micro-batches are rows, and not of so many samples
        pipelines = _in_turn(plan, samples)
    elif lengths is None:
        pipelines = _in_order(plan, samples)
    else:
        pipelines = _evenly(plan, samples, lengths)
    return BatchPlan(step=step, plan=plan.number, pipelines=pipelines)


def short_batch_plan(plan: Plan, step: int, samples: Sequence[int]) -> BatchPlan:
    """Hands fewer samples than a step has to the lanes, which take a micro-batch each in turn. Some may have
    none. (The last round of an evaluation.)"""
    if len(samples) > plan.global_batch:
        refuse(f"step {step}: {len(samples)} samples for a global batch of {plan.global_batch}")
    return BatchPlan(step=step, plan=plan.number, pipelines=_in_turn(plan, samples))


#: The rows of each pipeline.
_Rows = tuple[tuple[BatchRow, ...], ...]


def _in_order(plan: Plan, samples: Sequence[int]) -> _Rows:
    micro = iter(_cut(plan, samples))

    def rows(counts: Sequence[int]) -> Iterator[BatchRow]:
        if len(counts) == 1:
            yield from [BatchRow(lanes=lane) for lane in islice(zip(micro, strict=True), counts[0])]
            return
        for row in range(max(counts)):
            yield BatchRow(lanes=tuple([next(micro) if row < count else () for count in counts]))

    return tuple(tuple(rows(pipeline.micro_batches_by_lane)) for pipeline in plan.pipelines)


def _in_turn(plan: Plan, samples: Sequence[int]) -> _Rows:
    slots = _slots(plan)
    if plan.packed:
        slots = [-(-len(samples) // plan.micro_batch)] * len(slots)
    dealt: list[list[MicroBatch]] = [[] for _ in slots]
    turns = (lane for turn in range(max(slots)) for lane, slot in enumerate(slots) if turn < slot)
    for lane, micro in zip(turns, _cut(plan, samples), strict=False):
        dealt[lane].append(micro)
    return _by_pipeline(plan, dealt)


def _evenly(plan: Plan, samples: Sequence[int], lengths: BatchLengths) -> _Rows:
    slots, tokens = _slots(plan), lengths.tokens
    cut = sample_packing.runs(tokens, sum(slots), plan.micro_batch, lengths.linear)
    costs = [sample_packing.cost(len(run), tokens[run[0]], lengths.linear) for run in cut]
    micro = [tuple(SequencePiece.whole(samples[i], tokens[i]) for i in run) for run in cut]
    dealt = [[micro[index] for index in mine] for mine in sample_packing.dealt(costs, slots)]
    return _by_pipeline(plan, dealt)


def _slots(plan: Plan) -> list[int]:
    """The number of micro-batches that each lane takes."""
    return [count for pipeline in plan.pipelines for count in pipeline.micro_batches_by_lane]


def _cut(plan: Plan, samples: Sequence[int]) -> list[MicroBatch]:
    pieces, size = SequencePiece.all_whole(samples), plan.micro_batch
    return [tuple(pieces[first : first + size]) for first in range(0, len(pieces), size)]


def _by_pipeline(plan: Plan, dealt: Sequence[Sequence[MicroBatch]]) -> _Rows:
    """Rows of what each lane has."""
    lanes = iter(dealt)
    mine = [tuple(islice(lanes, len(pipeline.micro_batches_by_lane))) for pipeline in plan.pipelines]
    return tuple(tuple(BatchRow(lanes=row) for row in zip_longest(*each, fillvalue=())) for each in mine)
