"""From a plan to layouts: which device holds which box of each parameter, of its gradient and of its state.

Parameters that are cut alike on the same stages have equal holdings: they are one family, whose holdings are
made once, on demand, from those of each stage.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Literal, NamedTuple

from elasticd_planner.layout.optimizer_sharding import Dealt, OptimizerSharder, Part, joined
from elasticd_planner.spec.box import Box, Holding, TensorLayout
from elasticd_planner.spec.model import Kind, ModelSpec, Parameter, Specs, block_of, member_boxes
from elasticd_planner.spec.plan import HeldExperts, Plan, Stage
from elasticd_planner.spec.plan_checks import check_experts
from elasticd_planner.value import refuse

Role = Literal["value", "state", "buffer"]

#: The roles in which a tensor of each kind is held.
ROLES: Mapping[Kind, tuple[Role, ...]] = {
    "trained": ("value", "state"),
    "frozen": ("value",),
    "buffer": ("buffer",),
}

Gradient = Literal["same", "add"]  # of a TP group: see `Parameter.replicas`


class Item(NamedTuple):
    """The unit of placement and migration: a parameter's value, its master weight and optimizer state
    ("state"), or a module's buffer. By the full name of the parameter or buffer."""

    name: str
    role: Role

    def __str__(self) -> str:
        return f"state of {self.name}" if self.role == "state" else self.name


_Holders = tuple[Holding, ...]


