"""Writes the state machines' diagrams into docs/architecture.md, from the machines' own tables.

python docs/draw.py           writes them
python docs/draw.py --check   exits with 1 when they are stale
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from elasticd.machines.agent import machine
from elasticd.machines.job.state.job_state import TRANSITIONS
from elasticd.machines.worker import switch

PAGE = Path(__file__).with_name("architecture.md")


def job() -> str:
    """The phases of a job and which may follow which."""
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> gathering"]
    for phase, followers in TRANSITIONS.items():
        lines += [f"    {phase.value} --> {after.value}" for after in sorted(followers, key=lambda p: p.value)]
        if not followers:
            lines.append(f"    {phase.value} --> [*]")
    return "\n".join([*lines, "```"])


def _name(handler: Callable[..., Any]) -> str:
    return handler.__name__.strip("_").replace("_", " ")


def _table(cells: Mapping[tuple[str, str], str], rows: Iterable[str], columns: Iterable[str]) -> str:
    columns = list(columns)
    lines = ["| event | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {row} | " + " | ".join(cells.get((row, c), "") for c in columns) + " |" for row in rows]
    return "\n".join(lines)


def _events(table: Mapping[tuple[Any, type], Callable[..., Any]], phases: Iterable[Any]) -> str:
    cells = {(event.__name__, phase.value): _name(handler) for (phase, event), handler in table.items()}
    rows = dict.fromkeys(event.__name__ for _, event in table)
    return _table(cells, rows, [phase.value for phase in phases])


DRAWINGS: dict[str, Callable[[], str]] = {
    "job": job,
    "switch": lambda: _events(switch.TABLE, switch.SwitchPhase),
    "agent": lambda: _events(machine.TABLE, machine.Phase),
}


def drawn(page: str) -> str:
    """The page with every drawing as its table has it now."""
    for name, draw in DRAWINGS.items():
        mark = re.compile(rf"(<!-- drawn: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not mark.search(page):
            raise SystemExit(f"{PAGE.name} has no place for {name}: <!-- drawn: {name} --> ... <!-- end -->")
        text = draw()
        page = mark.sub(lambda found, text=text: f"{found[1]}{text}\n{found[2]}", page)  # type: ignore[misc]
    return page


def main() -> None:
    before = PAGE.read_text()
    after = drawn(before)
    if "--check" in sys.argv:
        raise SystemExit(0 if after == before else f"{PAGE} is stale: run python docs/draw.py")
    PAGE.write_text(after)


if __name__ == "__main__":
    main()
