"""Requests of `elasticd profile` to the process that measures, and its answers: one JSON object a line.

The command line carries no torch and the runtime no command line, so the measuring is a process of its own. It
reads one `Request` from its standard input and ends when that is closed; it writes `Progress`, then `Done` or
`Failed`. To a `Describe` it answers with `Described` or `Failed`. Both are of one release, the child of the
other, so that none of this has a version.
"""

from __future__ import annotations

import msgspec
from elasticd_planner.profiling.samples import Samples
from elasticd_planner.spec.model import ModelSpec
from elasticd_planner.value import Value, refuse

#: Widths of TP groups that are measured where none are named, if the model can have them.
WIDTHS = (1, 2, 4)
#: Samples of the micro-batches that are measured where their tokens are not named.
SAMPLES = (1, 2, 4, 8)


class Describe(Value, frozen=True, kw_only=True, tag="describe"):
    """A model is to be described, and nothing measured."""

    target: str  # FILE:NAME of the model, or of a function that makes it


class Request(Value, frozen=True, kw_only=True, tag="measure"):
    """The measurements to make."""

    target: str  # FILE:NAME of the model, or of a function that makes it; or the FILE of a training script
    repeats: int  # measurements of each section
    threads: int  # of torch on a CPU
    widths: tuple[int, ...] = ()  # of TP groups (empty: those of `WIDTHS` that the model can have)
    tokens: tuple[int, ...] = ()  # of micro-batches, multiples of `sample_tokens` (empty: `SAMPLES` of them)
    sample_tokens: int = 0  # tokens of a sample (0: as many as the script's samples have on average)
    arguments: tuple[str, ...] | None = None  # of the script that `target` is; None: it is FILE:NAME
    device: str = "cpu"  # torch device, "cpu" or "cuda"
    loss: str = ""  # name of loss(output, batch) in the same file (empty: none)
    batch: str = ""  # name of batch(samples, tokens) in the same file (empty: random ids)
    collectives: bool = False  # measure all-reduces among processes of this machine
    whole: bool = True  # compare the sum of the blocks with the complete model
    items: str = ""  # what the module runs on that is measured (empty: samples); its micro-batches are items

    def __post_init__(self) -> None:
        numbers = (*self.widths, *self.tokens, self.repeats, self.threads)
        if any(number < 1 for number in numbers) or self.sample_tokens < 0:
            refuse("profile: widths, tokens, sample tokens, repeats and threads must be positive")
        if not self.sample_tokens or self.items:
            return  # the script says it
        if not self.tokens:
            msgspec.structs.force_setattr(
                self, "tokens", tuple(self.sample_tokens * count for count in SAMPLES)
            )
        if len(set(self.tokens)) < 2:
            refuse(f"profile: a fit needs two token counts at least, not {list(self.tokens)}")
        odd = [count for count in self.tokens if count % self.sample_tokens]
        if odd:
            refuse(
                f"profile: {odd[0]} tokens are no whole samples of {self.sample_tokens}: name multiples of "
                f"{self.sample_tokens}, or other --sample-tokens"
            )


class Progress(Value, frozen=True, kw_only=True, tag="progress"):
    """The progress of the measurements."""

    part: float  # 0 to 1


class ItemSamples(Value, frozen=True, kw_only=True):
    """A module of items, measured, and what a sample has of them in the mean."""

    name: str  # of the module
    items: str  # what it takes of a sample
    items_a_sample: float
    rows_an_item: float
    trained: bool
    samples: Samples  # whose tokens are rows of items


class Done(Value, frozen=True, kw_only=True, tag="done"):
    """Everything is measured."""

    samples: Samples  # what was measured, of a model of several modules of the one with the loss
    module: str = "model"  # the name of that module
    modules: tuple[ItemSamples, ...] = ()  # the modules of items


class Described(Value, frozen=True, kw_only=True, tag="described"):
    """The description of the model."""

    modules: dict[str, ModelSpec]  # of a model of one module that alone


class Failed(Value, frozen=True, kw_only=True, tag="failed"):
    """Nothing can be measured."""

    reason: str  # one message for the user


Answer = Progress | Done | Described | Failed
