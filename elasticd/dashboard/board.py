"""The board: what is known of the cluster, and what of it changed for browsers, on the dashboard's event loop.

The subscription's thread hands messages on, in order. Events go to browsers at once; cells of devices, steps
and progress of switches are gathered and told a few times a second, however many messages there were.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
from elasticd_planner.spec.mesh import JobPlan

from elasticd.dashboard import views
from elasticd.dashboard.cluster_page import (
    FAILED_SECONDS,
    OVER,
    abnormal,
    changed,
    cluster_view,
    counted,
    event_row,
    job_row,
    live_leader,
    node_row,
    restart_row,
    restarting,
)
from elasticd.dashboard.history import StepRow
from elasticd.dashboard.job_page import live_step
from elasticd.dashboard.known import KnownCluster
from elasticd.dashboard.stream import Streams
from elasticd.dashboard.subscription import Told
from elasticd.dashboard.switch_page import KINDS, switch_view
from elasticd.wire import live_types as live
from elasticd.wire.event_record import EventRecord
from elasticd.wire.step_record import StepRecord

_log = logging.getLogger(__name__)

#: Seconds between two looks at what is to be told; between two steps of a job, tables and pulses.
TURN, SECOND = 0.25, 1.0
#: Switches of a job that are remembered as they went.
MOST_SWITCHES = 4


class _Switch:
    """A switch as it goes."""

    def __init__(self) -> None:
        self.said: list[live.RankNews] = []
        self.told: list[EventRecord] = []
        self.plan: JobPlan | None = None
        self.before: JobPlan | None = None


class Board:
    """All of it runs on one loop."""

    def __init__(self, streams: Streams) -> None:
        self.known = KnownCluster()
        self.streams = streams
        self.rows: dict[str, views.NodeRow] = {}  # of the heat map, as browsers were told
        self._steps: dict[str, StepRow] = {}
        self._told_step: dict[str, float] = {}
        self._before: dict[str, StepRow] = {}  # by job: the step that was told last
        self._told_stages: dict[str, int] = {}
        self._told_rows: dict[str, views.JobRow] = {}
        self._told_restarts: dict[str, views.JobRow] = {}
        self._old_at = math.inf  # when a failure is no news any more, which the table of what is not normal has
        self._jobs: set[str] = set()
        self._switches: dict[str, dict[int, _Switch]] = {}
        self._moving: set[tuple[str, int]] = set()
        self._table_at = self._pulse_at = 0.0
        self._stale = False
        self._hello: views.ClusterView | None = None  # as it still is
        self._handlers: dict[str, Callable[[str, Any], None]] = {
            "event": self._event,
            "step": self._step,
            "plan": self._planned,
            "proposed": self._proposed,
            "progress": self._progress,
        }

    # -- what comes in -------------------------------------------------------------------------------------

    def hear(self, told: Told) -> None:
        """A message of the subscription."""
        if told.news is None:
            self._hello = None
            self.known.lost(told.lost, told.at)
            if told.store_away:
                self.known.store(away=True, at=self.known.time(told.at))
            self.streams.tell("leader", live_leader(self.known, self.known.time(time.time())))
            return
        news, was = told.news, self.known.reachable
        if news.kind not in ("pulse", "measured", "step"):
            self._hello = None
        if self.known.hear(news, told.at):
            self.redraw()
            self.streams.begin_anew()
        elif not was and self.known.reachable:
            self.streams.tell("leader", live_leader(self.known, self.known.time(time.time())))
        if isinstance(news, live.Keyed):
            self._change(news)

    def _change(self, news: live.Keyed) -> None:
        if news.kind == "job":
            self._jobs.add(news.key)
        elif news.kind in ("health", "links"):
            self._stale = True
        elif isinstance(news, live.Valued) and (handler := self._handlers.get(news.kind)) is not None:
            handler(news.key, news.value)

    def _event(self, job: str, event: EventRecord) -> None:
        self.streams.tell("event", event_row(event))
        self._stale = True
        if event.job in self.known.cluster.jobs:
            self._jobs.add(event.job)
        number = event.data.get("number")
        if event.kind in KINDS and isinstance(number, int) and event.job:
            self._switch(event.job, number).told.append(event)
            if event.kind != "fenced":
                self._moving.add((event.job, number))

    def _step(self, job: str, step: StepRecord) -> None:
        row = self.known.cluster.newest.get(job)
        if row is not None and (row.step, row.time) == (step.step, step.time):
            self._steps[job] = row

    def _planned(self, job: str, plan: JobPlan) -> None:
        self._jobs.add(job)
        self._switch(job, plan.number).plan = plan
        self._moving.add((job, plan.number))

    def _proposed(self, job: str, plan: JobPlan) -> None:
        switch = self._switch(job, plan.number)
        if switch.plan is None:
            switch.before = self.known.cluster.plans.get(job)
        self._planned(job, plan)

    def _progress(self, job: str, progress: live.SwitchProgress) -> None:
        self._switch(job, progress.number).said.extend(progress.ranks)
        self._moving.add((job, progress.number))

    def _switch(self, job: str, number: int) -> _Switch:
        switches = self._switches.setdefault(job, {})
        if number not in switches:
            switches[number] = _Switch()
            for old in sorted(switches)[:-MOST_SWITCHES]:
                del switches[old]
        return switches.get(number) or _Switch()

    # -- what goes out -------------------------------------------------------------------------------------

    def redraw(self) -> None:
        """All rows of the heat map anew."""
        self.rows = {name: node_row(self.known, node) for name, node in self.known.cluster.nodes.items()}
        self.known.touched, self.known.gone = set(), set()

    async def looks(self) -> None:
        """Tells browsers what changed, until cancelled."""
        while True:
            await asyncio.sleep(TURN)
            try:
                self.look(time.time())
            except Exception:  # else no page would hear anything until the dashboard is started again
                _log.exception("the dashboard failed on what changed")

    def look(self, now: float) -> None:
        """Tells browsers what changed since the last look."""
        if self.known.touched or self.known.gone:
            self._hello = None
        self._devices(now)
        self._publish_jobs(now)
        for job, number in sorted(self._moving):
            self.streams.tell("progress", self.switch(job, number))
        self._moving.clear()
        if now - self._pulse_at >= SECOND:
            self._pulse_at = now
            self._stale = self._stale or self.known.heard >= self._old_at
            self._publish_restarts(self.known.time(now))
            self.streams.tell("leader", live_leader(self.known, self.known.time(now)))

    def _devices(self, now: float) -> None:
        known = self.known
        if not (known.touched or known.gone or self._stale):
            return
        cells: list[views.DeviceCell] = []
        nodes: list[views.NodeRow] = []
        for name in sorted(known.touched):
            node = known.cluster.nodes.get(name)
            if node is None:
                continue
            row = node_row(known, node)
            anew, some = changed(self.rows.get(name), row)
            nodes += [row] if anew else []
            cells += some
            self.rows[name] = row
        gone = tuple(sorted(name for name in known.gone if self.rows.pop(name, None) is not None))
        known.touched, known.gone = set(), set()
        self._stale = self._stale or bool(cells or nodes or gone)
        if not self._stale:
            return
        table = None
        if now - self._table_at >= SECOND or len(self.rows) < 64:
            self._table_at, self._stale = now, False
            table = abnormal(known, [self.rows[name] for name in sorted(self.rows)])
            failures = [row.since for row in table if row.state == "failed" and row.since is not None]
            self._old_at = min(failures, default=math.inf) + FAILED_SECONDS
        if not (cells or nodes or gone or table is not None):
            return
        self.streams.tell(
            "devices",
            views.LiveDevices(
                devices=tuple(cells),
                nodes=tuple(nodes),
                gone=gone,
                counts=counted(self.rows.values()),
                abnormal=table,
                heard=known.heard,
            ),
        )

    def _publish_jobs(self, now: float) -> None:
        for job, row in list(self._steps.items()):
            if now - self._told_step.get(job, 0.0) < SECOND:
                continue
            before, self._before[job] = self._before.get(job), row
            shown = live_step(self.known, job, row, before, self._told_stages.get(job), self.known.time(now))
            del self._steps[job]
            self._told_step[job] = now
            if shown is not None:
                self.streams.tell("step", shown)
                if shown.measured_step is not None:
                    self._told_stages[job] = shown.measured_step
        for job in sorted(self._jobs):
            self._publish_plan(job, self.known.time(now))
        self._jobs.clear()

    def _publish_plan(self, job: str, now: float) -> None:
        """A job's row, where more than its step changed."""
        news = self.known.cluster.jobs.get(job)
        if restarting(self.known.cluster, job) is not None:
            self._told_rows.pop(job, None)
            self._told_restarts.pop(job, None)  # its row took the place of the other one's
            return
        if news is None:
            self._before.pop(job, None)
            if (last := self._told_rows.pop(job, None)) is not None:
                self.streams.tell("plan", views.LivePlan(row=last, over=True, gone=True))
                self._switches.pop(job, None)
            return
        row = job_row(self.known, job, now)
        before = self._told_rows.get(job)
        if before is None or _lasting(before) != _lasting(row):
            self._told_rows[job] = row
            self.streams.tell("plan", views.LivePlan(row=row, over=news.over))

    def _publish_restarts(self, now: float) -> None:
        """Rows of jobs in restart mode that changed: also how long they are silent."""
        cluster = self.known.cluster
        jobs = [job for job in cluster.restarts if restarting(cluster, job.job) is not None]
        rows = {job.job: restart_row(self.known, job, now) for job in jobs}
        for name, row in rows.items():
            if row != self._told_restarts.get(name):
                self.streams.tell("plan", views.LivePlan(row=row, over=row.phase in OVER))
        gone = self._told_restarts.keys() - rows.keys()
        self._jobs |= gone & cluster.jobs.keys()
        for name in gone - cluster.jobs.keys():
            self.streams.tell("plan", views.LivePlan(row=self._told_restarts[name], over=True, gone=True))
        self._told_restarts = rows

    # -- what pages ask for --------------------------------------------------------------------------------

    def hello(self, viewer: views.Viewer) -> views.ClusterView:
        """Everything, as it is now: made once for all browsers that begin anew together."""
        now = self.known.time(time.time())
        if self._hello is None or not 0 <= now - self._hello.now < SECOND:
            self._hello = cluster_view(self.known, self._rows_now(), viewer, now)
        return msgspec.structs.replace(self._hello, viewer=viewer)

    def _rows_now(self) -> dict[str, views.NodeRow]:
        """The rows as they are now. `rows` has what browsers were told: at the next look they hear the rest."""
        known, nodes = self.known, self.known.cluster.nodes
        touched = {name: node_row(known, nodes[name]) for name in known.touched & nodes.keys()}
        return {name: row for name, row in (self.rows | touched).items() if name not in known.gone}

    def switch(self, job: str, number: int) -> views.SwitchView:
        """A switch of late."""
        progress = self._switch(job, number)
        return switch_view(job, number, progress.plan, progress.before, progress.said, progress.told)

    def plans_of_switch(self, job: str, number: int) -> tuple[JobPlan | None, JobPlan | None]:
        """The plan that a switch leads to, and the one before, as far as they are remembered."""
        progress = self._switches.get(job, {}).get(number)
        return (progress.plan, progress.before) if progress is not None else (None, None)

    def remember(self, events: Iterable[EventRecord], steps: Mapping[str, StepRow]) -> None:
        """Takes over the history of before: events, oldest first, and the newest step of each job."""
        self.known.remember(events)
        self.known.cluster.newest.update(steps)
        self.redraw()


def _lasting(row: views.JobRow) -> tuple[object, ...]:
    """The parts of a row that do not change with each step."""
    last = row.last_event.id if row.last_event is not None else 0
    return row.phase, row.sentence, row.plan, row.proposal, row.devices, row.standby, last
