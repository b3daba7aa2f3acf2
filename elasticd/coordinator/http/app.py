"""The coordinator's one port: the agents' WebSocket, and REST for people and programs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from elasticd.coordinator.http.agent_socket import serve_agent
from elasticd.coordinator.http.api import ApiRoutes, Served
from elasticd.coordinator.http.chaos import ChaosRoutes
from elasticd.coordinator.http.middleware import RequestMiddleware
from elasticd.coordinator.http.openapi import document
from elasticd.coordinator.http.routing import JSON, endpoints, routes
from elasticd.wire.api_types import ApiError, Reason, Refusal

#: The HTTP status of each reason.
STATUS: dict[Reason, int] = {
    "invalid": 400,
    "forbidden": 403,
    "unknown": 404,
    "conflict": 409,
    "unavailable": 503,
}


def application(served: Served, requests_per_second: float, hosts: frozenset[str] = frozenset()) -> Starlette:
    """The ASGI application, which lets one address ask so often; `hosts` as in `RequestMiddleware`."""
    rest, chaos = ApiRoutes(served), ChaosRoutes(lambda: served.commands)
    declared = (*endpoints(rest), *endpoints(chaos))
    rest.document = document(declared, asks=served.access.asks)

    async def agent(socket: WebSocket) -> None:
        await serve_agent(served.leading, socket)

    handlers: dict[Any, Callable[[Request, Any], Awaitable[Response]]] = {
        ApiError: _refused,
        HTTPException: _http_error,
        Exception: _broken,
    }
    gate = Middleware(
        RequestMiddleware,
        access=lambda: served.access,
        refused=lambda word: served.leading.metrics.refused(word),
        rate=requests_per_second,
        hosts=hosts,
    )
    return Starlette(
        routes=[
            *routes(declared, served.viewers),
            WebSocketRoute("/v1/agent", agent),
            WebSocketRoute("/v1/chaos/cut/{node}", chaos.stay_cut),
        ],
        exception_handlers=handlers,
        middleware=[Middleware(_Counted, served=served), gate],
    )


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


def _refusal(text: str, status: int) -> Response:
    return Response(msgspec.json.encode(Refusal(error=text)), status, media_type=JSON)


async def _refused(request: Request, error: ApiError) -> Response:
    return _refusal(str(error), STATUS[error.reason])


async def _http_error(request: Request, error: HTTPException) -> Response:
    text = f"there is no {request.url.path}" if error.status_code == 404 else error.detail
    answer = _refusal(text, error.status_code)
    answer.headers.update(error.headers or {})  # of a method that a path does not have, those that it has
    return answer


async def _broken(request: Request, error: Exception) -> Response:
    return _refusal(f"the coordinator failed on {request.url.path}; its log says why", 500)
