"""`elasticd status`: what runs now, on which devices, under which plan and why."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import click
import msgspec
from elasticd_planner.detection.slowness_history import SlownessKind
from elasticd_planner.readable import counted, readable, readable_seconds
from elasticd_planner.spec.mesh import MeshPlan
from elasticd_planner.value import Value
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from elasticd.cli.console import command_console
from elasticd.cli.job_argument import named_job
from elasticd.cli.options import asking, json_option, plain_table, write_json
from elasticd.cli.picture import picture
from elasticd.client import ApiClient, CannotReach
from elasticd.codec.safe_text import in_one_line
from elasticd.explain.why import differs
from elasticd.wire.api_types import (
    CheckpointStatus,
    ClusterStatus,
    DeviceStatus,
    ExceptionStatus,
    ExpertDeviceStatus,
    JobStatus,
    MemberStatus,
    ModuleDeviceStatus,
    ModuleStatus,
    NodeStatus,
    RestartStatus,
)

#: Devices up to which each has a line of its own; of more, nodes have one where something is not normal.
FEW_DEVICES = 32
#: Without --all: lines of nodes, jobs in full, jobs that are over, and pipelines and workers of a job.
MOST_NODES, MOST_JOBS, MOST_OVER, MOST_PIPELINES, MOST_WORKERS = 20, 4, 10, 6, 16
#: A lane of items that takes so many times the planned time for a row is named; lines of such devices.
SLOW_LANE, MOST_SLOW_LANES = 1.25, 4
#: A device whose experts give it so many times the work of its share is named.
BUSY = 1.1
#: A device in a node's line: at normal speed, slower and slower, and one of a node that cannot be reached.
_GLYPHS, _GONE = "▁▃▅▇█", "×"


@click.command()
@asking
@click.option("--all", "everything", is_flag=True, help="Every device, pipeline, worker and job, however many.")
@click.option("--follow", "-f", is_flag=True, help="With --json: what changes too, until Ctrl-C.")
@json_option("The coordinator's own answer; with --follow a line for each thing, and for each change of it.")
@click.argument("job", required=False)
def status(api: ApiClient, as_json: bool, everything: bool, follow: bool, job: str | None) -> None:
    """Show the leader, the devices, and each job that runs with its plan and why it has it.

    Jobs that are over follow, each in a line. With JOB: that job alone, in full, and its devices. In a large
    cluster only what is not normal has a line: a node, with a glyph for each of its devices.
    """
    if follow and not as_json:
        raise click.UsageError("--follow is for --json: 'elasticd top' is the screen that follows")
    if follow and job is not None:
        raise click.UsageError("--follow is of the whole cluster: leave JOB out")
    if follow:
        for news in api.live(measured=False):
            write_json(news)
        raise CannotReach(f"the leader at {api.url} is gone: ask again for the next one")
    if as_json and job is None:
        click.echo(api.status_json())
        return
    cluster = api.status()
    if job is not None:
        cluster = status_of(cluster, named_job(cluster, job))
    if as_json:
        write_json((*cluster.jobs, *cluster.restarts)[0])
        return
    full = cluster.jobs if everything or job is not None else jobs_in_full(cluster.jobs)
    reasons = {known.job: why(api, known) for known in full}
    command_console().print(screen(cluster, reasons, everything=everything, one=job is not None))


def status_of(cluster: ClusterStatus, job: str) -> ClusterStatus:
    """The same of one job alone: that job, and the devices of its plan, its workers and its processes."""
    jobs = tuple(known for known in cluster.jobs if known.job == job)
    restarts = tuple(known for known in cluster.restarts if known.job == job)
    alone = msgspec.structs.replace(cluster, jobs=jobs, restarts=restarts)
    used = uses_of(alone, over=True)
    nodes = tuple(
        msgspec.structs.replace(node, devices=tuple(device for device in node.devices if device.name in used))
        for node in cluster.nodes
    )
    return msgspec.structs.replace(alone, nodes=tuple(node for node in nodes if node.devices))


def checkpoint_lines(found: CheckpointStatus | None) -> Iterator[Text]:
    """The newest checkpoint of a job, and why the last that was tried was not made."""
    if found is None:
        return
    age = "" if found.age_seconds is None else f", {readable_seconds(found.age_seconds)} old"
    newest = f"of step {found.step}{age}" if found.step else "none"
    yield Text.assemble(("  newest checkpoint ", "dim"), newest)
    if found.failed_step is not None:
        yield Text(f"  the last one failed, of step {found.failed_step}: {found.failure}", style="red")


def jobs_in_full(jobs: Sequence[JobStatus]) -> list[JobStatus]:
    """The jobs that a screen shows in full: the first of those that run."""
    return [job for job in jobs if not job.over][:MOST_JOBS]


def why(api: ApiClient, job: JobStatus) -> str:
    """Why the job's plan was chosen, from its history; nothing where there is no plan."""
    if job.plan is None:
        return ""
    records = api.history(job.job, job.plan.number - 1)
    reasons = (record.reason for record in records if record.number == job.plan.number)
    return next(reasons, "")


