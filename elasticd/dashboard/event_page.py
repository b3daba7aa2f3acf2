"""The page of events: filtered, paged, and grouped from a cause to the plan that answers it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from elasticd.dashboard import views
from elasticd.dashboard.cluster_page import event_row
from elasticd.machines.job.state.events import SLOWDOWN_KINDS
from elasticd.wire.event_record import EventRecord

#: Kinds of events that ask for a new plan, and seconds for which one waits to be answered.
CAUSES = (
    *SLOWDOWN_KINDS,
    "fenced",
    "worker_lost",
    "raised",
    "halted",
    "waiting",
    "drained",
    "leaving",
    "joined",
    "shifted",
    "link",
    "chaos",
    "configured",
    "planning",
    "job_gathered",
)
#: Causes that come by themselves at about any time: another one that is there names the group.
BESIDE = ("shifted", "planning", "job_gathered")
PLAN_EVENT_SECONDS = 300.0
#: Kinds of events that belong to the plan whose number they have.
OF_PLANS = (
    "proposed",
    "prepared",
    "swapped",
    "recorded",
    "aborted",
    "gained",
    "put_off",
    "refused",
    "kept_plan",
)


@dataclass
class _Group:
    job: str
    plan: int | None
    events: list[EventRecord] = field(default_factory=list)


def grouped(told: Sequence[EventRecord]) -> tuple[views.EventGroup, ...]:
    """Events that belong together, newest group first. `told`: oldest first."""
    groups: list[_Group] = []
    waiting: dict[str, list[EventRecord]] = {}  # causes that no plan answers yet, by job
    by_plan: dict[tuple[str, int], _Group] = {}
    for event in told:
        number = event.data.get("number")
        if event.kind in OF_PLANS and isinstance(number, int):
            group = by_plan.get((event.job, number))
            if event.kind in ("proposed", "kept_plan") or group is None:
                group = _Group(job=event.job, plan=number)
                for job in (event.job, ""):
                    due = waiting.pop(job, [])
                    group.events += [cause for cause in due if event.time - cause.time <= PLAN_EVENT_SECONDS]
                group.events.sort(key=lambda each: each.id)
                groups.append(group)
                by_plan[event.job, number] = group
            group.events.append(event)
        elif event.kind in CAUSES:
            waiting.setdefault(event.job, []).append(event)
    return tuple(_shown(group) for group in reversed(groups) if len(group.events) > 1)


def _shown(group: _Group) -> views.EventGroup:
    events = group.events
    causes = [event for event in events if event.kind in CAUSES]
    telling = [event for event in causes if event.kind not in BESIDE]
    cause = (telling or [event for event in causes if event.kind != "planning"] or events)[0]
    kinds = {event.kind for event in events}
    what = " given up" if "aborted" in kinds else ""
    if "kept_plan" in kinds and "proposed" not in kinds:
        what = " kept"
    title = f"plan {group.plan}{what}: {cause.text}"
    durations: dict[str, float] = {}
    for before, after in pairwise(events):
        durations.setdefault(after.kind, max(0.0, after.time - before.time))
    return views.EventGroup(
        title=title,
        job=group.job,
        plan=group.plan,
        start=events[0].time,
        stop=events[-1].time,
        durations=durations,
        events=tuple(map(event_row, events)),
    )


def event_page(
    told: Sequence[EventRecord],
    limit: int,
    facets: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], float | None],
) -> views.EventPage:
    """The page of these events, which come newest first."""
    kinds, jobs, nodes, oldest = facets
    return views.EventPage(
        events=tuple(map(event_row, told)),
        groups=grouped(told[::-1]),
        before=told[-1].id if len(told) >= limit and told else None,
        kinds=kinds,
        jobs=jobs,
        nodes=nodes,
        oldest=oldest,
    )
