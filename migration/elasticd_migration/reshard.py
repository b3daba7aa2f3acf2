"""From two layouts to transfers: what each device lacks, and which holder gives it.

Pure, and the same on every rank: only names, boxes and byte counts go in, and every choice has an order.
The total of the transfers is exactly the bytes that the destinations lack, each of them sent once. Each
transfer lies in one box that its source holds and in one that its destination is to hold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import msgspec
from elasticd_planner.layout.holdings import Holdings
from elasticd_planner.layout.layouts import Item, Role
from elasticd_planner.layout.optimizer_sharding import union
from elasticd_planner.layout.resolve import Uncovered, demands
from elasticd_planner.spec.box import Box, Holding, TensorLayout, lacking
from elasticd_planner.spec.mesh import JobPlan
from elasticd_planner.value import Value, refuse

from elasticd_migration.source_choice import Share, SourceChooser


class Transfer(Value, frozen=True, kw_only=True, gc=False):
    """One box of a parameter or buffer from one device to another, in these roles: a value and its state that
    are held alike go together."""

    name: str
    roles: tuple[Role, ...]
    box: Box
    source: str
    destination: str

    def __post_init__(self) -> None:
        if self.source == self.destination:
            refuse(f"{self.name}: {self.source} cannot send to itself")

    @property
    def items(self) -> tuple[Item, ...]:
        """The parameter or buffer in each of the roles that go."""
        return tuple(Item(self.name, role) for role in self.roles)


class Lost(RuntimeError):
    """Parts of the state that no device holds; `boxes` has them by item. Nothing is ever filled in."""

    def __init__(self, boxes: Mapping[Item, Sequence[Box]]) -> None:
        self.boxes = {item: tuple(parts) for item, parts in boxes.items()}
        parts = [f"{item} {span(box)}" for item, lost in self.boxes.items() for box in lost]
        more = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
        super().__init__(
            f"no live device holds {', '.join(parts[:3])}{more}: go back to a snapshot or a checkpoint"
        )


def reshard(old: Holdings, new: Holdings, sizes: Mapping[Item, int]) -> tuple[Transfer, ...]:
    """Returns the transfers by which the layout `old` becomes `new`, in the model's order.

    old: without what is gone (`SurvivingLayouts`). A device that both plans bind, but to different incarnations
    of its worker, is gone by itself.
    sizes: bytes of one element by item, over all planes that it has; state that no step made yet has none.
    Sources: the receiver's node first; then such that no link is much busier than need be (`source_choice`).

    Raises `Lost` with all that nobody holds.
    """
    wanted = list(_wanted(old, new, sizes))
    lost = {item: alike.lack.lost for alike in wanted if alike.lack.lost for item in alike.items}
    if lost:
        raise Lost(lost)
    chooser = SourceChooser()
    classes = _classes(wanted, chooser)
    transfers: list[Transfer] = []
    for alike in wanted:
        name, roles = alike.items[0].name, tuple(item.role for item in alike.items)
        parts = _joined(_dealt(alike, classes[id(alike.lack)], chooser), alike.items[0], old, new)
        transfers += [
            Transfer(name=name, roles=roles, box=box, source=source, destination=destination)
            for destination, source, box in parts
        ]
    return tuple(transfers)


def bytes_lacking(old: Holdings, new: Holdings, sizes: Mapping[Item, int]) -> dict[str, int]:
    """Bytes that each device of `new` is to hold and does not hold; devices that lack nothing are left out.

    Counted by box differences alone, apart from `reshard`.
    """
    lacks: dict[str, int] = defaultdict(int)
    known: dict[object, dict[str, int]] = {}
    for item, key, before, after in _changed(old, new):
        if key not in known:
            boxes_by_device = lacking(before, after).items()
            known[key] = {device: sum(box.size for box in boxes) for device, boxes in boxes_by_device}
        element = _element(sizes, item)
        for device, count in known[key].items():
            lacks[device] += count * element
    return {device: size for device, size in lacks.items() if size}


def whole_bytes(layouts: Holdings, sizes: Mapping[Item, int]) -> int:
    """Bytes of the whole state, each element once: what a checkpoint of it would hold."""
    return sum(Box.whole(layouts.layout(item).shape).size * _element(sizes, item) for item in layouts.items)


def renewed(old: JobPlan, new: JobPlan) -> frozenset[str]:
    """Devices that both plans bind, but to different incarnations: the new worker owns no state."""
    return frozenset(
        device
        for device, incarnation in new.binding.items()
        if old.binding.get(device, incarnation) != incarnation
    )


def span(box: Box) -> str:
    """A box for a person to read, as the slice that it is: "[0:4, 8:16]"."""
    return f"[{', '.join(f'{a}:{b}' for a, b in zip(box.start, box.stop, strict=True))}]"


def _classes(wanted: Sequence[_Alike], chooser: SourceChooser) -> dict[int, list[int]]:
    """The class of every cell, by the identity of the lack that it is in: layers held alike share one."""
    classes: dict[int, list[int]] = {}
    elements: dict[int, int] = defaultdict(int)
    lacks = {id(alike.lack): alike.lack for alike in wanted}
    for alike in wanted:
        elements[id(alike.lack)] += alike.element
    for key, lack in lacks.items():
        classes[key] = [chooser.class_of(cell.destination, cell.holders) for cell in lack.cells]
        for index, cell in zip(classes[key], lack.cells, strict=True):
            chooser.add(index, cell.size * elements[key])
    chooser.balance()
    return classes


def _dealt(alike: _Alike, classes: Sequence[int], chooser: SourceChooser) -> Iterator[_Part]:
    for index, cell in zip(classes, alike.lack.cells, strict=True):
        size = cell.size * alike.element
        source = chooser.source(index, size)
        if source is not None:
            yield cell.destination, source, cell.box
        else:
            for share, box in _parts(cell.box, chooser.shares(index, size)):
                yield cell.destination, share, box


def _joined(parts: Iterable[_Part], item: Item, old: Holdings, new: Holdings) -> Iterator[_Part]:
    """Neighbours of one pair made one where together they are a box again that both ends have in one piece:
    borders of holders that were not chosen cut nothing."""
    pending: _Part | None = None
    for part in parts:
        if pending is not None:
            whole = None
            if pending[1] == part[1] and pending[0] == part[0]:
                whole = _together(pending, part[2], item, old, new)
            if whole is not None:
                pending = part[0], part[1], whole
                continue
            yield pending
        pending = part
    if pending is not None:
        yield pending


def _together(part: _Part, box: Box, item: Item, old: Holdings, new: Holdings) -> Box | None:
    destination, source, before = part
    whole = union(before, box)
    if whole is not None:
        for layouts, device in ((old, source), (new, destination)):
            if not any(held.contains(whole) for held in layouts.boxes(item, device)):
                return None
    return whole


def _changed(
    old: Holdings, new: Holdings
) -> Iterator[tuple[Item, tuple[Hashable, Hashable], TensorLayout, TensorLayout]]:
    """Old and new layout of every item that is held differently, with the families that it is of: items of
    the same two have equal holdings before and after, are compared once, and cost nothing where those stay."""
    if set(old.items) != set(new.items):
        unlike = sorted(set(old.items) ^ set(new.items))
        raise ValueError(f"old and new layout describe different models: {unlike[0]} is in one of them only")
    gone = renewed(old.plan, new.plan)
    known: dict[tuple[Hashable, Hashable], tuple[TensorLayout, TensorLayout] | None] = {}
    for item in new.items:
        key = old.family(item), new.family(item)
        if key not in known:
            before, after = old.layout(item), new.layout(item)
            if (before.shape, before.dtype) != (after.shape, after.dtype):
                raise ValueError(
                    f"{item}: {before.shape} {before.dtype} in the old layout, "
                    f"{after.shape} {after.dtype} in the new"
                )
            if gone:
                held = tuple(holding for holding in before.holdings if holding.device not in gone)
                before = msgspec.structs.replace(before, holdings=held)
            known[key] = None if before.holdings == after.holdings else (before, after)
        difference = known[key]
        if difference is not None:
            yield item, key, *difference


#: Destination, source, and the box that goes.
_Part = tuple[str, str, Box]


class _Cell(NamedTuple):
    """A box of `size` elements that a device lacks and that each of `holders` has in one piece."""

    destination: str
    box: Box
    size: int
    holders: tuple[str, ...]


class _Lack(NamedTuple):
    """The parts of one item that devices lack, and the boxes of it that nobody holds."""

    cells: tuple[_Cell, ...]
    lost: tuple[Box, ...]


class _Alike(NamedTuple):
    """Items that one choice of sources is made for: a parameter's value, and its state where that is held
    alike. `element`: bytes of one element of both."""

    items: tuple[Item, ...]
    lack: _Lack
    element: int


def _wanted(old: Holdings, new: Holdings, sizes: Mapping[Item, int]) -> Iterator[_Alike]:
    known: dict[object, _Lack] = {}
    same: dict[tuple[Hashable, Hashable], _Lack] = {}
    pending: _Alike | None = None
    for item, key, before, after in _changed(old, new):
        element = _element(sizes, item)
        if not element:
            continue
        if key not in same:
            held = before.holdings, after.holdings
            same[key] = known[held] if held in known else known.setdefault(held, _lack(before, after))
        lack = same[key]
        if pending is not None and pending.lack is lack and pending.items[0].name == item.name:
            pending = _Alike((*pending.items, item), lack, pending.element + element)
            continue
        if pending is not None:
            yield pending
        pending = _Alike((item,), lack, element)
    if pending is not None:
        yield pending


def _lack(before: TensorLayout, after: TensorLayout) -> _Lack:
    lacks = lacking(before, after)
    wanted = tuple(Holding(device=device, box=box) for device, boxes in lacks.items() for box in boxes)
    by_destination: dict[str, list[_Cell]] = {device: [] for device in lacks}
    try:
        for box, (holders,), needers in demands(before, msgspec.structs.replace(after, holdings=wanted)):
            for destination in needers:
                by_destination[destination].append(_Cell(destination, box, box.size, holders))
    except Uncovered as error:
        return _Lack((), error.boxes)
    return _Lack(tuple(chain.from_iterable(by_destination.values())), ())


def _parts(box: Box, shares: Sequence[Share]) -> Iterator[tuple[str, Box]]:
    """A box divided between its sources, in whole rows, as nearly as they allow."""
    if len(shares) == 1:
        yield shares[0].source, box
        return
    total = sum(share.size for share in shares)
    shape = box.shape
    dim = next((d for d, extent in enumerate(shape) if extent >= 4 * len(shares)), None)
    dim = max(range(len(shape)), key=lambda d: (shape[d], -d)) if dim is None else dim
    offset, start = 0, box.start[dim]
    for share in shares:
        offset += share.size
        stop = box.start[dim] + (2 * shape[dim] * offset + total) // (2 * total)
        if start < stop:
            yield share.source, box.cropped(dim, start, stop)
        start = stop


def _element(sizes: Mapping[Item, int], item: Item) -> int:
    """Bytes of one element. State that nobody describes was never made where nobody has any; else whoever had
    it is gone, and its bytes are not known: one stands for them, so that it is found to be lost."""
    if item in sizes:
        return sizes[item]
    if item.role != "state":
        raise ValueError(f"{item}: the bytes of one element are not known; sizes must name every tensor")
    return int(any(size for other, size in sizes.items() if other.role == "state"))
