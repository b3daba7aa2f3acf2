"""Requests to the leader in a viewer's name: whose token it is, whether it still is, and what is passed on.

A request carries the viewer's own token and nothing of the dashboard's: neither its token nor its certificate.
So the leader decides on the viewer, and never takes him for the dashboard.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any, Literal, Protocol
from urllib.parse import quote

import httpx2
import msgspec

from elasticd.codec.decoding import decoded_as
from elasticd.config.credentials import Credentials, check_token
from elasticd.config.tree import ConfigError
from elasticd.dashboard import views
from elasticd.dashboard.session import RECHECK_SECONDS, Session, Sessions
from elasticd.store.write_allowance import Allowance
from elasticd.wire.api_types import USER_HEADER, CallerStatus

#: Seconds for the leader to answer what is passed on.
LEADER_TIMEOUT_SECONDS = 15.0
#: Statuses of the leader that are passed on; others become 503.
PASSED_ON = (400, 401, 403, 404, 409, 413, 429)
#: Why no token can be checked, and what to do.
CANNOT_CHECK = (
    "the leader asks nobody for a token, so none can be checked: set tokens in section [security] at the "
    "coordinators; or, for a dashboard without them, host to 127.0.0.1 in section [dashboard], or in a network "
    "that only the cluster's users reach insecure = true in [security], and restart the dashboard"
)
#: Wrong tokens of one address that are looked at, and seconds of pause for each further one.
WRONG_AT_ONCE, WRONG_A_SECOND = 5.0, 1.0
#: Addresses whose wrong tokens are counted; those that were silent longest are forgotten.
MOST_ADDRESSES = 4096
#: Seconds between two looks at the sessions of open streams.
SESSION_CHECK_SECONDS = 5.0


class Failure(Exception):
    """A request that is not carried out: its status, and why."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class AskedLeader(Protocol):
    """The leader that requests go to."""

    sessions: Sessions

    @property
    def asks(self) -> bool:
        """True if viewers have to sign in."""
        ...

    @property
    def leader(self) -> str:
        """The URL of whoever leads; empty where nobody does."""
        ...

    def credentials(self, token: str | None) -> Credentials:
        """By which a viewer's request is passed on."""
        ...


