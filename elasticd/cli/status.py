"""`elasticd status`: what runs now, on which devices, under which plan and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import click
from elasticd_planner.detection.slowness_history import SlownessKind
from elasticd_planner.readable import readable
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from elasticd.cli.options import asking, json_option, plain_table
from elasticd.cli.picture import picture
from elasticd.client import Api
from elasticd.coordinator.api_types import (
    ClusterStatus,
    DeviceStatus,
    ExceptionStatus,
    JobStatus,
    MemberStatus,
    NodeStatus,
    RestartStatus,
)


@click.command()
@asking
@json_option("The coordinator's own answer.")
def status(api: Api, as_json: bool) -> None:
    """Show the leader, the nodes, and each job with its plan and why it has it."""
    if as_json:
        click.echo(api.status_json())
        return
    found = api.status()
    reasons = {job.job: why(api, job) for job in found.jobs}
    Console(highlight=False, markup=False).print(screen(found, reasons))


def why(api: Api, job: JobStatus) -> str:
    """Why the job's plan was chosen, from its history; nothing where there is no plan."""
    if job.plan is None:
        return ""
    reasons = (record.reason for record in api.history(job.job) if record.number == job.plan.number)
    return next(reasons, "")


def screen(found: ClusterStatus, reasons: dict[str, str]) -> RenderableType:
    """The whole status, for a terminal."""
    leader = found.leader
    title = Text.assemble(
        ("cluster ", "dim"),
        (found.cluster, "bold"),
        ("   leader ", "dim"),
        f"{leader.name} at {leader.url}",
        (f"   epoch {leader.epoch}", "dim"),
    )
    head = Group(title, *paused(found))
    if not found.nodes:
        return Group(head, Text("no agent is connected: start one on each node with 'elasticd-agent'"))
    parts: list[RenderableType] = [head, nodes(found.nodes)]
    for job in found.jobs:
        parts += ["", *_job(job, reasons.get(job.job, ""), rates_of(found))]
    for restarting in found.restarts:
        parts += ["", *_restarting(restarting)]
    if not found.jobs and not found.restarts:
        parts.append(Text("no job: start one with torchrun --rdzv-backend=elasticd --rdzv-id=NAME ..."))
    return Group(*parts)


def rates_of(found: ClusterStatus) -> dict[str, float]:
    """How many times slower than normal each device is."""
    return {device.name: device.rate for node in found.nodes for device in node.devices}


def paused(found: ClusterStatus) -> Iterator[Text]:
    """A line that says so, where replanning is paused."""
    if found.paused:
        yield Text("replanning is paused: 'elasticd resume' ends that", style="yellow")


def nodes(listed: Sequence[NodeStatus]) -> Table:
    """One line for each device."""
    table = plain_table("device", "memory", "takes", "")
    for node in listed:
        for device in node.devices:
            notes = [
                "" if node.connected else "node unreachable",
                "draining" if node.draining else "",
                "emulated" if node.emulated else "",
                f"chaos: {device.pace:g}x slower" if device.pace != 1 else "",
                slowness(device),
            ]
            table.add_row(
                device.name,
                readable(device.memory),
                Text(f"{device.rate:.2f}x", style="red" if device.rate > 1 else "green"),
                Text(", ".join(note for note in notes if note), style="dim"),
            )
    return table


def slowness(device: DeviceStatus) -> str:
    """What kind of slowness a device shows; nothing of one that is well, and was slow at most once."""
    found = device.slowness
    if found is None or (device.rate <= 1 and found.kind is SlownessKind.TRANSIENT):
        return ""
    return f"{found.kind.word}: {found.reason}"


def _job(job: JobStatus, reason: str, rates: Mapping[str, float]) -> Iterator[RenderableType]:
    yield Text.assemble(
        ("job ", "dim"), (job.job, "bold"), f"  {job.phase}", f"  {job.reason}" if job.reason else ""
    )
    yield from exception(job.exception)
    loss = "-" if job.loss is None else f"{job.loss:.4f}"
    speed = "-" if job.tokens_per_second is None else f"{job.tokens_per_second:,.0f}"
    kept = "" if job.snapshot is None else str(job.snapshot)
    yield Text.assemble(
        *(("  step ", "dim"), str(job.step), ("   loss ", "dim"), loss, ("   tokens/s ", "dim"), speed),
        *((("   snapshot in memory of step ", "dim"), kept) if kept else ()),
    )
    if job.plan is not None:
        predicted = job.plan.prediction
        expected = f", {predicted.step_seconds:.3f} s a step expected" if predicted is not None else ""
        proposed = f", plan {job.proposal} is proposed" if job.proposal is not None else ""
        yield Text(f"  plan {job.plan.number}{expected}{proposed}")
        yield picture(job.plan, rates)
        if reason:
            yield Text(f"  why: {reason}")
    if job.members:
        yield Text.assemble(("  workers ", "dim"), ", ".join(map(worker, job.members)))


def worker(member: MemberStatus) -> str:
    """One process: what it drives, and what that is."""
    found = member.computes_on
    on = f" on {found.text} over {found.transport}" if found is not None else ""
    return f"{member.device} pid {member.pid}{on}"


def exception(raised: ExceptionStatus | None) -> Iterator[Text]:
    """What the script's own code raised, with its traceback."""
    if raised is None:
        return
    what = f"the script's code raised {raised.kind} in step {raised.step} on {raised.device}"
    yield Text(f"  {what}: {raised.message}", style="red")
    for each in raised.traceback.splitlines():
        yield Text(f"    {each}", style="dim")


def _restarting(job: RestartStatus) -> Iterator[RenderableType]:
    """A job in restart mode: whose computation takes longest, and who is out."""
    silent = f"  silent for {job.silent_seconds:.0f} s" if job.silent_seconds > 5 + 3 * job.step_seconds else ""
    yield Text.assemble(("job ", "dim"), (job.job, "bold"), f"  restart mode, round {job.round}{silent}")
    yield Text.assemble(
        ("  step ", "dim"), str(job.step), ("   seconds a step ", "dim"), f"{job.step_seconds:.3f}"
    )
    table = plain_table("device", "own seconds", "to the others")
    for device, pace in sorted(job.devices.items(), key=lambda item: -item[1].ratio):
        style = "red" if pace.ratio >= 1.25 else "green"
        table.add_row(device, f"{pace.seconds:.3f}", Text(f"{pace.ratio:.2f}x", style=style))
    yield table
    for torchrun, reason in sorted(job.out.items()):
        yield Text(f"  out: {torchrun}: {reason}")
