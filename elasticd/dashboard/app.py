"""The dashboard's HTTP: files, JSON, server-sent events, sessions, and acts that are passed on to the leader.

Every answer has the policy that keeps a page to its own origin. Who may see and do what, the leader says: a
token is shown to it when somebody signs in, and every act is passed on with the token of whoever asks for it.
Where the coordinator asks nobody who he is, neither does the dashboard; then it answers only under names of its
own, so that a page of another site cannot reach it by a name that it has pointed here.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from elasticd.codec.decoding import decoded_as
from elasticd.dashboard import act_page, views
from elasticd.dashboard.board import Board
from elasticd.dashboard.device_page import device_view
from elasticd.dashboard.event_page import event_page
from elasticd.dashboard.history import EventQuery, HistoryReader, in_brief
from elasticd.dashboard.job_page import KEPT_KINDS, MARKS, forgotten_view, job_view, record_of, step_columns
from elasticd.dashboard.plan_page import plan_row, plan_view
from elasticd.dashboard.session import Session
from elasticd.dashboard.switch_page import KINDS, nothing, switch_view
from elasticd.dashboard.viewer_requests import AskedLeader, Failure, ViewerRequests, role
from elasticd.explain.training_speed import SPEED_STEPS
from elasticd.explain.why import earlier_starts
from elasticd.records import AnyHistoryRecord, JobSpec
from elasticd.system.front_door import GUEST, Guest, network_of
from elasticd.system.network_addresses import is_address
from elasticd.wire.event_record import EventRecord

JSON = "application/json"
#: What a page may load and do: nothing from elsewhere, no script or style of its own text, no HTML from text.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types lit-html"
)
HEADERS: Mapping[str, str] = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
#: Bytes of a request's body, and seconds in which it must be there.
LARGEST_BODY, BODY_SECONDS = 64 << 10, 10.0
#: Events of a job that a plan's page looks at, and that a page of events has at most.
MOST_TOLD, MOST_LISTED = 2000, 1000
#: Answers of plans that are remembered: they are made from what does not change any more.
MOST_PLANS = 32
#: Plans that a device's page names.
MOST_COUNTED = 16
MEDIA = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".html": "text/html; charset=utf-8",
    ".json": JSON,
    ".txt": "text/plain; charset=utf-8",
}

_log = logging.getLogger(__name__)
T = TypeVar("T")


class ServedDashboard(AskedLeader, Protocol):
    """The contents that the server shows."""

    board: Board
    cookie: str  # name of the session's cookie
    secure: bool  # the server speaks TLS
    hosts: frozenset[str]  # names under which it may be asked

    async def read(self, work: Callable[[HistoryReader], T]) -> T:
        """Reads the history, beside the loop."""
        ...

    async def spec(self, job: str) -> JobSpec | None:
        """A job's spec, asked of the leader; None where that cannot be known now."""
        ...


# -- static files --------------------------------------------------------------------------------------------


class Assets:
    """The page's files, read once. `hash` changes with any of them, so that browsers may keep them for ever."""

    def __init__(self, folder: Traversable | None = None) -> None:
        place = folder if folder is not None else files("elasticd.dashboard") / "static"
        self._files = dict(sorted(_within(place))) if place.is_dir() else {}
        digest = hashlib.sha256()
        for name, content in self._files.items():
            digest.update(name.encode() + b"\0" + content + b"\0")
        self.hash = digest.hexdigest()[:16]
        self.index = self._files.get("index.html", b"").replace(
            b"/static/HASH/", f"/static/{self.hash}/".encode()
        )

    def get(self, name: str) -> bytes | None:
        """A file's content."""
        return self._files.get(name) if name != "index.html" else None


def _within(folder: Traversable, before: str = "") -> list[tuple[str, bytes]]:
    files: list[tuple[str, bytes]] = []
    for entry in folder.iterdir():
        if entry.is_dir():
            files += _within(entry, f"{before}{entry.name}/")
        elif any(entry.name.endswith(end) for end in MEDIA):
            files.append((before + entry.name, entry.read_bytes()))
    return files


# -- the application -----------------------------------------------------------------------------------------


