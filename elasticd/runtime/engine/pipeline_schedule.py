"""Which passes a stage runs in which order: 1F1B, plain and interleaved (`elasticd_planner.cost.schedule`), or
GPipe's (Huang et al., 2019), which keeps the activations of all micro-batches: tests compare with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from elasticd_planner.cost.schedule import Pass, passes

#: (stages, stage, micro-batches, chunks): the passes of that stage in order. Backward passes through one chunk
#: go by ascending index.
Schedule = Callable[[int, int, int, int], Iterator[Pass]]

one_forward_one_backward: Schedule = passes


def all_forward_all_backward(stages: int, stage: int, micro_batches: int, chunks: int) -> Iterator[Pass]:
    """GPipe's passes, the same on every stage, chunk after chunk."""
    for chunk in range(chunks):
        for index in range(micro_batches):
            yield Pass("forward", index, chunk)
    for chunk in reversed(range(chunks)):
        for index in range(micro_batches):
            yield Pass("backward", index, chunk)


def all_forward(stages: int, stage: int, micro_batches: int, chunks: int) -> Iterator[Pass]:
    """The passes of an evaluation, which has no way back."""
    for chunk in range(chunks):
        for index in range(micro_batches):
            yield Pass("forward", index, chunk)
