"""The planning child: Problems on standard input, one JSON document a line, the Answer of each as a line of
standard output.

The coordinator starts it ahead, so that nobody waits for Python and its imports, and asks it one problem after
another: its own loop never waits for a search, and a search that takes too long can be killed. Exit status 2:
a line is no problem; standard error says why. It ends when its input does. Parent and child are of one release,
so that what they say to each other has no version.
"""

from __future__ import annotations

import os
import sys

import msgspec

from elasticd_planner.problem import Problem
from elasticd_planner.search.planner import plan


def main() -> int:
    """Usage: python -m elasticd_planner [NUMBER] < problems > answers"""
    try:
        number = int(sys.argv[1]) if len(sys.argv) > 1 else 0
        for line in sys.stdin.buffer:
            problem = msgspec.json.decode(line, type=Problem)
            sys.stdout.buffer.write(msgspec.json.encode(plan(problem, number)) + b"\n")
            sys.stdout.flush()
    except ValueError as error:
        sys.stderr.write(f"elasticd planner: the problem on standard input is wrong: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # whoever waits for the end of this process does not wait until all is tidied up
