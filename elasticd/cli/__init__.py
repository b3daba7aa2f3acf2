"""The command line `elasticd`, one module per family of commands; `app` puts them together."""

from __future__ import annotations

import sys

from elasticd.extras import entered

#: The exit code that shells know of a program that Ctrl-C ended.
INTERRUPTED = 130


def main() -> None:
    """The entry point. A package that is missing is named with the extra that brings it."""
    entered("elasticd", _start)


def _start() -> None:
    try:
        from elasticd.cli.app import elasticd
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    elasticd(prog_name="elasticd")
