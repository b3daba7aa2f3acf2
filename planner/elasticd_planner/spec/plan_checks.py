"""Checks that a plan that a user gives fits a model and a batch. A plan that does not is refused by name."""

from __future__ import annotations

from itertools import pairwise

from elasticd_planner.spec.model import ModelSpec, block_of
from elasticd_planner.spec.plan import HeldExperts, Plan, Stage
from elasticd_planner.value import refuse


def check_model(plan: Plan, spec: ModelSpec) -> None:
    """Refuses a plan that is none of this model: of other blocks, or with TP groups of more devices than there
    are units of some rule (heads, rows of a linear layer), or that places other experts than the model has.

    Raises:
        Invalid: with the stage, and what it would need.
    """
    layers = plan.pipelines[0].layers
    if layers != len(spec.layers):
        refuse(
            f"the plan has {layers} blocks in each pipeline, and the model has "
            f"{len(spec.layers)}: make the plan of this model, with elasticd.annotations.plan_of"
        )
    check_experts(plan, spec)
    experts = {cut.units for each in spec.parameters.values() if each.experts and (cut := each.cut)}
    for _, _, stage in plan.walk():
        for units in spec.units:
            if stage.experts and units.kind in experts:
                continue  # a device may have none
            if units.follows is None and units.count < len(stage.devices):
                refuse(
                    f"the plan splits blocks {stage.named} over {len(stage.devices)} devices, and the model "
                    f"has {units.count} {units.kind}: use narrower TP groups"
                )


def check_experts(plan: Plan, spec: ModelSpec) -> None:
    """Refuses a plan of one module that places other experts than the model has, or not all of them, or those
    of two blocks that share them on one stage in two ways.

    Raises:
        Invalid: with the block and the expert.
    """
    for p, pipeline in enumerate(plan.pipelines):
        for stage in pipeline.stages:
            if not stage.experts:
                continue
            blocks = [block for chunk in stage.chunks for block in range(*chunk)]
            for block in blocks:
                if held := stage.experts_of(block):
                    where = f"plan {plan.number}, pipeline {p}, block {block}"
                    _check_placement(spec, where, block, stage, held)
            for group in blocks_with_same_experts(spec):
                for one, other in pairwise(sorted(group.intersection(blocks))):
                    if stage.experts_of(one) != stage.experts_of(other):
                        refuse(
                            f"plan {plan.number}, pipeline {p}: blocks {one} and {other} share their experts, "
                            "and the plan places these in two ways on one stage: a device holds one set of "
                            "them; place both blocks' alike"
                        )


def _check_placement(spec: ModelSpec, where: str, block: int, stage: Stage, held: HeldExperts) -> None:
    kinds = {each.cut.units for each in spec.section(f"blocks.{block}") if each.experts and each.cut}
    if not kinds:
        refuse(f"{where}: has no experts that a plan can place; give its experts the rule Experts")
    for count in {spec.units_of(kind).count for kind in kinds}:
        for device, own in zip(stage.devices, held, strict=True):
            if own and own[-1] >= count:
                refuse(f"{where}: {device} is to have expert {own[-1]}, and there are {count}, from 0")
        missing = sorted({*range(count)} - {expert for own in held for expert in own})
        if missing:
            refuse(f"{where}: expert {missing[0]} is on no device of {', '.join(stage.devices)}")


def blocks_with_same_experts(spec: ModelSpec) -> list[set[int]]:
    """The blocks of each parameter of experts that several have."""
    groups: dict[str, set[int]] = {}
    for alias, owner in spec.ties:
        if spec.parameters[owner].experts:
            blocks = (block_of(".".join(name.split(".")[:2])) for name in (owner, alias))
            groups.setdefault(owner, set()).update(block for block in blocks if block is not None)
    return list(groups.values())


def check_batch(plan: Plan, global_batch: int, micro_batch: int) -> None:
    """Refuses a plan of another batch.

    Raises:
        Invalid: with both batches.
    """
    if (plan.global_batch, plan.micro_batch) != (global_batch, micro_batch):
        refuse(
            f"the plan takes {plan.global_batch} samples a step in micro-batches of {plan.micro_batch}, and "
            f"the job takes {global_batch} in micro-batches of {micro_batch}: give both the same sizes, as "
            f"plan_of(..., micro_batch={micro_batch}) whose micro_batches add up to global_batch / micro_batch"
        )
