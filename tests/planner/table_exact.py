"""Whether any plan of a problem of the shared format is below a limit: exact, for some dozen groups.

Shares nothing with the search but the formulas. For a limit T every division of every node is listed (devices
by class, any groups with all their shares, some devices idle). Of the groups of all nodes, a pipeline is a
vector v of counts by type, and its stages are placed from the last to the first in every order at once:

- steady: with m micro-batches a stage of cost c may have floor(T / (m c)) layers, and what memory holds at its
  position. The most layers are g[v] = max over types j of g[v - e_j] + layers of j with |v| - 1 stages behind.
- step: for a cap o on the slowest stage, the least sum S[v, n] of a micro-batch through stages with n layers is
  the least over j and k of S[v - e_j, n - k] + k c_j, and m = floor((T - S) / o) + 1.

v takes the largest m it can, at least as many as it has stages. The most that D pipelines take is the (max, +)
power of that over disjoint vectors. No plan is below T if no division reaches the batch. Divisions that another
one replaces group by group, none slower, are left out, as are those that a bound of their sum excludes.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
from elasticd_planner.problem import Objective
from elasticd_planner.problem_files.file_format import TableProblem

Ints = npt.NDArray[np.int64]

#: Cost of a layer, size, MiB of its devices, the largest part of a member.
Kind = tuple[float, int, float, float]
Groups = tuple[Kind, ...]

#: Shares are in parts of this many.
PARTS = 64

#: No pipeline at all; a few of these added up stay far below zero.
NONE = -(10**6)


def can_be_below(problem: TableProblem, limit: float, objective: Objective) -> bool:
    """Whether a plan's objective is less than `limit` (by more than rounding)."""
    below = limit * (1 - 1e-7)
    steady = objective == "steady"
    seen = set()
    for chosen in product(*(divisions(problem, index) for index in range(len(problem.cluster.nodes)))):
        groups = tuple(sorted(group for division in chosen for group in division))
        if groups in seen or _reach(problem, groups, below, steady) < problem.batch.micro_batches * (1 - 1e-9):
            continue
        seen.add(groups)
        counts = Counter(groups)
        kinds, most = list(counts), tuple(counts.values())
        if steady and not _enough(problem, _steady(problem, kinds, most, below, memory=False)):
            continue
        taken = (
            _steady(problem, kinds, most, below, memory=True) if steady else _step(problem, kinds, most, below)
        )
        if _enough(problem, taken):
            return True
    return False


def _reach(problem: TableProblem, groups: Groups, limit: float, steady: bool) -> float:
    """Micro-batches that no arrangement of groups exceeds: a stage has at most o / c layers where the slowest
    takes o, and has its part of fill and drain."""
    paces = [limit / (problem.model.layers * group[0]) for group in groups]
    if steady:
        return sum(paces)
    pipelines = problem.pins.dp or problem.batch.micro_batches
    return min(pipelines, len(groups)) + sum(max(0.0, pace - 1) for pace in paces)


@cache
def _shares(rates: tuple[float, ...], uneven: bool) -> tuple[tuple[float, float], ...]:
    """(max of part x rate, largest part) of all shares that no others beat in both; rates ascending."""
    size = len(rates)
    found = [(max(rates) / size, 1 / size)]
    if uneven and len(set(rates)) > 1:
        for most in range(1, PARTS):
            for worst in sorted({n * rate for rate in rates for n in range(1, PARTS)}):
                parts = [min(most, math.floor(worst / rate + 1e-9)) for rate in rates]
                if min(parts) >= 1 and sum(parts) >= PARTS:
                    found.append((worst / PARTS, most / PARTS))
                    break
    return tuple(a for a in found if not any(b != a and b[0] <= a[0] and b[1] <= a[1] for b in found))


