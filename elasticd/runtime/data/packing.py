"""`pack`: makes one row of sequences, one after the other, of samples.

A sample's tensors have one entry for each of its tokens. A row of them is [1, tokens, ...]; of a sequence that
is cut it has the tokens of its pieces alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from elasticd_planner.batching.packed_batch import CutOptions, NoRoom, packed_batch_plan
from elasticd_planner.numeric import Ints
from elasticd_planner.spec.batch import BatchLengths, BatchPlan, SequencePiece, batch_plan
from elasticd_planner.spec.plan import Plan
from elasticd_planner.spec.sequence_lengths import Lengths
from torch import Tensor

from elasticd.runtime.data.collate import LISTS, MODALITIES, PADDING, Unlike, described, signed, summed, where
from elasticd.runtime.data.prefetch import NO_ROW, SampleError
from elasticd.runtime.exits import script_options

#: What to do where a sample makes no row.
_REMEDY = (
    "packed samples have one entry for each token in every part; else train without DataOptions(packing=...)"
)

#: Samples that are asked for their lengths one by one before a job starts, at most.
_MOST_ASKED = 1 << 16


@script_options
@dataclass(frozen=True, kw_only=True)
class Packing:
    """The options by which sequences of a step share rows: the argument `packing` of `elasticd.DataOptions`.

    Sequences follow each other in a row [1, tokens] without padding. Modules ask `elasticd.attention` and
    `elasticd.positions` for what depends on where a sequence begins; models of `from_hf` do so by themselves.

    Raises:
        ValueError: `tokens` or `least` is not positive.
    """

    #: The most tokens of a row; a plan may give a lane fewer, as its memory asks. None: those of a padded
    #: micro-batch, which are `micro_batch` x the longest sequence of the step.
    tokens: int | None = None
    #: Whether a sequence may be cut over lanes of a pipeline (context parallelism): where the row of one lane
    #: does not hold it, or lanes would wait for each other.
    cut: bool = True
    #: The least pairs of tokens that a lane gets of a sequence that memory does not ask to cut, because kernels
    #: are slow on few tokens. 1,000 and more suits a GPU.
    least: int = 256

    def __post_init__(self) -> None:
        if not isinstance(self.least, int) or self.least < 1:
            raise ValueError(f"packing: least is {self.least!r}; it must be a whole number from 1 on")
        if self.tokens is not None and (not isinstance(self.tokens, int) or self.tokens < 1):
            raise ValueError(f"packing: tokens is {self.tokens!r}; it must be a whole number from 1 on")


def deal(
    packing: Packing | None,
    plan: Plan,
    step: int,
    samples: Sequence[int],
    lengths: BatchLengths | None,
    slowdown: Sequence[int] | None = None,
) -> BatchPlan:
    """The micro-batches of a step, padded or packed.

    Args:
        packing: None: they are padded.
        plan: the plan.
        step: its index.
        samples: their ids.
        lengths: of the samples; None: not known.
        slowdown: of each lane, see `packed_batch_plan`.

    Raises:
        SampleError: a sample goes into no row.
    """
    if packing is None:
        return batch_plan(plan, step, samples, lengths)
    assert lengths is not None  # the recipe refuses packing without lengths
    # A row takes some time whatever is in it: about that of the least piece that is worth a kernel.
    cut = CutOptions(least=packing.least, fixed=packing.least * lengths.linear) if packing.cut else None
    try:
        return packed_batch_plan(plan, step, samples, lengths, packing.tokens, cut=cut, slowdown=slowdown)
    except NoRoom as error:
        raise SampleError(error.sample, f"it {error.why}: {_longer_rows(packing, plan)}", NO_ROW) from error


def _longer_rows(packing: Packing, plan: Plan) -> str:
    """The remedy where a plan's lanes do not hold a sequence."""
    held = [lane.capacity for pipeline in plan.pipelines for lane in pipeline.packed]
    if packing.tokens is not None and packing.tokens <= max(held, default=packing.tokens):
        remedies = ["raise Packing(tokens=...)"]
    else:
        remedies = ["start the job again, which from its checkpoint is planned for this length"]
    if not packing.cut:
        remedies.append("let sequences be cut over devices, Packing(cut=True)")
    return ", or ".join([*remedies, "add devices", "leave out or shorten such samples"])


