"""The pages over a real job: what is slow, replanned, killed or away is shown without a reload; who may act."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")

from playwright.sync_api import Browser, expect

from elasticd.cli.app import elasticd
from elasticd.client import Api
from elasticd.testing.waiting import until
from tests.dashboard.browser.pages import Person, figure
from tests.dashboard.browser.stage import JOB, OPERATOR, VIEWER, Stage

PAGES = (
    "/",
    f"/jobs/{JOB}",
    f"/jobs/{JOB}/plans/1",
    f"/jobs/{JOB}/switch",
    "/devices/alpha/1",
    "/events",
    "/act",
)


@pytest.fixture(scope="module")
def stage(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with Stage(tmp_path_factory.mktemp("stage"), coordinators=2) as made:
        made.start_job()
        yield made


@pytest.fixture
def alice(browser: Browser, stage: Stage) -> Iterator[Person]:
    """An operator."""
    with Person(browser, stage.url) as person:
        person.sign_in(OPERATOR)
        yield person


def plan_number(api: Api) -> int:
    found = api.status().job(JOB)
    return found.plan.number if found is not None and found.plan is not None else 0


def settled(stage: Stage, above: int = 0) -> int:
    """Waits until the job trains under a plan above this one; its number."""

    def trains() -> int:
        found = stage.job()
        ready = (
            found is not None and found.phase == "running" and found.proposal is None and found.plan is not None
        )
        return found.plan.number if ready and found.plan.number > above else 0  # type: ignore[union-attr]

    return until(trains, lambda: stage.asked(lambda api: [event.text for event in api.events()])[-12:])


@pytest.mark.slow
def test_slow_device_is_shown_and_replanned_around_without_a_reload(alice: Person, stage: Stage) -> None:
    """On the heat map, in the table, among the events; then the plan, its mark and its reason."""
    page, before = alice.page, settled(stage)
    expect(page.get_by_role("rowheader", name=JOB)).to_be_visible()
    stage.chaos(lambda chaos: chaos.slow("alpha/1", 3.0))
    row = alice.row("alpha/1")
    expect(row).to_contain_text("slow")
    expect(row).to_contain_text("x")
    told = next(each for each in stage.asked(lambda api: api.events()) if each.kind == "slow")
    slowdown = figure(row.get_by_role("cell").nth(1).inner_text())
    assert slowdown > 1.5
    cell = page.locator('[data-device="alpha/1"]')
    expect(cell).to_have_class([r"device s3", r"s4"][0] if slowdown < 2.5 else "device s4")
    number = settled(stage, before)
    alice.go("/events")
    expect(page.locator(f"#event-{told.id}")).to_contain_text("alpha/1")
    alice.go(f"/jobs/{JOB}")
    expect(page.get_by_label("Marks")).to_contain_text(f"plan {number}")
    page.get_by_role("link", name=f"Plan {number}, and why").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text(f"Plan {number}")
    command = ["why", "--job", JOB, str(number), "--config", str(stage.configuration("operator"))]
    said = CliRunner().invoke(elasticd, command, env={"COLUMNS": "200"}).output
    assert f"plan {number}" in said
    assert f"plan {number}" in page.locator("pre.why").inner_text()
    assert not alice.reloaded
    stage.chaos(lambda chaos: chaos.recover("alpha/1"))


void = (subprocess, sys, time, Path, msgspec, VIEWER, PAGES)
