"""A model as elasticd trains it: its sections, its tensor-parallel rules, its first values.

The user's modules stay as they are. They describe the whole model once (kept without storage); what a device
runs are copies of the sections (`local_model`), with parameters of the local shape only, attributes that count
units set to the local ones, and the TP group's communication hooked around the modules whose parameters are
cut.
"""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NoReturn

import torch
from elasticd_migration.exchange import checksum
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.model import Cut, ModelSpec, Parameter, Units
from torch import Tensor, nn

from elasticd.runtime.model.rng import STATES, Dropout
from elasticd.runtime.model.tp_rules import (
    Add,
    Column,
    Row,
    Rule,
    RuleError,
    Slice,
    UnitsOf,
    cut_at,
    whole_units,
)
from elasticd.runtime.model.validation import ModelError, buffers_of, refuse_module, replace_dropouts, shared

__all__ = ["Init", "Model", "ModelError"]

Init = Callable[[str, tuple[int, ...], torch.Generator], Tensor]


class Model:
    """A model in the one shape that elasticd trains: embed, an ordered list of blocks, head, with one
    activation tensor [samples, tokens, width] between them.

    `embed` is called with the collated batch, each block and `head` with the activation. Parameters have full
    names, "embed.…", "blocks.3.…" or "head.…", as patterns of `rules` match them; without rules the model is
    not cut, and no TP group is wider than 1. `units`: the kinds that rules cut in; one without attributes need
    not be named, it is as many as the cut dimension is long. Parameters that several sections share stay
    shared; `ties` names those that the given modules do not share yet, a later name to an earlier one.

    init: init(name, shape, generator) gives a parameter's whole first value, its generator keyed by (seed,
    name): only boxes that a device holds are kept. Or a mapping of first values by full name, of which the
    boxes are read. Or nothing: modules with storage start as they are (every rank must have made the same: the
    job refuses one that did not), those on the meta device by their own reset_parameters, keyed by (seed,
    module). width: elements of the activation for a token; read off an nn.Embedding in embed. proved: what is
    known of how the sections come by their output, which `elasticd check` prints.
    """

    def __init__(
        self,
        *,
        embed: nn.Module,
        blocks: Sequence[nn.Module],
        head: nn.Module,
        width: int | None = None,
        init: Init | Mapping[str, Tensor] | None = None,
        name: str = "model",
        rules: Mapping[str, Rule] | None = None,
        units: Mapping[str, UnitsOf] | None = None,
        ties: Mapping[str, str] | None = None,
        proved: str = "",
    ) -> None:
        if not len(blocks):
            raise ModelError("model: blocks must be a non-empty list of modules, the layers in order")
        given = {"embed": embed, **{f"blocks.{i}": block for i, block in enumerate(blocks)}, "head": head}
        for section, module in given.items():
            for path, submodule in module.named_modules(prefix=section):
                refuse_module(path, submodule)
        self.name, self.layers, self.proved = name, len(blocks), proved
        self.rules, self.units = dict(rules or {}), dict(units or {})
        self.ties = shared(given) | dict(ties or {})
        self.sections = {
            section: replace_dropouts(section, _without_storage(module)) for section, module in given.items()
        }
        self.width = _width(embed) if width is None else width
        self._init = init
        self._own = _values(given) if init is None else {}
        #: Parameters of several fused parts, by full name: the dimension that is theirs in what is trained.
        self.fused: dict[str, int] = {}
        self._owners: dict[str, dict[str, dict[str, Rule]]] = {section: {} for section in self.sections}
        self._check()
        self.spec = self._describe()
        if not any(parameter.cut for kind in self.spec.kinds for parameter in kind):
            warnings.warn(
                f"elasticd: the model {name!r} has no tensor-parallel rules for its blocks: TP groups are not "
                "wider than 1. See 'Rules' in docs/training.md.",
                stacklevel=2,
            )

    @classmethod
    def from_hf(cls, *_: object, **__: object) -> NoReturn:
        """What `elasticd.from_hf` was once called. Raises AttributeError, which says so."""
        raise AttributeError("Model.from_hf is elasticd.from_hf now: call that, with the same arguments")

    @property
    def dtype(self) -> torch.dtype:
        """The type of the activation between blocks: that of the first block's parameters."""
        return next(self.sections["blocks.0"].parameters()).dtype

    def computing_in(self, dtype: torch.dtype) -> Model:
        """The same model with all parameters, and so its activations, of another type; buffers and first values
        stay as they are."""
        made = copy.copy(self)
        made.sections, made.units = copy.deepcopy(self.sections), dict(self.units)
        for module in made.sections.values():
            for parameter in module.parameters():
                parameter.data = parameter.data.to(dtype)
        made.fused, made._owners = {}, {section: {} for section in made.sections}
        made.spec = made._describe()
        return made

    def first(self) -> str:
        """A digest of the values that the modules have by themselves; empty where they have none."""
        digest = hashlib.blake2b(digest_size=16)
        for name, value in sorted(self._own.items()):
            digest.update(f"{name} {checksum(value.detach().contiguous())}\n".encode())
        return digest.hexdigest() if self._own else ""

    def rule(self, name: str) -> Rule | None:
        """The rule of a parameter (or of a dropout) by full name: the first whose pattern matches."""
        return next((rule for pattern, rule in self.rules.items() if fnmatchcase(name, pattern)), None)

    def pattern(self, name: str) -> str | None:
        """The pattern of that rule."""
        return next((pattern for pattern in self.rules if fnmatchcase(name, pattern)), None)

    def owners(self, section: str) -> dict[str, dict[str, Rule]]:
        """The submodules of a section whose parameters have rules, by path in it: rules by parameter."""
        return self._owners[section]

    def _check(self) -> None:
        """Refuses what would train wrongly without a word: names that match nothing."""
        names = {name for section, m in self.sections.items() for name, _ in m.named_parameters(prefix=section)}
        dropouts = {
            path
            for section, module in self.sections.items()
            for path, m in module.named_modules(prefix=section)
            if isinstance(m, Dropout)
        }
        for pattern, rule in self.rules.items():
            if not isinstance(rule, Column | Row | Slice | Add):
                raise ModelError(f"rule {pattern!r} must be a Column, Row, Slice or Add, not {rule!r}")
            named = names | (dropouts if isinstance(rule, Slice) else set())
            if not any(fnmatchcase(name, pattern) for name in named):
                raise ModelError(f"rule {pattern!r} matches no parameter of the model, such as {min(names)}")
        for tied in (*self.ties, *self.ties.values()):
            if tied not in names:
                raise ModelError(f"ties: {tied!r} is not a parameter of the model")

    def _describe(self) -> ModelSpec:
        sizes: dict[str, list[int]] = {}
        described = {section: tuple(self._parameters(section, sizes)) for section in self.sections}
        kinds = list(dict.fromkeys(described[f"blocks.{i}"] for i in range(self.layers)))
        for kind in sizes:
            self.units.setdefault(kind, UnitsOf())
        rows = [rules for rules in self._owners["blocks.0"].values() if _sums(rules)]
        return ModelSpec(
            name=self.name,
            embed=described["embed"],
            kinds=tuple(kinds),
            layers=tuple(kinds.index(described[f"blocks.{i}"]) for i in range(self.layers)),
            head=described["head"],
            units=tuple(
                Units(
                    kind=kind,
                    count=whole_units(units, kind, self.sections, sizes.get(kind, [])),
                    follows=units.follows,
                )
                for kind, units in self.units.items()
            ),
            ties=tuple(self.ties.items()),
            width=self.width,
            dtype=str(self.dtype).removeprefix("torch."),
            collectives=len(rows),
        )

    def _parameters(self, section: str, sizes: dict[str, list[int]]) -> Iterator[Parameter]:
        """Describes a section; notes who owns what is cut, and the sizes of what is cut in each kind."""
        module = self.sections[section]
        for name, parameter in module.named_parameters():
            full, (path, _, leaf) = f"{section}.{name}", name.rpartition(".")
            rule = self.rule(full)
            shape = tuple(parameter.shape)
            try:
                cut = cut_at(rule, module.get_submodule(path), leaf, len(shape))
            except RuleError as error:
                raise ModelError(f"rule {self.pattern(full)!r} for {full}: {error}") from None
            if rule is not None:
                self._owners[section].setdefault(path, {})[leaf] = rule
            if cut is not None and cut.dim >= len(shape):
                raise ModelError(f"rule {self.pattern(full)!r}: {full} {shape} has no dimension {cut.dim}")
            dim = cut.dim if cut is not None else 0
            fused = dim if cut is not None and cut.parts > 1 else None
            if cut is not None and cut.parts > 1:
                if shape[dim] % cut.parts:
                    raise ModelError(f"rule {self.pattern(full)!r}: {full} {shape} is not of {cut.parts} parts")
                self.fused[full] = dim
                shape = (*shape[:dim], cut.parts, shape[dim] // cut.parts, *shape[dim + 1 :])
                dim += 1
            units = rule.units if rule is not None and not isinstance(rule, Add) else ""
            if cut is not None:
                sizes.setdefault(units, []).append(shape[dim])
            yield Parameter(
                name=name,
                shape=shape,
                dtype=str(parameter.dtype).removeprefix("torch."),
                cut=Cut(dim=dim, units=units) if cut is not None else None,
                replicas="add" if cut is not None or isinstance(rule, Add) else "same",
                kind="trained" if parameter.requires_grad else "frozen",
                fused=fused,
            )
        for name, buffer in buffers_of(section, module):
            dtype = str(buffer.dtype).removeprefix("torch.")
            yield Parameter(name=name, shape=tuple(buffer.shape), dtype=dtype, kind="buffer")

    def first_value(self, name: str, box: Box, seed: int, dtype: torch.dtype | None = None) -> Tensor:
        """The box of a parameter's or buffer's first value, as every layout starts from it; of a parameter in
        any type (default: its own)."""
        section, _, rest = _split(name)
        rule = next(parameter for parameter in self.spec.section(section) if parameter.name == rest)
        if rule.kind == "buffer":
            buffer = self.sections[section].get_buffer(rest)
            if not buffer.is_meta:
                return buffer.detach().clone()
        value, shape = self._whole(name, rule, seed), rule.shape
        if name in self.fused:
            value = value.unflatten(self.fused[name], (shape[self.fused[name]], -1))
        part = value[box.slices(Box.whole(shape))]
        dtype = dtype or getattr(torch, rule.dtype)
        return part.detach().to(dtype).clone(memory_format=torch.contiguous_format)

    def module_shape(self, name: str) -> tuple[int, ...]:
        """The shape that the user's module gives a parameter: what is trained has another if it is fused."""
        section, _, rest = _split(name)
        return tuple(self.sections[section].state_dict(keep_vars=True)[rest].shape)

    def _whole(self, name: str, rule: Parameter, seed: int) -> Tensor:
        """A whole first value, of the shape that its module gives it."""
        shape = self.module_shape(name)
        if isinstance(self._init, Mapping):
            if name not in self._init:
                raise ModelError(f"init has no value for {name}; it has {', '.join(list(self._init)[:3])}, ...")
            value, said = self._init[name], f"init[{name!r}] is of"
        elif self._init is not None:
            value, said = self._init(name, shape, _generator(seed, name)), f"init({name!r}) gave"
        elif name in self._own:
            value, said = self._own[name], f"{name} has"
        else:
            value, said = self._reset(name, seed), f"reset_parameters made of {name}"
        if tuple(value.shape) != shape:
            raise ModelError(f"{said} shape {tuple(value.shape)}, not {shape}")
        return value

    def _reset(self, name: str, seed: int) -> Tensor:
        """As the module itself would start: its generator is keyed by (seed, module)."""
        section, _, rest = _split(name)
        path, _, leaf = rest.rpartition(".")
        owner = self.sections[section].get_submodule(path)
        if not hasattr(owner, "reset_parameters"):
            raise ModelError(
                f"{name} has no first value: {type(owner).__name__} was made on the meta device and has no "
                "reset_parameters(); give Model(init=...), or make the model with storage"
            )
        made: Any = copy.deepcopy(owner).to_empty(device="cpu")
        with STATES, torch.random.fork_rng(devices=[]):  # ranks in threads share the generator
            torch.default_generator.manual_seed(_generator(seed, f"{section}.{path}").initial_seed())
            made.reset_parameters()
        value: Tensor = getattr(made, leaf)
        return value


def _sums(rules: Mapping[str, Rule]) -> bool:
    return any(isinstance(rule, Row) for rule in rules.values())


def _generator(seed: int, name: str) -> torch.Generator:
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(key[:7], "big"))


def _split(name: str) -> tuple[str, str, str]:
    head, dot, rest = name.partition(".")
    if head == "blocks":
        index, dot, rest = rest.partition(".")
        return f"blocks.{index}", dot, rest
    return head, dot, rest


def _width(embed: nn.Module) -> int:
    found = [module.embedding_dim for module in embed.modules() if isinstance(module, nn.Embedding)]
    if not found:
        raise ModelError("width must be given: embed has no nn.Embedding to read it off")
    return found[0]


def _values(sections: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """The values of parameters and buffers that have storage; not copied."""
    return {
        f"{section}.{name}": value.detach()
        for section, module in sections.items()
        for name, value in module.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor) and not value.is_meta
    }


def _without_storage(module: nn.Module) -> nn.Module:
    """A copy of the module on the meta device: shapes without memory. Buffers keep theirs."""
    memo: dict[int, object] = {
        id(parameter): nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        for parameter in module.parameters()
    }
    return copy.deepcopy(module, memo)
