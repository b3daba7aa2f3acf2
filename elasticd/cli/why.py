"""`elasticd why`: what was measured, what was decided from it, what it cost and what it gained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import median

import click
from elasticd_planner.readable import readable_seconds
from elasticd_planner.spec.packed_sequences import PackedSequences
from rich.console import Group, RenderableType
from rich.text import Text

from elasticd.cli.console import command_console
from elasticd.cli.job_argument import in_restart_mode, job_with_plans, named_job
from elasticd.cli.options import asking, json_option, write_json
from elasticd.cli.picture import picture
from elasticd.cli.status import exception, expert_share, item_share
from elasticd.client import ApiClient, CannotReach
from elasticd.explain.why import (
    WhyLine,
    decided,
    did,
    event_lines,
    events_of,
    gained,
    module_changes,
    packed_for,
    prediction_of,
    record_before,
    seconds_under,
    snapshot_cost,
    use,
)
from elasticd.records import AnyHistoryRecord
from elasticd.wire.api_types import ClusterStatus, DeviceStatus, JobStatus, NodeStatus
from elasticd.wire.event_record import EventRecord
from elasticd.wire.step_record import StepRecord


@click.command()
@asking
@json_option("The plan or the device, what was measured, and the events about it.")
@click.option("--job", "option", metavar="JOB", hidden=True)  # release 0.1's way to say it
@click.argument("words", nargs=-1, metavar="[JOB] [PLAN|DEVICE]")
def why(api: ApiClient, as_json: bool, option: str | None, words: tuple[str, ...]) -> None:
    """Explain a plan by its number, a device by its name, or, without either, the plan in force.

    Without JOB it is about the job that runs; of several, about the one that uses the device.
    """
    status = api.status()
    answer: dict[str, object]
    job, what = _asked(status, words, option)
    if what is None and (restarting := in_restart_mode(status, job)) is not None:
        answer = {"reason": restarting.reason, "exception": None, "failure": restarting.failure}
        _show(restarting.job, answer, [*now(restarting.reason), *failure(restarting.failure)], as_json)
        return
    name = job_with_plans(status, job or _user_of(what, status), quiet=as_json)
    told, records = api.events(), api.history(name)
    steps = api.steps(name).steps
    told = tuple(event for event in told if event.job in ("", name))
    shown: Iterable[RenderableType]
    if what is not None and not _is_number(what):
        about = (what, name, status, told, records)
        answer, shown = device_told(*about), device(*about)
    else:
        current = status.job(name)
        # A job that failed before its first plan has a reason all the same.
        ended_early = what is None and current is not None and current.over and not records
        record = None if ended_early else _meant(status, records, name, what)
        before = record_before(record, records) if record is not None else None
        raised = current.exception if current is not None and what is None else None
        reason = current.reason if current is not None and what is None else ""
        answer = {"reason": reason, "exception": raised}
        shown = (*now(reason), *exception(raised))
        if record is not None:
            answer |= plan_told(record, told, steps, before)
            shown = (*shown, *plan(record, told, steps, before))
    _show(name, answer, shown, as_json)


def _show(job: str, answer: dict[str, object], shown: Iterable[RenderableType], as_json: bool) -> None:
    if as_json:
        write_json({"job": job, **answer})
    else:
        command_console().print(Group(*shown))


def _asked(status: ClusterStatus, words: Sequence[str], option: str | None) -> tuple[str | None, str | None]:
    """The job, and the plan or the device, that the words name; each None where none of them does. A word that
    is a number is a plan's, one with a slash a device's, and any other a job's: no job's name has a slash, and
    of two words the first is the job's whatever it is."""
    words = (*((option,) if option is not None else ()), *words)
    if len(words) > 2:
        raise click.UsageError(f"too many names: {' '.join(words)}; give a job, and a plan or a device of it")
    if option is not None or len(words) == 2:
        return named_job(status, words[0]), words[1] if len(words) == 2 else None
    if not words:
        return None, None
    (word,) = words
    return (None, word) if _is_number(word) or "/" in word else (named_job(status, word), None)


def _is_number(word: str) -> bool:
    """Returns True if a word can be a plan's number."""
    return word.isascii() and word.isdigit() and len(word) < 19


def _user_of(device: str | None, status: ClusterStatus) -> str | None:
    """The job that runs on a device; None where none does."""
    users = (job for job in status.jobs if not job.over and job.plan is not None)
    return next((job.job for job in users if job.plan and device in (*job.plan.members, *job.plan.idle)), None)


def _meant(
    status: ClusterStatus, records: Sequence[AnyHistoryRecord], job: str, what: str | None
) -> AnyHistoryRecord:
    """The plan of this number, or the one in force. Raises `CannotReach` where there is none."""
    found = status.job(job)
    number = int(what) if what is not None else found.plan.number if found and found.plan else None
    record = next((record for record in records if record.number == number), None)
    if record is None:
        kept = ", ".join(str(record.number) for record in records[-12:])
        if what is not None:
            raise CannotReach(f"job {job} has no plan {what}; the last ones: {kept or 'none'}")
        reason = f" ({found.reason})" if found and found.reason else ""
        newest = f"; 'elasticd why {job} {records[-1].number}' has its last proposal" if records else ""
        raise CannotReach(f"no plan of job {job} is in force{reason}{newest}")
    return record


def now(reason: str) -> Iterator[Text]:
    """Why the job does not train at this moment, or whom it waits for."""
    if reason:
        yield Text.assemble(("now       ", "dim"), reason)


def failure(text: str) -> Iterator[Text]:
    """The last failure of a worker in restart mode."""
    if text:
        yield Text(text)


