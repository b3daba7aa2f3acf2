"""A rank stands in for members of a plan of which only snapshots are left: it reads theirs from its agent."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from elasticd_migration.local_state import LocalState
from elasticd_planner.layout.holdings import JobTensors, holdings_of
from elasticd_planner.layout.snapshot_layouts import SnapshotLayouts
from elasticd_planner.spec.cluster import node_of
from elasticd_planner.spec.mesh import JobPlan

from elasticd.records import Recovery
from elasticd.runtime.accelerator import CPU, Accelerator
from elasticd.runtime.checkpoint.staging import shares
from elasticd.runtime.snapshot.memory_file import BadSnapshot, joined, read
from elasticd.wire.snapshots import Held

#: Asks the agent for a snapshot: what it has, and a memory file, the caller's. Raises RuntimeError or OSError.
Fetch = Callable[[Held], tuple[Held, int]]


def _nothing(held: Held) -> tuple[Held, int]:
    raise BadSnapshot(f"nobody here keeps a snapshot of {held.device}")


@dataclass(frozen=True, kw_only=True)
class Snapshots:
    """The snapshots of a job that this node's agent keeps."""

    job: str = ""
    fetch: Fetch = _nothing

    def state(
        self, old: JobPlan, recovery: Recovery, device: str, accelerator: Accelerator = CPU
    ) -> LocalState:
        """The shares of all for whom `device` stands in, in memory of its own on its accelerator.

        Raises BadSnapshot, or what `fetch` raises."""
        members = [member for member in old.members if recovery.snapshots.get(member) == device]
        place = accelerator.device
        return joined({member: self._one(old, recovery.step, member, place) for member in members})

    def _one(self, old: JobPlan, step: int, member: str, place: torch.device) -> LocalState:
        wanted = Held(
            job=self.job,
            device=member,
            incarnation=old.binding.get(member, ""),
            plan=old.number,
            step=step,
            node=node_of(member),
            size=0,  # the agent knows
        )
        held, fd = self.fetch(wanted)
        try:
            contents, state = read(fd, held.size, place)
        finally:
            os.close(fd)
        found = contents.job, contents.device, contents.plan, contents.step
        if found != (self.job, member, old.number, step):
            raise BadSnapshot(
                f"the agent gave a snapshot of {contents.device}, plan {contents.plan}, step {contents.step}, "
                f"not of {member}, plan {old.number}, step {step}"
            )
        return state


def stood_in(tensors: JobTensors, old: JobPlan, recovery: Recovery) -> SnapshotLayouts:
    """The places of the state once all have read the snapshots that they are to."""
    layouts = holdings_of(tensors, old)
    return SnapshotLayouts(layouts, shares=shares(layouts), stands=recovery.snapshots)
