"""Lengths of sequences: files that every Python brings along, published quantiles, and two log-normals.

The log-normals are ours: of a long tail as of text, and of video clips. Lengths are cut at 131,072 tokens.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

Lengths = npt.NDArray[np.int64]
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
    where, what = np.array(WIKIPEDIA).T
    return np.exp(np.interp(draw.random(count), where, np.log(what))).astype(np.int64)


def long_tail(draw: np.random.Generator, count: int) -> Lengths:
    """Log-normal (7.6, 1.3)."""
    return np.clip(draw.lognormal(7.6, 1.3, count), 32, LONGEST).astype(np.int64)


def video(draw: np.random.Generator, count: int) -> Lengths:
    """Log-normal (8.0, 0.9)."""
    return np.clip(draw.lognormal(8.0, 0.9, count), 256, LONGEST).astype(np.int64)


CORPORA: dict[str, Draw] = {"files": files, "wikipedia": wikipedia, "long tail": long_tail, "video": video}
