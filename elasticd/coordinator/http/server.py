"""The port and its server: where it listens, and what uvicorn does not offer: whose certificate a connection
showed, and pings that hold nobody's silence against him while it is this side that does not listen.

The one file that knows uvicorn's WebSocket protocol class; its test fails where a release changes it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Callable, Iterable
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.websockets.auto import AutoWebSocketsProtocol

from elasticd.config.security import SecuritySection
from elasticd.coordinator.election import CannotLead
from elasticd.coordinator.fair_queue import RoundShare
from elasticd.coordinator.http.middleware import PEER, ROUND_TRIP
from elasticd.store.write_allowance import Allowance
from elasticd.system.front_door import SILENT_SECONDS, Guest
from elasticd.system.http_connections import BoundedHttpServer, limited_http, with_guest
from elasticd.system.network_addresses import outward
from elasticd.system.tcp_listener import bound

_log = logging.getLogger(__name__)
_WebSocketBase: Any = AutoWebSocketsProtocol

#: Seconds in which whoever asked must have taken some of the answer that waits for it.
UNREAD_SECONDS = 30.0
#: Seconds without a word of an agent until it is asked for one, and until one that did not answer is away: no
#: packet may say so.
PING_SECONDS, PING_TIMEOUT_SECONDS = 0.2, 0.75
#: Seconds by which the loop may be late and still judge others by the clock.
LATE_SECONDS = 0.1
#: Pings a second of all connections together: with more than 200 known ones each is asked less often.
PINGS_A_SECOND = 1000
#: Bytes of an agent's connection that are parsed in one go, and seconds of one round of the loop in which bytes
#: of all agents are parsed: a frame may have six bytes, and a read of the socket 43,000 of them.
PARSED_TOGETHER, PARSE_SECONDS = 1 << 10, 0.005
#: Pings, pongs and continued frames of one agent: at once, and a second. Nobody needs that many.
FRAMES_AT_ONCE, FRAMES_A_SECOND = 500, 100
#: Bytes of a request's line and headers.
_LARGEST_HEAD_BYTES = 16 * 1024
#: Frames of one agent that wait to be read; more of them wait in its own socket.
_FRAMES_WAITING = 4
#: What is said of a coordinator that others can reach, and that asks nobody who he is.
OPEN_TO_ALL = "whoever reaches this may look at, drain and change the cluster"
#: What to do about it.
CLOSE_IT = (
    "set viewers, operators and agents in section [security] to files of tokens, or host in [coordinator] to "
    "127.0.0.1; or, in a network that only the cluster's users reach, insecure = true in [security]"
)


def bind(host: str, port: int) -> socket.socket:
    """A socket that has its port, and does not listen yet."""
    try:
        return bound(host, port)
    except OSError as error:
        raise CannotLead(
            f"cannot serve at {host}:{port} ({error.strerror or error}): set host and port in section "
            "[coordinator] of the configuration to an address of this machine that is free"
        ) from error


def url_of(host: str, port: int, *, secure: bool, stores: Iterable[str] = ()) -> str:
    """The URL at which others reach this server: a host that stands for all addresses is no address to call. In
    its place stands our address on the route to one of `stores`, since agents have a route from there too. With
    TLS it is the machine's name, which the certificate is for; the same if all stores are on this machine."""
    reachable = host
    if host in ("0.0.0.0", "::"):
        reachable = (None if secure else outward(stores)) or socket.gethostname()
    address = f"[{reachable}]:{port}" if ":" in reachable else f"{reachable}:{port}"
    return f"{'https' if secure else 'http'}://{address}"


def serving(
    application: ASGIApp,
    section: SecuritySection,
    context: ssl.SSLContext | None,
    refused: Callable[[str], None],
) -> BoundedHttpServer:
    """The port's server, by [security]'s limits; `refused` counts by a word."""
    config = configured(application, section, context, refused)
    return BoundedHttpServer(config, most_connections=section.connections, refused=refused)


def configured(
    application: ASGIApp,
    section: SecuritySection,
    context: ssl.SSLContext | None,
    refused: Callable[[str], None],
) -> uvicorn.Config:
    """The server's configuration, by [security]'s limits; `refused` counts by a word."""
    http: Any = limited_http(
        refused,
        silent_seconds=SILENT_SECONDS,
        unread_seconds=UNREAD_SECONDS,
        around=_with_peer,
    )
    websocket: Any = _websocket(refused)
    return uvicorn.Config(
        application,
        http=http,
        ws=websocket,
        log_config=None,
        access_log=False,
        lifespan="off",
        proxy_headers=False,  # nobody says for another from where he asks
        server_header=False,
        h11_max_incomplete_event_size=_LARGEST_HEAD_BYTES,
        ws_max_size=section.message_mib << 20,
        ws_max_queue=_FRAMES_WAITING,
        ws_per_message_deflate=False,  # reports are small and many
        ws_ping_interval=PING_SECONDS,
        ws_ping_timeout=PING_TIMEOUT_SECONDS,
        timeout_graceful_shutdown=2,
        ssl_context_factory=(lambda config, default: context) if context is not None else None,
    )


