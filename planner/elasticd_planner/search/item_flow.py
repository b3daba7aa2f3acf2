"""The pipelines that each lane of a module of items serves: a flow of items from lanes to pipelines.

A lane first serves the pipelines of the module with the loss that its own devices are in, whose rows need no
link. Where these need fewer items than their devices have been given, or more, the rest goes from the lanes of
nodes to groups of pipelines over the links on which an item's rows take least.
Pipelines that exchange no items are components of the order of passes, which their ranks make by themselves.

networkx, which takes long to import, has the least-cost flow and the components. A lone trainer that plans for
itself has one device, where nothing is to choose, and needs no networkx.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise

import msgspec

from elasticd_planner.spec.cluster import Cluster, node_of
from elasticd_planner.spec.plan import ModulePlan, Plan

#: A group of pipelines whose lanes have this part of its items less, or more, takes no other lanes.
SLACK = 1 / 16

#: Where each group has so many lanes, one of no group's devices serves a single group.
MANY = 4


def serving(plan: Plan, module: ModulePlan, cluster: Cluster, groups: int, item_bytes: float) -> ModulePlan:
    """The module of items with what each of its pipelines serves.

    Args:
        plan: of all modules.
        module: of items, of the plan.
        cluster: of its devices.
        groups: how many groups of adjacent pipelines of the module with the loss have lanes of their own.
        item_bytes: the rows of an item.
    """
    loss = plan.loss_module.pipelines
    bounds = [len(loss) * k // groups for k in range(groups + 1)]
    members = [range(first, stop) for first, stop in pairwise(bounds)]
    group_of = {
        device: group
        for group, pipelines in enumerate(members)
        for p in pipelines
        for stage in loss[p].stages
        for device in stage.devices
    }
    # Items in units of which the lanes have as many as the pipelines need.
    weights = [pipeline.micro_batches for pipeline in module.pipelines]
    batch = sum(pipeline.micro_batches for pipeline in loss)
    needs = [sum(weights) * sum(loss[p].micro_batches for p in pipelines) for pipelines in members]
    left, spare = list(needs), [weight * batch for weight in weights]
    serves: list[set[int]] = [set() for _ in weights]
    for lane, pipeline in enumerate(module.pipelines):
        found = {group_of[d] for stage in pipeline.stages for d in stage.devices if d in group_of}
        if len(found) == 1:
            (group,) = found
            used = min(left[group], spare[lane])
            serves[lane].add(group)
            left[group], spare[lane] = left[group] - used, spare[lane] - used
    short = {group: need for group, need in enumerate(left) if need > SLACK * needs[group]}
    starts = [loss[pipelines[0]].stages[0].devices[0] for pipelines in members]
    nodes: dict[str, list[int]] = defaultdict(list)
    for lane, amount in enumerate(spare):
        if amount:
            nodes[node_of(module.pipelines[lane].stages[0].devices[0])].append(lane)
    supply = {node: sum(spare[lane] for lane in lanes) for node, lanes in nodes.items()}
    cost = {
        (node, group): round(
            1e9
            * cluster.reach((module.pipelines[lanes[0]].stages[0].devices[0], starts[group])).seconds(
                item_bytes
            )
        )
        for node, lanes in nodes.items()
        for group in short
    }
    whole = len(weights) >= MANY * groups
    for node, group, amount in _flow(supply, short, cost):
        for lane in nodes[node]:
            used = min(amount, spare[lane])
            if whole and not serves[lane]:
                used = spare[lane] if 2 * amount >= spare[lane] else 0
            if used > 0:
                serves[lane].add(group)
                spare[lane], amount = spare[lane] - used, amount - used
    for lane, own in enumerate(serves):  # what no group lacks goes to the nearest
        if not own:
            device = module.pipelines[lane].stages[0].devices[0]
            own.add(
                min(range(groups), key=lambda g: (cluster.reach((device, starts[g])).seconds(item_bytes), g))
            )
    if missing := {*range(groups)} - set[int]().union(*serves):
        for group in missing:
            serves[max(range(len(weights)), key=lambda lane: (weights[lane], -lane))].add(group)
    pipelines = tuple(
        msgspec.structs.replace(pipeline, serves=tuple(p for group in sorted(own) for p in members[group]))
        for pipeline, own in zip(module.pipelines, serves, strict=True)
    )
    return msgspec.structs.replace(module, pipelines=pipelines)


def _flow(
    supply: Mapping[str, int], needs: Mapping[int, int], cost: Mapping[tuple[str, int], int]
) -> Iterator[tuple[str, int, int]]:
    """Node, group, and how much goes from one to the other: as much as is there and needed, over the links on
    which all of it together takes least."""
    if not cost:
        return
    import networkx as nx

    moved = min(sum(supply.values()), sum(needs.values()))
    graph = nx.DiGraph()
    graph.add_node("source", demand=-moved)
    graph.add_node("sink", demand=moved)
    graph.add_edges_from(("source", node, {"capacity": amount}) for node, amount in supply.items())
    graph.add_edges_from((group, "sink", {"capacity": amount}) for group, amount in needs.items())
    graph.add_edges_from((node, group, {"weight": weight}) for (node, group), weight in cost.items())
    _, flow = nx.network_simplex(graph)
    for node, group in sorted(cost, key=lambda pair: (cost[pair], pair)):
        if amount := flow[node][group]:
            yield node, group, amount


def components(plan: Plan) -> list[list[int]]:
    """The pipelines of the module with the loss, those together that lanes of items serve both. Where a lane
    serves all, each pipeline is by itself: any of them stands for the others."""
    pipelines = range(len(plan.loss_module.pipelines))
    served = {lane.serves for module in plan.modules if module.items for lane in module.pipelines}
    if len(pipelines) == 1 or not all(served):
        return [[p] for p in pipelines]
    import networkx as nx

    graph = nx.Graph()
    graph.add_nodes_from(pipelines)
    for serves in served:
        nx.add_path(graph, serves)
    return sorted(map(sorted, nx.connected_components(graph)))