@dataclass(frozen=True, kw_only=True)
class KnownLengths:
    """Lengths of a dataset's samples."""

    indices: Ints  #: of the samples
    tokens: Ints  #: of each, at least 1
    every: bool  #: they are of all samples; else the longest is not known

    @classmethod
    def of_all(cls, tokens: Ints) -> KnownLengths:
        """Of all samples of a dataset."""
        return cls(indices=np.arange(len(tokens)), tokens=np.maximum(1, tokens), every=True)

    @property
    def longest(self) -> tuple[int, int]:
        """Index and tokens of the longest."""
        at = int(self.tokens.argmax())
        return int(self.indices[at]), int(self.tokens[at])

    @property
    def mean(self) -> float:
        """Tokens of a sample, in the mean."""
        return float(self.tokens.mean())

    def of_steps(self, samples: int) -> Lengths:
        """Of steps of so many samples: the longest is one that such a step has."""
        total, squares = int(self.tokens.sum()), int((self.tokens * self.tokens).sum())
        place = max(0, len(self.tokens) - 1 - len(self.tokens) // samples)
        longest = float(np.partition(self.tokens, place)[place])
        effective = squares / total
        return Lengths(
            mean=total / len(self.tokens), effective=effective, longest=max(longest, math.ceil(effective))
        )


def known_lengths(dataset: Any, length: Callable[[int], int], count: int) -> KnownLengths:
    """The lengths of a dataset's samples before any is read.

    Args:
        dataset: with the attribute `lengths`, which has them all; None: they are asked for one by one, at even
            distances if there are many.
        length: tokens of a sample by its index.
        count: of samples.
    """
    if dataset is not None:
        return KnownLengths.of_all(all_lengths(dataset, count))
    indices = np.unique(np.linspace(0, count - 1, min(count, _MOST_ASKED)).astype(np.int64))
    tokens = np.array([length(index) for index in indices.tolist()], dtype=np.int64)
    return KnownLengths(indices=indices, tokens=np.maximum(1, tokens), every=len(indices) >= count)


def all_lengths(dataset: Any, count: int) -> Ints:
    """Tokens of each sample of a dataset with the attribute `lengths`."""
    return np.asarray(dataset.lengths).reshape(-1)[:count].astype(np.int64)


def row_tokens(sample: Any) -> int:
    """The tokens of a sample in a packed row: its first tensor or array has an entry for each."""
    return next((len(value) for value in _parts(sample) if len(value.shape)), 0)


def _parts(sample: Any) -> Iterator[Tensor | np.ndarray[Any, Any]]:
    if isinstance(sample, Tensor | np.ndarray):
        yield sample
    elif isinstance(sample, Mapping | tuple):
        for part in sample.values() if isinstance(sample, Mapping) else sample:
            yield from _parts(part)


def pack(samples: Sequence[Any], pieces: Sequence[SequencePiece]) -> Any:
    """One row of these samples' pieces.

    Tensors and arrays with an entry for each token ([tokens] or [tokens, ...]) are cut to the piece and follow
    each other, [1, tokens, ...]; mappings and tuples are packed part by part. Counts under the key "modalities"
    are summed over the samples whose first token is here.

    Args:
        samples: the whole sample of each piece.
        pieces: what is to be in the row, in order.

    Raises:
        Unlike: a sample is not as long as its piece says, or has a part that is not one entry for each token.
    """
    return _row(samples, pieces, ())


def blank(like: Any, piece: SequencePiece) -> Any:
    """A sample of zeros as long as a piece says, with the parts that another sample has."""
    if isinstance(like, Mapping):
        return {key: part if key == MODALITIES else blank(part, piece) for key, part in like.items()}
    if isinstance(like, tuple):
        parts = [blank(part, piece) for part in like]
        return type(like)(*parts) if hasattr(like, "_fields") else tuple(parts)
    tensor = torch.as_tensor(like)
    return tensor.new_zeros((piece.length, *tensor.shape[1:]))


def _row(parts: Sequence[Any], pieces: Sequence[SequencePiece], keys: tuple[str, ...]) -> Any:
    first = parts[0]
    if isinstance(first, Mapping):
        if keys[-1:] == (MODALITIES,) and all(isinstance(part, Mapping) for part in parts):
            return summed([part for part, piece in zip(parts, pieces, strict=True) if not piece.start])
        _refuse_unlike(parts, lambda part: isinstance(part, Mapping) and part.keys() == first.keys(), keys)
        return {key: _row([part[key] for part in parts], pieces, (*keys, str(key))) for key in first}
    if isinstance(first, tuple):
        _refuse_unlike(parts, lambda part: isinstance(part, tuple) and len(part) == len(first), keys)
        columns = zip(*parts, strict=True)
        rows = [_row(part, pieces, (*keys, str(place))) for place, part in enumerate(columns)]
        return type(first)(*rows) if hasattr(first, "_fields") else tuple(rows)
    tensors = [_tokens(part, place, pieces[place], keys) for place, part in enumerate(parts)]
    for place, tensor in enumerate(tensors):
        if tensor.shape[1:] != tensors[0].shape[1:]:
            raise Unlike(
                place, f"{where(keys)}: shape {tuple(tensor.shape)} beside {tuple(tensors[0].shape)}: {_REMEDY}"
            )
    common = tensors[0].dtype
    for tensor in tensors[1:]:
        common = torch.promote_types(common, tensor.dtype)
    cut = [
        tensor[start:stop].to(common)
        for tensor, piece in zip(tensors, pieces, strict=True)
        for start, stop in piece.spans
    ]
    return torch.cat(cut)[None]


def _refuse_unlike(parts: Sequence[Any], alike: Callable[[Any], bool], keys: tuple[str, ...]) -> None:
    for place, part in enumerate(parts):
        if not alike(part):
            raise Unlike(place, f"{where(keys)}: {described(part)} beside {described(parts[0])}")


def _tokens(part: Any, place: int, piece: SequencePiece, keys: tuple[str, ...]) -> Tensor:
    """A part of a sample with an entry for each token."""
    if not isinstance(part, Tensor | np.ndarray):
        remedy = LISTS if isinstance(part, list) else _REMEDY
        raise Unlike(place, f"{where(keys)}: {described(part)} has no entry for each token: {remedy}")
    try:
        tensor = torch.as_tensor(part)
    except TypeError as error:  # an array of text or of objects
        raise Unlike(place, f"{where(keys)}: {error}: {_REMEDY}") from error
    if tensor.dim() == 0 or len(tensor) != piece.length:
        raise Unlike(
            place,
            f"{where(keys)}: shape {tuple(tensor.shape)}, and its length says {piece.length} tokens: {_REMEDY}",
        )
    return signed(tensor) if keys and keys[-1] in PADDING else tensor
