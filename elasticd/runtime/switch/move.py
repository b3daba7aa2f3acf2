"""The two long parts of a switch on one rank: making a plan's groups and modules, and moving the state.

Nothing here decides: the switcher calls `prepare` beside training, and `move` when training has stopped, as the
switch machine's effects say.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic

import torch
from elasticd_migration.local_state import LocalState, NotElementWise, trimmed
from elasticd_migration.migrate import Corrupt, Incomplete, Moved, PreparedMove, agree, migrate, prepare_move
from elasticd_migration.reshard import Lost, bytes_lacking, whole_bytes
from elasticd_migration.schema import Disagreement, Schema
from elasticd_migration.transport import ProcessGroupTransport, Transport
from elasticd_planner.layout.channels import Channel
from elasticd_planner.layout.holdings import Holdings, JobTensors, holdings_of
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.mesh import JobPlan
from elasticd_planner.spec.plan import Plan

from elasticd.records import Proposal, Recovery
from elasticd.runtime.accelerator import CPU, Accelerator
from elasticd.runtime.checkpoint.loader import FrozenValues, NoCheckpoint, Types, clear, start_from
from elasticd.runtime.comm.communicators import agreed
from elasticd.runtime.comm.device_communicators import DeviceCommunicators
from elasticd.runtime.comm.groups import Group, PlanGroups
from elasticd.runtime.engine.compiled_blocks import compile_ahead, compile_now
from elasticd.runtime.engine.engine import Engine, first_state
from elasticd.runtime.engine.pass_watch import PassPacer
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.engine.set_aside import NoHostMemory
from elasticd.runtime.snapshot.memory_file import BadSnapshot
from elasticd.runtime.snapshot.restore import remains, stood_in, with_snapshots
from elasticd.runtime.switch.device_transport import DeviceTransport
from elasticd.runtime.switch.plan_copy import Held, MoveResult, PreparedPlan
from elasticd.runtime.telemetry.main_thread import during
from elasticd.wire.main_thread import FIRST, MOVING, READING

#: Errors of a move that leave the transition group usable: the rank says not ok in its all-gather.
SOUND = (Corrupt, Incomplete, Disagreement, Lost, NotElementWise, NoCheckpoint)


@dataclass(frozen=True)
class JobMoves:
    """The `PlanMoves` of a job whose model elasticd cuts."""

    recipe: Recipe
    pacer: PassPacer

    @property
    def folder(self) -> Path | None:
        """The folder of the job's checkpoints; None: it keeps none."""
        return self.recipe.checkpointing.path

    def prepare(
        self,
        proposal: Proposal,
        device: str,
        plan_groups_of: Callable[[str], PlanGroups],
        training: Engine | None,
    ) -> PreparedPlan[Engine]:
        """See `prepare`."""
        return prepare(proposal, self.recipe, device, self.pacer, plan_groups_of, training)

    def move(self, prepared: PreparedPlan[Engine], held: Engine | None, step: int) -> MoveResult:
        """See `move`."""
        return move(prepared, held, step, self.recipe)


def prepare(
    proposal: Proposal,
    recipe: Recipe,
    device: str,
    pace: PassPacer,
    plan_groups_of: Callable[[str], PlanGroups],
    training: Engine | None = None,
) -> PreparedPlan[Engine]:
    """Makes new groups and modules, reads the snapshots to go on from, then joins the transition group, which
    stands only when all members are ready.

    Args:
        proposal: The proposed plan, and the one before it.
        recipe: What the job's script trains.
        device: This rank's device.
        pace: Paces an emulated device.
        plan_groups_of: Makes the groups of one part of the plan ("groups" or "transition").
        training: The engine in force here, which trains on meanwhile.

    Returns:
        What `move` needs.

    Raises:
        ValueError: the plan is of a 0.1 leader whose chaos shifted the data.
    """
    recipe.accelerator.use()  # this thread is another than the training's
    spec, plan, old, recovery = recipe.model.specs, proposal.plan, proposal.old, proposal.recovery
    if not isinstance(plan, Plan):
        raise ValueError(f"plan {plan.number} has a mesh, and this worker trains an elasticd.Job")
    if plan.sequence:
        raise ValueError("the plan has samples read in other sequences (chaos shift of release 0.1)")
    layouts = Layouts(spec, plan)
    engine = None
    if device in plan.members:
        engine = Engine(recipe, layouts, plan_groups_of("groups"), pace)
        engine.after_recovery = recovery is not None
        engine.leave_out = recovery.leave_out if recovery is not None else -1
        if recipe.parallelism.compile:
            _compile(recipe, engine, training)
    snapshot = None
    if old is not None and recovery is not None and recovery.snapshots:
        snapshot = recipe.snapshots.state(old, recovery, device, recipe.accelerator)
    transition = plan_groups_of("transition")
    group = transition.group(transition_members(old, plan, recovery), "transition")
    communicators = None
    if group.size > 1:
        make = recipe.connect or agreed(group, recipe.accelerator)
        communicators = make(transition, (_channel(group),), group, recipe.accelerator)
    source = source_of(spec, old, recovery) if old else None
    return PreparedPlan(
        old=source,
        new=layouts,
        engine=engine,
        transition=transition,
        group=group,
        communicators=communicators,
        proposal=proposal,
        snapshot=snapshot,
        prepared_move=_prepare_move(source, layouts, group, training) if source and recovery is None else None,
    )


