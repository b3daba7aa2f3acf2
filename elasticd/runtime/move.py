"""What a switch makes and moves on one rank: a proposal's groups and modules, then its state in side buffers.

Nothing here decides; `switching` calls it when the machine says so, `prepare` beside training and `move` when
training has stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from elasticd_migration.execute import Corrupt, Incomplete, agree, migrate
from elasticd_migration.reshard import Lost, bytes_lacking, whole_bytes
from elasticd_migration.schema import Disagreement
from elasticd_migration.state import LocalState, NotElementWise, trimmed
from elasticd_migration.transport import ProcessGroupTransport
from elasticd_planner.layouts import Layouts
from elasticd_planner.plan import Plan
from elasticd_planner.remains import Remains
from elasticd_planner.rules import ModelSpec

from elasticd.records import Proposal, Recovery
from elasticd.runtime.engine import Engine, Recipe, build, connect, first_state
from elasticd.runtime.groups import Fabric, Group
from elasticd.runtime.loading import NoCheckpoint, clear, start_from
from elasticd.runtime.stage import Pace

#: What goes wrong in a move while the transition group is sound: not ok is said by a whole group.
SOUND = (Corrupt, Incomplete, Disagreement, Lost, NotElementWise, NoCheckpoint)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """All that a proposal needs here before the switch: `engine` for a member of its plan, without state."""

    old: Layouts | None
    new: Layouts
    engine: Engine | None
    transition: Fabric
    group: Group
    checkpoints: tuple[str, ...] = ()
    recovery: Recovery | None = None


@dataclass(frozen=True, kw_only=True)
class Side:
    """Where a move leads, and what it cost. It keeps the transport, whose last messages may still be on their
    way, until all ranks have said ok."""

    step: int
    transport: ProcessGroupTransport | None = None
    bytes_sent: int = 0
    bytes_lacking: int = 0
    bytes_state: int = 0
    checkpoint: str = ""
    began: float = 0.0


def prepare(
    proposal: Proposal, recipe: Recipe, device: str, pace: Pace, fabric_of: Callable[[str], Fabric]
) -> Prepared:
    """New groups and modules, then the transition group: it stands only when all members are ready.
    `fabric_of` makes the fabrics, by the part that they are for."""
    spec, plan, old = recipe.model.spec, proposal.plan, proposal.old
    _check_supported(plan)
    layouts = Layouts(spec, plan)
    engine = None
    if device in plan.members:
        fabric = fabric_of("groups")
        groups = connect(fabric, layouts)
        local = build(recipe.model, plan, device)
        engine = Engine(recipe=recipe, layouts=layouts, local=local, fabric=fabric, groups=groups, pace=pace)
    before = old.members if old else ()
    if proposal.recovery is not None:
        before = tuple(device for device in before if device in proposal.recovery.sources)
    members = tuple(dict.fromkeys((*before, *plan.members)))
    transition = fabric_of("transition")
    return Prepared(
        old=_source(spec, old, proposal.recovery) if old else None,
        new=layouts,
        engine=engine,
        transition=transition,
        group=transition.group(members, "transition"),
        checkpoints=proposal.checkpoints,
        recovery=proposal.recovery,
    )


def _source(spec: ModelSpec, old: Plan, recovery: Recovery | None) -> Layouts:
    """What moves: the old plan's layouts, after a fault as far as they are left."""
    if recovery is None:
        return Layouts(spec, old)
    gone = [device for device in old.members if device not in recovery.sources]
    return Remains(spec, old, gone=gone, stale=recovery.stale)


def _check_supported(plan: Plan) -> None:
    """Refuses what this runtime cannot run yet; the coordinator asks for no such plan."""
    stages = [stage for module in plan.modules for pipeline in module.pipelines for stage in pipeline.stages]
    if any(stage.recompute for stage in stages):
        raise ValueError(f"plan {plan.number}: this runtime does not recompute activations; plan without")


def move(prepared: Prepared, engine: Engine | None, step: int, recipe: Recipe, seed: int) -> Side:
    """Fills the new engine from what all ranks hold, `engine` being the one here whose state is gone on from
    (None: a joiner), which has made `step` updates.

    The old engine is untouched. Raises one of `SOUND`, or what the transition group raises."""
    group, new = prepared.group, prepared.engine
    steps = group.all_gather(torch.tensor([step if engine else -1]))
    step = max(0, *(int(s) for s in steps))
    began = time.perf_counter()  # all have come: a joiner waited for the others' vote until now
    if prepared.old is None:
        assert new is not None
        if prepared.checkpoints and recipe.checkpoints is not None:
            held, place = prepared.new.held(group.me), torch.device("cpu")
            found = start_from(recipe.checkpoints, prepared.checkpoints, held, group, place)
            new.adopt(found.state)
            return Side(step=found.step, checkpoint=found.name, began=began)
        if recipe.checkpoints is not None and group.rank == 0:
            clear(recipe.checkpoints)
        new.adopt(first_state(recipe.model, prepared.new, group.me, seed))
        return Side(step=step, began=began)
    transport = ProcessGroupTransport(group.backend, group.members, group.me, group.wait)
    try:
        state = engine.state() if engine else LocalState()
        if prepared.recovery is not None and group.me in prepared.recovery.stale:
            state = trimmed(state, prepared.old.held(group.me))
    except NotElementWise as error:
        agree(transport, LocalState(), refused=str(error))  # raises it on every rank alike
        raise
    moved = migrate(prepared.old, prepared.new, state, transport)
    if new is not None:
        new.adopt(moved.state)
    sizes = moved.schema.sizes
    return Side(
        step=step,
        transport=transport,
        bytes_sent=transport.bytes_sent,
        bytes_lacking=bytes_lacking(prepared.old, prepared.new, sizes).get(group.me, 0),
        bytes_state=whole_bytes(prepared.new, sizes),
        began=began,
    )
