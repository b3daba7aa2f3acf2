"""`Commands`: what users have a leader do. A command is refused by `ApiError`, with what would be right."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from elasticd.config.tree import ConfigError
from elasticd.coordinator.leader import Leader
from elasticd.coordinator.live_config import ConfigChanges, Scalar
from elasticd.coordinator.store_transactions import LeadershipProbe
from elasticd.coordinator.store_writer import NotWritten
from elasticd.machines.coordinator import absent_nodes, finished_jobs
from elasticd.machines.job import adoption
from elasticd.machines.job.copies import checkpoints
from elasticd.machines.job.lifecycle import stop_request
from elasticd.machines.job.state.events import (
    AdoptAsked,
    CheckpointAsked,
    CoordinatorNote,
    ForgetAsked,
    ForgetNodeAsked,
    NodeDrained,
    Paced,
    StopAsked,
)
from elasticd.machines.job.state.job_state import OVER, JobState, NodeState
from elasticd.wire.api_types import CHAOS_OFF, ApiError, unknown
from elasticd.wire.coordinator import is_first

#: Seconds that a user waits for etcd to take what he changed.
WRITE_SECONDS = 5.0
UNCHANGED = "nothing was changed; try again when it is back"

T = TypeVar("T")


class Commands:
    """The commands of users to one leader."""

    def __init__(self, leader: Leader) -> None:
        self.leader = leader
        self._changing = asyncio.Lock()

    def audit(self, by: str, what: str, *, action: str, job: str = "", **about: Any) -> None:
        """Notes that a user had something changed."""
        data = {"by": by, "action": action, **about}
        self.leader.record(CoordinatorNote(kind="asked", job=job, text=f"{by} {what}", data=data))

    async def decide(self, decision: Callable[[], T], audit: Callable[[], None]) -> T:
        """Makes a user's decision, and returns what it returns once all that it has written is in the store.

        Before that it is found out whether this leader still leads, and etcd takes what it writes. `audit`
        tells who asked, once the decision was made.

        Raises `ApiError` "unavailable" where that is not so: nothing was decided then, unless etcd went away in
        the midst of it, which the text says.
        """
        writer = self.leader.writer
        assert writer is not None
        if self.leader.store_away:
            why = writer.full or "etcd does not answer"
            raise ApiError("unavailable", f"{why}, and decisions are kept there: {UNCHANGED}")
        mark = writer.marked
        writer.put(LeadershipProbe())
        await self._durable(mark, UNCHANGED)
        mark, decided = writer.marked, decision()
        audit()
        await self._durable(
            mark, "it is decided here, and kept only once etcd has taken it: look at the status"
        )
        return decided

    async def _durable(self, mark: int, otherwise: str) -> None:
        writer = self.leader.writer
        assert writer is not None
        try:
            await asyncio.wait_for(writer.durable(mark), WRITE_SECONDS)
        except NotWritten as error:
            raise ApiError("unavailable", f"etcd did not take it ({error}): {otherwise}") from None
        except TimeoutError:
            why = writer.full or f"etcd does not answer for {WRITE_SECONDS:g} s"
            raise ApiError("unavailable", f"{why}: {otherwise}") from None

    async def change(self, asked: Mapping[str, Any], by: str, audit: Callable[[], None]) -> None:
        """Changes detection and policy, one change after the other."""
        async with self._changing:
            self._changes_by(asked, by)  # what cannot be is refused before anything is written
            await self.decide(lambda: self._changed(asked, by), audit)

    def _changes_by(self, asked: Mapping[str, Any], by: str) -> ConfigChanges:
        """The configuration with this change."""
        assert self.leader.writer is not None
        try:
            changes = self.leader.changes.changed(asked, self.leader.wall(), by)
        except ConfigError as error:
            raise ApiError("invalid", str(error)) from error
        if why := self.leader.writer.refusal(changes.history[-1]):
            raise ApiError("invalid", f"this change cannot be kept: {why}")
        return changes

    def _changed(self, asked: Mapping[str, Any], by: str) -> None:
        before, changes = self.leader.changes, self._changes_by(asked, by)  # the file may be another by now
        self.leader.put(changes.history[-1])
        self.leader.follow(changes, _words(before.values, changes.values, by))

    def drain(self, node: str, on: bool) -> None:
        """Lets the devices of a node be left, or used again."""
        self.connected(node, "start it, or wait for it")
        self.leader.apply(NodeDrained(node=node, on=on))

    def connected(self, node: str, remedy: str) -> NodeState:
        """A node whose agent is connected. A refusal ends with the `remedy`."""
        nodes = self.leader.state.nodes
        known = nodes.get(node)
        if known is None:
            raise unknown("node", node, nodes)
        if not known.connected:
            raise ApiError("conflict", f"the agent of node {node} cannot be reached: {remedy}")
        return known

    def stop(self, name: str, seconds: float, by: str) -> dict[str, str]:
        """Ends a job, whose workers have so many seconds for a last checkpoint. Returns the nodes whose workers
        will not hear of it, with the release of each one's agent."""
        state, restarting = self.leader.state, self.leader.restarting
        if name not in state.jobs and name in restarting.jobs:
            nodes = restarting.stop(name, by, seconds)
            releases = {node: state.nodes[node].release for node in nodes if node in state.nodes}
            return {node: release for node, release in releases.items() if is_first(release)}
        job = self._job(name)
        _check_goes_on(job)
        if job.takeover.unadopted is not None and seconds > 0:
            why = f"job {name} is left alone, and cannot be told to make a last checkpoint: run 'elasticd adopt"
            raise ApiError(
                "conflict", f"{why} {name}' first, or end it without one by 'elasticd stop --now {name}'"
            )
        unheard = stop_request.unheard(job, state.nodes, seconds)
        self.leader.apply(StopAsked(job=name, by=by, seconds=seconds))
        return unheard

    def checkpoint(self, name: str) -> None:
        """Has a job make a checkpoint at its next vote."""
        if name not in self.leader.state.jobs and name in self.leader.restarting.jobs:
            raise ApiError("conflict", f"job {name} is in restart mode, and makes its checkpoints itself")
        job = self._job(name)
        _check_goes_on(job)
        if why := checkpoints.refusal(job):
            raise ApiError("conflict", why)
        self.leader.apply(CheckpointAsked(job=name))

    def adopt(self, name: str, by: str) -> None:
        """Has the plan that a job's workers run written to etcd, which lacks it."""
        job = self._job(name)
        if why := adoption.refusal(job):
            raise ApiError("conflict", why)
        self.leader.apply(AdoptAsked(job=name, by=by))
        for node in {worker.node for worker in job.workers.values()}:
            self.leader.connections.renew(node)  # agents repeat what was not heard while it was left alone

    def forget(self, name: str, by: str) -> None:
        """Nothing of a job that is over is kept."""
        state, restarting = self.leader.state, self.leader.restarting
        if name not in state.jobs and restarting.has_rounds(name):
            restarting.forget(name)
            return
        if why := finished_jobs.refusal(self._job(name), state.nodes):
            raise ApiError("conflict", why)
        self.leader.apply(ForgetAsked(job=name, by=by))

    def forget_node(self, name: str, by: str) -> None:
        """A node that is away is shown no more, until it comes back."""
        state = self.leader.state
        node = state.nodes.get(name)
        if node is None:
            raise unknown("node", name, state.nodes)
        if node.connected:
            raise ApiError("conflict", f"the agent of node {name} is connected: stop it, and the node leaves")
        if jobs := absent_nodes.users(state.jobs, name):
            why = f"workers of {', '.join(jobs)} may train on at node {name}: stop them, or start its agent"
            raise ApiError("conflict", why)
        self.leader.apply(ForgetNodeAsked(node=name, by=by))

    # -- chaos ----------------------------------------------------------------------------------------------

    def allow_chaos(self) -> None:
        """Refuses where the configuration has it off."""
        if not self.leader.chaos:
            raise ApiError("forbidden", CHAOS_OFF)

    def pace(self, device: str, factor: float) -> None:
        """Has a device run so many times slower than it is."""
        if not math.isfinite(factor) or factor < 1:
            raise ApiError(
                "invalid", f"factor {factor} must be a finite number of at least 1 (1 is normal speed)"
            )
        self.know_device(device)
        self.leader.apply(Paced(device=device, factor=factor))

    def know_device(self, device: str) -> None:
        """Refuses a device that no node has."""
        known = [known.name for node in self.leader.state.nodes.values() for known in node.record.devices]
        if device not in known:
            raise unknown("device", device, known)

    def has_worker(self, device: str) -> bool:
        """Returns True if a job has a worker on a device that its agent knows: in restart mode one that calls
        `elasticd.watch()`."""
        workers = (job.workers.get(device) for job in self.leader.state.jobs.values())
        if any(worker is not None and not worker.left for worker in workers):
            return True
        return self.leader.restarting.has_laps(device)

    def _job(self, name: str) -> JobState:
        if (job := self.leader.state.jobs.get(name)) is None:
            raise unknown("job", name, self.leader.state.jobs)
        return job


def _check_goes_on(job: JobState) -> None:
    if job.phase in OVER:
        raise ApiError(
            "conflict", f"job {job.job} is {job.phase.value} already" + (job.reason and f": {job.reason}")
        )


def _words(before: Mapping[str, Scalar], after: Mapping[str, Scalar], by: str) -> str:
    changes = [f"{key} = {value}" for key, value in sorted(after.items()) if before.get(key) != value]
    changes += [f"{key} is the file's again" for key in sorted(before) if key not in after]
    return f"configuration changed by {by}: {', '.join(changes)}"
