"""The planner on clusters as they are: problems drawn by seed (tests/planner/patterns.py), plans and bounds.

    make bench NAME=planner ARGS="drawn"               # these rows alone, of problems nobody has seen
    make bench NAME=planner ARGS="drawn --seed 5"      # the problems of a run whose rows name this seed
    python benchmarks/_drawn.py --seed 5 --count 48     # every problem on a line: seconds, objective, gap

Each run draws a seed of its own, which its rows name: a search that was developed by looking at some problems
is judged by others.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from _results import Row, row  # noqa: E402
from elasticd_planner.problem_files.file_format import Planned  # noqa: E402
from elasticd_planner.problem_files.solve import solve  # noqa: E402

from tests.planner.patterns import Drawn, drawn, drawn_large, with_shares  # noqa: E402

#: How many problems of 32 and 64 devices, and of 256 and 1,024, the rows have; below which number a seed is.
COUNT, LARGE, SEEDS = 400, 40, 1_000_000


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one problem. value: the plan's objective, None where it was refused; equal: the same with
    equal shares, None where that is the problem itself."""

    drawn: Drawn
    value: float | None
    gap: float
    seconds: float
    equal: float | None

    @property
    def worse(self) -> bool:
        """Whether allowing uneven shares made the plan worse."""
        return self.equal is not None and (self.value is None or self.value > self.equal * (1 + 1e-9))


def outcomes(problems: Iterable[Drawn]) -> Iterator[Outcome]:
    """Seconds are of the processor."""
    for each in problems:
        start = time.process_time()
        planned = solve(each.problem, each.objective, ideal=False)
        seconds = time.process_time() - start
        equal = None
        if each.uneven:
            equal = _value(solve(with_shares(each.problem, uneven=False), each.objective, ideal=False))
        gap = planned.figures.gap if planned.figures is not None else float("inf")
        yield Outcome(drawn=each, value=_value(planned), gap=gap, seconds=seconds, equal=equal)


def _value(planned: Planned) -> float | None:
    if planned.figures is None:
        return None
    return planned.figures.steady if planned.objective == "steady" else planned.figures.step


def drawn_rows(seed: int | None = None, count: int = COUNT, large_count: int = LARGE) -> list[Row]:
    """Rows of the drawn problems, small and large; where there is no time for all, of so many of them. seed:
    None for a fresh one."""
    seed = secrets.randbelow(SEEDS) if seed is None else seed
    print(f"drawn: --seed {seed}", flush=True)
    few = list(outcomes(drawn(seed, count)))
    large = list(outcomes(drawn_large(seed, large_count)))
    words = f"{_of(count, COUNT)} drawn problems of 32 and 64 devices, seed {seed}"
    large_words = f"{_of(large_count, LARGE)} drawn problems of 256 and 1,024 devices, seed {seed}"
    seconds = sorted(each.seconds for each in few)
    return [
        *_common(words, few),
        _goal(f"{words}: processor, median", _part(seconds, 0.5), 0.3, "s"),
        _goal(f"{words}: processor, largest", seconds[-1], 1.0, "s"),
        *_common(large_words, large),
        row(f"{large_words}: processor, median", _part(sorted(o.seconds for o in large), 0.5), "s"),
        row(f"{large_words}: processor, largest", max(o.seconds for o in large), "s"),
    ]


def _of(count: int, every: int) -> str:
    return str(count) if count == every else f"{count} of {every}"


def _common(words: str, listed: Sequence[Outcome]) -> Iterator[Row]:
    """Refusals, plans that are worse for what is allowed, and gaps, by pattern too."""
    uneven = sum(each.drawn.uneven for each in listed)
    yield _goal(
        f"{words}: refused, though each has a plan", sum(o.value is None for o in listed), 0, "problems"
    )
    yield _goal(
        f"{words}: worse with uneven shares allowed, of {uneven}", sum(o.worse for o in listed), 0, "problems"
    )
    gaps = sorted(each.gap for each in listed)
    for name, part, limit in (("median", 0.5, 0.02), ("90th percentile", 0.9, 0.05), ("largest", 1.0, 0.12)):
        yield _goal(f"{words}: proved gap, {name}", _part(gaps, part), limit, "")
    for pattern in dict.fromkeys(each.drawn.pattern for each in listed):
        own = sorted(each.gap for each in listed if each.drawn.pattern == pattern)
        yield row(f"{words}, {pattern}: proved gap, median", _part(own, 0.5), "")
        yield row(f"{words}, {pattern}: proved gap, largest", own[-1], "")


def _part(ordered: Sequence[float], part: float) -> float:
    """The value below which this part of the others is."""
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def _goal(name: str, found: float, limit: float, unit: str) -> Row:
    return row(name, found, unit, goal=f"<= {limit:g}", met=found <= limit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=48)
    parser.add_argument("--large", action="store_true", help="256 and 1,024 devices")
    given = parser.parse_args()
    problems = (drawn_large if given.large else drawn)(given.seed, given.count)
    for each in outcomes(problems):
        value = "refused" if each.value is None else f"{each.value:.2f}"
        equal = "" if each.equal is None else f"   equal shares {each.equal:.2f}"
        print(
            f"{each.drawn.name:40} {each.seconds:6.2f} s   {value:>8}   gap {each.gap:.4f}{equal}"
            f"{'   WORSE' if each.worse else ''}",
            flush=True,
        )


if __name__ == "__main__":
    main()
