"""A model as elasticd trains it: its sections, its tensor-parallel rules, and the local modules of a stage.

The user's modules stay as they are. They describe the whole model once (kept without storage); `Stage modules`
are copies of the sections that one device runs, with parameters of the local shape only, the attributes
that count units set to the local ones, and the TP group's communication hooked around named submodules.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch
from elasticd_planner.boxes import Box
from elasticd_planner.plan import Stage
from elasticd_planner.rules import Cut, ModelSpec, Parameter, Units, member_box, unit_range
from torch import Tensor, nn

#: Modules whose running statistics would differ by layout.
_STATISTICS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

#: Modules whose random masks would differ by layout.
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)

Init = Callable[[str, tuple[int, ...], torch.Generator], Tensor]


class ModelError(ValueError):
    """The model cannot be trained as it is described: what is wrong and what would be right."""


@dataclass(frozen=True)
class Rule:
    """Parameters whose full name matches `pattern` are cut along `dim` in `units`. `replicas` says what
    copies inside a TP group hold as gradient: the "same", or terms that "add" (see elasticd_planner.rules)."""

    pattern: str
    dim: int
    units: str
    replicas: Literal["same", "add"] = "same"


@dataclass(frozen=True)
class UnitsOf:
    """`count` units of a kind; `attribute` names the attribute that a local module reads them from: a
    range gets the local range, a number the local count."""

    count: int
    follows: str | None = None
    attribute: str | None = None


@dataclass(frozen=True)
class Region:
    """A submodule around which a TP group communicates. "reduce": a whole input, outputs that add up;
    "vocabulary": an nn.Embedding whose rows are cut; "gather": a whole input, the last dimension of the
    output cut."""

    pattern: str
    kind: Literal["reduce", "vocabulary", "gather"]


class Model:
    """A model in the one shape that elasticd trains: embed, an ordered list of blocks, head, with one
    activation tensor [batch, tokens, width] between them.

    `embed` is called with the collated batch, each block and `head` with the activation. `init(name, shape,
    generator)` gives a parameter's whole first value; the generator is keyed by (seed, name), so that every
    layout starts from the same model. `ties` maps a parameter's full name to the one that it shares.
    """

    def __init__(
        self,
        *,
        embed: nn.Module,
        blocks: Sequence[nn.Module],
        head: nn.Module,
        width: int,
        init: Init,
        name: str = "model",
        rules: Sequence[Rule] = (),
        units: Mapping[str, UnitsOf] | None = None,
        regions: Sequence[Region] = (),
        ties: Mapping[str, str] | None = None,
    ) -> None:
        if not blocks:
            raise ModelError("model: blocks must be a non-empty list of modules, the layers in order")
        self.name, self.init, self.width = name, init, width
        self.rules, self.regions = tuple(rules), tuple(regions)
        self.units, self.ties = dict(units or {}), dict(ties or {})
        self.sections: dict[str, nn.Module] = {
            "embed": _without_storage(embed),
            **{name: _without_storage(block) for name, block in _numbered(blocks)},
            "head": _without_storage(head),
        }
        self.layers = len(blocks)
        _refuse_unsaid_ties(self.ties, {"embed": embed, "head": head} | dict(_numbered(blocks)))
        self._check()
        self.spec = self._describe()

    @property
    def dtype(self) -> torch.dtype:
        """The type of the activation between blocks: that of the first block's parameters."""
        return next(self.sections["blocks.0"].parameters()).dtype

    def _check(self) -> None:
        """Refuses what would train wrongly without a word: names that match nothing, and what a layout would
        change the meaning of."""
        names = {name for section in self.sections for name, _ in self._named(section)}
        modules = [(path, m) for section in self.sections for path, m in self._modules(section)]
        for rule in self.rules:
            if not any(fnmatchcase(name, rule.pattern) for name in names):
                raise ModelError(f"rule {rule.pattern!r} matches no parameter of the model")
        for region in self.regions:
            if not any(fnmatchcase(path, region.pattern) for path, _ in modules):
                raise ModelError(f"region {region.pattern!r} matches no submodule of the model")
        for kind, units in self.units.items():
            pattern, _, attribute = (units.attribute or "").rpartition(".")
            found = [hasattr(m, attribute) for path, m in modules if fnmatchcase(path, pattern)]
            if units.attribute is not None and not (found and all(found)):
                raise ModelError(f"units {kind!r}: {units.attribute!r} is no attribute of a submodule")
        for tied in (*self.ties, *self.ties.values()):
            if tied not in names:
                raise ModelError(f"ties: {tied!r} is not a parameter of the model")
        for path, module in modules:
            if isinstance(module, _DROPOUTS) and module.p > 0:
                raise ModelError(
                    f"{path} is a dropout of p = {module.p}: its masks would differ by layout; use p = 0"
                )
            if isinstance(module, _STATISTICS) and module.track_running_stats:
                raise ModelError(
                    f"{path} keeps running statistics, which would differ by layout; use a layer or RMS norm"
                )

    def _modules(self, section: str) -> Iterator[tuple[str, nn.Module]]:
        return self.sections[section].named_modules(prefix=section)

    def _named(self, section: str) -> Iterator[tuple[str, nn.Parameter]]:
        return self.sections[section].named_parameters(prefix=section)

    def _describe(self) -> ModelSpec:
        kinds: list[tuple[Parameter, ...]] = []
        layers: list[int] = []
        for i in range(self.layers):
            kind = tuple(self._parameters(f"blocks.{i}"))
            if kind not in kinds:
                kinds.append(kind)
            layers.append(kinds.index(kind))
        reduces = sum(
            1
            for path, _ in self.sections["blocks.0"].named_modules(prefix="blocks.0")
            if self._region(path) == "reduce"
        )
        return ModelSpec(
            name=self.name,
            embed=tuple(self._parameters("embed")),
            kinds=tuple(kinds),
            layers=tuple(layers),
            head=tuple(self._parameters("head")),
            units=tuple(
                Units(kind=kind, count=units.count, follows=units.follows) for kind, units in self.units.items()
            ),
            ties=tuple(self.ties.items()),
            width=self.width,
            dtype=str(self.dtype).removeprefix("torch."),
            collectives=reduces,
        )

    def _parameters(self, section: str) -> Iterator[Parameter]:
        for name, parameter in self.sections[section].named_parameters():
            rule = next((r for r in self.rules if fnmatchcase(f"{section}.{name}", r.pattern)), None)
            yield Parameter(
                name=name,
                shape=tuple(parameter.shape),
                dtype=str(parameter.dtype).removeprefix("torch."),
                cut=Cut(dim=rule.dim, units=rule.units) if rule else None,
                replicas=rule.replicas if rule else "same",
                kind="trained" if parameter.requires_grad else "frozen",
            )
        persistent = self.sections[section].state_dict().keys()
        for name, buffer in self.sections[section].named_buffers():
            if name in persistent:
                dtype = str(buffer.dtype).removeprefix("torch.")
                yield Parameter(name=name, shape=tuple(buffer.shape), dtype=dtype, kind="buffer")
            elif buffer.is_meta:
                raise ModelError(
                    f"{section}.{name} is a buffer without values that is not persistent: make the model with "
                    "storage, let the buffer be persistent, or compute it in forward"
                )

    def _region(self, path: str) -> str | None:
        return next((region.kind for region in self.regions if fnmatchcase(path, region.pattern)), None)

    def local(self, stage: Stage, position: int) -> LocalModel:
        """The sections of `stage` with parameters of the local shape, values not set."""
        modules: dict[str, nn.Module] = {}
        parameters: dict[str, tuple[Box, nn.Parameter]] = {}
        buffers: dict[str, Tensor] = {}
        for section in self.spec.sections(stage.start, stage.stop):
            module = copy.deepcopy(self.sections[section])
            for rule in self.spec.section(section):
                name = self.spec.owner(f"{section}.{rule.name}")
                box = member_box(self.spec, rule, stage.shares, position)
                empty = torch.empty(box.shape, dtype=getattr(torch, rule.dtype))
                if rule.kind == "buffer":
                    held: Tensor = buffers.setdefault(name, empty)
                else:
                    trained = rule.kind == "trained"
                    _, held = parameters.setdefault(name, (box, nn.Parameter(empty, requires_grad=trained)))
                owner, _, leaf = rule.name.rpartition(".")
                setattr(module.get_submodule(owner), leaf, held)
            self._set_units(section, module, stage, position)
            modules[section] = module
        return LocalModel(modules=modules, parameters=parameters, buffers=buffers)

    def _set_units(self, section: str, module: nn.Module, stage: Stage, position: int) -> None:
        for kind, units in self.units.items():
            if units.attribute is None:
                continue
            local = unit_range(self.spec, kind, stage.shares, position)
            pattern, _, attribute = units.attribute.rpartition(".")
            for path, submodule in module.named_modules(prefix=section):
                if fnmatchcase(path, pattern):
                    whole = getattr(submodule, attribute)
                    setattr(submodule, attribute, local if isinstance(whole, range) else len(local))

    def communicating(self, section: str, module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
        """The submodules of a section around which a TP group communicates, and how."""
        for path, submodule in module.named_modules(prefix=section):
            kind = self._region(path)
            if kind is not None:
                yield submodule, kind

    def first_value(self, name: str, box: Box, seed: int) -> Tensor:
        """The box of a parameter's or buffer's first value, as every layout starts from it. A buffer starts as
        the module made it, if it has storage there."""
        section, _, rest = _split(name)
        rule = next(parameter for parameter in self.spec.section(section) if parameter.name == rest)
        if rule.kind == "buffer":
            given = self.sections[section].get_buffer(rest)
            if not given.is_meta:
                return given.detach().clone()
        key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "big"))
        value = self.init(name, rule.shape, generator)
        if tuple(value.shape) != rule.shape:
            raise ModelError(f"init({name!r}) gave shape {tuple(value.shape)}, not {rule.shape}")
        return value[box.slices(Box.whole(rule.shape))].to(getattr(torch, rule.dtype)).contiguous()


