"""The vote that ends every step: an all-gather of one small record of each rank.

Every rank folds the same records in rank order, so that all get the same result to the bit: the global loss,
the gradient norm, whether the update is applied, whether the job switches, and whether every sample was seen.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from elasticd_planner.value import Value

from elasticd.records import Vote
from elasticd.runtime.comm.groups import Group
from elasticd.runtime.data.sample_ledger import LedgerError

#: The fields of `RankRecord` in their order but for the last three, 100 bytes.
_FIELDS = "<qqq??qdddQqbQd?d"


class Draining(IntEnum):
    """The wish that a process leaves the job; if all are, they make a last checkpoint."""

    NO = 0
    UNSAVED = 1  #: it leaves, and has no last checkpoint yet
    SAVED = 2  #: it leaves, and has its last checkpoint, or the job keeps none


class RankRecord(NamedTuple):
    """The record that one rank brings to the vote."""

    step: int  #: index of the step
    prepared: int  #: number of the plan that this rank has prepared; 0: none
    saving: int  #: its word on checkpoints, see `elasticd.machines.worker.checkpointing`
    snapshot: bool  #: a snapshot is due after this step, and this rank can make it
    finite: bool  #: the gradients that it owns are finite
    tokens: int  #: trained on by this rank
    squares: float  #: sum of squares of the gradients that it owns
    loss: float  #: sum over the targets whose loss this rank computed; 0 elsewhere
    targets: float  #: count of those targets
    #: Hash of the sample ids that came with the activations into its forward passes; of a packed batch, 0 if it
    #: is that of the batch plan.
    samples: int
    failed: int = 0  #: 1 + index of a sample that this rank could not read; 0: none
    draining: int = Draining.NO
    next: int = 0  #: digest of the next step's batch plan; 0: it is not known yet, or not packed
    seconds: float = 0.0  #: that its blocks computed in this step
    stop: bool = False  #: its script wants this step to be the last
    balance: float = 0.0  #: balance losses times targets of the samples whose loss is in `targets`
    reached: bytes = b""  #: a bit for each trained parameter, the first in the lowest: it had a gradient here
    #: Of each module of items how many times as long as planned a row took this rank, as a double.
    items: bytes = b""
    #: For each module of the model a number of 64 bits: what its routers chose here, see `RouterChoices`.
    choices: bytes = b""


class UnlikeChoices(LedgerError):
    """Members of a TP group chose unlike experts for the same rows. The update is not made, on any rank."""


class TpGroup(NamedTuple):
    """Ranks that run the same routers on the same rows."""

    module: int  #: index of the module
    ranks: tuple[int, ...]


class StepOutcome(Value, frozen=True, kw_only=True):
    """The outcome of the vote, the same on every rank."""

    vote: Vote  # the part of the outcome from which another rank can make the same update
    loss: float  # mean per target, also where it is not finite; NaN: the batch has no target
    prepared: tuple[int, ...]  # of each rank, as in its record
    saving: tuple[int, ...]  # of each rank, as in its record
    snapshot: tuple[bool, ...]  # of each rank, as in its record
    failed: tuple[int, int] | None = None  # the first rank that could not read a sample, and the sample's index
    seconds: tuple[float, ...] = ()  # of each rank, as in its record
    items: tuple[bytes, ...] = ()  # of each rank, as in its record
    stop: bool = False  # a rank's script wants this step to be the last
    last: bool = False  # all ranks leave the job, and a last checkpoint is to be made


def fold(
    records: Sequence[tuple[Any, ...]],
    expected: Sequence[int],
    trained: int = 0,
    tp_groups: Sequence[TpGroup] = (),
) -> StepOutcome:
    """Folds the records of all ranks.

    Args:
        records: of each rank in rank order, as tuples of the fields of `RankRecord`.
        expected: of each rank the hash of the samples that the batch plan gives it.
        trained: number of the parameters that `RankRecord.reached` has bits of.
        tp_groups: whose members' choices are to be the same.

    Raises:
        LedgerError: steps, samples or the next batch plan differ; on every rank alike.
        UnlikeChoices: routers' choices differ; on every rank alike.
    """
    every: Any = RankRecord._make(zip(*records, strict=True))  # each field has the values of all ranks
    step = every.step[0]
    if every.step.count(step) != len(every.step):
        raise LedgerError(f"ranks are at different steps: {sorted(set(every.step))}")
    if every.samples != tuple(expected):
        wrong = [rank for rank, hashed in enumerate(every.samples) if hashed != expected[rank]]
        raise LedgerError(f"step {step}: ranks {wrong} did not see the samples of the batch plan")
    if len(set(every.next)) > 1:
        usual, _ = Counter(every.next).most_common(1)[0]
        odd = [rank for rank, digest in enumerate(every.next) if digest != usual]
        raise LedgerError(
            f"step {step}: ranks {odd} have another batch plan for step {step + 1} than the others: do their "
            "nodes have other lengths, counts or rows in the dataset, or another elasticd or NumPy?"
        )
    if not any(every.failed):  # what stands in for an unreadable sample is routed otherwise
        _refuse_unlike_choices(step, every.choices, tp_groups)
    count, squares = exact_sum(every.targets), exact_sum(every.squares)
    unread = next((rank for rank, index in enumerate(every.failed) if index), None)
    loss = exact_sum(every.loss) / count if count else math.nan
    vote = Vote(
        step=step,
        loss=_finite(loss),
        norm=_finite(math.sqrt(squares) / (count or 1)),
        count=count,
        tokens=sum(every.tokens),
        apply=all(every.finite) and math.isfinite(squares) and unread is None and count > 0,
        unreached=_unreached(every.reached, trained),
        balance=_finite(exact_sum(every.balance) / count) if count and any(every.balance) else None,
    )
    return StepOutcome(
        vote=vote,
        loss=loss,
        prepared=every.prepared,
        saving=every.saving,
        snapshot=every.snapshot,
        seconds=every.seconds,
        items=every.items,
        failed=None if unread is None else (unread, every.failed[unread] - 1),
        stop=any(every.stop),
        last=all(every.draining) and Draining.UNSAVED in every.draining,
    )


def _refuse_unlike_choices(step: int, choices: Sequence[bytes], tp_groups: Sequence[TpGroup]) -> None:
    if len(set(choices)) == 1:
        return
    for module, ranks in tp_groups:
        first, *others = (choices[rank][8 * module : 8 * module + 8] for rank in ranks)
        if any(each != first for each in others):
            raise UnlikeChoices(
                f"step {step}: routers on ranks {[*ranks]}, one TP group, chose unlike experts for the same "
                "rows: its devices add numbers up in unlike orders; give each TP group devices of one kind, "
                "with one release of torch and its libraries"
            )


def bits_of(names: Collection[str], trained: Sequence[str]) -> bytes:
    """`RankRecord.reached` of a rank that has gradients of these parameters."""
    bits = sum(1 << index for index, name in enumerate(trained) if name in names)
    return bits.to_bytes(-(-len(trained) // 8), "little")


def _unreached(reached: Iterable[bytes], trained: int) -> str:
    """`Vote.unreached`: the parameters that no rank has a gradient of."""
    wanted, bits = (1 << trained) - 1, 0
    for each in set(reached):
        bits |= int.from_bytes(each, "little")
        if bits == wanted:
            return ""
    return f"{wanted & ~bits:x}"


def names_of(unreached: str, trained: Sequence[str]) -> frozenset[str]:
    """The parameters that `Vote.unreached` has bits of."""
    if not unreached:
        return frozenset()
    raw = int(unreached, 16).to_bytes(-(-len(trained) // 8), "little")
    return frozenset(name for index, name in enumerate(trained) if raw[index >> 3] >> (index & 7) & 1)


def exact_sum(values: Iterable[float]) -> float:
    """The sum, rounded once; infinite or NaN where there is no finite sum."""
    listed = list(values)
    try:
        return math.fsum(listed)
    except (OverflowError, ValueError):  # finite numbers without a finite sum, or infinities of both signs
        return sum(listed)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


class StepVote:
    """All-gathers one fixed-size record per rank at the end of a step. Buffers are allocated once."""

    def __init__(
        self,
        group: Group,
        trained: int = 0,
        item_modules: int = 0,
        modules: int = 0,
        tp_groups: Sequence[TpGroup] = (),
    ) -> None:
        """
        Args:
            group: all members of the plan.
            trained: number of the parameters that `RankRecord.reached` has bits of, the same on all ranks.
            item_modules: number of the modules of items.
            modules: number of all modules, for each of which a record has the choices of routers.
            tp_groups: of all modules, whose members' choices are to be the same.
        """
        self._group, self._trained, self._tp_groups = group, trained, tuple(tp_groups)
        self._record = struct.Struct(f"{_FIELDS}{-(-trained // 8)}s{8 * item_modules}s{8 * modules}s")
        self._mine = bytearray(self._record.size)
        self._all = bytearray(self._record.size * group.size)
        self._packed = torch.frombuffer(self._mine, dtype=torch.uint8)
        self._gathered = torch.frombuffer(self._all, dtype=torch.uint8).view(group.size, -1)

    def gather(self, record: RankRecord) -> list[tuple[Any, ...]]:
        """The records of all ranks, in rank order, as tuples of their fields."""
        self._record.pack_into(self._mine, 0, *record)
        self._group.all_gather(self._packed, self._gathered)
        return list(self._record.iter_unpack(self._all))

    def vote(self, record: RankRecord, expected: Sequence[int]) -> StepOutcome:
        """Gathers the records of all ranks and folds them, see `fold`."""
        return fold(self.gather(record), expected, self._trained, self._tp_groups)
