"""The description of a state that moves: planes and scalars of every item, and what the whole job has once.

A plane is an element-wise tensor of the item's shape: a parameter's value, a moment of it, a buffer. A scalar
is state that a parameter has once, as AdamW's step counter. Schemas travel as JSON between ranks, so that
joiners know them too, and are merged in rank order; all come to the same result, or to the same error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Literal

import msgspec
from elasticd_planner.layout.layouts import Item, Role
from elasticd_planner.value import StoredValue, Value

#: The plane of a value or a buffer.
VALUE = "value"
#: The plane of a parameter's state that is its master weight, where the value is a rounded copy of it.
MASTER = "master"


class Disagreement(RuntimeError):
    """Ranks describe one item in different ways, or one of them cannot describe it."""


class Plane(Value, frozen=True, kw_only=True):
    """One element-wise tensor; `dtype` as torch names it ("float32"), `itemsize` in bytes."""

    name: str
    dtype: str
    itemsize: int


class Scalar(Value, frozen=True, kw_only=True, omit_defaults=True):
    """One value beside the planes, kept bit by bit.

    text: a decimal integer, `float.hex()`, or for a 0-dim tensor its bytes as hexadecimal digits; `dtype`
    and `device` ("cpu", "cuda") are a tensor's.
    """

    name: str
    kind: Literal["none", "bool", "int", "float", "tensor"]
    text: str = ""
    dtype: str = ""
    device: str = ""


class TensorSchema(Value, frozen=True, kw_only=True, omit_defaults=True):
    """The planes and scalars of one item, each sorted by name. State that no step made yet has neither."""

    planes: tuple[Plane, ...] = ()
    scalars: tuple[Scalar, ...] = ()

    @property
    def element(self) -> int:
        """Bytes of one element over all planes."""
        return sum(plane.itemsize for plane in self.planes)


class Group(Value, frozen=True, kw_only=True):
    """One parameter group of an optimizer: its settings (learning rate, betas, ...) as `settings` writes them,
    and the parameters in it by name."""

    settings: str
    names: tuple[str, ...] = ()


class Schema(StoredValue, frozen=True, kw_only=True, tag="state-schema"):
    """The description of one rank's state, or of the state of all together.

    tensors: by role and name. extras: what the job has once, as its learning-rate scheduler, by name, as
    `settings` writes it. refused: why a rank cannot take part, if so: the message then reaches all ranks, and
    none is left waiting.
    """

    tensors: dict[Role, dict[str, TensorSchema]] = msgspec.field(default_factory=dict)
    groups: tuple[Group, ...] = ()
    extras: dict[str, str] = msgspec.field(default_factory=dict)
    refused: str = ""

    def of(self, item: Item) -> TensorSchema | None:
        """The description of an item; None where no rank holds any part of it."""
        return self.tensors.get(item.role, {}).get(item.name)

    @property
    def sizes(self) -> dict[Item, int]:
        """Bytes of one element by item: what `reshard` weighs. None for items of which nobody holds a part."""
        return {item: tensor.element for item, tensor in self._items()}

    @property
    def planes(self) -> dict[Item, tuple[Plane, ...]]:
        """Planes by item: what `schedule` cuts into pieces."""
        return {item: tensor.planes for item, tensor in self._items()}

    def still(self) -> Schema:
        """The part that no step changes: the planes alone."""
        return Schema(
            tensors={
                role: {name: TensorSchema(planes=tensor.planes) for name, tensor in named.items()}
                for role, named in self.tensors.items()
            },
            refused=self.refused,
        )

    def _items(self) -> Iterable[tuple[Item, TensorSchema]]:
        return (
            (Item(name, role), tensor)
            for role, tensors in self.tensors.items()
            for name, tensor in tensors.items()
        )

    def to_json(self) -> bytes:
        """The form in which ranks exchange their schemas."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, text: bytes) -> Schema:
        """Raises `msgspec.ValidationError` (a ValueError) that names the key and what is wrong."""
        return _decoder.decode(text)


#: Made with the module: two threads that first decode a class at one moment end the process (msgspec 0.22).
_decoder = msgspec.json.Decoder(Schema)


def merge(schemas: Sequence[Schema], members: Sequence[str]) -> Schema:
    """The state of all ranks in one; `schemas` in the order of `members`.

    Raises `Disagreement`, the same on every rank, where a rank refused or two describe one thing
    differently (other planes, another step count, other settings).
    """
    for member, schema in zip(members, schemas, strict=True):
        if schema.refused:
            raise Disagreement(f"{member}: {schema.refused}")
    tensors: dict[Role, dict[str, TensorSchema]] = {}
    extras: dict[str, str] = {}
    first: dict[tuple[str, str], str] = {}
    for member, schema in zip(members, schemas, strict=True):
        for item, tensor in schema._items():
            found = tensors.setdefault(item.role, {}).setdefault(item.name, tensor)
            if found != tensor:
                raise Disagreement(
                    f"{item}: {first[item]} holds {_words(found)}, {member} holds {_words(tensor)}; "
                    f"holders of one parameter must have taken the same steps"
                )
            first.setdefault(item, member)
        for name, text in schema.extras.items():
            if extras.setdefault(name, text) != text:
                raise Disagreement(f"{name}: {first['', name]} has {extras[name]}, {member} has {text}")
            first.setdefault(("", name), member)
    return Schema(
        tensors={role: {name: held[name] for name in sorted(held)} for role, held in sorted(tensors.items())},
        groups=_merged(schemas, members),
        extras={name: extras[name] for name in sorted(extras)},
    )


def _merged(schemas: Sequence[Schema], members: Sequence[str]) -> tuple[Group, ...]:
    """The parameter groups, which are the same on all ranks that have any."""
    known = [(member, schema.groups) for member, schema in zip(members, schemas, strict=True) if schema.groups]
    for member, groups in known:
        if groups != known[0][1]:
            ours, theirs = next(
                (a, b) for a, b in zip_longest(groups, known[0][1], fillvalue=Group(settings="")) if a != b
            )
            raise Disagreement(
                f"parameter groups: {member} has {ours.settings} for {ours.names[:3]}, {known[0][0]} "
                f"{theirs.settings} for {theirs.names[:3]}; make groups by name, change settings on all alike"
            )
    return known[0][1] if known else ()


def check_covers(schema: Schema, items: Iterable[Item]) -> None:
    """Raises `Disagreement` where a value or buffer of the new layout is described by nobody. State may not
    have been made yet; whether it was lost, `reshard` finds."""
    unknown = [item for item in items if item.role != "state" and schema.of(item) is None]
    if unknown:
        raise Disagreement(f"no rank holds any part of {unknown[0]} ({len(unknown)} such): nothing to move")


def _words(tensor: TensorSchema) -> str:
    planes = [f"{plane.name} {plane.dtype}" for plane in tensor.planes]
    words = [*planes, *(f"{s.name} {s.kind} {s.dtype} {s.text}" for s in tensor.scalars)]
    return ", ".join(words) or "nothing yet"
