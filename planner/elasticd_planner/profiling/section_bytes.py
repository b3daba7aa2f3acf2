"""Bytes that a model's sections keep and have alive, measured by a run of each, in place of what shapes say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from elasticd_planner.cost.model_profile import WORKING, ModelProfile, SectionProfile
from elasticd_planner.profiling.regression import line
from elasticd_planner.profiling.samples import MeasuredBytes, ModelBytes

#: Working bytes that are within this factor of those by shapes are taken to be of the same parts.
ALIKE = 1.1


def with_bytes(profile: ModelProfile, measured: ModelBytes) -> ModelProfile:
    """The profile with measured bytes of activations; of a section that was not measured its own."""
    return msgspec.structs.replace(
        profile,
        block=section_with_bytes(profile.block, measured.of("block")),
        embed=section_with_bytes(profile.embed, measured.of("embed")),
        head=section_with_bytes(profile.head, measured.of("head")),
        bundle_bytes=measured.bundle_bytes,
    )


def section_with_bytes(base: SectionProfile, measured: Sequence[MeasuredBytes]) -> SectionProfile:
    """A section with measured bytes: at each share the most of all token counts.

    Args:
        base: the section by its shapes.
        measured: of it; at a few shares, and numbers of tokens.
    """
    if not measured:
        return base
    cut, whole = _parted(base, [(each.share, each.kept / each.tokens) for each in measured])
    again = max(each.kept_recomputed / each.tokens for each in measured)
    return msgspec.structs.replace(
        base,
        cut_activation=cut,
        whole_activation=whole,
        recomputed_activation=again if again else base.recomputed_activation,
        **_working(base, [each for each in measured if each.working]),
    )


def _working(base: SectionProfile, measured: Sequence[MeasuredBytes]) -> dict[str, float]:
    """The working bytes of a section. Where shapes explain what was measured they say which part of it grows
    with the tokens; elsewhere all of it is taken to."""
    by_shapes = [base.working(each.share, each.tokens) for each in measured]
    if measured and min(by_shapes) > 0:
        ratios = [each.working / size for each, size in zip(measured, by_shapes, strict=True)]
        if min(ratios) >= 1 / ALIKE and max(ratios) <= ALIKE:
            return {name: getattr(base, name) * max(ratios) for name in WORKING}
    cut, whole = _parted(base, [(each.share, each.working / each.tokens) for each in measured])
    of_tokens = (cut, whole) if measured else (0.0, 0.0)
    return dict(zip(WORKING, (*of_tokens, 0.0, 0.0), strict=True))


def _parted(base: SectionProfile, sizes: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Bytes of a token (cut with the share, whole), from pairs of a share and its bytes: a line over shares.
    With one share alone, parted as the shapes would have it."""
    most: dict[float, float] = {}
    for share, size in sizes:
        most[share] = max(most.get(share, 0.0), size)
    points = [(share, kept) for share, kept in most.items() if kept > 0]
    if not points:
        return base.cut_activation, base.whole_activation
    if len(points) == 1:
        share, kept = points[0]
        total = base.cut_activation * share + base.whole_activation
        scale = kept / total if total else 0.0
        return (base.cut_activation * scale, base.whole_activation * scale) if total else (0.0, kept)
    whole, cut = line(points)
    return cut, whole
