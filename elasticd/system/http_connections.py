"""HTTP connections of a server, with what uvicorn does not offer: how many there may be, how long one may ask
for nothing, and how long it may leave an answer unread.

The one file that knows uvicorn's HTTP protocol class; its tests fail where a release changes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

_HttpBase: Any = AutoHTTPProtocol


def limited_http(
    most: int,
    refused: Callable[[str], None],
    *,
    silent_seconds: float,
    unread_seconds: float | None = None,
    around: Callable[[ASGIApp, asyncio.Transport], ASGIApp] = lambda app, transport: app,
) -> type[asyncio.Protocol]:
    """uvicorn's protocol with limits.

    Args:
        most: connections at once.
        refused: counts by a word what is dropped: "crowded", "silent", "unread".
        silent_seconds: in which whoever connects must have asked for something, again after each answer.
        unread_seconds: in which whoever asked must have taken some of what waits for him; None: any time.
        around: what the application of a connection is wrapped in.
    """

    class Http(_HttpBase):  # type: ignore[misc]
        """Limits connections, and drops one that asks for nothing or reads nothing."""

        _silent: asyncio.TimerHandle | None = None
        _unread: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            if len(self.connections) > most:
                refused("crowded")
                transport.abort()
                return
            self.app: ASGIApp = self._asked(around(self.app, transport))
            self._expect()

        def connection_lost(self, exc: Exception | None) -> None:
            self._expect_no_more()
            self._is_read()
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            super().pause_writing()
            if unread_seconds is not None:
                self._is_read()
                self._unread = self.loop.call_later(unread_seconds, self._drop, "unread")

        def resume_writing(self) -> None:
            self._is_read()
            super().resume_writing()

        def handle_websocket_upgrade(self, *event: Any) -> None:
            self._expect_no_more()
            self._is_read()
            super().handle_websocket_upgrade(*event)

        def on_response_complete(self) -> None:
            self._expect()
            super().on_response_complete()

        def _asked(self, app: ASGIApp) -> ASGIApp:
            async def asked(scope: Scope, receive: Receive, send: Send) -> None:
                self._expect_no_more()
                await app(scope, receive, send)

            return asked

        def _expect(self) -> None:
            self._expect_no_more()
            self._silent = self.loop.call_later(silent_seconds, self._drop, "silent")

        def _expect_no_more(self) -> None:
            if self._silent is not None:
                self._silent.cancel()
                self._silent = None

        def _is_read(self) -> None:
            if self._unread is not None:
                self._unread.cancel()
                self._unread = None

        def _drop(self, why: str) -> None:
            refused(why)
            self.transport.abort()

    return Http
