"""Checks before every request: its sender, its page, its size and its frequency. Refusals are counted."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from urllib.parse import urlsplit

import msgspec
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from elasticd.codec.decoding import shown
from elasticd.coordinator.auth import MOST_SAID, Authorizer, Caller, CallerProof, needed
from elasticd.store.write_allowance import Allowance
from elasticd.system.front_door import GUEST, Guest
from elasticd.system.network_addresses import is_address
from elasticd.wire.api_types import USER_HEADER

#: Bytes of a request's body, and seconds for all of it: ours are a few hundred bytes.
LARGEST_BODY_BYTES = 64 * 1024
BODY_SECONDS = 10.0
#: Addresses and callers there whose requests are counted; those that were silent longest are forgotten.
_MOST_ADDRESSES = 4096
#: Under which keys a scope has the certificate of who connected, who asks, and, of a WebSocket, how to find out
#: that the other side has all that was written to it.
PEER, CALLER, ROUND_TRIP = "elasticd.peer", "elasticd.caller", "elasticd.round_trip"

_log = logging.getLogger(__name__)


class RequestMiddleware:
    """ASGI middleware in front of every request.

    Args:
        access: the callers that are known now.
        refused: counts a refusal by a word.
        rate: requests a second of an address, twice as many at once; a token has as many of its own at each
            address, whatever else is asked from there. A connection that shows a token is no stranger to the
            port any longer (`front_door`).
        hosts: names of this coordinator: while it asks for no token, it answers under an address or one of
            these alone, unless there are none: a page of another site could have its own name lead here.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        access: Callable[[], Authorizer],
        refused: Callable[[str], None],
        rate: float,
        hosts: frozenset[str] = frozenset(),
    ) -> None:
        self._app, self._access, self._refused, self._rate = app, access, refused, rate
        self._hosts = hosts
        self._allowances: dict[tuple[str, Caller | None], Allowance] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        try:
            scope[CALLER] = self._judge(scope)
        except _Refusal as refusal:
            self._refused(refusal.word)
            _log.debug("%s of %s: %s", scope["path"], (scope.get("client") or ("?",))[0], refusal)
            await _answer(scope, send, refusal)
            return
        body = receive if scope["type"] == "websocket" else _limited(receive, self._refused)
        await self._app(scope, body, send)

    def _judge(self, scope: Scope) -> Caller | None:
        """Raises `_Refusal`. Order: what costs least is asked first."""
        headers = dict(reversed(scope["headers"]))  # of one that came twice, the first
        proof = CallerProof(authorization=headers.get(b"authorization", b""), certificate=scope.get(PEER))
        caller = self._access().caller(proof)
        if not self._may_ask((scope.get("client") or ("",))[0], caller):
            raise _Refusal(429, "rate", "too many requests come from this address: ask less often")
        guest: Guest | None = scope.get(GUEST)
        if guest is not None and caller is not None and not guest.enter(proof):
            text = "all connections are taken ([security] connections): ask again later"
            raise _Refusal(503, "crowded", text)
        method = scope.get("method", "GET")
        changing = scope["type"] == "websocket" or method not in ("GET", "HEAD")
        if changing and _foreign(headers):
            raise _Refusal(403, "origin", "a page of another site may not ask this: call it from a program")
        if self._hosts and not self._access().asks and (name := self._strange_name(headers)) is not None:
            text = f"this coordinator is not {shown(name)!r}: ask it under its address, or give it tokens"
            raise _Refusal(403, "origin", text)
        if int_of(headers.get(b"content-length")) > LARGEST_BODY_BYTES:
            raise _Refusal(413, "oversized", f"the body must have at most {LARGEST_BODY_BYTES} bytes")
        roles = needed(scope["type"], method, scope["path"])
        if not roles:
            return None
        if caller is None:
            known = b"authorization" in headers or proof.certificate
            why = (
                "this token or certificate is not known here" if known else "this coordinator asks for a token"
            )
            files = " or ".join(f"{role}s" for role in roles)
            why += f": set $ELASTICD_TOKEN, or [security] token_file, to one of its {files}"
            raise _Refusal(401, "unauthenticated", why)
        if caller.role not in roles:
            why = f"role {caller.role} may not do this: it needs a token of {' or '.join(roles)}"
            raise _Refusal(403, "forbidden", why)
        return replace(caller, said=_sender_name(headers, scope)) if changing else caller

    def _strange_name(self, headers: Mapping[bytes, bytes]) -> str | None:
        """The name under which this coordinator is asked, if that is none of its own."""
        host = headers.get(b"host", b"").decode("latin-1")
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return host
        return None if name in self._hosts or is_address(name) else name

    def _may_ask(self, address: str, caller: Caller | None) -> bool:
        key = (address, caller)
        allowance = self._allowances.pop(key, None) or Allowance(2 * self._rate, self._rate)
        self._allowances[key] = allowance  # at the end: the first is the one that was silent longest
        if len(self._allowances) > _MOST_ADDRESSES:
            del self._allowances[next(iter(self._allowances))]
        return allowance.take(1, time.monotonic())


