"""Every plan of a small problem of the shared format, by its formulas alone: shares nothing with the search."""

import math
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import combinations, permutations, product

from elasticd_planner.formats import TableProblem

from tests.planner.brute import compositions

Names = tuple[str, ...]

#: A group: units of a layer, the largest part of a member, MiB of its devices.
Entry = tuple[float, float, float]

#: Uneven shares are in parts of this many.
PARTS = 64


def best(problem: TableProblem, objective: str) -> float:
    """The least objective of all plans; inf where nothing fits. Pins are kept."""
    model, total = problem.model, problem.batch.micro_batches
    rates = {
        f"{node.name}/{i}": (problem.rates.get(f"{node.name}/{i}", 1.0), node)
        for node in problem.cluster.nodes
        for i in range(node.devices)
    }
    alive = {name: (rate / node.speed, node) for name, (rate, node) in rates.items() if rate is not None}
    sizes = sorted(model.tp_slowdown)

    @cache
    def costs(group: Names) -> list[Entry]:
        """Units of a layer, the largest part that a member has (memory of members is equal in a node), MiB."""
        width = len(group)
        found = shares(tuple(sorted(alive[name][0] for name in group)), model.uneven_shares)
        mib = alive[group[0]][1].memory_mib
        return [(model.tp_slowdown[width] * width * worst, part, mib) for worst, part in found]

    @cache
    def pipeline(key: tuple[Entry, ...]) -> tuple[float, ...]:
        """By micro-batches: the least of a pipeline of these groups (cost, part, MiB) in the best order."""
        found = [math.inf] * (total + 1)
        if len(key) > model.layers:
            return tuple(found)
        least = min(room(problem, entry, position, len(key)) for entry in key for position in range(len(key)))
        free = least > model.layers - len(key)  # memory holds whatever the order
        for order in {key} if free else set(permutations(key)):
            depth = len(order)
            most = [room(problem, entry, position, depth) for position, entry in enumerate(order)]
            for layers in compositions(model.layers, depth):
                if any(n > m for n, m in zip(layers, most, strict=True)):
                    continue
                times = [n * c for n, (c, _, _) in zip(layers, order, strict=True)]
                for m in range(depth, total + 1):
                    value = m * max(times) if objective == "steady" else (m - 1) * max(times) + sum(times)
                    found[m] = min(found[m], value)
        return tuple(found)

    @cache
    def value(pipelines: tuple[tuple[Entry, ...], ...]) -> float:
        curves = [pipeline(key) for key in pipelines]
        reach = [math.inf] * (total + 1)
        reach[0] = 0.0
        for curve in curves:
            after = [math.inf] * (total + 1)
            for have, so_far in enumerate(reach):
                if so_far < math.inf:
                    for m in range(1, total - have + 1):
                        after[have + m] = min(after[have + m], max(so_far, curve[m]))
            reach = after
        return reach[total]

    found = math.inf
    seen = set()
    for grouping in groupings(tuple(alive), alive, sizes, problem):
        # Groups that cost and hold the same are the same to every formula.
        for entries in product(*(costs(group) for group in grouping)):
            key = tuple(sorted(entries))
            if key in seen:
                continue
            seen.add(key)
            for parts in {tuple(sorted(tuple(sorted(part)) for part in parts)) for parts in partitions(key)}:
                if problem.pins.dp is None or len(parts) == problem.pins.dp:
                    found = min(found, value(parts))
    return found


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
