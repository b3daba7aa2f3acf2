"""`elasticd plan`: plans a problem from a file, shows the running job's plan, or what moves between two."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
from elasticd_planner.placement import strategy
from elasticd_planner.plan import Pipeline, Plan, Stage
from elasticd_planner.value import Invalid, refuse
from rich.console import Console
from rich.table import Table
from rich.text import Text

from elasticd.cli.options import config_option, coordinator_option
from elasticd.cli.picture import named, picture
from elasticd.cli.reach import reach


@click.command(name="plan")
@click.argument("problem", required=False, metavar="[PROBLEM.json]")
@click.option(
    "--objective",
    type=click.Choice(["step", "steady"]),
    default="step",
    show_default=True,
    help="step: the time of a step; steady: without filling and draining the pipelines.",
)
@click.option("--json", "as_json", is_flag=True, help="The answer as one JSON object.")
@click.option("--diff", nargs=2, metavar="OLD NEW", help="What moves between two answers written with --json.")
@config_option
@coordinator_option
def plan(
    problem: str | None,
    objective: Any,
    as_json: bool,
    diff: tuple[str, str] | None,
    config: str | None,
    coordinator: str | None,
) -> None:
    """Plan a problem, and say how far from optimal the plan can be at most.

    Without a file: the plans of the running jobs.
    """
    console = Console(highlight=False)
    if diff is not None:
        old, new = (_answered(path) for path in diff)
        console.print(_difference(old, new))
    elif problem is not None:
        _solve(_text(problem), objective, as_json, console)
    else:
        _running(config, coordinator, as_json, console)


def _text(path: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise click.ClickException(f"cannot read {path}: {error.strerror}") from None


def _solve(text: bytes, objective: Any, as_json: bool, console: Console) -> None:
    from elasticd_planner import formats, solve
    from elasticd_planner.cost import stage_seconds

    given = formats.load(text)
    start = time.perf_counter()
    planned = solve.solve(given, objective)
    seconds = time.perf_counter() - start
    if planned.plan is None or planned.figures is None:
        raise click.ClickException(planned.refusal)
    if as_json:
        sys.stdout.write(msgspec.json.encode(formats.answer(planned, seconds)).decode() + "\n")
        return
    task = solve.task_of(given, objective)
    pipelines = planned.plan.modules[0].pipelines
    times = [stage_seconds(pipeline, task.cluster, task.rates, task.cost) for pipeline in pipelines]
    console.print(picture(planned.plan, task.rates, times))
    for line in _figures(planned.figures, objective, seconds):
        console.print(line)
    console.print(Text.assemble(("limited by ", "dim"), _limit(pipelines, times, task.rates)))


def _figures(figures: Any, objective: str, seconds: float) -> Iterator[Text]:
    value = figures.steady if objective == "steady" else figures.step
    gap = "proved optimal" if figures.gap < 1e-9 else f"at most {figures.gap:.2%} above the best possible"
    yield Text.assemble((f"{objective} ", "dim"), (f"{value:,.2f}", "bold"), f"   {gap}")
    yield Text.assemble(
        ("steady ", "dim"),
        f"{figures.steady:,.2f}",
        ("   step ", "dim"),
        f"{figures.step:,.2f}",
        ("   bound ", "dim"),
        f"{figures.bound:,.2f}",
        ("   healthy x N/Σ(1/x) ", "dim"),
        f"{figures.ideal:,.2f}",
        ("   planned in ", "dim"),
        f"{seconds:.2f} s",
    )


def _limit(pipelines: tuple[Pipeline, ...], times: list[Any], rates: Any) -> str:
    """The stage that is busy the longest."""
    loads = [
        (seconds * pipeline.micro_batches, p, s)
        for p, pipeline in enumerate(pipelines)
        for s, seconds in enumerate(times[p])
    ]
    _, p, s = max(loads, key=lambda load: load[0])
    stage = pipelines[p].stages[s]
    return f"pipeline {p}, stage {s}: {stage.layers} layers on {named(stage.devices, rates)}"


def _running(config: str | None, coordinator: str | None, as_json: bool, console: Console) -> None:
    with reach(config, coordinator) as api:
        found = api.status()
    rates = {device.name: device.rate for node in found.nodes for device in node.devices}
    planned = [job for job in found.jobs if job.plan is not None]
    if as_json:
        sys.stdout.write(msgspec.json.encode({job.job: job.plan for job in planned}).decode() + "\n")
        return
    if not planned:
        console.print("no job has a plan: name a file to plan a problem, or start a job")
    for job in planned:
        assert job.plan is not None
        console.print(Text.assemble(("job ", "dim"), (job.job, "bold"), f"   plan {job.plan.number}"))
        console.print(picture(job.plan, rates))


# -- differences -----------------------------------------------------------------------------------------------


class _StageView(msgspec.Struct):
    devices: list[str]
    shares: list[float]
    layers: tuple[int, int]


class _PipelineView(msgspec.Struct):
    micro_batches: int
    stages: list[_StageView]


class _ModuleView(msgspec.Struct):
    module: str
    pipelines: list[_PipelineView]


class _PlanView(msgspec.Struct):
    modules: list[_ModuleView]
    idle: list[str]
    global_batch: int
    micro_batch: int


class _AnswerView(msgspec.Struct):
    plan: _PlanView


#: Shares are read back as parts of this many.
_PARTS = 1 << 20


def _answered(path: str) -> Plan:
    """The plan of an answer file."""
    try:
        view = msgspec.json.decode(_text(path), type=_AnswerView).plan
        module = view.modules[0]
        pipelines = tuple(
            Pipeline(
                stages=tuple(
                    Stage(
                        start=stage.layers[0],
                        stop=stage.layers[1],
                        devices=tuple(stage.devices),
                        shares=tuple(max(1, round(share * _PARTS)) for share in stage.shares),
                    )
                    for stage in pipeline.stages
                ),
                micro_batches=pipeline.micro_batches,
            )
            for pipeline in module.pipelines
        )
        return Plan(
            number=0,
            strategies=(strategy(pipelines, module.module),),
            micro_batch=view.micro_batch,
            global_batch=view.global_batch,
            idle=tuple(view.idle),
        )
    except (ValueError, IndexError) as error:
        raise Invalid(f"{path} is no answer of elasticd plan --json: {error}") from None


Held = tuple[int, int, float, float]


def _held(plan: Plan) -> dict[str, Held]:
    """For each device its layers [start, stop) and the part [low, high) of each that it holds."""
    held = {}
    for device, place in plan.places.items():
        stage = plan.stage(place)
        total = sum(stage.shares)
        low = sum(stage.shares[: place.position]) / total
        held[device] = (stage.start, stage.stop, low, low + stage.fraction(place.position))
    return held


def lacking(old: Held | None, new: Held) -> float:
    """Layers' worth of state that a holder of `new` lacks when it holds `old`."""
    size = (new[1] - new[0]) * (new[3] - new[2])
    if old is None:
        return size
    layers = max(0, min(old[1], new[1]) - max(old[0], new[0]))
    part = max(0.0, min(old[3], new[3]) - max(old[2], new[2]))
    return size - layers * part


