"""What a plan is, in one sentence for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from elasticd_planner.spec.cluster import Rates, rate_of
from elasticd_planner.spec.plan import Pipeline, Plan

#: How many of a kind are named before the rest is counted.
NAMED = 8


def describe(plan: Plan, rates: Rates) -> str:
    """One sentence: the shape and what is beside it (micro-batches, ZeRO, recomputation), where the slow
    devices are, who is idle. What is long is counted."""
    pipelines = plan.pipelines
    forms = Counter(_form(pipeline) for pipeline in pipelines)
    listed = [form if count == 1 else f"{count} times {form}" for form, count in forms.items()]
    text = f"{len(pipelines)} pipeline{'s' if len(pipelines) > 1 else ''}: {_some(listed, '; ')}"
    if plan.micro_batch > 1:
        text += f"; micro-batches of {plan.micro_batch}"
    if plan.state.zero:
        count = plan.state.replicas or 0
        text += f"; ZeRO {plan.state.zero}, {count} replica{'s' if count > 1 else ''} of the optimizer state"
    slow = [name for name in plan.members if rate_of(rates, name) > 1]
    if slow:
        text += "; slow: " + _some([f"{name} {rate_of(rates, name):g}x" for name in slow])
    if plan.idle:
        text += f"; idle: {_some(plan.idle)}"
    return text


def _form(pipeline: Pipeline) -> str:
    stages = " + ".join(
        f"TP{len(s.devices)} x {s.layers} layer{'s' if s.layers > 1 else ''}"
        + (f" in {len(s.chunks)} chunks" if s.later else "")
        + (f" (shares {':'.join(map(str, s.shares))})" if len(set(s.shares)) > 1 else "")
        + (" recomputing" if s.recompute else "")
        for s in pipeline.stages
    )
    return f"{stages} with {pipeline.micro_batches} micro-batches"


def _some(items: Sequence[str], between: str = ", ") -> str:
    more = len(items) - NAMED
    return between.join(items[:NAMED]) + (f"{between}and {more} more" if more > 0 else "")
