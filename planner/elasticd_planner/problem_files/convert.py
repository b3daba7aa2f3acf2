"""Problem files converted to the search's problems: a job's problem in seconds, or a problem in units.

A problem in seconds (`model.times`) is free in what its keys allow: micro-batch size without
`batch.micro_batch`, ZeRO with `model.state`, recomputation with `model.recompute`; pins fix each. A problem in
units has one setting.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from elasticd_planner.cost.table_cost import MIB, TableCost
from elasticd_planner.placement.state_bytes import SectionBytes, StateBytes, weights_of
from elasticd_planner.problem import ModuleProblem, Objective, Problem, SearchSpace
from elasticd_planner.problem_files.file_format import (
    InnerLinks,
    LinkEntry,
    LinksEntry,
    NodeEntry,
    TableProblem,
)
from elasticd_planner.problem_files.times import TimedModel, profile_of
from elasticd_planner.search import options
from elasticd_planner.search.module_cost import item_profile
from elasticd_planner.search.options import Setting
from elasticd_planner.search.task import Task, UnitProblem
from elasticd_planner.spec.cluster import Cluster, Device, Link, Node
from elasticd_planner.spec.plan import Plan, StatePolicy

#: Replicas that are tried where they are not pinned: one, and as many as survive the loss of a node.
REPLICAS = (1, 2)


def problem_of(given: TableProblem) -> Problem:
    """The search's problem. Dead devices stay in the cluster, with an infinite rate."""
    model, batch = given.model, given.batch
    common: dict[str, Any] = {
        "cluster": cluster_of(given),
        "global_batch": batch.global_batch,
        "micro_batch": batch.size,
        "rates": rates_of(given),
        "search_space": search_space_of(given),
    }
    if model.times is None or batch.sequence is None:
        weights = state_bytes(given) or StateBytes(layer=SectionBytes(cut=MIB))  # unknown: layers count alike
        return UnitProblem(profile=weights.profile(model.layers), table=cost_of(given), **common)
    timed = TimedModel(
        name=model.name,
        layers=model.layers,
        times=model.times,
        units=model.units,
        groups=model.groups,
        uneven_shares=model.uneven_shares,
        state=model.state,
        recompute=model.recompute,
    )
    modules = tuple(
        ModuleProblem(
            name=entry.name,
            profile=profile_of(entry.model, entry.rows_an_item),
            items=entry.items,
            items_a_sample=entry.items_a_sample,
            rows_an_item=entry.rows_an_item,
            trained=entry.trained,
        )
        for entry in given.modules
    )
    profile = profile_of(timed, batch.sequence * batch.size)
    return Problem(profile=profile, module=given.module, modules=modules, **common)


def cost_of(given: TableProblem) -> TableCost:
    """The cost of a problem in units."""
    model, memory = given.model, given.model.memory
    return TableCost(
        layers=model.layers,
        slowdown=tuple(sorted(model.tp_slowdown.items())),
        full=model.tp_full,
        uneven=model.uneven_shares,
        layer_bytes=tuple(size * MIB for size in memory.layer_mib_by_stage) if memory else (0.0,),
        embedding=memory.embedding_mib * MIB if memory else 0.0,
        fixed=memory.fixed_mib * MIB if memory else 0.0,
        reserve=memory.reserve_mib * MIB if memory else 0.0,
    )


def cluster_of(given: TableProblem) -> Cluster:
    """The cluster of a problem file, its links where it names them."""
    links = given.cluster.links or LinksEntry()
    return Cluster(
        nodes=tuple(map(_node, given.cluster.nodes)),
        levels=tuple(entry.level for entry in given.cluster.levels),
        **_links(within=links.island, inside=links.node, between=links.network),
    )


def _links(**levels: LinkEntry | None) -> dict[str, Link]:
    return {level: entry.link for level, entry in levels.items() if entry is not None}


