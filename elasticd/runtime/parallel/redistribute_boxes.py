"""Tensors of any group of devices from one layout to another, and their gradients back, in boxes.

`redistribute.py` has the tensors of a TP group, cut along one dimension, whose other dimensions may have any
length. Here layouts are of the whole tensor: boxes in all dimensions, terms of a sum, replicas, devices that
hold nothing. Collectives among some of the members go over groups of these, made when they are first used. What
goes from one device to another is a message in the group of all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import msgspec
import torch
from elasticd_planner.layout.resolve import Cell, Communication, dual, resolve
from elasticd_planner.layout.two_step_sums import in_two_steps
from elasticd_planner.spec.box import Box, TensorLayout
from torch import Tensor

from elasticd.runtime.comm.groups import Group
from elasticd.runtime.model.bundle import FLOATING, OTHERS
from elasticd.runtime.parallel.redistribute import passed

#: The tag of messages; no other messages of a group have it.
_TAG = 1 << 26
#: Redistributions that a group keeps; the one made first makes room.
_KEPT = 64
#: The types of tensors that gloo sends, gathers and adds.
_TYPES = (*FLOATING, *OTHERS)

#: What a device has: boxes and their values.
_Parts = list[tuple[Box, Tensor]]


def redistribute(
    x: Tensor, source: TensorLayout, target: TensorLayout, group: Group, *, add: bool = False
) -> Tensor:
    """Takes a member's part of a tensor in one layout, and gives its part in another. Call it on every member,
    and run the backward pass through its result on every member.

    Args:
        x: this member's part in the source's layout; an empty tensor where it has none. If it requires a
            gradient on one member, it must on all.
        source: how the members have the tensor. A member has one box, or none.
        target: how they are to have it.
        group: its members are all devices of both layouts.
        add: members with one value of the target use it in ways of their own, so that its gradient is the sum
            of theirs; else they compute the same with it.

    Returns:
        Its part in the target's layout, differentiable; an empty tensor where it has none.

    Raises:
        ValueError: `x` has another shape than this member's part, or a type that does not travel; a device is
            no member of the group; a device has several boxes. At the first call with these layouts also: the
            members do not agree on them, on the type, or on whether a gradient is required.
        Invalid: see `elasticd_planner.layout.resolve.resolve`.
    """
    shared = _Shared.of(group)
    key = source, target, add, x.dtype, x.requires_grad and torch.is_grad_enabled()
    way = shared.ways.get(key) or _Way(group, source, target, shared, add=add)
    if tuple(x.shape) != way.shape:
        raise ValueError(
            f"{source.name}: {group.me} gave a tensor of shape {list(x.shape)}, and its part of the layout has "
            f"{list(way.shape)}"
        )
    if key not in shared.ways:
        _check_agreement(group, *key)
        if len(shared.ways) >= _KEPT:
            shared.ways.pop(next(iter(shared.ways)))
        shared.ways[key] = way
    return passed(x, way)


def _check_agreement(
    group: Group, source: TensorLayout, target: TensorLayout, add: bool, dtype: torch.dtype, needs: bool
) -> None:
    """Refuses, on all members, what they call in unlike ways: bytes of one type would be read as another, or
    members would wait for messages that nobody sends."""
    name = source.name
    if dtype not in _TYPES:
        known = ", ".join(str(each).removeprefix("torch.") for each in _TYPES)
        raise ValueError(f"{name}: {group.me} gave a tensor of {dtype}, and types that travel are {known}")
    source, target = (msgspec.structs.replace(each, dtype="any") for each in (source, target))
    digest = hashlib.blake2b(msgspec.json.encode([source, target, add]), digest_size=7).digest()
    mine = [_TYPES.index(dtype), int(needs), int.from_bytes(digest, "little")]
    words = group.all_gather(torch.tensor(mine)).tolist()
    first = words[0]
    rank = next((rank for rank, said in enumerate(words) if said != first), None)
    if rank is None:
        return
    one, other, its = group.members[0], group.members[rank], words[rank]
    if its[0] != first[0]:
        there, here = _TYPES[first[0]], _TYPES[its[0]]
        raise ValueError(
            f"{name}: it is of {there} on {one}, and of {here} on {other}: give one type on all devices, also "
            f"where a device has no part of it: torch.empty(0, dtype={there})"
        )
    if its[1] != first[1]:
        where, lacks = (one, other) if first[1] else (other, one)
        raise ValueError(
            f"{name}: it requires a gradient on {where}, and on {lacks} it does not: call requires_grad_() on "
            "all devices, also where a device has no part of it"
        )
    raise ValueError(f"{name}: {one} and {other} call it with unlike layouts, shapes or add=")


class _Shared:
    """The state that all redistributions of one member over one group share: groups of some of the members, and
    messages that may still be under way."""

    def __init__(self, group: Group) -> None:
        self.ways: dict[object, _Way] = {}
        self._group = group
        self._teams: dict[tuple[str, ...], Group] = {group.members: group}
        self._sent: list[int] = []

    @classmethod
    def of(cls, group: Group) -> _Shared:
        """Kept with the group, so that it ends with it."""
        kept = vars(group)
        if "redistributions" not in kept:
            kept["redistributions"] = cls(group)
        found: _Shared = kept["redistributions"]
        return found

    def team(self, devices: tuple[str, ...]) -> Group:
        """The group of some of the members."""
        if devices not in self._teams:
            self._teams[devices] = self._group.plan_groups.group(devices, self._group.label)
        return self._teams[devices]

    def send(self, parts: Sequence[Tensor], to: str) -> None:
        """Sends a message, which is kept until it has arrived."""
        joined = torch.cat([part.reshape(-1) for part in parts])
        self._sent.append(self._group.send(joined, self._group.members.index(to), _TAG, self._group.label))

    def receive(self, cells: Sequence[Cell], source: str, like: Tensor) -> list[Tensor]:
        """Receives what `send` sends of these cells."""
        came = like.new_empty(sum(cell.box.size for cell in cells))
        self._group.receive(came, self._group.members.index(source), _TAG, self._group.label)
        return _split(came, cells)

    def all_received(self) -> None:
        """Drops all messages sent before. All members call this: who does has received what was sent to it."""
        self._group.all_reduce(torch.zeros(1))
        self._group.arrived(self._sent)
        self._sent = []


class _Way:
    """A redistribution, there and back, of one member."""

    def __init__(
        self, group: Group, source: TensorLayout, target: TensorLayout, shared: _Shared, *, add: bool
    ) -> None:
        for layout in (source, target):
            for holding in layout.holdings:
                if holding.device not in group.members:
                    raise ValueError(
                        f"{layout.name}: {holding.device} is not in the group {', '.join(group.members)}"
                    )
                if len(layout.of(holding.device)) > 1:
                    raise ValueError(f"{layout.name}: {holding.device} has several boxes of one layout")
        self.shape = source.of(group.me)[0].shape if source.of(group.me) else (0,)
        self.forward = _Program(group, source, target, shared)
        self.backward = _Program(group, dual(target, add=add), dual(source), shared)


class _Program:
    """The operations by which one member gets from one layout to another."""

    def __init__(self, group: Group, source: TensorLayout, target: TensorLayout, shared: _Shared) -> None:
        self._me, self._shared = group.me, shared
        self._from, self._to = source.of(group.me), target.of(group.me)
        self._hops: list[tuple[tuple[Communication, ...], tuple[Box, ...]]] = []
        self._messages = False
        before = source
        for after in in_two_steps(source, target):
            steps = resolve(before, after, group.members)
            self._messages |= any(step.operation in ("send", "sum", "relay") for step in steps)
            self._hops.append((tuple(s for s in steps if group.me in s.devices), after.of(group.me)))
            before = after

    def __call__(self, x: Tensor) -> Tensor:
        if self._messages:
            self._shared.all_received()
        held: _Parts = [(box, x) for box in self._from]
        for steps, boxes in self._hops:
            made = [(box, x.new_empty(box.shape)) for box in boxes]
            for step in steps:
                getattr(self, f"_{step.operation}")(step, made if step.operation == "relay" else held, made, x)
            held = made
        return held[0][1] if held else x.new_empty(0)

    def _keep(self, step: Communication, held: _Parts, made: _Parts, like: Tensor) -> None:
        _write(made, step.cells, [_read(held, cell.box) for cell in step.cells])

    def _zero(self, step: Communication, held: _Parts, made: _Parts, like: Tensor) -> None:
        _write(made, step.cells, [like.new_zeros(cell.box.shape) for cell in step.cells])

    def _send(self, step: Communication, held: _Parts, made: _Parts, like: Tensor) -> None:
        source, *others = step.devices
        if self._me == source:
            parts = [_read(held, cell.box) for cell in step.cells]
            for device in others:
                self._shared.send(parts, device)
        else:
            _write(made, step.cells, self._shared.receive(step.cells, source, like))

    _relay = _send

    def _sum(self, step: Communication, held: _Parts, made: _Parts, like: Tensor) -> None:
        """Terms are added in the order of the ranks."""
        for device in step.devices:
            given = [c for c in step.cells if self._me in c.sources and c.needers == (device,)]
            if given and device != self._me:
                self._shared.send([_read(held, cell.box) for cell in given], device)
        mine = [cell for cell in step.cells if cell.needers == (self._me,)]
        terms: dict[tuple[str, Box], Tensor] = {}
        for device in step.devices:
            cells = [cell for cell in mine if device in cell.sources]
            if not cells:
                continue
            if device == self._me:
                came = [_read(held, cell.box) for cell in cells]
            else:
                came = self._shared.receive(cells, device, like)
            terms |= {(device, cell.box): part for cell, part in zip(cells, came, strict=True)}
        _write(made, mine, [_total(terms[device, cell.box] for device in cell.sources) for cell in mine])

    def _all_reduce(self, step: Communication, held: _Parts, made: _Parts, like: Tensor) -> None:
        """Of replicas of one term one counts; the others add -0.0, which changes no sum."""
        terms = [
            _read(held, cell.box) if self._me in cell.sources else torch.full_like(_read(held, cell.box), -0.0)
            for cell in step.cells
        ]
        total = self._shared.team(step.devices).all_reduce(torch.cat([term.reshape(-1) for term in terms]))
        sums = zip(step.cells, _split(total, step.cells), strict=True)
        wanted = [(cell, part) for cell, part in sums if self._me in cell.needers]
        _write(made, [cell for cell, _ in wanted], [part for _, part in wanted])

    #: Gloo cannot scatter sums unevenly: all get them all, and each takes its own.
    _reduce_scatter = _all_reduce

    def _all_gather(self, step: Communication, held: _Parts, made: _Parts, like: Tensor) -> None:
        """Padded to the longest, since all members send as much."""
        by_member = {device: [c for c in step.cells if c.sources == (device,)] for device in step.devices}
        most = max(sum(cell.box.size for cell in cells) for cells in by_member.values())
        mine = [_read(held, cell.box).reshape(-1) for cell in by_member[self._me]]
        padded = torch.cat([*mine, like.new_zeros(most - sum(part.numel() for part in mine))])
        stacked = self._shared.team(step.devices).all_gather(padded)
        for device, came in zip(step.devices, stacked, strict=True):
            _write(made, by_member[device], _split(came, by_member[device]))


def _read(parts: _Parts, box: Box) -> Tensor:
    holder, values = next((holder, values) for holder, values in parts if holder.contains(box))
    return values[box.slices(holder)]


def _write(parts: _Parts, cells: Sequence[Cell], values: Iterable[Tensor]) -> None:
    for cell, value in zip(cells, values, strict=True):
        for box, to in parts:
            if box.contains(cell.box):
                to[cell.box.slices(box)] = value


def _split(flat: Tensor, cells: Sequence[Cell]) -> list[Tensor]:
    sizes = [cell.box.size for cell in cells]
    parts = flat[: sum(sizes)].split(sizes) if sizes else ()
    return [part.view(cell.box.shape) for part, cell in zip(parts, cells, strict=True)]


def _total(terms: Iterable[Tensor]) -> Tensor:
    first, *others = terms
    total = first.clone()
    for term in others:
        total += term
    return total