def screen(
    cluster: ClusterStatus, reasons: Mapping[str, str], *, everything: bool = False, one: bool = False
) -> RenderableType:
    """The whole status, for a terminal: jobs that run in full, those that are over in a line each.

    Args:
        cluster: the status; of all jobs, or of `one` that is shown in full also where it is over.
        reasons: why each job's plan was chosen, by job.
        everything: every device, pipeline, worker and job in full; else of a large cluster what is not normal.
        one: the status is of one job alone (`status_of`).
    """
    leader = cluster.leader
    title = Text.assemble(
        ("cluster ", "dim"),
        (cluster.cluster, "bold"),
        ("   leader ", "dim"),
        f"{leader.name} at {leader.url}",
        (f"   epoch {leader.epoch}", "dim"),
    )
    parts: list[RenderableType] = [title, *unwritten(cluster), *paused(cluster)]
    if not cluster.nodes and not one:
        parts.append(Text("no agent is connected: start one on each node with 'elasticd-agent'"))
        if not cluster.jobs and not cluster.restarts:
            return Group(*parts)
        parts.append(Text("agents that run come to a new leader by themselves, in seconds"))
    few = sum(len(node.devices) for node in cluster.nodes) <= FEW_DEVICES
    if not cluster.nodes:
        pass  # of one job, of which no device is known
    elif everything or few:
        parts.append(device_table(cluster))
    else:
        parts += abnormal_nodes(cluster.nodes)
    parts += _jobs(cluster, reasons, every_job=everything or one, every_part=everything or few)
    if not cluster.jobs and not cluster.restarts:
        parts.append(Text("no job: start one with elasticd run SCRIPT"))
    return Group(*parts)


def _jobs(
    cluster: ClusterStatus, reasons: Mapping[str, str], *, every_job: bool, every_part: bool
) -> Iterator[RenderableType]:
    """The jobs. every_job: all in full. every_part: in those in full, all pipelines and workers."""
    rates = rates_of(cluster)
    jobs: list[JobStatus | RestartStatus] = [*cluster.jobs, *cluster.restarts]
    running, over = [job for job in jobs if not job.over], [job for job in jobs if job.over]
    full = running + over if every_job else running[:MOST_JOBS]
    for job in full:
        yield ""
        if isinstance(job, RestartStatus):
            yield from restart_mode_job(job)
        else:
            yield from _job(job, reasons.get(job.job, ""), rates, everything=every_part)
    if not every_job and (more := len(running) - len(full)):
        yield from ("", Text(f"and {more} more jobs that run: elasticd jobs", style="dim"))
    if over and not every_job:
        yield from ("", *jobs_over(over))


