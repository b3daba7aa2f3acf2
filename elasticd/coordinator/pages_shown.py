"""The pages that dashboards make of the leader's live feed, by URL: launchers tell their users of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from urllib.parse import quote

#: Characters of a URL.
MOST_URL = 200


class PagesShown:
    """The URLs of the dashboards that listen now, the newest last."""

    def __init__(self) -> None:
        self._urls: list[str] = []

    async def during(self, url: str, lines: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
        """The lines; until their end there are pages at this URL."""
        proper = url.startswith(("http://", "https://")) and len(url) <= MOST_URL and url.isprintable()
        if proper:
            self._urls.append(url.rstrip("/"))
        try:
            async with aclosing(lines):
                async for line in lines:
                    yield line
        finally:
            if proper:
                self._urls.remove(url.rstrip("/"))

    def of(self, job: str) -> str:
        """The page of a job; empty where no dashboard listens."""
        return f"{self._urls[-1]}/jobs/{quote(job)}" if self._urls else ""
