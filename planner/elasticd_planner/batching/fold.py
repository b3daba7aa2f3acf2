"""The fold: a sequence counted in mirrored pairs of tokens, so that equal shares of pairs are equal work.

Under a causal mask token i of a sequence of L tokens sees i + 1 keys, so that the pair {i, L - 1 - i} sees L +
1 keys for every i. A lane that has a part of the pairs has the same part of the tokens, of the matrix products,
of the memory and of the attention: s tokens of a sequence of L cost s x (linear + L). The token in the middle
of an odd length is a pair by itself. A piece is an interval of pairs, and so is a piece of a piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from elasticd_planner.numeric import Ints
from elasticd_planner.value import refuse


def pair_count(length: int) -> int:
    """The pairs of a sequence of so many tokens."""
    return (length + 1) // 2


def token_counts(length: Ints, start: Ints, stop: Ints) -> Ints:
    """The tokens of pairs [start, stop) of sequences: two a pair, but for the middle of an odd length."""
    found: Ints = 2 * (stop - start) - ((2 * stop > length) & (stop > start))
    return found


def cost(tokens: int, length: int, linear: int) -> int:
    """The cost of so many tokens of a sequence of `length`, in units of one token's attention to one other."""
    return tokens * (linear + length)


def shared(
    length: int, weights: Sequence[int], most: Sequence[int] | None = None
) -> tuple[tuple[int, int], ...]:
    """Cuts a sequence among members in proportion to their weights.

    Args:
        length: of the sequence [tokens].
        weights: of each member, at least 1.
        most: the most tokens of each member; None: any number.

    Returns:
        The pairs [start, stop) of each member, one after the other, at least one pair each. Each border is the
        nearest pair to its exact place, so that a share differs from the exact one by one pair at most, unless
        members with less than a pair, or with less room, make their neighbours have more.

    Raises:
        Invalid: there are fewer pairs than members, or the members hold fewer tokens than there are.
    """
    pairs = pair_count(length)
    if len(weights) > pairs:
        refuse(f"a sequence of {length} tokens has {pairs} pairs of tokens: {len(weights)} lanes need one each")
    ends = borders(np.array([pairs]), np.array([0, *accumulate(weights)]))[0].tolist()
    if most is not None:
        ends = [0, *accumulate(_limited([b - a for a, b in pairwise(ends)], length, most))]
    return tuple(pairwise(ends))


def borders(pairs: Ints, before: Ints) -> Ints:
    """The borders at which sequences of so many pairs are cut among the same members.

    Args:
        pairs: of each sequence [sequences], as many as members at least.
        before: the weight of the members before each one, and of all at last [members + 1].

    Returns:
        The borders, the first and the last one included [sequences, members + 1].
    """
    members = len(before) - 1
    each = np.arange(members + 1)
    # Pairs before a border, without one for each member before it: these alone are shared out freely.
    free = np.maximum.accumulate(nearest(pairs[:, None], before, before[-1]) - each, axis=1)
    found: Ints = np.minimum(free, pairs[:, None] - members) + each
    return found


def nearest(pairs: Ints, part: Ints, whole: Ints) -> Ints:
    """The number of pairs that is nearest to part / whole of them."""
    found: Ints = (2 * pairs * part + whole) // (2 * whole)
    return found


def held_pairs(length: int, most: Sequence[int]) -> list[int]:
    """The pairs of a sequence that members of so many tokens hold, each for itself. The middle of an odd length
    is one token alone, and the last member has it."""
    held = [tokens // 2 for tokens in most]
    if length % 2:
        held[-1] = (most[-1] + 1) // 2
    return held


def _limited(shares: list[int], length: int, most: Sequence[int]) -> list[int]:
    """The shares [pairs] of members that hold so many tokens: what is too much for some goes to the others, in
    proportion to what these hold beside."""
    held = held_pairs(length, most)
    if sum(held) < sum(shares) or min(held) < 1:
        refuse(f"a sequence of {length} tokens does not fit lanes of {', '.join(map(str, most))} tokens")
    own = [min(share, room) for share, room in zip(shares, held, strict=True)]
    left = list(accumulate((b - a for a, b in zip(own, held, strict=True)), initial=0))
    over = sum(shares) - sum(own)
    given = [over * each // max(1, left[-1]) for each in left]
    return [share + b - a for share, (a, b) in zip(own, pairwise(given), strict=True)]
