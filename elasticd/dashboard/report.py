"""The contents of a job's report: every answer of the dashboard about it, from a copy of the history.

The copy takes in what a leader, if one can be reached, has told since; then the dashboard's own application
answers the paths that the pages ask for. So a report has the same values as the pages, made by the same code.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
import zlib
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar
from urllib.parse import quote

import httpx2
import msgspec

from elasticd.client import ApiClient, CannotReach
from elasticd.config.credentials import Credentials
from elasticd.config.tree import ConfigError, DashboardSection
from elasticd.dashboard.app import Assets, application
from elasticd.dashboard.board import Board
from elasticd.dashboard.history import EventQuery, HistoryReader, StepRow, opened
from elasticd.dashboard.session import Sessions
from elasticd.dashboard.stream import Streams
from elasticd.dashboard.subscription import Subscription, Told
from elasticd.records import JobSpec
from elasticd.wire.live_types import Whole

#: Seconds to hear from a leader at all, and until it has said all that it knows; what devices measure comes at
#: most once a second.
REACH_SECONDS, MEASURE_SECONDS = 10.0, 2.5
#: Plans, and events, of a report: the newest.
MOST_PLANS, MOST_EVENTS = 64, 1000

T = TypeVar("T")
#: Finds whoever leads. Raises CannotReach or ConfigError.
Connect = Callable[[], AbstractContextManager[ApiClient]]


class NoReport(Exception):
    """There is nothing to report: why, and what to do."""


class _Kept:
    """The contents that the application shows: nobody signs in, nothing is passed on."""

    cookie, secure, hosts, leader, asks = "", False, frozenset({"report"}), "", False

    def __init__(
        self, board: Board, reader: HistoryReader, connect: Callable[[], AbstractContextManager[ApiClient]]
    ) -> None:
        self.board, self.sessions = board, Sessions()
        self._reader, self._connect = reader, connect

    def credentials(self, token: str | None) -> Credentials:
        """None: no request goes anywhere."""
        return Credentials()

    async def read(self, work: Callable[[HistoryReader], T]) -> T:
        """Reads the copy of the history."""
        return work(self._reader)

    async def spec(self, job: str) -> JobSpec | None:
        """The job's spec, if a leader can name it."""
        try:
            with self._connect() as api:
                return api.spec(job)
        except (CannotReach, ConfigError):
            return None


def report_values(job: str, filled: Callable[[Path], Board], connect: Connect) -> dict[str, Any]:
    """The answers to all requests of the pages, by path, as JSON.

    Args:
        job: its name.
        filled: makes a history at the path, and returns what is known of the cluster beside it.
        connect: finds whoever leads, who may be asked what the job trains.

    Raises:
        NoReport: neither the history nor a leader knows the job.
    """
    with TemporaryDirectory(prefix="elasticd-report-") as folder:
        copy = Path(folder) / "history.db"
        board = filled(copy)
        with closing(HistoryReader(str(copy))) as reader:
            return asyncio.run(_answers(job, _Kept(board, reader, connect)))


def of_history(history: Path, connect: Connect, section: DashboardSection) -> Callable[[Path], Board]:
    """For `report_values`: a copy of a dashboard's history, which may be missing or in use, with what a leader
    has told since."""

    def filled(copy: Path) -> Board:
        if history.exists():
            _copied(history, copy)
        return _board(copy, connect, section)

    return filled


def _copied(history: Path, copy: Path) -> None:
    """A copy of a database that others may be writing."""
    try:
        url = f"file:{quote(str(history))}?mode=ro"
        with (
            closing(sqlite3.connect(url, uri=True, timeout=10.0)) as source,
            closing(sqlite3.connect(copy)) as target,
        ):
            source.backup(target)
    except sqlite3.Error as error:
        raise NoReport(f"the history {history} cannot be read: {error}") from error


