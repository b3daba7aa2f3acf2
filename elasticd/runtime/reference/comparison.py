"""One step of the user's own modules beside one of the engine on one device: differences, and likely causes.

Both take the same samples from the same first values with the same draws, so that they agree but for rounding,
unless something of the script acts on the modules that were given and not on the copies that train: a closure
(a hook, a patched forward, the loss), an attribute that forward sets, a draw that nothing keys.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from elasticd.runtime.comm.communicators import GlooCommunicators
from elasticd.runtime.data.stream import Stream
from elasticd.runtime.engine.engine import Engine
from elasticd.runtime.engine.mixed_precision import converted
from elasticd.runtime.engine.module_engine import ModuleEngine
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.model.model import Model, Module, split_name
from elasticd.runtime.model.model_graph import ModelGraph
from elasticd.runtime.model.validation import ModelError
from elasticd.runtime.reference import layouts
from elasticd.runtime.reference.chosen_samples import first_items, recipe_of_samples
from elasticd.runtime.reference.plain_step import MicroBatch, PlainStep, plain_step
from elasticd.runtime.reference.trial import Member, Trial, tried

#: Relative differences that rounding explains between one order of the same operations and another.
NEAR = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.05}
#: What a device or the host raises where a step does not fit.
_NO_MEMORY = (MemoryError, torch.OutOfMemoryError)
#: Parameters, attributes or sections that a message names.
_NAMED = 3

_SEE = "see 'What your script still holds' in docs/training.md"


class NotCompared(Exception):
    """The step cannot be made here: why."""


def refuse_differences(recipe: Recipe, samples: int) -> PlainStep:
    """Compares one step of the user's modules with one of the engine, on this process's device. Of a model of
    several modules the samples have items, as far as samples of the dataset have some.

    Args:
        recipe: of the job.
        samples: of the micro-batch that both take.

    Returns:
        The step of the user's modules, without a balance of experts.

    Raises:
        ModelError: the steps differ. The message has what differs and the likely cause.
        NotCompared: one of the two steps cannot be made.
    """
    model = recipe.model.unmoved or recipe.model
    recipe = replace(recipe, model=model, balance=None)  # which your modules by themselves have not
    model = recipe.model
    if any(module.handed_over.retired for module in _modules(model).values()):
        raise NotCompared("your modules were given to an earlier job")
    data = replace(recipe.data, packing=None, global_tokens=None)
    recipe = replace(recipe, data=data, clip=None, connect=GlooCommunicators)  # which one member needs not
    if model.graph is not None:
        recipe = _with_items(recipe, model.graph.items, samples)
        samples = recipe.global_batch
    engine, batches, items = _engine_step(recipe, samples)
    where, error = engine.failed or ("", None)
    (member,) = engine.members.values()
    if isinstance(error, ModelError):
        raise error
    elsewhere = not batches or member.gradients or isinstance(error, _NO_MEMORY)
    if error is not None and elsewhere:  # in the dataset, or in the update
        raise NotCompared(first_line(error)) from error
    if error is None and not engine.applied:
        raise NotCompared("its gradients are not finite, or its samples have no target")
    try:
        plain = plain_step(recipe, batches[-1], items)
    except ModelError:
        raise
    except Exception as failure:
        raise NotCompared(f"your modules cannot run by themselves: {first_line(failure)}") from failure
    if error is not None:
        raise ModelError(
            f"your own modules take a step, and the copies that train fail in {where or 'the loss'} with "
            f"{first_line(error)}. {_cause(plain, member)}; {_SEE}"
        ) from error
    if plain.is_mean:
        raise ModelError(
            "the loss returns a mean and its count: of every sample twice it is the same, the count is twice "
            "as large. Return the sum over targets (reduction='sum') and their count: elasticd divides the sum "
            f"by the count of the whole global batch; {_SEE}"
        )
    if plain.draws_backward:
        raise NotCompared("its backward pass draws random numbers")
    if differences := list(_differences(model, plain, engine.loss, member)):
        raise ModelError(
            f"a step of your own modules and one of the copies that train differ: {'; '.join(differences)}. "
            f"{_cause(plain, member)}; {_SEE}"
        )
    if model.graph is not None:
        _refuse_unused(model.graph, plain, items)
    return plain


def _refuse_unused(
    graph: ModelGraph[Module], plain: PlainStep, items: Mapping[str, Collection[object]]
) -> None:
    """Raises ModelError for a trained module whose items the step had, and that got no gradient of them."""
    own = graph.loss_module
    for key, name in own.takes.items():
        parameters = graph.modules[name].spec.parameters.values()
        trained = any(parameter.kind == "trained" for parameter in parameters)
        if trained and items[name] and not any(each.startswith(f"{name}.") for each in plain.gradients):
            raise ModelError(
                f"module {graph.own!r} takes {name!r} as {key!r}, and no parameter of {name} gets a gradient "
                f"in a step with {graph.modules[name].items}: let the embed of {graph.own} use "
                f"batch[{key!r}], or leave {name} out"
            )


def _modules(model: Model) -> Mapping[str, Model]:
    """The modules of a model by the prefix of their names."""
    return (
        {"": model} if model.graph is None else {f"{name}.": each for name, each in model.graph.modules.items()}
    )


def _with_items(recipe: Recipe, kinds: Collection[str], samples: int) -> Recipe:
    """The recipe of a step of some of the first samples that have items, of the fewest."""
    assert not isinstance(recipe.dataset, Stream)
    counts = first_items(recipe.dataset, kinds)
    chosen = sorted(range(len(counts)), key=lambda index: (not counts[index], counts[index]))[:samples]
    return replace(recipe_of_samples(recipe, chosen), micro_batch=len(chosen))


def _engine_step(recipe: Recipe, samples: int) -> tuple[Trial, list[MicroBatch], dict[str, list[MicroBatch]]]:
    """A step of the engine, and the batch that it got, with its items by module; none where it failed before.
    Raises ModelError where its backward pass reaches parameters of the user's modules."""
    batches, items, graph = list[MicroBatch](), dict[str, list[MicroBatch]](), recipe.model.graph
    originals = {
        prefix + name: parameter
        for prefix, module in _modules(recipe.model).items()
        for name, parameter in module.handed_over.parameters().items()
    }
    gradients = {name: parameter.grad for name, parameter in originals.items()}
    for parameter in originals.values():
        parameter.grad = None
    try:
        if graph is None:
            alone = layouts.alone(recipe.model.spec, samples)
        else:
            described = {name: (module.spec, module.items) for name, module in graph.modules.items()}
            alone = layouts.modules_alone(described, samples)
        trial = tried(recipe, alone, lambda engine: _keep_batch(engine, batches, items))
        reached = [name for name, parameter in originals.items() if parameter.grad is not None]
    finally:
        for name, parameter in originals.items():
            parameter.grad = gradients[name]
    if reached:
        raise ModelError(
            f"{_some(reached)} of your own modules got a gradient from the copies that train: a function that "
            "closes over your module reaches it (a hook, a patched forward, the loss), and what it reaches "
            "would never be trained. Write it as a method that uses self, and give the loss what it needs as "
            f"an output; {_SEE}"
        )
    return trial, batches, items


