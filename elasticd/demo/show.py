"""Shows a run's report: the table, the plot, `report.json`, and the exit code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
from elasticd_planner.readable import readable_seconds
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from elasticd.demo.plot import plot
from elasticd.demo.record import DemoRecord
from elasticd.demo.report import MEBI, DemoReport, Switch, report


def show(record: DemoRecord, out: Path, console: Console) -> int:
    """Writes and prints the report; 0 when every check is met, else 1."""
    outcome = report(record)
    (out / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(outcome), indent=2) + b"\n")
    plot(record, out / "throughput.png")
    console.print()
    console.print(speeds(outcome))
    console.print()
    for line in lines(outcome, record.scenario.slow_device):
        console.print(line, markup=False, soft_wrap=True)
    console.print()
    for check in outcome.checks:
        verdict = "[green]ok[/]    " if check.met else "[red]FAILED[/]"
        console.print(f"  {verdict} {escape(check.text)}", soft_wrap=True)
    console.print(f"\nreport: {out / 'report.json'}   plot: {out / 'throughput.png'}")
    if outcome.failed:
        console.print(f"[red]the demo failed:[/] {', '.join(check.name for check in outcome.failed)}")
        return 1
    console.print("[green]all of it holds[/]")
    return 0


def speeds(made: DemoReport) -> Table:
    """Throughput by phase, with the yardsticks below."""
    table = Table(
        title="The training is real, the speed of its devices is emulated", title_justify="left", box=None
    )
    table.add_column("phase")
    for column in ("plan", "tokens/s", "predicted", "of it", "noise", "steps"):
        table.add_column(column, justify="right")
    for speed in made.speeds:
        predicted = f"{speed.predicted:,.0f}" if speed.predicted is not None else "-"
        part = f"{speed.measured / speed.predicted:.1%}" if speed.predicted is not None else "-"
        table.add_row(
            speed.phase,
            str(speed.plan),
            f"{speed.measured:,.0f}",
            predicted,
            part,
            f"±{speed.noise:.1%}",
            str(speed.steps),
        )
    table.add_section()
    alone = "cannot hold the model" if made.without_slow is None else f"{made.without_slow:,.0f}"
    table.add_row("best plan without the slow device", "", "", alone)
    table.add_row("healthy / (N/Σ(1/x)), a yardstick", "", "", f"{made.ideal:,.0f}")
    return table


def lines(made: DemoReport, device: str) -> Iterator[str]:
    """Lines with the shape of each plan and the cost of each switch."""
    shapes = {speed.plan: speed.shape for speed in made.speeds}
    guessed = {speed.plan for speed in made.speeds if speed.guessed}
    for number, shape in shapes.items():
        yield f"  plan {number}: {shape}"
        if number in guessed:
            yield "    (predicted before an all-reduce of such groups had been timed)"
    for switch in made.switches:
        yield f"  {switch_text(switch, device)}"


def switch_text(switch: Switch, device: str) -> str:
    """One switch in one sentence."""
    cause = "slowed down" if switch.cause == "slow" else "recovered"
    return (
        f"{device} {cause}: detected after {switch.detected_seconds:.1f} s, switched to plan {switch.number} "
        f"after {switch.switched_seconds:.1f} s with a pause of {readable_seconds(switch.pause_seconds)} "
        f"({switch.pause_steps:.2f} steps); {switch.bytes_wire / MEBI:.2f} MiB on the wire, "
        f"{switch.bytes_lacking / MEBI:.2f} MiB lacking, of a state of {switch.bytes_state / MEBI:.2f} MiB"
    )
