"""Rows of benchmarks, as `_frame` writes them to `benchmarks/results/NAME.json`, and as a table for a terminal.

    row("throughput after the replan", 958.0, "tokens/s", kind="emulated", goal=">= 900", met=True)

A row with a goal says whether it is met; `noise` is the spread of the value as a fraction of it, where known.
`commit` is the one that the row was measured on. A goal that the file has stays in it: where a run has no row
for it, the row is kept, without a value and missed, until it is measured again or somebody deletes it by hand.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from rich.markup import escape
from rich.table import Table

RESULTS = Path(__file__).resolve().parent / "results"
ROOT = RESULTS.parent.parent
#: Whose versions a figure depends on.
_PACKAGES = ("elasticd", "torch", "numpy", "msgspec", "grpcio", "protobuf")

Kind = Literal["measured", "emulated", "simulated"]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One figure. `goal` is written as it reads (">= 0.92"); `met` is null where there is no goal. `commit`:
    of the tree that was measured, with a "+" where files differed from it; null without git. `date`:
    the day (UTC) on which it was measured."""

    name: str
    value: float | int | str | None
    unit: str
    goal: str | None
    met: bool | None
    noise: float | None
    kind: Kind
    commit: str | None = None
    date: str | None = None


def row(
    name: str,
    value: float | int | str | None,
    unit: str,
    *,
    kind: Kind = "measured",
    goal: str | None = None,
    met: bool | None = None,
    noise: float | None = None,
) -> Row:
    """A row; goal and met go together. Raises ValueError where one is given without the other."""
    if (goal is None) != (met is None):
        raise ValueError(f"{name}: a goal needs met, and met a goal")
    return Row(name=name, value=value, unit=unit, goal=goal, met=met, noise=noise, kind=kind)


def unmeasured(before: Iterable[Row], rows: Iterable[Row]) -> list[Row]:
    """The rows with a goal of an earlier run that this one has no row with a goal for: without a value, missed.
    Numbers in a name are figures of the run (as "in 60 injections", "192 of 400 problems"), not of its name."""
    there = Counter(_words(each.name) for each in rows if each.goal is not None)
    lacking = []
    for old in before:
        if old.goal is None:
            continue
        if there[_words(old.name)]:
            there[_words(old.name)] -= 1
        else:
            lacking.append(msgspec.structs.replace(old, value=None, met=False, noise=None))
    return lacking


def same_row(before: Iterable[Row], now: Row) -> list[Row]:
    """The rows of an earlier run without the first one that `now` takes the place of, by its words."""
    rest = list(before)
    for at, old in enumerate(rest):
        if _words(old.name) == _words(now.name):
            return rest[:at] + rest[at + 1 :]
    return rest


def _words(name: str) -> str:
    """The same for a run of all problems ("400 problems") and for one of a part ("192 of 400 problems")."""
    return re.sub(r"# of #", "#", re.sub(r"\d[\d.,]*", "#", name))


def commit(root: Path = ROOT) -> str | None:
    """The commit of the tree, with a "+" where tracked files but for the results differ; None without git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        results = f":(exclude){RESULTS.relative_to(ROOT)}"
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", results)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changed else "")


def line(row: Row) -> str:
    """One row as a line of text, as a benchmark prints it when it is measured."""
    goal = "" if row.goal is None else f" (goal {row.goal}{'' if row.met else ': missed'})"
    noise = "" if row.noise is None else f" ±{row.noise:.1%}"
    return f"{row.name}: {_value(row)}{noise}{goal}"


def _value(row: Row) -> str:
    value = f"{row.value:,.4g}" if isinstance(row.value, float) else str(row.value)
    return f"{value} {row.unit}".strip()


def table(name: str, rows: Sequence[Row]) -> Table:
    """The rows for a terminal."""
    made = Table(title=name, title_justify="left", box=None)
    made.add_column("figure")
    for column in ("value", "goal", "noise"):
        made.add_column(column, justify="right")
    made.add_column("kind")
    for each in rows:
        style = {True: "green", False: "red", None: ""}[each.met]
        noise = "" if each.noise is None else f"±{each.noise:.1%}"
        cells = (each.name, _value(each), each.goal or "", noise, each.kind)
        made.add_row(*map(escape, cells), style=style)
    return made


def machine() -> dict[str, object]:
    """What the figures were made on."""
    return {
        "system": platform.system(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
