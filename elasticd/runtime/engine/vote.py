"""The vote: one all-gather of a small record per rank that ends every step.

Every rank folds the same records in rank order, so all have the same bits: global loss, gradient norm,
whether to apply, whether to switch, and the ledger of samples.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from elasticd_planner.value import Value

from elasticd.records import Vote
from elasticd.runtime.comm.groups import Group
from elasticd.runtime.data.sample_ledger import LedgerError

#: A record's fields in their order: integers, but for sums of squares and loss and the count of targets.
_RECORD = struct.Struct("<qqq??qdddQqb")
RECORD_BYTES = _RECORD.size


class Going(IntEnum):
    """Whether a rank was told to go, and has a last checkpoint to make if all were."""

    STAYS = 0
    UNSAVED = 1
    SAVED = 2


class Record(NamedTuple):
    """What one rank brings. `squares` is the sum of squares of the gradient pieces that it owns; loss sum and
    targets are of the samples whose loss it computed (zero elsewhere); `samples` hashes the ids that came with
    the tensors into its forward; `saving` is the word on its checkpoint (see machines.saving); `snapshot` says
    that one is due after this step, and that this rank can make it; `failed` is one more than the index of a
    sample that this rank could not read, or 0; `going` says whether this process was told to go (a
    `Going`)."""

    step: int
    prepared: int
    saving: int
    snapshot: bool
    finite: bool
    tokens: int
    squares: float
    loss: float
    targets: float
    samples: int
    failed: int = 0
    going: int = Going.STAYS


class Outcome(Value, frozen=True, kw_only=True):
    """What the vote decided, the same on every rank: mean loss per target, gradient norm of the mean loss,
    target count, tokens, whether to apply the update, and of every rank the number that it had prepared, its
    word on checkpoints and its bit on snapshots. A batch without targets has no loss (NaN), and its update is
    not made. `failed`: the first rank that could not read a sample, and the
    sample's index; nothing is applied then. `last`: all were told to go, and what they hold is to be saved."""

    step: int
    loss: float
    norm: float
    count: float
    tokens: int
    apply: bool
    prepared: tuple[int, ...]
    saving: tuple[int, ...]
    snapshot: tuple[bool, ...]
    failed: tuple[int, int] | None = None
    last: bool = False

    @property
    def vote(self) -> Vote:
        """What another rank needs to make the same update."""
        return Vote(
            step=self.step,
            loss=self.loss if math.isfinite(self.loss) else None,
            norm=self.norm if math.isfinite(self.norm) else None,
            count=self.count,
            tokens=self.tokens,
            apply=self.apply,
        )


def fold(records: Sequence[tuple[Any, ...]], expected: Sequence[int]) -> Outcome:
    """Folds the records' fields in rank order; `expected` are the hashes that the batch plan gives each rank.

    Raises `LedgerError` on every rank alike where samples or steps differ."""
    every: Any = Record._make(zip(*records, strict=True))  # of each field what all ranks say
    step = every.step[0]
    if every.step.count(step) != len(every.step):
        raise LedgerError(f"ranks are at different steps: {sorted(set(every.step))}")
    if every.samples != tuple(expected):
        wrong = [rank for rank, hashed in enumerate(every.samples) if hashed != expected[rank]]
        raise LedgerError(f"step {step}: ranks {wrong} did not see the samples of the batch plan")
    count, squares = _total(every.targets), _total(every.squares)
    unread = next((rank for rank, index in enumerate(every.failed) if index), None)
    return Outcome(
        step=step,
        loss=_total(every.loss) / count if count else math.nan,
        norm=math.sqrt(squares) / (count or 1) if math.isfinite(squares) else math.inf,
        count=count,
        tokens=sum(every.tokens),
        apply=all(every.finite) and math.isfinite(squares) and unread is None and count > 0,
        prepared=every.prepared,
        saving=every.saving,
        snapshot=every.snapshot,
        failed=None if unread is None else (unread, every.failed[unread] - 1),
        last=all(every.going) and Going.UNSAVED in every.going,
    )


def _total(values: Iterable[float]) -> float:
    """The sum, rounded once; infinite or NaN where it cannot be formed."""
    listed = list(values)
    try:
        return math.fsum(listed)
    except (OverflowError, ValueError):  # finite numbers without a finite sum, or infinities of both signs
        return sum(listed)


class Booth:
    """Where one rank votes: the group of all, and memory for their records, which every vote uses again."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._mine, self._all = bytearray(_RECORD.size), bytearray(_RECORD.size * group.size)
        self._packed = torch.frombuffer(self._mine, dtype=torch.uint8)
        self._gathered = torch.frombuffer(self._all, dtype=torch.uint8).view(group.size, -1)

    def gather(self, record: Record) -> list[tuple[Any, ...]]:
        """The fields of all ranks' records."""
        _RECORD.pack_into(self._mine, 0, *record)
        self._group.all_gather(self._packed, self._gathered)
        return list(_RECORD.iter_unpack(self._all))

    def vote(self, record: Record, expected: Sequence[int]) -> Outcome:
        """Gathers all ranks' records and folds them."""
        return fold(self.gather(record), expected)
