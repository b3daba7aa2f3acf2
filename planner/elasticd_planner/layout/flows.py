"""Flows: the way of a tensor over a border of two layouts, and the way back of its gradient.

Both ways are resolutions of one layout to another (`resolve`), so they hold for any two layouts of a tensor.
What a device has already is not sent. Each box that it lacks comes from one sender, of its own node where there
is one. At the border of two stages every member of a TP group has the full activation, and its full gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from elasticd_planner.layout.activations import whole
from elasticd_planner.layout.resolve import dual, messages, resolve
from elasticd_planner.spec.box import Box, TensorLayout
from elasticd_planner.spec.plan import Pipeline, Place


class FlowMessage(NamedTuple):
    """A box of a tensor that one device sends to others."""

    source: str
    destinations: tuple[str, ...]
    box: Box


class Border(NamedTuple):
    """A flow at one device: from whom it receives, and to whom it sends."""

    source: str | None  #: None: it receives nothing, since it has what it needs, or needs nothing
    destinations: tuple[str, ...]


class TensorFlow(NamedTuple):
    """A tensor that goes from one layout to another, and its gradient that comes back."""

    forth: tuple[FlowMessage, ...]
    back: tuple[FlowMessage, ...]

    def at_source(self, device: str) -> Border:
        """This flow at a device that has the tensor first: whence gradients come, and where activations go."""
        return _border(self.back, self.forth, device)

    def at_target(self, device: str) -> Border:
        """This flow at a device that needs the tensor: whence activations come, and where gradients go."""
        return _border(self.forth, self.back, device)


def flow(source: TensorLayout, target: TensorLayout) -> TensorFlow:
    """The messages by which a tensor that is laid out as `source` is laid out as `target`, and its gradient the
    other way round. No device has a term of a sum."""
    ways = resolve(source, target), resolve(dual(target), dual(source))
    forth, back = ([FlowMessage(of[0], of[1:], cell.box) for of, cell in messages(way)] for way in ways)
    return TensorFlow(tuple(forth), tuple(back))


def stage_flows(pipeline: Pipeline) -> Iterator[tuple[TensorFlow, int]]:
    """Of each border of the stages of one lane: the flow, and how often a micro-batch crosses it. In an
    interleaved pipeline the last stage hands on to the first, too."""
    stages, chunks = pipeline.stages, pipeline.chunks
    for near, far in pairwise(stages):
        yield between(near.devices, far.devices), chunks
    if len(stages) > 1 and chunks > 1:
        yield between(stages[-1].devices, stages[0].devices), chunks - 1


def borders(pipeline: Pipeline, place: Place, device: str) -> tuple[Border, Border]:
    """The borders of a device with the stages before and after, in a turn of the pipeline: the first stage
    comes after the last."""
    stages, at = pipeline.stages, place.stage
    prev, next_ = stages[at - 1], stages[(at + 1) % len(stages)]
    own = stages[at].devices
    return between(prev.devices, own).at_target(device), between(own, next_.devices).at_source(device)


def between(near: Sequence[str], far: Sequence[str]) -> TensorFlow:
    """The flow of a tensor from the members of one TP group, each of which has all of it, to those of another,
    each of which needs all of it. They may share devices."""
    return flow(whole(near), whole(far))


def _border(comes: Iterable[FlowMessage], goes: Iterable[FlowMessage], device: str) -> Border:
    source = next((message.source for message in comes if device in message.destinations), None)
    return Border(source, tuple(to for each in goes if each.source == device for to in each.destinations))
