"""`elasticd simulate`: a scenario on a virtual clock, with its timeline and its totals beside baselines."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from elasticd.cli.console import command_console
from elasticd.cli.options import json_option, plain_table
from elasticd.cli.replay import again

if TYPE_CHECKING:
    from elasticd.simulator.results.result import Outcome, Totals

_COLORS = {
    "fault": "red",
    "healed": "green",
    "slow": "yellow",
    "faster": "yellow",
    "recovered": "yellow",
    "corrected": "yellow",
    "recorded": "green",
    "restart": "green",
    "fenced": "red",
    "resumed": "green",
    "joined": "green",
    "waiting": "yellow",
    "stopped": "red",
    "worker_lost": "red",
}

#: Characters of one event on the screen: a plan for a thousand devices is no sentence any more.
_MOST_TEXT = 240


@click.command()
@click.argument("scenario", metavar="SCENARIO.toml", required=False)
@click.option("--recorded", metavar="FILE", help="Decide a run again that 'elasticd record' kept.")
@click.option("--config", metavar="FILE", help="With --recorded: by this [detect] and [policy] instead.")
@json_option("The whole outcome.")
@click.option("--plot", "plot_to", metavar="FILE", help="Throughput over time as an SVG or PNG.")
@click.option("--seed", type=click.IntRange(min=0), help="Instead of the scenario's own.")
def simulate(
    scenario: str | None,
    recorded: str | None,
    config: str | None,
    as_json: bool,
    plot_to: str | None,
    seed: int | None,
) -> None:
    """Run the real machines, detection and planner over a modelled cluster.

    The same scenario and seed give the same timeline, to the byte. All speeds are simulated. Examples are in
    examples/scenarios; docs/simulator.md says what a scenario can hold, and what a replay can tell.
    """
    if recorded is not None:
        if scenario is not None or plot_to is not None or seed is not None:
            raise click.UsageError("--recorded goes with --config and --json alone: it is the whole scenario")
        again(recorded, config, as_json)
        return
    if scenario is None:
        raise click.UsageError("name a SCENARIO.toml, or a recording with --recorded")
    if config is not None:
        raise click.UsageError("--config goes with --recorded: a scenario has [detect] and [policy] of its own")
    from elasticd.simulator.results.plot import plot
    from elasticd.simulator.run import simulate as play
    from elasticd.simulator.scenarios.scenario import load

    given = load(scenario, seed)
    with command_console(stderr=True).status(f"simulating {given.name}") as status:  # silent where nobody looks
        outcome = play(given, lambda part: status.update(f"simulating {given.name}: {part:.0%}"))
    if as_json:
        click.echo(outcome.to_json())
    else:
        show(outcome, command_console())
    if plot_to is not None:
        plot(outcome, Path(plot_to))
    if outcome.stopped:
        raise click.ClickException(f"the simulated job stopped: {outcome.stopped}")


def show(outcome: Outcome, console: Console) -> None:
    """For people: what happened, how fast each stretch was, and the totals."""
    console.print(
        Text.assemble(
            (outcome.scenario, "bold"),
            f": {outcome.model} on {outcome.devices} devices, seed {outcome.seed}",
            ("   (simulated)", "dim"),
        )
    )
    console.print(timeline(outcome))
    console.print()
    console.print(stretches(outcome))
    console.print()
    console.print(totals(outcome))
    for run in outcome.totals:
        for line in _costs(run):
            console.print(Text(f"{run.name}: {line}", style="dim"))


def _costs(run: Totals) -> Iterator[str]:
    """Lines about costs that a run's figures include already."""
    if run.switches:
        moved = f", {run.bytes_moved / 1e9:.1f} GB moved" if run.bytes_moved else ""
        yield f"changed plans {_times(run.switches)}, {run.pause_seconds:.1f} s of pauses{moved}"
    if run.recoveries:
        yield f"recovered {_times(run.recoveries)}, {run.recovery_seconds:.1f} s from last steps to the next"
    if run.restarts:
        yield f"started again {_times(run.restarts)}, {run.down_seconds:.1f} s without a job"
    elif run.down_seconds:
        yield f"{run.down_seconds:.1f} s without a job"
    if run.lost_steps:
        yield f"{run.lost_steps:.0f} steps done again since the last checkpoint"
    if run.plans:
        yield f"planned {_times(run.plans)}, {run.planning_seconds:.1f} s beside training"
    if run.note:
        yield run.note


def _times(count: int) -> str:
    return f"{count} time{'' if count == 1 else 's'}"


def timeline(outcome: Outcome) -> Table:
    """A row for each event: virtual seconds, step, kind, and at most `_MOST_TEXT` characters of its text."""
    table = plain_table(">seconds", ">step", "what", "")
    for event in outcome.timeline:
        style = _COLORS.get(event.kind, "")
        table.add_row(
            f"{event.seconds:,.1f}",
            str(event.step),
            Text(event.kind, style=style),
            Text(shorten(event.text, _MOST_TEXT, placeholder=" ...")),
        )
    return table


def stretches(outcome: Outcome) -> Table:
    """One line for the steps under one plan at the same speeds of devices."""
    heads = (">from step", ">steps", ">plan", ">seconds a step", ">bound", ">above it", ">tokens/s")
    table = plain_table(*heads)
    for (_, plan, bound, tokens), group in groupby(
        outcome.stretches, key=lambda s: (s.start_number, s.plan, s.bound, s.tokens)
    ):
        run = list(group)
        steps = sum(stretch.steps for stretch in run)
        each = sum(stretch.stop - stretch.start for stretch in run) / steps
        table.add_row(
            str(run[0].first_step),
            str(steps),
            str(plan),
            f"{each:.3f}",
            f"{bound:.3f}",
            f"{each / bound - 1:.1%}",
            f"{tokens / each:,.0f}",
        )
    return table


def totals(outcome: Outcome) -> Table:
    """All runs of the scenario beside each other."""
    table = plain_table("", ">seconds", ">steps", ">tokens/s", ">of the bound", whole=1)
    best = next((run.tokens_per_second for run in outcome.totals if run.name == "bound"), 0.0)
    for run in outcome.totals:
        table.add_row(
            run.name,
            f"{run.seconds:,.1f}",
            f"{run.steps:,.0f}",
            f"{run.tokens_per_second:,.0f}",
            f"{run.tokens_per_second / best:.1%}" if best else "-",
        )
    return table
