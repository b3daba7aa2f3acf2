"""The pages of a real job: a device is slowed, the job switches plans, and pages say what the leader says."""

from __future__ import annotations

import asyncio
import io
import threading
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import httpx2
import pytest
from rich.console import Console

from elasticd.cli.why import plan as why_plan
from elasticd.client import ApiClient
from elasticd.config.credentials import Credentials
from elasticd.config.tree import with_overrides
from elasticd.dashboard import views
from elasticd.dashboard.daemon import Dashboard
from elasticd.testing.waiting import until
from tests.coordinator.test_metrics import samples
from tests.dashboard.serving import Stream
from tests.integration.cluster import JOB, Cluster
from tests.integration.test_switch import PLANS, SCRIPT, SETTINGS


class Stage:
    """A cluster, its job, and the dashboard before it."""

    def __init__(self, cluster: Cluster, dashboard: Dashboard, stream: Stream) -> None:
        self.cluster, self.dashboard, self.stream = cluster, dashboard, stream
        self._client = httpx2.Client(
            base_url=dashboard.url, trust_env=False, timeout=60, verify=Credentials().verifying()
        )

    def get(self, path: str) -> Any:
        answer = self._client.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def metrics(self) -> dict[Any, float]:
        return samples(self.cluster.coordinator.leading.exposition().decode())

    def until(self, path: str, wanted: Callable[[Any], bool]) -> Any:
        found: list[Any] = []

        def there() -> bool:
            found[:] = [self.get(path)]
            return wanted(found[0])

        until(there, lambda: f"{path}: {found}")
        return found[0]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """After a slowed device and the switch that answers it."""
    folder = tmp_path_factory.mktemp("dashboard")
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def call(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    with Cluster({"a": 3, "b": 2}, plans=PLANS, settings=SETTINGS) as cluster:
        options = {"dashboard.port": 0, "dashboard.history": str(folder / "history.db")}
        dashboard = Dashboard(with_overrides(cluster.config, options), cluster.coordinator.url)
        call(dashboard.start())
        stream = Stream(dashboard.url)
        try:
            cluster.run(SCRIPT)
            cluster.runs(1, 6)
            cluster.slow("a/1")
            cluster.runs(2, 6)
            yield Stage(cluster, dashboard, stream)
            cluster.finish()
        finally:
            stream.close()
            call(dashboard.stop())
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10)


def test_the_heat_map_the_table_and_the_stream_show_the_slow_device(stage: Stage) -> None:
    found = stage.until("/api/cluster", _shows_what_was_said(lambda: _rates(stage)))
    cells = {cell["name"]: cell for node in found["nodes"] for cell in node["devices"]}
    assert cells["a/1"]["slowdown"] > 1
    assert cells["a/1"]["state"] == "slow"
    assert cells["a/2"]["state"] == "standby"
    assert cells["a/1"]["place"] == [0, 0, 0, 0, 1]
    (row,) = [row for row in found["abnormal"] if row["name"] == "a/1"]
    assert "chaos slows it" in row["why"]
    told = [cell for event in stage.stream.of("devices") for cell in event["devices"]]
    assert any(cell["name"] == "a/1" and cell.get("state") == "slow" for cell in told)


def _slowdowns(view: Any) -> dict[str, float]:
    return {cell["name"]: cell.get("slowdown", 1.0) for node in view["nodes"] for cell in node["devices"]}


def _shows_what_was_said(said: Callable[[], dict[str, float]]) -> Callable[[Any], bool]:
    """Whether each slowdown of a page is one that the leader had at this look or at one before: the job trains
    on, and the page may be a moment behind."""
    had: dict[str, set[float]] = defaultdict(set)

    def shows(view: Any) -> bool:
        for device, slowdown in (now := said()).items():
            had[device].add(slowdown)
        slowdowns = _slowdowns(view)
        return slowdowns.keys() >= now.keys() and all(slowdowns[device] in had[device] for device in now)

    return shows


def _rates(stage: Stage) -> dict[str, float]:
    status = stage.cluster.call(stage.cluster.coordinator.status())
    return {device.name: device.rate for node in status.nodes for device in node.devices}


def test_the_pages_numbers_are_those_of_the_metrics(stage: Stage) -> None:
    metrics = stage.metrics()
    labels = (("job", JOB),)
    before = metrics["elasticd_job_step", labels]
    view = stage.until(f"/api/jobs/{JOB}", lambda view: view["head"]["step"] >= before)
    assert metrics["elasticd_job_plan_number", labels] == view["head"]["plan"] == 2
    assert metrics["elasticd_job_members", labels] == view["head"]["devices"]
    assert metrics["elasticd_job_standby", labels] == view["head"]["standby"]
    later = stage.metrics()
    assert (
        metrics["elasticd_job_step", labels] <= view["head"]["step"] <= later["elasticd_job_step", labels] + 1
    )
    for cause, seconds in {each["cause"]: each["seconds"] for each in view["lost"]}.items():
        if cause != "stalled now":
            key = ("elasticd_job_lost_seconds_total", (("cause", cause), ("job", JOB)))
            assert metrics[key] - 1e-6 <= seconds + 30.0
    assert abs(view["head"]["ettr"] - later["elasticd_job_ettr", labels]) < 0.2
    assert 0 < view["head"]["goodput"] <= view["head"]["ettr"] <= 1
    device = (("device", "a/1"), ("node", "a"))
    stage.until(
        "/api/cluster",
        _shows_what_was_said(lambda: {"a/1": stage.metrics()["elasticd_device_slowdown", device]}),
    )


