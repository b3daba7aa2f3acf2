"""The leader's part in jobs in restart mode: who is slow, and whether going on without that node is faster.

Theory of operation. Rounds are torch's affair and the agents'. Agents tell which torchruns there are, for
people alone; scripts with `elasticd.watch()` report laps. Once all processes of a round have reported a step,
detection judges it as in the other mode.

    slow     the slow torchrun's processes hold all others up. Without it a step takes as long less as the
             slowest process of the others is faster, and makes less work by the torchrun's part. What
             that saves over the policy's horizon is weighed against a restart, as measured before.
    out      a record that the torchrun is to take no part in further rounds. Its own handler reads it and
             stands by, the others' handlers read it and go into the next round.

Invariant: a torchrun is put out at most once, from a round in which all laps of a step are known, and never
below the least number of nodes. What is lost with a leader is soft: the next one judges anew from new laps.
"""

from __future__ import annotations

import math
from statistics import median
from typing import Literal, cast

import msgspec
from elasticd_planner.detection.stragglers import DetectSettings, RateState, observe
from elasticd_planner.policy.policy import PolicySettings
from elasticd_planner.readable import counted
from elasticd_planner.spec.step_measurements import Step
from elasticd_planner.value import Value

from elasticd.codec.decoding import shown
from elasticd.codec.safe_text import shortened
from elasticd.machines.job.state.events import (
    CoordinatorNote,
    CoordinatorSend,
    EventKind,
    Write,
    slowdown_kind,
)
from elasticd.names import MOST_DEVICES
from elasticd.records import OutRecord, RestartEndRecord
from elasticd.wire.coordinator import End
from elasticd.wire.rendezvous import AtWork, Lap, StepTime, TorchrunState

#: Seconds that a restart costs until one was seen: the processes' start, and the steps that are made again.
RESTART_SECONDS = 30.0
#: Steps of which not all processes have reported yet; older ones are given up.
MOST_STEPS = 16
#: Steps whose medians a verdict rests on, all of one round: a restart is no answer to a moment's noise.
JUDGED_STEPS = 20


#: Seconds without a word of a torchrun, whose agent says it every few seconds, until it counts as gone.
SILENT_SECONDS = 30.0

#: Torchruns of a job that are told apart, and characters of a traceback that are kept.
MOST_TORCHRUNS, MOST_TRACEBACK = 4096, 8000

EndPhase = Literal["finished", "failed", "stopped"]
RestartPhase = Literal["gathering", "running", EndPhase]


class Attended(Value, frozen=True, kw_only=True):
    """A torchrun of a job in restart mode, as its agent tells."""

    node: str  # its node
    heard: float  # when it was last told of
    state: TorchrunState  # what was told