class DashboardRoutes:
    """The routes of the dashboard."""

    def __init__(self, served: ServedDashboard, assets: Assets) -> None:
        self._served, self._assets = served, assets
        self._requests = ViewerRequests(served)
        self._plans: dict[tuple[object, ...], views.PlanView] = {}
        self._lock = threading.Lock()  # of these: threads that read the history share them

    def routes(self) -> list[Route]:
        """All paths."""
        return [
            Route("/static/{hash}/{name:path}", self.asset),
            Route("/session", self.session, methods=["POST", "DELETE"]),
            Route("/api/viewer", self._json(self.viewer)),
            Route("/api/cluster", self._seen(self.cluster)),
            Route("/api/jobs/{job}", self._seen(self.job)),
            Route("/api/jobs/{job}/steps", self._seen(self.steps)),
            Route("/api/jobs/{job}/plans", self._seen(self.plans)),
            Route("/api/jobs/{job}/plans/{number}", self._seen(self.plan)),
            Route("/api/jobs/{job}/switch", self._seen(self.switch)),
            Route("/api/devices/{node}/{rank}", self._seen(self.device)),
            Route("/api/devices/{node}/{rank}/output", self._seen(self.output)),
            Route("/api/events", self._seen(self.events)),
            Route("/api/config", self._seen(self.config)),
            Route("/api/act", self._seen(self.acts)),
            Route("/api/act/{name}", self._seen(self.act), methods=["POST"]),
            Route("/api/live", self.live),
            *(Route(path, self.page) for path in PAGES),
        ]

    # -- who asks --------------------------------------------------------------------------------------------

    async def _session(self, request: Request) -> Session | None:
        """The session of whoever asks; None where there is none."""
        served = self._served
        word = request.cookies.get(served.cookie, "")
        if not served.asks:
            now = time.monotonic()
            session = Session(token=None, name="", role="operator", began=now, used=now, checked=now)
        else:
            known = served.sessions.find(word)
            if known is None or not await self._requests.checked(word, known):
                return None
            session = known
        guest: Guest | None = request.scope.get(GUEST)
        if guest is not None and not guest.enter(word):
            raise Failure(503, "too many browsers are connected: close some of your pages, or try again later")
        return session

    def _json(self, made: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
        async def answered(request: Request) -> Response:
            return _response(await made(request))

        return answered

    def _seen(
        self, made: Callable[[Request, Session], Awaitable[Any]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """An answer for those alone who are signed in."""

        async def answered(request: Request) -> Response:
            session = await self._session(request)
            if session is None:
                raise Failure(401, "sign in with a token of the coordinator's viewers or operators")
            return _response(await made(request, session))

        return answered

    # -- files and sessions ------------------------------------------------------------------------------------

    async def page(self, request: Request) -> Response:
        """The one page: what it shows follows from its path."""
        if not self._assets.index:
            raise Failure(503, "the dashboard's pages are not installed: install elasticd from a wheel")
        return Response(self._assets.index, media_type=MEDIA[".html"], headers={"cache-control": "no-cache"})

    async def asset(self, request: Request) -> Response:
        """A file of the page."""
        name = str(request.path_params["name"])
        content = self._assets.get(name)
        if content is None:
            raise Failure(404, f"there is no {request.url.path}")
        fresh = request.path_params["hash"] == self._assets.hash
        lasts = "public, max-age=31536000, immutable" if fresh else "no-cache"
        end = name[name.rfind(".") :]
        return Response(content, media_type=MEDIA[end], headers={"cache-control": lasts})

    async def session(self, request: Request) -> Response:
        """Signs in, or out."""
        served = self._served
        word = request.cookies.get(served.cookie, "")
        if request.method == "DELETE":
            served.sessions.end(word)
            answer = _response(views.Viewer(signed_in=not served.asks, asks=served.asks))
            answer.delete_cookie(
                served.cookie, path="/", httponly=True, samesite="strict", secure=served.secure
            )
            return answer
        wanted = await _body(request, views.SignIn, '{"token": "..."}')
        if not served.asks:
            return _response(views.Viewer(signed_in=True, asks=False, role="operator"))
        token = wanted.token.strip()
        address = network_of(request.client.host) if request.client else ""
        caller = await self._requests.signed_in(token, address)
        served.sessions.end(word)
        new_session = served.sessions.begin(token, caller.name, role(caller))
        answer = _response(views.Viewer(signed_in=True, asks=True, name=caller.name, role=role(caller)))
        answer.set_cookie(
            served.cookie,
            new_session,
            path="/",
            httponly=True,
            samesite="strict",
            secure=served.secure,
            max_age=604_800,
        )
        return answer

    async def viewer(self, request: Request) -> views.Viewer:
        """The sender of a request."""
        session = await self._session(request)
        if session is None:
            return views.Viewer(signed_in=False, asks=True)
        return session.viewer

    # -- JSON --------------------------------------------------------------------------------------------------

    async def cluster(self, request: Request, session: Session) -> views.ClusterView:
        """The cluster's page."""
        return self._served.board.hello(session.viewer)

    async def job(self, request: Request, session: Session) -> views.JobView:
        """A job's page."""
        job, known = self._job(request, kept=True), self._served.board.known
        if job not in self._there():
            return await self._served.read(lambda history: self._forgotten(history, job))
        events = await self._served.read(
            lambda history: _newest_events(history, job, kinds=("snapshot", "checkpoint"), limit=64)
        )
        if job not in self._there():  # it was forgotten while that was read
            return await self._served.read(lambda history: self._forgotten(history, job))
        return job_view(known, job, events, known.time(time.time()))

    def _forgotten(self, history: HistoryReader, job: str) -> views.JobView:
        """A job that no leader knows any more. Raises Failure where the history does not either."""
        events = history.events(EventQuery(job=job, kinds=KEPT_KINDS, limit=64))
        steps, plans = history.newest_steps(job, SPEED_STEPS + 1), history.numbers(job)
        if not events and not steps and not plans:
            listed = ", ".join(sorted({*self._there(), *history.facets()[1]})[:20]) or "none"
            raise Failure(404, f"there is no job {job!r}, nor is one kept; there are: {listed}")
        return forgotten_view(job, events, steps, plans)

    async def steps(self, request: Request, session: Session) -> views.StepColumns:
        """A job's steps."""
        job, since = self._job(request, kept=True), _number(request, "since", -1)

        def read(history: HistoryReader) -> views.StepColumns:
            rows, every = history.steps(job, since)
            begun = rows[0].time - rows[0].seconds if rows else None
            asked = EventQuery(job=job, kinds=tuple(MARKS), since=begun, limit=MOST_TOLD)
            before = history.step_before(job, rows[0].step) if rows else None
            return step_columns(job, rows, before, every, history.events(asked))

        return await self._served.read(read)

    async def plans(self, request: Request, session: Session) -> views.PlanList:
        """All plans of a job."""
        job = self._job(request, kept=True)
        force, proposed = self._numbers(job)

        def read(history: HistoryReader) -> views.PlanList:
            told = _newest_events(history, job)
            measured = history.seconds_by_plan(job)
            rows = [
                plan_row(head, heard=at, in_force=force, proposed=proposed, measured=measured, told=told[::-1])
                for head, at in history.heads(job)
            ]
            return views.PlanList(job=job, plans=tuple(reversed(rows)))

        return await self._served.read(read)

    async def plan(self, request: Request, session: Session) -> views.PlanView:
        """A plan's page."""
        job, number = self._job(request, kept=True), _whole("number", str(request.path_params["number"]))
        force, proposed = self._numbers(job)
        spec = await self._served.spec(job)

        def read(history: HistoryReader) -> views.PlanView:
            found, numbers = history.plan(job, number), history.numbers(job)
            if found is None:
                listed = ", ".join(map(str, numbers[-12:])) or "none"
                raise Failure(404, f"no plan {number} of job {job} is kept; the last ones: {listed}")
            record, heard = found
            told = _newest_events(history, job)[::-1]
            earlier = [other for other in numbers if earlier_starts(number, told) < other < number]
            before = history.plan(job, _before(history, job, earlier)) if earlier else None
            row = plan_row(
                in_brief(record),
                heard=heard,
                in_force=force,
                proposed=proposed,
                measured=history.seconds_by_plan(job),
                told=told,
            )
            return self._plan_view(
                record, before[0] if before else None, row, numbers, told, history, job, spec
            )

        return await self._served.read(read)

    def _plan_view(
        self,
        record: AnyHistoryRecord,
        before: AnyHistoryRecord | None,
        row: views.PlanRow,
        numbers: tuple[int, ...],
        told: list[Any],
        history: HistoryReader,
        job: str,
        spec: JobSpec | None,
    ) -> views.PlanView:
        """Made anew only where something changed since it was asked for last."""
        last = told[-1].id if told else 0
        key = (job, record.number, row, numbers, last, spec is None, before.number if before else None)
        with self._lock:
            if (remembered := self._plans.get(key)) is not None:
                return remembered
        around = [
            *(history.steps_of_plan(job, before.number)[-64:] if before is not None else ()),
            *history.steps_of_plan(job, record.number),
        ]
        view = plan_view(record, before, row, numbers, told, [record_of(step) for step in around], spec)
        with self._lock:
            while len(self._plans) >= MOST_PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[key] = view
        return view

    async def switch(self, request: Request, session: Session) -> views.SwitchView:
        """A switch of a job: the newest one, or that of a number."""
        job, number = self._job(request, kept=True), _number(request, "number", 0)
        board = self._served.board

        def read(history: HistoryReader) -> views.SwitchView:
            wanted = number or history.newest_switch(job)
            told = _newest_events(history, job, kinds=KINDS)[::-1]
            newest = max((event.data.get("number", 0) for event in told if event.kind == "proposed"), default=0)
            wanted = number or max(wanted, newest)
            if not wanted:
                return nothing(job)
            mine = [event for event in told if event.data.get("number") == wanted or event.kind == "fenced"]
            if number and not any(event.data.get("number") == number for event in told):
                raise Failure(404, f"no switch to a plan {number} of job {job} is kept")
            plan, before = board.plans_of_switch(job, wanted)
            if plan is None and (found := history.plan(job, wanted)) is not None:
                plan = found[0].plan
            if before is None:
                begun = earlier_starts(wanted, _newest_events(history, job, kinds=("started_again",)))
                earlier = [other for other in history.numbers(job) if begun < other < wanted]
                known = history.plan(job, _before(history, job, earlier)) if earlier else None
                before = known[0].plan if known is not None else None
            return switch_view(job, wanted, plan, before, history.ranks(job, wanted), mine)

        return await self._served.read(read)

    async def device(self, request: Request, session: Session) -> views.DeviceView:
        """A device's page."""
        node, rank = str(request.path_params["node"]), str(request.path_params["rank"])
        name, known = f"{node}/{rank}", self._served.board.known
        self._check_device(node, name)
        use = known.uses.get(name)

        def read(history: HistoryReader) -> tuple[Any, ...]:
            events = history.events(EventQuery(device=name, limit=200))
            plans = history.counted(use.job, name, MOST_COUNTED) if use is not None else []
            return history.samples(name), history.health(node), events, plans

        history_rows = await self._served.read(read)
        self._check_device(node, name)  # it may have gone while that was read
        return device_view(known, name, *history_rows)

    def _check_device(self, node: str, name: str) -> None:
        there = self._served.board.known.cluster.nodes.get(node)
        if there is None or all(device.name != name for device in there.devices):
            raise Failure(404, f"there is no device {name!r}: the cluster's page lists those that there are")

    async def output(self, request: Request, session: Session) -> views.OutputView:
        """The output of a device's worker, as the leader has it from its agent, asked with the viewer's own
        token."""
        node, rank = str(request.path_params["node"]), str(request.path_params["rank"])
        after = _number(request, "after", 0)
        job = request.query_params.get("job", "")
        return await self._requests.output(node, rank, job, after, session.token)

    async def events(self, request: Request, session: Session) -> views.EventPage:
        """Events."""
        query = request.query_params
        limit = max(1, min(MOST_LISTED, _number(request, "limit", 100)))
        kinds = tuple(kind for kind in query.get("kind", "").split(",") if kind)
        asked = EventQuery(
            job=query.get("job", ""),
            kinds=kinds[:64],
            node=query.get("node", ""),
            device=query.get("device", ""),
            since=_float(request, "since"),
            until=_float(request, "until"),
            before=_number(request, "before", 0) or None,
            id=_number(request, "id", 0) or None,
            limit=limit,
        )
        return await self._served.read(
            lambda history: event_page(history.events(asked), limit, history.facets())
        )

    async def config(self, request: Request, session: Session) -> views.ConfigView:
        """Detection and policy."""
        return act_page.config_view(self._served.board.known.cluster.settings)

    async def acts(self, request: Request, session: Session) -> views.ActList:
        """The requests to the leader that can be made."""
        return act_page.act_list(self._served.board.known, session.viewer)

    async def act(self, request: Request, session: Session) -> views.Acted:
        """Passes an act on to the leader, with the viewer's own token."""
        name = str(request.path_params["name"])
        if name not in act_page.ACTS:
            known = ", ".join(act_page.ACTS)
            raise Failure(404, f"there is no act {name!r}; there are: {known}")
        wanted = await _body(request, act_page.ActFields, '{"node": "alpha"}')
        if session.role != "operator":
            raise Failure(403, "role viewer may not do this: it needs a token of operator")
        try:
            asked = act_page.request(name, wanted, "dashboard")
        except act_page.Unusable as error:
            raise Failure(400, str(error)) from None
        answer = await self._requests.passed_on(asked.path, session.token, asked.body)
        return views.Acted(name=name, command=asked.command, answer=answer)

    # -- the stream --------------------------------------------------------------------------------------------

    async def live(self, request: Request) -> Response:
        """Server-sent events."""
        session = await self._session(request)
        if session is None:
            raise Failure(401, "sign in with a token of the coordinator's viewers or operators")
        served, board, own_session = self._served, self._served.board, session
        if why := board.streams.refusal(own_session):
            raise Failure(503, why)
        browser = board.streams.admit(own_session)
        stream = board.streams.listen(
            browser,
            request.headers.get("last-event-id", ""),
            lambda: board.hello(own_session.viewer),
            lambda: own_session.ended or (own_session.token is None and served.asks),
        )
        return _Stream(stream, lambda: board.streams.leave(browser))

    # -- what is asked for
    # ---------------------------------------------------------------------------------------

    def _there(self) -> set[str]:
        """The jobs that the leader knows."""
        cluster = self._served.board.known.cluster
        return {*cluster.jobs, *(job.job for job in cluster.restarts)}

    def _job(self, request: Request, *, kept: bool = False) -> str:
        """The job that is asked for. `kept`: one that the cluster has forgotten may have a history."""
        name, there = str(request.path_params["job"]), self._there()
        if name not in there and not kept:
            listed = ", ".join(sorted(there)[:20]) or "none"
            raise Failure(404, f"there is no job {name!r}; there are: {listed}")
        return name

    def _numbers(self, job: str) -> tuple[int | None, int | None]:
        """The numbers of a job's plan in force, and of the proposed one."""
        cluster = self._served.board.known.cluster
        plan, news = cluster.plans.get(job), cluster.jobs.get(job)
        return (plan.number if plan is not None else None), (news.job.proposal if news is not None else None)


#: Paths of the one page.
PAGES = (
    "/",
    "/jobs",
    "/jobs/{job}",
    "/jobs/{job}/plans",
    "/jobs/{job}/plans/{number}",
    "/jobs/{job}/switch",
    "/devices/{node}/{rank}",
    "/events",
    "/act",
    "/login",
)


class _Stream(StreamingResponse):
    """Server-sent events, which are left also where the browser goes before the first."""

    def __init__(self, events: AsyncIterator[bytes], left: Callable[[], None]) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._left = left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._left()


def _newest_events(
    history: HistoryReader, job: str, kinds: tuple[str, ...] = (), limit: int = MOST_TOLD
) -> list[EventRecord]:
    """Events of the newest run of a job, the newest first."""
    return history.events(EventQuery(job=job, kinds=kinds, after=history.after(job), limit=limit))


def _before(history: HistoryReader, job: str, earlier: list[int]) -> int:
    """The plan that was in force before: the last one of these that steps were made under, else the last."""
    seconds = history.seconds_by_plan(job)
    return next((number for number in reversed(earlier) if number in seconds), earlier[-1])


async def _body(request: Request, kind: type[T], example: str) -> T:
    if request.headers.get("content-type", "").partition(";")[0].strip() != JSON:
        raise Failure(400, f"the body must be JSON, with the header Content-Type: {JSON}")
    content = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                content += piece
                if len(content) > LARGEST_BODY:
                    raise Failure(413, f"the body must have at most {LARGEST_BODY} bytes")
    except TimeoutError:
        raise Failure(408, f"the body must be there within {BODY_SECONDS:g} s") from None
    try:
        return decoded_as(kind, bytes(content))
    except msgspec.DecodeError as error:
        raise Failure(400, f"the body must be as {example}: {error}") from None


def _number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name)
    return default if text is None or text == "" else _whole(name, text)


def _whole(name: str, text: str) -> int:
    """A number that the history can look for."""
    try:
        number = msgspec.convert(text, int, strict=False)
    except msgspec.ValidationError:
        raise Failure(400, f"{name}={text} must be a whole number") from None
    if not -(1 << 62) < number < 1 << 62:
        raise Failure(400, f"{name}={text} is too large a number")
    return number


def _float(request: Request, name: str) -> float | None:
    text = request.query_params.get(name)
    if text is None or text == "":
        return None
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not abs(number) < 1e12:
        raise Failure(400, f"{name}={text} must be unix seconds, as {time.time():.0f}")
    return number


def _response(value: Any) -> Response:
    if isinstance(value, Response):
        return value
    return Response(msgspec.json.encode(value), media_type=JSON, headers={"cache-control": "no-store"})


# -- what stands before every request --------------------------------------------------------------------------


class PageMiddleware:
    """ASGI middleware: every answer gets `HEADERS`; a request under a strange name, or for a change from
    another site's page, is refused."""

    def __init__(self, app: ASGIApp, served: ServedDashboard) -> None:
        self._app, self._served = app, served

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        headers = dict(reversed(scope["headers"]))
        if why := self._refusal(scope["method"], headers):
            body = msgspec.json.encode(views.PageRefusal(error=why))
            await Response(body, 403, media_type=JSON)(scope, receive, sending)
            return
        await self._app(scope, receive, sending)

    def _refusal(self, method: str, headers: Mapping[bytes, bytes]) -> str:
        host = headers.get(b"host", b"").decode("latin-1")
        try:
            name = urlsplit(f"//{host}").hostname or ""
            origin = headers.get(b"origin")
            foreign = origin is not None and urlsplit(origin.decode("latin-1")).netloc != host
        except ValueError:
            return "the header Host or Origin is none"
        if not self._served.asks and name not in self._served.hosts and not is_address(name):
            return (
                f"this dashboard is not {name!r}: ask it under its address, or set tokens in section "
                "[security] of the coordinator's configuration"
            )
        site = headers.get(b"sec-fetch-site", b"same-origin")
        changing = method not in ("GET", "HEAD")
        if changing and (foreign or site not in (b"same-origin", b"none")):
            return "a page of another site may not ask this: use the dashboard's own"
        return ""


def application(served: ServedDashboard, assets: Assets | None = None) -> Starlette:
    """The ASGI application."""

    async def failed(request: Request, failure: Failure) -> Response:
        return Response(
            msgspec.json.encode(views.PageRefusal(error=str(failure))),
            failure.status,
            media_type=JSON,
            headers={"cache-control": "no-store"},
        )

    async def http_error(request: Request, error: HTTPException) -> Response:
        text = f"there is no {request.url.path}" if error.status_code == 404 else error.detail
        answer = Response(
            msgspec.json.encode(views.PageRefusal(error=text)), error.status_code, media_type=JSON
        )
        answer.headers.update(error.headers or {})
        return answer

    async def broken(request: Request, error: Exception) -> Response:
        _log.error("failed on %s", request.url.path, exc_info=error)
        text = f"the dashboard failed on {request.url.path}; its log says why"
        return Response(msgspec.json.encode(views.PageRefusal(error=text)), 500, media_type=JSON)

    handlers: dict[Any, Callable[[Request, Any], Awaitable[Response]]] = {
        Failure: failed,
        HTTPException: http_error,
        Exception: broken,
    }
    pages = DashboardRoutes(served, assets or Assets())
    app = Starlette(
        routes=pages.routes(),
        exception_handlers=handlers,
        middleware=[Middleware(PageMiddleware, served=served)],
    )
    app.router.redirect_slashes = False
    return app
