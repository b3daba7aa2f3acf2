"""Alert rules fire for what is wrong, and never for a job that is over: Prometheus itself says so.

Each test scripts what a leader exposes, minute by minute, from the states of its machine and its journal.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from elasticd_planner.detection.links import LinkState
from elasticd_planner.detection.stragglers import DeviceRate, RateState
from elasticd_planner.spec.measurement import Measurement
from prometheus_client.parser import text_string_to_metric_families

from elasticd.coordinator.events.event_log import EventLog
from elasticd.coordinator.metrics import LeaderMetrics, LeaderReading
from elasticd.machines.coordinator import machine
from elasticd.machines.coordinator.machine import CoordinatorState
from elasticd.machines.coordinator.node_links import Links, Measured
from elasticd.machines.job.state.events import AgentDown, AgentUp, CoordinatorNote, CoordinatorTick
from elasticd.machines.job.state.job_state import JobPhase, JobState, Part, Worker, fresh
from elasticd.machines.job.state.parts.job_steps import LeftOut
from elasticd.wire.main_thread import Halted
from elasticd.wire.node_health import DeviceHealth, Health
from elasticd.wire.worker import Report
from tests import sizes
from tests.machines.cast import node_record, spec
from tests.machines.test_snapshot_sets import plan

RULES = Path(__file__).resolve().parents[2] / "docs" / "grafana" / "alerts.yaml"
ALERTS = re.findall(r"- alert: (\w+)", RULES.read_text())
#: What is expected of the exposition for so many minutes, which are more than any rule waits for.
MINUTES = 180
#: Unix seconds at which the tests' leaders begin, and their machines' clock.
BEGAN, CLOCK = 1e9, 5000.0

pytestmark = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool of Prometheus is not installed (apt-get install prometheus)",
)


def fired(folder: Path, scraped: Sequence[str]) -> set[tuple[str, str]]:
    """The alerts that fire at the end, with their cluster, where leaders said this: one text each minute, empty
    where nobody leads."""
    series: dict[str, list[str]] = {}
    for minute, text in enumerate(scraped):
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = ", ".join(f"{name}={json.dumps(value)}" for name, value in sample.labels.items())
                values = series.setdefault(f"{sample.name}{{{labels}}}", ["_"] * len(scraped))
                values[minute] = repr(sample.value)
    for values in series.values():  # a scrape that lacks a series ends it at once
        for at in range(1, len(values)):
            if values[at] == "_" and values[at - 1] not in ("_", "stale"):
                values[at] = "stale"
    end = f"{len(scraped) - 1}m"
    test: dict[str, Any] = {
        "interval": "1m",
        "input_series": [{"series": name, "values": " ".join(values)} for name, values in series.items()],
        "alert_rule_test": [{"eval_time": end, "alertname": alert, "exp_alerts": []} for alert in ALERTS],
    }
    file = folder / "test.json"
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}))
    command = ["promtool", "test", "rules", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    said = done.stdout + done.stderr
    found = set[tuple[str, str]]()
    for part in said.split("alertname: ")[1:]:
        cluster = re.search(r'cluster="([^"]*)"', part)
        found.add((part.partition(",")[0], cluster.group(1) if cluster else ""))
    assert (done.returncode == 0) == (not found), said
    return found


class Script:
    """A leader of a cluster, its journal, and what it exposed, minute by minute."""

    def __init__(self, job: JobState | None = None, cluster: str = "a") -> None:
        self.cluster = cluster
        self.state = CoordinatorState(epoch=1, jobs={job.job: job} if job is not None else {})
        self.journal = EventLog()
        self.metrics = LeaderMetrics(cluster)
        self.scraped: list[str] = []
        self.store_away, self.listeners, self.step = False, 1, 0

    @property
    def now(self) -> float:
        """Unix seconds."""
        return BEGAN + 60.0 * len(self.scraped)

    @property
    def at(self) -> float:
        """Seconds of the machine's clock."""
        return CLOCK + 60.0 * len(self.scraped)

    def set(self, **changes: Any) -> None:
        """Changes fields of job "j"."""
        job = msgspec.structs.replace(self.state.jobs["j"], **changes)
        self.state = msgspec.structs.replace(self.state, jobs={**self.state.jobs, "j": job})

    def change(self, part: Part, **changes: Any) -> None:
        """Changes fields of a part of job "j"."""
        job = self.state.jobs["j"].changed(part, **changes)
        self.state = msgspec.structs.replace(self.state, jobs={**self.state.jobs, "j": job})

    def happens(self, event: Any) -> None:
        self.state, _ = machine.step(self.state, event, self.at)

    def tell(self, kind: Any, **data: Any) -> None:
        self.journal.tell(CoordinatorNote(kind=kind, job="j", text=kind, data=data), self.now)

    def trained(self, seconds: float, ago: float = 0.0, step: int | None = None) -> None:
        """A step of so many seconds was reported, so many seconds before this minute's scrape."""
        index = self.step if step is None else step
        measurement = Measurement(
            device="alpha/0",
            plan=1,
            step=index,
            tokens=40,
            block_seconds=1.0,
            block_work=1.0,
            step_seconds=seconds,
        )
        self.step = index + 1
        self.journal.report("j", Report(measurement=measurement, loss=2.0, tokens=40), self.now - ago)

    def minutes(self, count: int, each: Callable[[Script], None] = lambda script: None) -> Script:
        """So many minutes, with a scrape at the end of each."""
        for _ in range(count):
            each(self)
            self.scraped.append(
                self.metrics.text(
                    LeaderReading(
                        state=self.state,
                        store_away=self.store_away,
                        clocks=self.journal.readings,
                        now=self.now,
                        at=self.at,
                        listeners=self.listeners,
                    )
                ).decode()
            )
        return self

    def nobody_leads(self, minutes: int) -> Script:
        self.scraped += [""] * minutes
        return self

    def another_leads(self, *, journal: bool = True) -> None:
        """A new leader, with what the journal keeps, or without; no agent has come back to it."""
        lines = self.journal.new(10**6, 10**6)
        self.journal, self.metrics = EventLog(), LeaderMetrics(self.cluster)
        if journal and lines is not None:
            self.journal.restore(lines)
        self.state = msgspec.structs.replace(self.state, epoch=self.state.epoch + 1, nodes={})
        self.set(since=self.at, workers={})


