"""Sharding propagation of pointwise operations whose operands are sharded alike, as those of optimizers are.

DTensor computes once for each operation and mesh how its result is sharded, and keeps that in its caches, which
a change of worlds clears. So the first update on a new mesh takes a millisecond more for each operation and
shape, and one of lists of tensors (foreach) tens of milliseconds, in which all ranks stand. Where all operands
are sharded alike, torch's search for the cheapest way has one answer: each rank computes its own part, and the
result is sharded as they are. `PointwiseSharding` gives it without the search. The shape, stride and dtype of a
result are a function of those of the operands, whatever the mesh: they are kept from world to world.

This replaces a private function of torch, and calls another; `tests/runtime/test_pointwise_sharding.py`
compares the answers with torch's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding

from elasticd.runtime.live.world import functional_collectives as functional

#: Operations of lists of tensors that compute each element from those at its place, with or without a final "_"
#: (which writes to the first operand). torch tags only those of single tensors.
_OF_LISTS = frozenset(
    f"aten::_foreach_{name}"
    for name in (
        *("abs", "add", "addcdiv", "addcmul", "clamp_max", "clamp_min", "div", "exp", "lerp", "log"),
        *("maximum", "mul", "neg", "pow", "reciprocal", "sqrt", "sub", "zero"),
    )
)
#: Operations of one tensor, of whatever sharding, that torch tags otherwise: FSDP detaches all that it shards.
_ALIKE = frozenset({torch.ops.aten.detach.default})
#: What is used of torch's propagator, and of a sharding. Where this torch lacks one of them, torch answers all.
_OF_PROPAGATOR = (
    "propagate_op_sharding_non_cached",
    "_propagate_tensor_meta_non_cached",
    "op_single_dim_strategy_funcs",
    "op_strategy_funcs",
)
_OF_SHARDING = ("shard_order", "use_strided_shard_as_shard_order", "tensor_meta", "placements", "mesh")
#: Arguments that are the same on all ranks.
_NUMBERS = (int, float, complex, type(None))


class PointwiseSharding:
    """Answers sharding propagation for pointwise operations of operands that are sharded alike, from `install`
    until `remove`; torch answers all others."""

    def __init__(self) -> None:
        self._propagator: Any = DTensor._op_dispatcher.sharding_propagator
        self._of_torch = getattr(type(self._propagator), _OF_PROPAGATOR[0], None)
        self._metas: dict[Any, Any] = {}  # shape, stride and dtype of results
        self.answered = self.left = 0  # operations, here and by torch

    def install(self) -> None:
        """Takes the place of torch's function, if this torch has it."""
        if self.lacking():
            return
        self._propagator.propagate_op_sharding_non_cached = self._propagate

    def remove(self) -> None:
        """Puts torch's function back."""
        vars(self._propagator).pop("propagate_op_sharding_non_cached", None)  # its class has torch's

    def lacking(self) -> list[str]:
        """The names of torch that are used here, and that this torch does not have."""
        of_sharding = {*getattr(DTensorSpec, "__dataclass_fields__", ()), *dir(DTensorSpec)}
        missing = [name for name in _OF_PROPAGATOR if not hasattr(self._propagator, name)]
        return missing + [name for name in _OF_SHARDING if name not in of_sharding]

    def _propagate(self, schema: OpSchema) -> OutputSharding:
        answer = None if functional._are_we_tracing() else self.answer(schema)
        if answer is None:
            self.left += 1
            assert self._of_torch is not None
            sharding: OutputSharding = self._of_torch(self._propagator, schema)
            return sharding
        self.answered += 1
        return answer

    def answer(self, schema: OpSchema) -> OutputSharding | None:
        """The sharding of a result; None where torch is to look for it."""
        if not self._is_pointwise(schema):
            return None
        arguments = schema.args_schema
        listed = isinstance(arguments[0], list | tuple)
        bases = _bases_of_lists(arguments) if listed else _bases((arguments,))
        if not bases:
            return None
        if schema.is_inplace_op():
            written: Any = arguments[0] if listed else arguments[:1]
            if any(base is not first for base, first in zip(bases, written, strict=True)):
                return None
            return OutputSharding(
                None if listed else bases[0].shallow_copy_with_tensor_meta(bases[0].tensor_meta)
            )
        metas = self._meta(schema)
        if not listed:
            return OutputSharding(bases[0].shallow_copy_with_tensor_meta(metas))
        of_each = zip(bases, metas, strict=True)
        return OutputSharding(tuple(base.shallow_copy_with_tensor_meta(meta) for base, meta in of_each))

    def _is_pointwise(self, schema: OpSchema) -> bool:
        operation, propagator = schema.op, self._propagator
        known = (
            operation in propagator.op_single_dim_strategy_funcs or operation in propagator.op_strategy_funcs
        )
        numbers = all(isinstance(each, _NUMBERS) for each in schema.kwargs_schema.values())
        if not (known and numbers and schema.args_schema):
            return False
        if operation.name().split(".")[0].removesuffix("_") in _OF_LISTS:
            return isinstance(schema.args_schema[0], list | tuple)
        if operation in _ALIKE:
            return True
        tags = operation.tags
        one = len(operation._schema.returns) == 1 and schema.return_type_tensor()
        return one and torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags

    def _meta(self, schema: OpSchema) -> Any:
        """Shape, stride and dtype of a result, or of each of a list."""
        key = (schema.op, *map(_described, chain(schema.args_schema, sorted(schema.kwargs_schema.items()))))
        if key not in self._metas:
            self._metas[key] = self._propagator._propagate_tensor_meta_non_cached(schema)
        return self._metas[key]


