"""The parts of a benchmark that takes long: each is written as soon as it was measured, beside what was
measured before, so that a run that is cut off has lost nothing.

The file is as every benchmark's, with one thing more: `parts` says of each when it was measured, on what, and
how many of the rows, in their order, are its own.
"""

from __future__ import annotations

import argparse
import datetime
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
from _results import RESULTS, Row, machine, stamped, table, unmeasured, versions
from rich.console import Console


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One part as it was measured: when it ended (UTC), seconds that it took, faults of each kind (0: it has
    none), the load average at its end, the versions, and how many rows it has."""

    part: str
    ended: str
    seconds: float
    injections: int
    load_average: float
    versions: dict[str, str]
    rows: int


class _File(msgspec.Struct, frozen=True, kw_only=True):
    parts: list[Part] = msgspec.field(default_factory=list)
    rows: list[Row]


class Parts:
    """Those of the file at `path`, in the order of `names`; parts by other names are dropped."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self._path, self._names = path, tuple(names)
        self._found: dict[str, tuple[Part, list[Row]]] = {}
        if path.exists():
            file = msgspec.json.decode(path.read_bytes(), type=_File)
            at = 0
            for part in file.parts:
                self._found[part.part] = (part, file.rows[at : at + part.rows])
                at += part.rows

    @property
    def rows(self) -> list[Row]:
        return [row for name in self._names if name in self._found for row in self._found[name][1]]

    @property
    def seconds(self) -> Mapping[str, float]:
        return {name: self._found[name][0].seconds for name in self._names if name in self._found}

    @property
    def injections(self) -> Mapping[str, int]:
        """Faults of each kind, by part."""
        return {name: part.injections for name, (part, _) in self._found.items() if name in self._names}

    def put(self, name: str, rows: Sequence[Row], seconds: float, injections: int = 0) -> list[Row]:
        """A part was measured: it takes the place of what was measured of it before, in the file, too. Returns
        the rows as they are written: with their commit, and with the goals that were not measured again."""
        before = self._found[name][1] if name in self._found else []
        rows = [*stamped(rows), *unmeasured(before, rows)]
        part = Part(
            part=name,
            ended=datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
            seconds=round(seconds, 1),
            injections=injections,
            load_average=os.getloadavg()[0],
            versions=versions(),
            rows=len(rows),
        )
        self._found[name] = (part, rows)
        self._write()
        return rows

    def _write(self) -> None:
        body = {
            "name": self._path.stem,
            "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
            "machine": machine(),
            "versions": versions(),
            "parts": [self._found[name][0] for name in self._names if name in self._found],
            "rows": self.rows,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        beside = self._path.with_suffix(".new")
        beside.write_bytes(msgspec.json.format(msgspec.json.encode(body), indent=2) + b"\n")
        beside.replace(self._path)


def measured(name: str, purpose: str | None, made: Mapping[str, Callable[[], Iterable[Row]]]) -> int:
    """The command of a benchmark of parts: measures all of them, or those after `--only`, into NAME.json.

    Args:
        name: of the benchmark.
        purpose: what `--help` says of it.
        made: what makes the rows of each part, by the name that `--only` takes.

    Returns:
        1 where a goal is missed, else 0.
    """
    parser = argparse.ArgumentParser(description=purpose, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(made), metavar="PART", default=list(made))
    parts = Parts(RESULTS / f"{name}.json", tuple(made))
    missed: list[str] = []
    for part in parser.parse_args().only:
        start = time.monotonic()
        rows = parts.put(part, list(made[part]()), time.monotonic() - start)
        missed += [each.name for each in rows if each.met is False]
    Console().print(table(name, parts.rows))
    if missed:
        print(f"goals missed: {', '.join(missed)}")
    return 1 if missed else 0
