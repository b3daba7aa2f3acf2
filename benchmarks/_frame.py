"""The frame of every benchmark: parts, the options of its command, and a results file that grows row by row.

    PARTS = {"pages": Part(page_rows, ("elasticd/dashboard",), smallest={"minutes": 0.1}), ...}

    if __name__ == "__main__":
        sys.exit(run("dashboard", __doc__, PARTS))

A part is a function that yields rows; its arguments are sizes, whose defaults are those that the results are
measured with. `--smallest` calls it with those of the table instead, to try whether it runs. Each row is
printed and written as soon as the part yields it, in the place of the row of that name of an earlier run. A
part that is cut off has lost nothing, and the rows that it did not reach are still there, with the commit and
the date at which they were measured. When a part ends, a goal that it has no row for any more stays in the
file without a value, and counts as missed.

`measures` are the paths of the tree whose changes make the part's rows old: a row is *stale* where one of these
paths has changed since the row's commit. `--stale` lists such rows and measures nothing.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import inspect
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from _results import RESULTS, Row, commit, line, machine, row, same_row, table, unmeasured, versions
from _stale import Changes
from rich.console import Console

Rows = Callable[..., Iterable[Row]]

#: Paths that parts measure: the planner, whatever trains, and the whole product.
PLANNER = ("planner",)
TRAINING = ("elasticd/models", "elasticd/runtime", "migration", "planner")
PRODUCT = ("agent", "elasticd", "migration", "planner")


class Part(msgspec.Struct, frozen=True):
    """One part of a benchmark.

    Attributes:
        rows: yields the part's rows, as each is measured.
        measures: paths from the root of the tree, whose changes make the rows stale.
        smallest: the arguments of `rows` for its smallest size, in seconds rather than minutes.
    """

    rows: Rows
    measures: tuple[str, ...]
    smallest: Mapping[str, Any] = MappingProxyType({})

    def __post_init__(self) -> None:
        inspect.signature(self.rows).bind(**self.smallest)  # a size that is no argument is known at once
        inspect.signature(self.rows).bind()


def module_rows(module: str) -> Rows:
    """The function `rows` of a module beside the benchmark, imported when the part begins and not before."""

    def rows(smallest: bool = False) -> Iterator[Row]:
        yield from importlib.import_module(module).rows(smallest)

    return rows


#: The goal of the row of a part that broke off, which the next run replaces.
_TO_THE_END = "to the end"


class PartRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A part as the file has it."""

    part: str
    ended: str  # UTC; of a part that was cut off, when it began
    seconds: float  # 0 for a part that was cut off
    load_average: float
    versions: dict[str, str]
    rows: int  # the part's rows are so many in the file's list, in the order of the parts
    measures: tuple[str, ...] = ()


class _File(msgspec.Struct, frozen=True, kw_only=True):
    parts: list[PartRecord] = msgspec.field(default_factory=list)
    rows: list[Row]


