"""What every benchmark ends with: its rows as a table, and as `benchmarks/results/NAME.json`.

    rows = [row("throughput after the replan", 958.0, "tokens/s", kind="emulated"), ...]
    sys.exit(finish("demo", rows))

A row with a goal says whether it is met; `noise` is the spread of the value as a fraction of it, where known.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

RESULTS = Path(__file__).resolve().parent / "results"
#: Whose versions a figure depends on.
_PACKAGES = ("elasticd", "torch", "numpy", "msgspec", "grpcio", "protobuf")

Kind = Literal["measured", "emulated", "simulated"]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One figure. `goal` is written as it reads, as ">= 0.92"; `met` is null where there is no goal."""

    name: str
    value: float | int | str | None
    unit: str
    goal: str | None
    met: bool | None
    noise: float | None
    kind: Kind


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


def finish(name: str, rows: Sequence[Row], folder: Path = RESULTS) -> int:
    """Prints the table and writes the file; 1 when a goal is missed, else 0."""
    Console().print(table(name, rows))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    body = {"name": name, "date": _today(), "machine": machine(), "versions": versions(), "rows": list(rows)}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(body), indent=2) + b"\n")
    missed = [each.name for each in rows if each.met is False]
    if missed:
        print(f"goals missed: {', '.join(missed)}")
    return 1 if missed else 0


def table(name: str, rows: Sequence[Row]) -> Table:
    """The rows for a terminal."""
    made = Table(title=name, title_justify="left", box=None)
    made.add_column("figure")
    for column in ("value", "goal", "noise"):
        made.add_column(column, justify="right")
    made.add_column("kind")
    for each in rows:
        value = f"{each.value:,.4g}" if isinstance(each.value, float) else str(each.value)
        style = {True: "green", False: "red", None: ""}[each.met]
        noise = "" if each.noise is None else f"±{each.noise:.1%}"
        cells = (each.name, f"{value} {each.unit}", each.goal or "", noise, each.kind)
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


def _today() -> str:
    return datetime.datetime.now(tz=datetime.UTC).date().isoformat()
