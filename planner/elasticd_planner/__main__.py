"""The planning child: a Problem as JSON on standard input, its Answer as JSON on standard output.

The coordinator starts it for each problem, so that its own loop never waits for a search and a search that
takes too long can be killed; or ahead of it, to wait for one. Exit status 2: the input is no problem; standard
error says why. Without any input nothing is done: who was to send it is gone.
"""

from __future__ import annotations

import os
import sys

import msgspec

from elasticd_planner.problem import Problem
from elasticd_planner.search import plan


def main() -> int:
    """Usage: python -m elasticd_planner [NUMBER] < problem.json > answer.json"""
    try:
        number = int(sys.argv[1]) if len(sys.argv) > 1 else 0
        if not (text := sys.stdin.buffer.read()):
            return 0
        problem = msgspec.json.decode(text, type=Problem)
    except ValueError as error:
        sys.stderr.write(f"elasticd planner: the problem on standard input is wrong: {error}\n")
        return 2
    sys.stdout.buffer.write(msgspec.json.encode(plan(problem, number)) + b"\n")
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # whoever waits for the answer waits for the end of this process: nothing is tidied up
