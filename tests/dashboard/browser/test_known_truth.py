"""What pages show as text of a job whose truth is known (`tests.dashboard.known_truth`), in a real browser."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")

from playwright.sync_api import Browser, Page, expect

from tests.dashboard.browser.pages import Person, figure
from tests.dashboard.known_truth import (
    PREDICTED,
    TOKENS,
    Comparison,
    StepTruth,
    known_job,
    own_seconds,
    wall_seconds,
)
from tests.dashboard.known_truth_job import BATCH, LENGTH
from tests.integration.cluster import JOB


@pytest.mark.slow
@pytest.mark.full  # the values of the same pages are compared in tests/dashboard/test_known_truth.py
@pytest.mark.timeout(900)
def test_pages_show_the_jobs_figures(browser: Browser, tmp_path: Path) -> None:
    with known_job(tmp_path) as (job, comparison), Person(browser, job.url) as person:
        truth, page = job.truth, person.page
        page.goto("/jobs")  # it is over
        expect(page.get_by_role("rowheader", name=JOB, exact=True)).to_be_visible()
        compare_cluster(page, truth, comparison)
        page.goto(f"/jobs/{JOB}")
        expect(page.locator("ed-chart canvas").first).to_be_visible()
        compare_job(page, truth, comparison)
        page.goto(f"/jobs/{JOB}/plans/1")
        expect(page.locator("pre.why")).to_be_visible()
        compare_plan(page, truth, comparison)
    assert not comparison.different, "\n".join(comparison.different)


def compare_cluster(page: Page, truth: Sequence[StepTruth], comparison: Comparison) -> None:
    """The row of the job, by the heads of its columns."""
    table = page.get_by_role("table").filter(has=page.get_by_role("columnheader", name="of bound"))
    heads = [head.strip() for head in table.get_by_role("columnheader").all_inner_texts()]
    row = table.get_by_role("row").filter(has=page.get_by_role("rowheader", name=JOB, exact=True))
    cells = dict(zip(heads[1:], row.get_by_role("cell").all_inner_texts(), strict=True))
    last, wall = truth[-1], wall_seconds(truth)
    comparison.same("cluster text: step", figure(cells["step"]), last.step + 1)
    comparison.near("cluster text: loss", figure(cells["loss"]), last.loss, 0.0, 1e-4)
    comparison.near("cluster text: tokens/s", figure(cells["tokens/s"]), TOKENS / wall)
    comparison.near(
        "cluster text: of predicted", figure(cells["of predicted"]), 100 * PREDICTED / last.seconds, 0.1
    )
    of_bound = figure(cells["of bound"])
    comparison.holds("cluster text: of bound", of_bound <= 100, of_bound, "at most 100 %")
    comparison.same("cluster text: plan", figure(cells["plan"]), last.plan)


def facts(page: Page) -> dict[str, str]:
    """What stands at the head of a page, by its names."""
    names, values = page.locator(".facts dt").all_inner_texts(), page.locator(".facts dd").all_inner_texts()
    return dict(zip(names, values, strict=True))


def compare_job(page: Page, truth: Sequence[StepTruth], comparison: Comparison) -> None:
    """Its head, its lengths, and the keys of its charts."""
    shown, last, wall = facts(page), truth[-1], wall_seconds(truth)
    comparison.same("job text: step", figure(shown["step"]), last.step + 1)
    comparison.near("job text: loss", figure(shown["loss"]), last.loss, 0.0, 1e-4)
    comparison.near("job text: tokens/s", figure(shown["tokens/s"]), TOKENS / wall)
    comparison.near("job text: within steps", figure(shown["within steps"]), TOKENS / last.seconds, 0.1)
    lengths = page.locator("ed-lengths svg")
    label = f"Sequence lengths of the last step: {BATCH} sequences of {LENGTH} tokens; {LENGTH} in the mean"
    comparison.same("job text: lengths", lengths.get_attribute("aria-label"), label)
    labels = [text for text in lengths.locator("text").all_text_contents() if "mean" not in text]
    comparison.same("job text: labels of the lengths", [text.strip() for text in labels], [f"{LENGTH} tokens"])
    key = page.locator("ed-chart").filter(has_text="within steps").locator(".key li").all_inner_texts()
    at_last = {text.rsplit(maxsplit=1)[0].strip(): figure(text) for text in key if figure_of(text)}
    comparison.near("throughput text: predicted", at_last["predicted"], TOKENS / PREDICTED, 0.02)
    above = at_last["within steps"] <= at_last["bound"] * 1.001 + 1
    comparison.holds("throughput text: bound", above, at_last, "at least what was measured")
    heads = page.locator("ed-chart").first.locator(".plot")
    summary = heads.get_attribute("aria-label") or ""
    comparison.holds(
        "throughput text: the last step", f"step {last.step}" in summary, summary, f"step {last.step}"
    )


def figure_of(text: str) -> bool:
    """Whether a key of a chart has a figure."""
    return any(letter.isdigit() for letter in text) and " at step" not in text


def compare_plan(page: Page, truth: Sequence[StepTruth], comparison: Comparison) -> None:
    """The guess of the first plan is shown as what it was, and not as the prediction."""
    shown = facts(page)
    healthy = own_seconds([step for step in truth if step.plan == 1][:14], 1)
    comparison.near("plan text: predicted", seconds(shown["predicted"]), healthy, 0.1)
    comparison.holds("plan text: the guess", "15 ms when it was made" in shown["predicted"], shown, "15 ms")
    comparison.near("plan text: measured", seconds(shown["measured"]), own_seconds(truth, 1), 0.1)


def seconds(text: str) -> float:
    """A duration as pages write it."""
    number = figure(text)
    return number / 1e3 if text.split()[1] == "ms" else number
