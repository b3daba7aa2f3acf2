"""The shapes of a problem's parameters: of a model, or tensors that stand for the bytes in the problem.

A problem says what the sections' parameters weigh, and not of which tensors they are. For what goes over links
that is nearly the same: a tensor in as many rows as shares have units stands for all that is cut, and one for
all that every member holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from elasticd_planner.cost.model_profile import ADAMW_STATE, derive
from elasticd_planner.layout.layouts import Item, Layouts
from elasticd_planner.problem_files.file_format import ModelEntry, TableProblem
from elasticd_planner.problem_files.times import SectionState, TimedModel
from elasticd_planner.spec.model import Cut, ModelSpec, Parameter, Units, item_size
from elasticd_planner.value import Value, refuse

#: Bytes of an element of a tensor that stands for bytes, by its dtype; the smallest that suffices is taken.
_DTYPES = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


class Shapes(Value, frozen=True, kw_only=True):
    """A model's parameters, and what is said of what is sent of them."""

    spec: ModelSpec
    exact: bool  #: the model's own; else tensors stand for bytes
    gradients: str | None  #: the dtype of gradients and master weights; None: that of each parameter
    optimizer: float  #: bytes of optimizer state, and of master weights, for each byte of a parameter
    boundary: float  #: bytes that a token brings over a boundary of stages (0: one activation)

    def size(self, item: Item, dtype: str) -> int:
        """Bytes of one element of an item, as a migration weighs them; `dtype`: of its parameter."""
        size = item_size(dtype)
        return round(size * self.optimizer) if item.role == "state" else size


def sizes_of(shapes: Mapping[str, Shapes], layouts: Layouts) -> dict[Item, int]:
    """Bytes of one element by item, as a migration weighs them.

    Args:
        shapes: of each module of the plan.
        layouts: of the plan; of several modules names begin with the module's.
    """
    found = {}
    for item in layouts.items:
        module = item.name.partition(".")[0] if len(shapes) > 1 else next(iter(shapes))
        found[item] = shapes[module].size(item, layouts.rule(item.name).dtype)
    return found


def shapes_of(problem: TableProblem, specs: Mapping[str, ModelSpec] | None = None) -> dict[str, Shapes]:
    """The parameters of a problem in seconds, by module.

    Args:
        problem: the problem of a file.
        specs: of the modules of its model, under any name where there is one; None: tensors stand for the bytes
            that the problem names.

    Raises:
        Invalid: the problem does not say enough, or is of another model.
    """
    entries = {entry.name: entry for entry in problem.modules}
    names = [problem.module, *entries]
    if specs is not None and len(specs) == len(names) == 1:
        specs = dict(zip(names, specs.values(), strict=True))
    if specs is not None and {*specs} != {*names}:
        refuse(
            f"the model has the modules {', '.join(specs)}, and the problem {', '.join(names)}: name the model "
            "that the problem is of with --model"
        )
    of = specs or {}
    found = {name: _shapes(each.model, of.get(name), trained=each.trained) for name, each in entries.items()}
    return found | {problem.module: _shapes(problem.model, of.get(problem.module), trained=True)}


def _shapes(model: ModelEntry | TimedModel, spec: ModelSpec | None, *, trained: bool) -> Shapes:
    if model.times is None:
        refuse(
            "what goes over links can be listed for a problem in seconds (model.times): this one is in units, "
            "which know neither bytes nor links"
        )
    if spec is not None:
        _check(model, spec)
    if spec is None and model.state is None:
        refuse(
            "the problem does not say what parameters weigh, so that nothing that is sent of them can be "
            f"listed: give {model.name} a model.state, or name the model with --model"
        )
    factor = model.state.gradient if model.state is not None else 1.0
    optimizer = model.state.optimizer if model.state is not None else ADAMW_STATE
    item = item_size(spec.dtype) if spec is not None else _item(factor)
    return Shapes(
        spec=spec or _stand_in(model, item, trained=trained),
        exact=spec is not None,
        gradients=_DTYPES.get(round(item * factor)) if factor != 1 else None,
        optimizer=optimizer,
        boundary=model.times.bundle_bytes,
    )


def _check(model: ModelEntry | TimedModel, spec: ModelSpec) -> None:
    """Refuses another model than that of the problem."""
    if len(spec.layers) != model.layers:
        refuse(f"the model {spec.name} has {len(spec.layers)} layers, and the problem {model.layers}")
    base = derive(spec, 1.0, 1)
    for name in ("embed", "block", "head") if model.state is not None else ():
        ours, theirs = getattr(base, name).parameter_bytes, getattr(model.state, name).parameter_bytes
        if ours != theirs:
            refuse(
                f"the {name} of the model {spec.name} has {ours:,} bytes of parameters, and model.state of the "
                f"problem {theirs:,}: name the model that the problem is of, in its dtype"
            )


def _item(factor: float) -> int:
    """The smallest element whose gradient is of whole bytes."""
    return next((size for size in (1, 2, 4) if (size * factor).is_integer() and size * factor in _DTYPES), 4)


def _stand_in(model: ModelEntry | TimedModel, item: int, *, trained: bool) -> ModelSpec:
    units = model.units
    state, times = model.state, model.times
    assert state is not None
    assert times is not None
    follows = bool(model.groups) and units % model.groups == 0
    tied = min(state.tied_bytes, state.embed.cut_bytes, state.head.cut_bytes)

    def tensor(name: str, size: int, rows: int = 0, kind: str = "units") -> list[Parameter]:
        """Of so many bytes, in so many rows of which members have some (0: each has all)."""
        count = size // item
        if count < max(rows, 1):
            return []
        shape = (rows, count // rows) if rows else (count,)
        cut = Cut(dim=0, units=kind) if rows else None
        return [
            Parameter(
                name=name,
                shape=shape,
                dtype=_DTYPES[item],
                cut=cut,
                replicas="add" if kind == "groups" else "same",
                kind="trained" if trained else "frozen",
            )
        ]

    def section(held: SectionState, tied: int = 0) -> tuple[Parameter, ...]:
        grouped = held.grouped_bytes if follows else 0
        cut = held.cut_bytes - tied + held.grouped_bytes - grouped
        return (
            *tensor("tied", tied, units),
            *tensor("cut", cut, units),
            *tensor("grouped", grouped, model.groups, "groups"),
            *tensor("whole", held.whole_bytes),
        )

    embed, head = section(state.embed, tied), section(state.head, tied)
    return ModelSpec(
        name=model.name,
        embed=embed,
        kinds=(section(state.block),),
        layers=(0,) * model.layers,
        head=head,
        units=(
            Units(kind="units", count=units),
            *([Units(kind="groups", count=model.groups, follows="units")] if follows else []),
        ),
        ties=(("head.tied", "embed.tied"),) if any(p.name == "tied" for p in (*embed, *head)) else (),
        width=math.ceil(times.boundary_bytes / item),
        dtype=_DTYPES[item],
        collectives=times.block.collectives // 2,
    )
