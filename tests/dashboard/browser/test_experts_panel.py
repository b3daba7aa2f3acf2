"""The panel of experts on a job's page: a map, the busiest devices, and who has the experts of a block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from elasticd_planner.placement.expert_placement import placed
from elasticd_planner.spec.plan import Pipeline, Stage
from playwright.sync_api import Browser, expect

from elasticd.dashboard.job_page import job_view
from elasticd.dashboard.single_file import single_file
from elasticd.wire import live_types as live
from tests.dashboard.test_job_page_experts import plan_with
from tests.dashboard.test_views import NOW, VIEWER, board, job, node

BLOCKS, EXPERTS, DEVICES = 4, 16, ("a/0", "a/1", "b/0", "b/1")


def page(folder: Path) -> str:
    """The address of a file with the page of a job whose experts are placed by load; block 2 is by shares."""
    rng = np.random.default_rng(0)
    rows = {
        block: tuple((1000 / np.arange(1, EXPERTS + 1) ** 0.9)[rng.permutation(EXPERTS)].tolist())
        for block in range(BLOCKS)
    }
    found = [placed(rows[block], [1.0, 1.0, 1.0, 2.0]) for block in range(BLOCKS)]
    stage = Stage(
        start=0,
        stop=BLOCKS,
        devices=DEVICES,
        shares=(1,) * 4,
        experts=tuple(() if block == 2 else each.held for block, each in enumerate(found)),
        splits=tuple(() if block == 2 else each.splits for block, each in enumerate(found)),
    )
    told = board(
        live.put("1:0", "node", "a", node("a")),
        live.put("1:0", "node", "b", node("b")),
        live.put("1:0", "job", "j", live.LiveJob(job=job(job="j"), plan=3, over=False)),
        live.put("1:0", "plan", "j", plan_with(Pipeline(stages=(stage,), micro_batches=4))),
        live.append("1:0", "slowdowns", "", live.Slowdowns(rates={"b/1": 2.0}, slowness={})),
        live.put("1:0", "experts", "j", rows),
    )
    values: dict[str, Any] = {
        "start": "/jobs/j",
        "/api/cluster": told.hello(VIEWER),
        "/api/jobs/j": job_view(told.known, "j", (), NOW),
    }
    file = folder / "job.html"
    file.write_text(single_file(msgspec.to_builtins(values), "job"), "utf-8")
    return file.as_uri()


@pytest.mark.slow
def test_the_most_uneven_block_comes_first_and_another_ones_experts_can_be_listed(
    browser: Browser, tmp_path: Path
) -> None:
    found = browser.new_page(viewport={"width": 1400, "height": 900})
    found.goto(page(tmp_path))
    blocks = found.get_by_role("group", name="Blocks by their busiest device")
    expect(blocks.get_by_role("row")).to_have_count(1 + BLOCKS)
    first = blocks.get_by_role("row").nth(1)
    expect(first.get_by_role("button", name="2")).to_have_attribute("aria-pressed", "true")
    expect(found.get_by_role("group", name="Experts of block 2")).to_be_visible()
    blocks.get_by_role("button", name="0", exact=True).press("Enter")
    listed = found.get_by_role("group", name="Experts of block 0")
    expect(listed.get_by_role("row")).to_have_count(1 + EXPERTS)
    expect(found.locator("ed-experts svg rect title")).to_have_count(BLOCKS * EXPERTS)
    for width, scheme in ((390, "light"), (390, "dark")):
        found.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        found.set_viewport_size({"width": width, "height": 900})
        assert found.evaluate("document.documentElement.scrollWidth") <= width
    found.close()
