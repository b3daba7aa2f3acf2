"""Makes a live copy of a proposed mesh plan, and moves the state into it: `PlanMoves` of a script's own loop.

A preparer thread makes the plan's gloo device and the group of its vote, reads snapshots, and joins the
transition group. torch's world of the new plan is made by the main thread, once training has stopped: there is
one world at a time. It calls the script's `build`, and state is copied into what that made. A plan that differs
from the one before in the samples of lanes alone takes world, tensors and groups over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from elasticd_planner.layout.mesh_layouts import MeshLayouts
from elasticd_planner.spec.mesh import MeshModel, MeshPlan

from elasticd.records import Proposal
from elasticd.runtime.accelerator import CPU, Accelerator
from elasticd.runtime.comm.groups import Group, PlanGroups
from elasticd.runtime.live import world
from elasticd.runtime.live.live_copy import Build, LiveCopy
from elasticd.runtime.live.live_state import LiveRefusal, State
from elasticd.runtime.snapshot.restore import Snapshots
from elasticd.runtime.switch.move import StateMove, source_of, transition_members, transport_of
from elasticd.runtime.switch.plan_copy import MoveResult, PreparedPlan

#: Loads into a state what an earlier start of the script saved; returns the steps that had been made.
Resume = Callable[[State], int]


@dataclass(frozen=True, kw_only=True)
class LiveMoves:
    """The `PlanMoves` of a script's own loop."""

    model: MeshModel  #: the tensors under each allowed mesh
    build: Build
    seed: int
    snapshots: Snapshots = field(default_factory=Snapshots)  #: those that this node's agent keeps
    resume: Resume | None = None  #: the script's own; None: the job begins at step 0
    accelerator: Accelerator = CPU  #: that tensors lie on

    @property
    def folder(self) -> Path | None:
        """None: no checkpoints are kept."""
        return None

    def prepare(
        self,
        proposal: Proposal,
        device: str,
        plan_groups_of: Callable[[str], PlanGroups],
        training: LiveCopy | None,
    ) -> PreparedPlan[LiveCopy]:
        """See `PlanMoves`."""
        plan, old, recovery = proposal.plan, proposal.old, proposal.recovery
        assert isinstance(plan, MeshPlan)
        self.accelerator.use()  # this thread is another than the training's
        layouts = MeshLayouts(self.model, plan)
        before = training if recovery is None and plan.same_mesh(old) else None
        copy = None
        if before is not None:
            copy = LiveCopy(layouts, before.plan_groups, before, self.accelerator)
        elif device in plan.members:
            copy = LiveCopy(layouts, plan_groups_of("groups"), accelerator=self.accelerator)
        snapshot = None
        if old is not None and recovery is not None and recovery.snapshots:
            snapshot = self.snapshots.state(old, recovery, device, self.accelerator)
        transition = plan_groups_of("transition")
        group = transition.group(transition_members(old, plan, recovery), "transition")
        return PreparedPlan(
            old=source_of(self.model, old, recovery) if old else None,
            new=layouts,
            engine=copy,
            transition=transition,
            group=group,
            communicators=None,
            proposal=proposal,
            snapshot=snapshot,
        )

    def move(self, prepared: PreparedPlan[LiveCopy], held: LiveCopy | None, step: int) -> MoveResult:
        """See `PlanMoves`. Where it fails, torch's world is the one before."""
        before = world.current()
        try:
            return self._move(prepared, held, step)
        except BaseException:
            if prepared.engine is not None and prepared.engine.before is None:
                prepared.engine.end()
            if before is not None:
                world.enter(before)
            raise

    def _move(self, prepared: PreparedPlan[LiveCopy], held: LiveCopy | None, step: int) -> MoveResult:
        begun = StateMove[LiveCopy].begin(prepared, held, step)
        group, new, old = prepared.group, prepared.engine, prepared.old
        if new is not None and new.before is not None:  # lanes get other shares, and all stays where it is
            return MoveResult(step=begun.step, began=begun.began)
        if (before := world.current()) is not None:
            before.leave()
        if new is not None:
            new.build(self.build, self.seed)
        if old is None:
            step = begun.step if new is None or self.resume is None else self._resumed(new, group)
            return MoveResult(step=step, began=begun.began)
        transport = transport_of(group)
        moved = begun.migrated(old, self.model, LiveCopy.state, transport, self.accelerator.device)
        if new is not None:
            new.adopt(moved.state)
        return begun.result(old, moved, transport)

    def _resumed(self, new: LiveCopy, group: Group) -> int:
        """Has the script load what it saved. All members of the first plan call it together.

        Returns:
            The steps that had been made.

        Raises:
            LiveRefusal: it returned no number of steps, or ranks loaded unlike ones.
        """
        assert self.resume is not None
        step = self.resume(new.user)
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise LiveRefusal(f"resume returned {step!r}: let it return the steps that were made, 0 for none")
        steps = [int(each) for each in group.all_gather(torch.tensor([step]))]
        if len({*steps}) > 1:
            by_device = ", ".join(
                f"{each} on {device}" for device, each in zip(group.members, steps, strict=True)
            )
            raise LiveRefusal(
                f"resume returned unlike steps ({by_device}): let all ranks load the same checkpoint, from a "
                "folder that they share"
            )
        return step
