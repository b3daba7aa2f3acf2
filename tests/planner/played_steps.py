"""Steps of `resolve` carried out on integers, and layouts to try them on: for tests and benchmarks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from elasticd_planner.layout.resolve import Communication, dual, resolve
from elasticd_planner.layout.two_step_sums import in_two_steps
from elasticd_planner.spec.box import Box, Holding, TensorLayout, lacking

#: Of one device: the boxes that it holds, with their values.
Held = dict[str, list[tuple[Holding, np.ndarray]]]


def drawn_pair(draw: random.Random, *, whole: bool = False) -> tuple[TensorLayout, TensorLayout]:
    """Two layouts of one tensor, uneven in any dimension, of terms or not, with replicas, on any devices. The
    target needs some of the tensor; with `whole` all of it."""
    shape = tuple(draw.randint(1, 6) for _ in range(draw.randint(0, 3)))
    devices = [f"n{node}/{index}" for node in range(draw.randint(1, 3)) for index in range(draw.randint(1, 4))]
    source = _drawn(draw, shape, devices, terms=draw.choice((0, 0, 1, 2, 3)), part=False)
    target = _drawn(
        draw, shape, devices, terms=draw.choice((0, 0, 0, 1, 2)), part=not whole and draw.random() < 0.2
    )
    return source, target


def _drawn(
    draw: random.Random, shape: tuple[int, ...], devices: Sequence[str], *, terms: int, part: bool
) -> TensorLayout:
    """`terms`: 0 for values. No device has two terms."""
    mine = draw.sample(list(devices), len(devices))
    names = [f"t{number}" for number in range(min(terms, len(devices)))] or [None]
    holdings = list[Holding]()
    for number, name in enumerate(names):
        of = mine[number :: len(names)]
        tiles = list(_tiles(draw, Box.whole(shape), draw.randint(1, len(of))))
        for tile in tiles[: draw.randint(1, len(tiles))] if part else tiles:
            for device in draw.sample(of, draw.choice((1, 1, 1, min(2, len(of)), len(of)))):
                holdings.append(Holding(device=device, box=tile, partial=name))
    return TensorLayout(name="x", shape=shape, dtype="int64", holdings=tuple(holdings))


def _tiles(draw: random.Random, box: Box, count: int) -> Iterator[Box]:
    dims = [dim for dim, extent in enumerate(box.shape) if extent > 1]
    if count == 1 or not dims:
        yield box
        return
    dim = draw.choice(dims)
    border = draw.randint(box.start[dim] + 1, box.stop[dim] - 1)
    less = draw.randint(1, count - 1)
    yield from _tiles(draw, box.cropped(dim, box.start[dim], border), less)
    yield from _tiles(draw, box.cropped(dim, border, box.stop[dim]), count - less)


def values_of(layout: TensorLayout, numbers: np.random.Generator) -> dict[str | None, np.ndarray]:
    """A whole tensor for each term of a layout; None: of the value."""
    terms = dict.fromkeys(holding.partial for holding in layout.holdings)
    return {term: np.asarray(numbers.integers(-99, 100, layout.shape)) for term in terms}


def held(layout: TensorLayout, values: dict[str | None, np.ndarray]) -> Held:
    """What each device has, in memory of its own."""
    found: Held = {}
    whole = Box.whole(layout.shape)
    for holding in layout.holdings:
        part = np.array(values[holding.partial][holding.box.slices(whole)])
        found.setdefault(holding.device, []).append((holding, part))
    return found


def played(steps: Sequence[Communication], before: Held, target: TensorLayout) -> Held:
    """What each device has after the steps. Every element must come, and once.

    Raises AssertionError for steps that their operation cannot carry out.
    """
    nothing = {term: np.zeros(target.shape, np.int64) for term in {h.partial for h in target.holdings}}
    after, times = held(target, nothing), held(target, nothing)
    for step in steps:
        fits(step)
        came = []
        for cell in step.cells:
            have = after if step.operation == "relay" else before
            terms = [_read(have[device], cell.box) for device in cell.sources]
            came.append((cell, sum(terms, np.zeros(cell.box.shape, np.int64))))
        for cell, total in came:
            for device in cell.needers:
                for (holding, to), (_, count) in zip(after[device], times[device], strict=True):
                    if holding.box.contains(cell.box):
                        to[cell.box.slices(holding.box)] = total
                        count[cell.box.slices(holding.box)] += 1
    assert all((count == 1).all() for counts in times.values() for _, count in counts), (
        "an element came not once"
    )
    return after


def hops(source: TensorLayout, target: TensorLayout) -> list[tuple[Communication, ...]]:
    """The steps between layouts, where sums that would be relayed are made in two (`lowered`)."""
    return [resolve(before, after) for before, after in pairwise((source, *in_two_steps(source, target)))]


def played_in_two(source: TensorLayout, before: Held, target: TensorLayout) -> Held:
    """What each device has after all hops."""
    for after, steps in zip(in_two_steps(source, target), hops(source, target), strict=True):
        before = played(steps, before, after)
    return before


def _read(parts: list[tuple[Holding, np.ndarray]], box: Box) -> np.ndarray:
    holding, array = next(each for each in parts if each[0].box.contains(box))
    return array[box.slices(holding.box)]


def fits(step: Communication) -> None:
    """An operation's cells have sources and needers that it can serve."""
    devices, cells = step.devices, step.cells
    assert len(set(devices)) == len(devices)
    assert cells
    for cell in cells:
        assert len(set(cell.sources)) == len(cell.sources)
        match step.operation:
            case "keep":
                assert cell.sources == cell.needers == devices
                assert len(devices) == 1
            case "zero":
                assert (cell.sources, cell.needers, len(devices)) == ((), devices, 1)
            case "send" | "relay":
                assert cell.sources == devices[:1]
                assert cell.needers == devices[1:]
                assert len(devices) > 1
            case "all_gather":
                assert len(cell.sources) == 1
                assert cell.sources[0] in devices
                assert cell.needers == devices
            case "all_reduce":
                assert set(cell.sources) <= set(devices)
                assert cell.needers == devices
                assert len(devices) > 1
            case "reduce_scatter":
                assert set(cell.sources) <= set(devices)
                assert len(cell.sources) > 1
                assert len(cell.needers) == 1
                assert cell.needers[0] in devices
            case "sum":
                assert len(cell.needers) == 1
                assert len(cell.sources) > 1
                assert set(devices) == {*cell.sources, *cell.needers}
    if step.operation in ("all_gather", "reduce_scatter"):
        ends = [cell.sources if step.operation == "all_gather" else cell.needers for cell in cells]
        assert len(set(ends)) > 1