class RestartJob(Value, frozen=True, kw_only=True):
    """A job in restart mode, by what agents tell of its torchruns, and its processes of their steps."""

    job: str  # the job's name
    round: int = -1  # number of the rendezvous round (-1: none yet)
    step: int = 0  # index of the last complete step
    wall: float = 0.0  # seconds of that step
    rates: RateState = RateState()  # measured slowdown of each device
    #: step times of the last complete step, by device
    laps: dict[str, StepTime] = msgspec.field(default_factory=dict)
    #: step times of steps that are not complete, by step and device
    pending: dict[int, dict[str, StepTime]] = msgspec.field(default_factory=dict)
    recent: tuple[dict[str, Lap], ...] = ()  # step times of the steps before the last, by device
    out: dict[str, str] = msgspec.field(default_factory=dict)  # torchruns that take no part, with the reason
    restart_seconds: float = RESTART_SECONDS  # that a restart took
    heard: float = 0.0  # when the last step time came
    torchruns: dict[str, Attended] = msgspec.field(default_factory=dict)  # by name in the rendezvous
    gathered: int = -1  # number of the last round that was told of
    ended: RestartEndRecord | None = None  # how it ended (None: its end was not heard of)
    stopping: str = ""  # the user who stopped it (empty: nobody did)
    stop_at: float = math.inf  # when its torchruns are killed

    def phase(self, now: float) -> RestartPhase:
        """The job's phase, as far as the leader knows it."""
        states = [known.state for known in self.torchruns.values()]
        if self.ended is not None and not states:
            return self.ended.phase
        here = [state for state in states if self._here(state.torchrun, now)]
        if any(state.at_work.phase == "runs" for state in here) or not states:
            return "running"
        if any(state.at_work.phase == "waits" for state in here):
            return "gathering"
        phases = {state.at_work.phase for state in states}
        if self.stopping and phases != {"finished"}:
            return "stopped"
        return "failed" if "failed" in phases else "finished" if "finished" in phases else "stopped"

    def over(self, now: float) -> bool:
        """Returns True if none of its torchruns has anything left to do."""
        return self.phase(now) not in ("running", "gathering")

    def lives(self, now: float) -> bool:
        """Returns True if an agent tells of a torchrun of the job that is at work."""
        return bool(self.torchruns) and not self.over(now)

    @property
    def failure(self) -> str:
        """The last failure of a worker: its traceback, or its last line; empty where none failed."""
        if not self.torchruns:
            return "" if self.ended is None else self.ended.failure
        works = (known.state.at_work for known in self.torchruns.values())
        failure = next((work.failure for work in works if work.failure is not None), None)
        return "" if failure is None else failure.traceback or failure.line

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes of its torchruns."""
        if not self.torchruns and self.ended is not None:
            return self.ended.nodes
        return tuple(sorted({known.node for known in self.torchruns.values()}))

    @property
    def restarts(self) -> int:
        """The number of times that its workers were started again."""
        if not self.torchruns and self.ended is not None:
            return self.ended.restarts
        return max((known.state.at_work.restarts for known in self.torchruns.values()), default=0)

    def members(self, now: float) -> tuple[str, ...]:
        """The devices that its torchruns hold."""
        here = (known for name, known in self.torchruns.items() if self._here(name, now))
        return tuple(sorted({f"{known.node}/{slot}" for known in here for slot in known.state.at_work.slots}))

    @property
    def ran_on(self) -> tuple[str, ...]:
        """The devices that its torchruns hold, or held as they ended."""
        places = self.torchruns.values()
        return tuple(sorted({f"{known.node}/{slot}" for known in places for slot in known.state.at_work.slots}))

    def _here(self, torchrun: str, now: float) -> bool:
        known = self.torchruns[torchrun]
        return known.state.status == "here" and now - known.heard < SILENT_SECONDS

    @property
    def ended_by(self) -> str:
        """The signal that ended its torchruns; empty where none did."""
        works = (known.state.at_work for known in self.torchruns.values())
        return next((work.ended_by for work in works if work.ended_by), "")

    def stopped_by(self, now: float) -> str:
        """The user who stopped it, or the signal that ended it; empty where neither did."""
        return self.stopping or (self.ended_by if self.over(now) else "")

    def sentence(self, now: float) -> str:
        """A sentence about the job's torchruns; empty where no agent reported any."""
        if not self.torchruns:
            return "" if self.ended is None else self.ended.sentence
        phase = self.phase(now)
        works = [known.state.at_work for known in self.torchruns.values()]
        failure = next((work.failure for work in works if work.failure is not None), None)
        again = max(work.restarts for work in works)
        words = [f"its workers were started again {again} time{'s' if again > 1 else ''}"] if again else []
        if phase == "stopped":
            by = self.stopped_by(now)
            return "; ".join((f"stopped by {by}" if by else "its torchruns ended", *words))
        if phase in ("running", "gathering"):
            nodes = sorted(
                {each.node for each in self.torchruns.values() if self._here(each.state.torchrun, now)}
            )
            count = sum(each.state.at_work.workers for each in self.torchruns.values() if each.node in nodes)
            words.insert(0, f"{count or 'its'} worker{'s' if count != 1 else ''} on {', '.join(nodes)}")
            words += [f"{self.stopping} stops it: its workers save and leave"] if self.stopping else []
            if not self.step:
                words.append("no steps heard (elasticd.watch())")
        if failure is not None and phase != "finished" and not self.stopping:
            words.append(f"a worker failed: {failure.line}")
        return "; ".join(words)


