"""What moves with each parameter, in words: its planes and its scalars, so that joiners know it too.

A plane is an element-wise tensor of the parameter's shape: its value, or a moment of it. A scalar is state
that the parameter has once, as AdamW's step counter. Schemas travel as JSON between ranks and are merged in
rank order; all come to the same result, or to the same error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
from elasticd_planner.value import Value


class Disagreement(RuntimeError):
    """Ranks describe the state of one parameter in different ways, or one of them cannot describe it."""


class Plane(Value, frozen=True, kw_only=True):
    """One element-wise tensor; `dtype` as torch names it ("float32"), `itemsize` in bytes."""

    name: str
    dtype: str
    itemsize: int


class Scalar(Value, frozen=True, kw_only=True):
    """One value beside the planes, kept bit by bit.

    text: a decimal integer, `float.hex()`, or for a 0-dim tensor its bytes as hexadecimal digits; `dtype`
    and `device` ("cpu", "cuda") are a tensor's.
    """

    name: str
    kind: Literal["none", "bool", "int", "float", "tensor"]
    text: str = ""
    dtype: str = ""
    device: str = ""


class TensorSchema(Value, frozen=True, kw_only=True):
    """The planes and scalars of one parameter, sorted by name, "value" first."""

    planes: tuple[Plane, ...]
    scalars: tuple[Scalar, ...] = ()

    @property
    def element(self) -> int:
        """Bytes of one element over all planes."""
        return sum(plane.itemsize for plane in self.planes)


class Schema(Value, frozen=True, kw_only=True):
    """What a rank holds with each of its parameters. `refused` says why it cannot take part, if so: the
    message then reaches all ranks, and none is left waiting."""

    tensors: dict[str, TensorSchema] = msgspec.field(default_factory=dict)
    refused: str = ""

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of one element by name: what `reshard` weighs."""
        return {name: tensor.element for name, tensor in self.tensors.items()}

    @property
    def planes(self) -> dict[str, tuple[Plane, ...]]:
        """Planes by name: what `schedule` cuts into pieces."""
        return {name: tensor.planes for name, tensor in self.tensors.items()}

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, text: bytes) -> Schema:
        """Raises `msgspec.ValidationError` (a ValueError) that names the key and what is wrong."""
        return msgspec.json.decode(text, type=cls)


def merge(schemas: Sequence[Schema], members: Sequence[str]) -> Schema:
    """The state of all ranks in one; `schemas` in the order of `members`.

    Raises `Disagreement`, the same on every rank, where a rank refused or two describe a parameter
    differently (other planes, another step count).
    """
    for member, schema in zip(members, schemas, strict=True):
        if schema.refused:
            raise Disagreement(f"{member}: {schema.refused}")
    merged: dict[str, TensorSchema] = {}
    first: dict[str, str] = {}
    for member, schema in zip(members, schemas, strict=True):
        for name, tensor in schema.tensors.items():
            if merged.setdefault(name, tensor) != tensor:
                raise Disagreement(
                    f"{name}: {first[name]} holds {_words(merged[name])}, {member} holds {_words(tensor)}; "
                    f"holders of one parameter must have taken the same steps"
                )
            first.setdefault(name, member)
    return Schema(tensors={name: merged[name] for name in sorted(merged)})


def check_covers(schema: Schema, names: Mapping[str, object] | Sequence[str]) -> None:
    """Raises `Disagreement` where a parameter of the new layout is described by nobody."""
    unknown = [name for name in names if name not in schema.tensors]
    if unknown:
        raise Disagreement(f"no rank holds any part of {unknown[0]} ({len(unknown)} such): nothing to move")


def _words(tensor: TensorSchema) -> str:
    planes = [f"{plane.name} {plane.dtype}" for plane in tensor.planes]
    return ", ".join([*planes, *(f"{s.name} {s.kind} {s.dtype} {s.text}" for s in tensor.scalars)])
