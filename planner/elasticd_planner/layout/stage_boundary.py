"""Who sends an activation to whom at the boundary of two stages, and its gradient back.

Every member of a stage's TP group has the full activation, and its full gradient. So both ways are resolutions
of one layout to another (`resolve`): each receiver has one sender, of its own node where there is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from elasticd_planner.layout.activations import whole
from elasticd_planner.layout.resolve import Communication, dual, messages, resolve
from elasticd_planner.spec.plan import Pipeline, Place, Stage

#: From each sender to those that receive from it.
Senders = dict[str, tuple[str, ...]]


class Border(NamedTuple):
    """A boundary of one device's stage with another: from whom it receives, and to whom it sends."""

    source: str
    destinations: tuple[str, ...]


def activations(near: Stage, far: Stage) -> Senders:
    """Who of stage `near` sends its output to whom of `far`, the next one."""
    return _senders(resolve(whole(near.devices), whole(far.devices), (*near.devices, *far.devices)))


def gradients(near: Stage, far: Stage) -> Senders:
    """Who of stage `far` sends the gradient of its input to whom of `near`, the one before."""
    return _senders(resolve(dual(whole(far.devices)), dual(whole(near.devices)), (*far.devices, *near.devices)))


def boundaries(pipeline: Pipeline) -> Iterator[tuple[Senders, Senders, int]]:
    """Of each boundary of the stages of one lane: who sends activations, who sends gradients, and how often a
    micro-batch crosses it. In an interleaved pipeline the last stage hands on to the first, too."""
    stages, chunks = pipeline.stages, pipeline.chunks
    crossed = [(near, far, chunks) for near, far in pairwise(stages)]
    if crossed and chunks > 1:
        crossed.append((stages[-1], stages[0], chunks - 1))
    for near, far, times in crossed:
        yield activations(near, far), gradients(near, far), times


def before(pipeline: Pipeline, place: Place, device: str) -> Border:
    """The boundary with the stage before, in a turn of the pipeline (the first stage's is the last): whence
    activations come, and where their gradients go."""
    here, other = pipeline.stages[place.stage], pipeline.stages[place.stage - 1]
    return Border(_source(activations(other, here), device), gradients(other, here).get(device, ()))


def after(pipeline: Pipeline, place: Place, device: str) -> Border:
    """The boundary with the stage after, in a turn of the pipeline (the last stage's is the first): whence
    gradients come, and where activations go."""
    stages = pipeline.stages
    here, other = stages[place.stage], stages[(place.stage + 1) % len(stages)]
    return Border(_source(gradients(here, other), device), activations(here, other).get(device, ()))


def _source(senders: Senders, device: str) -> str:
    return next(source for source, to in senders.items() if device in to)


def _senders(steps: tuple[Communication, ...]) -> Senders:
    return {devices[0]: devices[1:] for devices, _ in messages(steps)}
