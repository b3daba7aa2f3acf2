"""What a switch makes and moves on one rank: a proposal's groups and modules, then its state in side buffers.

Nothing here decides; `switching` calls it when the machine says so, `prepare` beside training and `move` when
training has stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from elasticd_migration.local_state import LocalState, NotElementWise, trimmed
from elasticd_migration.migrate import Corrupt, Foreseen, Incomplete, Moved, agree, foresee, migrate
from elasticd_migration.reshard import Lost, bytes_lacking, whole_bytes
from elasticd_migration.schema import Disagreement, Schema
from elasticd_migration.transport import ProcessGroupTransport
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.layout.surviving_layouts import Remains
from elasticd_planner.spec.model import ModelSpec
from elasticd_planner.spec.plan import Plan

from elasticd.records import Proposal, Recovery
from elasticd.runtime.checkpoint.loader import NoCheckpoint, Types, clear, start_from
from elasticd.runtime.comm.groups import Fabric, Group
from elasticd.runtime.engine.engine import Engine, first_state, make_engine
from elasticd.runtime.engine.pipeline_stage import Pace
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.snapshot.restore import stood_in
from elasticd.runtime.telemetry.main_thread import during
from elasticd.wire.main_thread import FIRST, MOVING, READING

#: What goes wrong in a move while the transition group is sound: not ok is said by a whole group.
SOUND = (Corrupt, Incomplete, Disagreement, Lost, NotElementWise, NoCheckpoint)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """All that a proposal needs here before the switch: `engine` for a member of its plan, without state.
    snapshot: what was read here for those that this rank stands in for, where snapshots are gone on from.
    foreseen: who will send what to whom, where training goes on until the switch."""

    old: Layouts | None
    new: Layouts
    engine: Engine | None
    transition: Fabric
    group: Group
    checkpoints: tuple[str, ...] = ()
    recovery: Recovery | None = None
    snapshot: LocalState | None = None
    in_place: bool = False
    foreseen: Foreseen | None = None


@dataclass(frozen=True, kw_only=True)
class Side:
    """Where a move leads, and what it cost."""

    step: int
    bytes_sent: int = 0
    bytes_lacking: int = 0
    bytes_state: int = 0
    checkpoint: str = ""
    began: float = 0.0
    flows: Mapping[str, tuple[int, float]] = field(default_factory=dict)


def prepare(
    proposal: Proposal,
    recipe: Recipe,
    device: str,
    pace: Pace,
    fabric_of: Callable[[str], Fabric],
    training: Engine | None = None,
) -> Prepared:
    """New groups and modules, and the snapshots to go on from, then the transition group: it stands only when
    all members are ready. `fabric_of` makes the fabrics, by the part that they are for. `training`: the engine
    in force here, which goes on meanwhile."""
    spec, plan, old, recovery = recipe.model.spec, proposal.plan, proposal.old, proposal.recovery
    layouts = Layouts(spec, plan)
    engine = None
    if device in plan.members:
        engine = make_engine(recipe, layouts, fabric_of("groups"), pace)
        engine.after_recovery = recovery is not None
    snapshot = None
    if old is not None and recovery is not None and recovery.snapshots:
        snapshot = recipe.snapshots.state(old, recovery, device)
    transition = fabric_of("transition")
    group = transition.group(_members(old, plan, recovery), "transition")
    source = _source(spec, old, recovery) if old else None
    return Prepared(
        old=source,
        new=layouts,
        engine=engine,
        transition=transition,
        group=group,
        checkpoints=proposal.checkpoints,
        recovery=recovery,
        snapshot=snapshot,
        in_place=proposal.in_place,
        foreseen=_foreseen(source, layouts, group, training) if source and recovery is None else None,
    )


def _foreseen(old: Layouts, new: Layouts, group: Group, training: Engine | None) -> Foreseen | None:
    try:
        mine = training.state().schema() if training is not None else Schema()
    except (NotElementWise, RuntimeError) as error:  # its optimizer makes its state at this moment
        mine = Schema(refused=str(error))
    return foresee(old, new, mine, _transport(group))


def _transport(group: Group) -> ProcessGroupTransport:
    return ProcessGroupTransport(group.backend, group.members, group.me, group.all_gather)


def _members(old: Plan | None, plan: Plan, recovery: Recovery | None) -> tuple[str, ...]:
    """The transition group: who has state, the old plan's members first, and who is to have it."""
    before = old.members if old is not None else ()
    if recovery is None:
        return tuple(dict.fromkeys((*before, *plan.members)))
    living = [device for device in before if device in recovery.sources]
    return tuple(dict.fromkeys((*living, *plan.members, *sorted(recovery.sources))))


