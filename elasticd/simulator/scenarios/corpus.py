"""Corpora: the lengths of a scenario's sequences, by name, by quantiles, as a log-normal or as a file has them.

Those with a name are files that every Python brings along, published quantiles, and two log-normals. The latter
are ours: of a long tail as of text, and of video clips. Lengths are cut at 131,072 tokens.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np
from elasticd_planner.numeric import Ints as Lengths
from elasticd_planner.spec.sequence_lengths import Lengths as SequenceLengths
from elasticd_planner.value import Value, refuse

#: Draws so many lengths.
Draw = Callable[[np.random.Generator, int], Lengths]

LONGEST = 131_072
#: Quantiles of the tokens of a million Wikipedia articles, of the lengths that FlexSP's code comes with.
WIKIPEDIA = (
    (0, 16),
    (0.01, 39),
    (0.1, 87),
    (0.25, 146),
    (0.5, 347),
    (0.75, 862),
    (0.9, 2112),
    (0.99, 10_919),
    (0.999, 37_353),
    (0.9999, 101_537),
    (1, LONGEST),
)


@lru_cache(maxsize=1)
def file_lengths() -> Lengths:
    """The standard library's sources, a token for four bytes."""
    paths = Path(sysconfig.get_path("stdlib")).rglob("*.py")
    sizes = [path.stat().st_size // 4 for path in paths if "-packages" not in str(path)]
    return np.array(sorted(size for size in sizes if 2 < size <= LONGEST))


def files(draw: np.random.Generator, count: int) -> Lengths:
    """Of the standard library's sources."""
    return draw.choice(file_lengths(), count)


def wikipedia(draw: np.random.Generator, count: int) -> Lengths:
    """Of Wikipedia's articles, between the quantiles by their logarithms."""
    return between(draw, count, WIKIPEDIA)


def between(draw: np.random.Generator, count: int, quantiles: Sequence[tuple[float, float]]) -> Lengths:
    """Lengths between the quantiles of a distribution, (part of the sequences, tokens), by their logarithms."""
    where, what = np.array(quantiles, dtype=np.float64).T
    lengths: Lengths = np.exp(np.interp(draw.random(count), where, np.log(what))).astype(np.int64)
    return lengths


def long_tail(draw: np.random.Generator, count: int) -> Lengths:
    """Log-normal (7.6, 1.3)."""
    return np.clip(draw.lognormal(7.6, 1.3, count), 32, LONGEST).astype(np.int64)


def video(draw: np.random.Generator, count: int) -> Lengths:
    """Log-normal (8.0, 0.9)."""
    return np.clip(draw.lognormal(8.0, 0.9, count), 256, LONGEST).astype(np.int64)


#: Other planners that may play the steps of a scenario (`packed_baselines`).
BASELINES = (
    "DHP",
    "DHP by length",
    "DHP without the slow lanes",
    "FlexSP",
    "static degrees",
    "static degrees by cost",
)

CORPORA: dict[str, Draw] = {"files": files, "wikipedia": wikipedia, "long tail": long_tail, "video": video}


class Corpus(Value, frozen=True, kw_only=True):
    """The section [data] of a scenario: the lengths of a packed job's sequences, one of `corpus`, `quantiles`,
    `lognormal` and `lengths`. row_tokens: the most tokens of a row (0: of a padded micro-batch); cut: whether
    sequences may be cut over lanes; least: pairs of a piece that memory does not ask for; follow: whether the
    shares of lanes follow their speeds; baselines: other planners that play the same steps."""

    corpus: str = ""  # one of CORPORA
    quantiles: tuple[tuple[float, float], ...] = ()  # (part of the sequences, tokens), from 0 to 1
    lognormal: tuple[float, ...] = ()  # mean and standard deviation of the logarithm
    lengths: tuple[int, ...] = ()  # drawn with replacement; `file` in a scenario is a file of them
    shortest: int = 1
    longest: int = LONGEST
    row_tokens: int = 0
    cut: bool = True
    least: int = 256
    follow: bool = True
    baselines: tuple[str, ...] = ("DHP", "FlexSP", "static degrees")

    def __post_init__(self) -> None:
        given = [name for name in ("corpus", "quantiles", "lognormal", "lengths") if getattr(self, name)]
        if len(given) != 1:
            refuse(
                "give one of corpus, quantiles, lognormal and file: how long are the sequences? "
                f"(there are {', '.join(given) or 'none'})"
            )
        if self.corpus and self.corpus not in CORPORA:
            refuse(f"corpus = {self.corpus!r} must be one of {', '.join(CORPORA)}")
        if not 1 <= self.shortest <= self.longest:
            refuse(f"shortest = {self.shortest} and longest = {self.longest} must be 1 at least, in this order")
        if self.row_tokens < 0 or self.least < 1:
            refuse(f"row_tokens = {self.row_tokens} must not be negative, least = {self.least} at least 1")
        if self.lognormal and (len(self.lognormal) != 2 or not self.lognormal[1] > 0):
            refuse(f"lognormal = {list(self.lognormal)} must be [mean, deviation] of the logarithm")
        if self.quantiles:
            parts, tokens = zip(*self.quantiles, strict=True)
            ordered = all(a <= b for each in (parts, tokens) for a, b in pairwise(each))
            if parts[0] != 0 or parts[-1] != 1 or not ordered or not tokens[0] >= 1:
                refuse("quantiles must ascend, from [0.0, shortest] to [1.0, longest], shortest at least 1")
        if self.lengths and min(self.lengths) < 1:
            refuse("file: lengths must be at least 1")

    def drawn(self, seed: int, step: int, count: int, scale: float = 1.0) -> Lengths:
        """The lengths of a step, times a factor."""
        draw = np.random.default_rng((seed, step))
        if self.corpus:
            lengths = CORPORA[self.corpus](draw, count)
        elif self.quantiles:
            lengths = between(draw, count, self.quantiles)
        elif self.lognormal:
            lengths = np.minimum(draw.lognormal(self.lognormal[0], self.lognormal[1], count), 2.0**40)
        else:
            lengths = draw.choice(np.array(self.lengths), count)
        scaled: Lengths = np.clip(np.rint(lengths * scale), self.shortest, self.longest).astype(np.int64)
        return scaled

    @property
    def mean(self) -> float:
        """Tokens of a sequence, of many."""
        return self.typical(1.0, _MANY).mean

    def typical(self, scale: float, samples: int) -> SequenceLengths:
        """Of steps of so many samples, times a factor: of many of them, and the longest that a step has."""
        many = self.drawn(0, 0, _MANY, scale)
        total, squares = int(many.sum()), int((many * many).sum())
        place = max(0, _MANY - 1 - _MANY // samples)
        effective = squares / total
        longest = max(float(np.partition(many, place)[place]), effective)
        return SequenceLengths(mean=total / _MANY, effective=effective, longest=longest)


#: Sequences by which a corpus is known.
_MANY = 1 << 16