def _difference(old: Plan, new: Plan) -> Table:
    """A row for each device whose layers or part of them change, and what it has to fetch."""
    if old.modules[0].pipelines[0].layers != new.modules[0].pipelines[0].layers:
        refuse("--diff: the two plans are of models with different numbers of layers")
    before, after = _held(old), _held(new)
    table = Table(box=None, header_style="dim", pad_edge=False)
    for column in ("device", "before", "after", "fetches (layers)"):
        table.add_column(column, justify="right" if column.startswith("fetches") else "left")
    total = 0.0
    for device in sorted(
        {*before, *after}, key=lambda name: (name.rpartition("/")[0], int(name.rpartition("/")[2]))
    ):
        was, now = before.get(device), after.get(device)
        if was == now:
            continue
        fetches = lacking(was, now) if now is not None else 0.0
        total += fetches
        table.add_row(device, _holding(was), _holding(now), f"{fetches:.2f}")
    table.add_row(
        "in all",
        "",
        f"of {len(after)} devices' {sum(lacking(None, h) for h in after.values()):.0f} layers",
        f"{total:.2f}",
    )
    return table


def _holding(held: Held | None) -> str:
    if held is None:
        return "idle"
    start, stop, low, high = held
    part = "" if high - low > 0.9999 else f", {low:.1%} to {high:.1%} of each"
    return f"layers {start}-{stop - 1}{part}"
