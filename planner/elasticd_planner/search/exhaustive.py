"""Exact enumeration for small clusters: every way to form TP groups, stages and pipelines, idle devices too.

1. Shapes: every sequence of TP groups is one pipeline; its curve (seconds by micro-batches, layers exact)
   is computed once for each distinct multiset of stage terms. Devices count by class, never by name.
2. Combinations: every multiset of disjoint pipelines, micro-batches exact.
Both are pruned by the best plan so far, and by what the devices left over could do in its time at best.

Where the time is the schedule's own (`timing`), curves are what a shape takes at least; what it reaches is
known for the formula's layers. Combinations that remain are costed exactly, best first, until the least that
one may take is more than the best plan does.

What an order of stages takes at least (`Least`): layers count as divisible. With S the least way there and back
and x = T - S, the inequality of `pipeline_time` says that stage j works on a micro-batch for at most
x / (m - 1 - h_j forward_j). What all stages may have must be all layers, which gives the least x. A stage that
hides more of the others' time may have more, so orders differ.

`place` gives the places of the best plans to devices, so that the fewest bytes move.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from elasticd_planner.cost.memory import most_layers
from elasticd_planner.cost.model import CostModel
from elasticd_planner.cost.model_profile import ModelProfile
from elasticd_planner.cost.pipeline_time import Timing
from elasticd_planner.cost.profile_cost import to_units
from elasticd_planner.grouping.tp_groups import (
    Alike,
    Counts,
    Group,
    at_best,
    by_name,
    classes,
    groups,
    hop,
    span,
)
from elasticd_planner.numeric import EQUAL, Floats, Ints
from elasticd_planner.placement.state_movement import Held, assign, estimate, holders
from elasticd_planner.search.balance.layer_split import Terms, best_layers, curve, reached, split_layers
from elasticd_planner.search.balance.micro_batch_split import capacity, split_micro_batches
from elasticd_planner.search.task import CURVE, Task
from elasticd_planner.spec.cluster import Cluster
from elasticd_planner.spec.plan import Pipeline, Plan

#: Sequences kept of one curve on one set of devices: they differ in the order of stages alone, and cost the
#: same by the formula.
ALIKE = 720


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A pipeline by classes of devices: its groups in order, and its seconds by micro-batches (where these
    are the schedule's: at least)."""

    groups: tuple[Group, ...]
    terms: tuple[Terms, ...]
    seconds: Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A shape with its best layers for some micro-batches, and the seconds of that."""

    shape: Shape
    layers: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    """Disjoint sets of devices, one for each pipeline, their micro-batches, and the seconds of a step."""

    parts: tuple[Counts, ...]
    micro_batches: tuple[int, ...]
    seconds: float
    #: Seconds of the step after its slowest pipeline.
    after: float


class Options:
    """The best layers of shapes under `timing`, each made once; where that hides nothing, the formula's."""

    def __init__(self, *, layers: int, timing: Timing) -> None:
        self.layers, self.timing = layers, timing
        self.proved = True  # no layers of a shape are quicker than those that it was given
        self._known: dict[tuple[Counts, int], tuple[int, list[Option]]] = {}

    def __call__(self, shapes: Sequence[Shape], part: Counts, micro_batches: int, limit: float) -> list[Option]:
        """The `shapes`, all on the devices `part`, that do so many micro-batches within `limit` seconds, with
        their layers, best first. Of one part shapes may be added; its limit must not rise."""
        at = micro_batches - 1
        if not self.timing.hidden:
            many = self.timing.counted(micro_batches)
            found = [
                Option(shape=s, layers=split_layers(s.terms, self.layers, many), seconds=float(s.seconds[at]))
                for s in shapes
                if s.seconds[at] <= limit
            ]
            return sorted(found, key=lambda option: option.seconds)
        seen, options = self._known.get((part, micro_batches), (0, []))
        by_depth: dict[int, list[Shape]] = {}
        for shape in shapes[seen:]:
            if shape.seconds[at] <= limit:
                by_depth.setdefault(len(shape.terms), []).append(shape)
        for alike in by_depth.values():
            terms = [shape.terms for shape in alike]
            best = best_layers(terms, self.layers, micro_batches, limit, self.timing)
            self.proved &= all(one is None or one.proved for one in best)
            options += [
                Option(shape=shape, layers=one.layers, seconds=one.seconds)
                for shape, one in zip(alike, best, strict=True)
                if one is not None
            ]
        options = sorted((one for one in options if one.seconds <= limit), key=lambda option: option.seconds)
        self._known[part, micro_batches] = (len(shapes), options)
        return options