class ViewerRequests:
    """All requests in viewers' names."""

    def __init__(self, served: AskedLeader) -> None:
        self._served = served
        self._wrong: dict[str, Allowance] = {}  # by address: tokens that the leader did not know

    async def passed_on(self, path: str, token: str | None, body: Any) -> Any:
        """The leader's answer to a POST. Raises Failure."""
        status, content = await self._ask("POST", path, token, body)
        if not 200 <= status < 300:
            raise Failure(status if status in PASSED_ON else 503, _refusal_text(content, status))
        return msgspec.json.decode(content or b"null")

    async def output(self, node: str, rank: str, job: str, after: int, token: str | None) -> views.OutputView:
        """The output of a device's worker behind the first `after` bytes, in this job, or in the newest one
        where `job` is empty. Raises Failure."""
        where = f"/v1/nodes/{quote(node, safe='')}/devices/{quote(rank, safe='')}/output"
        where += f"?after={after}&job={quote(job, safe='')}"
        status, content = await self._ask("GET", where, token, None)
        if not 200 <= status < 300:
            raise Failure(status if status in PASSED_ON else 503, _refusal_text(content, status))
        try:
            return decoded_as(views.OutputView, content)
        except msgspec.DecodeError as error:
            raise Failure(503, "the leader is of another release, which keeps no output") from error

    async def signed_in(self, token: str, address: str) -> CallerStatus:
        """Returns the caller that shows this token, from this address. Raises Failure where it is none of a
        viewer or an operator, and where too many wrong ones came from the address."""
        wrong = self._wrong.get(address)
        if wrong is not None and wrong.wait(time.monotonic()) > 0:
            raise Failure(429, "too many wrong tokens came from your address: wait some seconds, then sign in")
        try:
            return await self._known(token)
        except Failure as failure:
            if failure.status in (401, 403):
                self._note_wrong(address)
            raise

    def _note_wrong(self, address: str) -> None:
        allowance = self._wrong.pop(address, None) or Allowance(WRONG_AT_ONCE, WRONG_A_SECOND)
        self._wrong[address] = allowance  # at the end: the first is the one that was silent longest
        if len(self._wrong) > MOST_ADDRESSES:
            del self._wrong[next(iter(self._wrong))]
        allowance.spend(1, time.monotonic())

    async def _known(self, token: str) -> CallerStatus:
        try:
            check_token(token, "the token")
        except ConfigError:
            raise Failure(
                401, "this is no token: a token has 16 or more letters, digits and ._~+/=- without spaces"
            ) from None
        try:
            return await self._caller(token)
        except Failure as failure:
            if failure.status == 401:
                raise Failure(
                    401,
                    "the coordinator does not know this token: take one of its files of viewers or operators",
                ) from None
            if failure.status == 403:
                raise Failure(
                    403, "this token is for agents: take one of the files of viewers or operators"
                ) from None
            raise

    async def checked(self, word: str, session: Session) -> bool:
        """Returns True if a session goes on. The leader is asked now and then whether it still knows the
        token."""
        with suppress(Failure):  # nobody can be asked now
            await self._recheck(word, session)
        return not session.ended

    async def watch(self) -> None:
        """Checks the sessions of open streams, which ask for nothing else, until cancelled."""
        sessions = self._served.sessions
        while True:
            await asyncio.sleep(SESSION_CHECK_SECONDS)
            with suppress(Failure):  # nobody can be asked now: the next ones would wait for an answer too
                for word, session in sessions.watched():
                    await self._recheck(word, session)

    async def _recheck(self, word: str, session: Session) -> None:
        """Ends a session whose token the leader no longer knows. Raises Failure where it does not answer."""
        if session.ended or time.monotonic() - session.checked < RECHECK_SECONDS or not self._served.leader:
            return
        try:
            caller = await self._caller(session.token or "")
        except Failure as failure:
            if failure.status not in (401, 403):
                raise
            self._served.sessions.end(word)
            return
        session.checked = time.monotonic()
        session.name, session.role = caller.name, role(caller)

    async def _caller(self, token: str) -> CallerStatus:
        """The caller that a token belongs to, by the leader's word. Raises Failure."""
        status, content = await self._ask("GET", "/v1/caller", token, None)
        if status != 200:
            raise Failure(status, _refusal_text(content, status))
        try:
            caller = decoded_as(CallerStatus, content)
        except msgspec.DecodeError as error:
            raise Failure(503, "the leader is of an older release, which knows no dashboard") from error
        if self._served.asks and not caller.asks:
            raise Failure(503, CANNOT_CHECK)
        return caller

    async def _ask(self, method: str, path: str, token: str | None, body: Any) -> tuple[int, bytes]:
        """The leader's answer to a request with a viewer's token. Raises Failure where there is none."""
        served = self._served
        if served.asks and not token:
            raise Failure(401, "sign in with a token of the coordinator's viewers or operators")
        url = served.leader
        if not url:
            raise Failure(503, "nobody leads now, or the dashboard cannot reach who does: try again later")
        try:
            known = served.credentials(token)
        except ConfigError as error:  # its files may be being replaced
            raise Failure(503, str(error)) from error
        if objection := known.objection(url):
            raise Failure(503, objection)
        try:
            async with httpx2.AsyncClient(
                base_url=url,
                timeout=LEADER_TIMEOUT_SECONDS,
                trust_env=False,
                headers={**known.headers(), USER_HEADER: "dashboard"},
                verify=known.verifying(),
            ) as client:
                content = msgspec.json.encode(body) if body is not None else None
                answer = await client.request(method, path, content=content)
                return answer.status_code, answer.content
        except httpx2.HTTPError as error:
            raise Failure(
                503, f"the leader at {url} does not answer ({error or type(error).__name__})"
            ) from error


def role(caller: CallerStatus) -> Literal["viewer", "operator"]:
    """The role of a caller here."""
    return "operator" if caller.role == "operator" else "viewer"


def _refusal_text(content: bytes, status: int) -> str:
    """Why the leader said no, in its own words."""
    try:
        return msgspec.json.decode(content, type=views.PageRefusal).error
    except msgspec.DecodeError:
        return f"the leader answered {status}"
