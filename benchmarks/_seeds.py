"""Seeds of the simulated soak, which add up over many sittings: `results/seeds.jsonl` has a line for each.

A line counts as long as nothing that it measured has changed, as a line of `_soaks.py` does.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
from _results import RESULTS, Row, row
from _soaks import MEASURED
from _stale import Changes

from tests.soak.simulated import Play, plays

#: Seeds of all sittings together, changes of leaders in them, and seeds of one line.
SEEDS, TAKEOVERS, TOGETHER = 10_000, 10_000, 100
#: The sittings so far.
RUNS = RESULTS / "seeds.jsonl"
#: Faults of a seed.
FAULTS = 12


class Seeds(msgspec.Struct, frozen=True, kw_only=True):
    """A sitting, and the commit that it ran on ("" for a tree with changes)."""

    commit: str
    first: int  # its seeds are this one and those that follow
    count: int
    faults: int
    leaders: int
    answers: dict[str, int]  # of users' calls, by what they were told
    wrong: dict[int, tuple[str, ...]]  # by seed


def rows(count: int, path: Path = RUNS) -> Iterator[Row]:
    """`count` seeds more, and what all seeds that count found."""
    logging.disable(logging.WARNING)  # of a store that is away, by each leader
    while count > 0:
        played = min(TOGETHER, count)
        sitting = _sitting(secrets.randbelow(100_000_000), played)
        count -= played
        path.parent.mkdir(exist_ok=True)
        with path.open("ab") as file:
            file.write(msgspec.json.encode(sitting) + b"\n")
    yield from figures(kept(path))


def _sitting(first: int, count: int) -> Seeds:
    before = Changes().head(MEASURED)
    found: list[Play] = [*plays(range(first, first + count), FAULTS)]
    return Seeds(
        commit=before if before == Changes().head(MEASURED) else "",
        first=first,
        count=count,
        faults=sum(play.faults for play in found),
        leaders=sum(play.leaders for play in found),
        answers=dict(sum((Counter(play.answers) for play in found), Counter[str]())),
        wrong={play.seed: play.wrong for play in found if play.wrong},
    )


def kept(path: Path) -> list[Seeds]:
    """The sittings that still count."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    sittings = [msgspec.json.decode(line, type=Seeds) for line in lines]
    changes = Changes()
    return [
        sitting
        for sitting in sittings
        if sitting.commit and changes.known and not changes.since(sitting.commit, MEASURED)
    ]


def figures(sittings: list[Seeds]) -> Iterator[Row]:
    """What they found together."""
    seeds = sum(sitting.count for sitting in sittings)
    wrong = [seed for sitting in sittings for seed in sitting.wrong]
    takeovers = sum(sitting.leaders - sitting.count for sitting in sittings)
    answers = sum((Counter(sitting.answers) for sitting in sittings), Counter[str]())

    def simulated(name: str, value: int, goal: str | None = None, met: bool | None = None) -> Row:
        return row(f"simulated soak: {name}", value, "", kind="simulated", goal=goal, met=met)

    yield simulated("seeds", seeds, f">= {SEEDS}", seeds >= SEEDS)
    yield simulated("changes of leaders", takeovers, f">= {TAKEOVERS}", takeovers >= TAKEOVERS)
    yield simulated("faults", sum(sitting.faults for sitting in sittings))
    yield simulated("decisions that users were told are made", answers["ok"])
    yield simulated(
        "seeds with a decision that store or next leader lacks, or with anything else wrong",
        len(wrong),
        "0",
        not wrong,
    )
