"""`elasticd why`: what was measured, what was decided from it, what it cost and what it gained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

import click
from elasticd_planner.plan import Plan
from rich.console import Console, Group, RenderableType
from rich.text import Text

from elasticd.cli.history import job_named
from elasticd.cli.logs import line
from elasticd.cli.options import config_option, coordinator_option
from elasticd.cli.picture import picture
from elasticd.cli.reach import Api, CannotReach, ClusterStatus, reach
from elasticd.coordinator.journal import EventRecord, StepRecord
from elasticd.records import HistoryRecord

#: Steps before a switch, and after it, that its gain is the median of. Few before: the reason for the switch is
#: often no older than that.
BEFORE, AFTER = 3, 20


@click.command()
@config_option
@coordinator_option
@click.option("--job", metavar="JOB", help="The job (default: the only one).")
@click.argument("what", required=False)
def why(config: str | None, coordinator: str | None, job: str | None, what: str | None) -> None:
    """Explain a plan by its number, a device by its name, or, without either, the plan in force."""
    with reach(config, coordinator) as api:
        shown = Group(*explained(api, job_named(api, job), what))
    Console(highlight=False).print(shown)


def explained(api: Api, job: str, what: str | None) -> Iterator[RenderableType]:
    """The answer's parts. Raises `CannotReach` for what is neither a plan nor a device."""
    status, told, records = api.status(), api.events(), api.history(job)
    steps = api.steps(job).steps
    if what is not None and not what.isdigit():
        yield from device(what, job, status, told, records)
        return
    found = status.job(job)
    number = int(what) if what is not None else found.plan.number if found and found.plan else None
    record = next((record for record in records if record.number == number), None)
    if record is None:
        kept = ", ".join(str(record.number) for record in records[-12:])
        raise CannotReach(f"job {job} has no plan {what or 'yet'}; the last ones: {kept or 'none'}")
    yield from plan(record, told, steps)


def plan(
    record: HistoryRecord, told: Sequence[EventRecord], steps: Sequence[StepRecord]
) -> Iterator[RenderableType]:
    """What led to a plan, the plan, and how it did."""
    yield Text.assemble(("plan ", "dim"), (str(record.number), "bold"), f"  {record.reason}")
    slow = {device: rate for device, rate in record.problem.rates.items() if rate != 1.0}
    yield Text.assemble(
        ("measured  ", "dim"),
        ", ".join(f"{device} takes {rate:.2f}x" for device, rate in sorted(slow.items()))
        or "every device at normal speed",
    )
    yield picture(record.plan, record.problem.rates)
    yield from _prediction(record.plan, steps)
    yield from _gain(record.number, steps)
    events = [event for event in told if event.data.get("number") == record.number]
    yield from (Text(line(event), style="dim") for event in events)


def _prediction(made: Plan, steps: Sequence[StepRecord]) -> Iterator[RenderableType]:
    if made.prediction is None:
        return
    seconds = [step.seconds for step in steps if step.plan == made.number]
    predicted = made.prediction.step_seconds
    text = f"{predicted:.3f} s a step"
    if len(seconds) >= 3:
        real = median(seconds)
        text += f"; measured {real:.3f} s over {len(seconds)} steps ({real / predicted:.2f} of it)"
    yield Text.assemble(("predicted ", "dim"), text)


def _gain(number: int, steps: Sequence[StepRecord]) -> Iterator[RenderableType]:
    """The last steps before the switch beside the first after it, and the switch's own pause."""
    after = [step for step in steps if step.plan == number][: AFTER + 1]
    before = [step for step in steps if after and step.step < after[0].step][-BEFORE:]
    if len(after) < 4 or len(before) < BEFORE:
        return
    was, now = median(step.seconds for step in before), median(step.seconds for step in after[1:])
    pause = max(0.0, after[0].time - before[-1].time - now)
    yield Text.assemble(
        ("gained    ", "dim"),
        f"{was:.3f} s a step before, {now:.3f} s after ({was / now:.2f}x); the switch took {pause:.2f} s, "
        + (f"paid back in {pause / (was - now):.0f} steps" if was > now else "not paid back by speed"),
    )


def device(
    name: str, job: str, status: ClusterStatus, told: Sequence[EventRecord], records: Sequence[HistoryRecord]
) -> Iterator[RenderableType]:
    """How fast a device is, what plans did with it, and what was told of it."""
    known = {device.name: (node, device) for node in status.nodes for device in node.devices}
    if name not in known:
        raise CannotReach(f"there is no device {name!r}; there are: {', '.join(sorted(known)) or 'none'}")
    node, found = known[name]
    away = "" if node.connected else "; its node cannot be reached"
    yield Text.assemble(("device ", "dim"), (name, "bold"), f"  takes {found.rate:.2f}x the normal time{away}")
    if found.pace != 1:
        yield Text(f"  chaos slows it {found.pace:g}x on purpose")
    if found.slowness is not None:
        text = f"{found.slowness.kind}: {found.slowness.reason}"
        yield Text.assemble(("slowness  ", "dim"), text)
    current = status.job(job)
    if current is not None and current.plan is not None:
        yield Text.assemble(("use       ", "dim"), _use(current.plan, name))
    before = None
    for record in records:
        rate = record.problem.rates.get(name, 1.0)
        if rate != before:
            yield Text(f"  plan {record.number} counted with {rate:.2f}x: {_use(record.plan, name)}")
        before = rate
    about = [event for event in told if name in event.text or event.data.get("device") == name]
    yield from (Text(line(event), style="dim") for event in about[-20:])


def _use(made: Plan, name: str) -> str:
    """What a plan does with a device, in a few words."""
    for index, pipeline in enumerate(made.modules[0].pipelines):
        for stage in pipeline.stages:
            if name in stage.devices:
                share = stage.shares[stage.devices.index(name)]
                count = pipeline.micro_batches
                return (
                    f"pipeline {index}, layers {stage.named}, "
                    f"{share} of {sum(stage.shares)} shares, {count} micro-batch{'es' * (count > 1)} a step"
                )
    return "state alone" if name in made.carriers else "idle" if name in made.idle else "no part of it"
