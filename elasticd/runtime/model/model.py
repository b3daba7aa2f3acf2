"""A model as elasticd trains it: its sections, its tensor-parallel rules, its first values.

A copy of the user's modules without storage describes the full model. A device runs copies of its sections
(`local_model`): parameters have the local shape, attributes that count units have the local number, and the TP
group's collectives are hooked around the modules whose parameters are cut. The user's own modules give the
first values, and are retired once the job has them (`handed_over`).
"""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, NoReturn, Self

import torch
from elasticd_migration.exchange import checksum
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.model import Cut, ModelSpec, Parameter, Specs, Units
from torch import Tensor, nn

from elasticd.runtime.model.batch_format import BatchFormat, ItemPlaces
from elasticd.runtime.model.box_reader import BoxReader
from elasticd.runtime.model.handed_over import HandedOver, without_storage
from elasticd.runtime.model.model_graph import ModelGraph
from elasticd.runtime.model.pretrained import Pretrained
from elasticd.runtime.model.rng import Dropout, begun_at
from elasticd.runtime.model.tie_rules import rules_of_ties
from elasticd.runtime.model.tp_plan import rules_of_plan
from elasticd.runtime.model.tp_rules import (
    Column,
    Experts,
    PartialGrad,
    Row,
    Rule,
    RuleError,
    Sharded,
    UnitsOf,
    cut_at,
    whole_units,
)
from elasticd.runtime.model.validation import ModelError, buffers_of, refuse_module, replace_dropouts, shared
from elasticd.system.logs import is_first_worker
from elasticd.system.user_line import warning_level

__all__ = ["Init", "Model", "ModelError", "Module"]

Init = Callable[[str, tuple[int, ...], torch.Generator], Tensor]
#: (output of the head, batch) -> (sum of the losses, count of targets). On an accelerator the host waits for no
#: count that is a tensor there; the sum must then be 0, not NaN, where the count is 0.
Loss = Callable[[Any, Any], tuple[Tensor, float | Tensor]]