Effects = tuple[CoordinatorNote | CoordinatorSend | Write, ...]


def restored(job: str, ended: RestartEndRecord) -> RestartJob:
    """A job that ended under a leader before."""
    return RestartJob(job=job, ended=ended, step=ended.step, stopping=ended.stopped_by)


def attended(
    job: RestartJob, node: str, told: TorchrunState, epoch: int, now: float
) -> tuple[RestartJob, Effects]:
    """The job after an agent told of a torchrun, and what is to be done."""
    if job.ended is not None and told.torchrun not in job.torchruns:
        if told.status != "here":
            return job, ()  # it was one of the life before
        job = RestartJob(job=job.job)  # it was started again
    known = job.torchruns.get(told.torchrun)
    if known is None and len(job.torchruns) >= MOST_TORCHRUNS:
        return job, ()
    told = _bounded(told)
    work, before = told.at_work, known.state.at_work if known is not None else AtWork()
    torchruns = {**job.torchruns, told.torchrun: Attended(node=node, heard=now, state=told)}
    job = msgspec.structs.replace(job, torchruns=torchruns)
    notes: list[CoordinatorNote | CoordinatorSend | Write] = []
    if job.stopping and told.status == "here":
        notes.append(_end(job, node, now))
    if work.phase == "runs" and work.round > job.gathered:
        job = msgspec.structs.replace(job, gathered=work.round)
        text = f"round {work.round} in restart mode: {counted(work.world, 'worker')}"
        notes.append(CoordinatorNote(kind="job_gathered", job=job.job, text=text, data={"round": work.round}))
    anew = work.failure != before.failure or work.failures > before.failures
    if work.failure is not None and anew:
        text = f"a worker on {node} failed: {work.failure.line}"
        data = {"node": node, "traceback": work.failure.traceback, "code": work.failure.code}
        notes.append(CoordinatorNote(kind="worker_lost", job=job.job, text=text, data=data))
    if job.over(now) and job.ended is None:
        job, end = _ended(job, epoch, now)
        notes.append(end)
    elif not job.over(now) and job.ended is not None:
        job = msgspec.structs.replace(job, ended=None)  # an agent that was away had not ended
    return job, tuple(notes)


def _ended(job: RestartJob, epoch: int, now: float) -> tuple[RestartJob, Write]:
    """None of its torchruns has anything left to do: that is kept."""
    phase, sentence = cast("EndPhase", job.phase(now)), job.sentence(now)
    by = job.stopping or job.ended_by
    record = RestartEndRecord(
        phase=phase,
        epoch=epoch,
        step=job.step,
        nodes=job.nodes,
        restarts=job.restarts,
        sentence=sentence,
        failure=job.failure,
        stopped_by=by,
    )
    kind: EventKind = "finished" if phase == "finished" else "stopped"
    data = {"step": job.step, "orderly": bool(by) and phase == "stopped"}
    text = sentence if phase == "stopped" else f"{phase}: {sentence}" if sentence else phase
    note = CoordinatorNote(kind=kind, job=job.job, text=text, data=data)
    return msgspec.structs.replace(job, ended=record), Write(job=job.job, records=(record,), notes=(note,))


def stop_asked(job: RestartJob, by: str, seconds: float, now: float) -> tuple[RestartJob, Effects]:
    """A user stops the job: its torchruns get SIGTERM, which they pass on to their workers. Those that are left
    after `seconds` are killed."""
    job = msgspec.structs.replace(job, stopping=by, stop_at=now + seconds)
    text = f"{by} stops the job: its workers save and leave, and have {seconds:g} s"
    note = CoordinatorNote(kind="stopping", job=job.job, text=text, data={"by": by, "seconds": seconds})
    return job, (note, *_ends(job, now))


