"""A plan in one sentence, for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from elasticd_planner.spec.cluster import Rates, rate_of
from elasticd_planner.spec.packed_sequences import PackedSequences
from elasticd_planner.spec.plan import ModulePlan, Pipeline, Plan, Stage

#: How many of a kind are named before the rest is counted.
NAMED = 8


def describe(plan: Plan, rates: Rates, packed: PackedSequences | None = None) -> str:
    """One sentence: the shape and what is beside it (micro-batches, ZeRO, recomputation), where the slow
    devices are, who is idle. What is long is counted. packed: the sequences that it is made for, which limit
    its rows as memory does."""
    several, limit = len(plan.modules) > 1, row_limit(plan, packed)
    text = "; ".join(
        (f"{module.module}: " if several else "") + _pipelines(module, limit) for module in plan.modules
    )
    if plan.micro_batch > 1:
        text += f"; micro-batches of {plan.micro_batch}"
    if plan.state.zero:
        count = plan.state.replicas or 0
        text += f"; ZeRO {plan.state.zero}, {count} replica{'s' if count > 1 else ''} of the optimizer state"
    slow = [name for name in plan.members if rate_of(rates, name) > 1]
    if slow:
        text += "; slow: " + some([f"{name} {rate_of(rates, name):g}x" for name in slow])
    if plan.idle:
        text += f"; idle: {some(plan.idle)}"
    return text


def row_limit(plan: Plan, packed: PackedSequences | None) -> int | None:
    """[tokens] of a row that no division exceeds, whatever memory holds; None: the sequences are not known."""
    return None if packed is None else packed.most_tokens(plan.micro_batch)


def row_tokens(pipeline: Pipeline, limit: int | None) -> tuple[int, ...]:
    """The most tokens of a row that each packed lane gets; limit: see `row_limit`."""
    return tuple(lane.capacity if limit is None else min(limit, lane.capacity) for lane in pipeline.packed)


def _pipelines(module: ModulePlan, limit: int | None) -> str:
    pipelines = module.pipelines
    forms = Counter(_form(pipeline, limit) for pipeline in pipelines)
    listed = [form if count == 1 else f"{count} times {form}" for form, count in forms.items()]
    return f"{len(pipelines)} pipeline{'s' if len(pipelines) > 1 else ''}: {some(listed, '; ')}"


def _form(pipeline: Pipeline, limit: int | None) -> str:
    stages = " + ".join(
        f"{_groups(s)} x {s.layers} layer{'s' if s.layers > 1 else ''}"
        + (f" in {len(s.chunks)} chunks" if s.later else "")
        + _shares(s)
        + (" recomputing" if s.recompute else "")
        + (" sequence parallel" if s.sequence_parallel else "")
        for s in pipeline.stages
    )
    if pipeline.packed:
        return _in_rows(pipeline, stages, limit)
    counts = " + ".join(map(str, pipeline.micro_batches_by_lane))
    if pipeline.rows:
        return f"{len(pipeline.rows)} lanes of {stages} with {counts} micro-batches"
    return f"{stages} with {counts} micro-batches"


def _in_rows(pipeline: Pipeline, stages: str, limit: int | None) -> str:
    rooms = row_tokens(pipeline, limit)
    tokens = f"{min(rooms)}" if min(rooms) == max(rooms) else f"{min(rooms)} to {max(rooms)}"
    rows = max(pipeline.micro_batches_by_lane)
    lanes = f"{len(rooms)} lanes of " if len(rooms) > 1 else ""
    return f"{lanes}{stages} with about {rows} row{'s' if rows > 1 else ''} of at most {tokens} tokens"


def _groups(stage: Stage) -> str:
    widths = stage.widths if len({*stage.widths}) > 1 else stage.widths[:1]
    return "/".join(f"TP{width}" for width in widths)


def _shares(stage: Stage) -> str:
    """Of groups of unequal shares; lane by lane."""
    lanes = [lane.shares for lane in stage.by_lane]
    if all(len({*shares}) == 1 for shares in lanes):
        return ""
    return f" (shares {' / '.join(':'.join(map(str, shares)) for shares in lanes)})"


def some(items: Sequence[str], between: str = ", ") -> str:
    more = len(items) - NAMED
    return between.join(items[:NAMED]) + (f"{between}and {more} more" if more > 0 else "")
