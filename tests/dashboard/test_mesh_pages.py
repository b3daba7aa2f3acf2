"""A job on a mesh as status, why, history, top, plan and the dashboard show it."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console, RenderableType

from elasticd.cli import history, top, why
from elasticd.cli.status import screen
from elasticd.coordinator.live_feed import measurements
from elasticd.coordinator.status import status
from elasticd.dashboard import job_page, plan_page
from elasticd.dashboard.history import in_brief
from elasticd.dashboard.known import KnownCluster, balanced_seconds, table_of
from elasticd.explain.why import use
from elasticd.records import MeshHistoryRecord, decode_history
from elasticd.wire.api_types import ClusterStatus, LeaderStatus
from tests.machines.cast import JOB
from tests.machines.checked import KEYS
from tests.machines.meshed import Meshed
from tests.machines.test_drain import train_until


@pytest.fixture(scope="module")
def slow() -> Meshed:
    """A job of which one rank became slow, and got fewer samples."""
    world = Meshed("shard")
    world.start()
    world.settle()
    world.train(3)
    world.rates["alpha/1"] = 3.0
    train_until(world, lambda: world.mesh.samples == (8, 2, 7, 7))
    world.train(3)
    return world


@pytest.fixture(scope="module")
def records(slow: Meshed) -> list[MeshHistoryRecord]:
    items = slow.store.snapshot(KEYS.job(JOB, "history/")).items
    found = [decode_history(item.value) for item in items]
    assert all(isinstance(record, MeshHistoryRecord) for record in found)
    return found  # type: ignore[return-value]


@pytest.fixture(scope="module")
def cluster(slow: Meshed) -> ClusterStatus:
    leader = LeaderStatus(name="c", url="http://c", epoch=1)
    return status(slow.state, "test", leader, (), slow.now, slow.now, {})


def shown(*parts: RenderableType) -> str:
    screened = io.StringIO()
    Console(width=160, file=screened).print(*parts, sep="\n")
    return screened.getvalue()


def test_status_and_top_draw_the_lanes_and_their_samples(cluster: ClusterStatus) -> None:
    for text in (shown(screen(cluster, {JOB: "a reason"})), shown(top.drawn(cluster, {}, ()))):  # type: ignore[arg-type]
        assert "samples a step" in text
        assert "shard=4" in text
        line = next(line for line in text.splitlines() if "alpha/1 3x" in line and line.strip().endswith("2"))
        assert line.split()[:2] == ["1", "1"], "its lane, and its place on the mesh"


def test_the_prediction_of_a_mesh_is_no_guess(slow: Meshed, cluster: ClusterStatus) -> None:
    (job,) = cluster.jobs
    assert job.predicted_seconds == pytest.approx(0.81)
    assert not job.prediction_guessed
    assert slow.mesh.prediction is not None


def test_why_tells_the_mesh_its_shares_and_a_rank(
    records: list[MeshHistoryRecord], cluster: ClusterStatus
) -> None:
    text = shown(*why.plan(records[-1], (), (), records[-2]))
    assert "alpha/1 takes 3.00x" in text
    assert "shard=4 on 4 devices; 24 samples a step, by lane alpha/0: 8, alpha/1: 2, beta/0: 7" in text
    assert "810 ms a step" in text
    told = shown(*why.device("alpha/1", JOB, cluster, (), records))
    assert "shard 1; 2 of 24 samples a step" in told
    assert json.loads(json.dumps(why.device_told("alpha/1", JOB, cluster, (), records)["use"])) == use(
        records[-1].plan, "alpha/1"
    )


def test_history_has_a_line_for_each_plan(records: list[MeshHistoryRecord]) -> None:
    text = shown(history.listed(records))
    assert "a mesh of shard=4 on 4 devices" in text
    assert history.told_of(records[-1], ())["guessed"] is False


def test_a_plans_page_has_its_lanes_in_words(records: list[MeshHistoryRecord]) -> None:
    brief = in_brief(records[-1])
    assert brief.rates == {"alpha/1": 3.0}
    row = plan_page.plan_row(brief, heard=1.0, in_force=2, proposed=None, measured={}, told=())
    view = plan_page.plan_view(records[-1], records[-2], row, (1, 2), (), (), None)
    assert "by lane alpha/0: 8, alpha/1: 2" in view.why
    assert view.policy is not None
    assert view.policy.price_seconds == 0.0, "a change of shares alone costs nothing"
    assert "loop communicates on its mesh" in view.communications_missing


def test_a_jobs_page_has_its_lanes_its_batch_and_what_was_measured(slow: Meshed) -> None:
    plan = slow.mesh
    found = {device: slow.report(plan, device).measurement for device in plan.members}
    news = measurements(slow.job, plan, found)
    assert news is not None
    table = table_of(news)
    assert job_page.stages(plan, table) == ()
    assert balanced_seconds(plan, table, {"alpha/1": 3.0}) == pytest.approx(24 * 0.1 / (3 + 1 / 3))
    known = KnownCluster()
    known.cluster.plans[JOB] = plan
    known.cluster.rates = {"alpha/1": 3.0}
    lanes = job_page.lanes(known, JOB)
    assert [(lane.devices, lane.rows, lane.slowdown) for lane in lanes][1] == (("alpha/1",), 2, 3.0)
    batch = job_page.batch(plan, status_of(slow))
    assert batch is not None
    assert (batch.samples, batch.by_pipeline) == (24, (8, 2, 7, 7))


def status_of(world: Meshed):  # type: ignore[no-untyped-def]
    leader = LeaderStatus(name="c", url="http://c", epoch=1)
    return status(world.state, "test", leader, (), world.now, world.now, {}).jobs[0]
