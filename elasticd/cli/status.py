"""`elasticd status`: what runs now, on which devices, under which plan and why."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import click
from elasticd_planner.detection.slowness_history import SlownessKind
from elasticd_planner.readable import readable
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from elasticd.cli.options import asking, json_option, plain_table, write_json
from elasticd.cli.picture import picture
from elasticd.client import Api, CannotReach
from elasticd.codec.safe_text import in_one_line
from elasticd.coordinator.api_types import (
    ClusterStatus,
    DeviceStatus,
    ExceptionStatus,
    JobStatus,
    MemberStatus,
    NodeStatus,
    RestartStatus,
)

#: Devices up to which each has a line of its own; of more, nodes have one where something is not normal.
FEW_DEVICES = 32
#: Without --all: lines of nodes, jobs, and pipelines and workers of a job that are shown.
MOST_NODES, MOST_JOBS, MOST_PIPELINES, MOST_WORKERS = 20, 4, 6, 16
#: A device in a node's line: at normal speed, slower and slower, and one of a node that cannot be reached.
_GLYPHS, _GONE = "▁▃▅▇█", "×"


@click.command()
@asking
@click.option("--all", "everything", is_flag=True, help="Every device, pipeline and worker, however many.")
@click.option("--follow", "-f", is_flag=True, help="With --json: what changes too, until Ctrl-C.")
@json_option("The coordinator's own answer; with --follow a line for each thing, and for each change of it.")
def status(api: Api, as_json: bool, everything: bool, follow: bool) -> None:
    """Show the leader, the nodes, and each job with its plan and why it has it.

    In a large cluster only what is not normal has a line: a node, with a glyph for each of its devices.
    """
    if follow and not as_json:
        raise click.UsageError("--follow is for --json: 'elasticd top' is the screen that follows")
    if follow:
        for news in api.live(measured=False):
            write_json(news)
        raise CannotReach(f"the leader at {api.url} is gone: ask again for the next one")
    if as_json:
        click.echo(api.status_json())
        return
    found = api.status()
    shown = found.jobs if everything else found.jobs[:MOST_JOBS]
    reasons = {job.job: why(api, job) for job in shown}
    Console(highlight=False, markup=False).print(screen(found, reasons, everything=everything))


def why(api: Api, job: JobStatus) -> str:
    """Why the job's plan was chosen, from its history; nothing where there is no plan."""
    if job.plan is None:
        return ""
    found = api.history(job.job, job.plan.number - 1)
    reasons = (record.reason for record in found if record.number == job.plan.number)
    return next(reasons, "")


def screen(found: ClusterStatus, reasons: dict[str, str], *, everything: bool = False) -> RenderableType:
    """The whole status, for a terminal; of a large cluster without `everything` what is not normal."""
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
    everything = everything or sum(len(node.devices) for node in found.nodes) <= FEW_DEVICES
    parts: list[RenderableType] = [head]
    parts += [nodes(found.nodes)] if everything else [*abnormal_nodes(found.nodes)]
    jobs = found.jobs if everything else sorted(found.jobs, key=_over)[:MOST_JOBS]
    rates = rates_of(found)
    for job in jobs:
        parts += ["", *_job(job, reasons.get(job.job, ""), rates, everything=everything)]
    if len(jobs) < len(found.jobs):
        parts += ["", Text(f"and {len(found.jobs) - len(jobs)} more jobs: elasticd jobs", style="dim")]
    for restarting in found.restarts if everything else found.restarts[:MOST_JOBS]:
        parts += ["", *_restarting(restarting)]
    if not found.jobs and not found.restarts:
        parts.append(Text("no job: start one with torchrun --rdzv-backend=elasticd --rdzv-id=NAME ..."))
    return Group(*parts)


def _over(job: JobStatus) -> bool:
    return job.phase in ("done", "stopped")


def abnormal_nodes(listed: Sequence[NodeStatus]) -> Iterator[RenderableType]:
    """A sentence about all, and a line for each node of which something is not normal, the worst first."""
    devices = [device for node in listed for device in node.devices]
    slow = sum(device.rate > 1 for device in devices)
    away = sum(not node.connected for node in listed)
    draining = sum(node.draining for node in listed)
    yield Text.assemble(
        (f"{len(listed):,} nodes, {len(devices):,} devices: ", "dim"),
        ", ".join(
            filter(
                None,
                (
                    f"{len(devices) - slow:,} at normal speed",
                    f"{slow:,} slow" if slow else "",
                    f"{away:,} nodes unreachable" if away else "",
                    f"{draining:,} nodes draining" if draining else "",
                ),
            )
        ),
    )
    odd = sorted(filter(_odd, listed), key=_badness)
    for node in odd[:MOST_NODES]:
        yield Text.assemble(f"  {node.node:<20} ", _glyphs(node), (f"  {in_one_line(_notes(node))}", "dim"))
    if len(odd) > MOST_NODES:
        yield Text(f"  and {len(odd) - MOST_NODES:,} more nodes that are not normal: --all", style="dim")


def _odd(node: NodeStatus) -> bool:
    odd = any(device.rate > 1 or device.pace != 1 for device in node.devices)
    return odd or node.draining or not node.connected


def _badness(node: NodeStatus) -> tuple[bool, float, str]:
    return node.connected, -max((device.rate for device in node.devices), default=1.0), node.node


def _glyphs(node: NodeStatus) -> Text:
    text = Text()
    for device in node.devices:
        if not node.connected:
            text.append(_GONE, style="red")
        else:
            place = min(len(_GLYPHS) - 1, math.ceil(2 * (device.rate - 1)))
            text.append(_GLYPHS[max(0, place)], style="red" if device.rate > 1 else "green")
    return text


def _notes(node: NodeStatus) -> str:
    slow = sorted((device for device in node.devices if device.rate > 1), key=lambda device: -device.rate)
    told = [f"{device.name} takes {device.rate:.2f}x" for device in slow[:3]]
    told += [f"{len(slow) - 3} more are slow"] if len(slow) > 3 else []
    told += [] if node.connected else ["node unreachable"]
    told += [f"draining, {node.members} devices in use"] if node.draining else []
    paced = [device for device in node.devices if device.pace != 1]
    told += [f"chaos: {device.name} {device.pace:g}x slower" for device in paced[:1]]
    return ", ".join(told)


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


def _job(
    job: JobStatus, reason: str, rates: Mapping[str, float], *, everything: bool = True
) -> Iterator[RenderableType]:
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
        lanes = len(job.plan.by_lane)
        if everything or lanes <= MOST_PIPELINES:
            yield picture(job.plan, rates)
        else:
            stages = {len(lane.stages) for lane in job.plan.by_lane}
            depth = f"{min(stages)}" if len(stages) == 1 else f"{min(stages)} to {max(stages)}"
            text = f"  {lanes:,} pipelines of {depth} stages on {len(job.plan.members):,} devices"
            idle = f", {len(job.plan.idle):,} stand by" if job.plan.idle else ""
            yield Text.assemble(text, idle, ("; --all draws them", "dim"))
        if reason:
            yield Text(f"  why: {reason}")
    if job.members and (everything or len(job.members) <= MOST_WORKERS):
        yield Text.assemble(("  workers ", "dim"), ", ".join(map(worker, job.members)))
    elif job.members:
        yield Text.assemble(("  workers ", "dim"), f"{len(job.members):,} processes; --all lists them")


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