def _base(operands: Sequence[object]) -> DTensorSpec | None:
    """The sharding that all tensors among some operands have; None where they differ, or are sums still to be
    made. A replicated tensor without dimensions goes with any other on its mesh."""
    specs = [each for each in operands if isinstance(each, DTensorSpec)]
    if not all(isinstance(each, (DTensorSpec, *_NUMBERS)) for each in operands):
        return None
    base = next((each for each in specs if not _is_number(each)), None)
    if base is None or base.tensor_meta is None or any(each.is_partial() for each in base.placements):
        return None
    alike = all(each.mesh is base.mesh and (_is_number(each) or _alike(each, base)) for each in specs)
    return base if alike else None


def _bases(places: Iterable[Sequence[object]]) -> list[DTensorSpec]:
    """`_base` of the operands at each place; empty where one has none."""
    bases = [_base(operands) for operands in places]
    known = [base for base in bases if base is not None]
    return known if len(known) == len(bases) else []


def _bases_of_lists(arguments: Sequence[Any]) -> list[DTensorSpec]:
    """`_bases` of lists of operands; an argument that is no list belongs to each place."""
    count = len(arguments[0])
    lists = [each for each in arguments if isinstance(each, list | tuple)]
    if any(len(each) != count for each in lists):
        return []
    others = [each for each in arguments if not isinstance(each, list | tuple)]
    return _bases((*(each[place] for each in lists), *others) for place in range(count))


def _is_number(spec: DTensorSpec) -> bool:
    return spec.tensor_meta is not None and not spec.tensor_meta.shape and spec.is_replicated()


def _alike(one: DTensorSpec, other: DTensorSpec) -> bool:
    return (
        one.tensor_meta is not None
        and other.tensor_meta is not None
        and one.tensor_meta.shape == other.tensor_meta.shape
        and one.placements == other.placements
        and one.shard_order == other.shard_order
        and one.use_strided_shard_as_shard_order == other.use_strided_shard_as_shard_order
    )


def _described(argument: Any) -> Any:
    """The part of an argument that a result's shape, stride and dtype depend on: of a number, its type."""
    if isinstance(argument, DTensorSpec):
        meta = argument.tensor_meta
        return None if meta is None else (tuple(meta.shape), tuple(meta.stride), meta.dtype)
    if isinstance(argument, str):
        return argument
    if isinstance(argument, list | tuple):
        return tuple(map(_described, argument))
    return type(argument)
