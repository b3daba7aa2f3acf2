"""The order of passes on a stage: 1F1B (`elasticd_planner.cost.schedule`), or forward passes alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from elasticd_planner.cost.schedule import Pass, passes

#: (stages, stage, micro-batches, chunks) -> the passes of that stage in order. Backward passes through one
#: chunk go by ascending index of the micro-batch.
Schedule = Callable[[int, int, int, int], Iterator[Pass]]

one_forward_one_backward: Schedule = passes


def all_forward(stages: int, stage: int, micro_batches: int, chunks: int) -> Iterator[Pass]:
    """The passes of an evaluation."""
    for chunk in range(chunks):
        for index in range(micro_batches):
            yield Pass("forward", index, chunk)
