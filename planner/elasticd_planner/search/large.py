"""The search at any scale: how many pipelines, which size of groups, and the least time in which they do it.

For each number of pipelines the bound says what it can reach. The most promising is tried first, and a number
that cannot beat the best plan so far is not tried at all. `node_pools` finds the best plan of one number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from elasticd_planner.cost.group_bound import Paces, least
from elasticd_planner.cost.memory import fewest_devices
from elasticd_planner.cost.table_cost import TableCost
from elasticd_planner.grouping.group_types import Columns, Limits, Rules
from elasticd_planner.grouping.node_partitions import Division, kinds, partitioner
from elasticd_planner.numeric import EQUAL
from elasticd_planner.search.bounds.integer_layers import Nodes, least_whole, nodes_of
from elasticd_planner.search.bounds.table_bound import TableBound
from elasticd_planner.search.infeasible import most_copies
from elasticd_planner.search.pools.group_exchange import GROUPS, PIPELINES, Exchange
from elasticd_planner.search.pools.node_pool import NodePool
from elasticd_planner.search.pools.node_pools import CLOSE, EVER, NodePools
from elasticd_planner.search.refine import Refiner
from elasticd_planner.search.task import Found, Task, alive

#: Up to so many devices everything is searched thoroughly; the bound for whole layers up to so many, and of a
#: job's steady state up to more.
SMALL, WHOLE_STEADY = 16, 64

#: Numbers of pipelines that are all tried; of more, the most promising with their sizes.
FEW_NUMBERS, TRIED = 12, 6

#: So many attempts are made thoroughly at once.
FEW_ATTEMPTS = 2

#: Combinations looked at of one pool in an attempt: thorough, brief, with mixed sizes.
BUDGET_ALONE, BUDGET_BRIEF, BUDGET_MIXED = 24, 8, 10

#: The same of few devices: with each number of pipelines, and with so many numbers around the best.
BUDGET_FEW, BUDGET_SMALL, NEAR = 30, 120, 3

#: Combinations looked at of one pool with every order of stages, in a thorough attempt and in others.
ORDERS, ORDERS_BRIEF = 4, 0

#: How much longer than the best by the formula a plan of few devices may take and still be costed by the
#: schedule, and how many of these are.
LEEWAY, KEPT = 1.12, 8

#: So many times later than the bound the groups of a plan may end that are looked at. The first is enough
#: where that finds a plan near the bound; else, as where memory needs slow nodes, the others follow while they
#: find better plans.
LATER = (1.0, 1.5, 2.5, 5.0)

#: A step that takes so much longer than the bound is looked for later, too. Of some 60 drawn problems of 32 and
#: 64 devices one was 2.3 % quicker then, none slower, and 254208/192 8.2 %; of steady states, where a
#: slow group costs the others nothing, none was.
FAR = 0.05

#: (bound, number of pipelines, size of groups on normal nodes)
Attempt = tuple[float, int, int | None]


class LargeSearch:
    """One search."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.kinds = kinds(task.cluster, task.rates, task.cost)
        #: What the search counts between stages and between pipelines; the plan has the links that are there.
        self._link = task.cluster.reach(device.name for device in alive(task))
        self.rules = Rules(
            layers=task.layers,
            hop=task.cost.boundary(self._link),
            timing=task.cost.timing,
            deep=task.deep,
            most=task.micro_batches,
            each=task.micro_batches,
        )
        self.devices = sum(kind.devices * len(kind.nodes) for kind in self.kinds)
        self.partitioner = partitioner(task.cost)
        self.limits: Limits = {}
        self.candidates = 0
        self._best: Found | None = None
        self._near: list[Found] = []
        #: The best plans with equal shares, where others are allowed.
        self._equal: list[Found] = []
        self._size: int | None = None
        self._brief = False
        self._later = 1.0
        self._known: dict[int | None, list[tuple[Paces, int]]] = {}

    # The bound.

    def bound(self, pipelines: int, size: int | None) -> float:
        """Seconds that no plan of so many pipelines can beat, besides what comes after them."""
        task, choices = self.task, self._choices(size)
        timing = task.cost.timing
        found = least(choices, task.layers, task.micro_batches, pipelines, timing)
        if not timing.fill:
            return found
        # One micro-batch's way through a pipeline, all layers on the fastest group.
        fastest = max(
            (
                next((pace for pace, k, _ in listed if k == 1), max(pace for pace, _, _ in listed))
                for listed, _ in choices
            ),
            default=0.0,
        )
        return max(found, task.layers / fastest) if fastest else math.inf

    def _choices(self, size: int | None) -> list[tuple[Paces, int]]:
        """What `group_bound.least` reads: the choices of each kind and its nodes; with groups of normal devices
        of this size, if one is given."""
        if size not in self._known:
            self._known[size] = [
                (self.partitioner.choices(kind, size=size), len(kind.nodes)) for kind in self.kinds
            ]
        return self._known[size]

    def lower(self, known: float | None = None) -> float:
        """Seconds that no plan can beat. `known`: those of a plan; more is looked at where it is not near."""
        numbers = self._numbers(every=True)
        if len(numbers) > FEW_NUMBERS and self.devices > SMALL:
            # More pipelines never raise the bound, what comes after them may.
            return self.bound(numbers[-1], self.task.fixed_tp) + min(map(self._least_after, numbers))
        listed = sorted((self._proved(number), number) for number in numbers)
        if known is None or self._table is None:
            return min((bound for bound, _ in listed), default=math.inf)
        for bound, number in listed:  # the least over numbers, of which each may turn out to need more
            if bound >= known:
                break
            after = self._least_after(number)
            known = min(known, self._table.least(number, bound - after, known - after) + after)
        return known if listed else math.inf

    @cached_property
    def _table(self) -> TableBound | None:
        """The bound that knows more of problems in units, where it is cheap."""
        if not isinstance(self.task.cost, TableCost):
            return None
        made = TableBound(self.task, self.kinds)
        return made if made.small else None

    def _reach(self, pipelines: int, size: int | None) -> float:
        """The bound of so many pipelines, what comes after them included."""
        return self.bound(pipelines, size) + self._least_after(pipelines)

    @cached_property
    def _whole(self) -> list[Nodes] | None:
        """What the bound for whole layers reads, where it is cheap."""
        alone = not self.task.cost.timing.fill and not isinstance(self.task.cost, TableCost)
        if self.devices > (WHOLE_STEADY if alone else SMALL):
            return None
        return nodes_of(self.task, self.kinds, self.partitioner)

    def _proved(self, pipelines: int) -> float:
        """The same for any sizes, and with whole layers where that is cheap."""
        bound, task = self.bound(pipelines, self.task.fixed_tp), self.task
        if self._whole is not None:
            bound = least_whole(task, self._whole, pipelines, bound)
        return bound + self._least_after(pipelines)

    def _least_after(self, pipelines: int) -> float:
        """What comes after so many pipelines takes least over the quicker link, the smallest of them having
        its part of the devices."""
        task = self.task
        fewest = max(1, self.devices // pipelines)
        return min(task.cost.after(pipelines, fewest, link) for link in task.cluster.links)

    def _numbers(self, *, every: bool = False) -> list[int]:
        """Numbers of pipelines: the one pinned, or those that devices, memory and batch allow."""
        task = self.task
        if task.fixed_dp is not None:
            return [task.fixed_dp]
        most = min(self._most_pipelines, task.micro_batches)
        if every or most <= FEW_NUMBERS:
            return list(range(1, most + 1))
        nodes = sum(len(kind.nodes) for kind in self.kinds)
        slow = sum(len(kind.nodes) for kind in self.kinds if not kind.normal)
        widest = max(kind.devices for kind in self.kinds)
        found = {most}
        for whole in (nodes, nodes - slow // 2, nodes - slow):
            found |= {whole // k for k in range(1, 9)}
            found |= {whole * k for k in range(2, widest + 1)}
        return sorted(d for d in found if 1 <= d <= most)

    @cached_property
    def _most_pipelines(self) -> int:
        """By devices and by memory."""
        return max(1, math.floor(min(self.devices, most_copies(self.task))))

    def _fit(self) -> bool:
        """Whether the pinned number of pipelines, or one, may fit, each stage with all the micro-batches that
        its place in a pipeline asks for."""
        task, pinned = self.task, self.task.fixed_tp
        normal = all(kind.normal for kind in self.kinds)
        widths = task.cost.widths(max((kind.devices for kind in self.kinds), default=0))
        memory = max((memory for kind in self.kinds for _, memory, _ in kind.classes), default=0)
        fewest = fewest_devices(
            task.cost,
            task.layers,
            self.devices // (task.fixed_dp or 1),
            [width for width in widths if not normal or pinned in (None, width)],
            memory,
            task.micro_batches,
        )
        return math.isfinite(fewest)

    # The search.

    def run(
        self,
        like: tuple[int, int | None] | None = None,
        *,
        brief: bool = False,
        forms: Sequence[tuple[int, int]] = (),
    ) -> Found | None:
        """The best plan found; None where nothing fits. Few attempts (as with pins) are made thoroughly. Of
        many each is made briefly, then those like the best thoroughly, then mixtures of sizes. `like`: the
        number of pipelines and the size of groups of a plan known to be good; where some plan is like it, no
        others are tried. `brief`: nothing is tried thoroughly."""
        self._brief = brief
        if not self._fit():
            return None
        fixed = self.task.fixed_dp, self.task.fixed_tp
        self._try(
            [(0.0, d, w) for d, w in forms if fixed[0] in (None, d) and fixed[1] in (None, w)], BUDGET_ALONE
        )
        if like is not None and like[0] <= self.task.micro_batches:
            self._try([(0.0, like[0], self.task.fixed_tp or like[1])], BUDGET_BRIEF)
            if self._best is not None:
                return self._best
        self._with_equal_shares()
        if self.devices <= SMALL:
            self._search_few()
        else:
            self._search_many()
        if self._best is None:
            self._search_plain()
            if self.devices > SMALL:
                self._exchange()
        return self._best

    def _with_equal_shares(self) -> None:
        """Where uneven shares are allowed, the search without them comes first: more freedom makes no plan
        worse, and what uneven shares ask of memory hides none that fits."""
        cost = self.task.cost.equal()
        if cost is self.task.cost:
            return
        other = LargeSearch(replace(self.task, cost=cost))
        self._best = other.run(brief=self._brief)
        self._size, self.candidates = other._size, other.candidates
        self._equal = other.near()

    def _search_few(self) -> None:
        numbers = self._numbers(every=True)
        attempts: list[Attempt] = sorted((self._proved(d), d, self.task.fixed_tp) for d in numbers)
        self._try(attempts, BUDGET_BRIEF if self._brief else BUDGET_FEW)
        if self._brief:
            return
        best = len(self._best.pipelines) if self._best is not None else 1
        self._try(sorted(attempts, key=lambda entry: (abs(entry[1] - best), entry))[:NEAR], BUDGET_SMALL)

    def _search_many(self) -> None:
        """All sizes; then plans whose groups end later, while they are better, where none was found or the best
        is far from its bound."""
        for self._later in LATER:
            before = self._best
            self._search_sizes()
            if self._best is None:
                continue
            if self._later > 1.0 and self._best is before:
                return
            self._exchange()
            if self._later == 1.0 and self._near_bound(self._best):
                return

    def _near_bound(self, best: Found) -> bool:
        """Returns False where the groups of the best plan may have to end later for a quicker step. Plans
        of a job are all far from its bound, which knows no boundaries between stages: they say nothing."""
        timing = self.task.cost.timing
        if not timing.fill or timing.hidden or self._brief:
            return True
        number = len(best.pipelines)
        least = self.bound(number, self.task.fixed_tp) + self._after(number, best.smallest)
        return best.seconds <= least * (1 + FAR)

    def _search_sizes(self) -> None:
        sizes = self._sizes()
        attempts = self._attempts(sizes)
        if self._brief:
            self._try(attempts, BUDGET_BRIEF)
            return
        if len(attempts) <= FEW_ATTEMPTS:
            self._try(attempts, BUDGET_ALONE)
        else:
            self._try(attempts, BUDGET_BRIEF)
            self._try(self._like_best([self._size, sizes[-1]]), BUDGET_ALONE)
        if self.task.fixed_tp is None and sizes != [None]:
            self._try(self._like_best([None]), BUDGET_MIXED)

    def _search_plain(self) -> None:
        """What a healthy cluster of as many devices would have: all groups of one size, with equal shares."""
        for pipelines in self._numbers():
            for size in self.task.cost.widths(max((kind.devices for kind in self.kinds), default=0)):
                if self.task.fixed_tp in (None, size) and self._best is None:
                    self._best = self._with(pipelines, size, math.inf, 1, plain=True)

    def near(self) -> list[Found]:
        """The best plan found and others that are near it by the formula, best first: of a job, whose links the
        formula takes for equal, one of those may be the quickest. Of many devices the best alone. With them
        those with equal shares."""
        if self._best is None:
            return []
        kept = [self._best]
        if self.devices <= SMALL and not isinstance(self.task.cost, TableCost):
            distinct = {found.pipelines: found for found in (*self._near, *kept)}
            kept = sorted(distinct.values(), key=lambda found: found.seconds)
            kept = [found for found in kept if found.seconds <= kept[0].seconds * LEEWAY][:KEPT]
        return list({found.pipelines: found for found in (*kept, *self._equal)}.values())

    def _exchange(self) -> None:
        """Improves the best plan by exchanging groups between its pipelines, where these are not many."""
        best = self._best
        if best is None or not 1 < len(best.pipelines) <= PIPELINES:
            return
        groups = [group for chained in best.pipelines for group in chained.groups]
        if len(groups) > GROUPS:
            return
        after = self._after(len(best.pipelines), best.smallest)
        low = self.bound(len(best.pipelines), self.task.fixed_tp)
        finisher = Refiner(self.task)
        exchange = Exchange(self.task, self.rules, best, {group: finisher.type_of(group) for group in groups})
        made = exchange.improved(best.seconds - after, low)
        seconds = made.seconds + self._after(len(made.pipelines), made.smallest)
        if seconds < best.seconds:
            self._best = replace(made, seconds=seconds)

    def _try(self, attempts: Sequence[Attempt], budget: int) -> None:
        """Makes attempts in order, but for those that cannot beat the best plan so far."""
        for reach, pipelines, size in attempts:
            best = self._best
            if best is not None and reach >= best.seconds * (1 - CLOSE):
                continue
            found = self._with(pipelines, size, best.seconds if best is not None else math.inf, budget)
            if found is not None and (best is None or found.seconds < best.seconds):
                self._best, self._size = found, size

    def _like_best(self, sizes: Sequence[int | None]) -> list[Attempt]:
        """Attempts with as many pipelines as the best plan has."""
        if self._best is None:
            return []
        number = len(self._best.pipelines)
        return [(self._reach(number, size), number, size) for size in dict.fromkeys(sizes)]

    def _attempts(self, sizes: Sequence[int | None]) -> list[Attempt]:
        """What to try, in order: by the bound; where there are many numbers of pipelines, those that promise
        most by what normal nodes alone would do."""
        numbers = self._numbers()
        listed = [(self._reach(d, size), d, size) for d in numbers for size in sizes]
        listed.sort(key=lambda entry: (entry[0], entry[1], entry[2] or 0))
        if len(numbers) <= FEW_NUMBERS:
            return listed
        hopes: list[tuple[float, Attempt]] = []
        for attempt in listed:
            if len(hopes) >= TRIED and attempt[0] > hopes[TRIED - 1][0]:
                break  # no attempt takes less than its bound
            hopes.append((self._hope(*attempt[1:]), attempt))
            hopes.sort(key=lambda entry: (entry[0], *entry[1][:2], entry[1][2] or 0))
        promising = [entry for entry in hopes if math.isfinite(entry[0])] or hopes
        return [attempt for _, attempt in promising[:TRIED]]

    def _hope(self, pipelines: int, size: int | None) -> float:
        """Seconds in which normal nodes alone would do their part in so many pipelines."""
        task = self.task
        normal = [kind for kind in self.kinds if kind.normal] or list(self.kinds)
        kind = max(normal, key=lambda kind: len(kind.nodes))
        nodes = sum(len(kind.nodes) for kind in self.kinds)
        pools, part = (1, max(1, pipelines // nodes)) if pipelines > nodes else (2 * nodes // pipelines, 2)
        low = self.bound(pipelines, size)
        divisions = self.partitioner.divisions(kind, low / task.layers, size=size)
        if not divisions:
            return math.inf
        columns = Columns(task.cost, self.rules, pools * len(divisions[0].types), self.limits)
        pool = NodePool([(kind, divisions[:1], pools)], part, columns, low / task.layers)
        need = -(-task.micro_batches * part // pipelines)
        high = low * EVER
        if not pool.listed(0) or not pool.able(0, high, need):
            return math.inf
        while high > low * 1.005:
            middle = min((low + high) / 2, low * 1.5)
            low, high = (low, middle) if pool.able(0, middle, need) else (middle, high)
        return high + self._after(pipelines)

    def _after(self, pipelines: int, smallest: int | None = None) -> float:
        """Seconds after the pipelines, of which the smallest has so many devices (None: all are alike)."""
        return self.task.cost.after(pipelines, smallest or max(1, self.devices // pipelines), self._link)

    def _sizes(self) -> list[int | None]:
        """Sizes of groups on normal nodes; None where there are no such nodes."""
        if self.task.fixed_tp is not None:
            return [self.task.fixed_tp]
        normal = [kind.devices for kind in self.kinds if kind.normal]
        return list(self.task.cost.widths(max(normal))) if normal else [None]

    def _with(
        self, pipelines: int, size: int | None, known: float, budget: int, *, plain: bool = False
    ) -> Found | None:
        """The best plan of so many pipelines, if it beats `known` seconds. What comes after them depends on the
        smallest: few devices are searched with several sizes that it has at least. `plain`: all groups have
        this size and equal shares."""
        task = self.task
        low, small = self.bound(pipelines, size), self.devices <= SMALL
        if small:
            low = self._proved(pipelines) - self._least_after(pipelines)
        if not math.isfinite(low) or low <= 0:
            return None
        time = low / task.layers * self._later
        divisions: list[Sequence[Division]] = []
        for kind in self.kinds:
            listed: Sequence[Division]
            if plain and size is not None:
                listed = (self.partitioner.plain(kind, size),)
            elif small:
                listed = self.partitioner.every(kind, size=size)
            else:
                listed = self.partitioner.divisions(kind, time, size=size)
            divisions.append(listed or (Division(types=(), members=()),))
        best: Found | None = None
        leeway = LEEWAY if small and task.cost.timing.hidden else 1.0
        for fewest in self._fewest(pipelines) if small else (1,):
            pooled = NodePools(
                task=task,
                rules=self.rules,
                kinds=self.kinds,
                divisions=divisions,
                pipelines=pipelines,
                time=time,
                budget=budget,
                orders=ORDERS if budget >= BUDGET_ALONE else ORDERS_BRIEF,
                fewest=fewest,
                thorough=small,
                limits=self.limits,
            )
            found = pooled.solve(low, known * leeway - self._after(pipelines, fewest if small else None))
            self.candidates += pooled.evaluated
            if found is None:
                continue
            made = replace(found, seconds=found.seconds + self._after(pipelines, found.smallest))
            known = min(known, made.seconds)
            self._near.append(made)
            if best is None or made.seconds < best.seconds:
                best = made
        return best

    def _fewest(self, pipelines: int) -> tuple[int, ...]:
        """Devices that the smallest pipeline may have at least: what is worth a search of its own."""
        most = max(1, self.devices // pipelines)
        if self._after(pipelines, 1) <= self._after(pipelines, most) * (1 + EQUAL):
            return (1,)
        return tuple(sorted({most, max(1, 2 * most // 3), 1}, reverse=True))
