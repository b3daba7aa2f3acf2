"""The head of a job's page at widths of screens, and the page of a job that is over under another leader."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
from playwright.sync_api import Browser, expect

from elasticd.dashboard import views
from elasticd.dashboard.board import Board
from elasticd.dashboard.history import StepRow
from elasticd.dashboard.job_page import job_view, step_columns
from elasticd.dashboard.single_file import single_file
from elasticd.wire import live_types as live
from tests.dashboard.test_views import JOB, NOW, PLAN, VIEWER, board, job, measured_step, node

NAME = quote(JOB, safe="")


def page(folder: Path, told: Board, steps: views.StepColumns | None = None) -> str:
    """The address of a file with the job's page."""
    values: dict[str, Any] = {
        "start": f"/jobs/{NAME}",
        "/api/cluster": told.hello(VIEWER),
        f"/api/jobs/{NAME}": job_view(told.known, JOB, (), NOW + 10),
    }
    if steps is not None:
        values[f"/api/jobs/{NAME}/steps"] = steps
    file = folder / "job.html"
    file.write_text(single_file(msgspec.to_builtins(values), "job"), "utf-8")
    return file.as_uri()


@pytest.mark.slow
def test_a_running_jobs_name_and_figures_have_a_line_each_at_1280_pixels(
    browser: Browser, tmp_path: Path
) -> None:
    told = board(
        live.put("1:0", "node", "a", node("a", members=2)),
        live.put("1:0", "job", JOB, live.LiveJob(job=job(), plan=3, over=False)),
        live.put("1:0", "plan", JOB, PLAN),
    )
    measured_step(told, 1_234_566, 0.0012, 0.001, predicted_seconds=0.0011)
    found = browser.new_page(viewport={"width": 1280, "height": 900})
    found.goto(page(tmp_path, told))
    figures = found.locator(".page-head .facts > div")
    expect(figures).to_have_count(8)
    expect(figures.nth(3)).to_contain_text("of predicted")
    tops = figures.evaluate_all("all => all.map(each => each.getBoundingClientRect().top)")
    assert len({*tops}) == 1
    for part in ("h1", ".question"):
        element = found.locator(f".page-head {part}")
        line = element.evaluate("each => parseFloat(getComputedStyle(each).lineHeight)")
        box = element.bounding_box()
        assert box is not None
        assert box["height"] < 1.5 * line, f"{part} has one line"
    found.close()


@pytest.mark.slow
def test_a_job_that_is_over_under_another_leader_waits_for_nothing(browser: Browser, tmp_path: Path) -> None:
    """The leader that saw its steps kept what each of them was spent on to itself."""
    status = job(phase="done", step=300)
    told = board(live.put("1:0", "job", JOB, live.LiveJob(job=status, plan=3, over=True)))
    found = browser.new_page(viewport={"width": 1280, "height": 900})
    found.goto(page(tmp_path, told))
    panel = found.locator("section[aria-labelledby=step-title]")
    expect(panel).to_contain_text("Not kept: the leader that saw the job's last step no longer leads.")
    expect(found.locator("main")).not_to_contain_text(" yet")
    expect(found.locator(".page-head .facts")).not_to_contain_text("– of predicted")
    found.close()


@pytest.mark.slow
def test_no_line_is_drawn_over_steps_that_nobody_heard_of(browser: Browser, tmp_path: Path) -> None:
    """The agent that had their reports was killed."""
    rows = [
        StepRow(
            step=step, plan=3, time=NOW + step, tokens=100, seconds=0.5, loss=2.0, predicted=None, bound=None
        )
        for step in (4, 5, 6, 30, 31)
    ]
    told = board(live.put("1:0", "job", JOB, live.LiveJob(job=job(), plan=3, over=False)))
    found = browser.new_page(viewport={"width": 1280, "height": 900})
    found.goto(page(tmp_path, told, step_columns(JOB, rows, None, 1, ())))
    charts = found.locator("ed-chart")
    expect(charts).to_have_count(2)
    for chart in charts.all():
        steps, values = chart.evaluate("each => [each.x, each.curves.at(-1).values]")
        assert steps == [4, 5, 6, 7, 30, 31]
        assert values[3] is None
    assert charts.nth(1).evaluate("each => each.curves[0].values") == [2, 2, 2, None, 2, 2]
    found.close()
