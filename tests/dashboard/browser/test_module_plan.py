"""The page of a plan of two modules: all modules, the places of each device together, one order of passes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from elasticd_planner.problem_files import file_format
from elasticd_planner.problem_files.convert import problem_of
from elasticd_planner.problem_files.solve import solve
from playwright.sync_api import Browser, expect

from elasticd.dashboard import plan_page, views
from elasticd.dashboard.single_file import single_file
from elasticd.records import HistoryRecord

PROBLEM = Path(__file__).parents[3] / "examples/problems/vision_language.json"
NOW = 1_700_000_000.0


def page(folder: Path) -> str:
    """The address of a file with the page of the example's plan, whose device n1/1 is slow."""
    raw = json.loads(PROBLEM.read_text()) | {"rates": {"n1/1": 3.0}}
    given = file_format.load(json.dumps(raw))
    plan = solve(given).plan
    assert plan is not None
    record = HistoryRecord(number=2, problem=problem_of(given), plan=plan, reason="n1/1 is slow")
    row = views.PlanRow(
        number=2,
        time=NOW,
        reason="n1/1 is slow",
        outcome="in force",
        predicted_seconds=1.6,
        first_predicted_seconds=None,
        guessed=False,
        measured_seconds=None,
        steps=0,
        pause_seconds=None,
        bytes_sent=None,
    )
    cluster = views.ClusterView(
        cluster="c",
        leader=views.LeaderView(name="one", url="", epoch=1, reachable=True, since=NOW),
        etcd=views.EtcdView(reachable=True, since=NOW, unwritten_seconds=0.0),
        paused=False,
        heard=NOW,
        now=NOW,
        viewer=views.Viewer(signed_in=True, asks=False),
        nodes=(),
        counts={},
        abnormal=(),
        jobs=(),
        links=(),
    )
    view = plan_page.plan_view(record, None, row, (2,), (), (), None)
    values: dict[str, Any] = {
        "start": "/jobs/j/plans/2",
        "/api/cluster": cluster,
        "/api/jobs/j/plans": {"job": "j", "plans": [row]},
        "/api/jobs/j/plans/2": view,
    }
    file = folder / "plan.html"
    file.write_text(single_file(msgspec.to_builtins(values), "plan"), "utf-8")
    return file.as_uri()


@pytest.mark.slow
def test_a_plan_of_two_modules_has_a_devices_places_together(browser: Browser, tmp_path: Path) -> None:
    found = browser.new_page(viewport={"width": 1400, "height": 900})
    found.goto(page(tmp_path))
    table = found.get_by_role("group", name="Devices and their modules")
    expect(table.get_by_role("columnheader")).to_have_text(
        ["device", "vision", "language", "computes, of the busiest"]
    )
    rows = table.get_by_role("row")
    expect(rows).to_have_count(5)
    first = rows.nth(1).inner_text()
    assert "layers" in first
    assert "100 %" in first, "the busiest device is the first"
    timeline = found.locator("ed-timeline")
    expect(timeline.get_by_text("n1/1", exact=True).first).to_be_visible()
    expect(timeline).to_contain_text("gaps: it waits, or passes another module")
    found.set_viewport_size({"width": 400, "height": 900})
    wide = found.evaluate("document.documentElement.scrollWidth")
    assert wide <= 400
    found.close()
