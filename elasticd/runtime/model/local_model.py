"""The sections of a model that one device runs: copies with parameters of the local shape."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from elasticd_planner.layout.layouts import sections_of
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.model import Parameter, block_of, held_units, member_boxes, unit_range
from elasticd_planner.spec.plan import Stage
from torch import Tensor, nn

from elasticd.runtime.accelerator import CPU, Accelerator
from elasticd.runtime.model.bundle import unfit
from elasticd.runtime.model.model import Model
from elasticd.runtime.model.rng import Dropout, DropoutCut, ModelRng
from elasticd.runtime.model.tp_rules import Sharded, attribute_holders, listed, sides_of
from elasticd.runtime.model.validation import ModelError


class LocalParameter(NamedTuple):
    """One device's part of a parameter: a box of it, or several as one tensor."""

    boxes: tuple[Box, ...]  #: disjoint and in order; several differ in one dimension alone
    tensor: nn.Parameter  #: these boxes, one behind the other along that dimension

    def slices(self, box: Box) -> tuple[slice, ...]:
        """The slices of the tensor at which a box lies that is in one of `boxes`."""
        if len(self.boxes) == 1:
            return box.slices(self.boxes[0])
        first, second = self.boxes[:2]
        dim = next(d for d, (a, b) in enumerate(zip(first.start, second.start, strict=True)) if a != b)
        begins = accumulate((held.shape[dim] for held in self.boxes), initial=0)
        held, begin = next(
            (held, at) for held, at in zip(self.boxes, begins, strict=False) if held.contains(box)
        )
        inside = list(box.slices(held))
        inside[dim] = slice(inside[dim].start + begin, inside[dim].stop + begin)
        return tuple(inside)

    def part(self, box: Box) -> Tensor:
        """The values of a box, not copied."""
        return self.tensor.detach()[self.slices(box)]


@dataclass(frozen=True)
class LocalModel:
    """The part of a model that one device runs."""

    modules: dict[str, nn.Module]  #: by section, in order
    #: A pass of each section: its module's call, with draws keyed and the output checked to be a `Bundle`.
    passes: dict[str, Callable[..., Any]]
    parameters: dict[str, LocalParameter]  #: by full name
    buffers: dict[str, Tensor]  #: the persistent ones, by full name
    drawing: ModelRng = field(default_factory=ModelRng)  #: keys the modules' random draws
    #: By section: have its modules see their fused parameters as one, before a graph of torch.compile that the
    #: section is a part of.
    views: dict[str, list[Callable[..., None]]] = field(default_factory=dict)


def local_model(
    model: Model, stage: Stage, position: int, accelerator: Accelerator = CPU, *, only: Collection[str] = ()
) -> LocalModel:
    """Makes the modules of one device, without values.

    Args:
        model: the full model.
        stage: the device's stage.
        position: its rank in the stage's TP group.
        accelerator: where its tensors lie.
        only: the sections to make; empty: all of the stage.

    Returns:
        Modules whose parameters are to be filled. A pass of a section raises ModelError when it gives no
        `Bundle`.
    """
    local = LocalModel(modules={}, passes={}, parameters={}, buffers={})
    for section in only or sections_of(model.spec, stage):
        whole = model.sections[section]
        # The parameters are replaced below, so that those of the full model are not copied.
        module = copy.deepcopy(whole, {id(parameter): parameter for parameter in whole.parameters()})
        for rule in model.spec.section(section):
            name = model.spec.owner(f"{section}.{rule.name}")
            boxes = member_boxes(model.spec, rule, stage, position, block_of(section))
            path, _, leaf = rule.name.rpartition(".")
            owner = module.get_submodule(path)
            empty = torch.empty(
                _shape_of(rule, boxes), dtype=getattr(torch, rule.dtype), device=accelerator.device
            )
            if rule.kind == "buffer":
                _share(module, owner.get_buffer(leaf), local.buffers.setdefault(name, empty))
                continue
            if name not in local.parameters:
                # Biases of routers have counts as gradients.
                needs = rule.kind == "trained" and name not in model.counted
                tensor = nn.Parameter(empty, requires_grad=needs)
                local.parameters[name] = LocalParameter(boxes, tensor)
            held = local.parameters[name].tensor
            fused = model.fused.get(f"{section}.{rule.name}")
            if fused is None:
                setattr(owner, leaf, held)
            else:
                local.views.setdefault(section, []).append(_fuse(module, owner, leaf, held, fused))
        _settle(module, accelerator.device)
        _set_units(model, section, module, stage, position)
        _key_dropouts(model, section, module, stage, position, local.drawing)
        local.modules[section] = module
        local.passes[section] = pass_of(section, module, local.drawing)
    return local