def test_the_last_step_is_shown_stage_by_stage(stage: Stage) -> None:
    view = stage.until(f"/api/jobs/{JOB}", lambda view: len(view["stages"]) == 2)
    for row in view["stages"]:
        assert set(row["seconds"]) <= set(views.PARTS)
        assert sum(row["seconds"].values()) == pytest.approx(row["total"], rel=0.2)
        assert row["slowest"] in row["devices"]
    assert view["stages"][0]["layers"] == "0"
    assert view["batch"]["samples"] == 6
    assert view["lengths"]["now"]
    members = {row["device"]: row for row in view["members"]}
    assert members["a/0"]["rank"] == 0
    assert members["a/2"]["role"] == "standby"


def test_the_plans_page_says_why_in_the_words_of_the_command(stage: Stage) -> None:
    view = stage.until(f"/api/jobs/{JOB}/plans/2", lambda view: view["row"]["steps"] >= 3)
    with ApiClient(stage.cluster.coordinator.url, Credentials()) as api:
        (record,) = [each for each in api.history(JOB) if each.number == 2]
        console = Console(width=400, record=True, file=io.StringIO(), highlight=False, markup=False)
        console.print(*why_plan(record, api.events(), api.steps(JOB).steps), sep="\n")
        command = {line.strip() for line in console.export_text().splitlines()}
    lines = [line.strip() for line in view["why"].splitlines()]
    changing = ("took", "gained")  # they count the steps so far
    for line in lines:
        if not line.startswith(changing):
            assert line in command
    assert any(line.startswith("measured  a/1 takes") for line in lines)
    assert [row["number"] for row in stage.get(f"/api/jobs/{JOB}/plans")["plans"]] == [2, 1]


def test_the_plans_page_has_its_picture_schedule_difference_and_communication(stage: Stage) -> None:
    view = stage.get(f"/api/jobs/{JOB}/plans/2")
    (pipeline,) = view["pipelines"]
    assert [box["devices"] for box in pipeline["stages"]] == [["a/0", "a/1"], ["b/0", "b/1"]]
    assert pipeline["stages"][0]["shares"] == [0.75, 0.25]
    assert view["idle"] == ["a/2"]
    (lane,) = view["timeline"]
    assert lane["seconds"] == pytest.approx(max(one["stop"] for stage in lane["stages"] for one in stage))
    assert view["diff"]["before"] == 1
    moving = {row["device"]: row for row in view["diff"]["devices"]}
    assert moving["a/2"]["after"] == "idle"
    assert view["diff"]["bytes_sent"] >= view["diff"]["bytes_lacking"] * 0.9
    assert view["diff"]["bytes_lacking"] > 0
    assert {row["purpose"] for row in view["communications"]} >= {"activations", "tensor parallelism"}
    assert not view["communications_missing"]
    first = stage.get(f"/api/jobs/{JOB}/plans/1")
    assert first["diff"] is None
    assert len(first["pipelines"]) == 2


def test_the_switch_has_a_row_for_each_rank_and_was_told_as_it_went(stage: Stage) -> None:
    view = stage.until(f"/api/jobs/{JOB}/switch", lambda view: view["phase"] == "done")
    assert view["number"] == 2
    rows = {row["device"]: row for row in view["ranks"]}
    assert set(rows) == {"a/0", "a/1", "a/2", "b/0", "b/1"}
    assert rows["a/2"]["rank"] == -1, "it leaves"
    for row in rows.values():
        assert 0 <= row["prepared"] <= row["moved"]
        assert row["pause"] > 0
    assert view["pause"] == max(row["pause"] for row in rows.values())
    phases = [event["phase"] for event in stage.stream.of("progress") if event["number"] == 2]
    assert phases[-1] == "done"
    assert phases[0] in ("preparing", "voting")
    assert stage.get(f"/api/jobs/{JOB}/switch?number=1")["number"] == 1


def test_steps_have_predictions_bounds_and_marks(stage: Stage) -> None:
    columns = stage.get(f"/api/jobs/{JOB}/steps")
    assert columns["step"] == sorted(columns["step"])
    assert {len(columns[name]) for name in ("step", "time", "plan", "seconds", "loss", "bound")} == {
        len(columns["step"])
    }
    assert set(columns["plan"]) == {1, 2}
    assert columns["bound"][-1] is not None
    kinds = {mark["kind"] for mark in columns["marks"]}
    assert {"plan", "slow", "change"} <= kinds
    last = columns["step"][-4]
    assert min(stage.get(f"/api/jobs/{JOB}/steps?since={last}")["step"]) > last


def test_the_devices_page_shows_its_slowdown_thresholds_and_episodes(stage: Stage) -> None:
    view = stage.until(
        "/api/devices/a/1", lambda view: max(each or 0 for each in [0, *view["slowdown"]["measured"]]) > 2
    )
    assert view["thresholds"]["slow"] == 1.1
    assert view["episodes"][0]["slowdown"] > 2
    assert view["kind"] == "transient"
    assert view["use"].startswith("pipeline 0, layers 0, 2 of 8 shares")
    assert view["parts"]["forward"] > 0
    assert any(number == 2 for number, _, _ in view["plans"])
    assert any(event["kind"] == "slow" for event in view["events"])


def test_events_are_grouped_from_the_cause_to_the_plan(stage: Stage) -> None:
    page = stage.get("/api/events?limit=500")
    groups = {group["plan"]: group for group in page["groups"] if "recorded" in group["durations"]}
    group = groups[2]
    kinds = [event["kind"] for event in group["events"]]
    assert kinds.index("slow") < kinds.index("proposed") < kinds.index("recorded")
    assert "a/1" in group["title"]
    assert set(group["durations"]) >= {"proposed", "recorded"}