def trains(script: Script) -> None:
    script.trained(30.0, ago=30.0)
    script.trained(30.0)


def running() -> Script:
    """A job that trains on a node, in steps of half a minute."""
    job = msgspec.structs.replace(fresh("j", JobPhase.RUNNING, CLOCK), plan=plan(["alpha/0", "alpha/1"]))
    script = Script(job)
    script.happens(AgentUp(record=node_record("alpha")))
    return script


def waits(phase: JobPhase) -> Script:
    """A job that does not begin, as somebody does not come."""
    job = fresh("j", phase, CLOCK)
    if phase is JobPhase.GATHERING:
        return Script(job.changed("start", joiners={"alpha": None}))
    return Script(msgspec.structs.replace(job, spec=spec()))


def ends(script: Script, *, reason: str = "", orderly: bool = False) -> None:
    script.set(phase=JobPhase.STOPPED, since=script.at, reason=reason)
    script.change("ending", orderly=orderly)


def hung(script: Script) -> None:
    halted = Halted(job="j", device="alpha/0", incarnation="i", place="loss", seconds=60.0)
    script.set(workers={"alpha/0": worker(halted=halted)})


def worker(**changes: Any) -> Worker:
    return Worker(device="alpha/0", incarnation="i", node="alpha", client="c", pid=1, **changes)


def slow(script: Script) -> None:
    script.change("detection", rates=RateState(devices={"alpha/0": DeviceRate(rate=3.0)}))


