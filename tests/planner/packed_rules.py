"""What every packed batch keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from elasticd_planner.batching import fold
from elasticd_planner.spec.batch import BatchLengths, BatchPlan
from elasticd_planner.value import refuse


def check_batch(
    batch: BatchPlan, samples: Sequence[int], lengths: BatchLengths, capacity: int | Sequence[Sequence[int]]
) -> None:
    """Refuses a packed batch that breaks a rule: the pieces of each sample are all its pairs, each once; a
    sample is in one row of one pipeline; no row of a lane has more tokens than the lane holds.

    capacity: of all lanes, or of each lane of each pipeline.
    """
    length = dict(zip(samples, lengths.tokens, strict=True))
    found: dict[int, list[tuple[int, int]]] = {sample: [] for sample in samples}
    rows: dict[int, set[tuple[int, int]]] = {sample: set() for sample in samples}
    for number, pipeline in enumerate(batch.pipelines):
        for index, row in enumerate(pipeline):
            for lane, micro_batch in enumerate(row.lanes):
                holds = capacity if isinstance(capacity, int) else capacity[number][lane]
                tokens = sum(piece.tokens for piece in micro_batch)
                if tokens > holds:
                    place = f"row {index} of lane {lane} of pipeline {number}"
                    _broken(batch, f"{place} has {tokens} tokens, and holds {holds}")
                for piece in micro_batch:
                    found[piece.sample].append((piece.start, piece.stop))
                    rows[piece.sample].add((number, index))
    for sample, borders in found.items():
        if not borders:
            _broken(batch, f"sample {sample} is not in it")
        if len(rows[sample]) > 1:
            _broken(batch, f"sample {sample} is in more than one row")
        starts, stops = zip(*sorted(borders), strict=True)
        if (*starts, fold.pair_count(length[sample])) != (0, *stops):
            _broken(batch, f"the pieces of sample {sample} are not all its pairs, each once")


def _broken(batch: BatchPlan, rule: str) -> NoReturn:
    refuse(f"step {batch.step}: {rule}")
