"""What `elasticd profile` says to the process that measures, and what that answers: one JSON object a line.

The command line carries no torch and the runtime no command line, so the measuring is a process of its own. It
reads one `Request` from its standard input and ends when that is closed; it writes `Progress`, then `Done` or
`Failed`. Both are of one release, the child of the other, so that none of this has a version.
"""

from __future__ import annotations

from elasticd_planner.profiling.samples import Samples
from elasticd_planner.value import Value, refuse


class Request(Value, frozen=True, kw_only=True):
    """What to measure. target: FILE:NAME of the model, or of a function that makes it; loss and batch are names
    in the same file (empty: none). tokens: of micro-batches, each a multiple of sample_tokens. whole: compare
    with the whole model too; collectives: measure all-reduces among processes of this machine."""

    target: str
    widths: tuple[int, ...]
    tokens: tuple[int, ...]
    sample_tokens: int
    repeats: int
    threads: int
    device: str = "cpu"
    loss: str = ""
    batch: str = ""
    collectives: bool = False
    whole: bool = True

    def __post_init__(self) -> None:
        numbers = (*self.widths, *self.tokens, self.sample_tokens, self.repeats, self.threads)
        if not self.widths or any(number < 1 for number in numbers):
            refuse("profile: widths, tokens, sample tokens, repeats and threads must be positive")
        if len(set(self.tokens)) < 2:
            refuse(f"profile: a fit needs two token counts at least, not {list(self.tokens)}")
        odd = [count for count in self.tokens if count % self.sample_tokens]
        if odd:
            refuse(
                f"profile: {odd[0]} tokens are no whole samples of {self.sample_tokens}: name multiples of "
                f"{self.sample_tokens}, or other --sample-tokens"
            )


class Progress(Value, frozen=True, kw_only=True, tag="progress"):
    """The part that is done, of 1."""

    part: float


class Done(Value, frozen=True, kw_only=True, tag="done"):
    """Everything that was measured."""

    samples: Samples


class Failed(Value, frozen=True, kw_only=True, tag="failed"):
    """Why nothing can be measured, in one message for the user."""

    reason: str


Answer = Progress | Done | Failed
