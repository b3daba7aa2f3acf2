"""Server-sent events to browsers: each has a bounded queue, and begins anew where it lags.

An event is encoded once for all browsers. The last ones are kept, so that a browser whose connection broke goes
on after the last id that it has (`Last-Event-ID`); the id's first part says which start of the dashboard
counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable

import msgspec

from elasticd.dashboard.session import Session
from elasticd.line_queue import LineQueue

#: Streams of one session, and streams that are left for operators, of all.
MOST_OF_SESSION, FOR_OPERATORS = 8, 32
#: Browsers at once, bytes that may wait for one of them, and bytes of events that are kept.
MOST_BROWSERS, MOST_WAITING, MOST_KEPT = 256, 4 << 20, 8 << 20
#: Milliseconds after which a browser connects again.
RETRY = 1000


class Browser(LineQueue):
    """One stream."""

    def __init__(self, session: Session) -> None:
        super().__init__(MOST_WAITING)
        self.session = session
        self.anew = False  # it gets a hello once it has what waits


class Streams:
    """All streams. `epoch`: another one with each start of the dashboard."""

    def __init__(self, epoch: int) -> None:
        self._epoch, self._sequence = epoch, 0
        self._browsers: set[Browser] = set()
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_size = 0
        self._closed = False

    def __len__(self) -> int:
        return len(self._browsers)

    def refusal(self, session: Session) -> str:
        """Why a session may not have one stream more, or nothing."""
        if session.streams >= MOST_OF_SESSION:
            return f"{session.streams} pages of this browser look at the dashboard already: close some of them"
        kept = 0 if session.role == "operator" else FOR_OPERATORS
        if len(self._browsers) >= MOST_BROWSERS - kept:
            return "as many browsers look at this dashboard as may at once: close some pages"
        return ""

    def admit(self, session: Session) -> Browser:
        """A stream's place, which is taken from now until it is left."""
        browser = Browser(session)
        self._browsers.add(browser)
        session.streams += 1
        return browser

    def leave(self, browser: Browser) -> None:
        """Harmless when called again."""
        if browser in self._browsers:
            self._browsers.discard(browser)
            browser.session.streams -= 1

    def tell(self, event: str, value: msgspec.Struct) -> None:
        """An event for all browsers."""
        self._sequence += 1
        line = self._line(event, value, self._sequence)
        self._kept.append((self._sequence, line))
        self._kept_size += len(line)
        while self._kept_size > MOST_KEPT:
            self._kept_size -= len(self._kept.popleft()[1])
        for browser in self._browsers:
            browser.put([line])

    def begin_anew(self) -> None:
        """All browsers get a hello, after what waits for them: nothing that was kept leads there."""
        self._kept.clear()
        self._kept_size = 0
        self._sequence += 1
        for browser in self._browsers:
            browser.anew = True
            browser.woken.set()

    async def listen(
        self, browser: Browser, last: str, hello: Callable[[], msgspec.Struct], over: Callable[[], bool]
    ) -> AsyncIterator[bytes]:
        """Events, until the browser goes, its session is `over`, or the dashboard ends.

        Args:
            browser: as it was admitted; it is left at the end.
            last: the id of the last event that the browser has ("": none).
            hello: everything, as it is now.
            over: whether the session has ended; looked at with each event.
        """
        missed = self._after(last)
        if missed is None:
            browser.lag()
        else:
            browser.put(missed)
        try:
            yield b"retry: %d\n\n" % RETRY
            while not (self._closed or over()):
                if browser.lines:
                    yield browser.take()
                elif browser.lags or browser.anew:
                    browser.lags = browser.anew = False
                    yield self._line("hello", hello(), self._sequence)
                else:
                    browser.woken.clear()
                    await browser.woken.wait()
        finally:
            self.leave(browser)

    def close(self) -> None:
        """Ends all streams."""
        self._closed = True
        for browser in self._browsers:
            browser.woken.set()

    def _line(self, event: str, value: msgspec.Struct, number: int) -> bytes:
        # JSON has no line break in it, whatever the texts are.
        return b"id: %d:%d\nevent: %b\ndata: %b\n\n" % (
            self._epoch,
            number,
            event.encode(),
            msgspec.json.encode(value),
        )

    def _after(self, last: str) -> list[bytes] | None:
        epoch, _, text = last.partition(":")
        if epoch != str(self._epoch) or not text.isdecimal() or len(text) > 18:
            return None
        sequence = int(text)
        oldest = self._kept[0][0] if self._kept else self._sequence + 1
        if not oldest - 1 <= sequence <= self._sequence:
            return None
        return [line for number, line in self._kept if number > sequence]
