"""The order of a dataset's samples in an epoch, as a function of seed and epoch.

A small dataset is permuted as a whole. Of a large one that would take seconds and gigabytes in each process:
there a keyed bijection of [0, size) gives the sample at any place by itself. It is a Feistel network (Luby and
Rackoff, 1988) over the least square of a power of two that has room for the size; what falls outside of
[0, size) goes through it again (cycle walking; Black and Rogaway, 2002).
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from elasticd_planner.numeric import Ints

Words = npt.NDArray[np.uint64]
#: How an epoch is ordered: permuted as a whole, or place by place.
Order = Literal["permutation", "feistel"]

#: Samples of the largest dataset that is permuted as a whole: 8 MiB, and a tenth of a second.
MOST_PERMUTED = 1 << 20
#: More than the four that a pseudorandom permutation needs: those of a narrow network are weak.
_ROUNDS = 6


def order_for(size: int) -> Order:
    """The order of a new training on a dataset of so many samples."""
    return "permutation" if size <= MOST_PERMUTED else "feistel"


def samples_at(order: Order, seed: int, epoch: int, size: int, first: int, stop: int) -> Ints:
    """The samples at the places [first, stop) of an epoch.

    Args:
        order: how it is ordered.
        seed: of the training.
        epoch: its index.
        size: samples of the dataset.
        first: place of the first of them.
        stop: place behind the last of them, at most `size`.
    """
    if order == "permutation":
        return permutation(seed, epoch, size)[first:stop]
    return _feistel(_round_keys(seed, epoch), size, np.arange(first, stop, dtype=np.uint64)).astype(np.int64)


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, size: int) -> Ints:
    """All samples of an epoch in their order."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(size)


@lru_cache(maxsize=4)
def _round_keys(seed: int, epoch: int) -> tuple[np.uint64, ...]:
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return tuple(np.frombuffer(digest, dtype="<u8"))


def _feistel(keys: tuple[np.uint64, ...], size: int, places: Words) -> Words:
    """The images of places [n] under a keyed bijection of [0, size)."""
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))  # bits of each half
    mask = (np.uint64(1) << half) - np.uint64(1)
    images, outside = places.copy(), np.arange(len(places))
    while len(outside):  # fewer than four turns are expected, as the square is at most four times the size
        left, right = images[outside] >> half, images[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right + key) & mask)
        images[outside] = left << half | right
        outside = outside[images[outside] >= size]
    return images


def _mixed(x: Words) -> Words:
    """SplitMix64's finalizer (Steele, Lea and Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