class Layouts:
    """The layouts of a model's tensors under one plan.

    Of a model of several modules they are those of all of them together, for state that moves, is kept or is
    written; names begin with the module's: "vision.blocks.0.proj.weight". Each module has its own in `views`.
    """

    specs: Specs  #: of the model, or of each of its modules
    plan: Plan

    def __init__(self, specs: Specs, plan: Plan) -> None:
        self.specs, self.plan = specs, plan
        self._layouts: dict[tuple[str, int], TensorLayout] = {}
        self._families: dict[Hashable, _Family] = {}
        self._family: dict[str, _Family] = {}
        if isinstance(specs, ModelSpec):
            self._views: Mapping[str, Layouts] | None = None
            self._describe(specs, plan)
            self._dealt = not plan.state.zero
            return
        self._views, self._dealt = {}, True
        for module, own in specs.items():
            view = self._views[module] = Layouts(own, plan.view(module))
            for family in view._families.values():
                family.number = len(self._families)
                self._families[module, family.number] = family
            for name in view._family:
                self._family[f"{module}.{name}"] = view._dealt_family(name)

    def _describe(self, spec: ModelSpec, plan: Plan) -> None:
        """Finds the families of a model's parameters."""
        check_experts(plan, spec)
        sections = _stages_by_section(spec, plan)
        sets = {section: tuple((p, s) for p, s, _ in held) for section, held in sections.items()}
        numbers: dict[Hashable, int] = {}
        number = {section: numbers.setdefault(held, len(numbers)) for section, held in sets.items()}
        owners: dict[str, list[tuple[str, Parameter]]] = {}
        ties = dict(spec.ties)
        for section in spec.sections(0, len(spec.layers)):
            for parameter in spec.section(section):
                name = f"{section}.{parameter.name}"
                owners.setdefault(ties.get(name, name), []).append((section, parameter))
        stages = _Stages(spec)
        sliced = any(stage.sliced for _, _, stage in plan.walk())
        for name, held in owners.items():
            key = tuple(
                (
                    number.get(section, -1),
                    parameter,
                    sliced and section.startswith("blocks."),
                    _placed(parameter, section, sections.get(section, [])),
                )
                for section, parameter in held
            )
            if key not in self._families:
                uses = [
                    _Use(sections.get(section, []), parameter, block_of(section)) for section, parameter in held
                ]
                self._families[key] = _Family(len(self._families), uses, stages)
            self._families[key].names.append(name)
            self._family[name] = self._families[key]

    @property
    def spec(self) -> ModelSpec:
        """The description of a model of one module. Refuses a model of several: each has its own view."""
        if not isinstance(self.specs, ModelSpec):
            refuse(f"plan {self.plan.number}: its modules {', '.join(self.views)} have a description each")
        return self.specs

    @property
    def views(self) -> Mapping[str, Layouts]:
        """By module: its own layouts, with the names that it has there. Of a plan of one module: these."""
        return {self.plan.module.module: self} if self._views is None else self._views

    @property
    def names(self) -> tuple[str, ...]:
        """Full names of all parameters in the model's order; aliases of tied ones are left out."""
        return tuple(name for name, family in self._family.items() if family.kind != "buffer")

    @property
    def trained(self) -> tuple[str, ...]:
        """Full names of the parameters that have a gradient."""
        return tuple(name for name, family in self._family.items() if family.kind == "trained")

    @cached_property
    def items(self) -> tuple[Item, ...]:
        """All that is held, in the model's order."""
        return tuple(Item(name, role) for name, family in self._family.items() for role in family.roles)

    def only(self, names: Iterable[str]) -> Layouts:
        """The layouts of some parameters and buffers alone, by full name."""
        made = copy.copy(self)
        made.__dict__.pop("items", None)
        made._family = {name: self._family[name] for name in names}
        return made

    def rule(self, name: str) -> Parameter:
        """The model's description of a parameter or buffer."""
        return self._family[name].rule

    def parameter(self, name: str) -> TensorLayout:
        """The devices that compute with each box of a parameter or buffer."""
        return self._layout(name, self._family[name].parameter)

    def value(self, name: str) -> TensorLayout:
        """The holders of each box of a parameter's value: the devices that compute with it, and those that keep
        its state. Frozen parameters and buffers have no state, and are kept where others have theirs."""
        return self._layout(name, self._dealt_family(name).value)

    def state(self, name: str) -> TensorLayout:
        """The keepers of each box of a trained parameter's master weight and optimizer state.

        Without ZeRO that is the parameter's layout; else see `optimizer_sharding`. A device may keep several
        boxes, each of which lies in one box that it holds of the value."""
        return self._layout(name, self._dealt_family(name).state)

    def reduced(self, name: str) -> TensorLayout:
        """The holders of each box of a parameter's summed gradient: the devices that compute with it and keep
        its state."""
        return self._layout(name, self._dealt_family(name).reduced)

    def layout(self, item: Item) -> TensorLayout:
        """The holders of each box of an item."""
        return self.state(item.name) if item.role == "state" else self.value(item.name)

    def family(self, item: Item) -> Hashable:
        """Items with equal keys have equal holdings, shapes and dtypes under this plan."""
        return self._family[item.name].number, item.role == "state"

    def held(self, device: str) -> dict[Item, tuple[Box, ...]]:
        """All that one device holds: the boxes of each item, in order."""
        found = {item: self.boxes(item, device) for item in self.items}
        return {item: boxes for item, boxes in found.items() if boxes}

    def parts(self, name: str) -> tuple[Part, ...]:
        """Under ZeRO: a parameter in disjoint parts with who computes with each and who keeps its state."""
        return self._dealt_family(name).parts

    def holders(self, name: str) -> frozenset[str]:
        """The devices that compute with a parameter or buffer, or keep some of it."""
        return self._dealt_family(name).devices

    def boxes(self, item: Item, device: str) -> tuple[Box, ...]:
        """The boxes that one device holds of an item."""
        return self._dealt_family(item.name).boxes(item.role, device)

    def own(self, item: Item, device: str) -> tuple[Box, ...]:
        """The boxes of an item that a device has without what others send it at the end of a step: under ZeRO
        those of a parameter whose state it keeps, and of a buffer those that it computes with."""
        family = self._dealt_family(item.name)
        if self.plan.state.zero and item.role == "value" and family.kind == "trained":
            return family.boxes("state", device)
        if self.plan.state.zero and item.role == "buffer":
            return tuple(holding.box for holding in family.parameter if holding.device == device)
        return family.boxes(item.role, device)

    def gradient(self, name: str) -> TensorLayout:
        """The holders of each term of a parameter's gradient after the backward pass.

        Replicas of one TP group that hold the same gradient carry one term's name, others one of their own:
        copies on different stages (tied parameters), in different lanes and in different pipelines always add.
        """
        return self._layout(name, self._family[name].gradient)

    def of(self, device: str) -> dict[str, tuple[Box, ...]]:
        """The boxes of every parameter that one device computes with."""
        place = self.plan.places.get(device)
        if place is None:
            return {}
        stage = self.plan.stage(place)
        return {
            self.spec.owner(f"{section}.{parameter.name}"): member_boxes(
                self.spec, parameter, stage, place.position, block_of(section)
            )
            for section in sections_of(self.spec, stage)
            for parameter in self.spec.section(section)
            if parameter.kind != "buffer"
        }

    def _layout(self, name: str, holdings: _Holders) -> TensorLayout:
        """One value for each name and set of holdings, checked when it is first asked for."""
        key = name, id(holdings)  # families keep their holdings as long as these layouts live
        if key not in self._layouts:
            rule = self._family[name].rule
            self._layouts[key] = TensorLayout(name=name, shape=rule.shape, dtype=rule.dtype, holdings=holdings)
        return self._layouts[key]

    def _dealt_family(self, name: str) -> _Family:
        if not self._dealt:
            sharder = OptimizerSharder(self.plan)
            for family in self._families.values():
                family.deal(sharder)
            self._dealt = True
        return self._family[name]


