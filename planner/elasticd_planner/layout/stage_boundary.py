"""Who sends an activation to whom at the boundary of two stages, and its gradient back.

Every member of a stage's TP group has the full activation, and its full gradient. So both ways are resolutions
of one layout to another (`resolve`): each receiver has one sender, of its own node where there is one.
"""

from __future__ import annotations

from elasticd_planner.layout.resolve import Communication, dual, messages, resolve
from elasticd_planner.spec.box import Box, Holding, TensorLayout
from elasticd_planner.spec.plan import Stage

#: From each sender to those that receive from it.
Senders = dict[str, tuple[str, ...]]


def activations(before: Stage, after: Stage) -> Senders:
    """Who of stage `before` sends its output to whom of stage `after`."""
    return _senders(resolve(_whole(before), _whole(after), (*before.devices, *after.devices)))


def gradients(before: Stage, after: Stage) -> Senders:
    """Who of stage `after` sends the gradient of its input to whom of stage `before`."""
    steps = resolve(dual(_whole(after)), dual(_whole(before)), (*after.devices, *before.devices))
    return _senders(steps)


def _whole(stage: Stage) -> TensorLayout:
    box = Box.whole((1,))
    holdings = tuple(Holding(device=device, box=box) for device in stage.devices)
    return TensorLayout(name="activation", shape=box.shape, dtype="any", holdings=holdings)


def _senders(steps: tuple[Communication, ...]) -> Senders:
    return {source: to for (source, *to_list), _ in messages(steps) for to in [tuple(to_list)]}
