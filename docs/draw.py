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
from elasticd.machines.job import machine as job_machine
from elasticd.machines.job.state.job_state import TRANSITIONS, Phase
from elasticd.machines.worker import switch

PAGE = Path(__file__).with_name("architecture.md")


def job() -> str:
    """The phases of a job and which may follow which, what each event does in them, and what becomes due."""
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> gathering"]
    for phase, followers in TRANSITIONS.items():
        lines += [f"    {phase.value} --> {after.value}" for after in sorted(followers, key=lambda p: p.value)]
        if not followers:
            lines.append(f"    {phase.value} --> [*]")
    due = {
        (_in_module(act), phase.value): "once settled" if settled else "yes"
        for act, phases, settled in job_machine.DUE
        for phase in phases
    }
    rows, columns = dict.fromkeys(row for row, _ in due), [phase.value for phase in Phase]
    return "\n\n".join(
        [
            "\n".join([*lines, "```"]),
            "Each event in each phase, and the function of `machines/job` that takes it. Empty: the phase has "
            "nothing for the event, and the log has a line of it.",
            _events(job_machine.TABLE, Phase, _in_module),
            "What becomes due after an event, in this order. Once settled: a leader that took over knows by "
            "then which workers there are.",
            _table(due, rows, columns, "what"),
        ]
    )


def _name(handler: Callable[..., Any]) -> str:
    return handler.__name__.strip("_").replace("_", " ")


def _in_module(handler: Callable[..., Any]) -> str:
    """With the file that it is in, for a machine of many files."""
    module = handler.__module__.rpartition(".")[2]
    return _name(handler) if module == "machine" else f"{module.replace('_', ' ')}: {_name(handler)}"


def _table(
    cells: Mapping[tuple[str, str], str], rows: Iterable[str], columns: Iterable[str], corner: str = "event"
) -> str:
    columns = list(columns)
    lines = [f"| {corner} | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {row} | " + " | ".join(cells.get((row, c), "") for c in columns) + " |" for row in rows]
    return "\n".join(lines)


def _events(
    table: Mapping[tuple[Any, type], Callable[..., Any]],
    phases: Iterable[Any],
    name: Callable[[Callable[..., Any]], str] = _name,
) -> str:
    cells = {(event.__name__, phase.value): name(handler) for (phase, event), handler in table.items()}
    rows = dict.fromkeys(event.__name__ for _, event in table)
    return _table(cells, rows, [phase.value for phase in phases])


DRAWINGS: dict[str, Callable[[], str]] = {
    "job": job,
    "switch": lambda: _events(switch.TABLE, switch.Phase),
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
