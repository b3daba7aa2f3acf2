"""Options of `elasticd run` for the output of the workers."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from elasticd_planner.value import Value

#: Names the options in a torchrun's environment.
OUTPUT_VARIABLE = "ELASTICD_OUTPUT"
#: Standard output and standard error, as torchrun numbers them: their sum is both.
STDOUT, STDERR, BOTH = 1, 2, 3


class OutputOptions(Value, frozen=True, kw_only=True):
    """The destination of the workers' output."""

    label: bool = False  # each line on the terminal begins with the worker's device
    shown: int = BOTH  # the streams that go to the terminal
    folder: str = ""  # of the files that get output (empty: none do)
    filed: int = 0  # the streams that go to a file


def options_of(environment: Mapping[str, str]) -> OutputOptions:
    """The options of this torchrun."""
    text = environment.get(OUTPUT_VARIABLE, "")
    return msgspec.json.decode(text, type=OutputOptions) if text else OutputOptions()
