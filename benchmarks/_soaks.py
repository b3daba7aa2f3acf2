"""Runs of the soak, whose faults add up over many sittings: `results/soaks.jsonl` has a line for each.

A line counts as long as what it measured is as it was: no file of the product, nor of the soak, has changed
between its commit and the tree at hand. A run on a tree with changes that are not committed does not count.
"""

from __future__ import annotations

import secrets
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from _results import RESULTS, ROOT, Row, row
from _stale import Changes

from tests.soak.soak import Report

#: What a soak measures.
MEASURED = ("elasticd", "agent", "migration", "planner", "tests/soak")
#: Faults of all runs together, and how far a loss may be from that of the undisturbed run.
FAULTS, APART = 1000, 1e-9
#: The runs so far.
RUNS = RESULTS / "soaks.jsonl"
#: The row of those faults.
RANDOM = "soak: faults at random, of all kinds"
#: Faults of one run, and the seconds that it may take: rounding grows with the steps, so that runs are short.
EACH, SECONDS = 60, 3600.0


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A run of the soak, and the commit that it ran on ("" for a tree with changes)."""

    commit: str
    shape: str
    report: Report


def rows(count: int, path: Path = RUNS) -> Iterator[Row]:
    """`count` faults more, and what all runs that count found."""
    while count > 0:
        run = _run(min(EACH, count), ("--nodes", "2", "--devices", "2"))
        count -= max(1, run.report.faults)
        path.parent.mkdir(exist_ok=True)
        with path.open("ab") as file:
            file.write(msgspec.json.encode(run) + b"\n")
    yield from figures(kept(path))


def kept(path: Path) -> list[Run]:
    """The runs that still count."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    runs = [msgspec.json.decode(line, type=Run) for line in lines]
    changes = Changes()
    return [run for run in runs if run.commit and changes.known and not changes.since(run.commit, MEASURED)]


def figures(runs: Sequence[Run]) -> Iterator[Row]:
    """What they found together."""
    reports = [run.report for run in runs]
    faults, kinds = sum(each.faults for each in reports), Counter[str]()
    for each in reports:
        kinds.update(each.kinds)
    yield row(RANDOM, faults, "", goal=f">= {FAULTS}", met=faults >= FAULTS)
    for kind, number in sorted(kinds.items()):
        yield row(f"soak: faults of kind {kind}", number, "")
    never = [each for each in reports if each.wrong and not each.faults]
    yield row("soak: runs that ended before a first fault", len(never), "", goal="0", met=not never)
    wrong = sum(len(each.wrong) for each in reports if each not in never)
    title = "soak: steps and samples lost or counted twice, false findings, records that break a rule"
    yield row(title, wrong, "", goal="0", met=wrong == 0)
    ended = sum(len(each.ended) for each in reports)
    yield row("soak: daemons that ended by themselves", ended, "", goal="0", met=ended == 0)
    apart = max((each.apart for each in reports if each.apart is not None), default=None)
    name = "soak: largest relative difference of a loss from the undisturbed run"
    yield row(name, apart, "", goal=f"<= {APART:g}", met=apart is not None and apart <= APART)
    yield row("soak: faults held back", sum(len(each.held_back) for each in reports), "")
    yield row("soak: steps", sum(each.steps for each in reports), "steps")
    yield row("soak: runs, by commit", _by_commit(runs), "")


def _by_commit(runs: Sequence[Run]) -> str:
    found = Counter(run.commit for run in runs)
    return ", ".join(f"{commit}: {number}" for commit, number in found.items())


def _run(faults: int, shape: Sequence[str]) -> Run:
    """What it kept (logs, ledgers, records) stays where something was wrong."""
    folder = Path(tempfile.mkdtemp(prefix="eb-soak-"))
    seed = str(secrets.randbelow(1_000_000))
    command = [sys.executable, "-m", "tests.soak.soak", "--seed", seed, "--faults", str(faults)]
    before = commit()
    done = subprocess.run([*command, *shape, "--out", str(folder)], timeout=SECONDS, check=False, cwd=ROOT)
    found = folder / "report.json"
    if not found.exists():
        raise RuntimeError(f"the soak of seed {seed} made no report and ended with {done.returncode}: {folder}")
    report = msgspec.json.decode(found.read_bytes(), type=Report)
    if not report.wrong and not report.ended:
        shutil.rmtree(folder)
    return Run(commit=before if before == commit() else "", shape=" ".join(shape), report=report)


def commit() -> str:
    """Of the tree at hand; nothing where what is measured differs from it, or git does not know."""
    return Changes().head(MEASURED)