def _websocket(refused: Callable[[str], None]) -> type[asyncio.Protocol]:
    rounds = RoundShare(PARSE_SECONDS)

    class WebSocket(_WebSocketBase):  # type: ignore[misc]
        """Says whose certificate was shown, asks less often for life where there are many, holds nobody's
        silence against it while it is this side that does not listen, tells when the other side has read all,
        and gives others their turn however much one sends."""

        guest: Guest
        _due = _listening = _heard = 0.0
        _paused = False
        _asked: tuple[tuple[float, asyncio.Future[None]], ...] = ()
        _unparsed, _parsed = b"", 0  # the last read, and how much of it is parsed

        @property
        def read_paused(self) -> bool:
            """Returns True while messages of this connection wait: nothing more is read of it."""
            return self._paused

        @read_paused.setter
        def read_paused(self, paused: bool) -> None:
            if self._paused and not paused:
                self._listening = time.monotonic()
                if self._unparsed:  # before anything more is read
                    self.loop.call_soon(self._parse_in_turn)
            self._paused = paused

        def connection_made(self, transport: asyncio.Transport) -> None:
            app = _with(self.app, ROUND_TRIP, self.round_trip)
            self.app: ASGIApp = with_guest(_with_peer(app, transport), self.guest)
            self._allowance = Allowance(FRAMES_AT_ONCE, FRAMES_A_SECOND)
            super().connection_made(transport)

        def data_received(self, data: bytes) -> None:
            self._heard = self.loop.time()
            waits = bool(self._unparsed)
            self._unparsed = self._unparsed[self._parsed :] + data if waits else data
            self._parsed = 0
            if not waits:
                self._parse_in_turn()

        def _parse_in_turn(self) -> None:
            """Parses what was read, now or when it is this connection's turn. Nothing more is read before."""
            if self._unparsed and not self.read_paused:
                rounds.do(self._parse_part)
            if self._unparsed and not self.transport.is_closing():
                self.transport.pause_reading()

        def _parse_part(self) -> bool:
            """Parses a part. Returns whether there is more that can be parsed now: no message waits."""
            if self.transport.is_closing():
                self._unparsed, self._parsed = b"", 0
                return False
            piece = self._unparsed[self._parsed : self._parsed + PARSED_TOGETHER]
            self._parsed += len(piece)
            if self._parsed >= len(self._unparsed):
                self._unparsed, self._parsed = b"", 0
            try:
                super().data_received(piece)
            except Exception:
                _log.exception("bytes of a WebSocket cannot be parsed: its connection ends")
                self.transport.abort()
            if not (self._unparsed or self.read_paused or self.transport.is_closing()):
                self.transport.resume_reading()
            return bool(self._unparsed) and not self.read_paused

        def _is_too_often(self) -> bool:
            """Counts a frame that is no message, and ends the connection of a client that sends too many."""
            if not self.transport.is_closing() and not self._allowance.take(1, time.monotonic()):
                refused("rate")
                self.transport.abort()
            return bool(self.transport.is_closing())

        def handle_ping(self) -> None:
            if not self._is_too_often():
                super().handle_ping()

        def handle_cont(self, event: Any) -> None:
            if not self._is_too_often():
                super().handle_cont(event)

        async def round_trip(self) -> None:
            """Returns once the other side has read all that was written to it before: it has answered a ping
            that was sent behind it."""
            answered: asyncio.Future[None] = self.loop.create_future()
            self._asked = (*self._asked, (self.loop.time(), answered))
            await answered

        def handle_pong(self, event: Any) -> None:
            if self._is_too_often():
                return
            waited, sent_at = self.pending_ping_payload is not None, self.ping_sent_at
            super().handle_pong(event)
            if not waited or self.pending_ping_payload is not None:
                return
            for at, answered in self._asked:
                if at < sent_at and not answered.done():
                    answered.set_result(None)
            self._asked = tuple(asked for asked in self._asked if not asked[1].done())

        def connection_lost(self, exc: Exception | None) -> None:
            self.guest.leave()
            super().connection_lost(exc)

        def schedule_ping(self) -> None:
            self.ping_interval = max(PING_SECONDS, self.guest.door.guest_count / PINGS_A_SECOND)
            self.ping_timer = self.loop.call_later(self.ping_interval, self.send_keepalive_ping)

        def send_keepalive_ping(self) -> None:
            if (
                self.close_sent or self.transport.is_closing()
            ):  # which a client that reads nothing would put off
                self.ping_timer = self.loop.call_later(PING_TIMEOUT_SECONDS, self.transport.abort)
                return
            # Who has just said something lives. One that does not read what waits for it is asked all the same.
            quiet = self.loop.time() - self._heard
            if quiet < self.ping_interval and not self._asked and not self.transport.get_write_buffer_size():
                self.ping_timer = self.loop.call_later(self.ping_interval - quiet, self.send_keepalive_ping)
                return
            super().send_keepalive_ping()
            self._due = self.loop.time() + PING_TIMEOUT_SECONDS

        def keepalive_timeout(self) -> None:
            # The answer may be there: behind messages that are not read yet, or come while this loop was busy.
            now = self.loop.time()
            again = PING_TIMEOUT_SECONDS - (now - self._listening)
            if self.read_paused or now - self._due > LATE_SECONDS:
                again = PING_TIMEOUT_SECONDS
            if again <= 0:
                super().keepalive_timeout()
                self.transport.abort()  # a client that reads nothing would keep it from its end
                return
            self._due = now + again
            self.pong_timer = self.loop.call_later(again, self.keepalive_timeout)

    return WebSocket


def _with_peer(app: ASGIApp, transport: asyncio.Transport) -> ASGIApp:
    return _with(app, PEER, transport.get_extra_info("peercert"))


def _with(app: ASGIApp, key: str, value: object) -> ASGIApp:
    """The application, whose scopes have this value."""

    async def with_value(scope: Scope, receive: Receive, send: Send) -> None:
        scope[key] = value
        await app(scope, receive, send)

    return with_value
