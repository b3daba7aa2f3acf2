"""The planning child: Problems on standard input, one JSON document a line, the Answer of each as a line of
standard output.

The coordinator starts it ahead, so that nobody waits for Python and its imports, and asks it one problem after
another: its own loop never waits for a search, and a search that takes too long can be killed. Exit status 2:
a line is no problem, or one of a newer version; standard error says why. It ends when its input does.

Where another release is installed while the coordinator runs, the next child is of that release. It plans for
a coordinator of an older one, back to 0.1, whose problems say no version.
"""

from __future__ import annotations

import os
import sys

import msgspec

from elasticd_planner.problem import JobProblem, MeshProblem, Problem
from elasticd_planner.search.planner import answer
from elasticd_planner.value import refuse


class _Head(msgspec.Struct):
    """The part of a problem that is read before the rest."""

    type: str = ""
    version: int = 1


def read(line: bytes) -> JobProblem:
    """The problem in a line. Raises `msgspec.DecodeError`, and `Invalid` for one of a newer version."""
    head = msgspec.json.decode(line, type=_Head)
    if head.type == MeshProblem.__struct_config__.tag:
        return msgspec.json.decode(line, type=MeshProblem)
    version = head.version
    if version > Problem.newest:
        refuse(
            f"it has version {version}, and the planner that is installed here knows version {Problem.newest}: "
            "an older elasticd was installed while its coordinator runs; restart the coordinator"
        )
    return msgspec.json.decode(line, type=Problem)


def main() -> int:
    """Usage: python -m elasticd_planner [NUMBER] < problems > answers"""
    try:
        number = int(sys.argv[1]) if len(sys.argv) > 1 else 0
        for line in sys.stdin.buffer:
            sys.stdout.buffer.write(msgspec.json.encode(answer(read(line), number)) + b"\n")
            sys.stdout.flush()
    except ValueError as error:
        sys.stderr.write(f"elasticd planner: the problem on standard input is wrong: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # whoever waits for the end of this process does not wait until all is tidied up
