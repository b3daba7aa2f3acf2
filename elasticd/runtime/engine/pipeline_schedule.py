"""The order of passes on a stage: 1F1B, plain and interleaved (`elasticd_planner.cost.schedule`), and GPipe's.

GPipe (Huang et al., 2019) holds the activations of all micro-batches at once; tests compare with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from elasticd_planner.cost.schedule import Pass, passes

#: (stages, stage, micro-batches, chunks) -> the passes of that stage in order. Backward passes through one
#: chunk go by ascending index of the micro-batch.
Schedule = Callable[[int, int, int, int], Iterator[Pass]]

one_forward_one_backward: Schedule = passes


def all_forward_all_backward(stages: int, stage: int, micro_batches: int, chunks: int) -> Iterator[Pass]:
    """GPipe's passes, the same on every stage, chunk after chunk."""
    yield from all_forward(stages, stage, micro_batches, chunks)
    for chunk in reversed(range(chunks)):
        for index in range(micro_batches):
            yield Pass("backward", index, chunk)


def all_forward(stages: int, stage: int, micro_batches: int, chunks: int) -> Iterator[Pass]:
    """The passes of an evaluation."""
    for chunk in range(chunks):
        for index in range(micro_batches):
            yield Pass("forward", index, chunk)