class Model:
    """A model in the one shape that elasticd trains: embed, an ordered list of blocks, head.

    An activation [samples, tokens, width] or named tensors pass between them: a `Bundle`. Parameters have full
    names: "embed.…", "blocks.3.…" or "head.…". Parameters that several sections share stay shared.
    """

    def __init__(
        self,
        *,
        embed: nn.Module | None = None,
        blocks: Sequence[nn.Module] = (),
        head: nn.Module | None = None,
        width: int | None = None,
        init: Init | Mapping[str, Tensor] | BoxReader | None = None,
        name: str = "model",
        rules: Mapping[str, Rule] | None = None,
        units: Mapping[str, UnitsOf] | None = None,
        ties: Mapping[str, str] | None = None,
        proved: str = "",
        tp_plan: Mapping[str, Any] | None = None,
        modules: Mapping[str, Model] | None = None,
    ) -> None:
        """
        Args:
            embed: makes the activation of the collated batch.
            blocks: the layers in order; each makes an activation of one.
            head: makes the output of the last activation.
            width: elements of the activation for each token. None: that of an nn.Embedding in `embed`.
            init: first values. A function init(name, shape, generator) gives the full value of a parameter,
                with a generator keyed by (seed, name). A mapping has full values by name. A `BoxReader` gives
                the boxes that a device holds. None: modules with
                storage start with their values, which all ranks must share; modules on the meta device call
                their own reset_parameters, keyed by (seed, module).
            name: of the model, for people.
            rules: tensor-parallel rules by patterns of full names. Without any, no TP group is wider than 1.
            units: the kinds of units that rules cut in. A kind without attributes need not be named: its count
                is the length of the cut dimension.
            ties: parameters that are to be shared and are not yet: a later name to an earlier one.
            proved: how the sections' output was verified, for `elasticd check` to print.
            tp_plan: rules in torch's words, beside `rules` or in their place: "colwise", "rowwise" or a rule,
                by names of modules, as in torch's parallelize_module. See `tp_plan.rules_of_plan`.
            modules: of a model of several modules each `elasticd.Module`, by name, in place of all other
                arguments but `name`. One computes the loss; the others run on items of samples, such as images,
                and it takes what they make. Full names begin with the module's: "vision.blocks.3.…".

        Raises:
            ModelError: the model cannot be trained so; the message says why, and what to do.
        """
        if modules is not None:
            self._join(modules, name)
            return
        #: The modules of a model of several; None: it has one.
        self.graph: ModelGraph[Module] | None = None
        if embed is None or head is None:
            raise ModelError("model: give it embed, blocks and head, or several modules: Model(modules={...})")
        if not len(blocks):
            raise ModelError("model: blocks must be a non-empty list of modules, the layers in order")
        given = {"embed": embed, **{f"blocks.{i}": block for i, block in enumerate(blocks)}, "head": head}
        for section, module in given.items():
            for path, submodule in module.named_modules(prefix=section):
                refuse_module(path, submodule)
        self.name, self.layers, self.proved = name, len(blocks), proved
        #: A module of blocks that may take several tokens at once and is whole on every member of a TP group,
        #: and what is said of it: the model has no sequence parallelism. None: no such module is known.
        self.mixing: tuple[str, str] | None = None
        #: Why its sequences cannot be packed, as far as that is known without trying it; else empty.
        self.unpackable = ""
        #: Reads the samples and batches of its library; None: the sections take batches as collate makes them.
        self.reads: BatchFormat | None = None
        #: Writes the model as its library does; None: it is of no library.
        self.pretrained: Pretrained | None = None
        #: The loss of a job that gives none; None: there is none.
        self.loss: Loss | None = None
        #: By full name: routers of experts, and the place of the logits of all experts in their outputs.
        self.routers: dict[str, int] = {}
        #: Parameters that move by counts, biases of routers say: no optimizer gets them.
        self.counted: frozenset[str] = frozenset()
        #: The model before that; None: it has none of them.
        self.unmoved: Model | None = None
        #: Checkpoints leave the frozen parameters out, because the script makes the same ones again.
        self.leaves_out_frozen = False
        self.rules, self.units = dict(rules or {}), dict(units or {})
        if tp_plan:
            planned, self.units = rules_of_plan(tp_plan, given, self.rules, self.units)
            self.rules |= {pattern: rule for pattern, rule in planned.items() if pattern not in self.rules}
        self.ties = shared(given) | dict(ties or {})
        self.sections = {
            section: replace_dropouts(section, module) for section, module in without_storage(given).items()
        }
        #: The modules as the user gave them.
        self.handed_over = HandedOver(given)
        self.width = _width(embed) if width is None else width
        self._reader = init if isinstance(init, BoxReader) else None
        self._init = None if isinstance(init, BoxReader) else init
        self._own = _values(given) if init is None else {}
        self._given_away: set[str] = set()  # names of values that only the job has now
        #: Parameters of several fused parts, by full name: the dimension that is theirs in what is trained.
        self.fused: dict[str, int] = {}
        self._owners: dict[str, dict[str, dict[str, Rule]]] = {section: {} for section in self.sections}
        self._check()
        #: By full name, and before the user's patterns: the rules that tied parameters take from each other.
        self.rules = {**rules_of_ties(self.ties, self.sections, self._named), **self.rules}
        self.spec = self._describe()
        self._check_experts()
        #: The full name of every value by its name in the state dict of the user's own modules: a tied one has
        #: several there.
        self.own_names = {
            name: self.ties.get(name, name)
            for section in self.sections
            for name in (f"{section}.{each.name}" for each in self.spec.section(section))
        }
        if is_first_worker() and not any(parameter.cut for kind in self.spec.kinds for parameter in kind):
            warnings.warn(
                f"elasticd: the model {name!r} has no tensor-parallel rules for its blocks: TP groups are not "
                "wider than 1. See 'Rules' in docs/training.md.",
                stacklevel=warning_level(),
            )

    def _join(self, modules: Mapping[str, Model], name: str) -> None:
        """Becomes the module that computes the loss, with all modules beside it."""
        for own, module in modules.items():
            if not isinstance(module, Module):
                raise ModelError(f"module {own!r} is a {type(module).__name__}: make it an elasticd.Module")
        owner: dict[int, tuple[str, str]] = {}
        for own, module in modules.items():
            for full, parameter in module.handed_over.parameters().items():
                other = owner.setdefault(id(parameter), (own, full))
                if other[0] != own:
                    raise ModelError(
                        f"{own}.{full} is the same parameter as {'.'.join(other)}: modules share none; give "
                        "each its own"
                    )
        graph = ModelGraph({own: module for own, module in modules.items() if isinstance(module, Module)}, name)
        self.__dict__.update(graph.loss_module.__dict__)
        self.graph, self.name = graph, name

    @classmethod
    def from_hf(cls, *_: object, **__: object) -> NoReturn:
        """The former name of `elasticd.from_hf`. Raises AttributeError, which names the present one."""
        raise AttributeError("Model.from_hf is elasticd.from_hf now: call that, with the same arguments")

    @property
    def all_own_names(self) -> Mapping[str, str]:
        """`own_names`, of all modules."""
        if self.graph is None:
            return self.own_names
        return {
            f"{name}.{own}": f"{name}.{full}"
            for name, module in self.graph.modules.items()
            for own, full in module.own_names.items()
        }

    @property
    def specs(self) -> Specs:
        """Its description, or that of each of its modules."""
        return self.spec if self.graph is None else self.graph.specs

    @property
    def dtype(self) -> torch.dtype:
        """The type of the activation between blocks: that of the first block's parameters."""
        return next(self.sections["blocks.0"].parameters()).dtype

    def computing_in(self, dtype: torch.dtype) -> Self:
        """The same model of one module with parameters, and so activations, of another dtype.

        Buffers and first values keep theirs.
        """
        made = copy.copy(self)
        made.sections, made.units = copy.deepcopy(self.sections), dict(self.units)
        for section, module in made.sections.items():
            for name, parameter in module.named_parameters():
                if f"{section}.{name}" not in self.counted:  # which are exact in their own type
                    parameter.data = parameter.data.to(dtype)
        made._described_anew()
        return made

    def counting(self, biases: Iterable[str], counts: Mapping[str, Tensor]) -> Self:
        """The same model of one module with parameters that move by counts.

        Args:
            biases: full names of parameters or buffers, biases of routers.
            counts: by full name the first values of further parameters of sections.

        Raises:
            ModelError: one is of a type in which counts are not exact.
        """
        made = copy.copy(self)
        made.unmoved = self.unmoved or self
        made.sections, made.units = copy.deepcopy(self.sections), dict(self.units)
        made.counted = frozenset(biases) | frozenset(counts)
        for full in sorted(biases):
            section, rest = split_name(full)
            path, _, leaf = rest.rpartition(".")
            owner = made.sections[section].get_submodule(path)
            value: Tensor = getattr(owner, leaf)
            if value.dtype not in (torch.float32, torch.float64):
                raise ModelError(
                    f"{full} is of {str(value.dtype).removeprefix('torch.')}, which is too coarse for a bias "
                    "that moves by a little at a step: make it of float32"
                )
            if leaf in owner._buffers:
                del owner._buffers[leaf]
                if not value.is_meta:
                    made._own = {**made._own, full: value.detach().clone()}
            owner.register_parameter(leaf, nn.Parameter(value.detach()))
        for full, value in counts.items():
            section, leaf = split_name(full)
            made._own = {**made._own, full: value}
            made.sections[section].register_parameter(leaf, nn.Parameter(value.to("meta")))
        made._described_anew()
        return made

    def _described_anew(self) -> None:
        """After a change of the modules of a copy."""
        self.fused, self._owners = {}, {section: {} for section in self.sections}
        self.spec = self._describe()

    def first(self) -> str:
        """A digest of the values that the modules have by themselves, or read; empty if they have none.

        The leader compares it between ranks.
        """
        if self.graph is not None:
            return self.graph.digest(Model.first)
        if self._reader is not None:
            return self._reader.digest()
        digest = hashlib.blake2b(digest_size=16)
        for name, value in sorted(self._own.items()):
            digest.update(f"{name} {checksum(value.detach().contiguous())}\n".encode())
        return digest.hexdigest() if self._own else ""

    @cached_property
    def frozen_digest(self) -> str:
        """A digest of the frozen parameters where checkpoints leave them out; else empty."""
        if self.graph is not None:
            return self.graph.digest(lambda module: module.frozen_digest)
        if not self.leaves_out_frozen or self._init is not None:
            return ""
        if self._reader is not None:
            return self._reader.digest()
        digest = hashlib.blake2b(digest_size=16)
        for name in self.spec.frozen:
            if name not in self._own:
                return ""  # made of the job's seed
            digest.update(f"{name} {checksum(self._own[name].contiguous())}\n".encode())
        return digest.hexdigest()

    def retire(self) -> None:
        """Retires the user's modules: the devices of a job have the first values. Nothing the second time."""
        if self.graph is not None:
            for module in self.graph.modules.values():
                module.retire()
            return
        if self.handed_over.retired:
            return
        kept = frozenset(self.spec.frozen) if self.leaves_out_frozen else frozenset[str]()
        for name in self._own.keys() - kept:
            del self._own[name]
            self._given_away.add(name)
        self.handed_over.retire()

    def rule(self, name: str) -> Rule | None:
        """The rule of a parameter (or of a dropout) by full name: the first whose pattern matches."""
        return next((rule for pattern, rule in self.rules.items() if fnmatchcase(name, pattern)), None)

    def pattern(self, name: str) -> str | None:
        """The pattern of that rule."""
        return next((pattern for pattern in self.rules if fnmatchcase(name, pattern)), None)

    def _named(self, name: str) -> tuple[str, Rule] | None:
        """The pattern that names a parameter, and its rule."""
        pattern = self.pattern(name)
        return None if pattern is None else (pattern, self.rules[pattern])

    def owners(self, section: str) -> dict[str, dict[str, Rule]]:
        """The submodules of a section whose parameters have rules.

        Returns:
            By path of the submodule in the section: the rules by name of the parameter in the submodule.
        """
        return self._owners[section]

    def communicates(self, sections: Iterable[str]) -> bool:
        """Returns True if the members of a TP group wait for each other in a forward pass through these
        sections."""
        return any(map(self._sums, sections))

    def _sums(self, section: str) -> int:
        """The number of all-reduces that a section makes in a forward pass."""
        owners = self._owners[section].values()
        return sum(any(isinstance(rule, Row | Experts) for rule in rules.values()) for rules in owners)

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
            if not isinstance(rule, Column | Row | Sharded | PartialGrad | Experts):
                raise ModelError(
                    f"rule {pattern!r} must be a Column, Row, Sharded, PartialGrad or Experts, not {rule!r}"
                )
            if not isinstance(rule, PartialGrad) and not rule.units:
                kind = type(rule).__name__
                units = "experts" if isinstance(rule, Experts) else "heads"
                raise ModelError(f"rule {pattern!r}: {kind} must say its units, as {kind}('{units}')")
            named = names | (dropouts if isinstance(rule, Sharded) else set())
            if not any(fnmatchcase(name, pattern) for name in named):
                raise ModelError(f"rule {pattern!r} matches no parameter of the model, such as {min(names)}")
        for tied in (*self.ties, *self.ties.values()):
            if tied not in names:
                raise ModelError(f"ties: {tied!r} is not a parameter of the model")

    def _check_experts(self) -> None:
        """Refuses experts of which a member would hold some parameters, and all of others."""
        for section, owners in self._owners.items():
            for path, rules in owners.items():
                ruled = next(((leaf, r) for leaf, r in rules.items() if isinstance(r, Experts)), None)
                if ruled is None:
                    continue
                start, count = f"{section}.{path}".rstrip("."), self.spec.units_of(ruled[1].units).count
                for name, parameter in self.sections[section].get_submodule(path).named_parameters():
                    full = f"{start}.{name}"
                    if self.rule(full) != ruled[1]:
                        raise ModelError(
                            f"{full} has no Experts rule, and {start}.{ruled[0]} has one: name all parameters "
                            f"of the module, as 'blocks.*.{path}.*'"
                        )
                    if parameter.dim() == 0 or parameter.shape[0] != count:
                        raise ModelError(
                            f"{full} {tuple(parameter.shape)} has not the {count} experts as its dimension 0"
                        )
                for name, buffer in self.sections[section].get_submodule(path).named_buffers():
                    if buffer.dim() and buffer.shape[0] == count:
                        raise ModelError(
                            f"{start}.{name} is a buffer of all {count} experts, and a member of a TP group "
                            "would read it by the numbers of its own: make it a parameter, frozen if need be"
                        )

    def _describe(self) -> ModelSpec:
        sizes: dict[str, list[int]] = {}
        described = {section: tuple(self._parameters(section, sizes)) for section in self.sections}
        kinds = list(dict.fromkeys(described[f"blocks.{i}"] for i in range(self.layers)))
        for kind in sizes:
            self.units.setdefault(kind, UnitsOf())
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
            collectives=-(-sum(self._sums(f"blocks.{i}") for i in range(self.layers)) // self.layers),
        )

    def _parameters(self, section: str, sizes: dict[str, list[int]]) -> Iterator[Parameter]:
        """Describes a section; notes the owners of cut parameters, and the cut sizes by kind of unit."""
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
            units = rule.units if rule is not None and not isinstance(rule, PartialGrad) else ""
            if cut is not None:
                sizes.setdefault(units, []).append(shape[dim])
            yield Parameter(
                name=name,
                shape=shape,
                dtype=str(parameter.dtype).removeprefix("torch."),
                cut=Cut(dim=dim, units=units) if cut is not None else None,
                replicas="add" if cut is not None or isinstance(rule, PartialGrad) else "same",
                kind="trained" if parameter.requires_grad else "frozen",
                fused=fused,
                experts=isinstance(rule, Experts),
            )
        for name, buffer in buffers_of(section, module):
            dtype = str(buffer.dtype).removeprefix("torch.")
            yield Parameter(name=name, shape=tuple(buffer.shape), dtype=dtype, kind="buffer")

    def parameter(self, name: str) -> Parameter:
        """The description of a parameter or buffer, by its full name."""
        section, rest = split_name(name)
        return next(parameter for parameter in self.spec.section(section) if parameter.name == rest)

    def first_value(self, name: str, box: Box, seed: int, dtype: torch.dtype | None = None) -> Tensor:
        """A box of a parameter's or buffer's first value, the same under every layout.

        Args:
            name: the full name.
            box: of the full tensor.
            seed: of the job.
            dtype: of a parameter's value; None: its own.

        Returns:
            A new tensor of the box's shape.

        Raises:
            ModelError: there is no value, or it has another shape than the parameter.
        """
        if self.graph is not None:
            module, rest = self.graph.named(name)
            return module.first_value(rest, box, seed, dtype)
        rule = self.parameter(name)
        if rule.kind == "buffer":
            buffer = self.sections[split_name(name)[0]].get_buffer(rule.name)
            if not buffer.is_meta:
                return buffer.detach().clone()
        dtype = dtype or getattr(torch, rule.dtype)
        if self._reader is not None and not (name in self.counted and name in self._own):
            part = self._read(self._reader, name, box)  # perhaps memory of the file
            return part.to(dtype, copy=True, memory_format=torch.contiguous_format)
        value, shape = self._whole(name, rule, seed), rule.shape
        if name in self.fused:
            value = value.unflatten(self.fused[name], (shape[self.fused[name]], -1))
        part = value[box.slices(Box.whole(shape))]
        return part.detach().to(dtype).clone(memory_format=torch.contiguous_format)

    def _read(self, reader: BoxReader, name: str, box: Box) -> Tensor:
        """A box of a value, of a fused one part by part: its parts lie one behind the other in the module's."""
        dim = self.fused.get(name)
        if dim is None:
            return reader.read(name, box)
        size = self.parameter(name).shape[dim + 1]
        start, stop = list(box.start), list(box.stop)
        parts = []
        for part in range(start[dim], stop[dim]):
            first, last = (part * size + edge[dim + 1] for edge in (start, stop))
            own = Box(
                start=(*start[:dim], first, *start[dim + 2 :]), stop=(*stop[:dim], last, *stop[dim + 2 :])
            )
            parts.append(reader.read(name, own))
        return torch.stack(parts, dim)

    def module_shape(self, name: str) -> tuple[int, ...]:
        """The shape that the user's module gives a parameter: what is trained has another if it is fused."""
        section, rest = split_name(name)
        return tuple(self.sections[section].state_dict(keep_vars=True)[rest].shape)

    def trained_parameters(self) -> dict[str, Tensor]:
        """The parameters of the optimizer by full name, as the user's modules have them, on the meta device.
        One that several sections share is there once."""
        if self.graph is not None:
            return self.graph.together(Model.trained_parameters)
        trained: dict[str, Tensor] = {}
        for section, module in self.sections.items():
            for name, parameter in module.named_parameters():
                if parameter.requires_grad and f"{section}.{name}" not in self.counted:
                    trained.setdefault(self.spec.owner(f"{section}.{name}"), parameter.detach())
        return trained

    def _whole(self, name: str, rule: Parameter, seed: int) -> Tensor:
        """A whole first value, of the shape that its module gives it."""
        shape = self.module_shape(name)
        if name in self.counted and name in self._own:
            return self._own[name]
        if isinstance(self._init, Mapping):
            if name not in self._init:
                raise ModelError(f"init has no value for {name}; it has {', '.join(list(self._init)[:3])}, ...")
            value, said = self._init[name], f"init[{name!r}] is of"
        elif self._init is not None:
            value, said = self._init(name, shape, _generator(seed, name)), f"init({name!r}) gave"
        elif name in self._own:
            value, said = self._own[name], f"{name} has"
        elif name in self._given_away:
            raise ModelError(
                f"{name} has no first value: a job has begun with this model, and took it. Make the modules "
                "and the elasticd.Model anew for another job, or resume from a checkpoint"
            )
        else:
            value, said = self._reset(name, seed), f"reset_parameters made of {name}"
        if tuple(value.shape) != shape:
            raise ModelError(f"{said} shape {tuple(value.shape)}, not {shape}")
        return value

    def _reset(self, name: str, seed: int) -> Tensor:
        """As the module itself would start: its generator is keyed by (seed, module)."""
        section, rest = split_name(name)
        path, _, leaf = rest.rpartition(".")
        owner = self.sections[section].get_submodule(path)
        if not hasattr(owner, "reset_parameters"):
            raise ModelError(
                f"{name} has no first value: {type(owner).__name__} was made on the meta device and has no "
                "reset_parameters(); give Model(init=...), or make the model with storage"
            )
        made: Any = copy.deepcopy(owner).to_empty(device="cpu")
        with begun_at(_generator(seed, f"{section}.{path}").initial_seed()):
            made.reset_parameters()
        return getattr(made, leaf)


