"""`elasticd check` of a model of several modules: layouts of its modules, each against one process.

Modules are apart, share their devices, fan in and fan out; each is cut as far as its rules go. A step without
items leaves encoders alone. Samples are chosen such that some have items and, if there is one, one has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from elasticd_planner.spec.plan import Edge, ModulePlan, Pipeline, Plan, Stage, Strategy

from elasticd.runtime.api.hello import check_packing
from elasticd.runtime.api.script import CannotRun
from elasticd.runtime.checking.verdict import findings, own_modules_agree
from elasticd.runtime.data.packing import Packing
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.model.model import Module
from elasticd.runtime.model.model_graph import ModelGraph
from elasticd.runtime.model.validation import ModelError
from elasticd.runtime.reference.chosen_samples import first_items, recipe_of_samples
from elasticd.runtime.reference.layouts import Variation, widest
from elasticd.runtime.reference.trial import Member, Trial, tried

#: Samples of the step: of two pipelines the second has two micro-batches.
_SAMPLES = 3


def modules_compared(recipe: Recipe, say: Callable[[str], None]) -> bool:
    """Tries every layout of the modules. Returns True if all are as one process."""
    graph, packs = recipe.model.graph, recipe
    assert graph is not None
    data = replace(recipe.data, packing=None, global_tokens=None)
    recipe = replace(recipe, micro_batch=1, data=data)
    totals = first_items(recipe.dataset, graph.items)
    order = sorted(range(len(totals)), key=totals.__getitem__)  # of the fewest items: they are read and tried
    with_items, without = [i for i in order if totals[i]], [i for i in order if not totals[i]]
    if not with_items:
        raise CannotRun(f"none of the first {len(totals)} samples has any of {', '.join(sorted(graph.items))}")
    chosen = [*with_items[: _SAMPLES - bool(without)], *without[:1]]
    some = recipe_of_samples(recipe, chosen)
    one = one_process(some, Variation(plan=_plan(graph, len(chosen), lambda name, first: [[(0, 1)]])))
    layers = {name: module.layers for name, module in graph.modules.items()}
    named = ", ".join(f"{name} of {count} blocks" for name, count in layers.items())
    say(f"{graph.name}: {named}; one process has a loss of {one.loss:.6g}")
    if not own_modules_agree(some, len(chosen), say):
        return False
    good = [_right(graph, said, one, tried(some, each), say) for said, each in _layouts(graph, len(chosen))]
    if packs.data.packing is not None:
        good += _packed(graph, packs, chosen, one, say)
    if not without:
        say("note  not tried: a step without items (every sample has some)")
        return all(good)
    bare = recipe_of_samples(recipe, without[:_SAMPLES])
    count = len(without[:_SAMPLES])
    alone = one_process(bare, Variation(plan=_plan(graph, count, lambda name, first: [[(0, 1)]])))
    variation = Variation(plan=_plan(graph, count, lambda name, first: [[(first, 1)]]))
    good.append(_right(graph, "a step without items, modules apart", alone, tried(bare, variation), say))
    return all(good)


def _packed(
    graph: ModelGraph[Module], recipe: Recipe, chosen: Sequence[int], one: Trial, say: Callable[[str], None]
) -> Iterator[bool]:
    """Tries packed rows: whether sequences can be in one; a step on rows of whole sequences, and of cut ones
    where the job may cut. Yields True for each that is right.

    Args:
        graph: the modules.
        recipe: of a job that packs.
        chosen: the samples of the step.
        one: the step of one process on padded samples.
        say: called with each line.
    """
    packing = recipe.data.packing
    assert packing is not None
    try:
        check_packing(recipe)
    except ValueError as error:
        say(f"WRONG packed rows\n      {error}")
        yield False
        return
    longest = max(recipe.length(index) for index in chosen) if recipe.length is not None else 0
    ways = {"packed rows of whole sequences, modules apart": (1, Packing(cut=False))}
    if packing.cut and longest > 1 < len(chosen):
        half = Packing(tokens=(longest + 1) // 2 + 1, least=1)  # which one lane alone does not hold
        ways["packed rows, sequences cut over 2 lanes"] = (2, half)
    for way, (lanes, rows) in ways.items():
        data = replace(recipe.data, packing=rows, global_tokens=None)
        some = recipe_of_samples(replace(recipe, micro_batch=len(chosen), data=data), chosen)
        plan = _plan(graph, len(chosen), lambda name, first: [[(first, 1)]], lanes=lanes)
        yield _right(graph, way, one, tried(some, Variation(plan=plan)), say)


def _right(
    graph: ModelGraph[Module], said: str, alone: Trial, other: Trial, say: Callable[[str], None]
) -> bool:
    wrong = list(dict.fromkeys(_findings(graph, alone, other)))
    say(f"{'WRONG' if wrong else 'ok   '} {said}")
    for line in wrong:
        say(f"      {line}")
    return not wrong


def _findings(graph: ModelGraph[Module], alone: Trial, other: Trial) -> Iterator[str]:
    """One line for each thing that is wrong, with its module."""
    where = other.failed[0] if other.failed is not None else ""
    for name, module in graph.modules.items():
        if where and not where.startswith(f"{name}."):
            continue
        for line in findings(module, _of_module(alone, name), _of_module(other, name), outputs=False):
            yield f"{name}: {line}"
    if other.failed is not None and not where:
        yield f"the step failed with {type(other.failed[1]).__name__}: {other.failed[1]}"


def _of_module(trial: Trial, name: str) -> Trial:
    """The trial as far as one module goes, by its own names."""
    prefix = f"{name}."

    def own(values: Mapping[str, Any]) -> dict[str, Any]:
        return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}

    members = {
        device: Member(gradients=own(each.gradients), updates=own(each.updates), drew=each.drew)
        for device, each in trial.members.items()
    }
    failed = trial.failed and (trial.failed[0].removeprefix(prefix), trial.failed[1])
    return replace(trial, members=members, failed=failed)


#: Of a module, and its first device of its own: pipelines, each of stages (first device, TP size).
_Shape = Callable[[str, int], list[list[tuple[int, int]]]]


def _layouts(graph: ModelGraph[Module], samples: int) -> Iterator[tuple[str, Variation]]:
    """By what is said of them. Encoders are at device 0 and after it."""
    own = graph.own
    tp = {name: min(2, widest(module.spec)) for name, module in graph.modules.items()}
    two = {name: module.layers > 1 for name, module in graph.modules.items()}

    def apart(name: str, first: int) -> list[list[tuple[int, int]]]:
        return [[(first, 1)]]

    def cut(name: str, first: int) -> list[list[tuple[int, int]]]:
        return [[(first, tp[name])]]

    def colocated(name: str, first: int) -> list[list[tuple[int, int]]]:
        return [[(0, tp[name])]] if tp[name] > 1 else [[(0, 1), (1, 1)] if two[name] else [(0, 1)]]

    def fan_in(name: str, first: int) -> list[list[tuple[int, int]]]:
        if name != own:
            return [[(0, 1)], [(1, 1)]]
        return [[(0, 1), (1, 1)] if two[own] else [(0, 1)]]

    def fan_out(name: str, first: int) -> list[list[tuple[int, int]]]:
        return [[(0, 1)], [(1, 1)]] if name == own else [[(0, 1)]]

    yield "modules apart", Variation(plan=_plan(graph, samples, apart))
    if max(tp.values()) > 1:
        said = ", ".join(f"{name} TP {size}" for name, size in tp.items())
        yield f"modules apart, {said}", Variation(plan=_plan(graph, samples, cut))
    yield "modules on the same devices", Variation(plan=_plan(graph, samples, colocated))
    yield "fan-in: encoders on 2 devices, data parallel", Variation(plan=_plan(graph, samples, fan_in))
    if samples > 1:
        yield f"fan-out: {own} data parallel 2", Variation(plan=_plan(graph, samples, fan_out))
    yield "modules apart, over gloo", Variation(plan=_plan(graph, samples, apart), gloo=True)


def _plan(graph: ModelGraph[Module], samples: int, shape: _Shape, *, lanes: int = 1) -> Plan:
    """A plan whose modules have these shapes; `first` is the first device after those of the modules before.
    With `lanes` the module of the loss has so many of a device each, in one stage."""
    modules, first = [], 0
    for name, module in graph.modules.items():
        drawn = shape(name, first)
        pipelines = []
        for place, stages in enumerate(drawn):
            count = 1 if module.items else samples // len(drawn) + (place < samples % len(drawn))
            pipelines.append(_pipeline(module.layers, stages, count))
        if lanes > 1 and not module.items:
            devices = tuple(f"check/{device}" for device in range(first, first + lanes))
            alike = (1,) * lanes
            stage = Stage(start=0, stop=module.layers, devices=devices, shares=alike, lanes=alike)
            rows = (samples - lanes + 1, *alike[1:])
            pipelines = [Pipeline(stages=(stage,), micro_batches=samples, rows=rows)]
        first = max(first, *(device + size for stages in drawn for device, size in stages))
        trained = any(parameter.kind == "trained" for parameter in module.spec.parameters.values())
        modules.append(
            ModulePlan(module=name, pipelines=tuple(pipelines), items=module.items, trainable=trained, ahead=1)
        )
    edges = tuple(Edge(source=name, target=graph.own) for name in graph.encoders)
    strategy = Strategy(modules=tuple(modules), edges=edges)
    return Plan(number=1, strategies=(strategy,), micro_batch=1, global_batch=samples)


def _pipeline(layers: int, stages: Sequence[tuple[int, int]], micro_batches: int) -> Pipeline:
    ends = [layers * at // len(stages) for at in range(len(stages) + 1)]
    return Pipeline(
        stages=tuple(
            Stage(
                start=ends[at],
                stop=ends[at + 1],
                devices=tuple(f"check/{device}" for device in range(first, first + size)),
                shares=(1,) * size,
            )
            for at, (first, size) in enumerate(stages)
        ),
        micro_batches=micro_batches,
    )


def one_process(recipe: Recipe, variation: Variation) -> Trial:
    """The step of one process, which all others are compared with.

    Raises:
        ModelError: the model is at fault.
        CannotRun: it has no step to compare with.
    """
    one = tried(recipe, variation)
    if one.failed is not None:
        where, error = one.failed
        if isinstance(error, ModelError):
            raise error
        raise CannotRun(f"one process fails{' in ' + where if where else ''}: {type(error).__name__}: {error}")
    if not one.applied:
        raise CannotRun(
            "one process's step has no finite gradients, so that nothing can be compared: look at its samples "
            "and loss, and at precision's scale where there is one"
        )
    return one
