"""A person at the browser: signs in, looks, uses the keyboard."""

from __future__ import annotations

import json
import re
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect

from tests.dashboard.browser.conftest import AXE, Watched

#: Milliseconds that a page has until it shows what it is to show, on a busy machine.
PATIENCE = 60_000


class Person:
    """A person with a browser of their own (cookies, theme) and one page in it."""

    page: Page
    context: BrowserContext

    def __init__(self, browser: Browser, url: str, **options: Any) -> None:
        expect.set_options(timeout=PATIENCE)
        self.url, self.watched = url, Watched()
        self.context = browser.new_context(
            base_url=url, **{"viewport": {"width": 1400, "height": 900}, **options}
        )
        self.context.set_default_timeout(PATIENCE)
        self.context.on("request", lambda request: self.watched.asked.append(request.url))
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.watched.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.watched.said.append(f"error: {error}"))

    def __enter__(self) -> Person:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        said, strangers = list(self.watched.said), self.watched.strangers(self.url)
        self.context.close()
        if kind is None:
            assert not said, said
            assert not strangers, strangers

    def sign_in(self, token: str, path: str = "/") -> None:
        """By the form, as everybody does."""
        self.page.goto(path)
        self.page.get_by_label("Token").fill(token)
        self.page.get_by_role("button", name="Sign in").click()
        expect(self.page.locator(".topbar .chip")).to_contain_text("live")
        self.mark()

    def mark(self) -> None:
        """Notes that this document is the one that later looks must find."""
        self.page.evaluate("window.sameDocument = true")

    @property
    def reloaded(self) -> bool:
        """Whether the document was loaded again since `mark`."""
        return not self.page.evaluate("window.sameDocument === true")

    def go(self, path: str) -> None:
        """To another page of the same document, as a link does."""
        self.page.evaluate("path => document.querySelector('ed-app').go(path)", path)
        expect(self.page.locator("main h1").first).to_be_visible()

    def to(self, role: str, name: str, most: int = 200) -> None:
        """Presses Tab until the element with this role and name has the focus."""
        wanted = self.page.get_by_role(role, name=name, exact=True).first  # type: ignore[arg-type]
        for _ in range(most):
            if wanted.evaluate("each => each === document.activeElement"):
                return
            self.page.keyboard.press("Tab")
        raise AssertionError(f"the keyboard does not reach the {role} {name!r}")

    def violations(self) -> list[str]:
        """What axe finds on the page as it is."""
        self.page.evaluate(AXE.read_text())
        found = self.page.evaluate(
            "async () => (await axe.run(document, {resultTypes: ['violations']})).violations.map("
            "v => ({id: v.id, nodes: v.nodes.slice(0, 3).map(n => n.html + ' ' + n.failureSummary)}))"
        )
        return [json.dumps(each, indent=1) for each in found]

    def overflow(self) -> int:
        """Pixels by which the page is wider than the window."""
        return int(
            self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        )

    def events(self) -> list[int]:
        """The ids of the events that are listed, the newest first."""
        ids = self.page.locator(".events > li").evaluate_all("all => all.map(each => each.id)")
        return [int(each.removeprefix("event-")) for each in ids]

    def row(self, text: str) -> Locator:
        """The row of a table that begins with this text."""
        return self.page.get_by_role("row").filter(
            has=self.page.get_by_role("rowheader", name=text, exact=True)
        )


def figure(text: str) -> float:
    """The first number of a text, as pages write it."""
    found = re.search(r"-?[\d,]+(?:\.\d+)?", text)
    assert found is not None, text
    return float(found[0].replace(",", ""))
