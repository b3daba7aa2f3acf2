"""Draws docs/pictures anew: `python -m tests.dashboard.browser.pictures`, on a machine without other work.

A real cluster with a real job on emulated devices (`Stage`), a device that becomes slow, and a leader that is
killed, each as a Chromium shows it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from playwright.sync_api import expect, sync_playwright

from elasticd.testing.waiting import until
from tests.dashboard.browser.conftest import chromium
from tests.dashboard.browser.pages import Person
from tests.dashboard.browser.stage import JOB, OPERATOR, Stage

PICTURES = Path(__file__).resolve().parents[3] / "docs/pictures"
#: Steps before a device becomes slow, and under the plan that answers it: fewer than a fit takes.
STEPS_BEFORE, STEPS_AFTER = 36, 8
SLOWDOWN = 6.0
WIDTH = 1280


def step(stage: Stage) -> int:
    """The job's newest step, 0 while it makes none."""
    job = stage.job()
    return job.step if job is not None and job.phase == "running" and job.proposal is None else 0


def plan_number(stage: Stage) -> int:
    """The number of the plan in force, 0 while another is proposed."""
    job = stage.job()
    settled = job is not None and job.phase == "running" and job.proposal is None
    return job.plan.number if settled and job is not None and job.plan is not None else 0


def draw(stage: Stage, alice: Person) -> None:
    """Writes the pictures of one run."""

    def picture(name: str, height: int) -> None:
        alice.page.set_viewport_size({"width": WIDTH, "height": height})
        alice.page.wait_for_timeout(1500)  # charts and tables that are asked for after the page itself
        alice.page.screenshot(path=PICTURES / f"dashboard-{name}.png")

    until(lambda: step(stage) >= STEPS_BEFORE)
    before = plan_number(stage)
    stage.chaos(lambda chaos: chaos.slow("alpha/1", SLOWDOWN))
    number = until(lambda: found if (found := plan_number(stage)) > before else 0)
    first = step(stage)
    until(lambda: step(stage) >= first + STEPS_AFTER)
    alice.go(f"/jobs/{JOB}")
    picture("straggler", 820)
    alice.go(f"/jobs/{JOB}/plans/{number}")
    picture("plan", 1060)
    alice.go("/")
    stage.kill_leader()
    expect(alice.page.locator(".banner.warn")).to_contain_text("No coordinator leads")
    picture("away", 500)


def main() -> None:
    """Draws all of them, or says what is missing."""
    program = chromium()
    if program is None:
        sys.exit("there is no Chromium on PATH: apt-get install chromium")
    with tempfile.TemporaryDirectory(prefix="elasticd-pictures-") as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        with Stage(Path(folder)) as stage:
            stage.start_job()
            with Person(browser, stage.url, viewport={"width": WIDTH, "height": 800}) as alice:
                alice.sign_in(OPERATOR)
                draw(stage, alice)
        browser.close()


if __name__ == "__main__":
    main()
