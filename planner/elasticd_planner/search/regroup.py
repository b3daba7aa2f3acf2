"""Regrouping: a found plan improved by changing its TP groups, one change after the other.

The search looks at a part of the ways to divide nodes into groups, ranked by a bound. Where devices are unlike,
hundreds of these are nearly equal by the bound and differ in fact. Here one change is made to the plan that was
found, as long as one makes its step faster:

- an idle device joins a group of its node, or is a group of its own;
- two groups of a node become one, in one pipeline or of two;
- a group becomes two, or gives one device to another group of its node;
- a group goes to another pipeline, or leaves the plan, or its slowest member does.

Changes are ranked by the formula. The first are costed with the best layers and micro-batches for the orders of
stages that there are, and the quickest few with the best orders too (`refine`). Deterministic, and bounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations

from elasticd_planner.numeric import EQUAL
from elasticd_planner.search.refine import Refiner
from elasticd_planner.search.task import Chained, DeviceGroup, NamedGroup, Task, alive, pipeline_signature
from elasticd_planner.spec.cluster import node_of
from elasticd_planner.spec.plan import Pipeline

#: Changes made at most, so that a search ends; drawn jobs of 10 to 16 devices needed up to three.
CHANGES = 12

#: Plans of so many groups at most are changed: a change is costed with all groups.
GROUPS = 32

#: So many changes, the quickest by the formula, are costed by the schedule, and so many of these with the best
#: orders of stages.
COSTED, ORDERED = 24, 3

#: The groups of each pipeline in the order of stages.
Groups = tuple[tuple[NamedGroup, ...], ...]

#: Seconds of a step with these pipelines; inf where these do not fit.
StepSeconds = Callable[[Sequence[Pipeline]], float]


def regrouped(
    task: Task, refiner: Refiner, pipelines: Sequence[Pipeline], step_seconds: StepSeconds
) -> tuple[Pipeline, ...] | None:
    """The pipelines of a plan (of a single lane and one chunk each) in other TP groups, such that its step is
    faster; None where no change makes it so."""
    if sum(len(pipeline.stages) for pipeline in pipelines) > GROUPS:
        return None
    regrouping = _Regrouping(task, refiner, step_seconds)
    best, seconds = tuple(pipelines), step_seconds(pipelines)
    for _ in range(CHANGES):
        found = regrouping.best(best, seconds * (1 - EQUAL))
        if found is None:
            break
        best, seconds = found, step_seconds(found)
    return best if best != tuple(pipelines) else None


class _Regrouping:
    """The changes of one task's plans."""

    def __init__(self, task: Task, refiner: Refiner, step_seconds: StepSeconds) -> None:
        self.task, self.refiner, self._step_seconds = task, refiner, step_seconds
        self._usable = [device.name for device in alive(task)]
        widest = max(len(node.devices) for node in task.cluster.nodes)
        self._widths = frozenset(task.cost.widths(widest))

    def best(self, pipelines: Sequence[Pipeline], limit: float) -> tuple[Pipeline, ...] | None:
        """The pipelines after the change that makes the step fastest; None where none is below the limit."""
        counts = [pipeline.micro_batches for pipeline in pipelines]
        listed = [
            [Chained(groups=g, micro_batches=m) for g, m in zip(groups, counts, strict=True)]
            for groups in self._distinct(pipelines)
        ]
        by_formula = sorted((self.refiner.formula_seconds(chains), at) for at, chains in enumerate(listed))
        ranked = sorted(
            (self._seconds(self.refiner.pipelines(listed[at], keep=True)), at) for _, at in by_formula[:COSTED]
        )
        best: tuple[Pipeline, ...] | None = None
        for seconds, at in ranked[:ORDERED]:
            for keep in (False, True) if math.isfinite(seconds) else ():
                changed = self.refiner.pipelines(listed[at], keep=keep)
                now = self._seconds(changed)
                if now < limit:
                    best, limit = changed, now
        return best

    def _seconds(self, pipelines: Sequence[Pipeline] | None) -> float:
        return self._step_seconds(pipelines) if pipelines is not None else math.inf

    def _distinct(self, pipelines: Sequence[Pipeline]) -> Iterator[Groups]:
        """Changes of these pipelines' groups, each that looks the same once."""
        now: Groups = tuple(
            tuple(DeviceGroup(devices=stage.devices, shares=stage.shares) for stage in pipeline.stages)
            for pipeline in pipelines
        )
        seen = set()
        for groups in self._changes(now):
            changed = tuple(p for p, pair in enumerate(zip(groups, now, strict=True)) if pair[0] != pair[1])
            looks = tuple(pipeline_signature(self.task, [*groups[p], *now[p]]) for p in changed)
            key = looks, tuple((len(groups[p]), pipelines[p].micro_batches) for p in changed)
            if key not in seen:
                seen.add(key)
                yield groups

    def _changes(self, now: Groups) -> Iterator[Groups]:
        used = {name for groups in now for group in groups for name in group.devices}
        idle = [name for name in self._usable if name not in used]
        places = [(p, s) for p, groups in enumerate(now) for s in range(len(groups))]
        for p, s in places:
            yield from self._divided(now, (p, s))
            yield from self._left(now, (p, s))
            yield from self._joined(now, (p, s), idle)
        for here, there in permutations(places, 2):
            if self._one_node(now, here, there):
                yield from self._given(now, here, there)
                if here < there:
                    yield from self._merged(now, here, there)
        yield from self._moved(now)
        for name in idle:
            yield from self._added(now, name)

    # Changes, each as all groups after it.

    def _divided(self, now: Groups, here: tuple[int, int]) -> Iterator[Groups]:
        """A group becomes two, the fastest devices in one of them."""
        devices = self.task.ranked(now[here[0]][here[1]].devices)
        for width in range(1, len(devices)):
            yield from self._with(now, {here: (devices[:width], devices[width:])})

    def _left(self, now: Groups, here: tuple[int, int]) -> Iterator[Groups]:
        """A group leaves the plan, or its slowest member does."""
        devices = self.task.ranked(now[here[0]][here[1]].devices)
        yield from self._with(now, {here: ()})
        if len(devices) > 1:
            yield from self._with(now, {here: (devices[:-1],)})

    def _joined(self, now: Groups, here: tuple[int, int], idle: Sequence[str]) -> Iterator[Groups]:
        """An idle device joins a group of its node."""
        devices = now[here[0]][here[1]].devices
        for name in idle:
            if {node_of(name)} == set(map(node_of, devices)):
                yield from self._with(now, {here: ((*devices, name),)})

    def _given(self, now: Groups, here: tuple[int, int], there: tuple[int, int]) -> Iterator[Groups]:
        """A group gives its fastest or its slowest device to another."""
        devices, others = self.task.ranked(now[here[0]][here[1]].devices), now[there[0]][there[1]].devices
        if len(devices) > 1:
            for name in dict.fromkeys((devices[0], devices[-1])):
                rest = tuple(other for other in devices if other != name)
                yield from self._with(now, {here: (rest,), there: ((*others, name),)})

    def _merged(self, now: Groups, here: tuple[int, int], there: tuple[int, int]) -> Iterator[Groups]:
        """Two groups become one, in the place of either."""
        both = (*now[here[0]][here[1]].devices, *now[there[0]][there[1]].devices)
        yield from self._with(now, {here: (both,), there: ()})
        if here[0] != there[0]:
            yield from self._with(now, {here: (), there: (both,)})

    def _moved(self, now: Groups) -> Iterator[Groups]:
        """A group goes to another pipeline, next to a group of its node if there is one."""
        for p, q in permutations(range(len(now)), 2):
            for s, group in enumerate(now[p]):
                at = self._beside(now[q], group.devices[0])
                neighbour = now[q][at].devices
                yield from self._with(now, {(p, s): (), (q, at): (group.devices, neighbour)})

    def _added(self, now: Groups, name: str) -> Iterator[Groups]:
        """An idle device is a group of its own, next to a group of its node if there is one."""
        for p, groups in enumerate(now):
            at = self._beside(groups, name)
            yield from self._with(now, {(p, at): ((name,), groups[at].devices)})

    def _beside(self, groups: Sequence[NamedGroup], name: str) -> int:
        near = (s for s, group in enumerate(groups) if node_of(group.devices[0]) == node_of(name))
        return next(near, 0)

    def _one_node(self, now: Groups, here: tuple[int, int], there: tuple[int, int]) -> bool:
        names = (*now[here[0]][here[1]].devices, *now[there[0]][there[1]].devices)
        return len(set(map(node_of, names))) == 1

    def _with(
        self, now: Groups, change: dict[tuple[int, int], tuple[tuple[str, ...], ...]]
    ) -> Iterator[Groups]:
        """The groups with others in some places, if these may be."""
        for groups in change.values():
            for devices in groups:
                width = len(devices)
                if width not in self._widths or not self.task.may_have(width, map(node_of, devices)):
                    return
        changed = []
        for p, before in enumerate(now):
            after: list[NamedGroup] = []
            for s, group in enumerate(before):
                if (p, s) in change:
                    after += [self._group(devices, group) for devices in change[p, s]]
                else:
                    after.append(group)
            if not 1 <= len(after) <= self.task.layers:
                return
            changed.append(tuple(after))
        yield tuple(changed)

    def _group(self, devices: Sequence[str], before: NamedGroup) -> NamedGroup:
        """The devices with the shares that are quickest; the group as it was where it has the same devices."""
        if set(devices) == set(before.devices):
            return before
        return self.refiner.quickest(self.task.ranked(devices))