def _compile(recipe: Recipe, engine: Engine, training: Engine | None) -> None:
    """Has the blocks of a plan compiled: now, where no training goes on here; else after the switch."""
    for name, module in engine.modules.items():
        runner, plan = module.runner, module.layouts.plan
        if training is None:
            finish = compile_ahead(recipe, plan, engine.device)
            if runner is None:
                finish()  # perhaps of a plan that was given up
            else:
                runner.before_first_pass = finish
        elif runner is not None:
            before = training.modules[name].runner
            seen = tuple(before.calls.seen) if before is not None else ()
            runner.calls.seen.extend(seen)
            runner.before_first_pass = partial(compile_now, recipe, plan, engine.device, seen)


def _prepare_move(old: Holdings, new: Holdings, group: Group, training: Engine | None) -> PreparedMove | None:
    try:
        mine = training.state().schema() if training is not None else Schema()
    except (NotElementWise, RuntimeError) as error:  # its optimizer makes its state at this moment
        mine = Schema(refused=str(error))
    return prepare_move(old, new, mine, transport_of(group))


def _channel(group: Group) -> Channel:
    return Channel("state", group.members)


def transport_of(group: Group) -> ProcessGroupTransport:
    return ProcessGroupTransport(group.backend, group.members, group.me, group.all_gather)


def _data_transport(prepared: PreparedPlan[Engine], accelerator: Accelerator) -> Transport:
    """For state: from device to device, or over gloo by way of the host."""
    group, made = prepared.group, prepared.communicators
    if not isinstance(made, DeviceCommunicators):
        return transport_of(group)
    return DeviceTransport(transport_of(group), made.mesh(_channel(group)), accelerator.device)


def transition_members(old: JobPlan | None, plan: JobPlan, recovery: Recovery | None) -> tuple[str, ...]:
    """The transition group: the ranks that hold state, the old plan's members first, and those that will."""
    before = old.members if old is not None else ()
    if recovery is None:
        return tuple(dict.fromkeys((*before, *plan.members)))
    living = [device for device in before if device in recovery.sources]
    return tuple(dict.fromkeys((*living, *plan.members, *sorted(recovery.sources))))


def source_of(tensors: JobTensors, old: JobPlan, recovery: Recovery | None) -> Holdings:
    """The state that moves: the old plan's layouts, after a fault as far as they are left."""
    if recovery is None:
        return holdings_of(tensors, old)
    if recovery.snapshots:
        return stood_in(tensors, old, recovery)
    return remains(holdings_of(tensors, old), old, recovery)