def stop_due(job: RestartJob, now: float) -> tuple[RestartJob, Effects]:
    """The time is up of a job that was stopped: what is left of it is killed."""
    if now < job.stop_at or job.over(now):
        return job, ()
    return msgspec.structs.replace(job, stop_at=math.inf), _ends(job, now)


def _ends(job: RestartJob, now: float) -> tuple[CoordinatorSend, ...]:
    nodes = {known.node for name, known in job.torchruns.items() if job._here(name, now)}
    return tuple(_end(job, node, now) for node in sorted(nodes))


def _end(job: RestartJob, node: str, now: float) -> CoordinatorSend:
    return CoordinatorSend(node=node, message=End(job=job.job, devices=(), at_once=now >= job.stop_at))


def _bounded(told: TorchrunState) -> TorchrunState:
    """With its texts and devices cut, whatever an agent says."""
    slots = tuple(slot for slot in told.at_work.slots[:MOST_DEVICES] if 0 <= slot < MOST_DEVICES)
    if slots != told.at_work.slots:
        at_work = msgspec.structs.replace(told.at_work, slots=slots)
        told = msgspec.structs.replace(told, at_work=at_work)
    failure = told.at_work.failure
    if failure is None:
        return told
    failure = msgspec.structs.replace(
        failure,
        kind=shortened(failure.kind),
        text=shortened(failure.text),
        traceback=failure.traceback[-MOST_TRACEBACK:],
    )
    at_work = msgspec.structs.replace(told.at_work, failure=failure)
    return msgspec.structs.replace(told, at_work=at_work)


class Verdict(Value, frozen=True, kw_only=True):
    """The decision to exclude a torchrun or not, with the reason."""

    torchrun: str  # its name in the rendezvous
    exclude: bool  # it is to go
    reason: str  # for people
    saving_seconds: float  # saved over the horizon without it
    price_seconds: float  # that the restart costs


def state_refusal(job: RestartJob, node: str, told: TorchrunState, now: float) -> str:
    """Returns why a node may not tell of a torchrun, or nothing: another node's agent tells of it."""
    known = job.torchruns.get(told.torchrun)
    if known is None or known.node == node or now - known.heard >= SILENT_SECONDS:
        return ""
    return f"torchrun {told.torchrun} of job {job.job} is of node {known.node}"


def lap_refusal(job: RestartJob, node: str, heard: StepTime) -> str:
    """Returns why a node may not tell of a process' step, or nothing.

    A node speaks for the torchruns that its agent has told of, in a round that there may be. The agents of
    release 0.1 tell of none: where no torchrun of a job is known, its laps are heard as they come.
    """
    by, known = heard.by, job.torchruns.get(heard.by.torchrun)
    if not job.torchruns:
        return ""
    if known is None or known.node != node:
        return f"node {node} has no torchrun {shown(by.torchrun)} in job {job.job}"
    if by.round > job.gathered + 1:
        return f"round {by.round} of job {job.job} does not follow round {job.gathered}"
    work = known.state.at_work
    if work.round == by.round and work.world and by.world != work.world:
        return f"round {by.round} of job {job.job} has {work.world} processes, not {by.world}"
    return ""