def _board(copy: Path, connect: Connect, section: DashboardSection) -> Board:
    """The board, from the history and from a leader, if one answers."""
    board, said = Board(Streams(0)), deque[Told]()
    writer = opened(copy)
    saved = writer.meta("view")
    if saved is not None:
        with suppress(msgspec.DecodeError, zlib.error):
            board.known.restore_view(zlib.decompress(saved))
    with closing(HistoryReader(str(copy))) as reader:
        told = reader.events(EventQuery(limit=2000))[::-1]
        newest = {job: reader.newest_step(job) for job in reader.facets()[1]}
    board.remember(told, {job: step for job, step in newest.items() if isinstance(step, StepRow)})
    subscription = Subscription(connect, writer, section, said.append)
    subscription.start()
    try:
        _listen(board, said)
    finally:
        subscription.stop()
    return board


def _listen(board: Board, said: deque[Told]) -> None:
    """Until a leader has said all, or nobody leads."""
    ends = time.monotonic() + REACH_SECONDS
    complete = False
    while time.monotonic() < ends:
        while said:
            one = said.popleft()
            board.hear(one)
            if one.lost and not complete:
                return
            if not complete and isinstance(one.news, Whole):
                complete, ends = True, time.monotonic() + MEASURE_SECONDS
        time.sleep(0.02)


async def _answers(job: str, kept: _Kept) -> dict[str, Any]:
    transport = httpx2.ASGITransport(app=application(kept, Assets()), raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://report") as client:

        async def asked(path: str) -> Any:
            answer = await client.get(path)
            if answer.status_code >= 500:
                raise NoReport("the history is not one that this release of elasticd reads: the log says why")
            return msgspec.json.decode(answer.content) if answer.is_success else None

        base = f"/api/jobs/{quote(job, safe='')}"
        answers: dict[str, Any] = {"/api/cluster": await asked("/api/cluster")}
        answers |= {
            path: await asked(path) for path in (base, f"{base}/steps", f"{base}/plans", f"{base}/switch")
        }
        if answers[base] is None:
            known = ", ".join(row["job"] for row in answers["/api/cluster"]["jobs"]) or "none"
            raise NoReport(f"there is no job {job!r} in the history, nor at a leader; there are: {known}")
        for row in (answers[f"{base}/plans"] or {"plans": ()})["plans"][:MOST_PLANS]:
            number = row["number"]
            answers[f"{base}/plans/{number}"] = await asked(f"{base}/plans/{number}")
            answers[f"{base}/switch?number={number}"] = await asked(f"{base}/switch?number={number}")
        for device in _devices(kept.board, job):
            node, _, rank = device.rpartition("/")
            path = f"/api/devices/{quote(node, safe='')}/{quote(rank, safe='')}"
            answers[path] = await asked(path)
        answers["/api/events"] = await asked(f"/api/events?limit={MOST_EVENTS}")
    cluster = answers["/api/cluster"]
    if not cluster["leader"]["reachable"] and cluster["heard"]:
        cluster["now"] = cluster["heard"]  # the report is of then
    cluster["jobs"] = [row for row in cluster["jobs"] if row["job"] == job]
    cluster["abnormal"] = [row for row in cluster["abnormal"] if row["what"] != "job" or row["name"] == job]
    cluster["viewer"] = {"signed_in": True, "asks": False, "name": "", "role": ""}
    start = f"/jobs/{quote(job, safe='')}"
    return {"start": start, **{path: value for path, value in answers.items() if value is not None}}


def _devices(board: Board, job: str) -> list[str]:
    """The devices of a job: a cluster may have many more, each with a page."""
    cluster = board.known.cluster
    devices = {member.device for member in cluster.members.get(job, ())}
    if (plan := cluster.plans.get(job)) is not None:
        devices.update(plan.members, plan.carriers, plan.idle)
    devices.update(
        device for each in cluster.restarts if each.job == job for device in (*each.members, *each.devices)
    )
    return sorted(devices)