def slowest(curves: Sequence[Floats], given: Sequence[int]) -> float:
    """Seconds of the slowest of some pipelines, each with its micro-batches."""
    return max(float(seconds[m - 1]) for seconds, m in zip(curves, given, strict=True))


class Least:
    """What groups cost, as arrays by their index, for so many layers; `hop`: boundaries between places (islands
    of nodes), there and back. `hidden`: the part of a pass that the schedule hides."""

    def __init__(
        self, groups: Sequence[Group], cluster: Cluster, cost: CostModel, layers: int, hidden: float
    ) -> None:
        places: dict[tuple[str, int | None], Group] = {}
        for group in groups:
            places.setdefault((group.node, group.island), group)
        number = {place: i for i, place in enumerate(places)}
        hops = [[cost.boundary(hop(a, b, cluster)) for b in places.values()] for a in places.values()]
        self.block = np.array([group.cost.block for group in groups])
        self.embed = np.array([group.cost.embed for group in groups])
        self.head = np.array([group.cost.head for group in groups])
        self.place = np.array([number[group.node, group.island] for group in groups], dtype=np.int64)
        self.hop, self.layers, self.hidden = np.array(hops), layers, hidden

    def seconds(self, listed: Ints, most: int) -> Floats:
        """Seconds that orders of groups, [order, stage], need at least for 1 ... `most` micro-batches:
        [order, micro-batches]."""
        block = self.block[listed]
        fixed = np.zeros(block.shape)
        fixed[:, 0] += self.embed[listed[:, 0]]
        fixed[:, -1] += self.head[listed[:, -1]]
        places = self.place[listed]
        hops = self.hop[places[:, :-1], places[:, 1:]].sum(axis=1)
        through = block.sum(axis=1) + fixed.sum(axis=1) + hops
        through += (self.layers - listed.shape[1]) * block.min(axis=1)
        count = np.arange(most)[:, None]
        again = count - self.hidden * np.minimum(count, np.arange(listed.shape[1] - 1, -1, -1))
        pace = np.divide(1.0, again, out=np.full(again.shape, np.inf), where=again > 0)
        least = (self.layers + (fixed / block).sum(axis=1))[:, None] / ((1 / block) @ pace.T)
        longest = ((block + fixed)[:, None, :] * again).max(axis=2)
        found: Floats = through[:, None] + np.maximum(least, longest)
        return found


