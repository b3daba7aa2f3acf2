"""Spans: sets of tokens of a sequence, as ranges."""

from __future__ import annotations

Spans = list[tuple[int, int]]  # ranges [start, stop)


def joined(spans: Spans) -> Spans:
    """The same tokens in as few ranges as they make, in order."""
    found: Spans = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


def overlaps(some: Spans, others: Spans) -> Spans:
    """The tokens that are in both."""
    both = ((max(a, c), min(b, d)) for a, b in some for c, d in others)
    return [(start, stop) for start, stop in both if start < stop]


def size(spans: Spans) -> int:
    """The number of tokens in ranges that do not overlap."""
    return sum(stop - start for start, stop in spans)


def needed(spans: Spans, length: int, *, causal: bool, window: int | None) -> Spans:
    """The tokens whose keys the queries of some ranges attend to.

    Args:
        spans: the ranges.
        length: of the sequence.
        causal: queries attend to no later token.
        window: they attend to so many tokens, their own among them; None: to all.
    """
    if not causal:
        return [(0, length)]
    return joined([(0 if window is None else max(0, start - window + 1), stop) for start, stop in spans])
