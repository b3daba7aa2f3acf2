"""Runs the demo: brings the cluster up, follows the job through its story, and gathers the record."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from elasticd_planner.value import Value
from rich.console import Console

from elasticd.client import ApiClient
from elasticd.demo import story
from elasticd.demo.cluster import LEDGER, PLAIN_LEDGER, DemoCluster, gpus_of
from elasticd.demo.progress import DemoProgress
from elasticd.demo.record import DemoRecord, read_ledger
from elasticd.demo.scenario import JOB, DemoError, DemoScenario
from elasticd.demo.story import Action, DemoPhase, Seen, Story
from elasticd.extras import need
from elasticd.records import HistoryRecord
from elasticd.system.child_processes import Child, Processes
from elasticd.wire.api_types import JobStatus
from elasticd.wire.event_record import EventRecord, Pacing
from elasticd.wire.step_record import StepRecord

#: Seconds between two looks at the coordinator.
_LOOK_SECONDS = 0.2
#: Seconds that the reference may need after the job's end.
_PLAIN_SECONDS = 240.0


class _Seen:
    """The observations of the job so far, which grow at each look."""

    def __init__(self, cluster: DemoCluster) -> None:
        self._cluster = cluster
        self.events: list[EventRecord] = []
        self.steps: list[StepRecord] = []
        self.pacing = Pacing()
        self.job: JobStatus | None = None
        self.pids: dict[str, int] = {}

    def look(self) -> Seen:
        """The observations with those of now. Between two leaders it waits for the next, whose events have
        later ids. Raises ProcessError where none answers."""
        return self._cluster.until(lambda: self._look(self._cluster.api()), "an answer of the coordinator")

    def _look(self, api: ApiClient) -> Seen:
        # The status first: the events and steps that it speaks of are then among those read after it.
        self.job = api.status().job(JOB)
        self.events += api.events(self.events[-1].id if self.events else 0)
        if self.job is not None:
            steps = api.steps(JOB, self.steps[-1].step if self.steps else -1)
            self.steps += steps.steps
            self.pacing = steps.pacing
        if not self.pids and self.steps and self.job is not None:
            self.pids = pids(self.job)
        return Seen(job=self.job, events=self.events, steps=self.steps)


def pids(job: JobStatus) -> dict[str, int]:
    """The workers' process ids by device."""
    return {member.device: member.pid for member in job.members}


class Folders(Value, frozen=True, kw_only=True):
    """`out` is for the report, `logs` for what the processes wrote and read."""

    out: Path

    @property
    def logs(self) -> Path:
        """The folder `logs` inside `out`; `prepare` makes it."""
        return self.out / "logs"

    def prepare(self) -> None:
        """Makes both, and removes those files of an earlier run that would be taken for this one's. Raises
        DemoError."""
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            for name in ("report.json", "record.json", "throughput.png"):
                (self.out / name).unlink(missing_ok=True)
            for name in (LEDGER, PLAIN_LEDGER):
                (self.logs / name).unlink(missing_ok=True)
        except OSError as error:
            raise DemoError(
                f"cannot write the report to {self.out}: {error.strerror}; name another folder with --out"
            ) from error


def run(scenario: DemoScenario, folders: Folders, console: Console) -> DemoRecord:
    """The whole run. Raises DemoError, EtcdServerError, ExtraMissing or ProcessError where it fails,
    Interrupted where the user ends it."""
    for package in ("matplotlib", "torch"):  # the extra that has the first brings both
        need(package, "the demo")
    folders.prepare()
    computes_on = gpus_of(scenario.nodes)
    processes = Processes(folders.logs)
    with (
        tempfile.TemporaryDirectory(prefix="elasticd-demo-") as sockets,
        processes.interruptible(),
        processes,
        DemoProgress(console, scenario) as progress,
    ):
        progress.say("starting etcd, one coordinator and two agents")
        with DemoCluster(scenario, processes, folders.logs, Path(sockets), computes_on) as cluster:
            on = ", ".join(dict.fromkeys(computes_on.values())) or "the CPU"
            progress.say(
                f"starting two torchruns with two workers each; they compute on {on}, at the speed of emulated "
                "devices"
            )
            cluster.start_job()
            return _follow(cluster, processes, progress)


def _follow(cluster: DemoCluster, processes: Processes, progress: DemoProgress) -> DemoRecord:
    """Looks, lets the story decide, and does what it says, until it is over."""
    seen, state = _Seen(cluster), Story()
    plain: Child | None = None
    while state.phase not in story.OVER:
        before = state.phase
        state, action = story.step(state, seen.look(), cluster.scenario, time.monotonic())
        progress.show(seen.job, state.phase, seen.events)
        if state.phase is DemoPhase.HEALTHY and before is not DemoPhase.HEALTHY:
            plain = cluster.start_plain()
        if action is not None:
            _act(action, cluster, progress)
        cluster.tend()
        if state.phase not in story.OVER:
            processes.pause(_LOOK_SECONDS)
    if state.phase is DemoPhase.FAILED:
        raise DemoError(state.reason)
    assert plain is not None
    return _gather(cluster, progress, seen, plain)


def _act(action: Action, cluster: DemoCluster, progress: DemoProgress) -> None:
    factor = [f"{cluster.scenario.factor:g}"] if action is Action.SLOW else []
    command = (action.value, cluster.scenario.slow_device, *factor)
    progress.say(f"$ elasticd chaos {' '.join(command)}")
    cluster.chaos(*command)


def _gather(cluster: DemoCluster, progress: DemoProgress, seen: _Seen, plain: Child) -> DemoRecord:
    """The record, once every torchrun has ended by itself and the reference is done."""
    seen.look()
    assert seen.job is not None
    failed = {name: code for name, code in cluster.wait_for_torchruns().items() if code}
    if failed:
        output = "\n".join(child.said() for child in cluster.torchruns if child.name in failed)
        raise DemoError(f"{', '.join(failed)} did not end cleanly after the job:\n{output}")
    progress.say("the job is done; waiting for the same training by plain torch in one process")
    cluster.hurry(plain)  # nothing is measured any more; on a busy machine it would wait for the others' work
    if cluster.wait(plain, _PLAIN_SECONDS) != 0:
        raise DemoError(f"the reference (plain torch) failed:\n{plain.said()}")
    history = cluster.until(lambda: cluster.api().history(JOB), "the history of the job")
    return DemoRecord(
        scenario=cluster.scenario,
        events=tuple(seen.events),
        steps=tuple(seen.steps),
        history=tuple(record for record in history if isinstance(record, HistoryRecord)),
        pacing=seen.pacing,
        before=seen.pids,
        after=pids(seen.job),
        ledger=read_ledger(cluster.ledger),
        plain=read_ledger(cluster.plain_ledger),
    )
