"""Tensor-parallel rules: which dimension of a parameter is cut, in which units, and what its replicas hold.

A model is described by its parameters section by section (embed, blocks, head) with a rule each. Shares
become units per rule by largest remainder, so any cut is legal: TP 3 over 8 heads is 3 + 3 + 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Literal, TypeVar

from elasticd_planner.spec.box import Box
from elasticd_planner.spec.plan import Stage
from elasticd_planner.value import Value, refuse

#: Of a tensor of a model: see `Parameter`.
Kind = Literal["trained", "frozen", "buffer"]

#: The name in a section of a parameter that elasticd adds: the counts of the last step, for the balance of its
#: experts. The user's own modules have none.
BALANCE_COUNTS = "balance_counts"


class Units(Value, frozen=True, kw_only=True):
    """A kind of unit that a dimension is cut in: query heads, kv-heads, ffn columns, vocabulary rows.

    With `follows`, a member holds the units that its units of that other kind need: kv-heads follow heads,
    each kv-head serving count(heads) / count(kv_heads) of them; one at a cut is held by both sides.
    """

    kind: str
    count: int
    follows: str | None = None


class Cut(Value, frozen=True, kw_only=True):
    """The dimension of a parameter that is cut, and the kind of its units (equal slices of the dimension)."""

    dim: int
    units: str


class Parameter(Value, frozen=True, kw_only=True, omit_defaults=True):
    """One parameter of a section, by its name inside the section.

    kind: "trained"; "frozen", which has a value and neither gradient nor optimizer state; or "buffer", a
    module's persistent buffer, whole and the same wherever its section is.
    replicas: what the copies inside one TP group hold as gradient: "same" (each the whole gradient: count
    once) or "add" (each a term of it, as a kv projection replicated because the group cuts its kv-head).
    fused: the dimension that counts the parts of a fused parameter, which its module has as one with the next.
    experts: its units are experts, which a plan may place one by one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    cut: Cut | None = None
    replicas: Literal["same", "add"] = "same"
    kind: Kind = "trained"
    fused: int | None = None
    experts: bool = False

    def __post_init__(self) -> None:
        if self.kind == "buffer" and self.cut is not None:
            refuse(f"{self.name}: a buffer is whole on every holder of its section and cannot be cut")