class Results:
    """The results file of a benchmark at `path`. Parts that the benchmark no longer has are dropped."""

    def __init__(self, path: Path, parts: Mapping[str, Part]) -> None:
        self.path, self._parts = path, parts
        self._records: dict[str, PartRecord] = {}
        self._rows: dict[str, list[Row]] = {}
        if path.exists():
            file, at = msgspec.json.decode(path.read_bytes(), type=_File), 0
            for record in file.parts:
                self._records[record.part] = record
                self._rows[record.part] = file.rows[at : at + record.rows]
                at += record.rows

    def rows(self, part: str) -> list[Row]:
        """The rows of one part, as the file has them."""
        return list(self._rows.get(part, ()))

    @property
    def all_rows(self) -> list[Row]:
        """The rows of all parts, in the order of the benchmark's table."""
        return [each for name in self._parts for each in self.rows(name)]

    def measure(self, part: str, smallest: bool) -> Iterator[Row]:
        """Runs a part, and yields each row when it is in the file; at the end, the goals that it has lost.

        A part that raises ends with a row "PART: broke off", a missed goal; the rows before it stay.
        """
        begin, on, today = time.monotonic(), commit(), _now()[:10]
        before = [each for each in self.rows(part) if each.goal != _TO_THE_END]
        new = list[Row]()
        old = list(before)

        def written(each: Row) -> Row:
            each = msgspec.structs.replace(each, commit=on, date=today)
            new.append(each)
            old[:] = same_row(old, each)
            self._put(part, [*new, *old], 0.0)
            return each

        try:
            asked = self._parts[part]
            for each in asked.rows(**asked.smallest if smallest else {}):
                yield written(each)
        except (Exception, SystemExit) as error:  # the other parts are measured all the same
            traceback.print_exc()
            reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
            yield written(row(f"{part}: broke off", reason, "", goal=_TO_THE_END, met=False))
        lost = unmeasured(before, new)
        self._put(part, [*new, *lost], time.monotonic() - begin)
        yield from lost

    def _put(self, part: str, rows: list[Row], seconds: float) -> None:
        self._rows[part] = rows
        self._records[part] = PartRecord(
            part=part,
            ended=_now(),
            seconds=round(seconds, 1),
            load_average=os.getloadavg()[0],
            versions=versions(),
            rows=len(rows),
            measures=self._parts[part].measures,
        )
        body = {
            "name": self.path.stem,
            "date": _now()[:10],
            "machine": machine(),
            "versions": versions(),
            "parts": [self._records[name] for name in self._parts if name in self._records],
            "rows": self.all_rows,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".new")
        beside.write_bytes(msgspec.json.format(msgspec.json.encode(body), indent=2) + b"\n")
        beside.replace(self.path)

    def stale(self, changes: Changes) -> Iterator[tuple[str, list[Row], str]]:
        """The rows that are older than the last change to what they measure: the part, its rows, the reason."""
        for name, part in self._parts.items():
            by_reason: dict[str, list[Row]] = {}
            for each in self.rows(name):
                if each.value is not None and (reason := changes.since(each.commit, part.measures)):
                    by_reason.setdefault(reason, []).append(each)
            for reason, rows in by_reason.items():
                yield name, rows, reason


def parser(purpose: str | None, parts: Iterable[str]) -> argparse.ArgumentParser:
    """The options of every benchmark. One that has further options adds them, and gives `run` the result."""
    names = ", ".join(parts)
    made = argparse.ArgumentParser(
        description=purpose,
        epilog=f"parts: {names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    only = "one or several of the parts below; may be repeated"
    made.add_argument("--only", nargs="+", action="extend", choices=list(parts), metavar="PART", help=only)
    made.add_argument("--smallest", action="store_true", help="tries the parts; the figures say nothing")
    out = "the results (default: benchmarks/results; with --smallest: among the system's temporary files)"
    made.add_argument("--out", type=Path, metavar="FILE", help=out)
    made.add_argument("--stale", action="store_true", help="lists rows older than what they measure, and ends")
    return made


def run(
    name: str,
    purpose: str | None,
    parts: Mapping[str, Part],
    options: argparse.Namespace | None = None,
) -> int:
    """The command of a benchmark: measures its parts, or those after `--only`.

    Args:
        name: of the benchmark and of its results file.
        purpose: the text of `--help`.
        parts: the parts by the names that `--only` takes, in the order of the results.
        options: what `parser` parsed, where the benchmark has options of its own.

    Returns:
        1 where a goal is missed or a part broke off, else 0. With `--smallest` goals do not count.
    """
    options = options or parser(purpose, parts).parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a part ends what it started
    default = Path(tempfile.gettempdir()) / "elasticd-benchmarks" if options.smallest else RESULTS
    results = Results(options.out or default / f"{name}.json", parts)
    if options.stale:
        return _print_stale(name, results)
    missed: list[str] = []
    for part in dict.fromkeys(options.only or parts):
        for each in results.measure(part, options.smallest):
            print(f"{part}: {line(each)}", flush=True)
            if each.met is False and not (options.smallest and each.goal != _TO_THE_END):
                missed.append(each.name)
    Console().print(table(name, results.all_rows))
    print(f"-> {results.path}")
    _print_stale(name, results, fresh=options.only or parts)
    if missed:
        print(f"goals missed: {', '.join(missed)}")
    return 1 if missed else 0


def _print_stale(name: str, results: Results, fresh: Collection[str] = ()) -> int:
    """Prints a line for each part with rows that are stale, but for those of `fresh`."""
    changes = Changes()
    if not changes.known:
        print(f"{name}: no git history here: it is not known which rows are stale", file=sys.stderr)
        return 0
    for part, rows, reason in results.stale(changes):
        if part not in fresh:
            print(f"{name} {part}: {'1 row is' if len(rows) == 1 else f'{len(rows)} rows are'} stale: {reason}")
    return 0


def _now() -> str:
    return datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds")
