"""Annotations: a layout written as groups of devices, the state of each group, and the relation across them.

The form is that of HSPMD (Hetu v2, arXiv 2504.20490): `groups` is its device group union, `states`
its distributed states union, `across` its heterogeneous dimension. With DTensor's words: a state is what
placements on a mesh are, its axes are ordered as those of the mesh, and each group has a mesh of its own.

| | here | HSPMD | DTensor |
|---|---|---|---|
| a dimension in parts | `{0: 4}`; unevenly `{0: (3, 1)}` | d >= 0 | `Shard(0)` |
| copies | `{"same": 4}` | -1 | `Replicate()` |
| terms of a sum | `{"sum": 4}` | -2 | `Partial()` |

Layouts are boxes, and all that elasticd derives it derives from boxes. Annotations are a way to write layouts
(`layout_of`) and to read them (`annotated`), where two tiers suffice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise, product
from math import gcd, prod
from typing import Any, Literal

import msgspec

from elasticd_planner.spec.box import Box, Holding, TensorLayout, cells
from elasticd_planner.spec.model import apportion
from elasticd_planner.value import Invalid, Value, refuse

#: A dimension that is split; or copies, terms of a sum, the dimension that a parameter's rule cuts.
Axis = int | Literal["same", "sum", "tp"]

#: How many parts there are, or their proportions.
Parts = int | tuple[int, ...]

#: The axes of a group's devices, the outermost first: device numbers grow fastest along the last.
State = Mapping[Axis, Parts]

#: Each group has all of the tensor, a term of it, or a part of a dimension: equal parts, or in proportions.
Across = Literal["same", "sum"] | int | Mapping[int, tuple[int, ...]]


class Annotation(Value, frozen=True, kw_only=True, eq=False):
    """A layout in two tiers: how groups of devices share a tensor, and how the devices of each group do.

    A dimension that does not divide into its parts is apportioned: 10 rows in 3 parts are 4, 3 and 3.
    """

    groups: Sequence[Sequence[str]]  #: devices of each group, in the order of the state's axes
    states: Sequence[State]  #: of each group
    across: Across = "same"  #: the relation across the groups; of one group it says nothing

    def __post_init__(self) -> None:
        setting = msgspec.structs.force_setattr
        for group in self.groups:
            if isinstance(group, str):
                refuse(f"annotation: {group!r} is a device, and its group is ({group!r},)")
        setting(self, "groups", tuple(map(tuple, self.groups)))
        setting(self, "states", tuple(map(_plain, self.states)))
        if isinstance(self.across, Mapping):
            setting(self, "across", {dim: _weights(self.across, each) for dim, each in self.across.items()})
        if not self.groups or len(self.groups) != len(self.states):
            refuse(f"annotation: {len(self.groups)} groups need as many states, not {len(self.states)}")
        counts = Counter(device for group in self.groups for device in group)
        twice = [device for device, count in counts.items() if count > 1]
        if twice:
            refuse(f"annotation: groups share device {twice[0]}; each device is in one group, once")
        for group, state in zip(self.groups, self.states, strict=True):
            _check_state(group, state)
        self._check_across()

    def _check_across(self) -> None:
        across, count = self.across, len(self.groups)
        if isinstance(across, Mapping):
            if len(across) != 1:
                refuse(f"annotation: across={across!r} must name one dimension")
            ((dim, weights),) = across.items()
            if not _is_dimension(dim) or len(weights) != count or not all(map(_is_count, weights)):
                refuse(
                    f"annotation: across={across!r} must give a dimension as many positive proportions as "
                    f"there are groups: {count}"
                )
        elif across not in ("same", "sum") and not _is_dimension(across):
            refuse(f'annotation: across={across!r} must be "same", "sum", or a dimension')
        if across == "same" and len({_terms(state) for state in self.states}) > 1:
            refuse(
                f"annotation: groups that are the same have sums of {[_terms(s) for s in self.states]} terms; "
                'each has the whole sum, so give all states one "sum"'
            )

    @property
    def _key(self) -> object:
        """All that it says: dictionaries are equal in any order of their keys, states are not."""
        across = tuple(self.across.items()) if isinstance(self.across, Mapping) else self.across
        return self.groups, tuple(tuple(state.items()) for state in self.states), across

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Annotation) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def devices(self) -> tuple[str, ...]:
        """All devices, group by group."""
        return tuple(device for group in self.groups for device in group)

    def replace(self, **changes: Any) -> Annotation:
        """The annotation with other values of some fields, checked anew."""
        return msgspec.structs.replace(self, **changes)

    def layout(self, shape: Sequence[int], name: str = "tensor", dtype: str = "float32") -> TensorLayout:
        """Which device holds which box of a tensor of this shape. See `layout_of`."""
        return layout_of(self, name, shape, dtype)

    @classmethod
    def from_hspmd(
        cls, config: Mapping[str, Any], *, per_node: int = 8, nodes: Sequence[str] = ()
    ) -> Annotation:
        """Reads an entry of HSPMD's annotation plans.

        Args:
            config: with `split` (a list of parts for each dimension), `dup` (copies), `device_group_union` and
                `type`: "variable" or "placeholder". Of several groups both `split` and `dup` count with the
                groups: copies of a variable, parts of dimension 0 of a placeholder.
            per_node: devices of a node. Device 11 of nodes of eight is number 3 of the second node.
            nodes: their names, in order (empty: "n0", "n1", ...).

        Raises:
            Invalid: an entry is missing; its numbers do not fit the groups; a device is on none of the nodes.
        """
        try:
            kind, groups = config["type"], config["device_group_union"]
            split = {int(dim): list(parts) for dim, parts in sorted(config["split"].items())}
            copies = list(config["dup"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            refuse(f"HSPMD's annotation: {type(error).__name__}: {error}")
        if kind not in ("variable", "placeholder"):
            refuse(f"HSPMD's annotation: type {kind!r} is neither 'variable' nor 'placeholder'")
        size = len(groups)
        if {len(parts) for parts in (*split.values(), copies)} != {size}:
            refuse(f"HSPMD's annotation: {size} groups need as many entries of split and dup")
        states: list[State] = []
        for number in range(size):
            listed = [(dim, parts[number]) for dim, parts in split.items()]
            copied: tuple[Axis, int] = ("same", copies[number])
            axes: dict[Axis, int] = dict([copied, *listed] if kind == "variable" else [*listed, copied])
            shared: Axis = "same" if kind == "variable" else 0
            if axes.get(shared, 1) % size:
                refuse(f"HSPMD's annotation: {axes} of group {number} does not count its {size} groups")
            axes[shared] = axes.get(shared, 1) // size
            states.append({axis: parts for axis, parts in axes.items() if parts > 1})
        most = max((number for group in groups for number in group), default=0)
        if nodes and most >= per_node * len(nodes):
            refuse(f"HSPMD's annotation: device {most} is on none of {len(nodes)} nodes of {per_node} devices")
        names = nodes or [f"n{node}" for node in range(most // per_node + 1)]
        named = [[f"{names[number // per_node]}/{number % per_node}" for number in group] for group in groups]
        return cls(groups=named, states=states, across="same" if kind == "variable" else 0)

    def to_hspmd(
        self, dims: Iterable[int] = (), *, per_node: int = 8, nodes: Sequence[str] = ()
    ) -> dict[str, Any]:
        """The entry of HSPMD's annotation plans that `from_hspmd` reads.

        Args:
            dims: dimensions that are named though they are in one part.
            per_node: devices of a node.
            nodes: names of the nodes, in order (empty: "n0", "n1", ...).

        Raises:
            Invalid: it is uneven, has terms, or groups that are neither copies nor parts of dimension 0: the
                file has no word for these.
        """
        variable = self.across == "same" or len(self.groups) == 1
        uneven = any(not isinstance(parts, int) for state in self.states for parts in state.values())
        if uneven or self.across not in ("same", 0) or any({"sum", "tp"} & {*state} for state in self.states):
            refuse(f"HSPMD's files cannot say states {list(self.states)} across {self.across!r}")
        listed = sorted({dim for state in self.states for dim in state if isinstance(dim, int)} | {*dims})
        size = len(self.groups)
        axes: tuple[Axis, ...] = ("same", *listed)
        parts = {axis: [count_of(state.get(axis, 1)) for state in self.states] for axis in axes}
        shared: Axis = "same" if variable else 0
        parts[shared] = [count * size for count in parts.get(shared, [1] * size)]
        return {
            "split": {str(dim): parts[dim] for dim in listed},
            "dup": parts["same"],
            "device_group_union": [
                [_number(device, per_node, nodes) for device in group] for group in self.groups
            ],
            "type": "variable" if variable else "placeholder",
        }

    def merged(self) -> Annotation:
        """One group of copies instead of groups that are the same and have like states."""
        (state, *others) = self.states
        alike = all(tuple(other.items()) == tuple(state.items()) for other in others)
        if self.across != "same" or not others or not alike or "same" in state:
            return self
        return Annotation(groups=[self.devices], states=[{"same": len(self.groups), **state}])


def layout_of(annotation: Annotation, name: str, shape: Sequence[int], dtype: str) -> TensorLayout:
    """Which device holds which box of a tensor, as an annotation says it.

    Args:
        annotation: of the tensor.
        name: of the tensor.
        shape: of the whole tensor.
        dtype: as torch names it: "bfloat16".

    Raises:
        Invalid: the annotation splits a dimension that the tensor does not have, or into more parts than it has
            elements; or it leaves a dimension to a model's rules ("tp").
    """
    whole, count = Box.whole(shape), len(annotation.groups)
    across = annotation.across
    holdings: list[Holding] = []
    for number, (group, state) in enumerate(zip(annotation.groups, annotation.states, strict=True)):
        region, outer = whole, tuple[str, ...]()
        if across == "sum" and count > 1:
            outer = (str(number),)
        elif isinstance(across, Mapping):
            ((dim, weights),) = across.items()
            region = _part(name, whole, dim, weights, number)
        elif isinstance(across, int):
            region = _part(name, whole, across, count, number)
        for device, place in zip(group, _places(state), strict=True):
            box, term = region, outer
            for axis, index in place.items():
                if axis == "sum":
                    term = (*term, str(index)) if _terms(state) > 1 else term
                elif axis == "tp":
                    refuse(
                        f"{name}: 'tp' is the dimension that a parameter's rule cuts, which plan_of knows; "
                        "name the dimension here"
                    )
                elif axis != "same":
                    box = _part(name, box, axis, state[axis], index)
            holdings.append(Holding(device=device, box=box, partial=".".join(term) or None))
    return TensorLayout(name=name, shape=tuple(shape), dtype=dtype, holdings=tuple(holdings))


def annotated(layout: TensorLayout) -> Annotation | None:
    """The annotation that says a layout, with as few groups as it finds; None where two tiers do not suffice.

    Its `layout` has the same boxes on the same devices, and the same holdings of each term of a sum; terms may
    have other names. A device that holds several boxes, or an empty one, has no place in an annotation.
    """
    held = layout.holdings
    if not held or len({h.device for h in held}) < len(held) or any(h.box.empty for h in held):
        return None
    whole = Box.whole(layout.shape)
    for found in (_one_tier(held, whole), _copies(held, whole), _sums(held, whole), *_slabs(held, whole)):
        if found is not None and alike(found.layout(layout.shape), layout):
            return found
    return None


def alike(one: TensorLayout, other: TensorLayout) -> bool:
    """Returns True if two layouts of a tensor say the same of each device, whatever terms of sums are
    called."""
    return one.shape == other.shape and _meaning(one) == _meaning(other)


def _meaning(layout: TensorLayout) -> object:
    """The boxes by device; and of each cell, who holds the value, and which devices hold one term."""
    boxes = sorted((holding.device, holding.box) for holding in layout.holdings)
    shared: dict[Box, object] = {}
    for cell, holdings in cells(layout.holdings):
        terms: dict[str | None, set[str]] = {}
        for holding in holdings:
            terms.setdefault(holding.partial, set()).add(holding.device)
        values = frozenset(terms.pop(None, ()))
        shared[cell] = values, frozenset(map(frozenset, terms.values()))
    return boxes, shared


def _is_dimension(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_count(value: object) -> bool:
    return _is_dimension(value) and value != 0


def _weights(across: Any, weights: Any) -> tuple[int, ...]:
    if not isinstance(weights, Sequence):
        refuse(
            f"annotation: across={across!r} must give proportions, as {{0: (3, 1)}}; of equal parts, across=0"
        )
    return tuple(weights)


def _plain(state: State) -> State:
    if not isinstance(state, Mapping):
        refuse(f"annotation: state {state!r} is no mapping of axes to parts, as {{0: 4}}")
    return {axis: tuple(parts) if isinstance(parts, list) else parts for axis, parts in state.items()}


def _terms(state: State) -> int:
    return count_of(state.get("sum", 1))


def _check_state(group: Sequence[str], state: State) -> None:
    for axis, parts in state.items():
        if axis not in ("same", "sum", "tp") and not _is_dimension(axis):
            refuse(f'state {state}: {axis!r} is neither a dimension nor "same", "sum" or "tp"')
        if axis in ("same", "sum") and not isinstance(parts, int):
            refuse(f"state {state}: {axis!r} is a number of devices, not {parts!r}")
        if not _is_count(parts) and not (isinstance(parts, tuple) and parts and all(map(_is_count, parts))):
            refuse(f"state {state}: {parts!r} is neither a positive number of parts nor their proportions")
    if "tp" in state and any(isinstance(axis, int) for axis in state):
        refuse(f"state {state}: 'tp' stands for the dimension that a rule cuts; name no other beside it")
    places = prod(map(count_of, state.values()))
    if not group or places != len(group):
        copies = f', or "same": {len(group) // places} more' if group and len(group) % places == 0 else ""
        refuse(
            f"state {state} has places for {places} devices, its group has {len(group)} "
            f"({', '.join(group[:4])}{', ...' if len(group) > 4 else ''}): give it as many{copies}"
        )


def count_of(parts: Parts) -> int:
    """The number of parts."""
    return parts if isinstance(parts, int) else len(parts)


def weights_of(parts: Parts) -> tuple[int, ...]:
    """The proportions of the parts, in lowest terms."""
    if isinstance(parts, int):
        return (1,) * parts
    common = gcd(*parts)
    return tuple(part // common for part in parts)


def _places(state: State) -> Iterator[dict[Axis, int]]:
    """The index of each device of a group along each axis."""
    for indices in product(*(range(count_of(parts)) for parts in state.values())):
        yield dict(zip(state, indices, strict=True))


def _part(name: str, box: Box, dim: int, parts: Parts, index: int) -> Box:
    if dim >= len(box.start):
        refuse(f"{name}: it has {len(box.start)} dimensions, and the annotation splits dimension {dim}")
    extent, weights = box.shape[dim], weights_of(parts)
    if extent < len(weights):
        refuse(f"{name}: dimension {dim} has {extent} elements there, too few for {len(weights)} parts")
    edges = list(accumulate(apportion(extent, weights), initial=box.start[dim]))
    return box.cropped(dim, edges[index], edges[index + 1])


def _number(device: str, per_node: int, nodes: Sequence[str]) -> int:
    node, _, index = device.rpartition("/")
    if nodes:
        if node not in nodes or not index.isdigit():
            refuse(f"device {device} has no number in HSPMD's files: its node is none of {', '.join(nodes)}")
        return nodes.index(node) * per_node + int(index)
    if not (node.startswith("n") and node[1:].isdigit() and index.isdigit()):
        refuse(f"device {device} has no number in HSPMD's files; those are called n0/0, n0/1, ...")
    return int(node[1:]) * per_node + int(index)


# -- reading layouts -----------------------------------------------------------------------------------------

_Held = Sequence[Holding]


def _one_tier(held: _Held, whole: Box) -> Annotation | None:
    return _joined([_read(held, whole)], "same")


def _copies(held: _Held, whole: Box) -> Annotation | None:
    """Consecutive groups, each as small as it can be, that have the whole tensor each."""
    terms = list(dict.fromkeys(holding.partial for holding in held))
    groups: list[tuple[tuple[str, ...], State] | None] = []
    begin = 0
    counts: Counter[tuple[str | None, Box]] = Counter()
    for end, holding in enumerate(held, 1):
        counts[holding.partial, holding.box] += 1
        size = sum(box.size for _, box in counts)
        if size == len(terms) * whole.size and len(set(counts.values())) == 1:
            found = _read(held[begin:end], whole, terms)
            if found is not None:
                groups.append(found)
                begin, counts = end, Counter()
    return _joined(groups, "same") if begin == len(held) else None


def _sums(held: _Held, whole: Box) -> Annotation | None:
    """A group for each term."""
    by_term: dict[str | None, list[Holding]] = {}
    for holding in held:
        by_term.setdefault(holding.partial, []).append(holding)
    return _joined([_read(part, whole) for part in by_term.values()], "sum") if None not in by_term else None


def _slabs(held: _Held, whole: Box) -> Iterator[Annotation | None]:
    """For each dimension: a group for each part of it that no box reaches out of."""
    for dim in range(len(whole.start)):
        groups: list[tuple[int, list[Holding]]] = []  # with the end of the part
        for holding in sorted(held, key=lambda holding: holding.box.start[dim]):
            stop = holding.box.stop[dim]
            if groups and holding.box.start[dim] < groups[-1][0]:
                groups[-1] = max(groups[-1][0], stop), [*groups[-1][1], holding]
            else:
                groups.append((stop, [holding]))
        edges = [whole.start[dim], *(stop for stop, _ in groups)]
        order = {holding.device: number for number, holding in enumerate(held)}
        read = [
            _read(sorted(part, key=lambda holding: order[holding.device]), whole.cropped(dim, start, stop))
            for (start, stop), (_, part) in zip(pairwise(edges), groups, strict=True)
        ]
        parts = _parts([b - a for a, b in pairwise(edges)])
        yield _joined(read, dim if isinstance(parts, int) else {dim: parts})


def _joined(groups: Sequence[tuple[tuple[str, ...], State] | None], across: Across) -> Annotation | None:
    if not groups or None in groups:
        return None
    devices, states = zip(*(group for group in groups if group is not None), strict=True)
    try:
        return Annotation(groups=devices, states=states, across=across)
    except Invalid:  # copies with sums of unlike numbers of terms
        return None


def _read(
    held: _Held, region: Box, terms: Sequence[str | None] | None = None
) -> tuple[tuple[str, ...], State] | None:
    """The devices of one group, in the order of the axes of its state; None where their boxes are no grid."""
    terms = list(dict.fromkeys(holding.partial for holding in held)) if terms is None else terms
    if None in terms and len(terms) > 1:
        return None
    axes: dict[Axis, int] = {"sum": len(terms)}
    sizes: dict[Axis, Parts] = {"sum": len(terms)}
    ranges: list[dict[tuple[int, int], int]] = []
    for dim in range(len(region.start)):
        distinct = sorted({(holding.box.start[dim], holding.box.stop[dim]) for holding in held})
        joints = [region.start[dim], *(stop for _, stop in distinct)]
        if list(pairwise(joints)) != distinct or joints[-1] != region.stop[dim]:
            return None
        ranges.append({part: index for index, part in enumerate(distinct)})
        axes[dim], sizes[dim] = len(distinct), _parts([b - a for a, b in distinct])
    places = [
        (terms.index(h.partial), *map(dict.__getitem__, ranges, zip(h.box.start, h.box.stop, strict=True)))
        for h in held
    ]
    counts = Counter(places)
    if len(counts) != prod(axes.values()) or len(set(counts.values())) > 1:
        return None
    copies = len(held) // len(counts)
    sizes["same"] = copies
    order = _order(places, list(axes), axes, copies)
    if order is None:  # devices as they are listed come in the order of no state
        held = [held[number] for number in sorted(range(len(held)), key=places.__getitem__)]
        order = [axis for axis in (*axes, "same") if count_of(sizes[axis]) > 1]
    return tuple(holding.device for holding in held), {axis: sizes[axis] for axis in order}


def _order(
    places: Sequence[tuple[int, ...]], axes: Sequence[Axis], sizes: Mapping[Axis, int], copies: int
) -> list[Axis] | None:
    """The order of axes, the outermost first, in which devices come as they are listed; None: in no order."""
    strides = {
        axis: next(at for at, place in enumerate(places) if place[column] != places[0][column])
        for column, axis in enumerate(axes)
        if sizes[axis] > 1
    }
    found: list[Axis] = []  # the innermost first
    counts = dict(sizes) | {"same": copies}
    inner, left = 1, copies
    for axis in sorted(strides, key=strides.__getitem__):
        if strides[axis] != inner and left > 1:
            found.append("same")
            inner, left = inner * copies, 1
        found.append(axis)
        inner *= sizes[axis]
    found += ["same"] if left > 1 else []
    found.reverse()
    split = [axis for axis in axes if sizes[axis] > 1]
    expected = [
        tuple(dict(zip(found, indices, strict=True)).get(axis, 0) if axis in split else 0 for axis in axes)
        for indices in product(*(range(counts[axis]) for axis in found))
    ]
    return found if expected == list(places) else None


def _parts(sizes: Sequence[int]) -> Parts:
    """Lengths as a number of parts where they are apportioned evenly, else as proportions."""
    even = apportion(sum(sizes), (1,) * len(sizes))
    return len(sizes) if even == tuple(sizes) else weights_of(tuple(sizes))
