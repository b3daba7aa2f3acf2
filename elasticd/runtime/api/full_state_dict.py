"""The state dict: tensors by name, those of this device or all of them on the plan's first rank.

`Job.state_dict` gives it to the user. The full state dict is a migration to a plan of one device. So it needs
no case for any layout, and every piece is verified.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import TypeVar

import msgspec
import torch
from elasticd_migration.local_state import LocalState, LocalTensor, Shard
from elasticd_migration.migrate import migrate
from elasticd_migration.transport import ProcessGroupTransport
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.model import BALANCE_COUNTS, fused_parameters
from elasticd_planner.spec.plan import Pipeline, Plan, Stage, Strategy
from torch import Tensor

from elasticd.runtime.api.ema import AVERAGE, refuse_without_average
from elasticd.runtime.comm.groups import Group, PeerLost
from elasticd.runtime.engine.engine import Engine
from elasticd.runtime.switch.move import SOUND

#: What a state dict can hold: parameters and buffers; the moving average of the parameters in their place, and
#: buffers; parameters, buffers and the optimizer's state.
CONTENTS = ("value", "average", "all")
#: Before the names of averages and of the optimizer's state.
_AVERAGE, _STATE = f"{AVERAGE}.", "optimizer.state."

T = TypeVar("T")


def of(state: LocalState, contents: str) -> LocalState:
    """The part of a state that `contents`, one of `CONTENTS`, asks for."""
    if contents == "all":
        return state
    tensors = {item: tensor for item, tensor in state.tensors.items() if item.role != "state"}
    if contents == AVERAGE:
        for item, tensor in state.tensors.items():
            if item.role == "state":
                shards = [
                    Shard(box=shard.box, planes={AVERAGE: shard.planes[AVERAGE]})
                    for shard in tensor.shards
                    if AVERAGE in shard.planes
                ]
                if shards:
                    tensors[item] = LocalTensor(shards=tuple(shards))
    return LocalState(tensors=tensors)


def named(state: LocalState, contents: str) -> dict[str, list[tuple[Box, Tensor]]]:
    """The tensors of a state by name, each as (box of the global tensor, values), by reference.

    The optimizer's state has the names of an exported checkpoint, "optimizer.state.NAME.PLANE".
    """
    found: dict[str, list[tuple[Box, Tensor]]] = {}
    for item, tensor in state.tensors.items():
        for shard in tensor.shards:
            for plane, values in shard.planes.items():
                if item.role != "state":
                    name = item.name
                elif contents == AVERAGE:
                    name = f"{_AVERAGE}{item.name}"
                else:
                    name = f"{_STATE}{item.name}.{plane}"
                found.setdefault(name, []).append((shard.box, values))
    return found


def by_own_names(held: Mapping[str, T], own_names: Mapping[str, str]) -> dict[str, T]:
    """The same with the names that the state dict of the user's own modules has: a tied parameter has all of
    its names, its average and its optimizer's state have the first.

    Args:
        held: by names as those of `named`.
        own_names: `Model.own_names`.
    """
    first = {full: own for own, full in reversed(list(own_names.items()))}
    renamed = {own: held[full] for own, full in own_names.items() if full in held}
    for name, value in held.items():
        kind = next((kind for kind in (_STATE, _AVERAGE) if name.startswith(kind)), "")
        full, plane = name.removeprefix(kind), ""
        if kind == _STATE:
            full, plane = _split(full, first)
        if full.endswith(f".{BALANCE_COUNTS}"):  # which no module of the user's has
            continue
        if kind or name not in first:
            renamed[f"{kind}{first.get(full, full)}{'.' * bool(plane)}{plane}"] = value
    return renamed


def _split(key: str, names: Container[str]) -> tuple[str, str]:
    """NAME.PLANE as the two, either of which may have dots."""
    ends = [index for index, letter in enumerate(key) if letter == "."]
    end = next((index for index in reversed(ends) if key[:index] in names), ends[-1])
    return key[:end], key[end + 1 :]


def gathered(engine: Engine, contents: str, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """The full state dict on the plan's first rank, in new tensors on the host; empty on the other ranks.

    All members call it together, between two steps.

    Args:
        engine: of the plan in force.
        contents: one of `CONTENTS`.
        names: full names of parameters and buffers; None: all.

    Raises:
        ValueError: the average is asked for, and the optimizer keeps none.
    """
    if contents == AVERAGE:
        refuse_without_average(engine)
    layouts, state = engine.layouts, of(engine.delivered_state(), contents)
    if names is not None:
        layouts = layouts.only(names)
        kept = set(layouts.items)
        state = LocalState(tensors={item: tensor for item, tensor in state.tensors.items() if item in kept})
    group = engine.everyone
    if group.size > 1:
        state = _moved(engine, layouts, state, group)
    if group.rank:
        return {}
    state = as_modules(state, fused_parameters(layouts.specs))
    full = {name: parts[0][1].detach().cpu().clone() for name, parts in named(state, contents).items()}
    return _put_in_place(full) if contents == AVERAGE else full


def as_modules(state: LocalState, fused: Mapping[str, int]) -> LocalState:
    """The state with fused parameters in the shape of their modules. It must hold every tensor in one piece.

    Args:
        state: the state.
        fused: by name of a fused parameter the dimension that is split in two for the layout.
    """

    def flat(shard: Shard, dim: int) -> Shard:
        planes = {key: plane.flatten(dim, dim + 1) for key, plane in shard.planes.items()}
        shape = shard.box.shape
        return Shard(
            box=Box.whole((*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])), planes=planes
        )

    tensors = {
        item: LocalTensor(
            shards=tuple(flat(shard, fused[item.name]) for shard in held.shards), scalars=held.scalars
        )
        if item.name in fused
        else held
        for item, held in state.tensors.items()
    }
    return LocalState(tensors=tensors, groups=state.groups, extras=state.extras)


def _moved(engine: Engine, layouts: Layouts, state: LocalState, group: Group) -> LocalState:
    transport = ProcessGroupTransport(group.backend, group.members, group.me, group.all_gather)
    target = Layouts(layouts.specs, alone(engine.plan)).only(item.name for item in layouts.items)
    try:
        moved = migrate(layouts, target, state, transport)
    except SOUND:
        raise
    except RuntimeError as error:
        raise PeerLost(f"while the state was gathered: {error}") from error
    group.all_gather(torch.tensor([0]))  # every message has arrived
    transport.drain()
    return moved.state


def alone(plan: Plan) -> Plan:
    """A plan of the first member of `plan` alone."""
    first, modules = plan.members[0], []
    for module in plan.modules:
        stage = Stage(start=0, stop=module.pipelines[0].layers, devices=(first,), shares=(1,))
        count = 1 if module.items else plan.global_batch // plan.micro_batch
        pipeline = Pipeline(stages=(stage,), micro_batches=count)
        modules.append(msgspec.structs.replace(module, pipelines=(pipeline,)))
    return Plan(
        number=plan.number,
        strategies=(Strategy(modules=tuple(modules), edges=plan.edges),),
        micro_batch=plan.micro_batch,
        global_batch=plan.global_batch,
    )


def _put_in_place(full: dict[str, Tensor]) -> dict[str, Tensor]:
    """Replaces parameters by their averages, where there are any."""
    averages = {name.removeprefix(_AVERAGE): value for name, value in full.items() if name.startswith(_AVERAGE)}
    return {name: averages.get(name, value) for name, value in full.items() if not name.startswith(_AVERAGE)}