class _Refusal(Exception):
    def __init__(self, status: int, word: str, text: str) -> None:
        super().__init__(text)
        self.status, self.word = status, word

    def headers(self) -> list[tuple[bytes, bytes]]:
        # Closed, so that nobody waits for the rest of a body that is not read.
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if self.status in (429, 503):
            headers.append((b"retry-after", b"1"))
        return headers


def _limited(receive: Receive, refused: Callable[[str], None]) -> Receive:
    """`receive`, which ends a body that is too long or too slow by `HTTPException`."""
    size, whole, ends = 0, False, time.monotonic() + BODY_SECONDS

    async def limited() -> Message:
        nonlocal size, whole
        if whole:
            return await receive()
        try:
            async with asyncio.timeout(ends - time.monotonic()):
                message = await receive()
        except TimeoutError:
            refused("slow")
            raise _cut_off(408, f"the body did not come within {BODY_SECONDS:g} s") from None
        size += len(message.get("body", b""))
        whole = not message.get("more_body", False)
        if size > LARGEST_BODY_BYTES:
            refused("oversized")
            raise _cut_off(413, f"the body must have at most {LARGEST_BODY_BYTES} bytes")
        return message

    return limited


def _cut_off(status: int, text: str) -> HTTPException:
    """The rest of the body is not waited for."""
    return HTTPException(status, text, headers={"connection": "close"})


async def _answer(scope: Scope, send: Send, refusal: _Refusal) -> None:
    body = msgspec.json.encode({"error": str(refusal)})
    kind = "http.response"
    if scope["type"] == "websocket":
        if "websocket.http.response" not in scope.get("extensions", {}):
            await send({"type": "websocket.close", "code": 1008, "reason": refusal.word})
            return
        kind = "websocket.http.response"
    await send({"type": f"{kind}.start", "status": refusal.status, "headers": refusal.headers()})
    await send({"type": f"{kind}.body", "body": body})


def _foreign(headers: dict[bytes, bytes]) -> bool:
    """Returns True if a browser asks for a page of another site: it would, with all that this machine may."""
    origin = headers.get(b"origin")
    if origin is None:
        return False
    try:
        return urlsplit(origin.decode("latin-1")).netloc.encode("latin-1") != headers.get(b"host", b"")
    except ValueError:
        return True


def _sender_name(headers: dict[bytes, bytes], scope: Scope) -> str:
    """The name that a sender gives itself, else its address."""
    text = headers.get(USER_HEADER.encode(), b"").decode("latin-1")
    name = "".join(each for each in text if each.isprintable())[:MOST_SAID].strip()
    return name or f"somebody at {(scope.get('client') or ('?',))[0]}"


def int_of(text: bytes | None) -> int:
    """0 for what is no number: the server's parser has refused it already."""
    return int(text) if text is not None and text.isdigit() and len(text) < 20 else 0
