"""Passes of a micro-batch through sections: one or several autograd graphs forth, and back the other way.

Training, captured passes, profiles and checks pass sections by the two functions here. Consecutive parts are
one autograd graph. Where somebody separates them, the output of one enters the next as new leaves, and the
backward pass of each is run by itself. All else around a section (times, checks, seeds) is done by a
`SectionWatch`; in the steady state it is called at the borders of embedding, blocks and head alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor

from elasticd.runtime.model.bundle import Bundle, Gradients, backward, entering, gradients, tensors
from elasticd.runtime.model.validation import ModelError

#: The sections around which a watch that is not at all of them is called.
_SPECIAL = ("embed", "blocks.0", "head")


class PassPart(NamedTuple):
    """The sections that one call passes: one, or a run of blocks."""

    sections: tuple[str, ...]
    passed: Callable[..., Any]


class GraphSegment(NamedTuple):
    """Consecutive parts of a pass that are one autograd graph."""

    parts: Sequence[PassPart]
    entered: Bundle | None  #: what the first of them was called with, as leaves; None: a batch
    out: Bundle


class SectionWatch:
    """The work around the sections of a pass, beside computing them. This one does nothing."""

    everywhere = False  #: it is called around all sections

    def border(self, entered: Bundle, section: str) -> bool:
        """Returns True if the autograd graph goes on at what enters a section."""
        return True

    def before(self, section: str, entered: Bundle) -> None:
        """A section, or a run of blocks that begins with it, is about to be passed."""

    def after(self, section: str, output: Bundle) -> None:
        """It was passed."""

    def goes_back(self, segment: GraphSegment) -> GraphSegment:
        """The backward pass of a segment is about to begin. Returns the segment that it is of."""
        return segment

    def backward(self, segment: GraphSegment, given: Gradients) -> None:
        """The backward pass of a segment, from the gradients of its output."""
        back(segment, given)

    def went_back(self, segment: GraphSegment) -> None:
        """All that the backward pass of a segment adds to gradients is there."""


def separate(passes: Mapping[str, Callable[..., Any]]) -> list[list[PassPart]]:
    """Each section as an autograd graph by itself.

    Args:
        passes: by section.
    """
    return [[PassPart((section,), passed)] for section, passed in passes.items()]


def forth(
    graphs: Iterable[Sequence[PassPart]], entered: Any, watch: SectionWatch
) -> tuple[list[GraphSegment], Bundle]:
    """The forward pass.

    Args:
        graphs: the parts that are one autograd graph together, as far as the watch lets them.
        entered: what the first section is called with: a batch, if it is the embedding.
        watch: called on the way.

    Returns:
        The autograd graphs that came of it, and the output of the last section.
    """
    segments: list[GraphSegment] = []
    x = entered
    for parts in graphs:
        leaf, first = (None if parts[0].sections[0] == "embed" else entering(x)), 0
        x = x if leaf is None else leaf
        for place, (sections, passed) in enumerate(parts):
            section = sections[0]
            if (
                section not in _SPECIAL
                and place > first
                and type(x) is Tensor
                and x.requires_grad
                and not watch.everywhere
            ):
                x = passed(x)
                continue
            if place > first and not watch.border(x, section):
                segments.append(GraphSegment(parts[first:place], leaf, x))
                leaf, first = entering(x), place
                x = leaf
            if section != "embed" and not isinstance(x, Tensor):
                if not isinstance(x, Mapping):
                    gave = f"the section before {section} gave a {type(x).__name__}"
                    raise ModelError(f"{gave}: a section gives one tensor, or a mapping of named tensors")
                x = dict(x)  # a section may change its own mapping, and not the leaves that were entered
            watch.before(section, x)
            x = passed(x)
            watch.after(section, x)
        segments.append(GraphSegment(parts[first:], leaf, x))
    return segments, cast(Bundle, x)


def back_through(segments: list[GraphSegment], given: Gradients, watch: SectionWatch) -> Gradients:
    """The backward pass.

    Args:
        segments: as `forth` gave them. Each is taken out of the list before its backward pass.
        given: the gradients of the last one's output.
        watch: called on the way.

    Returns:
        The gradients of what the first section was called with; None: a batch.
    """
    while segments:
        segment = watch.goes_back(segments.pop())
        watch.backward(segment, given)
        given = None if segment.entered is None else gradients(segment.entered)
        watch.went_back(segment)
    return given


def back(segment: GraphSegment, given: Gradients) -> None:
    """The backward pass of a segment, if it has one: all before a batch may be frozen."""
    out = segment.out
    if segment.entered is None:
        needed = out.requires_grad if type(out) is Tensor else any(x.requires_grad for x in tensors(out))
        if not needed:
            return
    backward(out, given)
