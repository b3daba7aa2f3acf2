"""Layouts of a device mesh: the boxes of all devices, from the shape of the mesh and the tensors' placements.

A dimension of a tensor that is cut in a dimension of the mesh goes to its devices in parts of one size, rounded
up (`torch.chunk`): the last parts may be smaller, or empty. A dimension that is cut twice is cut from the first
mesh dimension to the last. A strided placement cuts first as later dimensions will, then inside each of those
parts; where sizes are not even, a device may so have several runs of indices. The runs of a tensor's dimensions
together are its boxes, in the order in which the local tensor has them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property
from itertools import product

from elasticd_planner.layout.layouts import ROLES, Item
from elasticd_planner.spec.box import Box, Holding, TensorLayout
from elasticd_planner.spec.mesh import MeshModel, MeshPlan, Placement

#: Indices [start, stop).
_Run = tuple[int, int]

#: Shape, dtype and placements: tensors that have them in common are held alike.
_Alike = tuple[tuple[int, ...], str, tuple[Placement, ...]]


class MeshLayouts:
    """The layouts of a model's tensors on the mesh of one plan. The state of a parameter is cut as it is."""

    specs: MeshModel  #: of the model, under each mesh that it may have
    plan: MeshPlan

    def __init__(self, specs: MeshModel, plan: MeshPlan) -> None:
        self.specs, self.plan = specs, plan
        self._mesh = specs.mesh(plan.names)
        self._tensors = {tensor.name: tensor for tensor in specs.tensors}
        self._numbers: dict[_Alike, int] = {}
        self._boxes: dict[_Alike, dict[str, tuple[Box, ...]]] = {}
        self._holdings: dict[_Alike, tuple[Holding, ...]] = {}  # one object for all that are held alike
        self._layouts: dict[str, TensorLayout] = {}

    @cached_property
    def items(self) -> tuple[Item, ...]:
        """All that is held, in the model's order."""
        return tuple(Item(tensor.name, role) for tensor in self.specs.tensors for role in ROLES[tensor.kind])

    @property
    def trained(self) -> tuple[str, ...]:
        """Names of the parameters that have a gradient."""
        return tuple(tensor.name for tensor in self.specs.tensors if tensor.kind == "trained")

    def family(self, item: Item) -> Hashable:
        """Items with equal keys have equal holdings, shapes and dtypes under this plan."""
        return self._numbers.setdefault(self._alike(item.name), len(self._numbers))

    def layout(self, item: Item) -> TensorLayout:
        """The layout of an item. A device with no element of it is left out."""
        if item.name not in self._layouts:
            tensor, key = self._tensors[item.name], self._alike(item.name)
            if key not in self._holdings:
                self._holdings[key] = tuple(
                    Holding(device=device, box=box)
                    for device, boxes in self._held(item.name).items()
                    for box in boxes
                )
            self._layouts[item.name] = TensorLayout(
                name=tensor.name, shape=tensor.shape, dtype=tensor.dtype, holdings=self._holdings[key]
            )
        return self._layouts[item.name]

    def boxes(self, item: Item, device: str) -> tuple[Box, ...]:
        """The boxes that one device holds of an item, in the order of its local tensor."""
        return self._held(item.name).get(device, ())

    def own(self, item: Item, device: str) -> tuple[Box, ...]:
        """The boxes of an item that a device has without what others send it: all that it holds."""
        return self.boxes(item, device)

    def held(self, device: str) -> dict[Item, tuple[Box, ...]]:
        """All that one device holds: the boxes of each item."""
        boxes = {item: self.boxes(item, device) for item in self.items}
        return {item: held for item, held in boxes.items() if held}

    def _alike(self, name: str) -> _Alike:
        tensor = self._tensors[name]
        return tensor.shape, tensor.dtype, tensor.placements[self._mesh]

    def _held(self, name: str) -> dict[str, tuple[Box, ...]]:
        """By device, in rank order."""
        key = self._alike(name)
        if key not in self._boxes:
            boxes = placed_boxes(self._tensors[name].shape, self.plan.shape, key[2])
            by_rank = zip(self.plan.members, boxes, strict=True)
            self._boxes[key] = {device: held for device, held in by_rank if held}
        return self._boxes[key]


def placed_boxes(
    shape: Sequence[int], mesh: Sequence[int], placements: Sequence[Placement]
) -> Iterator[tuple[Box, ...]]:
    """The boxes of each rank of a mesh, in rank order; of one without an element none.

    Args:
        shape: [elements] of the tensor.
        mesh: [devices] of each dimension of the mesh.
        placements: of the tensor in each dimension of the mesh.
    """
    cuts = [[d for d, placement in enumerate(placements) if placement.dim == dim] for dim in range(len(shape))]
    known: dict[tuple[int, tuple[int, ...]], tuple[_Run, ...]] = {}
    for at in product(*map(range, mesh)):
        runs = []
        for dim, extent in enumerate(shape):
            key = dim, tuple(at[d] for d in cuts[dim])
            if key not in known:
                known[key] = _runs(extent, cuts[dim], mesh, placements, at)
            runs.append(known[key])
        yield tuple(
            Box(start=tuple(start for start, _ in run), stop=tuple(stop for _, stop in run))
            for run in product(*runs)
        )


def _runs(
    extent: int, cuts: Sequence[int], mesh: Sequence[int], placements: Sequence[Placement], at: Sequence[int]
) -> tuple[_Run, ...]:
    """The indices of one dimension of a tensor that the rank at these coordinates has, in order."""
    runs: tuple[_Run, ...] = ((0, extent),) if extent else ()
    for d in cuts:
        length = sum(stop - start for start, stop in runs)
        later = math.prod(mesh[other] for other in cuts if other > d) if placements[d].strided else 1
        parts = (_part(*part, mesh[d], at[d]) for part in (_part(0, length, later, j) for j in range(later)))
        runs = _joined(run for start, stop in parts for run in _selected(runs, start, stop))
    return runs


def _part(start: int, stop: int, parts: int, index: int) -> _Run:
    """One of `parts` parts of [start, stop), each of one size rounded up, as far as it goes."""
    size = -(-(stop - start) // parts)
    return min(start + size * index, stop), min(start + size * (index + 1), stop)


def _selected(runs: Sequence[_Run], start: int, stop: int) -> Iterator[_Run]:
    """The indices of some runs at the positions [start, stop)."""
    before = 0
    for first, last in runs:
        low, high = max(start - before, 0), min(stop - before, last - first)
        if low < high:
            yield first + low, first + high
        before += last - first


def _joined(runs: Iterator[_Run]) -> tuple[_Run, ...]:
    """The same runs, neighbours as one."""
    joined: list[_Run] = []
    for start, stop in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return tuple(joined)
