"""The coordinator's REST: what people and programs ask, and what they may change; chaos has its own."""

from __future__ import annotations

import codecs
from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated, Any, Protocol

import msgspec

from elasticd.config.security import Role
from elasticd.coordinator.auth import ANYBODY, Authorizer, Caller
from elasticd.coordinator.commands import Commands
from elasticd.coordinator.http.response_encoder import Viewers
from elasticd.coordinator.http.routing import get, post
from elasticd.coordinator.leader import Leader
from elasticd.coordinator.live_config import Scalar
from elasticd.coordinator.live_feed import FeedSource
from elasticd.coordinator.metrics import CONTENT_TYPE
from elasticd.coordinator.worker_output import ANSWER_BYTES
from elasticd.records import AnyHistoryRecord, JobSpec
from elasticd.wire.api_types import (
    ApiError,
    CallerStatus,
    ClusterStatus,
    Events,
    History,
    Live,
    OutputText,
    Ready,
    Settings,
    Steps,
    Stopping,
    unknown,
)

#: The longest that a user may have a job's end wait for.
MOST_STOP_SECONDS = 86_400.0


class DrainRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The wish to have a node's devices left, or used again."""

    on: bool


class StopRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds that the workers have for a last checkpoint (0: none), and who asks for it."""

    by: str
    seconds: Annotated[float, msgspec.Meta(ge=0, le=MOST_STOP_SECONDS)] = 600.0


class ByRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sender of the request."""

    by: str


class ConfigRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Values by dotted key, null for the file's own, and who asks for it."""

    values: dict[str, Scalar | None]
    by: str


class Served(Protocol):
    """The contents that the server shows: the leader, its status, and the history that only the store has.
    `viewers` make and encode what is large beside the loop."""

    leading: Leader
    commands: Commands
    access: Authorizer
    viewers: Viewers

    async def status(self) -> ClusterStatus:
        """The cluster now."""
        ...

    async def history(self, job: str, after: int) -> list[AnyHistoryRecord]:
        """Every plan of a job with a number above this one, oldest first."""
        ...

    def listening(self) -> FeedSource:
        """The source of the live feed."""
        ...

    def ready(self) -> str:
        """Why it is not ready, or nothing."""
        ...


