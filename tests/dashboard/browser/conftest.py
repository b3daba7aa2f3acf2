"""A real Chromium for the tests of the pages, and what a page said and asked for."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def chromium() -> str | None:
    """The browser's program, None where there is none."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


# Of the module, not of the session: while playwright's loop runs in this thread no other test can run one.
@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    """Chromium without a window. Skipped with a word where it, or playwright, is not there."""
    api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright"
    )
    program = chromium()
    if program is None:
        pytest.skip("there is no Chromium on PATH: apt-get install chromium")
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield found
        found.close()


class Watched:
    """What a browser's pages said and asked for."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.asked: list[str] = []

    def strangers(self, url: str) -> list[str]:
        """Requests that left the dashboard's origin."""
        own = urlsplit(url)[:2]
        return [asked for asked in self.asked if urlsplit(asked)[:2] != own and not asked.startswith("blob:")]


AXE = Path(__file__).with_name("vendor") / "axe.min.js"