class ModelSpec(Value, frozen=True, kw_only=True):
    """A model as the planner and the migration see it: no tensors, only names, shapes and rules.

    `kinds` are the distinct kinds of block, `layers[i]` the index into it of block i. `ties` maps an alias
    (full name) to the parameter that it shares (full name): a tied head has ("head.output.weight",
    "embed.tokens.weight"). `width` is the number of elements per token of the activation that passes
    between blocks; `collectives` how many TP all-reduces of it one block makes in forward (as many
    again in backward).
    """

    name: str
    embed: tuple[Parameter, ...]
    kinds: tuple[tuple[Parameter, ...], ...]
    layers: tuple[int, ...]
    head: tuple[Parameter, ...]
    units: tuple[Units, ...] = ()
    ties: tuple[tuple[str, str], ...] = ()
    width: int = 1
    dtype: str = "float32"
    collectives: int = 2

    def __post_init__(self) -> None:
        known = {units.kind: units for units in self.units}
        if any(kind >= len(self.kinds) or kind < 0 for kind in self.layers) or not self.layers:
            refuse(f"model {self.name}: layers must name one of its {len(self.kinds)} kinds of block each")
        for units in self.units:
            lead = known.get(units.follows) if units.follows else None
            if units.follows and (lead is None or lead.follows or lead.count % units.count):
                refuse(f"model {self.name}: {units.count} {units.kind} cannot follow {units.follows}")
        for parameter in (*self.embed, *(p for kind in self.kinds for p in kind), *self.head):
            rule = parameter.cut
            if rule is None:
                continue
            if rule.units not in known:
                refuse(f"model {self.name}: {parameter.name} is cut in unknown units {rule.units!r}")
            if rule.dim >= len(parameter.shape) or parameter.shape[rule.dim] % known[rule.units].count:
                refuse(
                    f"model {self.name}: dimension {rule.dim} of {parameter.name} {parameter.shape} does not "
                    f"divide into {known[rule.units].count} {rule.units}"
                )
            if known[rule.units].follows and parameter.replicas != "add":
                refuse(
                    f"model {self.name}: {parameter.name} follows {known[rule.units].follows}, so that members "
                    "see other terms of its gradient: its replicas must be 'add'"
                )
        self._check_ties()

    def _check_ties(self) -> None:
        """Tied parameters are one tensor: both exist and are cut alike."""
        if not self.ties:
            return
        sections = [{p.name: p for p in held} for held in (*self.kinds, self.embed, self.head)]
        places = {"embed": len(self.kinds), "head": len(self.kinds) + 1}
        blocks = {str(index): kind for index, kind in enumerate(self.layers)}

        def find(name: str) -> Parameter:
            section, _, rest = name.partition(".")
            place = places.get(section)
            if section == "blocks":
                block, _, rest = rest.partition(".")
                place = blocks.get(block)
            if place is None or rest not in sections[place]:
                refuse(f"model {self.name}: tied parameter {name!r} is not in the model")
            return sections[place][rest]

        for names in self.ties:
            a, b = map(find, names)
            if (a.shape, a.dtype, a.cut, a.kind) != (b.shape, b.dtype, b.cut, b.kind):
                refuse(
                    f"model {self.name}: tied parameters {names[0]} and {names[1]} must be alike in shape, "
                    "dtype, cut and kind"
                )

    def section(self, name: str) -> tuple[Parameter, ...]:
        """The parameters of "embed", "head" or "blocks.N"."""
        if name == "embed":
            return self.embed
        if name == "head":
            return self.head
        return self.kinds[self.layers[int(name.removeprefix("blocks."))]]

    def sections(self, start: int, stop: int) -> Iterator[str]:
        """The sections of a stage with the blocks [start, stop): the first has embed, the last head."""
        if start == 0:
            yield "embed"
        for layer in range(start, stop):
            yield f"blocks.{layer}"
        if stop == len(self.layers):
            yield "head"

    @property
    def parameters(self) -> dict[str, Parameter]:
        """All parameters and buffers by full name, in order, tied ones by each of their names."""
        return {
            f"{section}.{parameter.name}": parameter
            for section in self.sections(0, len(self.layers))
            for parameter in self.section(section)
        }

    @property
    def frozen(self) -> tuple[str, ...]:
        """The full names of the parameters that are not trained; of tied ones the first name."""
        return tuple(name for name, each in owned_parameters(self).items() if each.kind == "frozen")

    def owner(self, name: str) -> str:
        """The parameter that a full name stands for, ties resolved."""
        return dict(self.ties).get(name, name)

    def units_of(self, kind: str) -> Units:
        """The units of this kind. Raises Invalid where there are none."""
        for units in self.units:
            if units.kind == kind:
                return units
        return refuse(f"model {self.name} has no units of kind {kind!r}")


def section_of(name: str) -> str:
    """The section that a parameter is named in, by its full name."""
    first, _, rest = name.partition(".")
    return f"blocks.{rest.partition('.')[0]}" if first == "blocks" else first


_Of = TypeVar("_Of")

#: A model of one module, or the modules of a model of several, by name.
Specs = ModelSpec | Mapping[str, ModelSpec]


def owned_parameters(specs: Specs) -> dict[str, Parameter]:
    """The parameters and buffers of a model by full name, in order; of tied ones the first alone. In a model of
    several modules full names begin with the module's."""
    if isinstance(specs, ModelSpec):
        return {name: each for name, each in specs.parameters.items() if specs.owner(name) == name}
    return _together({module: owned_parameters(spec) for module, spec in specs.items()})


def frozen_names(specs: Specs) -> frozenset[str]:
    """The full names of the parameters that are not trained; of tied ones the first name."""
    return frozenset(name for name, each in owned_parameters(specs).items() if each.kind == "frozen")


def fused_parameters(specs: Specs) -> dict[str, int]:
    """The fused parameters of a model by full name: the dimension of their parts."""
    if isinstance(specs, ModelSpec):
        return {name: each.fused for name, each in specs.parameters.items() if each.fused is not None}
    return _together({module: fused_parameters(spec) for module, spec in specs.items()})