@dataclass(frozen=True)
class LocalModel:
    """The sections that one device runs, in order, their parameters by full name with the box held, and their
    persistent buffers."""

    modules: dict[str, nn.Module]
    parameters: dict[str, tuple[Box, nn.Parameter]]
    buffers: dict[str, Tensor]


def _split(name: str) -> tuple[str, str, str]:
    head, dot, rest = name.partition(".")
    if head == "blocks":
        index, dot, rest = rest.partition(".")
        return f"blocks.{index}", dot, rest
    return head, dot, rest


def _numbered(blocks: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    return ((f"blocks.{index}", block) for index, block in enumerate(blocks))


def _refuse_unsaid_ties(ties: Mapping[str, str], sections: Mapping[str, nn.Module]) -> None:
    """Parameters that the modules share must be named in `ties`, else every layout would untie them."""
    first: dict[int, str] = {}
    for section, module in sections.items():
        for name, parameter in module.named_parameters(prefix=section, remove_duplicate=False):
            owner = first.setdefault(id(parameter), name)
            if owner != name and owner.startswith(f"{section}."):
                raise ModelError(f"{name} and {owner} are one parameter inside {section}: use one name for it")
            if owner != name and ties.get(name) != owner:
                raise ModelError(
                    f"{name} and {owner} are one parameter: say so with ties={{{name!r}: {owner!r}}}"
                )


def _without_storage(module: nn.Module) -> nn.Module:
    """A copy of the module on the meta device: shapes without memory."""
    memo: dict[int, object] = {
        id(parameter): nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        for parameter in module.parameters()
    }
    return copy.deepcopy(module, memo)
