"""A job that the cluster has forgotten: its page and its report are made from the history."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from elasticd.client import ApiClient, CannotReach
from elasticd.config.tree import DashboardSection
from elasticd.dashboard.board import Board
from elasticd.dashboard.history import opened
from elasticd.dashboard.report import NoReport, of_history, report_values
from elasticd.wire.api_types import JobStatus
from elasticd.wire.event_record import EventRecord
from elasticd.wire.live_types import LiveJob
from elasticd.wire.step_record import StepRecord
from tests.coordinator.agents import coordinating
from tests.dashboard.serving import Page, serving

NOW = time.time() - 3600.0


def running(body: Any) -> None:
    asyncio.run(body())


def event(number: int, kind: str, text: str, **data: Any) -> EventRecord:
    return EventRecord(id=number, time=NOW + number, kind=kind, job="night", text=text, data=data)


def keep(path: Path) -> None:
    """The history of a job that trained eight steps, was stopped and forgotten, and of an earlier one."""
    writer = opened(path)
    with writer.together():
        writer.put_event(event(1, "finished", "all 100 steps are trained"))
        writer.put_event(event(2, "checkpoint", "of the earlier one", step=99, name="step-99"))
        writer.put_event(event(3, "forgotten", "the earlier one"))
        for step in range(8):
            writer.put_step(
                "night", StepRecord(step=step, plan=1, loss=2.5, tokens=100, seconds=0.5, time=NOW + 10 + step)
            )
        writer.put_event(event(20, "checkpoint", "step 7", step=7, name="step-7"))
        writer.put_event(event(21, "stopped", "stopped: stopped by alice, after 8 steps", orderly=True))
        writer.put_event(event(22, "forgotten", "what the cluster kept of it is deleted"))
    writer.close()


def test_its_page_says_how_it_ended_and_a_job_that_never_was_is_not_there(tmp_path: Path) -> None:
    keep(tmp_path / "history.db")

    async def body() -> None:
        async with (
            coordinating() as coordinator,
            serving(coordinator, tmp_path) as dashboard,
            Page(dashboard.url) as page,
        ):
            found = await page.json("/api/jobs/night")
            head = found["head"]
            assert (head["job"], head["phase"], head["step"]) == ("night", "stopped", 8)
            assert "stopped by alice" in head["sentence"]
            assert "forgotten" in head["sentence"]
            assert head["tokens_per_second"] == 100.0, "of wall time"
            assert head["within_steps"] == 200.0
            assert [kept["name"] for kept in found["kept"]] == ["step-7"], "not the earlier job's"
            assert len((await page.json("/api/jobs/night/steps"))["step"]) == 8
            none = await page.get("/api/jobs/never")
            assert none.status_code == 404
            assert "night" in none.json()["error"]

    running(body)


def test_its_report_is_there(tmp_path: Path) -> None:
    keep(tmp_path / "history.db")

    @contextmanager
    def nobody() -> Iterator[ApiClient]:
        raise CannotReach("nobody leads")
        yield

    filled = of_history(tmp_path / "history.db", nobody, DashboardSection())
    values = report_values("night", filled, nobody)
    assert values["start"] == "/jobs/night"
    assert values["/api/jobs/night"]["head"]["phase"] == "stopped"
    with pytest.raises(NoReport, match="there is no job 'never'"):
        report_values("never", filled, nobody)


def news_of(job: str, phase: str) -> LiveJob:
    status = JobStatus(
        job=job,
        phase=phase,
        reason="a fault",
        plan=None,
        proposal=None,
        step=8,
        loss=2.5,
        tokens_per_second=100.0,
        members=(),
    )
    return LiveJob(job=status, plan=1, over=False)


def test_its_report_is_about_no_other_job(tmp_path: Path) -> None:
    keep(tmp_path / "history.db")

    @contextmanager
    def nobody() -> Iterator[ApiClient]:
        raise CannotReach("nobody leads")
        yield

    def filled(copy: Path) -> Board:
        board = of_history(tmp_path / "history.db", nobody, DashboardSection())(copy)
        board.known.cluster.jobs = {name: news_of(name, "recovering") for name in ("day", "night")}
        return board

    cluster = report_values("night", filled, nobody)["/api/cluster"]
    assert [row["job"] for row in cluster["jobs"]] == ["night"]
    assert [row["name"] for row in cluster["abnormal"]] == ["night"]


@pytest.mark.parametrize("number", ["9" * 23, "9" * 5000, "x", "-" * 3])
def test_a_number_that_no_plan_has_is_refused_in_words(number: str, tmp_path: Path) -> None:
    async def body() -> None:
        async with (
            coordinating() as coordinator,
            serving(coordinator, tmp_path) as dashboard,
            Page(dashboard.url) as page,
        ):
            answer = await page.get(f"/api/jobs/a/plans/{number}")
            assert answer.status_code == 400
            assert "number" in answer.json()["error"]

    running(body)
