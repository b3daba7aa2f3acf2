"""The reference step: forward and backward pass of the user's own modules, without the engine.

The modules get the model's first values on the job's device, and keyed dropouts in place of their own, so that
they draw as the engine does. They are called as a plain script would call them, on a batch that the engine was
given, and are as they were afterwards.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from elasticd_planner.spec.box import Box
from torch import Tensor, nn

from elasticd.runtime.engine.item_border import joined, row_of
from elasticd.runtime.engine.module_engine import draw_seed
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.model.handed_over import REGISTERED
from elasticd.runtime.model.model import Loss, Model
from elasticd.runtime.model.rng import Dropout, ModelRng, watching
from elasticd.runtime.model.validation import replace_dropouts, sum_and_count
from elasticd.runtime.parallel.packed_row import passing

#: The tables of a module in which torch registers what it has.
_TABLES = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """A batch as the engine got it, from before any module saw it."""

    entered: Any  #: what the embedding is called with
    targets: Any  #: what the loss is called with, beside the output
    ids: Sequence[int]  #: of its samples


@dataclass(frozen=True, kw_only=True)
class PlainStep:
    """The result of one step of the user's modules. Losses and gradients are sums over targets."""

    loss: float
    targets: float
    outputs: dict[str, dict[str, Tensor]]  #: by section, and by the names of its tensors; "" of a single one
    gradients: dict[str, Tensor]  #: of the parameters that have one, in the shape of their modules
    draws_backward: bool  #: whether its backward pass drew random numbers, which the engine keys by section
    attributes: tuple[str, ...]  #: those of modules that forward set, by full name
    is_mean: bool  #: whether the loss is a mean beside a count: the same for the batch and for all of it twice


def plain_step(
    recipe: Recipe, batch: MicroBatch, items: Mapping[str, Sequence[MicroBatch]] = MappingProxyType({})
) -> PlainStep:
    """Takes one step of the modules that the user gave. Raises what they raise.

    Args:
        recipe: of the job.
        batch: of the module that computes the loss.
        items: of a model of several modules: the items of the batch, in their order, by module.
    """
    precision, graph, device = recipe.precision, recipe.model.graph, recipe.accelerator.device
    modules = {recipe.model.name: recipe.model} if graph is None else graph.modules
    with ExitStack() as lent:
        plain = {
            name: _PlainModule(
                f"{name}." if graph is not None else "",
                recipe.seed if graph is None else draw_seed(recipe.seed, name),
                *lent.enter_context(_lent(module, recipe.seed, device)),
            )
            for name, module in modules.items()
        }
        own, entered = plain[recipe.model.name if graph is None else graph.own], batch.entered
        before = {name: value for each in plain.values() for name, value in each.attributes()}
        with torch.enable_grad(), passing(None), own.drawing.kept():
            for key, name in graph.loss_module.takes.items() if graph is not None else ():
                with plain[name].drawing.kept():
                    made = [row_of(plain[name].forward(each), 0) for each in items[name]]
                entered = {**entered, key: joined(made)}
            x = own.forward(batch, entered)
            with own.drawing.keyed("loss"):
                output = precision.leaving(x) if precision else x
                total, count = sum_and_count(recipe.loss(output, batch.targets))
                is_mean = _is_mean(recipe.loss, output, batch, total, count)
            after = {name: value for each in plain.values() for name, value in each.attributes()}
            with watching() as draws:
                if total.requires_grad:
                    total.backward()
        return PlainStep(
            loss=float(total.detach()),
            targets=float(count),
            outputs={name: value for each in plain.values() for name, value in each.outputs.items()},
            gradients={name: value for each in plain.values() for name, value in each.gradients()},
            draws_backward=draws.drew,
            attributes=tuple(name for name, value in after.items() if before.get(name) is not value),
            is_mean=is_mean,
        )