def lap(
    job: RestartJob, heard: StepTime, detect: DetectSettings, policy: PolicySettings, epoch: int, now: float
) -> tuple[RestartJob, tuple[CoordinatorNote | Write, ...]]:
    """The job after one more lap, and what is to be done."""
    if heard.by.round < job.round:
        return job, ()
    if heard.by.round > job.round:
        job = _begun(job, heard.by.round, now)
    job = msgspec.structs.replace(job, heard=now)
    number = heard.lap.step
    if number <= job.step:
        return job, ()
    laps = {**job.pending.get(number, {}), heard.device: heard}
    pending = {**job.pending, number: laps}
    if len(laps) < heard.by.world:
        pending = {step: pending[step] for step in sorted(pending)[-MOST_STEPS:]}
        return msgspec.structs.replace(job, pending=pending), ()
    pending = {step: known for step, known in pending.items() if step > number}
    seconds, work = [known.lap.seconds for known in laps.values()], [known.lap.work for known in laps.values()]
    step = Step.timed(heard.by.round, number, (*laps,), seconds, work)
    rates, changes = observe(job.rates, step, detect)
    wall = max(known.lap.wall for known in laps.values())
    recent = (*job.recent, {device: known.lap for device, known in laps.items()})[-JUDGED_STEPS:]
    job = msgspec.structs.replace(
        job, pending=pending, rates=rates, laps=laps, step=number, wall=wall, recent=recent
    )
    notes = tuple(
        CoordinatorNote(
            kind=slowdown_kind(change),
            text=change.reason,
            job=job.job,
            data={"device": change.device, "rate": change.after, "step": number},
        )
        for change in changes
    )
    job, out = _judged(job, policy, epoch)
    return job, (*notes, *out)


def verdict(job: RestartJob, policy: PolicySettings) -> Verdict | None:
    """Of the torchrun with the slowest device: whether to go on without it. None where nobody is slow, there
    are no others, or too few steps were seen."""
    slow = {device: rate for device, rate in job.rates.rates.items() if device in job.laps}
    if not slow or len(job.recent) < JUDGED_STEPS:
        return None
    worst = max(sorted(slow), key=lambda device: slow[device])
    torchrun = job.laps[worst].by.torchrun
    own = {device: median(laps[device].seconds for laps in job.recent) for device in job.laps}
    wall = median(max(lap.wall for lap in laps.values()) for laps in job.recent)
    others = [own[device] for device, known in job.laps.items() if known.by.torchrun != torchrun]
    price = job.restart_seconds
    if not others:
        return None
    without = wall - max(0.0, max(own.values()) - max(others))
    share = len(others) / len(own)
    saved = policy.horizon_steps * (wall - without / share)
    reason = (
        f"{worst} takes {slow[worst]:g} times as long as the others: without {torchrun} "
        f"{share:.0%} of the processes make steps of {without:.3g} s in place of {wall:.3g} s, which saves "
        f"{saved:.3g} s in {policy.horizon_steps} steps, and a restart costs {price:.3g} s"
    )
    least = job.laps[worst].by
    worth = saved > price and saved > policy.minimum_saving * policy.horizon_steps * wall
    if worth and least.nodes <= least.least:
        worth, reason = False, f"{reason}; but there must be {least.least} nodes"
    return Verdict(torchrun=torchrun, exclude=worth, reason=reason, saving_seconds=saved, price_seconds=price)


def _judged(job: RestartJob, policy: PolicySettings, epoch: int) -> tuple[RestartJob, tuple[Write, ...]]:
    judgment = verdict(job, policy)
    if judgment is None or not judgment.exclude or judgment.torchrun in job.out:
        return job, ()
    record = OutRecord(torchrun=judgment.torchrun, epoch=epoch, reason=judgment.reason)
    data = {"torchrun": judgment.torchrun, "saving": judgment.saving_seconds, "price": judgment.price_seconds}
    note = CoordinatorNote(
        kind="excluded", text=f"goes on without a node: {judgment.reason}", job=job.job, data=data
    )
    job = msgspec.structs.replace(job, out={**job.out, judgment.torchrun: judgment.reason})
    return job, (Write(job=job.job, records=(record,), notes=(note,)),)


def _begun(job: RestartJob, number: int, now: float) -> RestartJob:
    """New processes: nothing is known of them. The silence before them was the restart."""
    seconds = job.restart_seconds
    if job.round >= 0 and job.step and math.isfinite(job.heard):
        seconds = now - job.heard
    return RestartJob(
        job=job.job,
        round=number,
        out=job.out,
        restart_seconds=seconds,
        torchruns=job.torchruns,
        gathered=job.gathered,
        stopping=job.stopping,
        stop_at=job.stop_at,
    )
