"""REST from methods: what a method's signature says is decoded, answered and documented.

    @post("/v1/nodes/{node}/drain", refuses=(409,), example=DrainRequest(on=True))
    async def drain(self, node: str, body: DrainRequest) -> DrainRequest:
        \"""Lets the devices of a node be left, or used again.\"""

A parameter that the path names comes from there, `body` is the request's JSON, `caller` is who asks; all
others come from the query and have defaults. Answers are JSON; bytes, and an iterator of them, are sent as they
are, as the type `media`.
`openapi` draws the document from the same declarations, so that neither can say what the other does not.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar, get_type_hints

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route, compile_path

from elasticd.codec.decoding import decoded_as
from elasticd.coordinator.auth import needed
from elasticd.coordinator.http.middleware import CALLER
from elasticd.coordinator.http.response_encoder import Viewers
from elasticd.wire.api_types import ApiError

JSON = "application/json"
_MARK = "__declared__"
Method = TypeVar("Method", bound=Callable[..., Awaitable[Any]])


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """A value of the path or of the query; `default` is None for one of the path."""

    name: str
    kind: Any
    default: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiRoute:
    """One method of one path. refuses: statuses that it answers by itself, beside those that follow from its
    parameters and from who stands before it (`middleware`). large: its answer is encoded beside the loop, and
    sent in pieces (`response_encoder`)."""

    method: str
    path: str
    name: str
    words: str
    answer: Any
    media: str
    placed: tuple[Parameter, ...]
    asked: tuple[Parameter, ...]
    body: type | None
    example: Any
    takes_caller: bool
    refuses: tuple[int, ...]
    large: bool
    call: Callable[..., Awaitable[Any]]

    @property
    def roles(self) -> tuple[str, ...]:
        """Of which one is needed; none where everybody may."""
        return tuple(role.value for role in needed("http", self.method, self.path))

    @property
    def statuses(self) -> tuple[int, ...]:
        """All with which it may be refused, whether or not the coordinator asks for tokens."""
        codes = {429, *self.refuses}
        codes |= {400} if self.body is not None or self.asked else set()
        codes |= {404} if self.placed else set()
        codes |= {401, 403} if self.roles else set()
        codes |= {408, 413} if self.body is not None else set()
        return tuple(sorted(codes))

    async def respond(self, request: Request, viewers: Viewers) -> Response:
        """Raises `ApiError`."""
        given: dict[str, Any] = {known.name: str(request.path_params[known.name]) for known in self.placed}
        given |= {known.name: _queried(request, known) for known in self.asked}
        if self.body is not None:
            given["body"] = await self._read(request, self.body)
        if self.takes_caller:
            given["caller"] = request.scope.get(CALLER)
        answer = await self.call(**given)
        if self.large:
            answer = viewers.encoded(answer)
        if isinstance(answer, AsyncIterator):
            return StreamingResponse(answer, media_type=self.media)
        content = answer if isinstance(answer, bytes) else msgspec.json.encode(answer)
        return Response(content, media_type=self.media)

    async def _read(self, request: Request, kind: type) -> Any:
        try:
            return decoded_as(kind, await request.body())
        except msgspec.DecodeError as error:
            shown = msgspec.json.encode(self.example).decode()
            raise ApiError("invalid", f"the body must be as {shown}: {error}") from error


def _queried(request: Request, known: Parameter) -> Any:
    text = request.query_params.get(known.name)
    if text is None:
        return known.default
    try:
        return msgspec.convert(text, known.kind, strict=False)
    except msgspec.ValidationError as error:
        raise ApiError("invalid", f"{known.name}={text} cannot be: {error}") from None


def get(
    path: str, *, refuses: tuple[int, ...] = (), media: str = JSON, large: bool = False
) -> Callable[[Method], Method]:
    """Declares a method that answers GET. large: with megabytes, in lists that its answer has as fields."""
    return _declared(method="GET", path=path, refuses=refuses, media=media, example=None, large=large)


def post(path: str, *, example: Any, refuses: tuple[int, ...] = ()) -> Callable[[Method], Method]:
    """Declares a method that answers POST; `example` is a body as it is to be."""
    return _declared(method="POST", path=path, refuses=refuses, media=JSON, example=example, large=False)


def _declared(**told: Any) -> Callable[[Method], Method]:
    def mark(method: Method) -> Method:
        setattr(method, _MARK, told)
        return method

    return mark


def endpoints(owner: object) -> tuple[ApiRoute, ...]:
    """All that the owner's class declares, in its order."""
    return tuple(
        _endpoint(getattr(owner, name), getattr(method, _MARK))
        for name, method in vars(type(owner)).items()
        if hasattr(method, _MARK)
    )


def _endpoint(call: Callable[..., Awaitable[Any]], told: dict[str, Any]) -> ApiRoute:
    hints = get_type_hints(call, include_extras=True)
    places = compile_path(told["path"])[2]
    parameters = [
        Parameter(name=name, kind=hints[name], default=None if name in places else known.default)
        for name, known in inspect.signature(call).parameters.items()
        if name not in ("body", "caller")
    ]
    return ApiRoute(
        **told,
        name=call.__name__,
        words=inspect.getdoc(call) or "",
        answer=hints["return"],
        placed=tuple(known for known in parameters if known.name in places),
        asked=tuple(known for known in parameters if known.name not in places),
        body=hints.get("body"),
        takes_caller="caller" in hints,
        call=call,
    )


def routes(declared: tuple[ApiRoute, ...], viewers: Viewers) -> Iterator[Route]:
    """One for each path, so that a method that it does not have is answered with those that it has."""
    for path, endpoints in groupby(
        sorted(declared, key=lambda known: known.path), key=lambda known: known.path
    ):
        methods = {known.method: known for known in endpoints}
        yield Route(path, _dispatched(methods, viewers), methods=list(methods))


def _dispatched(methods: dict[str, ApiRoute], viewers: Viewers) -> Callable[[Request], Awaitable[Response]]:
    async def dispatched(request: Request) -> Response:
        method = "GET" if request.method == "HEAD" else request.method
        return await methods[method].respond(request, viewers)

    return dispatched
