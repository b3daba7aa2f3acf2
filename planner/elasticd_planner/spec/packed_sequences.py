"""The sequences that a job packs: their number in a step, their lengths, and the limits of a row of them."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from elasticd_planner.numeric import Floats, Ints
from elasticd_planner.spec.sequence_lengths import Lengths
from elasticd_planner.value import Value, refuse

#: Sequences that typical lengths are of, at most: beyond, each stands for several.
MOST_TYPICAL = 8192


class PackedSequences(Value, frozen=True, kw_only=True):
    """The sequences of a step of a packed job, as a plan is made for them."""

    sequences: float  # of a step, in the mean
    lengths: Lengths  # of those of a step
    longest: int  # [tokens] of the longest that is known to come: the lanes of some pipeline must hold it
    sample: str = ""  # which one that is, for people
    #: [tokens] of one that may come beside: a plan holds it where some plan does (0: no more than `longest`)
    likely: int = 0
    linear: int  # what a token's matrix products cost, in units of its attention to one other
    row_tokens: int = 0  # the most tokens of a row, whatever memory holds; 0: of a padded micro-batch
    cut: bool = True  # whether sequences may be cut over the lanes of a pipeline
    least: int = 256  # [pairs] of a piece that memory does not ask for

    def __post_init__(self) -> None:
        if not 0 < self.sequences < math.inf or self.longest < 1:
            refuse("packed sequences: a step needs some, and the longest at least a token")
        if self.linear < 1 or min(self.row_tokens, self.likely) < 0 or self.least < 1:
            refuse(
                "packed sequences: linear and least must be at least 1, and row_tokens and likely not negative"
            )

    @property
    def tokens(self) -> float:
        """Tokens of a step."""
        return self.sequences * self.lengths.mean

    def most_tokens(self, micro_batch: int) -> int:
        """The most tokens of a row, whatever memory holds."""
        return self.row_tokens or micro_batch * self.longest

    @property
    def typical(self) -> Ints:
        """Lengths of a step's sequences, the longest first."""
        return _typical(self.sequences, self.lengths)


@lru_cache(maxsize=16)
def _typical(sequences: float, lengths: Lengths) -> Ints:
    """Log-normal quantiles, the first of them the longest, with this mean and effective length."""
    count = min(MOST_TYPICAL, max(1, round(sequences)))
    longest, total = lengths.longest, count * lengths.mean
    if count == 1 or lengths.effective <= lengths.mean * 1.001:
        return np.full(count, max(1, round(lengths.mean)), dtype=np.int64)
    # One alone may not be more than what its square leaves to the effective length.
    longest = min(longest, math.sqrt(0.98 * lengths.effective * total), total - (count - 1))
    at = _normal_quantiles((np.arange(count - 1) + 0.5) / (count - 1))[::-1]
    low, high = 0.0, 6.0
    for _ in range(40):
        sigma = (low + high) / 2
        found = _with_total(np.exp(sigma * at), longest, total)
        if float((found**2).sum()) < lengths.effective * total:
            low = sigma
        else:
            high = sigma
    rounded: Ints = np.maximum(1, np.rint(found)).astype(np.int64)
    rounded.setflags(write=False)
    return rounded


def _with_total(shape: Floats, longest: float, total: float) -> Floats:
    """The longest, and the others in proportion to `shape`, none of them longer, with this sum."""
    rest, low, high = total - longest, 0.0, total
    for _ in range(50):
        scale = (low + high) / 2
        if float(np.minimum(scale * shape, longest).sum()) < rest:
            low = scale
        else:
            high = scale
    found: Floats = np.concatenate([[longest], np.minimum(high * shape, longest)])
    return found


def _normal_quantiles(parts: Floats) -> Floats:
    """Quantiles of the normal distribution (Abramowitz and Stegun 26.2.23, to 4.5e-4)."""
    tail = np.minimum(parts, 1 - parts)
    root = np.sqrt(-2 * np.log(tail))
    found: Floats = root - (2.515517 + root * (0.802853 + root * 0.010328)) / (
        1 + root * (1.432788 + root * (0.189269 + root * 0.001308))
    )
    return np.where(parts < 0.5, -found, found)
