"""Every plan of a small problem of the shared format, by its formulas alone: shares nothing with the search."""

import math
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import combinations, permutations, product

from elasticd_planner.problem_files.file_format import TableProblem

from tests.planner.brute import compositions

Names = tuple[str, ...]

#: A group: units of a layer, the largest part of a member, MiB of its devices.
Entry = tuple[float, float, float]

#: Uneven shares are in parts of this many.
PARTS = 64


def best(problem: TableProblem, objective: str) -> float:
    """The least objective of all plans; inf where nothing fits. Pins are kept."""
    rates = {
        f"{node.name}/{i}": (problem.rates.get(f"{node.name}/{i}", 1.0), node)
        for node in problem.cluster.nodes
        for i in range(node.devices)
    }
    alive = {name: (rate / node.speed, node) for name, (rate, node) in rates.items() if rate is not None}

    @cache
    def costs(group: Names) -> list[Entry]:
        """All divisions of a layer. (Memory of members is equal in a node.)"""
        width = len(group)
        found = shares(tuple(sorted(alive[name][0] for name in group)), problem.model.uneven_shares)
        mib = alive[group[0]][1].memory_mib
        return [(problem.model.tp_slowdown[width] * width * worst, part, mib) for worst, part in found]

    curves = Curves(problem, objective)
    found = math.inf
    seen = set()
    for grouping in groupings(tuple(alive), alive, sorted(problem.model.tp_slowdown), problem):
        # Groups that cost and hold the same are the same to every formula.
        for entries in product(*(costs(group) for group in grouping)):
            key = tuple(sorted(entries))
            if key in seen:
                continue
            seen.add(key)
            for parts in {tuple(sorted(tuple(sorted(part)) for part in parts)) for parts in partitions(key)}:
                if problem.pins.dp is None or len(parts) == problem.pins.dp:
                    found = min(found, curves.together(parts))
    return found


class Curves:
    """The least objective of pipelines by their groups; what was asked once is kept."""

    def __init__(self, problem: TableProblem, objective: str) -> None:
        self.problem, self.steady, self.total = problem, objective == "steady", problem.batch.micro_batches
        self._alone: dict[tuple[Entry, ...], tuple[float, ...]] = {}
        self._together: dict[tuple[tuple[Entry, ...], ...], float] = {}

    def together(self, pipelines: tuple[tuple[Entry, ...], ...]) -> float:
        """Of pipelines that share all micro-batches as is best."""
        if pipelines not in self._together:
            reach = [0.0] + [math.inf] * self.total
            for curve in map(self.alone, pipelines):
                after = [math.inf] * (self.total + 1)
                for have, so_far in enumerate(reach):
                    if so_far < math.inf:
                        for m in range(1, self.total - have + 1):
                            after[have + m] = min(after[have + m], max(so_far, curve[m]))
                reach = after
            self._together[pipelines] = reach[self.total]
        return self._together[pipelines]

    def alone(self, key: tuple[Entry, ...]) -> tuple[float, ...]:
        """By micro-batches: of a pipeline of these groups in the best order."""
        if key not in self._alone:
            found = [math.inf] * (self.total + 1)
            if len(key) <= self.problem.model.layers:
                for order in self._orders(key):
                    for m, value in self._ordered(order):
                        found[m] = min(found[m], value)
            self._alone[key] = tuple(found)
        return self._alone[key]

    def _orders(self, key: tuple[Entry, ...]) -> set[tuple[Entry, ...]]:
        """All; where memory holds whatever the order, one is enough."""
        depth, layers = len(key), self.problem.model.layers
        least = min(room(self.problem, entry, position, depth) for entry in key for position in range(depth))
        return {key} if least > layers - depth else set(permutations(key))

    def _ordered(self, order: tuple[Entry, ...]) -> Iterator[tuple[int, float]]:
        """(micro-batches, objective) of all ways to divide the layers."""
        depth = len(order)
        most = [room(self.problem, entry, position, depth) for position, entry in enumerate(order)]
        for layers in compositions(self.problem.model.layers, depth):
            if any(n > m for n, m in zip(layers, most, strict=True)):
                continue
            times = [n * cost for n, (cost, _, _) in zip(layers, order, strict=True)]
            slowest, through = max(times), sum(times)
            for m in range(depth, self.total + 1):
                yield m, m * slowest if self.steady else (m - 1) * slowest + through


@cache
def shares(rates: tuple[float, ...], uneven: bool) -> list[tuple[float, float]]:
    """(max of part x rate, largest part): of equal parts, or of every division into 64ths that no other one
    beats in both."""
    equal = (max(rates) / len(rates), 1 / len(rates))
    if not uneven:
        return [equal]
    least: dict[int, float] = {}
    for parts in compositions(PARTS, len(rates)):
        worst = max(part * rate for part, rate in zip(parts, rates, strict=True))
        least[max(parts)] = min(worst, least.get(max(parts), math.inf))
    found = [equal]
    for most, worst in sorted(least.items()):
        if all(worst / PARTS < known for known, _ in found):
            found.append((worst / PARTS, most / PARTS))
    return found


def room(problem: TableProblem, entry: Entry, position: int, depth: int) -> int:
    memory = problem.model.memory
    if memory is None:
        return problem.model.layers
    _, part, mib = entry
    table = memory.layer_mib_by_stage
    layer = table[max(0, len(table) - (depth - position))]
    edge = memory.embedding_mib if position in (0, depth - 1) else 0.0
    factor = problem.model.tp_full * part
    left = mib - memory.reserve_mib - memory.fixed_mib - edge * factor
    return math.floor(left / (layer * factor) * (1 + 1e-9)) if left >= 0 else 0


def groupings(
    devices: Names, alive: Mapping[str, tuple[float, object]], sizes: list[int], problem: TableProblem
) -> Iterator[tuple[Names, ...]]:
    """All ways to make disjoint groups of allowed sizes, each inside a node, some devices idle."""
    pinned = problem.pins.tp

    def normal(name: str) -> bool:
        (node,) = [n for n in problem.cluster.nodes if n.name == name.rpartition("/")[0]]
        here = [f"{node.name}/{i}" for i in range(node.devices)]
        return all(other in alive and alive[other][0] <= 1 for other in here)

    def grow(left: Names) -> Iterator[tuple[Names, ...]]:
        if not left:
            yield ()
            return
        first, rest = left[0], left[1:]
        yield from grow(rest)
        node = first.rpartition("/")[0]
        inside = [name for name in rest if name.rpartition("/")[0] == node]
        for size in sizes:
            if pinned is not None and normal(first) and size != pinned:
                continue
            for others in combinations(inside, size - 1):
                group = (first, *others)
                for more in grow(tuple(name for name in rest if name not in others)):
                    yield (group, *more)

    yield from grow(devices)


def partitions(groups: tuple[Entry, ...]) -> Iterator[tuple[tuple[Entry, ...], ...]]:
    """All set partitions of the groups into pipelines."""
    if not groups:
        yield ()
        return
    first, rest = groups[0], groups[1:]
    for parts in partitions(rest):
        yield ((first,), *parts)
        for index, part in enumerate(parts):
            yield (*parts[:index], (first, *part), *parts[index + 1 :])