def _shape_of(rule: Parameter, boxes: tuple[Box, ...]) -> tuple[int, ...]:
    """The shape of these boxes of a parameter, one behind the other along the dimension that is cut."""
    if len(boxes) == 1:
        return boxes[0].shape
    assert rule.cut is not None
    dim = rule.cut.dim
    return (*rule.shape[:dim], sum(box.shape[dim] for box in boxes), *rule.shape[dim + 1 :])


def _share(module: nn.Module, old: Tensor, new: Tensor) -> None:
    """Every submodule that has the one buffer has the other now: a change in one is seen in all."""
    for submodule in module.modules():
        for name, buffer in list(submodule.named_buffers(recurse=False, remove_duplicate=False)):
            if buffer is old:
                setattr(submodule, name, new)


def _settle(module: nn.Module, device: torch.device) -> None:
    """Buffers outside of the state dict come along, with the values that the user's model gave them."""
    for buffer in dict(module.named_buffers()).values():
        if buffer.device != device and not buffer.is_meta:
            _share(module, buffer, buffer.to(device))


def _fuse(section: nn.Module, owner: nn.Module, leaf: str, held: nn.Parameter, dim: int) -> Callable[..., None]:
    """The module sees the parts of a fused parameter as one, as it made them; what is trained has a dimension
    of its own for the parts, so that one box is a member's. A graph of torch.compile takes them as they are one
    when its section is called, or by the function that is returned."""
    delattr(owner, leaf)
    owner.register_parameter(f"{leaf}_parts", held)

    def view(*_: object) -> None:
        if not torch.compiler.is_dynamo_compiling():
            owner.__dict__[leaf] = held.flatten(dim, dim + 1)

    view()
    for module in dict.fromkeys((section, owner)):
        module.register_forward_pre_hook(view, prepend=True)
    return view


