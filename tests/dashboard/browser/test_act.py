"""The page of acts: the command line that it shows is what it asks for, also where a field was emptied."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.coordinator.agents import coordinating
from tests.dashboard.browser.conftest import chromium
from tests.dashboard.serving import serving


def test_an_emptied_field_is_shown_and_sent_as_the_command_lines_default(tmp_path: Path) -> None:
    api = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
    program = chromium()
    if program is None:
        pytest.skip("there is no Chromium on PATH: apt-get install chromium")

    async def body() -> None:
        async with (
            coordinating() as coordinator,
            serving(coordinator, tmp_path) as dashboard,
            api.async_playwright() as playwright,
        ):
            browser = await playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
            page = await browser.new_page(base_url=dashboard.url)

            async def with_a_job(route: Any) -> None:
                answer = await route.fetch()
                found = await answer.json()
                for act in found["acts"]:
                    if "job" in act["choices"]:
                        act["choices"]["job"] = ["night"]
                await route.fulfill(response=answer, json=found)

            await page.route("**/api/act", with_a_job)
            await page.goto("/act")
            text = "The command of a stopped job starts it again, from its newest checkpoint."
            await api.expect(page.get_by_text(text)).to_be_visible()
            stop = page.locator("ed-act form").filter(
                has=page.locator("h3", has_text="seconds for a last checkpoint")
            )
            await stop.get_by_label("seconds", exact=True).fill("")
            await api.expect(stop.locator("code")).to_have_text("elasticd stop --wait 600 night")
            await stop.get_by_label("type night to confirm").fill("night")
            async with page.expect_request("**/api/act/stop") as asked:
                await stop.get_by_role("button", name="Stop", exact=True).click()
            assert (await asked.value).post_data_json == {"job": "night", "seconds": 600, "confirm": "night"}
            now = page.locator("ed-act form").filter(has=page.locator("h3", has_text="End a job at once"))
            await api.expect(now.locator("code")).to_have_text("elasticd stop --now night")
            await api.expect(now.get_by_role("button", name="Stop now", exact=True)).to_be_disabled()
            cut = page.locator("ed-act form").filter(has=page.locator("h3", has_text="agent off from leader"))
            await api.expect(cut.locator("code")).to_have_text("elasticd chaos cut NODE")
            config = page.locator("ed-act form").filter(has=page.locator("h3", has_text="Change a key"))
            await api.expect(config.locator("code")).to_contain_text("elasticd config unset ")
            await browser.close()

    asyncio.run(body())
