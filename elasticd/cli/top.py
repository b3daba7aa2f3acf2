"""`elasticd top`: the cluster as it runs, drawn anew each second."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence

import click
from elasticd_planner.readable import counted, readable_seconds
from elasticd_planner.spec.batch import BatchSummary
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from elasticd.cli.console import command_console
from elasticd.cli.options import cluster_options, json_option, plain_table, write_json
from elasticd.cli.picture import picture
from elasticd.cli.status import (
    SLOW_LANE,
    expert_lines,
    jobs_over,
    module_lines,
    paused,
    rates_of,
    restart_mode_job,
)
from elasticd.client import ApiClient, CannotReach, reach
from elasticd.wire.api_types import (
    ClusterStatus,
    JobStatus,
    ModuleDeviceStatus,
    ModuleStatus,
    NodeStatus,
    RestartStatus,
)
from elasticd.wire.event_record import EventRecord, line
from elasticd.wire.step_record import StepRecord

#: Characters of a rate's bar, and the rate at which it is full.
WIDTH, FULL = 24, 4.0
EVENTS = 8
#: Devices of a job of several modules that have a line of their own, those that compute longest.
MODULE_DEVICES = 16
_BLOCKS = " ▁▂▃▄▅▆▇█"


@click.command()
@cluster_options
@click.option("--every", type=click.FloatRange(min=0.1), default=1.0, show_default=True, metavar="SECONDS")
@click.option("--once", is_flag=True, help="Draw one screen and end.")
@json_option("One JSON line, of what one screen shows.")
def top(config: str | None, coordinator: str | None, every: float, once: bool, as_json: bool) -> None:
    """Watch devices, steps, plans and events, until Ctrl-C."""
    if as_json:
        with reach(config, coordinator) as api:
            status, steps, events = _asked(api)
        write_json({"status": status, "steps": steps, "events": events})
        return
    console = command_console()
    if once or not sys.stdout.isatty():
        with reach(config, coordinator) as api:
            console.print(drawn(*_asked(api)))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                # Found anew each time: after a leader's death the next one answers.
                with reach(config, coordinator, 0.0) as api:
                    while True:
                        live.update(drawn(*_asked(api)), refresh=True)
                        time.sleep(every)
            except CannotReach as error:
                live.update(Text(f"{error}\nlooking again ...", style="red"), refresh=True)
                time.sleep(every)
            except KeyboardInterrupt:
                return


Steps = dict[str, tuple[StepRecord, ...]]


def _asked(api: ApiClient) -> tuple[ClusterStatus, Steps, Sequence[EventRecord]]:
    """The values that a screen is drawn from: the status, the last steps of each job, the last events."""
    status = api.status()
    steps = {job.job: api.steps(job.job, max(-1, job.step - 60)).steps for job in status.jobs if not job.over}
    return status, steps, api.events()[-EVENTS:]


def drawn(status: ClusterStatus, steps: Steps, events: Sequence[EventRecord]) -> RenderableType:
    """One screen: devices, jobs, events."""
    head = Text.assemble(
        ("elasticd ", "bold"), status.cluster, ("   leader ", "dim"), f"{status.leader.name}",
        ("   ", ""), time.strftime("%H:%M:%S"),
    )  # fmt: skip
    parts: list[RenderableType] = [head, *paused(status), "", devices(status.nodes)]
    for job in status.jobs:
        if not job.over:
            parts += ["", *_job(job, steps.get(job.job, ()), rates_of(status))]
    for restarting in status.restarts:
        if not restarting.over:
            parts += ["", *restart_mode_job(restarting)]
    jobs: list[JobStatus | RestartStatus] = [*status.jobs, *status.restarts]
    if over := [job for job in jobs if job.over]:
        parts += ["", *jobs_over(over)]
    if events:
        parts += ["", *(Text(line(event), style="dim") for event in events)]
    return Group(*parts)


def devices(nodes: Sequence[NodeStatus]) -> Table:
    """A bar for each device: the longer, the slower."""
    table = plain_table("device", "takes", "", "")
    for node in nodes:
        away = "" if node.connected else "node unreachable"
        for device in node.devices:
            style = "red" if device.rate >= 1.1 else "green"
            notes = ", ".join(filter(None, (away, "draining" if node.draining else "")))
            table.add_row(device.name, f"{device.rate:.2f}x", Text(bar(device.rate), style=style), notes)
    return table


def bar(rate: float) -> str:
    """Full at four times slower than normal."""
    return "█" * max(1, min(WIDTH, round(WIDTH * rate / FULL)))


def spark(values: Sequence[float]) -> str:
    """The values as one line of blocks, from zero to the largest."""
    most = max(values, default=0.0)
    return "".join(_BLOCKS[round(value / most * (len(_BLOCKS) - 1))] for value in values) if most > 0 else ""


def packed(batch: BatchSummary) -> str:
    """A packed batch in one line."""
    cut = "none cut"
    if batch.cut:
        cut = f"{batch.cut / batch.sequences:.0%} cut, over {batch.widest} lanes at most"
    return f"batch of {batch.sequences:,} sequences, {cut}; busiest lane over even work {batch.imbalance:.2f}"


def _job(job: JobStatus, steps: Sequence[StepRecord], rates: Mapping[str, float]) -> Iterator[RenderableType]:
    speed = "-" if job.tokens_per_second is None else f"{job.tokens_per_second:,.0f}"
    seconds = [step.seconds for step in steps if step.seconds > 0]
    rate = f"{1 / job.wall_seconds:.2f}" if job.wall_seconds else "-"
    loss = "-" if job.loss is None else f"{job.loss:.4f}"
    yield Text.assemble(
        (job.job, "bold"), f"  {job.shown_phase}",
        ("   step ", "dim"), str(job.step), ("   loss ", "dim"), loss,
        ("   steps/s ", "dim"), rate, ("   tokens/s ", "dim"), speed,
    )  # fmt: skip
    if job.reason:
        yield Text(f"  {job.reason}")
    if job.batch is not None:
        yield Text(f"  {packed(job.batch)}")
    if seconds:
        yield Text.assemble(("  seconds of the steps themselves, the last 60  ", "dim"), spark(seconds))
    yield from module_lines(job)
    yield from expert_lines(job)
    if len(job.modules) > 1:
        yield _module_table(job)
    if job.plan is not None:
        yield picture(job.plan, rates)


def _module_table(job: JobStatus) -> RenderableType:
    """The computation of each device in the newest step; its modules beside each other."""
    table = plain_table("device", *(head for module in job.modules for head in _heads(module)), ">in all")
    by_device: dict[str, dict[str, ModuleDeviceStatus]] = {}
    for module in job.modules:
        for each in module.by_device:
            by_device.setdefault(each.device, {})[module.module] = each
    slowest = sorted(by_device, key=lambda device: -sum(each.seconds for each in by_device[device].values()))
    for device in slowest[:MODULE_DEVICES]:
        cells, own = list[RenderableType](), by_device[device]
        for module in job.modules:
            known = own.get(module.module)
            cells.append(readable_seconds(known.seconds) if known is not None else "")
            if module.items:
                cells.append(_part(known) if known is not None else "")
        table.add_row(device, *cells, readable_seconds(sum(each.seconds for each in own.values())))
    more = len(slowest) - MODULE_DEVICES
    return Group(table, Text(f"and {counted(more, 'more device')}")) if more > 0 else table


def _heads(module: ModuleStatus) -> Iterator[str]:
    yield f">{module.module}"
    if module.items:
        yield f">{module.items}"


def _part(device: ModuleDeviceStatus) -> Text:
    """Items and their part of all; red where the lane takes longer than planned."""
    style = "red" if device.slowdown >= SLOW_LANE else ""
    return Text(f"{device.items} ({device.share:.0%})", style=style)
