"""A recorded run (`elasticd record`) as a history of the dashboard: what the leader heard and decided.

Theory of operation. The machine is given what the leader heard, at the times at which it heard it, and
decides the same again: with it come the plans and what they answer, which the recording does not name. Events
are the notes of the recording. Steps and the times of jobs are kept as a leader's journal keeps them.

The plan that was in force before the recording began is not among the plans: its problem is not known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from elasticd_planner.spec.measurement import Measurement

from elasticd.coordinator.events.event_log import EventLog
from elasticd.coordinator.live_feed import FeedSource, hello, measurements
from elasticd.dashboard.history import HistoryWriter, Sample
from elasticd.dashboard.known import balanced_seconds, lowest_seconds, table_of
from elasticd.machines.coordinator import machine
from elasticd.machines.coordinator.machine import CoordinatorState
from elasticd.machines.job.state.events import SLOWDOWN_KINDS, CoordinatorNote, Effect, Event, Received, Write
from elasticd.machines.job.state.job_state import JobState
from elasticd.recording import Line
from elasticd.records import HistoryRecord
from elasticd.wire import live_types as live
from elasticd.wire.api_types import LeaderStatus, Settings
from elasticd.wire.coordinator import FromClient
from elasticd.wire.step_record import StepRecord
from elasticd.wire.worker import Prepared, Report, StayedOnPlan, Switched

#: Events and steps that are kept of a recording.
MOST = 1_000_000
#: Seconds between two samples of devices' slowdowns.
SAMPLE_SECONDS = 1.0
_SAID = {Prepared: "prepared", Switched: "swapped", StayedOnPlan: "kept"}


class RecordedRun:
    """Takes a recording in, line by line. `writer`: of the history that gets it."""

    state: CoordinatorState

    def __init__(self, writer: HistoryWriter) -> None:
        self._writer = writer
        self._journal = EventLog(events=MOST, steps=MOST)
        self._rates: dict[str, float] = {}
        self._measured: dict[str, dict[str, Measurement]] = {}  # the newest, by job and device
        self._sampled: dict[str, float] = {}  # when slowdowns were written last, by job

    def take(self, lines: Sequence[Line]) -> None:
        """All of it. Raises `msgspec.DecodeError` where a line has what this release does not know."""
        with self._writer.together():
            for line in lines:
                if line.what == "began":
                    self.state = line.state()
                elif line.what == "told":
                    self._on_note(line.note(), line.time)
                else:
                    self._on_event(line.event(), line.at, line.time)
        self._last = lines[-1]

    def _on_note(self, note: CoordinatorNote, time: float) -> None:
        self._writer.put_event(self._journal.tell(note, time))
        device, rate = note.data.get("device"), note.data.get("after")
        if note.kind in SLOWDOWN_KINDS and isinstance(device, str) and isinstance(rate, float):
            self._rates[device] = rate
            step = note.data.get("step")
            at = step if isinstance(step, int) else 0
            self._writer.put_samples([Sample(device, time, at, None, rate, None)])

    def _on_event(self, event: Event, at: float, time: float) -> None:
        if isinstance(event, Received) and isinstance(event.message, FromClient):
            self._of_worker(event.message, time)
        self.state, effects = machine.step(self.state, event, at)
        self._written(effects, time)

    def _of_worker(self, said: FromClient, time: float) -> None:
        body = said.body
        known = self.state.jobs.get(said.job)
        if isinstance(body, Report) and known is not None and known.worker(said.device, said.incarnation):
            self._measured.setdefault(said.job, {})[said.device] = body.measurement
            self._journal.report(said.job, body, time, said.incarnation)
            if (body.loss, body.tokens) != (None, None) and (step := self._journal.newest(said.job)):
                self._writer.put_step(said.job, step, *self._expected(known, step))
                self._sample(known, time)
        elif isinstance(body, Prepared | Switched | StayedOnPlan):
            rank = live.RankNews(device=said.device, at=time, what=_SAID[type(body)])
            if isinstance(body, Switched):
                rank = msgspec.structs.replace(
                    rank,
                    pause=body.pause_seconds,
                    bytes_sent=body.bytes_sent,
                    bytes_lacking=body.bytes_lacking,
                    flows={source: size for source, (size, _) in body.flows.items()},
                )
            self._writer.put_rank(said.job, body.number, rank)

    def _of_devices(self, job: JobState) -> live.MeasuredStep | None:
        """The newest measurements of the members of the plan in force."""
        plan = job.plan
        return measurements(job, plan, self._measured.get(job.job, {})) if plan is not None else None

    def _sample(self, job: JobState, time: float) -> None:
        """Each member's slowdown, once a second."""
        if time - self._sampled.get(job.job, 0.0) < SAMPLE_SECONDS or (table := self._of_devices(job)) is None:
            return
        self._sampled[job.job] = time
        numbers = np.frombuffer(table.numbers, "<f4").reshape(-1, len(table.columns))
        slowdown, evidence = (numbers[:, table.columns.index(name)] for name in live.JUDGED)
        members = job.plan.members if job.plan is not None else ()
        self._writer.put_samples(
            Sample(device, time, table.step, float(slow), self._rates.get(device, 1.0), _known(float(odd)))
            for device, slow, odd in zip(members, slowdown, evidence, strict=True)
            if np.isfinite(slow)
        )

    def _written(self, effects: Iterable[Effect], time: float) -> None:
        for effect in effects:
            if not isinstance(effect, Write):
                continue
            for record in effect.records:
                if isinstance(record, HistoryRecord):
                    self._writer.put_plan(effect.job, record, time)

    def _expected(self, job: JobState, step: StepRecord) -> tuple[float | None, float | None]:
        """Seconds of a step: as predicted, and those that no plan can go below."""
        plan = job.pipeline_plan
        if plan is None or job.number != step.plan:
            return None, None
        table = self._of_devices(job)
        bound = balanced_seconds(plan, table_of(table), self._rates) if table is not None else None
        predicted = None if job.prediction_guessed else job.predicted_seconds
        return predicted, lowest_seconds(bound, step.seconds, predicted)

    def at_its_end(self, name: str) -> list[live.AnyNews]:
        """All that the leader knew at the end of the recording, as it tells a listener."""
        policy, detect = self.state.settings.policy, self.state.settings.detect
        values = {
            f"{section}.{key}": value
            for section, known in (("detect", detect), ("policy", policy))
            for key, value in msgspec.structs.asdict(known).items()
        }
        source = FeedSource(
            state=self.state,
            cluster=name,
            store="",
            leader=LeaderStatus(name="recorded", url="", epoch=1),
            settings=Settings(values=values, changed={}, history=()),
            times={job: found for job, clock in self._journal.clocks.items() if (found := clock.time)},
            speeds=self._journal.speeds,
            restarts=(),
            clock=0.0,
            newest_event=self._journal.newest_id,
            store_away=False,
            chaos=False,
            at=self._last.at,
            now=self._last.time,
        )
        decoder = msgspec.json.Decoder(live.LINES)
        lines: list[live.AnyNews] = [decoder.decode(line) for line in hello(source, "1:1")]
        for name, job in self.state.jobs.items():
            if (table := self._of_devices(job)) is not None:
                lines.append(live.append("1:1", "measured", name, table))
        return lines


def _known(number: float) -> float | None:
    return number if math.isfinite(number) else None


def name_of(file: Path) -> str:
    """The name of a recording's cluster: its name is not in it."""
    return file.name.removesuffix(".gz").removesuffix(".jsonl")
