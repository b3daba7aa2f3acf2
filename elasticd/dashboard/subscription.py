"""The dashboard's one subscription to whoever leads: kept up over leaders, and written into the history.

A thread reads the leader's live feed. After each hello it first fetches what happened since the last event and
step that the history has, and only then reads on: so nothing is lost between leaders, and as events have ids
that grow from leader to leader, nothing is there twice. What it reads is handed on to the event loop in the
same order. A history that cannot be written, as on a full disk, stops no page: nothing is written then until
what it lacks could be fetched again.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from typing import Any

import msgspec
import numpy as np

from elasticd.backoff import Backoff
from elasticd.client import ApiClient, CannotReach, StoreAway
from elasticd.config.tree import ConfigError, DashboardSection
from elasticd.dashboard.age_clock import AgeClock
from elasticd.dashboard.history import HistoryWriter, Sample
from elasticd.dashboard.known import ClusterNow, another_store, step_row
from elasticd.wire import live_types as live
from elasticd.wire.step_record import StepRecord

#: Seconds between attempts to find a leader: doubled from the first to the second.
AWAY = (0.1, 1.0)
#: Steps before the last known one that are fetched again: they may have been made again.
OVERLAP = 2000
#: Seconds between two rows of a node's health, and of a device's slowdown; how much that must have changed.
HEALTH_SECONDS, SLOWDOWN_SECONDS, SLOWDOWN_CHANGE = 30.0, 5.0, 0.02
#: Seconds after which an unchanged slowdown is written again, of a device that is not normal.
STILL_SECONDS = 60.0
#: Rows of slowdowns that are written at once: the largest changes.
MOST_SAMPLES = 256
#: Seconds from the last that was measured to the mark that nothing is any more.
JUST_AFTER_SECONDS = 1e-3
#: Seconds without a measurement, beyond twice the time from one to the next, after which nothing is measured.
SILENT_SECONDS = 15.0
#: Seconds between looks at the history's size.
BOUND_SECONDS = 300.0
#: Seconds between two pieces of the work that keeps the history bounded.
BOUND_PAUSE_SECONDS = 0.01
#: Kinds of lines that rows of the history need to be known.
NEEDED = ("node", "slowdowns", "job", "plan", "proposed", "measured")
#: Seconds between two complaints about a history that cannot be written, and until it is tried again.
COMPLAIN_SECONDS, TRY_SECONDS = 60.0, 5.0
#: Under which the history has where its `AgeClock` stood.
AGES = "ages"

_log = logging.getLogger(__name__)


class Told(msgspec.Struct, frozen=True):
    """An item for the loop: a message with the time of its arrival, or why there is no leader."""

    at: float
    news: live.AnyNews | None = None
    lost: str = ""
    store_away: bool = False  # etcd does not answer, so that nobody can be found


class Subscription:
    """The thread, from `start` to `stop`.

    Args:
        connect: finds whoever leads. Raises CannotReach.
        writer: of the history; the subscription's alone from `start` on.
        tell: hands on to the loop.
    """

    def __init__(
        self,
        connect: Callable[[], AbstractContextManager[ApiClient]],
        writer: HistoryWriter,
        section: DashboardSection,
        tell: Callable[[Told], None],
    ) -> None:
        self._connect, self._writer, self._section, self._tell = connect, writer, section, tell
        self.page = ""  # URL of the pages, which the leader is told
        self._cluster = ClusterNow()  # as far as rows of the history need it
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="subscription", daemon=True)
        self._fetches = ThreadPoolExecutor(1, thread_name_prefix="fetches")
        self._api: ApiClient | None = None
        self._bounds = ThreadPoolExecutor(1, thread_name_prefix="bounds")
        self._events = self._told = writer.newest_event()  # the newest one that is written, and told to pages
        self._ahead = 0.0  # seconds by which the leader's clock is ahead of this machine's
        self._lacks, self._try_at = False, 0.0  # the history lacks something that cannot be written
        self._plans: dict[str, int] = {}
        self._health: dict[str, float] = {}
        self._sampled: dict[str, _Sampled] = {}
        self._hello: live.LiveHello | None = None
        self._bound_at = 0.0
        before = float(writer.meta(AGES) or 0) or writer.newest_time()
        self._ages = AgeClock(before, time.time(), time.monotonic())
        self._broken_at = 0.0
        self._last_id = ""
        self._lock = threading.Lock()
        #: Writes a line of a kind; False for one that is known already.
        self._handlers: dict[str, Callable[[ApiClient, live.Valued, float], bool | None]] = {
            "event": self._put_event,
            "step": self._put_new_step,
            "job": self._put_job,
            "slowdowns": self._put_slowdowns,
            "plan": self._put_plan,
            "proposed": self._put_plan,
            "progress": self._put_progress,
            "health": self._put_health,
            "measured": self._put_measured,
        }

    def start(self) -> None:
        """Begins to listen."""
        self._thread.start()

    def stop(self) -> None:
        """Ends, and closes the history."""
        self._stopped.set()
        if (api := self._api) is not None:
            api.end_live()
        if self._thread.ident is not None:
            self._thread.join(10.0)
        self._fetches.shutdown(cancel_futures=True)
        self._bounds.shutdown(cancel_futures=True)
        with self._lock:
            self._writer.close()

    def keep(self, key: str, value: bytes) -> None:
        """Writes a value, from any thread."""
        with self._lock:
            self._writer.put_meta(key, value)

    # -- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause = Backoff(*AWAY)
        while not self._stopped.is_set():
            why, away = "the leader ended", False
            try:
                with self._connect() as api:
                    self._api = api
                    if self._stopped.is_set():
                        return
                    for news in api.live(self._last_id, page=self.page):
                        if self._stopped.is_set():
                            return
                        self._on_news(api, news)
                        pause.reset()
            except (CannotReach, ConfigError) as error:
                why, away = str(error), isinstance(error, StoreAway)
            except Exception as error:
                if self._stopped.is_set():
                    return
                _log.exception("the live feed cannot be followed")
                why, self._last_id = f"elasticd's dashboard failed on what the leader says: {error!r}", ""
            finally:
                self._api = None
            if self._stopped.is_set():
                return
            self._tell(Told(at=time.time(), lost=why, store_away=away))
            self._stopped.wait(pause.next())

    def _on_news(self, api: ApiClient, news: live.AnyNews) -> None:
        now = time.time()
        if isinstance(news, live.LiveHello | live.LeaderPulse):
            self._ahead = news.at - now
        if isinstance(news, live.LiveHello):
            self._last_id, self._cluster = "", ClusterNow()
            self._plans.clear()
            self._hello = news
            self._lacks = not self._written(lambda: self._begin(news))
            self._tell(Told(at=now, news=news))
            self._fetch_events(api, news.id)
            return
        if isinstance(news, live.Keyed) and news.kind in NEEDED:
            self._cluster.apply(news)
        if self._is_new(api, news, now):
            self._tell(Told(at=now, news=news))
        if not isinstance(news, live.Whole) and self._last_id == "":
            return  # a hello is under way: it cannot be gone on with from the midst
        self._last_id = news.id
        if self._lacks and now >= self._try_at:
            self._catch_up(api, news.id, now)
        if now >= self._bound_at:
            self._bound_at = now + BOUND_SECONDS
            with suppress(RuntimeError):  # it is being stopped
                self._bounds.submit(self._bound)

    def _is_new(self, api: ApiClient, news: live.AnyNews, now: float) -> bool:
        """Writes a message. Whether it is to be handed on: events and steps that are known are not."""
        new = True
        if news.kind == "event" and isinstance(news, live.Append):
            new = news.value.id > self._told
            self._told = max(self._told, news.value.id)

        def write() -> None:
            nonlocal new
            new = self._put(api, news, now) and new

        if not self._lacks and not self._written(write):
            self._lacks = True
        return new

    def _written(self, work: Callable[[], None]) -> bool:
        """Returns True if it could be written."""
        try:
            with self._lock:
                work()
        except sqlite3.Error as error:
            self._complain(error)
            return False
        return True

    def _complain(self, error: sqlite3.Error) -> None:
        now = time.time()
        self._try_at = now + TRY_SECONDS
        if now - self._broken_at >= COMPLAIN_SECONDS and not self._stopped.is_set():
            self._broken_at = now
            _log.error(
                "the history %s cannot be written (%s): pages show what happens, and it is written once that "
                "is possible again",
                self._writer.path,
                error,
            )

    def _catch_up(self, api: ApiClient, number: str, now: float) -> None:
        """Writes what could not be written, as far as the leader still has it."""
        self._try_at = now + TRY_SECONDS
        hello = self._hello
        if hello is None or not self._written(lambda: self._begin(hello, again=True)):
            return
        self._lacks = False
        self._fetch_events(api, number)
        self._plans.clear()
        for name, job in [*self._cluster.jobs.items()]:
            if not self._lacks:
                self._is_new(api, live.put(number, "job", name, job), now)

    def _bound(self) -> None:
        """Keeps the history bounded, a little at once: the feed goes on between."""
        now = self._ages.read(time.time() + min(0.0, self._ahead), time.monotonic())
        oldest = now - self._section.keep_days * 86_400
        work = self._writer.bounding(oldest, self._section.history_mib << 20)
        try:
            self.keep(AGES, b"%f" % now)
            while not self._stopped.wait(BOUND_PAUSE_SECONDS):
                with self._lock:
                    if next(work, work) is work:
                        return
        except sqlite3.Error as error:
            self._complain(error)

    def _begin(self, hello: live.LiveHello, *, again: bool = False) -> None:
        """The history is of one etcd: events of another one begin anew, and so does the history. again: it
        could not be written before; pages have heard of the events."""
        store, epoch = (self._writer.meta(key) for key in ("store", "epoch"))
        before = (store or b"").decode(), int(epoch or b"0")
        if another_store(before, hello):
            _log.warning(
                "the leader's etcd is another one than before: what the history has of that is put aside"
            )
            self._events, self._told = 0, self._told if again else 0
            self._writer.put_aside()
        with self._writer.together():
            self._writer.put_meta("epoch", b"%d" % hello.leader.epoch)
            if hello.store:
                self._writer.put_meta("store", hello.store.encode())

    def _fetch_events(self, api: ApiClient, number: str) -> None:
        """Fetches the events since the last one that is written."""
        events = api.events(self._events)

        def write() -> None:
            with self._writer.together():
                for event in events:
                    self._writer.put_event(event)

        if not self._lacks and self._written(write):
            self._events = max((self._events, *(event.id for event in events)))
        else:
            self._lacks = True
        for event in events:
            if event.id > self._told:
                self._told = event.id
                self._tell(Told(at=time.time(), news=live.append(number, "event", event.job, event)))

    def _put(self, api: ApiClient, news: live.AnyNews, now: float) -> bool:
        """Returns True if a message is new."""
        if isinstance(news, live.Drop):
            if news.kind == "job":
                self._ended(news.key)
        elif isinstance(news, live.Valued):
            handler = self._handlers.get(news.kind)
            return handler is None or handler(api, news, now) is not False
        elif isinstance(news, live.Whole):
            for job in self._writer.going_on() - self._cluster.jobs.keys():
                self._ended(job)
        return True

    def _put_event(self, api: ApiClient, news: live.Valued, now: float) -> bool:
        new = self._writer.put_event(news.value)
        self._events = max(self._events, news.value.id)
        return new

    def _put_new_step(self, api: ApiClient, news: live.Valued, now: float) -> bool:
        return self._put_step(news.key, news.value)

    def _put_job(self, api: ApiClient, news: live.Valued, now: float) -> None:
        job, status = news.key, news.value
        if job not in self._plans:
            if 0 < status.plan < self._writer.trained_plan(job):
                self._ended(job)  # numbers of plans grow: it was forgotten while nobody listened
            self._plans[job] = self._writer.newest_plan(job)
            self._fetch_steps(api, job, news.id)
        self._want_plans(job, max(status.plan, status.job.proposal or 0))
        if status.over:
            self._unmeasured(job)

    def _put_plan(self, api: ApiClient, news: live.Valued, now: float) -> None:
        self._want_plans(news.key, news.value.number)

    def _put_progress(self, api: ApiClient, news: live.Valued, now: float) -> None:
        with self._writer.together():
            for rank in news.value.ranks:
                self._writer.put_rank(news.key, news.value.number, rank)

    def _put_health(self, api: ApiClient, news: live.Valued, now: float) -> None:
        if now - self._health.get(news.key, 0.0) >= HEALTH_SECONDS:
            self._health[news.key] = now
            self._writer.put_health(news.key, now + self._ahead, news.value)

    def _ended(self, job: str) -> None:
        self._writer.end_run(job)
        self._plans.pop(job, None)
        self._unmeasured(job)

    def _put_step(self, job: str, step: StepRecord) -> bool:
        row = step_row(self._cluster, job, step)
        return self._writer.put_step(job, step, row.predicted, row.bound)

    def _fetch_steps(self, api: ApiClient, job: str, number: str) -> None:
        """Steps that were made since the last one that is known, and those that were made again; the newest of
        them is told."""
        newest = self._writer.newest_step(job)
        steps = api.steps(job, max(-1, newest - OVERLAP)).steps
        with self._writer.together():
            new = [self._put_step(job, step) for step in steps]
        if new and new[-1]:
            self._tell(Told(at=time.time(), news=live.append(number, "step", job, steps[-1])))

    # -- plans, fetched beside -----------------------------------------------------------------------------

    def _want_plans(self, job: str, number: int) -> None:
        if number > self._plans.get(job, -1):
            after, self._plans[job] = self._plans.get(job, -1), number
            with suppress(RuntimeError):  # it is being stopped
                self._fetches.submit(self._fetch_plans, job, after, self._writer.run(job))

    def _fetch_plans(self, job: str, after: int, run: int) -> None:
        """Plans above a number, with the problems that they answer. One that is not in the store yet is there
        soon."""
        try:
            with self._connect() as api:
                records = api.history(job, after)
        except (CannotReach, ConfigError) as error:
            _log.debug("plans of job %s cannot be fetched now: %s", job, error)
            records = ()

        def write() -> None:
            with self._writer.together():
                for record in records:
                    self._writer.put_plan(job, record, time.time() + self._ahead, run)

        newest = max((record.number for record in records), default=after) if self._written(write) else after
        if newest < self._plans.get(job, -1) and not self._stopped.wait(1.0):
            self._plans[job] = newest  # with the job's next message it is asked for again

    # -- slowdowns -----------------------------------------------------------------------------------------

    def _put_measured(self, api: ApiClient, news: live.Valued, now: float) -> None:
        """Writes slowdowns that changed."""
        measured: live.MeasuredStep = news.value
        plan, job = self._cluster.plans.get(news.key), self._cluster.jobs.get(news.key)
        if plan is None or plan.number != measured.plan or (job is not None and job.over):
            return  # of a job that is over the last measurement comes after its end: its line has ended
        sampled = self._sampled.get(news.key)
        if sampled is None or sampled.plan != measured.plan or sampled.silent(now):
            self._unmeasured(news.key)
            sampled = self._sampled[news.key] = _Sampled(measured.plan, plan.members)
        rows = sampled.rows(measured, now)
        members, rates = plan.members, self._cluster.rates
        with self._writer.together():
            self._writer.put_samples(
                Sample(
                    members[rank],
                    now + self._ahead,
                    measured.step,
                    slowdown,
                    rates.get(members[rank], 1.0),
                    evidence,
                )
                for rank, slowdown, evidence in rows
            )

    def _unmeasured(self, job: str) -> None:
        """Writes of each device of a job's plan the last that was measured, and that nothing is any more: lines
        end there."""
        sampled = self._sampled.pop(job, None)
        if sampled is None:
            return
        at, rates = sampled.heard + self._ahead, self._cluster.rates
        with self._writer.together():
            for device, (measured, evidence) in sampled.newest().items():
                decided = rates.get(device, 1.0)
                self._writer.put_samples(
                    (
                        Sample(device, at, sampled.step, measured, decided, evidence),
                        Sample(device, at + JUST_AFTER_SECONDS, sampled.step, None, None, None),
                    )
                )

    def _put_slowdowns(self, api: ApiClient, news: live.Valued, now: float) -> None:
        """Writes that slowdowns were decided anew, of devices that are measured."""
        with self._writer.together():
            for sampled in self._sampled.values():
                newest = sampled.newest()
                self._writer.put_samples(
                    Sample(device, now + self._ahead, sampled.step, newest[device][0], rate, newest[device][1])
                    for device, rate in news.value.rates.items()
                    if device in newest
                )


class _Sampled:
    """The measurements of a plan's members that were written last."""

    def __init__(self, plan: int, members: tuple[str, ...]) -> None:
        self.plan, self.members = plan, members
        self.heard, self.step = 0.0, 0
        self._apart = 0.0  # seconds between the last two measurements
        self._newest: Any = None
        self._evidence: Any = None
        self._at: Any = None
        self._last: Any = None

    def silent(self, now: float) -> bool:
        """Returns True if nothing was measured for so long that lines are to break."""
        return bool(self.heard) and now - self.heard > SILENT_SECONDS + 2 * self._apart

    def newest(self) -> dict[str, tuple[float, float | None]]:
        """The slowdown and the evidence measured last, of each device that anything was written of."""
        if self._newest is None:
            return {}
        written = np.flatnonzero((self._at > 0) & np.isfinite(self._newest))
        return {
            self.members[rank]: (float(self._newest[rank]), _known(float(self._evidence[rank])))
            for rank in written
        }

    def rows(self, table: live.MeasuredStep, now: float) -> list[tuple[int, float, float | None]]:
        """Rank, slowdown and evidence of those that changed enough, or were not written for long."""
        if "slowdown" not in table.columns:
            return []
        numbers = np.frombuffer(table.numbers, "<f4").reshape(-1, len(table.columns))
        measured = numbers[:, table.columns.index("slowdown")].astype(float)
        evidence = (
            numbers[:, table.columns.index("evidence")].astype(float)
            if "evidence" in table.columns
            else np.full(len(measured), np.nan)
        )
        if self._last is None or len(self._last) != len(measured):
            self._last, self._at = np.ones(len(measured)), np.zeros(len(measured))
            self._newest = np.full(len(measured), np.nan)
        self._newest = np.where(np.isfinite(measured), measured, self._newest)
        self._evidence = evidence
        self._apart, self.heard, self.step = now - (self.heard or now), now, table.step
        with np.errstate(divide="ignore", invalid="ignore"):
            moved = np.abs(np.log(measured / self._last))
        quiet = now - self._at
        odd = (np.abs(measured - 1.0) > SLOWDOWN_CHANGE) & (quiet >= STILL_SECONDS)
        due = ((moved > SLOWDOWN_CHANGE) & (quiet >= SLOWDOWN_SECONDS)) | odd | (self._at == 0)
        due &= np.isfinite(measured)
        ranks = np.flatnonzero(due)
        if len(ranks) > MOST_SAMPLES:
            ranks = ranks[np.argsort(-moved[ranks])[:MOST_SAMPLES]]
        self._last[ranks], self._at[ranks] = measured[ranks], now
        return [(int(rank), float(measured[rank]), _known(float(evidence[rank]))) for rank in ranks]


def _known(number: float) -> float | None:
    return number if np.isfinite(number) else None