def sections_of(spec: ModelSpec, stage: Stage) -> tuple[str, ...]:
    """The sections that a stage holds, chunk by chunk."""
    return tuple(section for start, stop in stage.chunks for section in spec.sections(start, stop))


def _stages_by_section(spec: ModelSpec, plan: Plan) -> dict[str, list[tuple[int, int, Stage]]]:
    """By section: the TP groups that have it, each with the index of its lane among all, and of its stage."""
    found: dict[str, list[tuple[int, int, Stage]]] = defaultdict(list)
    for p, pipeline in enumerate(plan.by_lane):
        for s, stage in enumerate(pipeline.stages):
            for section in sections_of(spec, stage):
                found[section].append((p, s, stage))
    return found


def _placed(
    parameter: Parameter, section: str, stages: Sequence[tuple[int, int, Stage]]
) -> tuple[HeldExperts, ...]:
    """The experts of a section by stage, if the parameter has them and the plan places them."""
    block = block_of(section)
    if not parameter.experts or block is None:
        return ()
    return tuple(stage.experts_of(block) for _, _, stage in stages)


class _Stages:
    """The boxes and the holdings of one parameter on one TP group, by group and rule."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._boxes: dict[Hashable, tuple[tuple[Box, ...], ...]] = {}
        self._held: dict[Hashable, _Holders] = {}

    def held(self, p: int, s: int, stage: Stage, use: _Use, gradient: Gradient | None = None) -> _Holders:
        """Of the parameter, or of its gradient: the members have the same, or each a term of its own."""
        key = p, s, use.parameter, gradient, use.placed(stage)
        if key not in self._held:
            term = {None: None, "same": f"{p}.{s}"}
            self._held[key] = tuple(
                Holding(device=device, box=box, partial=term.get(gradient, f"{p}.{s}.{position}"))
                for position, (device, boxes) in enumerate(
                    zip(stage.devices, self.boxes(stage, use), strict=True)
                )
                for box in boxes
            )
        return self._held[key]

    def boxes(self, stage: Stage, use: _Use) -> tuple[tuple[Box, ...], ...]:
        """By position."""
        key = use.parameter, stage.shares, use.placed(stage)
        if key not in self._boxes:
            self._boxes[key] = tuple(
                member_boxes(self._spec, use.parameter, stage, position, use.block)
                for position in range(len(stage.shares))
            )
        return self._boxes[key]


class _Use(NamedTuple):
    """A section that uses a parameter: the stages that have it, and which block it is, if it is one."""

    stages: Sequence[tuple[int, int, Stage]]
    parameter: Parameter
    block: int | None

    def gradient(self, stage: Stage) -> Gradient:
        """The terms of its gradient on the members of a stage. Each has seen tokens of its own where a block is
        on slices of them."""
        return "add" if self.block is not None and stage.sliced else self.parameter.replicas

    def placed(self, stage: Stage) -> HeldExperts:
        """The experts of each member, if the parameter has them and the plan places them."""
        return stage.experts_of(self.block) if self.parameter.experts and self.block is not None else ()


class _Family:
    """Parameters that are cut alike on the same stages, and their holdings."""

    def __init__(
        self,
        number: int,
        uses: Sequence[_Use],
        stages: _Stages,
    ) -> None:
        self.number, self.rule = number, uses[0].parameter
        self.kind = self.rule.kind
        self.names: list[str] = []
        self._dealt: tuple[Dealt, ...] | None = None  # None: whoever computes with it keeps it
        self._uses, self._stages = uses, stages
        self._rank: Mapping[str, int] = {}

    @property
    def roles(self) -> tuple[Role, ...]:
        return ROLES[self.kind]

    @cached_property
    def parameter(self) -> _Holders:
        parts = [self._stages.held(p, s, stage, use) for p, s, stage, use in self._copies()]
        flat = [holding for part in parts for holding in part]
        tied = len(self._uses) > 1  # a device may have both sections
        return tuple(dict.fromkeys(flat)) if tied else tuple(flat)

    @cached_property
    def gradient(self) -> _Holders:
        found: dict[tuple[str, Box], Holding] = {}
        for p, s, stage, use in self._copies():
            for holding in self._stages.held(p, s, stage, use, use.gradient(stage)):
                # A device that has it in two sections (tied, one stage) holds the sum of both terms.
                found.setdefault((holding.device, holding.box), holding)
        return tuple(found.values())

    @cached_property
    def state(self) -> _Holders:
        return self.parameter if self._dealt is None else self._held(False, True)

    @cached_property
    def reduced(self) -> _Holders:
        return self.parameter if self._dealt is None else self._held(True)

    @cached_property
    def value(self) -> _Holders:
        carried = self._held(False)  # who keeps a box without computing with it holds its value too
        return (*self.parameter, *carried) if carried else self.parameter

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        return tuple(part for dealt in self._dealt or () for part in dealt.parts)

    @cached_property
    def devices(self) -> frozenset[str]:
        keeping = (keepers for dealt in self._dealt or () for keepers in dealt.keepers)
        return frozenset((*self._computing, *chain.from_iterable(keeping)))

    def boxes(self, role: Role, device: str) -> tuple[Box, ...]:
        if device not in self.devices:
            return ()
        carried, computed = (self._keeping.get((device, computes), ()) for computes in (False, True))
        own = self._computing.get(device, ())
        return (*carried, *computed) if role == "state" and self._dealt is not None else (*own, *carried)

    def deal(self, sharder: OptimizerSharder) -> None:
        """Takes the layout of the state."""
        holders: dict[Box, list[str]] = defaultdict(list)
        for device, boxes in self._computing.items():
            for box in boxes:
                holders[box].append(device)
        self._dealt, self._rank = sharder.deal(holders, len(self.names)), sharder.rank

    def _copies(self) -> Iterator[tuple[int, int, Stage, _Use]]:
        for use in self._uses:
            for p, s, stage in use.stages:
                yield p, s, stage, use

    @cached_property
    def _computing(self) -> Mapping[str, tuple[Box, ...]]:
        """The boxes that a device computes with: those of one section, since tied parameters are cut alike."""
        found: dict[str, tuple[Box, ...]] = {}
        for _, _, stage, use in self._copies():
            found.update(zip(stage.devices, self._stages.boxes(stage, use), strict=True))
        return found

    @cached_property
    def _keeping(self) -> Mapping[tuple[str, bool], Sequence[Box]]:
        """The items that a device keeps, by whether it computes with it; in the order of the state's layout."""
        found: dict[tuple[str, bool], list[Box]] = defaultdict(list)
        for part in self.parts:
            for device in part.keepers:
                found[device, device in part.holders].append(part.box)
        return {key: joined(found[key]) for key in sorted(found, key=lambda key: (self._rank[key[0]], key[1]))}

    def _held(self, *computing: bool) -> _Holders:
        return tuple(
            Holding(device=device, box=box)
            for (device, computes), boxes in self._keeping.items()
            for box in (boxes if computes in computing else ())
        )
