"""`elasticd plan`: plans a problem from a file, shows the running job's plan, or what moves between two."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from elasticd_planner.spec.plan import Plan
from rich.console import Console
from rich.text import Text

from elasticd.cli.batch import batch_lines, batch_of, dealt, step_lengths
from elasticd.cli.console import command_console
from elasticd.cli.moves import answered, moves_of, shown
from elasticd.cli.options import cluster_options, json_option, write_json
from elasticd.cli.picture import StageTimes, busy, lane_names, module_picture, named, picture
from elasticd.cli.status import rates_of
from elasticd.cli.step_picture import StepPicture, step_items
from elasticd.client import reach

if TYPE_CHECKING:
    from elasticd_planner.problem_files.file_format import Planned, TableProblem
    from elasticd_planner.search.options import SearchProgress

#: Seconds of a search before standard error is told of it, and between two words: on a terminal, and off it.
QUIET_SECONDS, TERMINAL_SECONDS, LINE_SECONDS = 2.0, 0.5, 10.0


@click.command(name="plan")
@click.argument("problem", required=False, metavar="[PROBLEM.json]")
@click.option(
    "--objective",
    type=click.Choice(["step", "steady"]),
    default="step",
    show_default=True,
    help="step: the time of a step; steady: without filling and draining the pipelines.",
)
@json_option("The answer, the running plans by job, or what moves, as one JSON object.")
@click.option(
    "--current",
    metavar="OLD",
    help="An answer written with --json: stay close to its plan, and say what moves.",
)
@click.option(
    "--interleave",
    type=click.IntRange(min=1),
    metavar="N",
    help="Let stages have up to N chunks of layers, where that takes less time (pins.interleave).",
)
@click.option(
    "--lanes",
    type=click.IntRange(min=1),
    metavar="N",
    help="Let pipelines have up to N lanes, where pipelines of equal borders can be joined (pins.lanes).",
)
@click.option(
    "--explain",
    is_flag=True,
    help="List what goes over links in a step, and with --current in the switch.",
)
@click.option(
    "--model",
    metavar="MODEL",
    help="With --explain: whose parameters these are, a file of `elasticd profile` or FILE.py:NAME.",
)
@click.option(
    "--batch",
    metavar="STEP.json",
    help="How a step's sequences of these lengths are packed in rows of the lanes, [512, 60, 4096]; of several "
    'modules how its items are dealt, {"images": [2, 0, 1, ...]}.',
)
@click.option("--diff", nargs=2, metavar="OLD NEW", help="What moves between two answers written with --json.")
@cluster_options
def plan(
    problem: str | None,
    objective: Any,
    as_json: bool,
    current: str | None,
    interleave: int | None,
    lanes: int | None,
    explain: bool,
    model: str | None,
    batch: str | None,
    diff: tuple[str, str] | None,
    config: str | None,
    coordinator: str | None,
) -> None:
    """Plan a problem, and say how far from optimal the plan can be at most.

    Without a file: the plans of the running jobs.
    """
    console = command_console()
    if model is not None and not explain:
        raise click.UsageError("--model goes with --explain: planning itself reads the problem alone")
    if diff is not None:
        old, new = (answered(_text(path), path) for path in diff)
        if as_json:
            write_json(moves_of(old, new))
        else:
            console.print(shown(old, new))
        return
    given = {"current": current, "interleave": interleave, "lanes": lanes, "explain": explain}
    given["batch"] = batch
    if problem is not None:
        pins = {"interleave": interleave, "lanes": lanes}
        _solve(_text(problem), objective, as_json, current, pins, (explain, model), batch, console)
    elif asked := [f"--{name}" for name, value in given.items() if value]:
        option = asked[0]
        raise click.UsageError(f"{option} goes with a problem: name the file of one")
    else:
        _running(config, coordinator, as_json, console)


def _text(path: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise click.ClickException(f"cannot read {path}: {error.strerror}") from None


def _solve(
    text: bytes,
    objective: Any,
    as_json: bool,
    current: str | None,
    pins: Mapping[str, int | None],
    explain: tuple[bool, str | None],
    batch: str | None,
    console: Console,
) -> None:
    from elasticd_planner.problem_files import convert, file_format, solve
    from elasticd_planner.problem_files.shapes import shapes_of

    given = file_format.load(text)
    asked = {name: value for name, value in pins.items() if value is not None}
    if asked:
        given = msgspec.structs.replace(given, pins=msgspec.structs.replace(given.pins, **asked))
    listing, model = explain
    if listing:
        from elasticd.cli import explanation  # loads the migration

        spec = explanation.model_of(model) if model is not None else None
        shapes_of(given, spec)  # refuses what cannot be listed, before the search
    problem, lengths, items = convert.problem_of(given), None, None
    if batch is not None and given.modules:
        items = step_items(_text(batch), batch, problem)
    elif batch is not None:
        lengths = step_lengths(_text(batch), batch)
    start = time.perf_counter()
    near = None
    running = answered(_text(current), current).plan if current is not None else None
    unit = file_format.UNITS if given.model.times is None else "s"
    with search_shown(unit, for_programs=as_json) as watch:
        if running is not None:
            near = solve.solve_from_current(given, objective, running, watch)
        planned = near.planned if near is not None else solve.solve(given, objective, watch=watch)
    seconds = time.perf_counter() - start
    if planned.plan is None or planned.figures is None:
        raise click.ClickException(planned.refusal)
    rows = dealt(planned.plan, lengths) if lengths is not None else None
    step = StepPicture(problem, planned.plan, items) if given.modules else None
    explained = None
    if listing:
        dealt_items = step.items if step is not None else None
        explained = explanation.explained(given, planned.plan, running, spec, rows, dealt_items)
    if as_json:
        answer = file_format.answer(planned, seconds)
        answer["state_bytes"] = msgspec.to_builtins(convert.state_bytes(given))
        if given.modules:
            answer["item_state_bytes"] = msgspec.to_builtins(convert.item_state_bytes(given))
        if near is not None:
            answer["current"] = {"value": near.current, "moved_bytes": near.moved}
        if explained is not None:
            answer["explanation"] = explanation.explanation_of(explained)
        if rows is not None and lengths is not None:
            answer["batch"] = batch_of(planned.plan, rows, lengths.linear)
        if step is not None and items is not None:
            answer["batch"] = step.as_json()
        write_json(answer)
        return
    limited = _picture(given, planned, step, objective, console)
    for line in _figures(planned.figures, objective, planned.unit, seconds):
        console.print(line)
    if near is not None:
        console.print(_nearness(near, planned.unit))
    console.print(Text.assemble(("limited by ", "dim"), limited))
    if step is not None:
        console.print()
        for line in (*(step.lanes() if items is not None else ()), *step.order()):
            console.print(line, soft_wrap=True)
    if explained is not None:
        console.print(explanation.shown(explained))
    if rows is not None and lengths is not None:
        console.print()
        for line in batch_lines(planned.plan, rows, lengths.linear):
            console.print(line, soft_wrap=True)


def _picture(
    given: TableProblem, planned: Planned, step: StepPicture | None, objective: Any, console: Console
) -> str:
    """Prints the plan; what limits it."""
    from elasticd_planner.cost.model import stage_seconds
    from elasticd_planner.problem_files import convert

    assert planned.plan is not None
    if step is not None:
        console.print(module_picture(planned.plan, convert.rates_of(given), step.busy))
        return step.limit()
    task = convert.task_of(given, objective, planned.plan)
    times = [stage_seconds(line, task.cluster, task.rates, task.cost) for line in planned.plan.by_lane]
    console.print(picture(planned.plan, task.rates, times))
    return _limit(planned.plan, times, task.rates)


@contextmanager
def search_shown(unit: str, *, for_programs: bool) -> Iterator[Callable[[SearchProgress], None]]:
    """Tells standard error how far a search is that takes longer than `QUIET_SECONDS`, in place on a terminal,
    else, but not for programs, in a line now and then. Gives what hears of the search."""
    console, started, over = command_console(stderr=True), time.monotonic(), threading.Event()
    newest: list[SearchProgress] = []
    if for_programs and not console.is_terminal:
        yield newest.append
        return

    def told() -> None:
        if over.wait(QUIET_SECONDS):
            return
        with console.status(_progress(started, newest, unit)) as status:  # silent off a terminal
            while True:
                if console.is_terminal:
                    status.update(_progress(started, newest, unit))
                else:
                    console.print(_progress(started, newest, unit))
                if over.wait(TERMINAL_SECONDS if console.is_terminal else LINE_SECONDS):
                    return

    teller = threading.Thread(target=told, name="search progress", daemon=True)
    teller.start()
    try:
        yield newest.append
    finally:
        over.set()
        teller.join()


def _progress(started: float, newest: Sequence[SearchProgress], unit: str) -> str:
    text = f"planning for {time.monotonic() - started:.0f} s"
    if not newest:
        return text
    now = newest[-1]
    best = "no plan fits so far" if math.isinf(now.best) else f"best so far {now.best:,.3f} {unit} a step"
    return f"{text}: {best}, bound {now.bound:,.3f}; {now.tried} of at most {now.settings} settings searched"


def _nearness(near: Any, unit: str) -> Text:
    """Beside the plan that runs."""
    value = f"{near.current:,.2f} {unit}" if near.current is not None else "it cannot run any more"
    moved = f"{near.moved / 2**30:,.2f} GiB move" if near.moved is not None else "layers' bytes are not known"
    return Text.assemble(("current plan ", "dim"), value, f"   to this one {moved}")


def _figures(figures: Any, objective: str, unit: str, seconds: float) -> Iterator[Text]:
    value = figures.steady if objective == "steady" else figures.step
    gap = "proved optimal" if figures.gap < 1e-9 else f"at most {figures.gap:.2%} above the best possible"
    yield Text.assemble((f"{objective} ", "dim"), (f"{value:,.2f}", "bold"), f" {unit}   {gap}")
    yield Text.assemble(
        ("steady ", "dim"),
        f"{figures.steady:,.2f}",
        ("   step ", "dim"),
        f"{figures.step:,.2f}",
        ("   bound ", "dim"),
        f"{figures.bound:,.2f}",
        ("   healthy x N/Σ(1/x) ", "dim"),
        f"{figures.ideal:,.2f}",
    )
    yield Text.assemble(("planned in ", "dim"), f"{seconds:.2f} s")


def _limit(plan: Plan, times: StageTimes, rates: Any) -> str:
    """The stage that is busy the longest."""
    loads = [(load, p, s) for p, row in enumerate(busy(plan, times)) for s, load in enumerate(row)]
    _, p, s = max(loads, key=lambda load: load[0])
    stage = plan.by_lane[p].stages[s]
    return f"pipeline {lane_names(plan)[p]}, stage {s}: {stage.layers} layers on {named(stage.devices, rates)}"


def _running(config: str | None, coordinator: str | None, as_json: bool, console: Console) -> None:
    with reach(config, coordinator) as api:
        cluster = api.status()
    planned = [job for job in cluster.jobs if job.plan is not None and not job.over]
    if as_json:
        write_json({job.job: job.plan for job in planned})
        return
    if not planned:
        console.print("no job that runs has a plan: name a file to plan a problem, or start a job")
    for job in planned:
        assert job.plan is not None
        console.print(Text.assemble(("job ", "dim"), (job.job, "bold"), f"   plan {job.plan.number}"))
        console.print(picture(job.plan, rates_of(cluster)))
