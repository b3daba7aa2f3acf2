"""Rows that go to experts of other lanes: the messages of a step in the mean, by device and by device.

Where lanes of a stage share the experts of a block each row goes once to each other device that has one of its
experts, and comes back once (`runtime/parallel/expert_exchange`). Which experts a row has is known in the step
alone. In the mean a row has each set of `chosen` different experts with a chance in proportion to the product
of their loads, and of an expert on several devices each has its part of the rows, by the rows' numbers.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np

from elasticd_planner.cost.model_profile import ExpertProfile
from elasticd_planner.layout.explained_plan import Purpose, message
from elasticd_planner.layout.link_traffic import Flow
from elasticd_planner.spec.expert_load import ExpertLoad
from elasticd_planner.spec.plan import HeldExperts, Pipeline, Plan, SplitExperts, Stage

#: Bytes of the number of an expert, and of what two devices tell each other before a block's rows.
_NUMBER, _COUNTS = 2, 6 * 8


def met_parts(
    weights: Sequence[float], chosen: int, held: HeldExperts, splits: SplitExperts = ()
) -> list[float]:
    """The part of all rows that each device has to compute something for.

    Args:
        weights: of each expert, in proportion to its rows.
        chosen: experts of a row.
        held: the experts of each device.
        splits: the parts of rows of experts on several devices, where these are not equal.
    """
    parts = {expert: own for expert, *own in splits}
    holders = [[place for place, own in enumerate(held) if expert in own] for expert in range(len(weights))]
    ends = [
        [end / sum(own) for end in accumulate(own)]
        for expert, places in enumerate(holders)
        for own in [parts.get(expert, [1] * len(places))]
    ]
    every, met, start = _products(weights, chosen), [0.0] * len(held), 0.0
    # Rows are divided by their numbers: of those between two ends each expert is on one device.
    for stop in sorted({end for own in ends for end in own if end < 1} | {1.0}):
        middle = (start + stop) / 2
        to = [places[bisect(own, middle)] for places, own in zip(holders, ends, strict=True)]
        for place in range(len(held)):
            elsewhere = [weight if at != place else 0.0 for weight, at in zip(weights, to, strict=True)]
            met[place] += (stop - start) * (1 - _products(elsewhere, chosen) / every)
        start = stop
    return met


def _products(weights: Sequence[float], chosen: int) -> float:
    """The sum over all sets of `chosen` experts of the products of their weights."""
    sums = np.zeros(chosen + 1)
    sums[0] = 1.0
    total = sum(weights) or 1.0
    for weight in weights:
        sums[1:] += weight / total * sums[:-1]
    return float(sums[chosen]) * total**chosen


def expert_flows(
    plan: Plan,
    experts: ExpertProfile,
    tokens: float,
    row_bytes: float,
    item: int,
    load: ExpertLoad | None = None,
) -> Iterator[tuple[Purpose, Flow]]:
    """The messages of a step of a plan of one module.

    Args:
        plan: whose lanes share experts, or not.
        experts: of its blocks.
        tokens: of a micro-batch.
        row_bytes: of a row.
        item: bytes of a number of it.
        load: rows of the experts; of a block that it does not have all experts count alike.
    """
    weight_bytes = experts.chosen * item
    there, back = row_bytes + weight_bytes + experts.chosen * _NUMBER, row_bytes
    gradients = row_bytes, row_bytes + weight_bytes
    sent = Counter[tuple[Purpose, str, str, int]]()
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            for block in stage.shared_blocks:
                known = load is not None and block in load.rows
                weights = load.weights(block) if load is not None and known else (1.0,) * experts.count
                met = met_parts(weights, experts.chosen, stage.experts_of(block), stage.splits_of(block))
                for source, to, rows, times in _rows(pipeline, stage, tokens, met):
                    again = times * (2 if stage.recompute else 1)
                    sent["expert rows", source, to, round(rows * there)] += again
                    sent["expert rows", to, source, round(rows * back)] += again
                    if plan.module.trainable:
                        sent["expert gradients", source, to, round(rows * gradients[0])] += times
                        sent["expert gradients", to, source, round(rows * gradients[1])] += times
                rounds = max(pipeline.micro_batches_by_lane) * (2 if stage.recompute else 1)
                for one in stage.devices:
                    for other in stage.devices:
                        if one != other:
                            sent["expert rows", one, other, _COUNTS] += rounds
    for (purpose, source, to, size), times in sent.items():
        if size:
            yield purpose, Flow(message((source, to), size), 1, times)


def _rows(
    pipeline: Pipeline, stage: Stage, tokens: float, met: Sequence[float]
) -> Iterator[tuple[str, str, float, int]]:
    """The rows of one block that go from device to device in a micro-batch, and the number of micro-batches.

    A lane's members have equal parts of its rows.
    """
    for lane, count in zip(stage.by_lane, pipeline.micro_batches_by_lane, strict=True):
        for source in lane.devices:
            for to, part in zip(stage.devices, met, strict=True):
                if to != source and part:
                    yield source, to, tokens / len(lane.devices) * part, count
