"""The console of every command: as wide as the terminal, and off a terminal as wide as its longest line.

A pipe, a file and a program's log have no width. What commands write there is never wrapped or cut: a line of a
table is a line of text, so that `grep`, `awk` and `sort` see a device, a job or a plan whole (as with `kubectl
get` and `squeue -o`). No other module of the commands makes a console (`tests/cli/test_console.py`).
"""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console

#: Characters of the longest line that is written off a terminal.
UNBOUNDED = 1_000_000


class UnwrappedConsole(Console):
    """A console without a width, whose lines have no spaces at their ends."""

    def __init__(self, **options: Any) -> None:
        super().__init__(width=UNBOUNDED, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Prints as `Console.print` does; cells of a table's last column are not padded."""
        with self.capture() as captured:
            super().print(*objects, **options)
        lines = captured.get().split("\n")
        self.file.write("\n".join(line.rstrip(" ") for line in lines))
        self.file.flush()


def command_console(*, stderr: bool = False, markup: bool = False) -> Console:
    """The console for standard output, or for standard error; `markup`: "[red]word[/]" is a red word."""
    stream = sys.stderr if stderr else sys.stdout
    kind = Console if stream.isatty() else UnwrappedConsole
    return kind(stderr=stderr, highlight=False, markup=markup)