def slow_link(script: Script) -> None:
    rates = RateState(devices={"alpha - beta": DeviceRate(rate=3.0)})
    links = Links(
        judged={"probe": LinkState(rates=rates)}, probes={"alpha - beta": Measured(bandwidth=1e9, latency=1e-4)}
    )
    script.state = msgspec.structs.replace(script.state, links=links)


def unwell(pressure: float = 0.0, **of_device: Any) -> Callable[[Script], None]:
    def made(script: Script) -> None:
        health = Health(pressure={"memory": pressure}, devices=(DeviceHealth(name="alpha/0", **of_device),))
        node = msgspec.structs.replace(script.state.nodes["alpha"], health=health)
        script.state = msgspec.structs.replace(script.state, nodes={"alpha": node})

    return made


def replanned(script: Script) -> None:
    trains(script)
    script.tell("slow")
    script.tell("proposed", number=len(script.scraped))


def after(
    change: Callable[[Script], None], minutes: int = 20, then: Callable[[Script], None] = trains
) -> Script:
    """A job that trains for an hour, and for some minutes after a change."""
    script = running().minutes(60, trains)
    change(script)
    return script.minutes(minutes, then)


def silence(script: Script) -> None:
    """Nothing happens."""


def again(script: Script) -> None:
    script.step = 0
    script.trained(30.0)


def stalls_over_leaders(*, journal: bool) -> Script:
    """The leader and the only node die together; another one leads."""
    script = running().minutes(60, trains).nobody_leads(1)
    script.another_leads(journal=journal)
    return script.minutes(30)


def of_two(led: Script, other: Script) -> Script:
    """One Prometheus scrapes the leaders of two clusters."""
    led.scraped = ["".join(texts) for texts in zip(led.scraped, other.scraped, strict=True)]
    return led


def node_away(minutes: int) -> Script:
    script = Script()
    script.state = CoordinatorState(
        epoch=1, settings=msgspec.structs.replace(script.state.settings, node_away_seconds=3600.0)
    )
    script.happens(AgentUp(record=node_record("alpha")))
    script.happens(AgentDown(node="alpha"))
    return script.minutes(minutes, lambda script: script.happens(CoordinatorTick()))


def stopping(script: Script) -> None:
    script.tell("stopping", by="alice")
    script.change("ending", stopping="stopped by alice")


def store_away(script: Script) -> None:
    script.store_away = True


def no_dashboard(script: Script) -> None:
    script.listeners = 0


#: What is wrong, and the alerts that say so.
WRONG: dict[str, tuple[Callable[[], Script], str]] = {
    "nobody leads": (lambda: running().minutes(60, trains).nobody_leads(5), "NobodyLeads"),
    "etcd is away": (lambda: after(store_away), "EtcdAway"),
    "no step comes": (lambda: after(silence, 30, silence), "JobStalled LowETTR"),
    "no step comes after a change of leaders": (
        lambda: stalls_over_leaders(journal=True),
        "JobStalled LowETTR",
    ),
    "no step comes, and no journal is left": (lambda: stalls_over_leaders(journal=False), "JobStalled LowETTR"),
    "the first step never comes": (lambda: running().minutes(30), "JobStalled"),
    "torchruns do not come": (lambda: waits(JobPhase.GATHERING).minutes(10), "JobWaits"),
    "workers do not come": (lambda: waits(JobPhase.ASSEMBLING).minutes(10), "JobWaits"),
    "a job failed": (lambda: after(ends, then=silence), "JobFailed"),
    "a stop does not end": (lambda: after(stopping), "StopHangs"),
    "no checkpoint is made": (
        lambda: after(lambda script: script.set(workers={"alpha/0": worker(saves_now=True)}), 30),
        "NoCheckpoint",
    ),
    "no dashboard listens": (lambda: after(no_dashboard), "NoDashboard"),
    "a worker hangs": (lambda: after(hung), "WorkerHangs"),
    "steps change no weight": (
        lambda: after(lambda script: script.change("steps", left_out=LeftOut(first=1, count=9, why="nan"))),
        "NoProgress",
    ),
    "half of the time is lost": (lambda: running().minutes(60, lambda script: script.trained(30.0)), "LowETTR"),
    "steps are made again": (
        lambda: after(again, 2),
        "StepsRepeated",
    ),
    "plans change all the time": (lambda: after(silence, 60, replanned), "ManyReplans"),
    "a device is slow": (lambda: after(slow), "Straggler"),
    "an agent is away": (lambda: node_away(30), "NodeUnreachable"),
    "a link is slow": (lambda: after(slow_link), "SlowLink"),
    "a device is hot": (lambda: after(unwell(temperature=95.0)), "DeviceHot"),
    "a device is held down": (lambda: after(unwell(throttled=("heat",))), "DeviceHot"),
    "a device has errors": (lambda: after(unwell(uncorrected=1)), "DeviceErrors"),
    "work waits for memory": (lambda: after(unwell(pressure=0.9)), "NodePressure"),
}


