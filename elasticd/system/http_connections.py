"""An HTTP server with what uvicorn does not offer: a front door that bounds strangers (`front_door`), and
limits of the time in which a connection asks for nothing, or leaves an answer unread.

The one file that knows uvicorn's server and HTTP protocol class; its tests fail where a release changes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http import h11_impl

from elasticd.system.front_door import GUEST, FrontDoor, Guest

#: By name: where httptools is installed uvicorn would take that, whose limits are others.
_HttpBase: Any = h11_impl.H11Protocol
_h11: Any = vars(h11_impl)["h11"]
#: Bytes that are parsed in one go. A head that has more is refused, also where it comes at once.
PARSED_TOGETHER_BYTES = 16 << 10
#: Pieces of a request's body: each costs the event loop some microseconds, however small it is.
MOST_PIECES = 1024
#: Seconds between two lines about bytes that are no request: any stranger can send them.
INVALID_SECONDS = 60.0


def _is_due(record: logging.LogRecord) -> bool:
    """A filter of uvicorn's lines: of those about bytes that are no request it takes one a minute."""
    global _next_line
    if not record.getMessage().startswith("Invalid HTTP request"):
        return True
    now = time.monotonic()
    if now < _next_line:
        return False
    _next_line = now + INVALID_SECONDS
    return True


_next_line = -math.inf
_requests_log = logging.getLogger("uvicorn.error.requests")
_requests_log.setLevel(logging.WARNING)
_requests_log.addFilter(_is_due)


def _bounded(next_event: Callable[[], Any]) -> Callable[[], Any]:
    """The events of a connection. Raises h11's RemoteProtocolError for a body in too many pieces."""
    pieces = 0

    def bounded() -> Any:
        nonlocal pieces
        event = next_event()
        if isinstance(event, _h11.Data):
            pieces += 1
        elif isinstance(event, _h11.Request):
            pieces = 0
        if pieces > MOST_PIECES:
            raise _h11.RemoteProtocolError("the body comes in too many pieces")
        return event

    return bounded


class BoundedHttpServer(uvicorn.Server):
    """uvicorn's server behind a front door. It leaves signals to its daemon, which ends it itself.

    Args:
        config: its `http` is made by `limited_http`.
        most_connections: connections at once of clients that the application knows.
        refused: counts by a word what the front door drops.
    """

    def __init__(
        self, config: uvicorn.Config, *, most_connections: int, refused: Callable[[str], None]
    ) -> None:
        super().__init__(config)
        self.door: FrontDoor | None = None  # once it has started
        self._most_connections, self._refused = most_connections, refused

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves connections of one socket, which is bound, and may listen already."""
        await super().startup(sockets=[])
        [listener] = sockets if sockets is not None else [self.config.bind_socket()]
        listener.setblocking(False)
        listener.listen(512)
        self.door = FrontDoor(
            listener,
            self._protocol,
            context=self.config.ssl,
            most=self._most_connections,
            refused=self._refused,
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Lets nobody in any more, then ends as uvicorn's server does."""
        if self.door is not None:
            self.door.close()
        await super().shutdown(sockets=sockets)

    def _protocol(self, guest: Guest) -> asyncio.Protocol:
        protocol: Any = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        protocol.guest = guest
        return protocol  # type: ignore[no-any-return]


def with_guest(app: ASGIApp, guest: Guest) -> ASGIApp:
    """Returns the application of one connection, whose scopes have its guest."""

    async def known(scope: Scope, receive: Receive, send: Send) -> None:
        scope[GUEST] = guest
        await app(scope, receive, send)

    return known


def limited_http(
    refused: Callable[[str], None],
    *,
    silent_seconds: float,
    unread_seconds: float | None = None,
    around: Callable[[ASGIApp, asyncio.Transport], ASGIApp] = lambda app, transport: app,
) -> type[asyncio.Protocol]:
    """uvicorn's protocol with limits, for a `BoundedHttpServer`.

    Args:
        refused: counts by a word what is dropped: "silent", "unread".
        silent_seconds: in which whoever connects must have asked for something, again after each answer.
        unread_seconds: in which whoever asked must have taken some of what waits for him; None: any time.
        around: what the application of a connection is wrapped in.
    """

    class Http(_HttpBase):  # type: ignore[misc]
        """Drops a connection that asks for nothing or reads nothing."""

        guest: Guest
        ws_protocol_class: Any
        _silent: asyncio.TimerHandle | None = None
        _unread: asyncio.TimerHandle | None = None

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.conn.next_event = _bounded(self.conn.next_event)

        def data_received(self, data: bytes) -> None:
            for start in range(0, len(data), PARSED_TOGETHER_BYTES):
                if not self.transport.is_closing():
                    super().data_received(data[start : start + PARSED_TOGETHER_BYTES])

        def connection_made(self, transport: asyncio.Transport) -> None:
            self.logger = _requests_log
            super().connection_made(transport)
            self.guest.seat(transport)
            self.app: ASGIApp = self._asked(with_guest(around(self.app, transport), self.guest))
            self._expect()

        def connection_lost(self, exc: Exception | None) -> None:
            self._expect_no_more()
            self._is_read()
            self.guest.leave()
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
            self.ws_protocol_class = self._websocket_of_guest(self.ws_protocol_class)
            super().handle_websocket_upgrade(*event)

        def _websocket_of_guest(self, websocket: Callable[..., Any]) -> Callable[..., Any]:
            def made(**options: Any) -> Any:
                protocol = websocket(**options)
                protocol.guest = self.guest
                return protocol

            return made

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