class _PlainModule:
    """The sections of one module of the user's, as a plain script calls them."""

    outputs: dict[str, dict[str, Tensor]]  #: by section, of the first micro-batch

    def __init__(
        self,
        prefix: str,
        seed: int,
        sections: Mapping[str, nn.Module],
        parameters: Mapping[str, nn.Parameter],
    ) -> None:
        """
        Args:
            prefix: of its names among those of all modules.
            seed: of its draws.
            sections: in their order.
            parameters: by their names in it.
        """
        self._prefix, self._sections, self._parameters = prefix, sections, parameters
        self.drawing, self.outputs = ModelRng(), {}
        self.drawing.begin(seed, 0)

    def forward(self, batch: MicroBatch, entered: Any = None) -> Any:
        """The output of the last section; `entered`: what the first one is called with, if not the batch."""
        x = batch.entered if entered is None else entered
        self.drawing.samples = list(batch.ids)
        for section, module in self._sections.items():
            called = _with_keyed_dropouts(section, module, self.drawing)
            with self.drawing.section(section):
                x = called(x)
            named = {"": x} if isinstance(x, Tensor) else x
            values = {k: v.detach().clone() for k, v in named.items() if isinstance(v, Tensor)}
            self.outputs.setdefault(self._prefix + section, values)
        return x

    def attributes(self) -> Iterator[tuple[str, Any]]:
        """Attributes of its modules that torch does not register, by full name."""
        for name, value in _attributes(self._sections).items():
            yield self._prefix + name, value

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Those of the parameters that have one, by full name."""
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                yield self._prefix + name, parameter.grad.detach()


def _is_mean(loss: Loss, output: Any, batch: MicroBatch, total: Tensor, count: float | Tensor) -> bool:
    """Returns True for a loss that is a mean where a sum is asked for: the sum of a batch that has every sample
    twice is twice as large, as its count of targets is. A loss that cannot take such a batch is none."""
    samples = len(batch.ids)
    try:
        with torch.no_grad():
            twice, targets = sum_and_count(loss(_twice(output, samples), _twice(batch.targets, samples)))
    except Exception:
        return False
    alone, both = float(total.detach()), float(twice)
    return (
        0 < abs(alone) < math.inf
        and math.isclose(float(targets), 2 * float(count))
        and math.isclose(both, alone, rel_tol=1e-3)
    )


def _twice(value: Any, samples: int) -> Any:
    """A batch or output of so many samples, with all of them twice."""
    if isinstance(value, Tensor):
        return torch.cat([value, value]) if value.dim() and value.shape[0] == samples else value
    if isinstance(value, Mapping):
        return {name: _twice(part, samples) for name, part in value.items()}
    return [*value, *value] if isinstance(value, list) and len(value) == samples else value


@contextmanager
def _lent(
    model: Model, seed: int, device: torch.device
) -> Iterator[tuple[dict[str, nn.Module], dict[str, nn.Parameter]]]:
    """The user's modules by section, on a device, with the values that a job of this seed begins with, and
    their parameters by full name, those that are shared by that of their first use.

    They are the user's own objects, so that whatever else reaches them sees what happens to them; but copies
    where they lie on the meta device. Afterwards they are as before.
    """
    sections = model.handed_over.sections
    if any(parameter.is_meta for module in sections.values() for parameter in module.parameters()):
        sections = copy.deepcopy(sections)
    parameters: dict[str, nn.Parameter] = {}
    with ExitStack() as undo:
        for module in {id(each): each for section in sections.values() for each in section.modules()}.values():
            undo.callback(_restore, module, dict(vars(module)), [dict(vars(module)[t]) for t in _TABLES])
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    module._buffers[name] = buffer.detach().to(device, copy=True)
        for name, owner, leaf in _places(model, sections):
            shared = model.spec.owner(name)
            if shared in parameters:
                setattr(owner, leaf, parameters[shared])
                continue
            value = model.first_value(shared, Box.whole(model.parameter(shared).shape), seed)
            value = value.reshape(model.module_shape(shared)).to(device)
            parameter = owner._parameters[leaf]
            assert parameter is not None
            if parameter.is_meta:
                parameter = nn.Parameter(value, requires_grad=parameter.requires_grad)
                setattr(owner, leaf, parameter)
            else:
                undo.callback(_give_back, parameter, parameter.data, parameter.grad)
                parameter.grad, parameter.data = None, value
            parameters[shared] = parameter
        yield sections, parameters


def _restore(module: nn.Module, attributes: Mapping[str, Any], tables: Sequence[Mapping[str, Any]]) -> None:
    vars(module).clear()
    vars(module).update(attributes)
    for table, entries in zip(_TABLES, tables, strict=True):
        vars(module)[table].clear()
        vars(module)[table].update(entries)


def _give_back(parameter: nn.Parameter, value: Tensor, gradient: Tensor | None) -> None:
    parameter.grad = None
    parameter.data = value
    parameter.grad = gradient


def _places(model: Model, sections: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module, str]]:
    """Each parameter's full name, the module that registers it, and its name there."""
    for section, module in sections.items():
        for described in model.spec.section(section):
            if described.kind != "buffer":
                path, _, leaf = described.name.rpartition(".")
                yield f"{section}.{described.name}", module.get_submodule(path), leaf


def _with_keyed_dropouts(section: str, module: nn.Module, drawing: ModelRng) -> nn.Module:
    """The section with dropouts that draw as those of the engine's copy: blocks may share a module."""
    module = replace_dropouts(section, module)
    for path, each in module.named_modules(prefix=section):
        if isinstance(each, Dropout):
            each.site, each.drawing = path, drawing
    return module


def _attributes(sections: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Returns the attributes of modules that torch does not register, by full name."""
    return {
        f"{path}.{name}": value
        for section, module in sections.items()
        for path, each in module.named_modules(prefix=section)
        for name, value in vars(each).items()
        if name not in REGISTERED and not isinstance(each, Dropout)
    }