@pytest.mark.parametrize("what", sizes.beside(["a job failed", "workers do not come"], WRONG))
def test_alert_fires(tmp_path: Path, what: str) -> None:
    script, alerts = WRONG[what]
    expected = {(f"Elasticd{alert}", "a") for alert in alerts.split()}
    assert fired(tmp_path, script().scraped) == expected


def test_each_alert_has_a_state_in_which_it_fires() -> None:
    assert {f"Elasticd{alert}" for _, alerts in WRONG.values() for alert in alerts.split()} == {*ALERTS}


def trains_slowly(script: Script) -> None:
    if len(script.scraped) % 4 == 0:
        script.trained(240.0)


def replaced() -> Script:
    """Another leads after a minute without any, and the job trains on."""
    script = running().minutes(60, trains).nobody_leads(1)
    script.another_leads()
    return script.minutes(30, trains)


def failed_long_ago_and_another_leads() -> Script:
    script = after(ends, 70, silence)
    script.another_leads()
    return script.minutes(5)


#: What nobody need be called for.
WELL: dict[str, Callable[[], Script]] = {
    "a job trains": lambda: running().minutes(MINUTES, trains),
    "steps take four minutes": lambda: running().minutes(100, trains_slowly),
    "a lossy hour is over": lambda: (
        running().minutes(60, lambda script: script.trained(30.0)).minutes(90, trains)
    ),
    "a slow device's job is over": lambda: after(lambda script: (slow(script), ends(script, orderly=True))),
    "a job that was stopped": lambda: after(lambda script: ends(script, orderly=True), then=silence),
    "a failure of more than an hour ago": lambda: after(ends, 70, silence),
    "the same, and another leads": lambda: failed_long_ago_and_another_leads(),
    "a node that is gone for good": lambda: node_away(65),
    "a script that makes no Job": lambda: Script(fresh("j", JobPhase.ASSEMBLING, CLOCK)).minutes(60),
    "a leader is replaced": lambda: replaced(),
}


@pytest.mark.parametrize("what", sizes.beside(["a job trains"], WELL))
def test_nobody_is_called_where(tmp_path: Path, what: str) -> None:
    assert fired(tmp_path, WELL[what]().scraped) == set()


def test_of_two_clusters_the_one_that_nobody_leads_is_named(tmp_path: Path) -> None:
    led = Script(cluster="b").minutes(65)
    assert fired(tmp_path, of_two(led, WRONG["nobody leads"][0]()).scraped) == {("ElasticdNobodyLeads", "a")}


def test_cluster_that_was_never_led_is_told_of(tmp_path: Path) -> None:
    assert fired(tmp_path, [""] * 5) == {("ElasticdNobodyLeads", "")}


def test_jobs_of_one_name_in_two_clusters_are_told_apart(tmp_path: Path) -> None:
    """The stalled one has fast steps; by the other's it would not be late."""
    slow_steps = running()
    slow_steps.cluster, slow_steps.metrics = "b", LeaderMetrics("b")
    slow_steps.minutes(80, trains_slowly)
    script = of_two(after(silence, then=silence), slow_steps)
    assert fired(tmp_path, script.scraped) == {("ElasticdJobStalled", "a")}
