"""A step on the CPU now over one of an earlier commit: what a change costs who has no use for it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
from _instructions import instructions, lacking
from _pairs import Ratio, ratio
from _results import ROOT, Row, row

#: The most that the ratio may be, with all of its interval.
STEP = 1.03
#: The same of counted instructions.
COUNTED = 1.01
#: Pairs go on until half the interval is as narrow as this, or there are so many.
NARROW, LEAST_PAIRS, MOST_PAIRS, STEPS_OF_A_PAIR = 0.01, 80, 400, 10
#: Processes start anew after so many pairs: where one has its memory makes it faster or slower to its end.
PAIRS_OF_A_START = 20
#: The plans of _step_side.py: their ranks, and what the row calls them.
ALONE, CUT = ("alone", 1, "a step on the CPU"), ("cut", 4, "a step of four ranks in unlike TP, stages and ZeRO")
Sort = tuple[str, int, str]


def step_rows(before: str, *sorts: Sort, pairs: int | None = None) -> Iterator[Row]:
    """In turns, in processes that stay for a while, for each sort of step; `before` is the earlier commit.
    pairs: so many, however wide the interval is then."""
    with tree_of(before) as tree:
        for sort in sorts:
            found = paired(tree, sort, pairs)
            name = f"{sort[2]} over that of {before}"
            yield row(name, found.value, "x", noise=found.noise)
            top = f"{name}: upper end of the 95 % interval ({found.pairs} pairs)"
            yield row(top, found.high, "x", goal=f"<= {STEP}", met=found.high <= STEP)


def instruction_rows(before: str, layers: int, micro_batches: int) -> Iterator[Row]:
    """Counted instructions of a step over those of the earlier commit: they are the same on a busy machine."""
    if missing := lacking():
        print(f"instructions are not counted: there is no {missing} here")
        return
    with tree_of(before) as tree:
        now, then = (instructions(layers, micro_batches, each)["ours"] for each in (ROOT, tree))
    name = f"one processor, {layers} blocks, {micro_batches} micro-batches: instructions of a step"
    yield row(
        f"{name} over those of {before}", now / then, "x", goal=f"<= {COUNTED}", met=now / then <= COUNTED
    )


@contextmanager
def tree_of(commit: str) -> Iterator[Path]:
    """The files of a commit, in a folder."""
    with TemporaryDirectory(prefix="eb-base-") as folder:
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        yield Path(folder)


def paired(tree: Path, sort: Sort, pairs: int | None = None) -> Ratio:
    """This tree's step over that of `tree`, until the interval is narrow, or for so many pairs."""
    ours, theirs = list[float](), list[float]()
    most, of_a_start = pairs or MOST_PAIRS, pairs or PAIRS_OF_A_START
    while len(ours) < most and (len(ours) < LEAST_PAIRS or ratio(ours, theirs).noise > NARROW):
        with _Side(ROOT, sort) as our, _Side(tree, sort) as their:
            for side in (our, their):
                side.seconds(3 * STEPS_OF_A_PAIR)
            for number in range(of_a_start):
                for side, spent in ((our, ours), (their, theirs))[:: -1 if number % 2 else 1]:
                    spent.append(side.seconds(STEPS_OF_A_PAIR))
    return ratio(ours, theirs)


class _Side(AbstractContextManager["_Side"]):
    """The ranks of one tree."""

    def __init__(self, tree: Path, sort: Sort) -> None:
        name, ranks, _ = sort
        self._folder = TemporaryDirectory(prefix="eb-side-")
        program = str(ROOT / "benchmarks/_step_side.py")
        self._ranks = [
            subprocess.Popen(
                [sys.executable, program, str(tree), name, str(rank), self._folder.name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=tree,
            )
            for rank in range(ranks)
        ]

    def seconds(self, steps: int) -> float:
        """Of one step, by the rank that took longest."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{steps}\n".encode())
            rank.stdin.flush()
        return max(
            msgspec.json.decode(rank.stdout.readline(), type=float) for rank in self._ranks if rank.stdout
        )

    def __exit__(self, *_: object) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.wait()
        self._folder.cleanup()
