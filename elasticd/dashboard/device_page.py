"""A device's page: whether it is the culprit, and why."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from elasticd.dashboard import views
from elasticd.dashboard.cluster_page import cell, event_row
from elasticd.dashboard.history import Sample
from elasticd.dashboard.job_page import parts_of
from elasticd.dashboard.known import KnownCluster
from elasticd.dashboard.subscription import HEALTH_SECONDS, JUST_AFTER_SECONDS
from elasticd.explain import why
from elasticd.machines.job.state.events import SLOWDOWN_KINDS
from elasticd.records import AnyHistoryRecord
from elasticd.wire.event_record import EventRecord
from elasticd.wire.node_health import DeviceHealth, Health, causes

#: Seconds between two rows of a node's health, above which nothing is known between them.
MOST_APART = 4 * HEALTH_SECONDS
#: Of a device's health what is drawn, with its unit.
_DEVICE: Mapping[str, str] = {
    "clock": "Hz",
    "temperature": "°C",
    "power": "W",
    "utilisation": "part",
    "memory_used": "bytes",
    "corrected": "errors",
    "uncorrected": "errors",
    "pcie_replays": "replays",
    "nvlink_errors": "errors",
}
#: The same of its node.
_NODE: Mapping[str, str] = {"stolen": "part", "memory_available": "bytes"}


def device_view(
    known: KnownCluster,
    name: str,
    samples: Sequence[Sample],
    health: Sequence[tuple[float, Health]],
    told: Sequence[EventRecord],
    plans: Sequence[tuple[AnyHistoryRecord, float]],
) -> views.DeviceView:
    """The page. `told`: events about the device, newest first; `plans`: those of its job that count with
    another slowdown of it than the one before, oldest first, with the slowdown. Raises KeyError."""
    cluster = known.cluster
    node = cluster.nodes[name.rpartition("/")[0]]
    device = next((each for each in node.devices if each.name == name), None)
    if device is None:
        raise KeyError(name)
    now = cluster.health.get(node.node)
    seen = now.device(name) if now is not None else None
    shown = cell(known, node, name, device.pace)
    plan, slowness = cluster.plans.get(shown.job), cluster.slowness.get(name)
    return views.DeviceView(
        cell=shown,
        node=node.node,
        memory=device.memory,
        connected=node.connected,
        draining=node.draining,
        use=why.use(plan, name)
        if plan is not None
        else f"job {shown.job} in restart mode"
        if shown.job
        else "no job uses it",
        kind=slowness.kind.word if slowness is not None else "",
        kind_reason=slowness.reason if slowness is not None else "",
        causes=causes(now, name),
        thresholds=_thresholds(known),
        slowdown=_slowdown([*samples, *_measured_now(known, shown.job, name)]),
        episodes=_episodes(told, now=shown.slowdown > 1.0),
        parts=_parts(known, shown.job, name),
        health=_health(name, health),
        throttled=seen.throttled if seen is not None else (),
        xids=seen.xids if seen is not None else (),
        plans=tuple((record.number, rate, why.use(record.plan, name)) for record, rate in reversed(plans)),
        hang=_hang(known, shown.job, name, told),
        events=tuple(event_row(event) for event in told[:50]),
    )


def _thresholds(known: KnownCluster) -> views.Thresholds:
    detect = known.cluster.detect
    return views.Thresholds(
        slow=detect.slow,
        recovered=detect.recovered,
        min_steps=detect.min_steps,
        false_alarms=detect.false_alarms,
        cusum=-math.log(detect.false_alarms),
    )


def _measured_now(known: KnownCluster, job: str, name: str) -> Iterator[Sample]:
    """The measurements of a device at this moment: a line goes on to it."""
    plan, table = known.cluster.plans.get(job), known.cluster.measured.get(job)
    if plan is None or table is None or table.plan != plan.number or name not in plan.binding:
        return
    slowdown = table.of(plan.rank(name), "slowdown")
    if not math.isnan(slowdown):
        yield Sample(name, known.heard, table.step, slowdown, known.cluster.rates.get(name, 1.0), None)


def _slowdown(told: Sequence[Sample]) -> views.SlowdownColumns:
    """In columns, with a break where steps go back: another run of a job, or one that was rolled back."""
    samples: list[Sample] = []
    for sample in told:
        if samples and samples[-1].step > sample.step and samples[-1].measured is not None:
            last = samples[-1]
            samples.append(Sample(last.device, last.time + JUST_AFTER_SECONDS, last.step, None, None, None))
        samples.append(sample)
    return views.SlowdownColumns(
        time=tuple(sample.time for sample in samples),
        step=tuple(sample.step for sample in samples),
        measured=tuple(sample.measured for sample in samples),
        decided=tuple(sample.decided for sample in samples),
        cusum=tuple(sample.evidence for sample in samples),
    )


def _episodes(told: Sequence[EventRecord], *, now: bool) -> tuple[views.SlowTime, ...]:
    """The times in which it was slow, by its events, which come newest first. now: it is slow still. A run of a
    job that ends leaves no slowdown behind, and no event says so: the next run's are of another episode."""
    episodes: list[views.SlowTime] = []
    for event in reversed(told):
        step, after = event.data.get("step"), event.data.get("after")
        if event.kind not in SLOWDOWN_KINDS or not isinstance(step, int):
            continue
        moment = views.JobMoment(job=event.job, step=step if step >= 0 else None, time=event.time)
        rate = float(after) if isinstance(after, int | float) else float(event.data.get("rate", 1.0))
        going = episodes[-1] if episodes and episodes[-1].stop is None else None
        begins = rate > 1.0 and event.data.get("before") == 1.0
        if going is not None and (begins or going.start.job != event.job):
            going = None  # that run is over
        if going is not None:
            newer: dict[str, Any] = {"slowdown": rate} if rate > 1.0 else {"stop": moment}
            episodes[-1] = msgspec.structs.replace(going, **newer)
        elif rate > 1.0:
            episodes.append(views.SlowTime(start=moment, stop=None, now=False, slowdown=rate))
    if episodes and episodes[-1].stop is None and now:
        episodes[-1] = msgspec.structs.replace(episodes[-1], now=True)
    return tuple(episodes)