def _keep_batch(engine: Engine, batches: list[MicroBatch], items: dict[str, list[MicroBatch]]) -> None:
    """Keeps the first batch that the engine calls its embedding and its loss with, and all batches of modules
    of items."""
    for name, each in engine.modules.items():
        if each.layouts.plan.module.items:
            items[name] = []
            _keep_items(each, items[name])
    own = engine.modules[engine.loss_plan.module.module]
    assert own.runner is not None
    entered, loss = list[Any](), own.runner.loss
    ids: list[int] = []

    def enters(_: Any, args: tuple[Any, ...]) -> None:
        if not entered:
            entered[:] = [args[0], _copied(args[0])]
            ids[:] = own.local.drawing.samples or ()
            batches.append(MicroBatch(entered=entered[1], targets=entered[1], ids=ids))

    def watched(output: Any, batch: Any) -> tuple[Tensor, float | Tensor]:
        if len(batches) == 1 and batch is not entered[0]:  # converted for the modules, or without items
            batches.append(MicroBatch(entered=entered[1], targets=_copied(batch), ids=ids))
        return loss(output, batch)

    own.local.modules["embed"].register_forward_pre_hook(enters, prepend=True)
    own.runner.loss = watched


def _keep_items(module: ModuleEngine, items: list[MicroBatch]) -> None:
    """Keeps the batches of a module of items."""

    def enters(_: Any, args: tuple[Any, ...]) -> None:
        entered = _copied(args[0])
        items.append(MicroBatch(entered=entered, targets=entered, ids=list(module.local.drawing.samples or ())))

    module.local.modules["embed"].register_forward_pre_hook(enters, prepend=True)


