"""Annotations: layouts written as groups of devices, the state of each group, and the relation across them.

    w = Annotation(groups=[("n0/0", "n0/1"), ("n1/0",)], states=[{0: 2}, {}])      # a parameter
    g = w.replace(across="sum")                                                    # its gradient
    print(explain(g.layout((4096, 1024)), w.layout((4096, 1024))))
    plan = plan_of(model, {"*": Annotation(groups=[...], states=[{"tp": 2}, {}])}, micro_batches=[3, 1])

`docs/annotations.md` is the guide. Nothing here needs torch but `redistribute`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from elasticd_planner.layout import annotated_plan
from elasticd_planner.layout.annotations import Annotation, alike, annotated, layout_of
from elasticd_planner.layout.explain import ExplainedOperation, Explanation, explain
from elasticd_planner.spec.model import ModelSpec
from elasticd_planner.spec.plan import Plan

if TYPE_CHECKING:
    from torch import Tensor

    from elasticd.runtime.comm.groups import Group
    from elasticd.runtime.model.model import Model

__all__ = [
    "Annotation",
    "ExplainedOperation",
    "Explanation",
    "alike",
    "annotated",
    "annotations_of",
    "devices",
    "explain",
    "layout_of",
    "plan_of",
    "redistribute",
]


def plan_of(
    model: Model | ModelSpec,
    annotations: Mapping[str, Annotation],
    micro_batches: Sequence[int],
    **options: Any,
) -> Plan:
    """The plan that annotations of a model's parameters describe: groups are pipelines, consecutive blocks on
    the same devices are stages, parts are shares.

    Args:
        model: the model, or its description.
        annotations: by pattern of full parameter names, as "blocks.0-11.*".
        micro_batches: of a step, for each pipeline.
        options: those of `elasticd_planner.layout.annotated_plan.plan_of`: micro_batch, state, number, reason.

    Raises:
        ValueError: the annotations are no plan of this model. The message names the parameter.
    """
    return annotated_plan.plan_of(_spec(model), annotations, micro_batches, **options)


def annotations_of(model: Model | ModelSpec, plan: Plan) -> dict[str, Annotation]:
    """The annotations of a plan's parameters and buffers, by full name."""
    return annotated_plan.annotations_of(_spec(model), plan)


def _spec(model: Model | ModelSpec) -> ModelSpec:
    return model if isinstance(model, ModelSpec) else model.spec


def devices() -> tuple[str, ...]:
    """The devices that run this module together: inside the forward pass of a module of a job, its TP group, in
    rank order. They are others after a switch. Elsewhere there is one device."""
    from elasticd.runtime.comm.running_group import running_group

    members: tuple[str, ...] = running_group().members
    return members


def redistribute(
    x: Tensor,
    a: Annotation,
    b: Annotation,
    group: Group | None = None,
    shape: Sequence[int] | None = None,
    *,
    add: bool = False,
) -> Tensor:
    """Takes a device's part of a tensor as `a` lays it out, and gives its part as `b` does, inside a module.

    Forward and backward are collective: call it on every device of the group, and run the backward pass through
    its result on every one of them.

    Args:
        x: this device's part; an empty tensor where `a` has none for it. If it requires a gradient on one
            device, it must on all.
        a: the layout that the tensor has.
        b: the layout that it gets.
        group: of all devices that either annotation names. None: of those that run this module, `devices()`.
        shape: of the whole tensor. It may be left out where `a` splits no dimension, and all devices are in it.
        add: devices that get one value use it in ways of their own, so that its gradient is the sum of theirs.
            False: they compute the same with it.

    Returns:
        This device's part as `b` lays it out; an empty tensor where it has none.

    Raises:
        ValueError: `x` does not have the shape that `a` gives it; a device is not in the group; `shape` is
            missing; one of the annotations cannot lay out a tensor of this shape.
    """
    from elasticd.runtime.comm.running_group import running_group
    from elasticd.runtime.parallel import redistribute_boxes

    if group is None:
        group = running_group()
    if len(group.members) > 1 and not hasattr(group, "plan_groups"):
        raise ValueError(f"redistribute goes over gloo, and the communicators here are {type(group).__name__}")
    if shape is None:
        splits = any(axis not in ("same", "sum") for state in a.states for axis in state)
        if splits or a.across not in ("same", "sum") or {*a.devices} < {*group.members}:
            raise ValueError(
                "redistribute: give shape=, the shape of the whole tensor, because its annotation splits it, "
                "or leaves devices of the group out"
            )
        shape = tuple(x.shape)
    dtype = str(x.dtype).removeprefix("torch.")
    before, after = (layout_of(each, "tensor", shape, dtype) for each in (a, b))
    return redistribute_boxes.redistribute(x, before, after, group, add=add)
