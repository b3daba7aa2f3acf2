"""Sessions of browsers: a token is shown once, and a cookie stands for it from then on.

The token stays in this process's memory, and nowhere else: the cookie is a random word, HttpOnly and
SameSite=Strict, so that no script reads it and no other site's page has it sent. Sessions end with the
dashboard, when they are idle or old, when they are signed out of, and when the leader no longer knows their
token.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import Literal

from elasticd.dashboard.views import Viewer

#: Seconds until a session ends: since it was last used, and since it began.
IDLE, LONGEST = 12 * 3600.0, 7 * 86_400.0
#: Seconds after which the leader is asked again whether it knows the token.
RECHECK_SECONDS = 60.0
#: Sessions at once; the one that was idle longest goes.
MOST = 1000


@dataclass(slots=True)
class Session:
    """One browser's. `token`: None where the coordinator asks for none."""

    token: str | None = field(repr=False)
    name: str
    role: Literal["viewer", "operator"]
    began: float
    used: float
    checked: float
    streams: int = 0  # that are open under it
    ended: bool = False

    @property
    def viewer(self) -> Viewer:
        """The viewer, as pages show it."""
        return Viewer(signed_in=True, asks=self.token is not None, name=self.name, role=self.role)


class Sessions:
    """All of them, by the word in their cookie."""

    def __init__(self) -> None:
        self._known: dict[str, Session] = {}

    def begin(self, token: str, name: str, role: Literal["viewer", "operator"]) -> str:
        """The word for the cookie of a new session."""
        now = time.monotonic()
        self._clear(now)
        word = secrets.token_urlsafe(32)
        self._known[word] = Session(token=token, name=name, role=role, began=now, used=now, checked=now)
        return word

    def find(self, word: str) -> Session | None:
        """The session of a cookie, used now; None where it is over or never was."""
        now = time.monotonic()
        self._expire(now)
        session = self._known.get(word)
        if session is not None:
            session.used = now
        return session

    def watched(self) -> list[tuple[str, Session]]:
        """Sessions with open streams, each with the word of its cookie; those that are over are ended."""
        self._expire(time.monotonic())
        return [(word, session) for word, session in self._known.items() if session.streams]

    def end(self, word: str) -> None:
        """Ends a session, and the streams that are open under it."""
        if (session := self._known.pop(word, None)) is not None:
            session.ended = True

    def _expire(self, now: float) -> None:
        """Ends what is idle or old. An open stream is use."""
        for word, session in list(self._known.items()):
            if session.streams:
                session.used = now
            if now - session.used > IDLE or now - session.began > LONGEST:
                self.end(word)

    def _clear(self, now: float) -> None:
        self._expire(now)
        while len(self._known) >= MOST:
            self.end(min(self._known, key=lambda word: self._known[word].used))
