"""The command line `elasticd`, one module per family of commands; `app` puts them together."""

from __future__ import annotations

import sys

#: The exit code that shells know of a program that Ctrl-C ended.
INTERRUPTED = 130


def main() -> None:
    """The entry point. What the commands need beyond a trainer's own packages is an extra: say so plainly."""
    try:
        from elasticd.cli.app import elasticd
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "elasticd":
            raise
        sys.exit(f"elasticd: the commands need the package {error.name!r}: pip install 'elasticd[daemon]'")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    elasticd(prog_name="elasticd")