def repeats(model: Model, kind: str, shares: tuple[int, ...], position: int) -> list[int] | None:
    """Which kv-head each of a member's heads reads, for any kind of units that follow others.

    Args:
        model: has the units.
        kind: of the units, "kv_heads" say.
        shares: of the TP group's members.
        position: the member's rank.

    Returns:
        For each of the member's followed units the index among its own units of this kind; None if each of its
        own serves as many as in the full model.
    """
    units = model.spec.units_of(kind)
    if units.follows is None:
        return None
    lead = unit_range(model.spec, units.follows, shares, position)
    mine = unit_range(model.spec, kind, shares, position)
    per = model.spec.units_of(units.follows).count // units.count
    if lead.start % per == 0 and lead.stop % per == 0:
        return None
    return [head // per - mine.start for head in lead]


def _set_units(model: Model, section: str, module: nn.Module, stage: Stage, position: int) -> None:
    cut = {rule.name: rule.cut.units for rule in model.spec.section(section) if rule.cut}
    experts = {rule.cut.units for rule in model.spec.section(section) if rule.experts and rule.cut}
    for kind, units in model.units.items():
        if (not units.attribute and not units.ratio) or not {kind, units.follows} & {*cut.values()}:
            continue  # the section has all of these units
        count = model.spec.units_of(kind).count
        block = block_of(section) if kind in experts else None
        repeated = None if block is not None else repeats(model, kind, stage.shares, position)
        local = len(repeated or held_units(model.spec, kind, stage, position, block))
        for full, found, name in attribute_holders(section, module, listed(units.attribute)):
            if block is None or _has_cut(kind, cut, found, full.removeprefix(section)[1:].removesuffix(name)):
                setattr(found, name, getattr(found, name) // count * local)
        if repeated is not None:
            for _, found, name in attribute_holders(section, module, listed(units.ratio)):
                setattr(found, name, 1)
    for found, name, leaf, dim in _sizes(model, section, module):
        setattr(found, name, tuple(getattr(found, leaf).shape)[dim])


def _has_cut(kind: str, cut: Mapping[str, str], module: nn.Module, path: str) -> bool:
    """Returns False if a module has parameters, and none that is cut in these units.

    Args:
        kind: of the units.
        cut: by parameter of its section the units that it is cut in.
        module: it.
        path: its path in the section, with a dot at its end, or empty.
    """
    own = [name for name, _ in module.named_parameters()]
    return not own or any(cut.get(f"{path}{name}") == kind for name in own)


def _sizes(model: Model, section: str, module: nn.Module) -> list[tuple[nn.Module, str, str, int]]:
    """Attributes in which torch's own modules keep the sizes of their weights."""
    found: list[tuple[nn.Module, str, str, int]] = []
    for path in model.owners(section):
        owner = module.get_submodule(path)
        if isinstance(owner, nn.Linear):
            found += [(owner, "out_features", "weight", 0), (owner, "in_features", "weight", 1)]
        elif isinstance(owner, nn.Embedding):
            found += [(owner, "num_embeddings", "weight", 0), (owner, "embedding_dim", "weight", 1)]
        elif sides_of(owner) is not None:  # the Conv1D of transformers
            found += [(owner, "nf", "weight", 1), (owner, "nx", "weight", 0)]
    return found


def _key_dropouts(
    model: Model, section: str, module: nn.Module, stage: Stage, position: int, drawing: ModelRng
) -> None:
    """Dropouts learn their keys and cuts."""
    for path, submodule in module.named_modules(prefix=section):
        if isinstance(submodule, Dropout):
            submodule.drawing = drawing
            rule = model.rule(path)
            if isinstance(rule, Sharded):
                units = unit_range(model.spec, rule.units, stage.shares, position)
                submodule.cut = DropoutCut(dim=rule.dim, first=units.start, units=len(units))


def pass_of(section: str, module: nn.Module, drawing: ModelRng) -> Callable[..., Any]:
    """A pass of a section, or of several that are one module. Nothing is hooked to the module, whose calls are
    torch's quick ones.

    Args:
        section: its name, by which draws are keyed.
        module: called for a pass.
        drawing: keys the draws.
    """
    return drawing.around(section, module, partial(_refuse_others, section, module))


def _refuse_others(section: str, module: nn.Module, entered: Any, output: Any) -> None:
    """A section gives one tensor or named tensors; `output` is not a tensor."""
    if not isinstance(output, Mapping):
        what = f"a {type(output).__name__}" + (f" of {len(output)}" if isinstance(output, tuple | list) else "")
        raise ModelError(
            f"{section} gave {what}: a section gives one tensor, or a mapping of named tensors, such as "
            '{"hidden": x, "positions": positions}'
        )
    if reason := unfit(output, passes=section != "head"):
        raise ModelError(f"{section} gave {reason}")
    if not torch.is_grad_enabled() or any(x.requires_grad for x in output.values()):
        return
    trains = any(parameter.requires_grad for parameter in module.parameters())  # the script may freeze them
    came = entered.values() if isinstance(entered, Mapping) else (entered,)
    if trains or any(isinstance(x, Tensor) and x.requires_grad for x in came):
        raise ModelError(
            f"{section} gave no tensor that needs a gradient, though parameters "
            f"{'of it' if trains else 'before it'} are trained: does it detach its output?"
        )