def orders(chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The distinct permutations of a sorted tuple, in ascending order."""
    if len(chosen) < 2:
        yield chosen
        return
    for index, item in enumerate(chosen):
        if index and item == chosen[index - 1]:
            continue
        for rest in orders(chosen[:index] + chosen[index + 1 :]):
            yield (item, *rest)


class ExhaustiveSearch:
    """One enumeration. `slack`: how much worse than the best (as a fraction) a plan may be and still count;
    `best`: seconds of a plan already known, inf for none. `budget`: shapes and combinations looked at before
    it ends without having looked at all (`complete` says so), a curve made counting as CURVE of them; `spent`
    of it so far. `relaxed`: for a bound, of a task with equal shares: groups take the time of the quickest
    shares (`at_best`), and each member has the memory of the roomiest."""

    def __init__(
        self,
        task: Task,
        *,
        slack: float = 0.0,
        best: float = math.inf,
        budget: float = math.inf,
        relaxed: bool = False,
    ) -> None:
        self.budget, self.complete, self._relaxed = budget, True, relaxed
        cluster, cost, layers, micro_batches = task.cluster, task.cost, task.layers, task.micro_batches
        self.task, self.cluster, self.cost, self.layers = task, cluster, cost, layers
        self.micro_batches = micro_batches
        self.slack, self.best, self.candidates, self._made = slack, best, 0, 0
        self.alike = classes(cluster, task.rates)
        devices: Counts = tuple(len(a.devices) for a in self.alike)
        # Where a pipeline has as many micro-batches as stages at least, these are a resource like devices:
        # each pipeline takes its depth of them.
        self.full: Counts = (*devices, micro_batches) if self.task.deep else devices
        listed = groups(self.alike, cluster, cost)
        allowed = (group for group in listed if task.may_have(group.width, [group.node]))
        self.groups = tuple(at_best(group, self.alike) if relaxed else group for group in allowed)
        self.shapes: dict[Counts, list[Shape]] = {}
        self.curves: dict[Counts, Floats] = {}
        self.above: dict[Counts, Floats] = {}
        self._count = np.arange(1, micro_batches + 1)
        self._by_terms: dict[tuple[int, ...], Floats] = {}
        self._by_formula: dict[tuple[int, ...], Floats] = {}
        self._formula: dict[Counts, Floats] = {}
        self._kept: Counter[tuple[Counts, tuple[int, ...]]] = Counter()
        self._terms: dict[tuple[int, float, int, int], tuple[int, Terms]] = {}
        self._ids: dict[Terms, int] = {}
        self._spare: dict[tuple[Counts, float], int] = {}
        #: What the schedule hides; the formula and the steady state hide nothing.
        self.timing, self.hidden = cost.timing, cost.timing.hidden
        self._least_of = Least(self.groups, cluster, cost, layers, self.hidden)
        self._options = Options(layers=layers, timing=self.timing)
        self._least_hop = min(cost.boundary(link) for link in cluster.links)
        count = max(1, sum(devices))
        numbers = range(1, count + 1) if self.task.fixed_dp is None else (self.task.fixed_dp,)
        self._least_after = min(
            cost.after(d, max(1, count // d), link) for d in numbers for link in cluster.links
        )

    def run(self) -> list[Combination]:
        """All combinations within the slack of the best, best first; empty where nothing fits. Shallow
        pipelines first: they are few, and give the best plan against which the deep ones are pruned."""
        depth = min(sum(self._devices(self.full)), self.layers)
        if self.task.deep:
            depth = min(depth, self.micro_batches)
        found: list[Combination] = []
        for stages in range(1, depth + 1):
            for chosen in self._multisets(stages, 0, self._devices(self.full)):
                if self._ended():
                    break
                self._add(chosen)
            if stages in (1, 2, depth):
                parts = sorted(self.curves, key=lambda counts: (-sum(counts), counts))
                more = list(self._combine(parts, 0, (), self.full))
                if self.hidden:
                    more = self._costed(more)
                found = more if self.complete else [*found, *more]
        limit = self.best * (1 + self.slack) * (1 + EQUAL)
        kept = [combination for combination in found if combination.seconds <= limit]
        return sorted(kept, key=lambda c: (round(c.seconds, 12), len(c.parts), c.parts))

    def _devices(self, counts: Counts) -> Counts:
        return counts[: len(self.alike)]

    # Shapes.

    def _multisets(self, stages: int, first: int, left: Counts) -> Iterator[tuple[int, ...]]:
        """Indices of `stages` groups, not descending, that `left` devices suffice for."""
        if stages == 0:
            yield ()
            return
        for index in range(first, len(self.groups)):
            group = self.groups[index]
            if group.width * stages > sum(left):
                return  # groups come narrow ones first
            if all(a <= b for a, b in zip(group.counts, left, strict=True)):
                rest = tuple(b - a for a, b in zip(group.counts, left, strict=True))
                for others in self._multisets(stages - 1, index, rest):
                    yield (index, *others)

    def _add(self, chosen: tuple[int, ...]) -> None:
        """Adds the shapes of all orders of these groups, unless no order can be of use."""
        used = [self.groups[index] for index in chosen]
        counts = tuple(map(sum, zip(*(group.counts for group in used), strict=True)))
        if self.task.deep:
            counts = (*counts, len(used))
        least = self._least(used)
        if not self._useful(counts, least):
            return
        for order in self._possible(chosen, counts):
            items = [self._term(order, position) for position in range(len(order))]
            key = tuple(sorted(index for index, _ in items))
            terms = tuple(term for _, term in items)
            if key not in self._by_terms:
                self._by_terms[key] = self._curve(terms)
            seconds = self._by_terms[key]
            if self._kept[counts, key] >= ALIKE or not self._useful(counts, seconds):
                continue
            self._kept[counts, key] += 1
            shape = Shape(groups=tuple(self.groups[i] for i in order), terms=terms, seconds=seconds)
            self.shapes.setdefault(counts, []).append(shape)
            self.curves[counts] = np.minimum(self.curves.get(counts, np.inf), seconds)
            self._reach(counts, key, terms, seconds)

    def _reach(self, counts: Counts, key: tuple[int, ...], terms: Sequence[Terms], seconds: Floats) -> None:
        """Notes what a shape reaches. In the schedule's time that is not looked at again where the formula says
        no better of it than of one before."""
        if self.hidden:
            if key not in self._by_formula:
                self._by_formula[key] = curve(terms, self.layers, self.micro_batches)
            formula, known = self._by_formula[key], self._formula.get(counts, np.full(1, np.inf))
            if not (formula < known * (1 - EQUAL)).any():
                return
            self._formula[counts] = np.minimum(known, formula)
            seconds = reached(terms, self.layers, self.micro_batches, self.timing)
        self.above[counts] = np.minimum(self.above.get(counts, np.inf), seconds)
        if self.task.fixed_dp in (None, 1):
            self.best = min(self.best, float(seconds[-1]) + self._after((counts,)))

    def _possible(self, chosen: tuple[int, ...], counts: Counts) -> Iterator[tuple[int, ...]]:
        """The orders of these groups that may be of use."""
        listed = list(orders(chosen))
        self.candidates += len(listed)
        if not self.hidden or len(listed) == 1:
            yield from listed
            return
        bar, least = self._bar(counts)
        seconds = self._least_of.seconds(np.array(listed), self.micro_batches)
        possible = np.flatnonzero((seconds <= bar)[:, least - 1 :].any(axis=1))
        yield from (listed[index] for index in possible.tolist())

    def _curve(self, terms: Sequence[Terms]) -> Floats:
        """Seconds by micro-batches, at least; fewer than a pipeline must take cost as much as those."""
        self._made += len(terms)  # one for each number of micro-batches under way
        seconds = curve(terms, self.layers, self.micro_batches, self.timing)
        if self.task.deep:
            seconds[: len(terms) - 1] = seconds[len(terms) - 1]
        return seconds

    def _least(self, used: Sequence[Group]) -> Floats:
        """Seconds that no order and no assignment of layers beats: the slowest stage takes at least all
        layers over all speed, and at least its own one layer."""
        blocks = [group.cost.block for group in used]
        slowest = max(self.layers / sum(1 / block for block in blocks), *blocks, 0.0)
        through = sum(blocks) + (self.layers - len(blocks)) * min(blocks)
        edges = min(group.cost.embed for group in used) + min(group.cost.head for group in used)
        hops = (len(used) - 1) * self._least_hop
        again = (self._count - 1) - self.hidden * np.minimum(self._count - 1, len(used) - 1)
        first = self.timing.first(slowest, through + edges + hops)
        return np.asarray(again * slowest + first, dtype=np.float64)

    def _useful(self, counts: Counts, seconds: Floats) -> bool:
        """Whether a pipeline on these devices with (at best) these seconds can be part of a plan within the
        slack."""
        bar, least = self._bar(counts)
        return bool((seconds <= bar)[least - 1 :].any())

    def _bar(self, counts: Counts) -> tuple[Floats, int]:
        """Seconds by micro-batches that a pipeline on these devices must not exceed, not to lose to a known
        one, and the least micro-batches that it must do: the other devices do the rest at best."""
        others = tuple(b - a for a, b in zip(counts, self.full, strict=True))
        least = max(1, self.micro_batches - self._capacity(others))
        bar = np.full(self.micro_batches, self._limit())
        known = self.above.get(counts)
        if known is not None:
            bar = np.minimum(bar, known * (1 + self.slack))
        return bar * (1 + EQUAL), least

    def _term(self, order: tuple[int, ...], position: int) -> tuple[int, Terms]:
        """The terms of a stage, with a number that equal terms share."""
        group, last = self.groups[order[position]], position == len(order) - 1
        after = None if last else self.groups[order[position + 1]]
        between = self.cost.boundary(hop(group, after, self.cluster)) if after is not None else 0.0
        key = (order[position], between, position, len(order))
        if key not in self._terms:
            memory = [self.alike[index].memory for index, _ in group.members]
            if self._relaxed:
                memory = [max(memory)] * len(memory)
            edges = {"first": position == 0, "last": last}
            held = [
                most_layers(self.cost, group.shares, memory, self.layers, **edges, in_flight=count + 1)
                for count in range(len(order) - position)
            ]
            most = tuple(held + held[-1:] * position)
            terms = Terms.of(group.cost, most, **edges, hop=between)
            self._terms[key] = (self._ids.setdefault(terms, len(self._ids)), terms)
        return self._terms[key]

    # Combinations.

    def _combine(
        self, parts: Sequence[Counts], first: int, chosen: tuple[Counts, ...], left: Counts
    ) -> Iterator[Combination]:
        for index in range(first, len(parts)):
            if len(chosen) in (self.micro_batches, self.task.fixed_dp) or self._ended():
                return
            counts = parts[index]
            if any(a > b for a, b in zip(counts, left, strict=True)):
                continue
            now = (*chosen, counts)
            rest = tuple(b - a for a, b in zip(counts, left, strict=True))
            capable = [capacity(self.curves[part], self._limit()) for part in now]
            if not all(capable):
                continue
            done = sum(capable)
            if done >= self.micro_batches and self.task.fixed_dp in (None, len(now)):
                yield from self._combination(now)
            if done + self._capacity(rest) >= self.micro_batches:
                yield from self._combine(parts, index, now, rest)

    def _combination(self, parts: tuple[Counts, ...]) -> Iterator[Combination]:
        self.candidates += 1
        after = self._after(parts)
        curves = [self.curves[part] for part in parts]
        limit = self.best * (1 + self.slack) - after
        if sum(capacity(seconds, limit) for seconds in curves) < self.micro_batches:
            return
        least = [part[-1] for part in parts] if self.task.deep else None
        given = split_micro_batches(curves, self.micro_batches, least)
        if given is None:
            return
        seconds = slowest(curves, given) + after
        above = [self.above[part] for part in parts]
        known = split_micro_batches(above, self.micro_batches, least) if self.hidden else given
        if known is not None:
            self.best = min(self.best, slowest(above, known) + after)
        yield Combination(parts=parts, micro_batches=given, seconds=seconds, after=after)

    def _costed(self, combinations: Sequence[Combination]) -> list[Combination]:
        """The combinations within the slack of the best under their exact time, those first that may take
        least."""
        found = []
        for combination in sorted(combinations, key=lambda c: (c.seconds, len(c.parts), c.parts)):
            limit = self.best * (1 + self.slack) * (1 + EQUAL)
            if combination.seconds > limit:
                break
            exact = self._exactly(combination, limit - combination.after)
            if exact is not None:
                self.best = min(self.best, exact.seconds)
                found.append(exact)
        return found

    def _exactly(self, combination: Combination, limit: float) -> Combination | None:
        """The combination with micro-batches and seconds that are exact; None beyond the limit. Of a part only
        the numbers of micro-batches count that it can do, and that the others leave to it."""
        parts, total = combination.parts, self.micro_batches
        able = [capacity(self.curves[part], limit) for part in parts]
        curves = []
        for part, most in zip(parts, able, strict=True):
            least = max(1, total - sum(able) + most)
            seconds = np.full(total, np.inf)
            seconds[: least - 1] = 0.0
            for count in range(least, most + 1):
                options = self.options(part, count, limit)
                if not options:
                    break
                seconds[count - 1] = options[0].seconds
            curves.append(np.maximum.accumulate(seconds))
        given = split_micro_batches(curves, total)
        if given is None:
            return None
        seconds_now = slowest(curves, given) + combination.after
        return Combination(parts=parts, micro_batches=given, seconds=seconds_now, after=combination.after)

    def options(self, part: Counts, micro_batches: int, limit: float) -> list[Option]:
        """The shapes on these devices that do so many micro-batches within `limit` seconds, best first."""
        found = self._options(self.shapes[part], part, micro_batches, self._limit() * (1 + EQUAL))
        return [option for option in found if option.seconds <= limit]

    # What prunes.

    @property
    def proved(self) -> bool:
        """Returns True if no plan is better than the best: each was looked at, or excluded by a bound."""
        return self.complete and self._options.proved and all(kept < ALIKE for kept in self._kept.values())

    @property
    def spent(self) -> int:
        """What it has looked at so far, of the budget."""
        return self.candidates + CURVE * self._made

    def _ended(self) -> bool:
        """Whether the budget is spent."""
        if self.spent > self.budget:
            self.complete = False
        return not self.complete

    def _limit(self) -> float:
        """Seconds that a pipeline may take at most, with the least after it that can be."""
        return self.best * (1 + self.slack) - self._least_after

    def _after(self, parts: Sequence[Counts]) -> float:
        used = {i for part in parts for i, n in enumerate(self._devices(part)) if n}
        link = span((self.alike[i] for i in sorted(used)), self.cluster)
        return self.cost.after(len(parts), min(sum(self._devices(part)) for part in parts), link)

    def _capacity(self, counts: Counts) -> int:
        """The most micro-batches that these devices can do in the time of the best plan, by the bound."""
        counts = self._devices(counts)
        if not any(counts):
            return 0
        limit = self.best * (1 + self.slack) * (1 + EQUAL)
        if not math.isfinite(limit):
            return self.micro_batches
        if (counts, limit) not in self._spare:
            rates = [self.alike[i].rate for i, count in enumerate(counts) for _ in range(count)]
            low, high = 0, self.micro_batches
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if self.cost.bound(rates, middle) <= limit else (low, middle - 1)
            self._spare[counts, limit] = low
        return self._spare[counts, limit]


def place(
    options: Sequence[Option],
    micro_batches: Sequence[int],
    alike: Sequence[Alike],
    profile: ModelProfile,
    current: Plan | None,
) -> tuple[Pipeline, ...]:
    """Pipelines with devices: each class's devices go where they lack least if the members of each group are
    lined up so. Deterministic: what is equal goes by name."""
    before = holders(current, profile.share_units)
    slots: dict[int, list[tuple[int, int, int, Held]]] = {}
    for p, option in enumerate(options):
        start = 0
        for s, (group, layers) in enumerate(zip(option.shape.groups, option.layers, strict=True)):
            low, last = 0, s == len(option.layers) - 1
            units = to_units(group.shares, profile.share_units)
            for (index, share), size in zip(group.members, units, strict=True):
                held = Held(start=start, stop=start + layers, low=low, high=low + size, embed=s == 0, head=last)
                slots.setdefault(index, []).append((p, s, share, held))
                low += size
            start += layers
    chosen: dict[tuple[int, int], list[tuple[str, int]]] = {}
    for index, wanted in slots.items():
        names = alike[index].devices
        costs = [[estimate(profile, before.get(name), held) for *_, held in wanted] for name in names]
        for (p, s, share, _), row in zip(wanted, assign(costs), strict=True):
            chosen.setdefault((p, s), []).append((names[row], share))
    pipelines = []
    for p, (option, count) in enumerate(zip(options, micro_batches, strict=True)):
        stages = [zip(*chosen[p, s], strict=True) for s in range(len(option.layers))]
        groups = [(tuple(names), tuple(shares)) for names, shares in stages]
        pipelines.append(Pipeline.from_layers(groups, option.layers, count))
    return tuple(sorted(pipelines, key=lambda p: by_name(p.stages[0].devices[0])))