def _node(entry: NodeEntry) -> Node:
    own = entry.links or InnerLinks()
    return Node(
        name=entry.name,
        devices=tuple(
            Device(name=f"{entry.name}/{i}", memory=math.floor(entry.memory_mib * MIB))
            for i in range(entry.devices)
        ),
        island=entry.island or 0,
        **_links(inside=own.node, within=own.island),
    )


def rates_of(problem: TableProblem) -> dict[str, float]:
    """Effective rates: how slow a device is, over how fast its node is."""
    found = {}
    for node in problem.cluster.nodes:
        for i in range(node.devices):
            rate = problem.rates.get(f"{node.name}/{i}", 1.0)
            known = math.inf if rate is None else rate / node.speed
            if known != 1.0:
                found[f"{node.name}/{i}"] = known
    return found


def search_space_of(given: TableProblem) -> SearchSpace:
    """The choices of the search: all that the file neither pins nor lacks the figures of."""
    pins, batch = given.pins, given.batch
    sizes = [n for n in range(1, batch.global_batch + 1) if batch.global_batch % n == 0]
    if batch.micro_batch is not None or given.model.times is None:
        sizes = [batch.size]
    least = pins.dp or 1
    may = given.model.recompute is not None and pins.recompute is not False
    return SearchSpace(
        micro_batches=tuple(size for size in sizes if batch.global_batch // size >= least),
        states=tuple(_states(given)),
        recompute="always" if pins.recompute else may,
        sequence_parallel="always" if pins.sequence_parallel is True else bool(pins.sequence_parallel),
        interleave=pins.interleave or 1,
        lanes=pins.lanes or 1,
        fixed_tp=pins.tp,
        fixed_dp=pins.dp,
    )


def _states(given: TableProblem) -> list[StatePolicy]:
    """Policies in the order of preference: the simplest first. Stage 2 costs what stage 1 does."""
    pins = given.pins
    stages = (0, 1) if pins.zero is None else (pins.zero,)
    if given.model.state is None:
        stages = (0,)
    made = []
    for zero in stages:
        if zero == 0:
            made += [StatePolicy()] if pins.replicas is None else []
            continue
        for replicas in REPLICAS if pins.replicas is None else (pins.replicas,):
            made.append(StatePolicy(zero=zero, replicas=replicas))
    return made


def state_bytes(given: TableProblem) -> StateBytes | None:
    """The bytes of a problem's layers: from `model.state`, else about, from a last stage's memory (activations
    of one micro-batch are in it)."""
    if given.model.state is not None:
        return weights_of(problem_of(given).profile)
    memory = given.model.memory
    if memory is None:
        return None
    full = given.model.tp_full * MIB
    edge = SectionBytes(cut=round(memory.embedding_mib * full))
    layer = SectionBytes(cut=round(memory.layer_mib_by_stage[-1] * full))
    return StateBytes(layer=layer, embedding=edge, head=edge, holds="memory of a last stage")


def item_state_bytes(given: TableProblem) -> dict[str, StateBytes]:
    """The state of the layers of each module of items, where the problem says so (`model.state`)."""
    stated = {entry.name for entry in given.modules if entry.model.state is not None}
    modules = problem_of(given).modules
    return {module.name: weights_of(item_profile(module)) for module in modules if module.name in stated}


def task_of(given: TableProblem, objective: Objective = "step", plan: Plan | None = None) -> Task:
    """The search's task for the setting that a plan was made under; without one for the simplest setting."""
    problem = msgspec.structs.replace(problem_of(given), objective=objective)
    setting = Setting(
        micro_batch=plan.micro_batch if plan is not None else given.batch.size,
        state=plan.state if plan is not None else problem.search_space.states[0],
        recompute=False,
        pipelines=len(plan.view(plan.loss_module.module).by_lane) if plan is not None else given.pins.dp,
        sequence_parallel=False,
    )
    return options.task_of(setting.problem(problem))
