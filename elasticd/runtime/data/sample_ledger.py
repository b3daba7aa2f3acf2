"""The ledger of samples: a hash of those that a pass saw, beside that of those that the batch plan gives.

Sample ids go with the activations from stage to stage, and each rank brings the hash of what came to the vote.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain


class LedgerError(RuntimeError):
    """The samples that travelled through some rank are not those of the batch plan."""


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


def expected_hash(micro_batches: Sequence[Sequence[int]]) -> int:
    """The hash of a pipeline's samples in the order of its forward passes."""
    return hash_samples(chain.from_iterable(micro_batches))