def jobs_over(over: Sequence[JobStatus | RestartStatus]) -> Iterator[RenderableType]:
    """A line for each job that is over, at most `MOST_OVER` of them; on a terminal its end is cut."""
    rows = [_over_cells(job) for job in over[:MOST_OVER]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for job, row in zip(over, rows, strict=False):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        why = job.sentence if isinstance(job, RestartStatus) else job.reason
        yield Text("  ".join((*cells, in_one_line(why))), no_wrap=True, overflow="ellipsis")
    if len(over) > MOST_OVER:
        yield Text(
            f"further jobs that are over: {len(over) - MOST_OVER:,}; elasticd jobs shows all", style="dim"
        )
    yield Text("'elasticd status JOB' shows one of them in full, --all shows all", style="dim")


def _over_cells(job: JobStatus | RestartStatus) -> tuple[str, str, str, str]:
    """Name, phase, step and loss of a job that is over."""
    if isinstance(job, RestartStatus):
        return job.job, job.phase, f"step {job.step}" if job.step else "step -", "restart mode"
    return (
        job.job,
        job.shown_phase,
        f"step {job.step}",
        "loss -" if job.loss is None else f"loss {job.loss:.4f}",
    )


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
    return odd or node.draining or node.drain_pending or not node.connected


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
    notes = [f"{device.name} takes {device.rate:.2f}x" for device in slow[:3]]
    notes += [f"{len(slow) - 3} more are slow"] if len(slow) > 3 else []
    notes += [] if node.connected else ["node unreachable"]
    notes += [f"draining, {node.members} devices in use"] if node.draining else []
    notes += (
        [f"{'drain' if node.drain_asked else 'its use'} asked for, not heard"] if node.drain_pending else []
    )
    paced = [device for device in node.devices if device.pace != 1]
    notes += [f"chaos: {device.name} {device.pace:g}x slower" for device in paced[:1]]
    return ", ".join(notes)


def rates_of(found: ClusterStatus) -> dict[str, float]:
    """The slowdown of each device: 1 is normal."""
    return {device.name: device.rate for node in found.nodes for device in node.devices}


def unwritten(found: ClusterStatus) -> Iterator[Text]:
    """Says that what is shown is not in etcd yet, and may be lost with this leader."""
    if seconds := found.unwritten_seconds:
        text = f"etcd has not taken what was decided for {seconds:.0f} s: if this leader ends now, that is lost"
        yield Text(text, style="red")


def paused(found: ClusterStatus) -> Iterator[Text]:
    """A line that says so, where replanning is paused."""
    if found.paused:
        yield Text("replanning is paused: 'elasticd resume' ends that", style="yellow")


class DeviceUse(Value, frozen=True, kw_only=True):
    """A job's use of a device."""

    job: str  # the job's name
    rank: int | None = None  # in its plan (None: it has none there)
    standby: bool = False  # the plan leaves the device idle


def uses_of(cluster: ClusterStatus, *, over: bool = False) -> dict[str, DeviceUse]:
    """Which job uses each device, by the plans in force, or by the workers of jobs without one; `over`: jobs
    that are over count too."""
    uses: dict[str, DeviceUse] = {}
    for restarting in cluster.restarts:
        if over or not restarting.over:
            used = {*restarting.members, *restarting.devices}
            uses |= {device: DeviceUse(job=restarting.job) for device in sorted(used)}
    for job in cluster.jobs:
        if job.over and not over:
            continue
        uses |= {member.device: DeviceUse(job=job.job) for member in job.members}
        if job.plan is not None:
            uses |= {device: DeviceUse(job=job.job, standby=True) for device in job.plan.idle}
            uses |= {device: DeviceUse(job=job.job, rank=rank) for rank, device in enumerate(job.plan.members)}
    return uses


def device_table(cluster: ClusterStatus) -> Table:
    """One line for each device: the job and the rank that use it, memory, how busy it is, and its slowdown."""
    table = plain_table("device", "job", ">rank", ">memory", ">busy", ">temp", ">takes", "", whole=7)
    uses = uses_of(cluster)
    for node in cluster.nodes:
        for device in node.devices:
            notes = [
                "" if node.connected else "node unreachable",
                "draining" if node.draining else "drain asked for, not heard" if node.drain_asked else "",
                "emulated" if node.emulated else "",
                f"chaos: {device.pace:g}x slower" if device.pace != 1 else "",
                slowness(device),
            ]
            table.add_row(
                device.name,
                *_user(uses.get(device.name)),
                *_readings(device, node),
                Text(f"{device.rate:.2f}x", style="red" if device.rate > 1 else "green"),
                Text(", ".join(note for note in notes if note), style="dim"),
            )
    return table


def _user(use: DeviceUse | None) -> tuple[str, str]:
    if use is None:
        return "-", "-"
    return use.job, "standby" if use.standby else "-" if use.rank is None else str(use.rank)


def _readings(device: DeviceStatus, node: NodeStatus) -> tuple[str, str, str]:
    """A device's memory, how busy it is and its temperature; "-" is what its agent does not tell."""
    health = node.health.device(device.name) if node.health is not None and node.connected else None
    used = health.memory_used if health is not None else None
    busy = health.utilisation if health is not None else None
    degrees = health.temperature if health is not None else None
    return (
        f"{readable(used)} / {readable(device.memory)}" if used is not None else readable(device.memory),
        "-" if busy is None else f"{busy:.0%}",
        "-" if degrees is None else f"{degrees:.0f} °C",
    )


def slowness(device: DeviceStatus) -> str:
    """The kind of slowness that a device shows; empty for one that is well, and was slow at most once."""
    kind = device.slowness
    if kind is None or (device.rate <= 1 and kind.kind is SlownessKind.TRANSIENT):
        return ""
    return f"{kind.kind.word}: {kind.reason}"


def _job(
    job: JobStatus, reason: str, rates: Mapping[str, float], *, everything: bool = True
) -> Iterator[RenderableType]:
    yield Text.assemble(
        ("job ", "dim"), (job.job, "bold"), f"  {job.shown_phase}", f"  {job.reason}" if job.reason else ""
    )
    yield from exception(job.exception)
    loss = "-" if job.loss is None else f"{job.loss:.4f}"
    speed = "-" if job.tokens_per_second is None else f"{job.tokens_per_second:,.0f}"
    kept = "" if job.snapshot is None else str(job.snapshot)
    yield Text.assemble(
        *(("  step ", "dim"), str(job.step), ("   loss ", "dim"), loss, ("   tokens/s ", "dim"), speed),
        *((("   snapshot in memory of step ", "dim"), kept) if kept else ()),
    )
    yield from checkpoint_lines(job.checkpoint)
    if job.wall_seconds is not None and job.step_seconds is not None:
        yield Text.assemble(
            ("  wall time a step ", "dim"), readable_seconds(job.wall_seconds),
            ("   the step itself ", "dim"), readable_seconds(job.step_seconds),
        )  # fmt: skip
    yield from module_lines(job)
    yield from expert_lines(job)
    if job.plan is not None:
        expected = predicted(job)
        proposed = f", plan {job.proposal} is proposed" if job.proposal is not None else ""
        yield Text(f"  plan {job.plan.number}{expected}{proposed}")
        if isinstance(job.plan, MeshPlan) or everything or len(job.plan.loss_view.by_lane) <= MOST_PIPELINES:
            yield picture(job.plan, rates)
        else:
            loss_view = job.plan.loss_view
            lanes = len(loss_view.by_lane)
            stages = {len(lane.stages) for lane in loss_view.by_lane}
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


def module_lines(job: JobStatus) -> Iterator[Text]:
    """The modules of a job in its newest step, and below each the devices whose lanes take longer than planned
    for an item."""
    for module in job.modules:
        yield Text.assemble(
            ("  module ", "dim"), module.module, f"  {readable_seconds(module.seconds)} of computation on ",
            f"{module.busiest}, the busiest of {counted(module.devices, 'device')}", _items(module),
        )  # fmt: skip
        slow = [each for each in module.by_device if each.slowdown >= SLOW_LANE]
        for each in sorted(slow, key=lambda each: -each.slowdown)[:MOST_SLOW_LANES]:
            yield Text.assemble("    ", (each.device, "red"), "  ", item_share(module, each))
        if (more := len(slow) - MOST_SLOW_LANES) > 0:
            yield Text(f"    and {counted(more, 'more device')} with slow lanes")


def expert_lines(job: JobStatus) -> Iterator[Text]:
    """The load of a job's experts, and the devices that have most to do with them."""
    experts = job.experts
    if experts is None:
        return
    copies = f", and {experts.copies} on further devices" if experts.copies else ""
    yield Text.assemble(
        ("  experts ", "dim"), f"{experts.experts} in all blocks{copies}; ",
        f"the busiest device has {experts.uneven:.0%} more than the least possible; heaviest: expert ",
        f"{experts.heaviest} of block {experts.block}, {experts.part:.0%} of its rows",
    )  # fmt: skip
    busy = sorted(experts.by_device, key=lambda each: -each.work)
    for each in [each for each in busy if each.work >= BUSY][:MOST_SLOW_LANES]:
        yield Text.assemble("    ", each.device, "  ", expert_share(each))


def expert_share(device: ExpertDeviceStatus) -> str:
    """A device's experts, and its work with them."""
    return f"{counted(device.experts, 'expert')}, {device.work:.2f} times the work of its share"


def item_share(module: ModuleStatus, device: ModuleDeviceStatus) -> str:
    """A device's lane in a module: its items in the newest step, and how long it takes for them."""
    text = (
        f"{device.items} {module.items}, {device.share:.0%} of all rows; {device.planned_share:.0%} as planned"
    )
    if device.slowdown >= SLOW_LANE:
        text += f"; a row takes {device.slowdown:.2f} times the planned time"
    return text


def _items(module: ModuleStatus) -> str:
    if not module.items:
        return ""
    return f"; {module.items_a_sample:.2f} {module.items} a sample, of {module.rows_an_item:,.0f} rows each"


def predicted(job: JobStatus) -> str:
    """The seconds of a step under the plan in force, by the newest profile and as when it was made."""
    own = job.plan.prediction if job.plan is not None else None
    if own is None:
        return ""
    seconds = own.step_seconds if job.predicted_seconds is None else job.predicted_seconds
    if job.prediction_guessed:
        return f", {readable_seconds(seconds)} a step, a guess before steps were measured"
    first = f" ({readable_seconds(own.step_seconds)} when it was made)"
    return (
        f", {readable_seconds(seconds)} a step predicted{first if differs(own.step_seconds, seconds) else ''}"
    )


def worker(member: MemberStatus) -> str:
    """One process: what it drives, and what that is."""
    computes_on = member.computes_on
    on = f" on {computes_on.text} over {computes_on.transport}" if computes_on is not None else ""
    return f"{member.device} pid {member.pid}{on}"


def exception(raised: ExceptionStatus | None) -> Iterator[Text]:
    """The exception that the script's own code raised, with its traceback."""
    if raised is None:
        return
    what = f"the script's code raised {raised.kind} in step {raised.step} on {raised.device}"
    yield Text(f"  {what}: {raised.message}", style="red")
    for each in raised.traceback.splitlines():
        yield Text(f"    {each}", style="dim")


def restart_mode_job(job: RestartStatus) -> Iterator[RenderableType]:
    """A job in restart mode: whose computation takes longest, and who is out."""
    late = job.step and job.silent_seconds > 5 + 3 * job.step_seconds
    silent = f"  silent for {job.silent_seconds:.0f} s" if late else ""
    round_number = f", round {job.round}" if job.round >= 0 else ""
    phase = f", {job.phase}" if job.phase != "running" else ""
    yield Text.assemble(
        ("job ", "dim"), (job.job, "bold"), f"  restart mode{phase}{round_number}{silent}  {job.sentence}"
    )
    for line in job.failure.splitlines() if job.phase == "failed" else ():
        yield Text(f"    {in_one_line(line)}", style="dim")
    if not job.step:
        return
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