class ApiRoutes:
    """The routes of one coordinator. `document` is the OpenAPI document that this is part of, once drawn."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self.document: dict[str, Any] = {}

    @get("/v1/openapi.json")
    async def openapi(self) -> dict[str, Any]:
        """This document."""
        return self.document

    @get("/v1/status", large=True)
    async def status(self) -> ClusterStatus:
        """The leader, the nodes with their devices and rates, and the jobs with their plans."""
        return await self._served.status()

    @get("/v1/events", large=True)
    async def events(self, after: int = 0) -> Events:
        """The newest events: those with an id above `after`, oldest first."""
        return Events(events=tuple(self._served.leading.journal.events(after)))

    @get("/v1/jobs/{job}/steps", large=True)
    async def steps(self, job: str, after: int = -1) -> Steps:
        """Steps of a job above `after`, oldest first."""
        self._know(job)
        journal = self._served.leading.journal
        return Steps(steps=tuple(journal.steps(job, after)), pacing=journal.pacing(job))

    @get("/v1/jobs/{job}/history", large=True)
    async def history(self, job: str, after: int = -1) -> History:
        """Every plan of a job with the problem that it answers, oldest first: those with a number above
        `after`."""
        self._know(job)
        return History(history=tuple(await self._served.history(job, after)))

    @get("/v1/jobs/{job}/spec")
    async def spec(self, job: str) -> JobSpec:
        """A job's spec: its model's tensors, its batch and its settings."""
        self._know(job)
        job_state = self._served.leading.state.jobs.get(job)
        if job_state is None or job_state.spec is None:
            raise ApiError("unknown", f"job {job} has no worker that said what it trains yet")
        if not isinstance(job_state.spec, JobSpec):
            raise ApiError(
                "unknown", f"job {job} trains a loop of its own on a mesh: elasticd cuts no model of it"
            )
        return job_state.spec

    @get("/v1/nodes/{node}/devices/{index}/output", refuses=(503,))
    async def output(
        self, node: str, index: str, job: str = "", after: int = -ANSWER_BYTES, most: int = ANSWER_BYTES
    ) -> OutputText:
        """The output of a device's worker, as far as its agent keeps it: at most so many bytes behind the first
        `after`, or behind all but the newest `-after`. `job`: without it the newest one's."""
        device = f"{node}/{index}"
        part = await self._served.leading.outputs.read(device, job, after, max(1, most))
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(part.data)
        cut = len(decoder.getstate()[0])  # bytes of a character of which the rest comes with the next part
        return OutputText(device=device, job=part.job, begin=part.begin, end=part.end - cut, text=text)

    @post("/v1/nodes/{node}/drain", refuses=(409, 503), example=DrainRequest(on=True))
    async def drain(self, node: str, body: DrainRequest, caller: Caller | None) -> DrainRequest:
        """Lets the devices of a node be left by all plans, or be used again."""
        commands = self._served.commands
        what = f"asked for node {node} to be {'drained' if body.on else 'used again'}"
        audit = partial(self._asked, caller, what, action="drain" if body.on else "undrain", node=node)
        await commands.decide(lambda: commands.drain(node, body.on), audit)
        return body

    @post("/v1/nodes/{node}/forget", refuses=(409, 503), example=ByRequest(by="alice"))
    async def forget_node(self, node: str, body: ByRequest, caller: Caller | None) -> ByRequest:
        """Shows a node no more that is away; it is known again once its agent comes back."""
        by = _by(body.by, caller)
        commands = self._served.commands
        what = f"asked for node {node} to be forgotten"
        audit = partial(commands.audit, by, what, action="forget", node=node)
        await commands.decide(lambda: commands.forget_node(node, by), audit)
        return body

    @post("/v1/jobs/{job}/stop", refuses=(409, 503), example=StopRequest(by="alice"))
    async def stop(self, job: str, body: StopRequest, caller: Caller | None) -> Stopping:
        """Ends a job: its workers make a last checkpoint, where they have a folder for it, and leave. Says
        which nodes' workers will not hear of it, and train on until the time is up."""
        by = _by(body.by, caller)
        commands = self._served.commands
        what = f"asked for job {job} to stop within {body.seconds:g} s"
        audit = partial(commands.audit, by, what, job=job, action="stop", seconds=body.seconds)
        unheard = await commands.decide(lambda: commands.stop(job, body.seconds, by), audit)
        return Stopping(by=body.by, seconds=body.seconds, unheard=unheard)

    @post("/v1/jobs/{job}/checkpoint", refuses=(409, 503), example=ByRequest(by="alice"))
    async def checkpoint(self, job: str, body: ByRequest, caller: Caller | None) -> ByRequest:
        """Has a job make a checkpoint as soon as no other one is being written. An event tells of it once it is
        whole."""
        by = _by(body.by, caller)
        commands = self._served.commands
        what = f"asked for a checkpoint of job {job}"
        audit = partial(commands.audit, by, what, job=job, action="checkpoint")
        await commands.decide(lambda: commands.checkpoint(job), audit)
        return body

    @post("/v1/jobs/{job}/adopt", refuses=(409, 503), example=ByRequest(by="alice"))
    async def adopt(self, job: str, body: ByRequest, caller: Caller | None) -> ByRequest:
        """Writes the plan that a job's workers run to etcd, which was set up anew and lacks it."""
        by = _by(body.by, caller)
        commands = self._served.commands
        audit = partial(commands.audit, by, f"asked for job {job} to be adopted", job=job, action="adopt")
        await commands.decide(lambda: commands.adopt(job, by), audit)
        return body

    @post("/v1/jobs/{job}/forget", refuses=(409, 503), example=ByRequest(by="alice"))
    async def forget(self, job: str, body: ByRequest, caller: Caller | None) -> ByRequest:
        """Deletes all that is kept of a job that is over; its name can be used again."""
        by = _by(body.by, caller)
        commands = self._served.commands
        audit = partial(commands.audit, by, f"asked for job {job} to be forgotten", action="forget")
        await commands.decide(lambda: commands.forget(job, by), audit)
        return body

    @get("/v1/config")
    async def settings(self) -> Settings:
        """Detection and policy as they are in force, what was changed of them while running, and when."""
        return self._served.leading.changes.shown()

    @post(
        "/v1/config",
        refuses=(503,),
        example=ConfigRequest(values={"policy.paused": True}, by="alice"),
    )
    async def change(self, body: ConfigRequest, caller: Caller | None) -> Settings:
        """Changes detection and policy while running; the values are checked, kept, and followed at once."""
        by = _by(body.by, caller)
        commands = self._served.commands
        values = {key: "the file's" if value is None else value for key, value in body.values.items()}
        words = ", ".join(f"{key} = {value}" for key, value in values.items())
        audit = partial(commands.audit, by, f"changed {words}", action="config", values=body.values)
        await commands.change(body.values, by, audit)
        return commands.leader.changes.shown()

    @get("/v1/record", media="application/jsonl")
    async def record(self) -> AsyncIterator[bytes]:
        """All that the leader hears and decides from now on, until it ends or the caller goes: the lines that
        `elasticd record` keeps. Empty lines only say that nothing happened."""
        return self._served.leading.recording()

    @get("/v1/live", media="application/jsonl", refuses=(503,))
    async def live_feed(
        self, caller: Caller | None, after: str = "", measured: bool = True, page: str = ""
    ) -> AsyncIterator[bytes]:
        """All that the leader knows, then what changes, until it ends or the caller goes: a JSON object in each
        line (`elasticd.wire.live_types`). `after`: the id of the last line that the caller has; it goes
        on from there, where what followed is still kept. `measured`: false leaves out what devices measure each
        step. `page`: the URL of the caller's pages, which users are told of."""
        served, feed = self._served, self._served.leading.feed
        operator = (caller or ANYBODY).role is Role.OPERATOR
        lines = feed.listen(
            after, served.listening, served.viewers.beside, measured=measured, operator=operator
        )
        return served.leading.pages_shown.during(page, lines) if page else lines

    @get("/v1/caller")
    async def caller(self, caller: Caller | None) -> CallerStatus:
        """The caller: what this token or certificate may do here, and its name."""
        known = caller or ANYBODY
        return CallerStatus(name=known.name, role=known.role.value, asks=self._served.access.asks)

    @get("/metrics", media=CONTENT_TYPE)
    async def metrics(self) -> bytes:
        """Counters and the present state, for Prometheus."""
        leading = self._served.leading
        return await self._served.viewers.beside(leading.exposition, leading.reading())

    @get("/livez")
    async def live(self) -> Live:
        """Answers while the process runs."""
        return Live()

    @get("/readyz", refuses=(503,))
    async def ready(self) -> Ready:
        """Answers if it leads and serves."""
        if why := self._served.ready():
            raise ApiError("unavailable", why)
        return Ready()

    def _asked(self, caller: Caller | None, what: str, **data: Any) -> None:
        self._served.commands.audit((caller or ANYBODY).words, what, **data)

    def _know(self, job: str) -> None:
        jobs = self._served.leading.state.jobs
        if job not in jobs:
            raise unknown("job", job, jobs)


def _by(said: str, caller: Caller | None) -> str:
    """The sender of a request: its own name for itself, and the name of its token."""
    return f"{said} ({caller.name})" if caller is not None and caller.name else said