def _source(spec: ModelSpec, old: Plan, recovery: Recovery | None) -> Layouts:
    """What moves: the old plan's layouts, after a fault as far as they are left."""
    if recovery is None:
        return Layouts(spec, old)
    if recovery.snapshots:
        return stood_in(spec, old, recovery)
    gone = [device for device in old.members if device not in recovery.sources]
    return Remains(spec, old, gone=gone, stale=recovery.stale)


def move(prepared: Prepared, engine: Engine | None, step: int, recipe: Recipe, seed: int) -> Side:
    """Fills the new engine from what all ranks hold, `engine` being the one here whose state is gone on from
    (None: a joiner), which has made `step` updates.

    The old engine is untouched, but by a move in place, which leaves it spent. Raises one of `SOUND`, or what
    the transition group raises."""
    group, new, recovery = prepared.group, prepared.engine, prepared.recovery
    where = group.fabric.stopwatch.where
    if prepared.snapshot is not None:
        engine = None  # it may be steps ahead
    steps = group.all_gather(torch.tensor([step if engine else -1]))
    step = max(0, *(int(s) for s in steps))
    if recovery is not None and recovery.snapshots:
        step = recovery.step
    began = time.perf_counter()  # all have come: a joiner waited for the others' vote until now
    if prepared.old is None:
        assert new is not None
        folder = recipe.checkpointing.path
        if prepared.checkpoints and folder is not None:
            types = Types(layouts=prepared.new, master=recipe.master)
            with during(where, READING):
                found = start_from(folder, prepared.checkpoints, types, group, torch.device("cpu"))
            new.adopt(found.state)
            return Side(step=found.step, checkpoint=found.name, began=began)
        if recovery is not None:
            raise NoCheckpoint("the job is to go on from a checkpoint, and this rank has no folder of any")
        if folder is not None and group.rank == 0:
            clear(folder)
        with during(where, FIRST):
            state = first_state(recipe.model, prepared.new, group.me, seed, recipe.master)
        new.adopt(state)
        return Side(step=step, began=began)
    transport = _transport(group)
    group.fabric.keep(transport)  # whose last messages may still be on their way until all ranks have said ok
    with during(where, MOVING):
        moved = _migrated(prepared, prepared.old, engine, transport)
    if new is not None:
        new.adopt(moved.state)
    sizes = moved.schema.sizes
    return Side(
        step=step,
        bytes_sent=transport.bytes_sent,
        bytes_lacking=bytes_lacking(prepared.old, prepared.new, sizes).get(group.me, 0),
        bytes_state=whole_bytes(prepared.new, sizes),
        began=began,
        flows=moved.flows,
    )


def _migrated(
    prepared: Prepared, old: Layouts, engine: Engine | None, transport: ProcessGroupTransport
) -> Moved:
    recovery, me = prepared.recovery, prepared.group.me
    try:
        if prepared.snapshot is not None:
            state = prepared.snapshot
        else:
            state = engine.state() if engine else LocalState()
        if recovery is not None and me in recovery.stale:
            state = trimmed(state, old.held(me))
    except NotElementWise as error:
        agree(transport, Schema(refused=str(error)))  # raises it on every rank alike
        raise
    if engine is not None:
        engine.spent = prepared.in_place
    try:
        return migrate(
            old,
            prepared.new,
            state,
            transport,
            in_place=prepared.in_place,
            foreseen=prepared.foreseen,
        )
    except (Disagreement, Lost):
        if engine is not None:
            engine.spent = False  # on every rank alike: nothing was moved
        raise
