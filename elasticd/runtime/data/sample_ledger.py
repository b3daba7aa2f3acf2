"""The ledger of samples: every rank compares a hash of the samples that it saw with that of the batch plan.

Sample ids pass from stage to stage with the activations, and each rank brings the hash of those that it got to
the vote. Of a packed row they are ids and the parts of the samples.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain

from elasticd_planner.spec.batch import BatchPlan, MicroBatch, SequencePiece, ids_of
from elasticd_planner.spec.item_batch import ItemBatch, SampleItem
from elasticd_planner.spec.plan import Plan


class LedgerError(RuntimeError):
    """A rank saw other samples than the batch plan gives it."""


def entries(micro_batch: MicroBatch | Sequence[SampleItem], *, packed: bool) -> tuple[int, ...]:
    """The ledger's entries of a micro-batch: the ids of its samples; of a packed row of each piece the id and
    the range of its pairs of tokens; of items of each the id of its sample and its index there."""
    pieces: list[SequencePiece] = []
    for piece in micro_batch:
        if isinstance(piece, SampleItem):
            return tuple(chain.from_iterable(micro_batch))
        pieces.append(piece)
    if not packed:
        return ids_of(pieces)
    return tuple(chain.from_iterable((piece.sample, piece.start, piece.stop) for piece in pieces))


def stand_in(ids: Iterable[int]) -> tuple[int, ...]:
    """The entries of items in whose place another one passes, since they could not be read: as they travel."""
    numbers = iter(ids)
    return tuple(part for sample, number in zip(numbers, numbers, strict=True) for part in (sample, ~number))


def without_marks(ids: Sequence[int]) -> Sequence[int]:
    """Entries of items as the batch plan has them, whatever stands in for them."""
    return [part if part >= 0 else ~part for part in ids]


def draws_of(pieces: Sequence[SequencePiece] | Sequence[SampleItem]) -> Sequence[int]:
    """By what the draws of a pass are keyed: the ids of its samples, or a number of each item."""
    if pieces and isinstance(pieces[0], SampleItem):
        return [(item.sample << 16) + item.number for item in pieces if isinstance(item, SampleItem)]
    return [piece.sample for piece in pieces]


def hash_samples(ids: Iterable[int]) -> int:
    """A 64-bit hash of sample ids in order."""
    return _hash(tuple(ids))


def hash_items(ids: Iterable[int]) -> int:
    """The same of items, of each the id of its sample and its number, in any order: passes of items go in the
    order that suits the other modules."""
    numbers = tuple(ids)
    return _hash(tuple(chain.from_iterable(sorted(zip(numbers[::2], numbers[1::2], strict=True)))))


@lru_cache(maxsize=64)
def _hash(ids: tuple[int, ...]) -> int:
    """Cached, because a rank asks for its own samples twice: as it saw them and as the batch plan has them."""
    data = struct.pack(f"<{len(ids)}q", *ids)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


#: The hash of a rank that sees no samples.
NO_SAMPLES = hash_samples(())


def expected_hash(plan: Plan, batch: BatchPlan | ItemBatch, device: str) -> int:
    """The hash that one rank is to bring. Enough where all are known to have the same batch plan.

    Args:
        plan: the plan in force.
        batch: the micro-batches of each lane.
        device: that rank's. One that only carries state sees no samples.
    """
    place = plan.places.get(device)
    if place is None:
        return NO_SAMPLES
    if isinstance(batch, ItemBatch):
        return hash_items(chain.from_iterable(entries(group.items, packed=False) for group in batch.of(place)))
    return hash_samples(chain.from_iterable(entries(m, packed=batch.packed) for m in batch.of(place)))


def expected_hashes(plan: Plan, batch: BatchPlan) -> list[int]:
    """The hash that each rank is to bring, in rank order.

    Args:
        plan: the plan in force. Devices that only carry state see no samples.
        batch: the micro-batches of each lane, in the order of their forward passes.
    """
    hashes: dict[tuple[int, int], int] = {}  # all members of a lane see the same samples
    found = []
    for place in plan.places.values():
        lane = place.pipeline, place.lane
        if lane not in hashes:
            mine = (entries(micro, packed=batch.packed) for micro in batch.of(place))
            hashes[lane] = hash_samples(chain.from_iterable(mine))
        found.append(hashes[lane])
    return found + [NO_SAMPLES] * len(plan.carriers)