def divisions(problem: TableProblem, index: int) -> list[Groups]:
    """The ways to divide one node; of a normal node with a pinned size groups of that size alone."""
    node, model = problem.cluster.nodes[index], problem.model
    rates = [problem.rates.get(f"{node.name}/{i}", 1.0) for i in range(node.devices)]
    classes = sorted(Counter(rate / node.speed for rate in rates if rate is not None).items())
    sizes = sorted(model.tp_slowdown)
    if problem.pins.tp is not None and None not in rates and classes[-1][0] <= 1:
        sizes = [problem.pins.tp]
    takes = [t for t in product(*(range(n + 1) for _, n in classes)) if sum(t) in sizes]

    def grown(left: tuple[int, ...], first: int, made: Groups) -> Iterator[Groups]:
        yield made
        for at in range(first, len(takes)):
            taken = takes[at]
            if all(a <= b for a, b in zip(taken, left, strict=True)):
                size = sum(taken)
                members = tuple(rate for (rate, _), n in zip(classes, taken, strict=True) for _ in range(n))
                rest = tuple(b - a for a, b in zip(taken, left, strict=True))
                for worst, part in _shares(members, model.uneven_shares):
                    group = (model.tp_slowdown[size] * size * worst, size, node.memory_mib, part)
                    yield from grown(rest, at, (*made, group))

    listed = {tuple(sorted(made)) for made in grown(tuple(n for _, n in classes), 0, ())}
    return [a for a in sorted(listed) if not any(a != b and _replaces(b, a) for b in listed)]


def _replaces(better: Groups, worse: Groups) -> bool:
    """Whether each group of `worse` has one of its own in `better`, of no larger part and not slower."""
    left = list(better)
    for cost, _, _, part in sorted(worse, reverse=True):
        fitting = [group for group in left if group[3] <= part and group[0] <= cost]
        if not fitting:
            return False
        left.remove(max(fitting))
    return True


def _steady(
    problem: TableProblem, kinds: Sequence[Kind], counts: tuple[int, ...], limit: float, *, memory: bool
) -> Ints:
    """By counts: the most micro-batches of a pipeline of exactly these groups, NONE where it is none."""
    layers, total = problem.model.layers, problem.batch.micro_batches
    batches = np.arange(1, total + 1)
    caps = [np.minimum(np.floor(limit / (batches * kind[0])), layers).astype(np.int64) for kind in kinds]
    most = np.full(tuple(n + 1 for n in counts), NONE, dtype=np.int64)
    reached = {(0,) * len(counts): np.zeros(total, dtype=np.int64)}  # by micro-batches
    for vector, behind in _vectors(counts, min(layers, total)):
        inner = np.full(total, NONE, dtype=np.int64)
        whole = inner.copy()
        for j, before in _before(vector, reached):
            for target, edge in ((inner, behind == 0), (whole, True)):
                room = held(problem, kinds[j], behind, edge=edge) if memory else layers
                here = np.minimum(caps[j], room)
                np.maximum(target, np.where(here >= 1, before + here, NONE), out=target)
        if (inner > 0).any():
            reached[vector] = inner
        done = np.flatnonzero((whole >= layers) & (batches > behind))
        if len(done):
            most[vector] = batches[done[-1]]
    return most


def _step(problem: TableProblem, kinds: Sequence[Kind], counts: tuple[int, ...], limit: float) -> Ints:
    """By counts: the most micro-batches of a pipeline of exactly these groups, NONE where it is none."""
    layers, total = problem.model.layers, problem.batch.micro_batches
    deepest = min(layers, total)
    rooms = [max(held(problem, kind, n, edge=False) for n in range(deepest)) for kind in kinds]
    values = {n * kind[0] for kind, room in zip(kinds, rooms, strict=True) for n in range(1, room + 1)}
    least = layers / sum(count / kind[0] for kind, count in zip(kinds, counts, strict=True))
    caps = np.array(sorted(value for value in values if least * (1 - 1e-9) <= value <= limit))
    most = np.full(tuple(n + 1 for n in counts), NONE, dtype=np.int64)
    start = np.full((len(caps), layers + 1), np.inf)
    start[:, 0] = 0.0
    reached = {(0,) * len(counts): start}  # by cap and layers
    for vector, behind in _vectors(counts, deepest):
        inner, whole = np.full(start.shape, np.inf), np.full(len(caps), np.inf)
        for j, before in _before(vector, reached):
            cost = kinds[j][0]
            inside, outside = (held(problem, kinds[j], behind, edge=edge) for edge in (behind == 0, True))
            for k in range(1, max(inside, outside) + 1):
                allowed = slice(int(np.searchsorted(caps, k * cost * (1 - 1e-9))), None)
                if k <= inside:
                    value = before[allowed, : layers + 1 - k] + k * cost
                    np.minimum(inner[allowed, k:], value, out=inner[allowed, k:])
                if k <= outside:
                    value = before[allowed, layers - k] + k * cost
                    np.minimum(whole[allowed], value, out=whole[allowed])
        if np.isfinite(inner).any():
            reached[vector] = inner
        possible = np.isfinite(whole)
        done = np.floor((limit - whole[possible]) / caps[possible]) + 1
        if len(done) and done.max() > behind:
            most[vector] = min(total, int(done.max()))
    return most