class Module(Model):
    """One module of a model of several: sections of its own (embed, blocks, head), with a layout of its own."""

    items: str  #: under which key a sample has the items that the module runs on; empty: it runs on samples
    takes: dict[str, str]  #: by key in the batch: of which module it takes what that made of the items
    places: dict[str, ItemPlaces]  #: by the same keys: the tokens of a sample that take rows of its items

    def __init__(
        self,
        *,
        items: str = "",
        takes: Mapping[str, str] | None = None,
        places: Mapping[str, ItemPlaces] | None = None,
        **described: Any,
    ) -> None:
        """
        Args:
            items: a key of samples, "images" say, under which each has a list of tensors, or of mappings of
                tensors. The module runs on one of them at a time, [1, ...]; its head gives [1, rows, width], or
                named tensors of which each begins so. Empty: the module runs on samples.
            takes: by key: the module that makes what `embed` finds in its batch under that key: the rows of all
                items of the micro-batch, in order, [rows, width] (or named tensors); None where there are none.
            places: by the keys of `takes`: a function of a sample, without its items, that gives a mask of its
                tokens, bool [tokens]: the j-th True one takes the j-th row of the sample's items. Where
                sequences are cut, `embed` then finds the rows of its own tokens alone.
            described: as for `elasticd.Model`: embed, blocks, head, width, rules, units, ...

        Raises:
            ModelError: the module cannot be trained so; the message says why, and what to do.
        """
        super().__init__(**described)
        self.items, self.takes, self.places = items, dict(takes or {}), dict(places or {})
        if strangers := sorted(self.places.keys() - self.takes.keys()):
            raise ModelError(
                f"places are given of {strangers[0]!r}, and the module takes "
                f"{', '.join(self.takes) or 'nothing'}: name them by the keys of takes"
            )
        if items and takes:
            raise ModelError(
                f"a module of {items} takes {', '.join(self.takes)}: modules of items that take other modules' "
                "outputs are not supported; join the two in one module"
            )


def _generator(seed: int, name: str) -> torch.Generator:
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(key[:7], "big"))


def split_name(name: str) -> tuple[str, str]:
    """The section of a parameter or module, by its full name, and its name in it.

    "blocks.3.attention.q.weight" is "attention.q.weight" in "blocks.3"; a section itself has the name "".
    """
    section, _, rest = name.partition(".")
    if section == "blocks":
        index, _, rest = rest.partition(".")
        section = f"blocks.{index}"
    return section, rest


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
