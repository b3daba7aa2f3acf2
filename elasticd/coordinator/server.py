"""The coordinator's one port: the agents' WebSocket, and REST for people and programs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from elasticd.coordinator import chaos
from elasticd.coordinator.access import ANYBODY, Access, Caller
from elasticd.coordinator.changes import Scalar
from elasticd.coordinator.connections import Connection
from elasticd.coordinator.gate import CALLER, Bucket, Gate
from elasticd.coordinator.leading import Leading, Refused
from elasticd.coordinator.metrics import CONTENT_TYPE
from elasticd.decoding import decoded_as
from elasticd.messages import AgentHello, AgentRejected, StoreCall, ToLeader, Up, encode, to_leader
from elasticd.records import HistoryRecord
from elasticd.security import Role

#: Seconds that a new connection has to say hello.
HELLO_SECONDS = 10.0
#: Messages a second of one agent, twice as many at once; one that sends more is read more slowly, and is cut
#: off where its answers to pings are stuck behind them.
MESSAGES_PER_SECOND = 5000.0
#: The code of a WebSocket that its own side closed over a message above the limit.
_TOO_BIG = 1009

_log = logging.getLogger(__name__)


class DrainRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/nodes/NODE/drain`."""

    on: bool


class ConfigRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/config`: values by dotted key, null for the file's own, and who asks for it."""

    values: dict[str, Scalar | None]
    by: str


class Served(Protocol):
    """What the server shows: the leader, its status, and the history that only the store has."""

    leading: Leading
    access: Access

    def status(self) -> dict[str, Any]: ...

    async def history(self, job: str) -> list[HistoryRecord]: ...

    def ready(self) -> str:
        """Why it is not ready, or nothing."""
        ...


def application(served: Served, requests_per_second: float) -> Starlette:
    """The ASGI application, which lets one address ask so often."""

    async def status(request: Request) -> Response:
        return _json(served.status())

    async def events(request: Request) -> Response:
        return _json({"events": served.leading.journal.events(_number(request, 0))})

    async def steps(request: Request) -> Response:
        job = _known(served, request)
        journal = served.leading.journal
        return _json({"steps": journal.steps(job, _number(request, -1)), "pacing": journal.pacing(job)})

    async def history(request: Request) -> Response:
        return _json({"history": await served.history(_known(served, request))})

    async def drain(request: Request) -> Response:
        try:
            body = decoded_as(DrainRequest, await request.body())
        except msgspec.DecodeError as error:
            raise Refused(400, f'the body must be {{"on": true}} or {{"on": false}}: {error}') from error
        served.leading.drain(str(request.path_params["node"]), body.on)
        return _json({"on": body.on})

    async def config(request: Request) -> Response:
        if request.method == "POST":
            try:
                body = decoded_as(ConfigRequest, await request.body())
            except msgspec.DecodeError as error:
                raise Refused(
                    400, f'the body must be {{"values": {{"policy.paused": true}}, "by": "you"}}: {error}'
                ) from error
            await served.leading.change(body.values, _by(request, body.by))
        return _json(served.leading.changes.shown())

    async def livez(request: Request) -> Response:
        return _json({"live": True})

    async def readyz(request: Request) -> Response:
        why = served.ready()
        return _json({"error": why}, 503) if why else _json({"ready": True})

    async def metrics(request: Request) -> Response:
        return Response(served.leading.exposition(), media_type=CONTENT_TYPE)

    async def agent(socket: WebSocket) -> None:
        await _agent(served.leading, socket)

    routes = [
        Route("/v1/status", status),
        Route("/v1/events", events),
        Route("/v1/jobs/{job}/steps", steps),
        Route("/v1/jobs/{job}/history", history),
        Route("/v1/nodes/{node}/drain", drain, methods=["POST"]),
        Route("/v1/config", config, methods=["GET", "POST"]),
        *chaos.routes(served),
        Route("/metrics", metrics),
        Route("/livez", livez),
        Route("/readyz", readyz),
        WebSocketRoute("/v1/agent", agent),
    ]
    handlers: dict[Any, Callable[[Request, Any], Awaitable[Response]]] = {
        Refused: _refused,
        HTTPException: _http_error,
        Exception: _broken,
    }
    counted = Middleware(_Counted, served=served)
    gate = Middleware(
        Gate,
        access=lambda: served.access,
        refused=lambda word: served.leading.metrics.refused(word),
        rate=requests_per_second,
    )
    return Starlette(routes=routes, exception_handlers=handlers, middleware=[counted, gate])


class _Counted:
    """Counts the answers to REST requests, by status."""

    def __init__(self, app: ASGIApp, served: Served) -> None:
        self._app, self._served = app, served

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._served.leading.metrics.request(message["status"])
            await send(message)

        await self._app(scope, receive, counting)


def _json(body: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


async def _refused(request: Request, error: Refused) -> Response:
    answer = _json({"error": str(error)}, error.status)
    if error.status in (408, 413):
        answer.headers["connection"] = "close"  # the rest of the body is not waited for
    return answer


async def _http_error(request: Request, error: HTTPException) -> Response:
    text = f"there is no {request.url.path}" if error.status_code == 404 else error.detail
    return _json({"error": text}, error.status_code)


async def _broken(request: Request, error: Exception) -> Response:
    return _json({"error": f"the coordinator failed on {request.url.path}; its log says why"}, 500)


def _by(request: Request, said: str) -> str:
    """Who changed something: what he says of himself, and the name that his token has."""
    caller: Caller | None = request.scope.get(CALLER)
    return f"{said} ({caller.name})" if caller is not None and caller.name else said


def _number(request: Request, default: int) -> int:
    text = request.query_params.get("after", str(default))
    try:
        return int(text)
    except ValueError:
        raise Refused(400, f"after={text} must be a whole number") from None


def _known(served: Served, request: Request) -> str:
    job = str(request.path_params["job"])
    jobs = served.leading.state.jobs
    if job not in jobs:
        raise Refused(404, f"there is no job {job!r}; there are: {', '.join(sorted(jobs)) or 'none'}")
    return job


# -- agents ------------------------------------------------------------------------------------------------


async def _agent(leading: Leading, socket: WebSocket) -> None:
    """One agent's connection, from its hello to its end."""
    await socket.accept()
    try:
        hello = await asyncio.wait_for(_read(socket), HELLO_SECONDS)
        if not isinstance(hello, AgentHello):
            leading.metrics.refused("silent")
            await _reject(socket, "an agent's first message must be its hello")
            return
        refusal = _impostor(socket, hello) or leading.connections.refusal(hello)
        if refusal:
            leading.metrics.refused("hello")
            await _reject(socket, refusal)
            return
    except TimeoutError:
        leading.metrics.refused("silent")
        await _reject(socket, f"no hello came within {HELLO_SECONDS:g} s")
        return
    except msgspec.DecodeError as error:
        leading.metrics.refused("unreadable")
        await _reject(socket, f"the hello cannot be read ({error}): install the same release on all nodes")
        return
    except WebSocketDisconnect as gone:
        if gone.code == _TOO_BIG:
            leading.metrics.refused("oversized")
        return
    connection = leading.agent_up(hello.record)
    try:
        await _converse(leading, socket, connection)
    finally:
        leading.agent_down(connection)
        with contextlib.suppress(Exception):  # closed by the other side already
            await socket.close()


def _impostor(socket: WebSocket, hello: AgentHello) -> str:
    """Why this agent's token or certificate is not for this node, or nothing."""
    caller: Caller = socket.scope.get(CALLER) or ANYBODY
    if caller.role is not Role.AGENT or caller.name in ("", hello.record.node):
        return ""
    return (
        f"this token or certificate is for node {caller.name!r}, not for {hello.record.node!r}: give each node "
        "its own, or set node in section [agent]"
    )


async def _reject(socket: WebSocket, reason: str) -> None:
    with contextlib.suppress(WebSocketDisconnect, RuntimeError):
        await socket.send_bytes(encode(AgentRejected(reason=reason)))
        await socket.close(1008)


async def _converse(leading: Leading, socket: WebSocket, connection: Connection) -> None:
    """Reads and writes until either ends, or the connection is closed from here."""
    tasks = {
        asyncio.create_task(connection.pump(socket.send_bytes)),
        asyncio.create_task(_listen(leading, socket, connection)),
        asyncio.create_task(connection.closed.wait()),
    }
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, msgspec.DecodeError):
                leading.metrics.refused("unreadable")
                _log.warning("node %s: a message cannot be read: %s", connection.node, outcome)
            elif isinstance(outcome, WebSocketDisconnect):
                if outcome.code == _TOO_BIG:
                    leading.metrics.refused("oversized")
                    _log.warning("node %s: a message is above [security] message_mib", connection.node)
            elif isinstance(outcome, _Impostor):
                leading.metrics.refused("impostor")
                _log.warning("node %s: its agent calls itself %s now", connection.node, outcome)
            elif isinstance(outcome, Exception):
                _log.warning("node %s: its connection ended: %r", connection.node, outcome)


class _Impostor(Exception):
    """An agent that says hello for another node."""


async def _listen(leading: Leading, socket: WebSocket, connection: Connection) -> None:
    """Hands every message over in order; a call that waits is left waiting beside the rest."""
    calls: set[asyncio.Task[None]] = set()
    bucket = Bucket(MESSAGES_PER_SECOND, time.monotonic())
    try:
        while True:
            message = await _read(socket)
            while wait := bucket.wait(time.monotonic()):
                leading.metrics.refused("rate")
                await asyncio.sleep(wait)
            if isinstance(message, AgentHello) and message.record.node != connection.node:
                raise _Impostor(message.record.node)
            if isinstance(message, Up) and isinstance(message.body, StoreCall) and message.body.op == "get":
                call = asyncio.create_task(leading.heard(connection, message))
                calls.add(call)
                call.add_done_callback(calls.discard)
            else:
                await leading.heard(connection, message)
    finally:
        for call in calls:
            call.cancel()


async def _read(socket: WebSocket) -> ToLeader:
    """The next message, as text or bytes. Raises `WebSocketDisconnect`, `msgspec.DecodeError`."""
    received = await socket.receive()
    if received["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(received.get("code", 1000))
    data = received.get("bytes") or (received.get("text") or "").encode()
    return to_leader(data)
