"""The messages between lanes in a step, for the sequences that they share, as flows over links.

As the runtime sends them, message by message (`context_exchange`, `heads_exchange`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from elasticd_planner.batching.context_exchange import context_exchange
from elasticd_planner.batching.context_members import ContextMembers, ContextPart, attention_members
from elasticd_planner.layout.explained_plan import message
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.layout.link_traffic import Flow
from elasticd_planner.spec.batch import BatchPlan, MicroBatch
from elasticd_planner.spec.model import item_size


def key_flows(layouts: Layouts, batch: BatchPlan) -> Iterator[Flow]:
    """Keys and values, queries and outputs, and the gradients of all of them, that go over links in a step.

    Each block is taken to have one causal attention without a window, whose heads are units of the model that
    say so by their name or by kv-heads that follow them; its values are as wide as its keys.

    Args:
        layouts: of the plan.
        batch: of the step.
    """
    spec = layouts.spec
    for pipeline, rows in zip(layouts.plan.pipelines, batch.pipelines, strict=True):
        for stage in pipeline.stages if batch.packed else ():
            attention = attention_members(spec, stage)
            if attention is None or len(stage.by_lane) == 1:
                continue
            members, size = attention
            layers = sum(stop - start for start, stop in stage.chunks)
            sent = Counter[tuple[str, str, int]]()
            for row in rows:
                sent.update(_sent(row.lanes, members, size))
            for (source, to, elements), times in sent.items():
                yield Flow(message((source, to), elements), item_size(spec.dtype), times * layers)


def _sent(lanes: Sequence[MicroBatch], members: ContextMembers, size: int) -> Iterator[tuple[str, str, int]]:
    """The messages of one attention in a row: from whom to whom, and how many elements."""
    for member in members.members:
        exchange = context_exchange(lanes, members, member.device)
        for each in exchange.rounds:
            keys = 2 * size * _count(each.sends) or 1  # a number, where none go this way
            yield from ((member.device, each.peer, keys),) * 2  # in the forward pass and in the backward pass
            if each.gives:
                yield member.device, each.peer, 2 * size * _count(each.gives)
        for heads in exchange.heads_messages:
            forth = _count(heads.sends_queries), _count(heads.sends_keys)
            back = _count(heads.takes_queries), _count(heads.takes_keys)
            sizes = (
                forth[0] + 2 * forth[1],  # queries, keys and values
                back[0],  # outputs
                forth[0],  # their gradients
                back[0] + 2 * back[1],  # those of queries, keys and values
            )
            yield from ((member.device, heads.peer, size * count) for count in sizes if count)


def _count(parts: Sequence[ContextPart]) -> int:
    return sum(part.size for part in parts)
