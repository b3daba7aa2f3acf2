"""The order of forward and backward passes on each stage of a pipeline: 1F1B, plain and interleaved.

Plain (PipeDream-flush; Narayanan et al., 2021): p - s - 1 forward passes, then forward and backward by turns,
then the backward passes that are left.

Interleaved (Narayanan et al., 2021, section 2.2, as Megatron-LM runs it). A micro-batch passes through all p
stages once for each of v chunks. Micro-batches go in groups of g, p at least where there are so many: a stage
runs a group through its first chunk, then the same group through its second, and so on; backward, chunks come
in the reverse order. Before its first backward pass stage s runs (v - 1) g passes, so that the group's first
micro-batch has come to its last chunk, and 2 (p - s - 1) more, for the way to the last stage and back.

Why groups are not smaller: the first micro-batch of a group comes back to stage 0 when p passes are over. A
last group of what groups of p leave over would make stages wait, for longer than plain 1F1B takes, or for ever
in a circle; so the first groups take one or more of those each. Where p divides nothing, any m >= p then fills
equal stages but for (p - 1) / v of a micro-batch's time. Larger groups keep more activations: those of
(v - 1) g + 2 (p - s) - 1 passes at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Literal, NamedTuple

Kind = Literal["forward", "backward"]


class Pass(NamedTuple):
    """One pass of a stage: of which micro-batch, through which of its chunks."""

    kind: Kind
    micro_batch: int
    chunk: int = 0


def passes(stages: int, stage: int, micro_batches: int, chunks: int = 1) -> Iterator[Pass]:
    """The passes of `stage` (0 is the first) of a pipeline of `stages`, in order. Those of each kind through
    one chunk go by ascending index of micro-batches."""
    if chunks == 1:
        warm = min(micro_batches, stages - stage - 1)
        ahead = [Pass("forward", index) for index in range(micro_batches)]
        back = [Pass("backward", index) for index in range(micro_batches)]
    else:
        listed = _groups(stages, micro_batches)
        turns = [(chunk, group) for group in listed for chunk in range(chunks)]
        ahead = [Pass("forward", index, chunk) for chunk, group in turns for index in group]
        back = [Pass("backward", index, chunks - 1 - chunk) for chunk, group in turns for index in group]
        warm = min(len(ahead), (chunks - 1) * len(listed[0]) + 2 * (stages - stage - 1))
    yield from ahead[:warm]
    for forward, backward in zip(ahead[warm:], back, strict=False):
        yield forward
        yield backward
    yield from back[len(ahead) - warm :]


def _groups(stages: int, micro_batches: int) -> list[range]:
    """As many groups as have `stages` micro-batches each; the first take one more of what is left over."""
    count = max(1, micro_batches // stages)
    size, more = divmod(micro_batches, count)
    starts = [index * size + min(index, more) for index in range(count + 1)]
    return [range(a, b) for a, b in pairwise(starts)]


def most_alive(stages: int, stage: int, micro_batches: int, sizes: tuple[float, ...] = (1,)) -> float:
    """The most that a stage keeps at once from forward to backward passes, one pass through chunk c keeping
    `sizes[c]`; with the default, plain 1F1B's micro-batches: min(micro_batches, stages - stage)."""
    alive = most = 0.0
    for kind, _, chunk in passes(stages, stage, micro_batches, len(sizes)):
        alive += sizes[chunk] if kind == "forward" else -sizes[chunk]
        most = max(most, alive)
    return most
