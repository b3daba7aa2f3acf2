"""The vote: one all-gather of a small record per rank that ends every step.

Every rank folds the same records in rank order, so all have the same bits: global loss, gradient norm,
whether to apply, whether to switch, and the ledger of samples.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable, Sequence
from enum import IntEnum
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import torch
from elasticd_planner.value import Value

from elasticd.records import Vote
from elasticd.runtime.groups import Group

#: A record's fields in their order: integers, but for sums of squares and loss and the count of targets.
_RECORD = struct.Struct("<qqq??qdddQqb")
RECORD_BYTES = _RECORD.size


class LedgerError(RuntimeError):
    """The samples that travelled through some rank are not those of the batch plan."""


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
    word on checkpoints and its bit on snapshots. `failed`: the first rank that could not read a sample, and the
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
            loss=self.loss,
            norm=self.norm,
            count=self.count,
            tokens=self.tokens,
            apply=self.apply,
        )


def hash_samples(ids: Iterable[int]) -> int:
    """A 64-bit hash of sample ids in order."""
    return _hash(tuple(ids))


@lru_cache(maxsize=64)
def _hash(ids: tuple[int, ...]) -> int:
    """A rank asks twice for its own: what it saw, and what it was to see."""
    data = struct.pack(f"<{len(ids)}q", *ids)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


#: Of a rank that sees none.
NO_SAMPLES = hash_samples(())


def fold(records: Sequence[tuple[Any, ...]], expected: Sequence[int]) -> Outcome:
    """Folds the records' fields in rank order; `expected` are the hashes that the batch plan gives each rank.

    Raises `LedgerError` on every rank alike where samples or steps differ."""
    columns = zip(*records, strict=True)
    steps, prepared, saving, snapshot = islice(columns, 4)
    finite, tokens, squares, losses, targets, samples, failed, going = columns
    step = steps[0]
    if steps.count(step) != len(steps):
        raise LedgerError(f"ranks are at different steps: {sorted(set(steps))}")
    if samples != tuple(expected):
        wrong = [rank for rank, hashed in enumerate(samples) if hashed != expected[rank]]
        raise LedgerError(f"step {step}: ranks {wrong} did not see the samples of the batch plan")
    count = math.fsum(targets)
    if not count:
        raise LedgerError(f"step {step}: the loss counted no targets in the whole batch")
    square = math.fsum(squares)
    unread = next((rank for rank, index in enumerate(failed) if index), None) if any(failed) else None
    return Outcome(
        step=step,
        loss=math.fsum(losses) / count,
        norm=math.sqrt(square) / count if math.isfinite(square) else math.inf,
        count=count,
        tokens=sum(tokens),
        apply=all(finite) and math.isfinite(square) and unread is None,
        prepared=prepared,
        saving=saving,
        snapshot=snapshot,
        failed=None if unread is None else (unread, failed[unread] - 1),
        last=all(going) and Going.UNSAVED in going,
    )


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
