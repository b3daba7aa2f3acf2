"""A rank stands in for members of a plan whose state only snapshots have: it reads theirs from its agent."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from elasticd_migration.local_state import LocalState, LocalTensor, Shard
from elasticd_planner.layout.holdings import Holdings, JobTensors, holdings_of
from elasticd_planner.layout.layouts import Item
from elasticd_planner.layout.snapshot_layouts import SnapshotLayouts
from elasticd_planner.layout.surviving_layouts import SurvivingLayouts
from elasticd_planner.spec.box import Box
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
    """The holdings of everything once all have read the snapshots that they are to, beside the copies that live
    if those are of use."""
    layouts = holdings_of(tensors, old)
    left = None if recovery.all_read(old) else remains(layouts, old, recovery)
    return SnapshotLayouts(layouts, shares=shares(layouts), stands=recovery.snapshots, left=left)


def remains(layouts: Holdings, old: JobPlan, recovery: Recovery) -> SurvivingLayouts:
    """The copies on devices that a recovery goes on from."""
    gone = [device for device in old.members if device not in recovery.sources]
    return SurvivingLayouts(layouts, gone=gone, stale=recovery.stale)


def with_snapshots(state: LocalState, read: LocalState, boxes: Mapping[Item, Sequence[Box]]) -> LocalState:
    """A rank's own state and what it read for lost ones, by reference.

    Args:
        state: of the copy here.
        read: the shares of snapshots, of the same step.
        boxes: that this rank has in all (`SnapshotLayouts.held`).

    Raises:
        BadSnapshot: the two are of unlike steps.
    """
    both = joined({"the copy here": state, "the snapshots read here": read})
    tensors: dict[Item, LocalTensor] = {}
    for item, wanted in boxes.items():
        if (tensor := both.tensors.get(item)) is None:
            continue
        shards = []
        for box in wanted:
            around = next((shard for shard in tensor.shards if shard.box.contains(box)), None)
            if around is not None:  # else it is state that no step made yet
                planes = {name: around.part(name, box) for name in around.planes}
                shards.append(Shard(box=box, planes=planes, aside=around.aside))
        tensors[item] = LocalTensor(shards=tuple(shards), scalars=tensor.scalars)
    return LocalState(tensors=tensors, groups=both.groups, extras=both.extras)