# -- a plan --------------------------------------------------------------------------------------------------


def plan_told(
    record: AnyHistoryRecord,
    told: Sequence[EventRecord],
    steps: Sequence[StepRecord],
    before: AnyHistoryRecord | None = None,
) -> dict[str, object]:
    """The contents of `plan`, for programs."""
    seconds = seconds_under(record.plan, steps)
    return {
        "plan": record,
        "changed": module_changes(before, record) if before is not None else {},
        "steps": len(seconds),
        "step_seconds": median(seconds) if seconds else None,
        "predicted_seconds": prediction_of(record, told).seconds,
        "gain": gained(record.number, told, steps),
        "snapshots": snapshot_cost(record.number, told),
        "events": events_of(record.number, told),
    }


def plan(
    record: AnyHistoryRecord,
    told: Sequence[EventRecord],
    steps: Sequence[StepRecord],
    before: AnyHistoryRecord | None = None,
) -> Iterator[RenderableType]:
    """The cause of a plan, the plan, and how it did; `before`: the plan before it."""
    (head, *measured) = decided(record, before)
    yield Text.assemble((head.about, "dim"), (str(record.number), "bold"), f"  {record.reason}")
    yield from map(_shown_line, measured)
    yield picture(record.plan, record.problem.rates)
    yield from map(_shown_line, did(record, told, steps))
    yield from _shown([event for event in events_of(record.number, told) if event.kind != "gained"])


def _shown_line(line: WhyLine) -> Text:
    return Text.assemble((line.about, "dim"), line.text)


def _shown(events: Sequence[EventRecord]) -> Iterator[RenderableType]:
    for each in event_lines(events):
        yield Text(each, style="dim")


# -- a device ------------------------------------------------------------------------------------------------


def device_told(
    name: str, job: str, status: ClusterStatus, told: Sequence[EventRecord], records: Sequence[AnyHistoryRecord]
) -> dict[str, object]:
    """The contents of `device`, for programs. Raises `CannotReach` for no device."""
    node, found = _known(name, status)
    current = status.job(job)
    return {
        "device": found,
        "connected": node.connected,
        "use": use(current.plan, name, _rows_of(current.plan.number, records))
        if current is not None and current.plan is not None
        else None,
        "modules": {
            module.module: each
            for module in (current.modules if current is not None else ())
            for each in module.by_device
            if each.device == name
        },
        "reason": _reason(name, current),
        "plans": [
            {
                "number": r.number,
                "rate": r.problem.rates.get(name, 1.0),
                "use": use(r.plan, name, packed_for(r)),
            }
            for r in records
        ],
        "events": _events_about(name, told),
    }


def _rows_of(number: int, records: Sequence[AnyHistoryRecord]) -> PackedSequences | None:
    """The sequences that the rows of this plan are made for, by the records of the job's plans."""
    return packed_for(next((record for record in records if record.number == number), None))


def _known(name: str, status: ClusterStatus) -> tuple[NodeStatus, DeviceStatus]:
    known = {device.name: (node, device) for node in status.nodes for device in node.devices}
    if name not in known:
        raise CannotReach(f"there is no device {name!r}; there are: {', '.join(sorted(known)) or 'none'}")
    return known[name]


def in_modules(name: str, job: JobStatus) -> Iterator[str]:
    """The work of a device for each of its modules in the newest step."""
    for module in job.modules:
        for each in module.by_device:
            if each.device == name:
                share = f"; {item_share(module, each)}" if module.items else ""
                yield f"{module.module}: {readable_seconds(each.seconds)} of computation{share}"


def with_experts(name: str, job: JobStatus) -> Iterator[str]:
    """The experts of a device, and its work with them."""
    for each in job.experts.by_device if job.experts is not None else ():
        if each.device == name:
            yield expert_share(each)


def _reason(name: str, job: JobStatus | None) -> str:
    """Why a job does not train at this moment, if that is for the device's sake."""
    return job.reason if job is not None and name in job.reason.replace(",", " ").split() else ""


def _events_about(name: str, told: Sequence[EventRecord]) -> list[EventRecord]:
    """The last events that name the device."""
    return [event for event in told if name in event.text or event.data.get("device") == name][-20:]


def device(
    name: str, job: str, status: ClusterStatus, told: Sequence[EventRecord], records: Sequence[AnyHistoryRecord]
) -> Iterator[RenderableType]:
    """A device's slowdown, its part in plans, and the events about it."""
    node, found = _known(name, status)
    away = "" if node.connected else "; its node cannot be reached"
    yield Text.assemble(("device ", "dim"), (name, "bold"), f"  takes {found.rate:.2f}x the normal time{away}")
    if found.pace != 1:
        yield Text(f"  chaos slows it {found.pace:g}x on purpose")
    if found.slowness is not None:
        text = f"{found.slowness.kind.word}: {found.slowness.reason}"
        yield Text.assemble(("slowness  ", "dim"), text)
    current = status.job(job)
    if current is not None and current.plan is not None:
        rows = _rows_of(current.plan.number, records)
        yield Text.assemble(("use       ", "dim"), use(current.plan, name, rows))
        for text in in_modules(name, current):
            yield Text.assemble(("step      ", "dim"), text)
        for text in with_experts(name, current):
            yield Text.assemble(("experts   ", "dim"), text)
    yield from now(_reason(name, current))
    before = None
    for record in records:
        rate = record.problem.rates.get(name, 1.0)
        if rate != before:
            counted = use(record.plan, name, packed_for(record))
            yield Text(f"  plan {record.number} counted with {rate:.2f}x: {counted}")
        before = rate
    yield from _shown(_events_about(name, told))