def _parts(known: KnownCluster, job: str, name: str) -> dict[str, float]:
    plan, table = known.cluster.plans.get(job), known.cluster.measured.get(job)
    if plan is None or table is None or table.plan != plan.number or name not in plan.binding:
        return {}
    return parts_of(table, plan.rank(name))


def _health(name: str, told: Sequence[tuple[float, Health]]) -> views.HealthColumns:
    seen = list(_with_breaks(told))
    devices = [health.device(name) for _, health in seen]
    values: dict[str, tuple[float | None, ...]] = {}
    units: dict[str, str] = {}
    for key, unit in _DEVICE.items():
        column = tuple(_number(device, key) for device in devices)
        if any(value is not None for value in column):
            values[key], units[key] = column, unit
    for key, unit in _NODE.items():
        column = tuple(_number(health, key) for _, health in seen)
        if any(value is not None for value in column):
            values[f"node {key.replace('_', ' ')}"], units[f"node {key.replace('_', ' ')}"] = column, unit
    for what in sorted({what for _, health in seen for what in health.pressure}):
        values[f"node waits for {what}"] = tuple(health.pressure.get(what) for _, health in seen)
        units[f"node waits for {what}"] = "part"
    return views.HealthColumns(time=tuple(at for at, _ in seen), values=values, units=units)


def _with_breaks(told: Sequence[tuple[float, Health]]) -> Iterator[tuple[float, Health]]:
    """With a time at which nothing is known behind each after which nothing was told for long."""
    for index, (at, health) in enumerate(told):
        yield at, health
        if index + 1 < len(told) and told[index + 1][0] - at > MOST_APART:
            yield at + HEALTH_SECONDS, Health()


def _number(seen: DeviceHealth | Health | None, key: str) -> float | None:
    value = getattr(seen, key) if seen is not None else None
    return float(value) if value is not None else None


def _hang(known: KnownCluster, job: str, name: str, told: Sequence[EventRecord]) -> views.Hang | None:
    """The place where its worker stands still, or stood still last."""
    halted = known.cluster.halts.get(job, {}).get(name)
    if halted is not None and (halted.stack or not halted.waits):
        return views.Hang(
            now=True,
            time=known.heard - halted.seconds,
            step=halted.step,
            place=halted.place,
            stack=halted.stack,
        )
    last = next((event for event in told if event.kind == "halted"), None)
    if last is None:
        return None
    step = last.data.get("step")
    return views.Hang(
        now=False,
        time=last.time,
        step=step if isinstance(step, int) else -1,
        place=str(last.data.get("place", "")),
        stack=str(last.data.get("stack", "")),
    )