def whole(layout: TensorLayout, parts: Held) -> tuple[dict[str | None, np.ndarray], np.ndarray]:
    """Each term of a tensor, put together, with 0 where nobody holds it; and where somebody holds one. Replicas
    must be equal."""
    all_of, found, covered = (
        Box.whole(layout.shape),
        dict[str | None, np.ndarray](),
        np.zeros(layout.shape, bool),
    )
    seen = dict[str | None, np.ndarray]()
    for holdings in parts.values():
        for holding, values in holdings:
            term, where = holding.partial, holding.box.slices(all_of)
            total = found.setdefault(term, np.zeros(layout.shape, np.int64))
            known = seen.setdefault(term, np.zeros(layout.shape, bool))
            assert ((total[where] == values) | ~known[where]).all(), "replicas differ"
            total[where], known[where], covered[where] = values, True, True
    return found, covered


def check_value(source: TensorLayout, target: TensorLayout, seed: int, members: Sequence[str] = ()) -> None:
    """The target has the source's value, wherever it is needed; of values as much is sent as is lacking."""
    numbers = np.random.default_rng(seed)
    values = values_of(source, numbers)
    steps = resolve(source, target, members)
    found, covered = whole(target, played(steps, held(source, values), target))
    assert (sum(found.values()) == np.where(covered, sum(values.values()), 0)).all()
    if None in values and None in found:
        sent = sum(
            cell.box.size * len(set(cell.needers) - set(cell.sources))
            for step in steps
            for cell in step.cells
            if step.operation != "keep"
        )
        lacks = lacking(source, target)
        assert sent == sum(box.size for boxes in lacks.values() for box in boxes)


def check_in_two(source: TensorLayout, target: TensorLayout, seed: int) -> None:
    """Over all hops the target gets of each element the value, or the sum of the terms that are there."""
    values = values_of(source, np.random.default_rng(seed))
    found, covered = whole(target, played_in_two(source, held(source, values), target))
    there = {term: np.zeros(source.shape, bool) for term in values}
    for holding in source.holdings:
        there[holding.partial][holding.box.slices(Box.whole(source.shape))] = True
    terms = [np.where(there[term], values[term], 0) for term in values if term is not None]
    value = sum(terms, np.zeros(source.shape, np.int64))
    if None in values:
        value = np.where(there[None], values[None], value)
    assert (sum(found.values()) == np.where(covered, value, 0)).all()


def check_adjoint(
    source: TensorLayout, target: TensorLayout, seed: int, *, add: bool, in_two: bool = False
) -> None:
    """<F x, g> = <x, B g>, where B is the resolution of the duals."""
    numbers = np.random.default_rng(seed)
    x = values_of(source, numbers)
    gradients, wanted = dual(target, add=add), dual(source)
    g = values_of(gradients, numbers)

    def carried(before: TensorLayout, given: Held, after: TensorLayout) -> Held:
        return played_in_two(before, given, after) if in_two else played(resolve(before, after), given, after)

    y, _ = whole(target, carried(source, held(source, x), target))
    # With `add` each device has used its replica in its own way: <y, g> is over devices.
    at, forward = held(gradients, g), 0
    seen = dict[tuple[object, object], np.ndarray]()
    for holding in target.holdings:
        key = (holding.device if add and holding.partial is None else None, holding.partial)
        mask = seen.setdefault(key, np.zeros(target.shape, bool))
        mask[holding.box.slices(Box.whole(target.shape))] = True
    for (device, term), mask in seen.items():
        forward += int((y[term] * g[device if add and term is None else None])[mask].sum())
    back, _ = whole(wanted, carried(gradients, at, wanted))
    backward = 0
    for term, values in x.items():
        mask = np.zeros(source.shape, bool)
        for holding in source.holdings:
            if holding.partial == term:
                mask[holding.box.slices(Box.whole(source.shape))] = True
        backward += int((values * back[None])[mask].sum())
    assert forward == backward
