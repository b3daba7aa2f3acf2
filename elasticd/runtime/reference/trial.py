"""One step of a model under one plan, its members as threads: outputs, gradients and what failed where."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.box import Box
from torch import Tensor, nn

from elasticd.runtime.comm.groups import PeerLost, PlanGroups
from elasticd.runtime.comm.in_memory import MemoryPlanGroups, run_threads, unpaced
from elasticd.runtime.comm.torch_store import TorchStore
from elasticd.runtime.engine.engine import Engine, first_state
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.model.local_model import LocalParameter
from elasticd.runtime.parallel.sequence_parallel import SequenceSlices
from elasticd.runtime.reference.layouts import Variation


def _under(recipe: Recipe, variation: Variation) -> Recipe:
    """The recipe of one member, which reads its samples itself: members are threads of one process, and no
    reader of one may draw while another draws by a key."""
    recompute = (lambda _: True) if variation.recompute else False
    parallelism = replace(
        recipe.parallelism, precision=recipe.precision, recompute=recompute, plan=None, compile=False
    )
    data = replace(recipe.data, readers=0)
    return replace(recipe, global_batch=variation.plan.global_batch, parallelism=parallelism, data=data)


@dataclass(frozen=True)
class GradientPart:
    """A member's part of a parameter: its gradient once reduced, and the term of it that was computed here."""

    box: Box
    reduced: Tensor
    term: Tensor


@dataclass(frozen=True)
class Moved:
    """The distance by which the optimizer moved a parameter, and how far two values of its type are apart there
    at least: a parameter in bfloat16 is the rounded one of a master weight."""

    box: Box
    by: Tensor
    grain: Tensor


@dataclass(kw_only=True)
class Member:
    """The observations of one member in the step: its sections' outputs (each by the names of its tensors), the
    gradients that its optimizer stepped by, how far that moved its parameters, sections that drew random
    numbers, the modules that it was in at the end."""

    outputs: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    gradients: dict[str, list[GradientPart]] = field(default_factory=dict)
    updates: dict[str, list[Moved]] = field(default_factory=dict)
    drew: set[str] = field(default_factory=set)
    inside: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A step under a plan. applied: whether its gradients were finite. failed: in which module and how, where
    it did."""

    loss: float = float("nan")
    applied: bool = True
    members: dict[str, Member]
    failed: tuple[str, BaseException] | None = None


def tried(
    recipe: Recipe, variation: Variation, watch: Callable[[Engine], object] = lambda engine: None
) -> Trial:
    """Takes one step. watch: called before it with the engine of each member, in that one's thread."""
    plan = variation.plan
    layouts = Layouts(recipe.model.specs, plan)
    members = {name: Member() for name in plan.members}
    store = TorchStore(torch.distributed.HashStore())  # type: ignore[attr-defined]

    def worker(memory: MemoryPlanGroups) -> tuple[float, bool]:
        seen = members[memory.me]
        plan_groups = PlanGroups("check", memory.me, "127.0.0.1", store) if variation.gloo else memory
        try:
            return _step(_under(recipe, variation), layouts, plan_groups, seen, watch)
        finally:
            if variation.gloo:
                plan_groups.shut()  # frees the others where this one failed
                plan_groups.park().join()

    try:
        losses = run_threads(plan.members, worker)
    except PeerLost:
        raise
    except Exception as error:
        inside = next((m.inside[-1] for m in members.values() if m.inside), "")
        return Trial(members=members, failed=(inside, error))
    loss, applied = losses[plan.members[0]]
    return Trial(loss=loss, applied=applied, members=members)


def _step(
    recipe: Recipe, layouts: Layouts, plan_groups: PlanGroups, seen: Member, watch: Callable[[Engine], object]
) -> tuple[float, bool]:
    """One member's step: its loss, and whether its updates were applied."""
    engine = Engine(recipe, layouts, plan_groups, unpaced)
    place = recipe.accelerator
    engine.adopt(first_state(recipe.model, layouts, plan_groups.me, recipe.seed, recipe.master, place))
    parameters = {
        module.prefix + name: held
        for module in engine.modules.values()
        for name, held in module.local.parameters.items()
    }
    first = {name: p.detach().clone() for name, (_, p) in parameters.items()}
    terms: dict[str, Tensor] = {}
    scaled = recipe.precision.scale if recipe.precision is not None else None
    scale = scaled.first if scaled is not None else 1.0  # by which backward passes multiply
    for name, (_, parameter) in parameters.items():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(partial(_keep, terms, name))
    for each in engine.modules.values():
        for section, module in each.local.modules.items():
            _follow(each.prefix + section, module, seen, each.slices if section != "head" else None)
        each.local.drawing.drew = seen.drew

    def reduced(*_: Any) -> None:
        if seen.gradients:  # torch asks once more where the step calls that of a base class
            return
        for name, box, parameter in engine.owned:
            if parameter.grad is not None:
                term = _cut(parameters, engine, terms, name, box).to(parameter.grad.dtype) / scale
                made = GradientPart(box, parameter.grad.detach().clone(), term)
                seen.gradients.setdefault(name, []).append(made)

    engine.optimizer.register_step_pre_hook(reduced)
    watch(engine)
    outcome = engine.step(0, lambda: 0, lambda: 0).outcome
    engine.settle()
    for held in chain.from_iterable(seen.gradients.values()):
        held.reduced.mul_(outcome.vote.count)
    for name, own in parameters.items():
        for box in own.boxes if own.tensor.requires_grad else ():
            after, before = own.part(box), first[name][own.slices(box)]
            grain = torch.finfo(after.dtype).eps * torch.maximum(after.abs(), before.abs())
            seen.updates.setdefault(name, []).append(Moved(box, after - before, grain))
    return outcome.loss, outcome.vote.apply


def _cut(
    parameters: Mapping[str, LocalParameter],
    engine: Engine,
    terms: dict[str, Tensor],
    name: str,
    box: Box,
) -> Tensor:
    """The part of a box that the member computed; empty where it computes with another one."""
    held = parameters[name] if name in terms else None
    if held is None or not any(around.contains(box) for around in held.boxes):
        return torch.zeros(box.shape, device=engine.accelerator.device)
    return terms[name][held.slices(box)]


def _keep(terms: dict[str, Tensor], name: str, parameter: Tensor) -> None:
    assert parameter.grad is not None
    terms[name] = parameter.grad.detach().clone()


def _follow(section: str, module: nn.Module, seen: Member, slices: SequenceSlices | None) -> None:
    """Notes the output of a section, and in which submodule a forward pass is. Members have `slices` of it, or
    each has all of it."""

    def left(*_: Any) -> None:
        seen.inside.pop()

    for path, submodule in module.named_modules(prefix=section):
        submodule.register_forward_pre_hook(lambda *_, path=path: seen.inside.append(path), prepend=True)
        submodule.register_forward_hook(left)

    def gave(_: nn.Module, args: object, output: Any) -> None:
        named = {"": output} if isinstance(output, Tensor) else output
        if isinstance(named, Mapping) and section not in seen.outputs:
            seen.outputs[section] = {
                name: slices.join(x.detach()) if slices else x.detach().clone()
                for name, x in named.items()
                if isinstance(x, Tensor)
            }

    module.register_forward_hook(gave)
