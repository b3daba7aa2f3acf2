"""The leader's metrics: what a scrape shows is what is so, and the dashboard asks for nothing else."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import httpx2
import msgspec
import pytest
from elasticd_planner.spec.measurement import Measurement
from prometheus_client.parser import text_string_to_metric_families

from elasticd.codec import decoding
from elasticd.codec.message import encode
from elasticd.config.credentials import Credentials
from elasticd.coordinator.daemon import Coordinator
from elasticd.coordinator.events import event_pages
from elasticd.coordinator.events.event_log import EventLog
from elasticd.coordinator.events.job_times import JobClock
from elasticd.coordinator.metrics import FAMILIES, LeaderMetrics, LeaderReading
from elasticd.machines.coordinator.machine import CoordinatorState
from elasticd.machines.job.state.job_state import OVER, JobPhase, JobState, Worker, fresh
from elasticd.records import Keys
from elasticd.store.protocol import KeyValue
from elasticd.wire.rendezvous import Leave
from elasticd.wire.step_record import StepRecord
from elasticd.wire.worker import Report, StayedOnPlan
from tests.coordinator.agents import agent, coordinating, until
from tests.machines.cast import FakeWorker, node_record

DASHBOARD = Path(__file__).resolve().parents[2] / "docs" / "grafana" / "elasticd.json"
KEYS = Keys(cluster="test")
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(text: str) -> Samples:
    """Every sample by its name and labels, without the label of its cluster; raises ValueError for text that is
    not the format."""
    return {
        (sample.name, tuple(sorted((k, v) for k, v in sample.labels.items() if k != "cluster"))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def scrape(coordinator: Coordinator) -> Samples:
    async with httpx2.AsyncClient(trust_env=False, timeout=60, verify=Credentials().verifying()) as client:
        answer = await client.get(f"{coordinator.url}/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return samples(answer.text)


def test_a_scrape_shows_nodes_devices_jobs_and_counts() -> None:
    async def body() -> None:
        async with coordinating() as coordinator, agent(coordinator, node_record("alpha")):
            await until(lambda: "alpha" in coordinator.leading.state.nodes)
            found = await scrape(coordinator)
            assert found["elasticd_agents_connected", ()] == 1
            assert found["elasticd_node_connected", (("node", "alpha"),)] == 1
            labels = (("device", "alpha/0"), ("node", "alpha"))
            assert found["elasticd_device_memory_bytes", labels] == 3_000_000
            assert found["elasticd_device_slowdown", labels] == 1.0
            assert found["elasticd_device_rate", labels] == 1.0, "its name before release 0.2"
            assert found["elasticd_events_total", (("kind", "node_up"),)] == 1
            assert found["elasticd_leader_epoch", ()] == coordinator.leading.state.epoch
            assert not any(name.startswith("elasticd_job") for name, _ in found)

            job = fresh("train", JobPhase.RUNNING, 0.0)
            state = coordinator.leading.state
            coordinator.leading.runner.state = CoordinatorState(
                epoch=state.epoch, nodes=state.nodes, jobs={"train": job}
            )
            found = await scrape(coordinator)
            assert found["elasticd_job_phase", (("job", "train"), ("phase", "running"))] == 1
            assert found["elasticd_job_phase", (("job", "train"), ("phase", "done"))] == 0
            assert found["elasticd_job_plan_number", (("job", "train"),)] == 0
            assert found["elasticd_http_requests_total", (("status", "200"),)] == 1, "the first scrape"

    asyncio.run(body())


def test_messages_are_counted_by_type_and_the_refused_by_reason() -> None:
    async def body() -> None:
        async with coordinating() as coordinator, agent(coordinator, node_record("alpha")) as alpha:
            await until(lambda: "alpha" in coordinator.leading.state.nodes)
            await alpha.tell(FakeWorker(device="alpha/0", incarnation="a").up(StayedOnPlan(number=1, step=0)))
            async with agent(coordinator, node_record("alpha", agent="other")) as impostor:
                await until(lambda: bool(impostor.rejected))
            async with agent(coordinator, node_record("beta")) as beta:
                await beta.socket.send(b"nonsense")
                await until(lambda: beta.closed)
            found = await scrape(coordinator)
            assert found["elasticd_agent_messages_total", (("type", "stayed-on-plan"),)] == 1
            assert found["elasticd_message_handling_seconds_count", ()] == 1
            assert found["elasticd_refused_total", (("reason", "hello"),)] == 1
            assert found["elasticd_refused_total", (("reason", "unreadable"),)] == 1

    asyncio.run(body())


def test_what_is_skipped_is_counted_by_kind() -> None:
    worker = FakeWorker(device="alpha/0", incarnation="a")
    known = encode(worker.up(StayedOnPlan(number=1, step=0)))
    sent = {
        "message": known.replace(b"stayed-on-plan", b"stayed-longer"),
        "content": known.replace(b'"number":1', b'"number":"one"'),
        "field": encode(worker.up(Leave(job="j"))).replace(b'"job":"j"', b'"job":"j","why":"x"'),
    }

    async def body() -> None:
        async with coordinating() as coordinator, agent(coordinator, node_record("alpha")) as alpha:
            await until(lambda: "alpha" in coordinator.leading.state.nodes)
            before = await scrape(coordinator)
            for data in sent.values():
                await alpha.socket.send(data)
                await alpha.socket.send(data)
            await alpha.tell(worker.up(StayedOnPlan(number=1, step=0)))
            heard = ("elasticd_agent_messages_total", (("type", "stayed-on-plan"),))
            while (found := await scrape(coordinator)).get(heard) is None:
                await asyncio.sleep(0.01)

            def more(kind: str) -> float:
                name = ("elasticd_skipped_total", (("kind", kind),))
                return found[name] - before[name]

            assert (more("message"), more("content")) == (2, 2)
            assert more("field") == 1, "one message of a kind is looked at in a second"
            assert (more("key"), more("record"), more("setting")) == (0, 0, 0)

    decoding._next_look.clear()
    asyncio.run(body())


def test_what_is_skipped_of_the_store_is_counted_though_it_is_logged_once() -> None:
    before = decoding.skipped()
    for _ in range(3):
        assert KEYS.note_unknown(KEYS.root + "quotas/a")
        key = KEYS.journal + event_pages._name(1)
        page = KeyValue(key=key, value=b"{", create_revision=1, mod_revision=1, version=1)
        assert list(event_pages.Pages(KEYS, [page]).restored()) == []
    after = decoding.skipped()
    assert {kind: after[kind] - before[kind] for kind in after if after[kind] != before[kind]} == {
        "key": 3,
        "record": 3,
    }


def test_the_dashboard_asks_for_metrics_that_are_there_and_for_each_of_them() -> None:
    metrics = LeaderMetrics("test")
    metrics.message("Up", 0.01)
    metrics.refused("silent")
    metrics.event("swapped")
    metrics.request(200)
    text = metrics.text(LeaderReading(state=CoordinatorState(epoch=1))).decode()
    families = {line.split()[2] for line in text.splitlines() if line.startswith("# HELP")}
    families = {name for name in families if not name.endswith("_created")}  # when each count began
    families.remove("elasticd_device_rate")  # the name of a slowdown before release 0.2
    samples_of = families | {f"{name}_bucket" for name in families}
    asked = set(re.findall(r"elasticd_[a-z_]+", json.dumps(json.loads(DASHBOARD.read_text())["panels"])))
    assert asked - samples_of == set(), "the dashboard asks for what is not there"
    shown = {name.removesuffix("_bucket") for name in asked}
    assert families - shown == set(), "a metric is not shown"


@pytest.mark.parametrize(
    ("phase", "requested", "orderly", "failed"),
    [
        (JobPhase.RUNNING, False, False, 0),
        (JobPhase.DONE, False, False, 0),
        (JobPhase.STOPPED, True, False, 0),
        (JobPhase.STOPPED, False, True, 0),
        (JobPhase.STOPPED, False, False, 1),
    ],
)
def test_a_job_that_somebody_stopped_has_not_failed(
    phase: JobPhase, requested: bool, orderly: bool, failed: int
) -> None:
    job = fresh("j", phase, 0.0).changed("ending", requested=requested, orderly=orderly)
    state = CoordinatorState(epoch=1, jobs={"j": job})
    found = samples(LeaderMetrics("test").text(LeaderReading(state=state, now=115.0)).decode())
    assert found["elasticd_job_failed", (("job", "j"),)] == failed
    rules = DASHBOARD.with_name("alerts.yaml").read_text()
    assert 'phase="stopped"' not in rules


def test_each_series_has_the_label_of_its_cluster_and_each_panel_asks_for_it() -> None:
    metrics = LeaderMetrics("mine")
    metrics.message("Up", 0.01)
    metrics.refused("silent")
    job = msgspec.structs.replace(fresh("j", JobPhase.RUNNING, 0.0))
    text = metrics.text(LeaderReading(state=CoordinatorState(epoch=1, jobs={"j": job}))).decode()
    found = [s for family in text_string_to_metric_families(text) for s in family.samples]
    assert {"elasticd_refused_total", "elasticd_message_handling_seconds_bucket", "elasticd_job_step"} < {
        sample.name for sample in found
    }
    assert {sample.labels["cluster"] for sample in found} == {"mine"}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    asked = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    for expression in asked:
        selectors = re.findall(r"elasticd_[a-z_]+(\{[^}]*\})?", expression)
        assert all('cluster=~"$cluster"' in selector for selector in selectors), expression


def test_alert_rules_ask_for_metrics_that_are_there_and_name_a_page() -> None:
    rules = DASHBOARD.with_name("alerts.yaml").read_text()
    known = {*FAMILIES, *(f"{name}_total" for name, known in FAMILIES.items() if known.type == "counter")}
    asked = set(re.findall(r"\belasticd_[a-z_]+", rules))
    assert asked - known == set(), "an alert asks for what is not there"
    alerts = re.findall(r"- alert: (\w+)", rules)
    assert len(alerts) == len(set(alerts)) == rules.count("page: ")
    pages = re.findall(r"page: \"?(/[^\s\"]*)", rules)
    assert {page.split("{")[0] for page in pages} <= {"/", "/jobs/", "/devices/", "/events"}


def test_the_time_of_a_job_is_in_the_metrics_as_on_its_page() -> None:
    clock = JobClock()
    clock.event("job_gathered", {}, 0.0)
    clock.event("proposed", {"number": 1}, 0.0)
    for step in range(8):
        clock.step(StepRecord(step=step, plan=1, loss=1.0, tokens=10, seconds=1.0, time=100.0 + step))
    clock.event("fenced", {}, 0.0)
    clock.event("proposed", {"number": 2}, 0.0)
    clock.event("swapped", {"bytes_sent": 7}, 0.0)
    clock.step(StepRecord(step=6, plan=2, loss=1.0, tokens=10, seconds=1.0, time=113.0))
    reading = clock.reading
    job = fresh("j", JobPhase.RUNNING, 0.0)
    state = CoordinatorState(epoch=1, jobs={"j": job})
    seen = LeaderReading(state=state, clocks={"j": reading}, now=115.0)
    text = LeaderMetrics("test").text(seen).decode()
    found = samples(text)
    labels = (("job", "j"),)
    assert found["elasticd_job_stalled_seconds", labels] == 2.0
    assert found["elasticd_job_repeated_steps_total", labels] == 2
    assert found["elasticd_job_moved_bytes_total", labels] == 7
    assert found["elasticd_job_replans_total", (("job", "j"), ("reason", "fault"))] == 1
    assert found["elasticd_job_replans_total", (("job", "j"), ("reason", "start"))] == 1
    assert found["elasticd_job_lost_seconds_total", (("cause", "recovery"), ("job", "j"))] == 5.0
    assert found["elasticd_job_lost_seconds_total", (("cause", "repeated steps"), ("job", "j"))] == 2.0
    assert found["elasticd_job_ettr", labels] == pytest.approx(7 / 16)


def test_the_age_of_the_newest_checkpoint_and_of_a_wish_to_stop_are_metrics_of_a_job_that_runs() -> None:
    clock, labels = JobClock(), (("job", "j"),)
    clock.step(StepRecord(step=0, plan=1, loss=1.0, tokens=10, seconds=1.0, time=101.0))
    running, replace = fresh("j", JobPhase.RUNNING, 0.0), msgspec.structs.replace
    worker = Worker(device="a/0", incarnation="i", node="a", client="c", pid=1, saves_now=True)

    def scraped(job: JobState, now: float) -> Samples:
        state = CoordinatorState(epoch=1, jobs={"j": job})
        seen = LeaderReading(state=state, clocks={"j": clock.reading}, now=now, listeners=3)
        return samples(LeaderMetrics("test").text(seen).decode())

    found = scraped(running, 150.0)
    assert ("elasticd_job_checkpoint_age_seconds", labels) not in found, "it has no folder for checkpoints"
    assert found["elasticd_job_stopping_seconds", labels] == 0.0
    assert found["elasticd_live_listeners", ()] == 3
    able = replace(running, workers={worker.device: worker})
    assert scraped(able, 150.0)["elasticd_job_checkpoint_age_seconds", labels] == 50.0, "since its first step"
    clock.event("checkpoint", {"step": 1}, 140.0)
    clock.event("checkpoint", {"step": 2}, 145.0)
    clock.event("stopping", {"by": "alice"}, 147.0)
    found = scraped(able.changed("ending", stopping="stopped by alice"), 150.0)
    assert found["elasticd_job_checkpoint_age_seconds", labels] == 5.0
    assert found["elasticd_job_stopping_seconds", labels] == 3.0
    found = scraped(replace(able, phase=JobPhase.STOPPED).changed("ending", stopping="stopped by alice"), 150.0)
    assert ("elasticd_job_stopping_seconds", labels) not in found
    assert ("elasticd_job_checkpoint_age_seconds", labels) not in found, "an old job alarms nobody"


#: What is told of a job that is over.
LASTING = {
    "elasticd_job_phase",
    "elasticd_job_failed",
    "elasticd_job_step",
    "elasticd_job_loss",
    "elasticd_job_lost_seconds_total",
    "elasticd_job_repeated_steps_total",
    "elasticd_job_moved_bytes_total",
    "elasticd_job_replans_total",
}


def exposed(phase: JobPhase, now: float, *, orderly: bool) -> str:
    """The metrics that a leader exposes of a job "j" whose steps took a tenth of each of 12 seconds."""
    journal = EventLog()
    for step in range(12):
        measurement = Measurement(
            device="a/0", plan=1, step=step, tokens=40, block_seconds=0.1, block_work=1.0, step_seconds=0.1
        )
        journal.report("j", Report(measurement=measurement, loss=2.0, tokens=40), 100.0 + step)
    job = fresh("j", phase, 0.0).changed("ending", orderly=orderly)
    state = CoordinatorState(epoch=1, jobs={"j": job})
    seen = LeaderReading(state=state, clocks=journal.readings, now=now, listeners=1)
    return LeaderMetrics("test").text(seen).decode()


@pytest.mark.parametrize("phase", list(JobPhase))
def test_a_job_that_is_over_has_no_speed_no_devices_and_no_ettr_any_more(phase: JobPhase) -> None:
    text = exposed(phase, 900.0, orderly=True)
    found = {name for name, labels in samples(text) if ("job", "j") in labels}
    if phase in OVER:
        assert found == LASTING
        assert samples(text)["elasticd_job_failed", (("job", "j"),)] == 0, "its workers were told to go"
    else:
        speed = {"elasticd_job_ettr", "elasticd_job_tokens_per_second", "elasticd_job_wall_step_seconds"}
        assert found > LASTING | speed | {"elasticd_job_members", "elasticd_job_stalled_seconds"}
