"""From two layouts to transfers: what each device lacks, and which holder gives it.

Pure, and the same on every rank: only names, boxes and byte counts go in, and every choice has an order.
The total of the transfers is exactly the bytes that the destinations lack, each of them sent once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from elasticd_planner.boxes import Box, Holding, TensorLayout, cut, lacking, subtract
from elasticd_planner.layouts import Layouts
from elasticd_planner.plan import Plan
from elasticd_planner.value import Value, refuse


class Transfer(Value, frozen=True, kw_only=True):
    """One box of one tensor (its value and its optimizer state alike) from one device to another."""

    name: str
    box: Box
    source: str
    destination: str

    def __post_init__(self) -> None:
        if self.source == self.destination:
            refuse(f"{self.name}: {self.source} cannot send to itself")


class Lost(RuntimeError):
    """Parts of the state that no device holds; `boxes` has them by name. Nothing is ever filled in."""

    def __init__(self, boxes: Mapping[str, Sequence[Box]]) -> None:
        self.boxes = {name: tuple(parts) for name, parts in boxes.items()}
        parts = [f"{name} {span(box)}" for name, lost in self.boxes.items() for box in lost]
        more = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
        super().__init__(
            f"no live device holds {', '.join(parts[:3])}{more}: go back to a snapshot or a checkpoint"
        )


def reshard(
    old: Layouts | None, new: Layouts, sizes: Mapping[str, int], *, without: Collection[str] = ()
) -> tuple[Transfer, ...]:
    """What has to move so that the layout `old` becomes `new`.

    sizes: bytes of one element by tensor name, over all that moves with it (value, moments).
    without: devices of `old` whose copies are gone. A device that both plans bind, but to different
    incarnations of its worker, is one of them by itself.
    Without `old` the job starts: nobody holds anything yet, the caller initialises, nothing moves.
    Sources: the receiver's node first, then whoever has given the fewest bytes, then the order of holdings.

    Raises `Lost` with all that nobody holds.
    """
    if old is None:
        return ()
    given: dict[str, int] = defaultdict(int)
    lost: dict[str, tuple[Box, ...]] = {}
    transfers: list[Transfer] = []
    known: dict[tuple[object, object], _Wants] = {}  # the layers of one stage want alike
    for before, after in _changed(old, new, without):
        element = _element(sizes, after.name)
        key = before.holdings, after.holdings
        wants = known[key] if key in known else known.setdefault(key, _wants(before, after))
        if wants.lost:
            lost[after.name] = wants.lost
        for destination, cell, holders in wants.cells:
            source = _source(destination, holders, given)
            given[source] += cell.size * element
            transfers.append(Transfer(name=after.name, box=cell, source=source, destination=destination))
    if lost:
        raise Lost(lost)
    return tuple(joined(transfers))


def bytes_lacking(
    old: Layouts | None, new: Layouts, sizes: Mapping[str, int], *, without: Collection[str] = ()
) -> dict[str, int]:
    """Bytes that each device of `new` is to hold and does not hold; devices that lack nothing are left out.

    Without `old` all is lacking. Counted by box differences alone, apart from `reshard`.
    """
    lacks: dict[str, int] = defaultdict(int)
    if old is None:
        pairs: Iterator[tuple[TensorLayout | None, TensorLayout]] = (
            (None, new.parameter(name)) for name in new.names
        )
    else:
        pairs = iter(_changed(old, new, without))
    for before, after in pairs:
        for device, boxes in lacking(before, after).items():
            lacks[device] += sum(box.size for box in boxes) * _element(sizes, after.name)
    return dict(lacks)


def whole_bytes(layouts: Layouts, sizes: Mapping[str, int]) -> int:
    """Bytes of the whole state, each element once: what a checkpoint of it would hold."""
    return sum(Box.whole(layouts.parameter(name).shape).size * _element(sizes, name) for name in layouts.names)


def renewed(old: Plan, new: Plan) -> frozenset[str]:
    """Devices that both plans bind, but to different incarnations: the new worker owns no state."""
    return frozenset(
        device
        for device, incarnation in new.binding.items()
        if old.binding.get(device, incarnation) != incarnation
    )


def restrict(layout: TensorLayout, without: Collection[str]) -> TensorLayout:
    """`layout` as far as it is held by others than `without`."""
    held = tuple(holding for holding in layout.holdings if holding.device not in without)
    return TensorLayout(name=layout.name, shape=layout.shape, dtype=layout.dtype, holdings=held)


def span(box: Box) -> str:
    """A box for a person to read, as the slice that it is: "[0:4, 8:16]"."""
    return f"[{', '.join(f'{a}:{b}' for a, b in zip(box.start, box.stop, strict=True))}]"


def joined(transfers: Sequence[Transfer]) -> Iterator[Transfer]:
    """Transfers with neighbours of one pair made one where together they are a box again: borders of
    holders that were not chosen cut nothing."""
    pending: Transfer | None = None
    for transfer in transfers:
        whole = _union(pending, transfer) if pending is not None else None
        if pending is not None and whole is None:
            yield pending
        pending = Transfer(
            name=transfer.name,
            box=whole or transfer.box,
            source=transfer.source,
            destination=transfer.destination,
        )
    if pending is not None:
        yield pending


def _union(a: Transfer, b: Transfer) -> Box | None:
    if (a.name, a.source, a.destination) != (b.name, b.source, b.destination):
        return None
    sides = list(zip(a.box.start, a.box.stop, b.box.start, b.box.stop, strict=True))
    differ = [dim for dim, (a0, a1, b0, b1) in enumerate(sides) if (a0, a1) != (b0, b1)]
    if len(differ) != 1 or a.box.stop[differ[0]] != b.box.start[differ[0]]:
        return None
    return Box(start=a.box.start, stop=b.box.stop)


def _changed(
    old: Layouts, new: Layouts, without: Collection[str]
) -> Iterator[tuple[TensorLayout, TensorLayout]]:
    """Old and new layout of every tensor that is held differently; the others cost one comparison."""
    if set(old.names) != set(new.names):
        unlike = sorted(set(old.names) ^ set(new.names))
        raise ValueError(f"old and new layout describe different models: {unlike[0]} is in one of them only")
    gone = {*without, *renewed(old.plan, new.plan)}
    for name in new.names:
        before, after = old.parameter(name), new.parameter(name)
        if (before.shape, before.dtype) != (after.shape, after.dtype):
            raise ValueError(
                f"{name}: {before.shape} {before.dtype} in the old layout, "
                f"{after.shape} {after.dtype} in the new"
            )
        if gone:
            before = restrict(before, gone)
        if before != after:
            yield before, after


class _Wants(NamedTuple):
    """Of one tensor: (destination, box, who holds all of that box), and the boxes that nobody holds."""

    cells: tuple[tuple[str, Box, list[str]], ...]
    lost: tuple[Box, ...]


def _wants(before: TensorLayout, after: TensorLayout) -> _Wants:
    found: dict[Box, list[tuple[Box, list[str]]]] = {}  # replicas lack the same boxes
    lost: dict[Box, None] = {}
    cells: list[tuple[str, Box, list[str]]] = []
    for destination, boxes in lacking(before, after).items():
        for box in boxes:
            if box not in found:
                found[box] = list(_cells(box, before.holdings))
                lost.update(dict.fromkeys(subtract(box, sorted({holding.box for holding in before.holdings}))))
            cells += [(destination, cell, holders) for cell, holders in found[box]]
    return _Wants(cells=tuple(cells), lost=tuple(lost))


def _cells(box: Box, holdings: Sequence[Holding]) -> Iterator[tuple[Box, list[str]]]:
    """`box`, as far as it is held, in parts that each have one set of holders, with those holders."""
    overlaps = [(part, held.device) for held in holdings if (part := box.overlap(held.box)) is not None]
    for cell in cut([part for part, _ in overlaps]):
        yield cell, list(dict.fromkeys(device for part, device in overlaps if part.contains(cell)))


def _source(destination: str, holders: Sequence[str], given: Mapping[str, int]) -> str:
    node = _node(destination)
    near = [device for device in holders if _node(device) == node]
    return min(near or holders, key=lambda device: given.get(device, 0))


def _node(device: str) -> str:
    return device.rpartition("/")[0]


def _element(sizes: Mapping[str, int], name: str) -> int:
    if name not in sizes:
        raise ValueError(f"{name}: the bytes of one element are not known; sizes must name every tensor")
    return sizes[name]