@dataclass(frozen=True, kw_only=True)
class StateMove(Generic[Held]):
    """The move of state to one plan on one rank, from the step on that all ranks agree on."""

    prepared: PreparedPlan[Held]
    source: Held | None  # the copy here whose state moves; None: this rank only joins, or reads what it has
    step: int  # updates that the moved state has seen
    began: float  # seconds on `time.perf_counter`, when all ranks had come

    @classmethod
    def begin(cls, prepared: PreparedPlan[Held], held: Held | None, step: int) -> StateMove[Held]:
        """Agrees with the other ranks of the transition group on the step.

        Args:
            prepared: what `prepare` made.
            held: the copy here whose state the job goes on from; None: this rank only joins.
            step: updates applied to it.
        """
        recovery = prepared.proposal.recovery
        source = None if prepared.all_read else held  # it may be steps ahead
        steps = prepared.group.all_gather(torch.tensor([step if source is not None else -1]))
        step = max(0, *(int(each) for each in steps))
        if recovery is not None and prepared.all_read:
            step = recovery.step
        # All have come: a joiner waited for the others' vote until now.
        return cls(prepared=prepared, source=source, step=step, began=time.perf_counter())

    def migrated(
        self,
        old: Holdings,
        tensors: JobTensors,
        own: Callable[[Held], LocalState],
        transport: Transport,
        device: torch.device = CPU.device,
    ) -> Moved:
        """Moves the state to the boxes of the new plan.

        Args:
            old: of the state that moves.
            tensors: of the job.
            own: the state of the source.
            transport: over which it moves.
            device: where new tensors lie.

        Raises:
            SOUND, PeerLost, Cancelled: see `move`.
        """
        prepared, source = self.prepared, self.source
        # Its last messages may still be on their way until all ranks have said ok.
        prepared.group.plan_groups.keep(transport)
        with during(prepared.group.plan_groups.stopwatch.where, MOVING):
            try:
                state = self._local(old, tensors, own)
            except (NotElementWise, NoHostMemory, BadSnapshot) as error:
                agree(transport, Schema(refused=str(error)))  # raises it on every rank alike
                raise
            in_place = prepared.proposal.in_place
            if source is not None and in_place:
                source.health.consume()
            try:
                return migrate(
                    old,
                    prepared.new,
                    state,
                    transport,
                    in_place=in_place,
                    device=device,
                    prepared=prepared.prepared_move,
                )
            except (Disagreement, Lost):
                if source is not None and in_place:
                    source.health.give_back()  # on every rank alike: nothing was moved
                raise

    def _local(self, old: Holdings, tensors: JobTensors, own: Callable[[Held], LocalState]) -> LocalState:
        """The state of this rank that others may take: its own, and what it read for lost ranks."""
        prepared, me = self.prepared, self.prepared.group.me
        if self.source is None:
            return prepared.snapshot or LocalState()
        state, recovery, plan = own(self.source), prepared.proposal.recovery, prepared.proposal.old
        if recovery is not None and plan is not None and me in recovery.stale:
            state = trimmed(state, remains(holdings_of(tensors, plan), plan, recovery).held(me))
        if prepared.snapshot is not None:
            state = with_snapshots(state, prepared.snapshot, old.held(me))
        return state

    def result(self, old: Holdings, moved: Moved, transport: Transport) -> MoveResult:
        """The step that the move leads to, and its cost. `old` and `transport`: those of `migrated`."""
        new, sizes = self.prepared.new, moved.schema.sizes
        return MoveResult(
            step=self.step,
            bytes_sent=transport.bytes_sent,
            bytes_lacking=bytes_lacking(old, new, sizes).get(self.prepared.group.me, 0),
            bytes_state=whole_bytes(new, sizes),
            began=self.began,
            flows=moved.flows,
        )


def move(prepared: PreparedPlan[Engine], engine: Engine | None, step: int, recipe: Recipe) -> MoveResult:
    """Fills the new engine from what all ranks hold. The old engine is untouched, but by a move in place, which
    leaves it spent, and where its state is set aside: it can train again after `Engine.back`.

    Args:
        prepared: What `prepare` made.
        engine: The engine here whose state the job goes on from (None: this rank only joins).
        step: Updates applied to it.
        recipe: What the job's script trains.

    Returns:
        The step that the new state is of, and what the move cost.

    Raises:
        SOUND, PeerLost, Cancelled: The move failed. After one of `SOUND` the transition group is usable.
    """
    begun, new, old = StateMove[Engine].begin(prepared, engine, step), prepared.engine, prepared.old
    if old is None:
        assert new is not None
        return _first(begun, new, recipe)

    def own(source: Engine) -> LocalState:
        source.copied()  # the new engine may take its tensors over
        aside = prepared.group.me in prepared.proposal.aside
        return source.set_aside(prepared.new.held(prepared.group.me)) if aside else source.state()

    transport = _data_transport(prepared, recipe.accelerator)
    moved = begun.migrated(old, recipe.model.specs, own, transport, recipe.accelerator.device)
    if new is not None:
        new.adopt(moved.state)
    return begun.result(old, moved, transport)


def _first(begun: StateMove[Engine], new: Engine, recipe: Recipe) -> MoveResult:
    """Fills the first plan's engine from a checkpoint, or with first values."""
    group, proposal = begun.prepared.group, begun.prepared.proposal
    folder = recipe.checkpointing.path
    where = group.plan_groups.stopwatch.where
    if proposal.checkpoints and folder is not None:
        types = Types(layouts=new.layouts, master=recipe.master)
        with during(where, READING):
            found = start_from(folder, proposal.checkpoints, types, group, recipe.accelerator, _frozen(recipe))
        new.adopt(found.state)
        new.guard.restart()
        return MoveResult(step=found.step, checkpoint=found.name, began=begun.began)
    if proposal.recovery is not None:
        raise NoCheckpoint("the job is to go on from a checkpoint, and this rank has no folder of any")
    if folder is not None and group.rank == 0:
        clear(folder)
    with during(where, FIRST):
        state = first_state(recipe.model, new.layouts, group.me, recipe.seed, recipe.master, recipe.accelerator)
    new.adopt(state)
    return MoveResult(step=begun.step, began=begun.began)


def _frozen(recipe: Recipe) -> FrozenValues:
    """The frozen parameters of checkpoints that leave them out."""
    model, seed = recipe.model, recipe.seed
    return FrozenValues(digest=model.frozen_digest, value=lambda name, box: model.first_value(name, box, seed))
