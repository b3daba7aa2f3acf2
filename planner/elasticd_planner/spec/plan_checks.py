"""Whether a plan that a user gives is one of a model and a batch. What is not is refused by name."""

from __future__ import annotations

from elasticd_planner.spec.model import ModelSpec
from elasticd_planner.spec.plan import Plan
from elasticd_planner.value import refuse


def check_model(plan: Plan, spec: ModelSpec) -> None:
    """Refuses a plan that is none of this model: of other blocks, or with TP groups of more devices than there
    are units of some rule (heads, rows of a linear layer).

    Raises:
        Invalid: with the stage, and what it would need.
    """
    layers = plan.pipelines[0].layers
    if layers != len(spec.layers):
        refuse(
            f"the plan has {layers} blocks in each pipeline, and the model has "
            f"{len(spec.layers)}: make the plan of this model, with elasticd.annotations.plan_of"
        )
    for _, _, stage in plan.walk():
        for units in spec.units:
            if units.follows is None and units.count < len(stage.devices):
                refuse(
                    f"the plan splits blocks {stage.named} over {len(stage.devices)} devices, and the model "
                    f"has {units.count} {units.kind}: use narrower TP groups"
                )


def check_batch(plan: Plan, global_batch: int, micro_batch: int) -> None:
    """Refuses a plan of another batch.

    Raises:
        Invalid: with both batches.
    """
    if (plan.global_batch, plan.micro_batch) != (global_batch, micro_batch):
        refuse(
            f"the plan takes {plan.global_batch} samples a step in micro-batches of {plan.micro_batch}, and "
            f"the job takes {global_batch} in micro-batches of {micro_batch}: give both the same sizes (in "
            "plan_of micro_batches add up to global_batch / micro_batch)"
        )
