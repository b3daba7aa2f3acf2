"""Summary of a packed batch: the evenness of its lanes, and the parts of it that are cut."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from elasticd_planner.batching.fold import cost
from elasticd_planner.batching.lane_tree import NORMAL
from elasticd_planner.spec.batch import BatchPlan, BatchRow, BatchSummary
from elasticd_planner.spec.plan import Plan


def lane_work(plan: Plan, batch: BatchPlan, linear: int) -> list[int]:
    """The cost of each lane's pieces, lane by lane over all pipelines, in units of one token's attention to one
    other."""
    return [
        sum(cost(piece.tokens, piece.length, linear) for row in rows for piece in row.lanes[lane])
        for pipeline, rows in zip(plan.pipelines, batch.pipelines, strict=True)
        for lane in range(len(pipeline.micro_batches_by_lane))
    ]


def summary_of(
    plan: Plan, batch: BatchPlan, linear: int, slowdown: Sequence[int] | None = None
) -> BatchSummary:
    """A packed batch in numbers.

    Args:
        plan: the plan in force.
        batch: the batch.
        linear: what a token's matrix products cost.
        slowdown: of each lane, in 64ths of a normal lane's time; None: all are normal.
    """
    pieces = [piece for rows in batch.pipelines for row in rows for lane in row.lanes for piece in lane]
    lanes: dict[int, int] = defaultdict(int)
    for piece in pieces:
        lanes[piece.sample] += 1
    work = lane_work(plan, batch, linear)
    pace = list(slowdown) if slowdown is not None else [NORMAL] * len(work)
    even = sum(work) / sum(NORMAL / each for each in pace)
    busiest = max((each * at / NORMAL for each, at in zip(work, pace, strict=True)), default=0.0)
    return BatchSummary(
        sequences=len(lanes),
        tokens=sum(piece.tokens for piece in pieces),
        rows=max(map(_count, batch.pipelines)),
        cut=sum(count > 1 for count in lanes.values()),
        widest=max(lanes.values(), default=0),
        imbalance=busiest / even if even else 1.0,
    )


def _count(rows: Sequence[BatchRow]) -> int:
    """The rows of the lane of a pipeline that has most."""
    return max((sum(map(bool, lane)) for lane in zip(*(row.lanes for row in rows), strict=True)), default=0)
