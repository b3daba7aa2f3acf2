"""`DataOptions`: how a job reads samples and makes batches of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from elasticd.runtime.data.collate import Collate, pad
from elasticd.runtime.data.packing import Packing
from elasticd.runtime.exits import script_options


@script_options
@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The options by which samples become batches: the argument `data` of `elasticd.Job`.

    Raises:
        ValueError: `readers` is negative, there is both `collate` and `packing`, or `global_tokens` without
            `packing`.
        TypeError: `collate` is no function.
    """

    #: Makes a batch of a list of samples. The default is torch's own `default_collate`, with sequences of
    #: unequal length padded to the longest one of the micro-batch.
    collate: Collate = pad
    #: Tokens of a sample, by its index in the dataset. None: `dataset.lengths[index]`, if the dataset has
    #: `lengths`; otherwise samples count as equally long. With lengths, samples of like length share a
    #: micro-batch, and micro-batches differ in samples so that they are equal in work.
    length: Callable[[int], int] | None = None
    #: Threads of each process that read samples ahead, of this step and the next, and those of held-out sets.
    #: With 1 a dataset need not be thread-safe. 0: the training thread reads.
    readers: int = 1
    #: Sequences follow each other in rows without padding, and attention stays inside each. None: samples of a
    #: micro-batch are padded to the longest.
    packing: Packing | None = None
    #: Tokens of a step, on average: it has as many samples, in the job's order, as begin within so many tokens.
    #: It needs `packing` and the length of every sample, and may not be less than the longest. `global_batch`
    #: is then what is expected of a step, and the samples of a round of an evaluation. None: a step has
    #: `global_batch` samples.
    global_tokens: int | None = None

    def __post_init__(self) -> None:
        if not callable(self.collate):
            raise TypeError(
                f"data: collate is {self.collate!r}; it must be a function of a list of samples, or be left out"
            )
        if not isinstance(self.readers, int) or self.readers < 0:
            raise ValueError(f"data: readers is {self.readers!r}; it must be a whole number from 0 on")
        if not isinstance(self.packing, Packing | None):
            raise TypeError(f"data: packing is {self.packing!r}; it must be elasticd.Packing(...)")
        if self.packing is not None and self.collate is not pad:
            raise ValueError("data: collate makes padded batches; give either collate or packing")
        if self.global_tokens is not None:
            if not isinstance(self.global_tokens, int) or self.global_tokens < 1:
                raise ValueError(
                    f"data: global_tokens is {self.global_tokens!r}; it must be a whole number from 1 on"
                )
            if self.packing is None:
                raise ValueError(
                    "data: steps of global_tokens differ in samples, so that they must be packed: give "
                    "packing=elasticd.Packing() too"
                )
