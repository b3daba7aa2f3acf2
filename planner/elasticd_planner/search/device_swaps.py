"""Device swaps: a found plan's shape on other devices, where its slowest pipeline is faster so.

The search counts devices by class and all boundaries between nodes alike, and deals groups to pipelines by
what they compute. Which pipeline a group is in, and next to which group, decides which links are crossed. Here
the shape stays: groups, their shares, layers and micro-batches. Devices change places while that makes the
slowest pipeline faster and no other as slow as it was, or the step faster, under the exact time:

- two TP groups of one size, of one pipeline or of two;
- a group and those after it, up to where another one leaves;
- two devices of different groups;
- a device for an idle one, a group for idle devices of one node;
- on few nodes, all that two nodes hold; all that one holds for idle devices of another, or all that some hold
  for idle devices of one or of those that a level joins, which may bring all members nearer to each other; and
  all devices, dealt by name.

A TP group keeps to a node where it did before, and each device has the memory that its new place needs.
Pipelines that look the same beside the slowest one are tried once, and there is a limit of pipelines that are
costed, so that large plans take little time. Deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, islice, pairwise, permutations, product

import msgspec
import numpy as np

from elasticd_planner.cost.memory import memory_by_device
from elasticd_planner.cost.model import KnownCosts, smallest, stage_times
from elasticd_planner.cost.pipeline_time import Times
from elasticd_planner.grouping.tp_groups import by_name
from elasticd_planner.numeric import EQUAL
from elasticd_planner.search.task import Signature, Task, alive, pipeline_signature
from elasticd_planner.spec.cluster import Link, node_of, rate_of
from elasticd_planner.spec.plan import Pipeline, Plan

#: Changes made at most, and pipelines costed for all of them.
CHANGES, COSTED = 100, 5_000

#: Pipelines whose schedules are played at once, times the square of their stages: what is kept of the rounds
#: grows so, and takes 64 MB.
AT_ONCE = 600_000

#: Whole nodes are exchanged, and all devices dealt, in clusters of so many nodes at most.
NODES = 16

#: Changes looked at in all, whether they may be or not.
LOOKED = 60_000

#: Groups move within pipelines of so many stages at most, and between pipelines in plans of so many groups.
MOVED, MOVED_BETWEEN = 8, 32

#: A stage by its pipeline and its position there.
Place = tuple[int, int]

#: The devices of some stages after a change.
Change = Mapping[Place, tuple[str, ...]]

#: What a plan's time and memory depend on of a device: its rate, its memory, its node and its island.
Kind = tuple[float, int, str, int]

#: The kinds of a pipeline's devices, stage by stage.
Looks = tuple[tuple[Kind, ...], ...]


def swapped(task: Task, plan: Plan, limit: float = math.inf) -> tuple[Pipeline, ...] | None:
    """The pipelines of a plan (of a single lane and one chunk each) on other devices, such that its step is
    faster; None where no change makes it so, or where it is known that none takes less than `limit` seconds."""
    if not _links_differ(task, plan):
        return None
    before = task.seconds(plan)
    swaps = _Swaps(task, plan)
    if swaps.floor >= min(before, limit) * (1 - EQUAL):
        return None
    swaps.run()
    if not swaps.changed:
        return None
    after = task.seconds(swaps.plan())
    return tuple(swaps.pipelines) if after < before * (1 - EQUAL) else None


def _links_differ(task: Task, plan: Plan) -> bool:
    """Whether it matters over which links the stages and the groups of a plan talk. Where it does not, the
    search has looked at all that does."""
    if len({task.cost.boundary(link) for link in task.cluster.links}) > 1:
        return True
    shares = {stage.shares for _, _, stage in plan.walk()}
    return any(
        len({task.cost.group((1.0,) * len(each), each, link) for link in task.cluster.links}) > 1
        for each in shares
    )


class _Swaps:
    """One plan whose devices change places."""

    def __init__(self, task: Task, plan: Plan) -> None:
        self.task, self._given = task, plan
        self.pipelines = list(plan.pipelines)
        self.changed = False
        memory = memory_by_device(plan, task.cost)
        self._need = {
            (p, s): tuple(memory[name] for name in stage.devices)
            for p, pipeline in enumerate(self.pipelines)
            for s, stage in enumerate(pipeline.stages)
        }
        self._spread = {place: len(set(map(node_of, self._devices(place)))) for place in self._need}
        named = {node.name: node for node in task.cluster.nodes}
        self._usable = {device.name: device for device in alive(task)}
        self._kinds: dict[str, Kind] = {
            name: (
                rate_of(task.rates, name),
                -device.memory,
                device.node,
                named[device.node].island_of(name),
            )
            for name, device in self._usable.items()
        }
        #: Fast devices first, then those with more memory.
        self._ranks = {name: (*kind[:2], by_name(name)) for name, kind in self._kinds.items()}
        self._known = KnownCosts()
        self._costed = self._looked = 0
        self._seconds = self._of(self.pipelines)
        self._cost = task.cost.under(plan)
        self._nodes_used = len(set(map(node_of, plan.members)))
        self._fewest, self._depth = smallest(plan)
        self._after_by: dict[Link, float] = {}
        self._spent_after = self._after({})

    def plan(self) -> Plan:
        """The plan on the devices that its pipelines have now."""
        return self._with(self.pipelines)

    def run(self) -> None:
        """Changes places until no change helps, or the limit is reached."""
        for _ in range(CHANGES):
            slowest = int(np.argmax(self._seconds))
            found = self._best(list(self._changes(slowest)), slowest)
            if found is None:
                return
            self._make(found)
            if self._costed >= COSTED or self._looked >= LOOKED:
                return

    @property
    def floor(self) -> float:
        """Seconds that no change can beat: all groups talk over the nearest links that there can be between
        groups of their sizes. Zero where devices differ in more than their places, since these exchange work
        too, or links inside a node do."""
        task, cluster = self.task, self.task.cluster
        special = any(node.island or node.inside or node.within for node in cluster.nodes)
        alike = len({kind[:2] for kind in self._kinds.values()}) == 1
        if special or not alike or max(self._spread.values()) > 1:
            return 0.0
        widest = max(len(node.devices) for node in cluster.nodes)
        between = (cluster.between, *(level.link for level in cluster.levels))
        apart = min(map(task.cost.boundary, between)) / 2
        near = min(apart, task.cost.boundary(cluster.inside) / 2)
        nearest = []
        for pipeline in self.pipelines:
            times = stage_times(pipeline, cluster, task.rates, task.cost, self._known)
            beside = [len(a.devices) + len(b.devices) <= widest for a, b in pairwise(pipeline.stages)]
            least = np.minimum(times.boundary, np.where(beside, near, apart))
            nearest.append((pipeline.micro_batches, replace(times, boundary=least)))
        members = sum(len(devices) for devices in map(self._devices, self._need))
        after = min(
            self._cost.after(len(self.pipelines), self._fewest, link, self._depth)
            for link in (cluster.links if members <= widest else between)
        )
        return max(self._ends(nearest)) + after

    def _with(self, pipelines: Sequence[Pipeline]) -> Plan:
        used = {name for pipeline in pipelines for stage in pipeline.stages for name in stage.devices}
        away = {*self._given.carriers, *used}
        idle = tuple(device.name for device in self.task.cluster.devices if device.name not in away)
        return self._given.with_pipelines(pipelines, idle=idle)

    # Costs.

    def _of(self, pipelines: Sequence[Pipeline], limit: float = math.inf) -> list[float]:
        """Seconds of each pipeline; inf of those that cannot end within `limit`."""
        task = self.task
        self._costed += len(pipelines)
        return self._ends(
            [
                (each.micro_batches, stage_times(each, task.cluster, task.rates, task.cost, self._known))
                for each in pipelines
            ],
            limit,
        )

    def _ends(self, pipelines: Sequence[tuple[int, Times]], limit: float = math.inf) -> list[float]:
        """The same of pipelines by their micro-batches and times. Those with as many stages and micro-batches
        are counted at once."""
        spent = [math.inf] * len(pipelines)
        alike: dict[tuple[int, int], list[tuple[int, Times]]] = {}
        for at, (micro_batches, times) in enumerate(pipelines):
            alike.setdefault((times.work.shape[-1], micro_batches), []).append((at, times))
        for (stages, micro_batches), listed in alike.items():
            rows = max(1, AT_ONCE // stages**2)
            for start in range(0, len(listed), rows):
                self._scheduled(listed[start : start + rows], micro_batches, limit, spent)
        return spent

    def _scheduled(
        self, listed: Sequence[tuple[int, Times]], micro_batches: int, limit: float, spent: list[float]
    ) -> None:
        """Fills in the seconds of some pipelines with as many stages, by their places."""
        together = Times(
            forward=np.stack([times.forward for _, times in listed]),
            backward=np.stack([times.backward for _, times in listed]),
            boundary=np.stack([times.boundary for _, times in listed]),
        )
        for (at, _), seconds in zip(
            listed, self.task.cost.timing.seconds(together, micro_batches, limit), strict=True
        ):
            spent[at] = float(seconds)

    def _after(self, change: Change) -> float:
        """Seconds after the slowest pipeline; inf where replicas would be on fewer nodes than they were."""
        members = {
            *self._given.carriers,
            *(name for place in self._need for name in change.get(place, self._devices(place))),
        }
        replicas, nodes = self._given.state.replicas or 0, self._nodes_used
        if len(set(map(node_of, members))) < min(replicas, nodes):
            return math.inf
        link = self.task.cluster.reach(sorted(members))
        if link not in self._after_by:
            self._after_by[link] = self._cost.after(len(self.pipelines), self._fewest, link, self._depth)
        return self._after_by[link]

    def _after_change(self, change: Change) -> list[Pipeline]:
        made = list(self.pipelines)
        for p in {p for p, _ in change}:
            made[p] = self._changed(p, change)
        return made

    def _changed(self, p: int, change: Change) -> Pipeline:
        """One pipeline after a change."""
        pipeline = self.pipelines[p]
        stages = tuple(
            msgspec.structs.replace(stage, devices=change[p, s]) if (p, s) in change else stage
            for s, stage in enumerate(pipeline.stages)
        )
        return msgspec.structs.replace(pipeline, stages=stages)

    def _best(self, listed: Sequence[Change], slowest: int) -> Change | None:
        """Of some changes the one after which the step takes least; of equal ones the one after which all
        pipelines together do. None where no change makes the step faster, nor the slowest pipeline with all
        others that it concerns."""
        pipelines: list[Pipeline] = []
        index: dict[tuple[int, Looks], int] = {}  # where a pipeline that looks so is among these
        parts = []
        for change in listed:
            touched = sorted({p for p, _ in change})
            looks = [(p, self._looks(p, change)) for p in touched]
            for key in looks:
                if key not in index:
                    index[key] = len(pipelines)
                    pipelines.append(self._changed(key[0], change))
            parts.append([(key[0], index[key]) for key in looks])
        limit, best, chosen = self._seconds[slowest] * (1 - EQUAL), None, None
        step = self._seconds[slowest] + self._spent_after
        seconds = self._of(pipelines, step)
        ranked = sorted(range(len(self._seconds)), key=lambda p: -self._seconds[p])
        for change, part in zip(listed, parts, strict=True):
            now = [seconds[at] for _, at in part]
            after = self._after(change) if self._brings(change) else self._spent_after
            concerned = {p for p, _ in part}
            longest = max(next((self._seconds[p] for p in ranked if p not in concerned), 0.0), *now)
            relieved = slowest in concerned and max(now) < limit and after <= self._spent_after
            if not relieved and longest + after >= step * (1 - EQUAL):
                continue
            value = longest + after, sum(now) - sum(self._seconds[p] for p in concerned)
            if best is None or _less(value, best):
                best, chosen = value, change
        return chosen

    def _looks(self, p: int, change: Change) -> Looks:
        """The devices of one pipeline after a change, by kind: its seconds depend on no more of them."""
        kind = self._kinds.__getitem__
        return tuple(
            [
                tuple(map(kind, change.get((p, s), stage.devices)))
                for s, stage in enumerate(self.pipelines[p].stages)
            ]
        )

    def _brings(self, change: Change) -> bool:
        """Whether a change takes idle devices."""
        before = {name for place in change for name in self._devices(place)}
        return any(name not in before for devices in change.values() for name in devices)

    def _make(self, change: Change) -> None:
        concerned = sorted({p for p, _ in change})
        self.pipelines = self._after_change(change)
        for p, seconds in zip(concerned, self._of([self.pipelines[p] for p in concerned]), strict=True):
            self._seconds[p] = seconds
        self._spent_after = self._after({})
        self.changed = True

    # Changes.

    def _changes(self, p: int) -> Iterator[Change]:
        """What may change of a pipeline, each that looks the same once."""
        idle, others = self._idle(), self._unlike(p)
        for s in range(len(self.pipelines[p].stages)):
            here = (p, s)
            for later in range(s + 1, len(self.pipelines[p].stages)):
                yield from self._exchanged(here, (p, later))
            for q in others:
                for t in range(len(self.pipelines[q].stages)):
                    yield from self._exchanged(here, (q, t))
            yield from self._replaced(here, idle)
        yield from self._moved(p, idle, others)
        if len(self.task.cluster.nodes) <= NODES:
            yield from self._nodes(p)
            yield from self._emptied()
            yield from self._gathered()
            yield from self._by_name()

    def _unlike(self, p: int) -> list[int]:
        """The other pipelines, of those that look the same beside this one the first."""
        mine, seen = self.pipelines[p], dict[tuple[Signature, int, int], int]()
        for q, other in enumerate(self.pipelines):
            if q != p:
                key = pipeline_signature(self.task, (*mine.stages, *other.stages))
                seen.setdefault((key, len(other.stages), other.micro_batches), q)
        return list(seen.values())

    def _exchanged(self, here: Place, there: Place) -> Iterator[Change]:
        """Two stages that exchange their devices, or one device each."""
        mine, theirs = self._devices(here), self._devices(there)
        if len(mine) == len(theirs):
            yield from self._change({here: theirs, there: mine})
        narrow = min(len(mine), len(theirs)) == 1
        if len(mine) == len(theirs) == 1 or not (narrow or self._share_a_node(here, there)):
            return
        for x in self._distinct(mine):
            for y in self._distinct(theirs):
                if self._kinds[x] != self._kinds[y]:
                    yield from self._change({here: _put(mine, x, y), there: _put(theirs, y, x)})

    def _share_a_node(self, here: Place, there: Place) -> bool:
        return not {*map(node_of, self._devices(here))}.isdisjoint(map(node_of, self._devices(there)))

    def _replaced(self, here: Place, idle: Sequence[str]) -> Iterator[Change]:
        """A stage with idle devices: one of them, or those of one node, the fastest."""
        mine = self._devices(here)
        for y in self._distinct(idle):
            for x in self._distinct(mine):
                if self._kinds[x] != self._kinds[y]:
                    yield from self._change({here: _put(mine, x, y)})
        for group in self._idle_groups(idle, len(mine)) if len(mine) > 1 else ():
            yield from self._change({here: group})

    def _idle_groups(self, idle: Sequence[str], width: int) -> list[tuple[str, ...]]:
        """The fastest idle devices of each node and of each island, where there are so many."""
        held: dict[tuple[object, ...], list[str]] = {}
        for name in idle:
            *_, node, island = self._kinds[name]
            held.setdefault((node,), []).append(name)
            held.setdefault((node, island), []).append(name)
        found = (
            tuple(sorted(names, key=self._ranks.__getitem__)[:width])
            for names in held.values()
            if len(names) >= width
        )
        return list(dict.fromkeys(found))

    def _moved(self, p: int, idle: Sequence[str], others: Sequence[int]) -> Iterator[Change]:
        """A group of a short pipeline moves to another place in it, and those between move up; or one from
        elsewhere comes in there, and the one at the other end leaves for where it came from."""
        stages = self.pipelines[p].stages
        if len(stages) > MOVED:
            return
        for width in dict.fromkeys(len(stage.devices) for stage in stages):
            own = [(p, s) for s, stage in enumerate(stages) if len(stage.devices) == width]
            came: list[tuple[Place | None, tuple[str, ...]]] = [
                (None, group) for group in self._idle_groups(idle, width)
            ]
            for q in others if len(self._need) <= MOVED_BETWEEN else ():
                places = [(q, t) for t in range(len(self.pipelines[q].stages))]
                came += [
                    (there, self._devices(there)) for there in places if len(self._devices(there)) == width
                ]
            for i, j in permutations(range(len(own)), 2):
                step = 1 if i < j else -1
                shifted = {own[k + step]: self._devices(own[k]) for k in range(i, j, step)}
                left = self._devices(own[j])
                yield from self._change({**shifted, own[i]: left})
                for there, group in came:
                    back = {there: left} if there is not None else {}
                    yield from self._change({**shifted, own[i]: group, **back})

    def _nodes(self, p: int) -> Iterator[Change]:
        """All that a node of this pipeline holds, and what another node holds, exchanged: devices in the order
        of their names, and the fastest first."""
        used = {name for place in self._need for name in self._devices(place)}
        for ranked in (by_name, self._ranks.__getitem__):
            held: dict[str, list[str]] = {}
            for name in sorted({*self._idle(), *used}, key=ranked):
                held.setdefault(node_of(name), []).append(name)
            yield from self._node_pairs(p, held, used)

    def _node_pairs(self, p: int, held: Mapping[str, Sequence[str]], used: Collection[str]) -> Iterator[Change]:
        own = {node_of(name) for stage in self.pipelines[p].stages for name in stage.devices}
        for a, b in combinations(held, 2):
            if a not in own and b not in own:
                continue
            names: dict[str, str] = {}
            for one, two in ((held[a], held[b]), (held[b], held[a])):
                names |= dict(zip((name for name in one if name in used), two, strict=False))
            moving = [name for name in (*held[a], *held[b]) if name in used]
            if len(names) < len(moving):
                continue
            change = {
                place: tuple(names.get(name, name) for name in self._devices(place))
                for place in self._need
                if any(name in names for name in self._devices(place))
            }
            yield from self._change(change)

    def _emptied(self) -> Iterator[Change]:
        """All that a node holds, on idle devices of another, the fastest first."""
        used: dict[str, list[Place]] = {}
        for place in self._need:
            for node in dict.fromkeys(map(node_of, self._devices(place))):
                used.setdefault(node, []).append(place)
        free: dict[str, list[str]] = {}
        for name in sorted(self._idle(), key=self._ranks.__getitem__):
            free.setdefault(node_of(name), []).append(name)
        for (a, places), (b, idle) in product(used.items(), free.items()):
            leaving = [name for place in places for name in self._devices(place) if node_of(name) == a]
            if a != b and len(leaving) <= len(idle):
                names = dict(zip(sorted(leaving, key=self._ranks.__getitem__), idle, strict=False))
                yield from self._change(
                    {place: tuple(names.get(name, name) for name in self._devices(place)) for place in places}
                )

    def _gathered(self) -> Iterator[Change]:
        """All groups in one node, or in nodes that a level joins, on idle devices there, wide groups first."""
        idle = sorted(self._idle(), key=self._ranks.__getitem__)
        joined = [group for level in self.task.cluster.levels for group in level.groups]
        for nodes in [*([node.name] for node in self.task.cluster.nodes), *joined]:
            free = {node: [name for name in idle if node_of(name) == node] for node in nodes}
            away = [place for place in self._need if not set(map(node_of, self._devices(place))) <= free.keys()]
            change = {}
            for place in sorted(away, key=lambda place: -len(self._devices(place))):
                width = len(self._devices(place))
                node = max(nodes, key=lambda node: len(free[node]))
                if len(free[node]) < width:
                    break
                change[place], free[node] = tuple(free[node][:width]), free[node][width:]
            if change and len(change) == len(away):
                yield from self._change(change)

    def _by_name(self) -> Iterator[Change]:
        """All devices in their order, and with nodes that a level joins next to each other: dealt stage by
        stage of all pipelines, and pipeline by pipeline."""
        used = {name for place in self._need for name in self._devices(place)}
        for nodes in dict.fromkeys((self.task.cluster.nodes, self.task.cluster.joined)):
            names = [name for node in nodes for name in sorted((d.name for d in node.devices), key=by_name)]
            for places in (sorted(self._need, key=lambda place: place[::-1]), sorted(self._need)):
                rest = (name for name in names if name in used)
                yield from self._change(
                    {place: tuple(islice(rest, len(self._devices(place)))) for place in places}
                )

    def _change(self, change: Change) -> Iterator[Change]:
        """The change with each stage's largest shares on its fastest devices, if it may be."""
        self._looked += 1
        made = {}
        for place, devices in change.items():
            p, s = place
            shares, need = self.pipelines[p].stages[s].shares, self._need[place]
            nodes = {self._kinds[name][2] for name in devices}
            if len(nodes) > self._spread[place] or not self.task.may_have(len(devices), nodes):
                return
            seated = sorted(devices, key=self._ranks.__getitem__)
            if shares.count(shares[0]) < len(shares):
                seats = sorted(range(len(shares)), key=lambda i: -shares[i])
                seated = [name for _, name in sorted(zip(seats, seated, strict=True))]
            made[place] = tuple(seated)
            if any(self._kinds[name][1] > -size for name, size in zip(seated, need, strict=True)):
                return
        yield made

    def _idle(self) -> list[str]:
        used = {name for place in self._need for name in self._devices(place)}
        used.update(self._given.carriers)
        return [name for name in self._usable if name not in used]

    def _devices(self, place: Place) -> tuple[str, ...]:
        p, s = place
        return self.pipelines[p].stages[s].devices

    def _distinct(self, names: Iterable[str]) -> list[str]:
        """A device of each kind."""
        found: dict[Kind, str] = {}
        for name in names:
            found.setdefault(self._kinds[name], name)
        return list(found.values())


def _put(devices: Sequence[str], old: str, new: str) -> tuple[str, ...]:
    return tuple(new if name == old else name for name in devices)


def _less(one: tuple[float, float], two: tuple[float, float]) -> bool:
    """Whether one value is below another by more than rounding."""
    if abs(one[0] - two[0]) > EQUAL * abs(two[0]):
        return one[0] < two[0]
    return one[1] < two[1] - EQUAL * abs(two[0])
