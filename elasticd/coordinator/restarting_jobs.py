"""`RestartingJobs`: the jobs in restart mode that a leader knows, each by `machines.coordinator.restart_jobs`.

Their rounds are torch's affair and the agents'. What is kept here is soft, but for a record of their end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from elasticd_planner.detection.stragglers import DetectSettings
from elasticd_planner.policy.policy import PolicySettings

from elasticd.coordinator.store_transactions import Asked, RendezvousSweep
from elasticd.machines.coordinator import restart_jobs
from elasticd.machines.coordinator.restart_jobs import RestartJob
from elasticd.machines.job.state.events import Effect
from elasticd.records import RestartEndRecord
from elasticd.wire.api_types import ApiError
from elasticd.wire.rendezvous import StepTime, TorchrunState

#: Jobs whose laps are judged; beyond them the one that was silent longest is forgotten.
MOST_RESTARTS = 1000
#: Jobs whose rounds are cleared away once their time is up.
MOST_ROUNDS = 10_000
#: Seconds since the last lap until a user may have a job forgotten.
LAP_SECONDS = 60.0


class RestartingJobs:
    """The jobs in restart mode of one leader."""

    def __init__(
        self,
        epoch: int,
        clock: Callable[[], float],
        caused: Callable[[str, str], None],
        perform: Callable[[Iterable[Effect]], None],
        put: Callable[[Asked], None],
    ) -> None:
        """
        Args:
            epoch: of the leader.
            clock: monotonic seconds.
            caused: called with a job and the node whose message about it is taken, before its effects.
            perform: carries effects out.
            put: has a change made in the store.
        """
        self.jobs: dict[str, RestartJob] = {}
        self._epoch, self._clock, self._perform, self._put = epoch, clock, perform, put
        self._caused = caused
        self._rounds: dict[str, float] = {}  # by job: since when nothing was heard of it

    def remember(self, jobs: Iterable[str], ended: Mapping[str, RestartEndRecord]) -> None:
        """These jobs were in the store when this leader took over, some of them `ended`."""
        for job in jobs:
            self._rounds.setdefault(job, self._clock())
        for job in sorted(ended, key=lambda name: ended[name].at)[-MOST_RESTARTS:]:
            self.jobs[job] = restart_jobs.restored(job, ended[job])

    def listed(self) -> tuple[RestartJob, ...]:
        """All of them."""
        return tuple(self.jobs.values())

    def lives(self, name: str) -> bool:
        """Returns True if a job of this name runs in restart mode."""
        job = self.jobs.get(name)
        return job is not None and job.lives(self._clock())

    def holding(self, device: str, now: float) -> str:
        """The job that holds a device; empty: none does. now: the machine's clock [s]."""
        return next((name for name, job in self.jobs.items() if device in job.members(now)), "")

    def has_laps(self, device: str) -> bool:
        """Returns True if the worker on a device calls `elasticd.watch()`."""
        return any(device in job.laps for job in self.jobs.values())

    def attended(self, node: str, state: TorchrunState) -> str:
        """A node's agent reports a torchrun. Returns why that is not taken; empty: it is."""
        job = self._active(state.job)
        if why := restart_jobs.state_refusal(job, node, state, self._clock()):
            return why
        self._caused(job.job, node)
        self._go_on(*restart_jobs.attended(job, node, state, self._epoch, self._clock()))
        return ""

    def lap(self, node: str, time: StepTime, detect: DetectSettings, policy: PolicySettings) -> str:
        """A process reports a step. Returns why that is not taken; empty: it is."""
        job = self._active(time.by.job)
        if why := restart_jobs.lap_refusal(job, node, time):
            return why
        job, effects = restart_jobs.lap(job, time, detect, policy, self._epoch, self._clock())
        self._caused(job.job, node)
        self._go_on(job, effects)
        return ""

    def stop(self, name: str, by: str, seconds: float) -> tuple[str, ...]:
        """Ends a job, whose processes have so many seconds for that. Returns the nodes of its torchruns.

        Raises:
            ApiError: it is over already, or no agent knows its torchruns.
        """
        job, now = self.jobs[name], self._clock()
        if job.over(now):
            raise ApiError("conflict", f"job {name} is {job.phase(now)} already")
        if not job.torchruns:
            why = f"no agent tells of the torchruns of job {name}, which is in restart mode: stop those"
            raise ApiError("conflict", why)
        job, effects = restart_jobs.stop_asked(job, by, seconds, now)
        self._go_on(job, effects)
        return tuple(job.nodes)

    def end_due(self) -> None:
        """Ends jobs that were stopped, and whose time is up."""
        now = self._clock()
        for job in self.listed():
            if job.stop_at <= now:
                self._go_on(*restart_jobs.stop_due(job, now))

    def has_rounds(self, name: str) -> bool:
        """Returns True if the store may have rounds of a job."""
        return name in self._rounds

    def forget(self, name: str) -> None:
        """Keeps nothing of a job that is over.

        Raises:
            ApiError: it runs.
        """
        last, now = self.jobs.get(name), self._clock()
        if last is not None and (last.lives(now) or now - last.heard < LAP_SECONDS):
            raise ApiError("conflict", f"job {name} is in restart mode, and runs: stop its torchruns first")
        self._forget(name)

    def clear(self, keep_seconds: float) -> None:
        """Has the rounds deleted of jobs whose torchruns are gone, and that were not heard of for so long."""
        now = self._clock()
        for job, since in list(self._rounds.items()):
            if now - since >= keep_seconds:
                self._rounds[job] = now  # torchruns that are there, and report no laps, may keep it
                self._forget(job)
        while len(self._rounds) > MOST_ROUNDS:
            del self._rounds[min(self._rounds, key=self._rounds.__getitem__)]

    def _forget(self, job: str) -> None:
        self.jobs.pop(job, None)
        self._put(RendezvousSweep(job=job))

    def _active(self, name: str) -> RestartJob:
        """A job, of which something is heard now."""
        job = self.jobs.get(name) or RestartJob(job=name)
        if name not in self.jobs and len(self.jobs) >= MOST_RESTARTS:
            now = self._clock()
            known = self.jobs.values()
            del self.jobs[min(known, key=lambda other: (other.lives(now), other.heard)).job]
        self._rounds[name] = self._clock()
        return job

    def _go_on(self, job: RestartJob, effects: Iterable[Effect]) -> None:
        """A job is so from now on."""
        self.jobs[job.job] = job
        self._perform(effects)