def _vectors(counts: tuple[int, ...], deepest: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Counts of a pipeline's groups, smaller ones first, and how many stages are behind its first."""
    for vector in product(*(range(n + 1) for n in counts)):
        if 0 < sum(vector) <= deepest:
            yield vector, sum(vector) - 1


def _before(vector: tuple[int, ...], reached: dict[tuple[int, ...], Any]) -> Iterator[tuple[int, Any]]:
    """Each type that may stand first, with what the others reach."""
    for j, n in enumerate(vector):
        known = reached.get((*vector[:j], n - 1, *vector[j + 1 :])) if n else None
        if known is not None:
            yield j, known


def held(problem: TableProblem, kind: Kind, behind: int, *, edge: bool) -> int:
    """Layers that a stage has memory for with so many stages behind it; `edge`: the first or the last."""
    memory = problem.model.memory
    if memory is None:
        return problem.model.layers
    table = memory.layer_mib_by_stage
    room = (kind[2] - memory.reserve_mib - memory.fixed_mib) / (problem.model.tp_full * kind[3])
    room -= memory.embedding_mib if edge else 0.0
    fitting = math.floor(room / table[max(0, len(table) - 1 - behind)] * (1 + 1e-9))
    return min(problem.model.layers, max(0, fitting))


def _enough(problem: TableProblem, taken: Ints) -> bool:
    """Whether some number of disjoint pipelines takes the batch, none less than its stages."""
    total, number = problem.batch.micro_batches, problem.pins.dp
    depth = np.indices(taken.shape).sum(axis=0)
    if int(depth.max()) <= total:  # whatever is too much can be taken away: groups may be idle
        for axis in range(taken.ndim):
            taken = np.maximum.accumulate(taken, axis=axis)
    if number is None:
        number = min(total, sum(taken.shape))
        taken = taken.copy()
        taken[(0,) * taken.ndim] = max(0, int(taken[(0,) * taken.ndim]))  # some may take nothing
        taken = np.maximum(taken, 0) if int(depth.max()) <= total else taken
    if number == 1:
        return bool((taken[depth <= total] >= total).any())
    powers = {1: taken}
    if int(depth.max()) <= total:
        half, rest = _power(powers, number // 2), _power(powers, number - number // 2)
        return int((half + np.flip(rest)).max()) >= total
    return bool((_power(powers, number)[depth <= total] >= total).any())


def _power(powers: dict[int, Ints], number: int) -> Ints:
    """The most that so many disjoint pipelines take, by counts."""
    if number not in powers:
        a, b = _power(powers, number // 2), _power(powers, number - number // 2)
        joined = np.full(a.shape, NONE, dtype=np.int64)
        for where in np.argwhere(a >= 0):
            to = tuple(slice(int(i), None) for i in where)
            of = tuple(slice(0, size - int(i)) for i, size in zip(where, a.shape, strict=True))
            np.maximum(joined[to], a[tuple(where)] + b[of], out=joined[to])
        powers[number] = np.maximum(joined, NONE)
    return powers[number]
