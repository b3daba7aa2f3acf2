"""The lengths of a step's sequences: as one value, as a histogram, and as each device reports them.

Time follows the sums: a token costs the same whatever sequence it is in, but for attention, which costs each
token its sequence's length. Memory follows the longest.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Iterable

import msgspec

from elasticd_planner.spec.measurement import Measurement
from elasticd_planner.value import Value, refuse

#: Buckets of a histogram for each doubling of the length.
PER_DOUBLING = 4


class Lengths(Value, frozen=True, kw_only=True):
    """The distribution of sequences' lengths: `mean` tokens; `effective`, the length of the sequence that a
    token is in, on average over tokens (the sum of squared lengths over the sum of lengths); and the
    `longest`."""

    mean: float
    effective: float
    longest: float

    def __post_init__(self) -> None:
        # Rounding may leave the mean a little above the effective length where all are alike.
        if not 0 < self.mean <= self.effective * (1 + 1e-9) or not self.effective <= self.longest * (1 + 1e-9):
            refuse(f"lengths: 0 < mean <= effective <= longest must hold, not {self}")

    def __str__(self) -> str:
        return f"{self.mean:.0f} tokens in the mean, {self.longest:.0f} at most"


def bucket(length: int) -> int:
    """The bucket of a histogram that a length of at least 1 is in."""
    return math.floor(PER_DOUBLING * math.log2(length) + 1e-9)


def histogram(lengths: Iterable[int]) -> dict[int, int]:
    """The number of sequences in each bucket."""
    return dict(sorted(Counter(map(bucket, lengths)).items()))


def packed(measurement: Measurement) -> bytes:
    """The report of a device about a step's sequences, the same bytes for the same sequences: the numbers of
    `_SEQUENCES`, then the histogram. Nothing where they were not measured."""
    if not measurement.squares > 0:
        return b""
    counts = measurement.lengths
    if [*counts] != sorted(counts):  # a worker's `histogram` is
        counts = dict(sorted(counts.items()))
    numbers = measurement.tokens, measurement.squares, measurement.longest, sum(counts.values())
    return _SEQUENCES.pack(*numbers) + _encoder.encode(counts)


#: Of the sequences that a device reports: tokens, sum of squared lengths, the longest, and how many.
_SEQUENCES = struct.Struct("<4d")
_encoder = msgspec.json.Encoder()


def lengths_of(reported: Iterable[bytes]) -> Lengths | None:
    """Of all sequences of a step, each counted once, from what devices report of them (`packed`; members of a
    pipeline see the same ones: of those that report the same lengths and tokens one counts). None where they
    were not measured."""
    distinct = [_SEQUENCES.unpack_from(each) for each in dict.fromkeys(reported) if each]
    sequences = sum(count for _, _, _, count in distinct)
    if not sequences:
        return None
    tokens = sum(tokens for tokens, _, _, _ in distinct)
    return Lengths(
        mean=tokens / sequences,
        effective=sum(squares for _, squares, _, _ in distinct) / tokens,
        longest=max(longest for _, _, longest, _ in distinct),
    )


def even(tokens: float) -> Lengths:
    """Of sequences that all have so many tokens: what profiles assume until lengths were measured."""
    return Lengths(mean=tokens, effective=tokens, longest=tokens)