def _together(by_module: Mapping[str, Mapping[str, _Of]]) -> dict[str, _Of]:
    """Values by names of the modules, by those of the whole model."""
    return {f"{module}.{name}": each for module, own in by_module.items() for name, each in own.items()}


@lru_cache(maxsize=4096)
def apportion(count: int, shares: tuple[int, ...]) -> tuple[int, ...]:
    """`count` units divided in proportion to `shares` by largest remainder, at least one for each member."""
    if count < len(shares):
        refuse(f"{count} units cannot be cut for a TP group of {len(shares)}: use a narrower group")
    total = sum(shares)
    given = [max(1, count * share // total) for share in shares]
    while sum(given) < count:
        given[max(range(len(shares)), key=lambda i: (count * shares[i] / total - given[i], -i))] += 1
    while sum(given) > count:  # only where the floor of one unit gave too much
        spare = [i for i in range(len(shares)) if given[i] > 1]
        given[max(spare, key=lambda i: (given[i] - count * shares[i] / total, -i))] -= 1
    return tuple(given)


def unit_range(spec: ModelSpec, kind: str, shares: Sequence[int], position: int) -> range:
    """The units of `kind` that the member at `position` of a group with `shares` holds."""
    units = spec.units_of(kind)
    if units.follows is None:
        given = apportion(units.count, tuple(shares))
        start = sum(given[:position])
        return range(start, start + given[position])
    lead = spec.units_of(units.follows)
    led = unit_range(spec, units.follows, shares, position)
    per = lead.count // units.count
    return range(led.start // per, -(-led.stop // per))


def member_box(spec: ModelSpec, parameter: Parameter, shares: Sequence[int], position: int) -> Box:
    """The box of `parameter` that the member at `position` of a TP group with `shares` holds."""
    whole = Box.whole(parameter.shape)
    if parameter.cut is None:
        return whole
    dim, kind = parameter.cut.dim, parameter.cut.units
    size = parameter.shape[dim] // spec.units_of(kind).count
    units = unit_range(spec, kind, shares, position)
    return whole.cropped(dim, units.start * size, units.stop * size)


def member_boxes(
    spec: ModelSpec, parameter: Parameter, stage: Stage, position: int, block: int | None = None
) -> tuple[Box, ...]:
    """The boxes of `parameter` that the member at `position` of a TP group holds, in order: one, or where the
    plan places the experts of a block those of its runs of experts, which may be none.

    Args:
        spec: of the model.
        parameter: one of its parameters or buffers.
        stage: of a single lane.
        position: of the member in it.
        block: that has the parameter; None: the embedding or the head has it.
    """
    placed = stage.experts_of(block) if parameter.experts and block is not None else ()
    if not placed:
        return (member_box(spec, parameter, stage.shares, position),)
    assert parameter.cut is not None
    dim = parameter.cut.dim
    size = parameter.shape[dim] // spec.units_of(parameter.cut.units).count
    whole = Box.whole(parameter.shape)
    return tuple(whole.cropped(dim, run.start * size, run.stop * size) for run in runs(placed[position]))


def runs(numbers: Sequence[int]) -> tuple[range, ...]:
    """Ascending numbers as ranges of consecutive ones."""
    found: list[range] = []
    for number in numbers:
        if found and found[-1].stop == number:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return tuple(found)


def held_units(
    spec: ModelSpec, kind: str, stage: Stage, position: int, block: int | None = None
) -> tuple[int, ...]:
    """The units of a kind of experts that a member has; arguments as of `member_boxes`."""
    placed = stage.experts_of(block) if block is not None else ()
    return placed[position] if placed else tuple(unit_range(spec, kind, stage.shares, position))


def block_of(section: str) -> int | None:
    """The number of the block that a section is; None: it is the embedding or the head."""
    return int(section.removeprefix("blocks.")) if section.startswith("blocks.") else None


def item_size(dtype: str) -> int:
    """Bytes of one element of a dtype named as torch names it ("float32", "bfloat16")."""
    digits = "".join(c for c in dtype.partition("_")[0] if c.isdigit())
    return max(1, int(digits[:2]) // 8) if digits else 1
