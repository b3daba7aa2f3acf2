"""The packed batch of a step: sequences dealt to the lanes of a plan, in rows without padding.

A sequence of L tokens costs L x (linear + L), in units of one token's attention to one other; a row costs the
sum of its sequences, because attention does not look over their borders. A row has as many tokens as its lane
holds. All is a pure function of plan, samples and lengths, in integers, so that every rank has the same batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import islice, zip_longest

from elasticd_planner.spec.batch import BatchLengths, BatchPlan, BatchRow, MicroBatch, SequencePiece
from elasticd_planner.spec.plan import ModulePlan, Plan
from elasticd_planner.value import refuse


def token_capacity(plan: Plan, lengths: BatchLengths) -> int:
    """Tokens of a row that a lane holds, where nothing says it: those of a padded micro-batch."""
    return plan.micro_batch * max(1, *lengths.tokens)


def packed_batch_plan(
    plan: Plan, step: int, samples: Sequence[int], lengths: BatchLengths, capacity: int | None = None
) -> BatchPlan:
    """Deals the samples of a step to the lanes of each module, and to rows of those.

    Args:
        plan: the plan; a lane's share of the work is its share of the plan's micro-batches.
        step: its index.
        samples: their ids.
        lengths: tokens of each sample, and what they cost.
        capacity: the most tokens of a row; None: see `token_capacity`.

    Raises:
        Invalid: samples and lengths are not as many, or a sequence is longer than a row may be.
    """
    if len(lengths.tokens) != len(samples):
        refuse(f"step {step}: {len(lengths.tokens)} lengths for {len(samples)} samples")
    most = token_capacity(plan, lengths) if capacity is None else capacity
    for sample, tokens in zip(samples, lengths.tokens, strict=True):
        if tokens < 1:
            refuse(f"step {step}: sample {sample} has {tokens} tokens: a packed sequence needs at least one")
        if tokens > most:
            refuse(f"step {step}: sample {sample} has {tokens} tokens, a row at most {most}")
    modules = tuple(_dealt(module, samples, lengths, most) for module in plan.modules)
    return BatchPlan(step=step, plan=plan.number, modules=modules, packed=True)


def _dealt(
    module: ModulePlan, samples: Sequence[int], lengths: BatchLengths, most: int
) -> tuple[tuple[BatchRow, ...], ...]:
    """The rows of each pipeline of a module: the costliest sequence first, to the lane that is done first."""
    tokens = lengths.tokens
    slots = [count for pipeline in module.pipelines for count in pipeline.micro_batches_by_lane]
    common = sum(slots)
    each = [common // slot for slot in slots]  # the time of a unit of work
    taken: list[list[int]] = [[] for _ in slots]
    free = [(0, lane) for lane in range(len(slots))]
    for index in sorted(range(len(tokens)), key=lambda i: (-tokens[i], i)):
        work = tokens[index] * (lengths.linear + tokens[index])
        load, lane = heappop(free)
        taken[lane].append(index)
        heappush(free, (load + work * each[lane], lane))
    lanes = iter(
        [
            _rows([SequencePiece.whole(samples[i], tokens[i]) for i in own], most, lengths.linear)
            for own in taken
        ]
    )
    return tuple(
        tuple(
            BatchRow(lanes=row)
            for row in zip_longest(*islice(lanes, len(pipeline.micro_batches_by_lane)), fillvalue=())
        )
        for pipeline in module.pipelines
    )


def _rows(pieces: Sequence[SequencePiece], most: int, linear: int) -> list[MicroBatch]:
    """A lane's sequences, the costliest first, in rows of like cost: as few as hold their tokens."""
    count = -(-sum(piece.length for piece in pieces) // most)
    while True:
        rows: list[list[SequencePiece]] = [[] for _ in range(count)]
        tokens, costs = [0] * count, [0] * count
        for piece in pieces:
            fits = [row for row in range(count) if tokens[row] + piece.length <= most]
            if not fits:
                break
            row = min(fits, key=costs.__getitem__)
            rows[row].append(piece)
            tokens[row] += piece.length
            costs[row] += piece.length * (linear + piece.length)
        else:
            return [tuple(row) for row in rows if row]
        count += 1