def _copied(batch: Any) -> Any:
    """A batch as it is now; what another module made is no longer of its graph."""
    return copy.deepcopy(
        converted(batch, lambda tensor: tensor.detach() if tensor.grad_fn is not None else tensor)
    )


def _differences(model: Model, plain: PlainStep, mean: float, engine: Member) -> Iterator[str]:
    """Names the differences: of the first section's output, the loss, gradients, and parameters without one."""
    types = {x.dtype for named in plain.outputs.values() for x in named.values() if x.is_floating_point()}
    types |= {gradient.dtype for gradient in plain.gradients.values()}
    near = max(NEAR.get(dtype, 1e-2) for dtype in (model.dtype, *types))
    for section, named in plain.outputs.items():
        for name, expected in named.items():
            off = difference(engine.outputs[section].get(name), expected)
            if off > near:
                yield f"the output of {section}{f' {name!r}' if name else ''} by {off:.1e} of its size"
                return
    right = plain.loss / plain.targets
    if not math.isclose(mean, right, rel_tol=near, abs_tol=near):
        yield f"the loss is {right:.6g}, and {mean:.6g} of the copies"
    lacking = [name for name in plain.gradients if name not in engine.gradients]
    beyond = [
        name
        for name, (part, *_) in engine.gradients.items()
        # An item that embed leaves out counts as used: its gradient is zero.
        if name not in plain.gradients and (model.graph is None or part.reduced.any())
    ]
    if lacking:
        yield f"{_some(lacking)} would get no gradient"
    if beyond:
        yield f"{_some(beyond)} would get a gradient, and has none in your own step"
    sizes: dict[str, float] = {}
    for name, expected in plain.gradients.items():
        section = _section(model, name)
        sizes[section] = max(sizes.get(section, 0.0), _size(expected))
    off_by = {}
    for name in [name for name in plain.gradients if name in engine.gradients]:
        expected, (part,) = plain.gradients[name], engine.gradients[name]
        size = max(_size(expected), 1e-3 * sizes[_section(model, name)])
        gap = float((part.reduced.reshape(expected.shape).double() - expected.double()).abs().max())
        if not gap <= near * size:
            off_by[name] = gap / max(size, 1e-300)
    if off_by:
        worst = max(off_by, key=lambda name: off_by[name])
        yield f"the gradient of {_some([worst, *(off_by.keys() - {worst})])} by {off_by[worst]:.1e} of its size"


def _section(model: Model, name: str) -> str:
    """The section of a parameter, with its module."""
    if model.graph is None:
        return split_name(name)[0]
    module, _, rest = name.partition(".")
    return f"{module}.{split_name(rest)[0]}"


def _cause(plain: PlainStep, engine: Member) -> str:
    """The likely cause of a difference."""
    if plain.attributes:
        return (
            f"forward sets {_some(plain.attributes)}, which the loss, a hook or another module may read of "
            "your own modules, while the copies set theirs: return it as a named tensor of the section's output"
        )
    if engine.drew:
        return (
            f"{_some(sorted(engine.drew))} draws random numbers: use nn.Dropout, whose draws are keyed by "
            "step, sample and place"
        )
    return (
        "A hook, a patched forward or the loss reads something else than what it is called with: another "
        "module, a global, a counter, a generator of its own"
    )


def _some(names: Sequence[str]) -> str:
    first = ", ".join(names[:_NAMED])
    return first + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def difference(one: Tensor | None, other: Tensor | None) -> float:
    """The largest difference of two tensors, in units of the other's largest finite value; infinite where one
    is missing, of another shape, or no number where the other is. Elements that are not finite may be equal.
    """
    if one is None or other is None or one.shape != other.shape:
        return math.inf
    if not other.numel():
        return 0.0
    same = (one == other) | (one.isnan() & other.isnan())
    gap = torch.where(same, 0.0, (one.double() - other.double()).abs())
    largest = float(gap.max())
    return math.inf if largest != largest else largest / (_size(other) or 1.0)


def _size(values: Tensor) -> float:
    return float(values.double().abs().nan_to_num(posinf=0.0).max()) if values.numel() else 0.0


def first_line(error: BaseException) -> str:
    """The class of an error, and the first line of its text."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
