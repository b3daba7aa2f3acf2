"""The order of forward and backward passes on one stage: 1F1B over any number of micro-batches and stages.

1F1B (PipeDream-flush; Narayanan et al., 2021) keeps at most min(micro_batches, stages - stage) activations
alive on a stage. GPipe (Huang et al., 2019) keeps those of all micro-batches: tests compare with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

Pass = tuple[Literal["forward", "backward"], int]
#: (stages, stage, micro-batches): the passes of that stage in order. Backward passes go by ascending index.
Schedule = Callable[[int, int, int], Iterator[Pass]]


def one_forward_one_backward(stages: int, stage: int, micro_batches: int) -> Iterator[Pass]:
    """The passes of `stage` (0 is the first) of a pipeline of `stages`, by micro-batch index."""
    warm = min(micro_batches, stages - stage - 1)
    for index in range(warm):
        yield "forward", index
    for index in range(micro_batches - warm):
        yield "forward", warm + index
        yield "backward", index
    for index in range(micro_batches - warm, micro_batches):
        yield "backward", index


def all_forward_all_backward(stages: int, stage: int, micro_batches: int) -> Iterator[Pass]:
    """GPipe's passes, the same on every stage."""
    for index in range(micro_batches):
        yield "forward", index
    for index in range(micro_batches):
        yield "backward", index


def all_forward(stages: int, stage: int, micro_batches: int) -> Iterator[Pass]:
    """The passes of an evaluation, which has no way back."""
    for index in range(micro_batches):
        yield "forward", index


def live_activations(stages: int, stage: int, micro_batches: int) -> int:
    """The most micro-batches whose activations a stage holds at once under 1F1B."""
    return min(micro_batches, stages - stage)
