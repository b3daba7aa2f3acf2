"""Features that a job of a model of several modules does not have yet, each refused before the job starts."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from elasticd_planner.spec.plan import Plan
from elasticd_planner.spec.plan_checks import check_model
from elasticd_planner.value import Invalid
from torch import Tensor

from elasticd.records import ModuleSpec
from elasticd.runtime.api.evaluation import HeldOut
from elasticd.runtime.data.item_places import mask_of
from elasticd.runtime.data.loader import item_counts, item_rows
from elasticd.runtime.data.stream import Stream
from elasticd.runtime.engine.item_rows import FirstItem, first_output
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.model.bundle import Bundle
from elasticd.runtime.model.model import Module
from elasticd.runtime.model.model_graph import ModelGraph
from elasticd.runtime.parallel.sequence_mixing import TakenRows

log = logging.getLogger(__name__)


def check_graph(recipe: Recipe, held_out: Mapping[str, HeldOut]) -> None:
    """Refuses options and datasets that a model of several modules does not go with.

    Raises:
        ValueError: which, and what to do instead.
    """
    graph = recipe.model.graph
    if graph is None:
        return
    if isinstance(recipe.dataset, Stream):
        raise ValueError(
            f"a model of the modules {_names(graph)} needs a map-style dataset with counts: of a stream nobody "
            "knows beforehand how many items its samples have"
        )
    packing, own = recipe.data.packing, graph.loss_module
    unplaced = sorted(own.takes.keys() - own.places.keys()) if own.reads is None else []
    if packing is not None and packing.cut and unplaced:
        raise ValueError(
            f"sequences may be cut over lanes, and nothing says which tokens take rows of {unplaced[0]}: give "
            f"the module {graph.own!r} places={{{unplaced[0]!r}: function}}, which makes of a sample a mask of "
            "its tokens, bool [tokens]; or keep sequences whole, Packing(cut=False)"
        )
    for name in graph.encoders:
        items = graph.modules[name].items
        _check_counts(item_counts(recipe.dataset, items), items)
        item_rows(recipe.dataset, items)
        for said, held in held_out.items():
            try:
                _check_counts(item_counts(held.dataset, items), items)
                item_rows(held.dataset, items)
            except ValueError as error:
                raise ValueError(f"held-out set {said!r}: {error}") from None


def taken_rows(recipe: Recipe, samples: Sequence[int]) -> list[dict[str, TakenRows]]:
    """The rows of items that samples take, with random values, for a trial of packed rows.

    Args:
        recipe: of the job.
        samples: their indices.

    Returns:
        Of each by key; without those of which nothing says which tokens take them.

    Raises:
        Unlike: a sample makes no row, or has no mask of its tokens.
    """
    graph, dataset = recipe.model.graph, recipe.dataset
    if graph is None or isinstance(dataset, Stream):
        return []
    own, by_sample = graph.loss_module, list[dict[str, TakenRows]]()
    outputs = {key: first_output(dataset, graph.modules[name]) for key, name in own.takes.items()}
    for index in samples:
        text = without_items(dataset[index], graph.items)
        if own.reads is not None:
            masks = dict(own.reads.item_places(own.reads.row(text)))
        else:
            masks = {key: mask_of(places, key, text) for key, places in own.places.items()}
        by_sample.append(
            {key: TakenRows(mask, _random(outputs[key], int(mask.sum()))) for key, mask in masks.items()}
        )
    return by_sample


def _random(like: Bundle | None, rows: int) -> Bundle | None:
    """Random rows of the widths and types of an output for one item; None: these are not known."""
    generator = torch.Generator().manual_seed(0)

    def drawn(part: Tensor) -> Tensor:
        return torch.randn(rows, *part.shape[2:], generator=generator).to(part.dtype)

    if like is None or isinstance(like, Tensor):
        return None if like is None else drawn(like)
    return {name: drawn(part) for name, part in like.items()}


def _check_counts(counts: Sequence[int], items: str) -> None:
    """Raises ValueError for a sample of which nobody knows how many items it has."""
    wrong = next((index for index, count in enumerate(counts) if int(count) < 0), None)
    if wrong is not None:
        raise ValueError(
            f"the dataset's counts say that sample {wrong} has {counts[wrong]} {items}: the number of each "
            "must be known before it is read, and at least 0; count them once"
        )


def check_plan_of(plan: Plan, graph: ModelGraph[Module]) -> None:
    """Refuses a plan that is none of these modules.

    Raises:
        Invalid: with the module, and what it would need.
    """
    theirs, ours = {module.module: module.items for module in plan.modules}, graph.modules
    if theirs != {name: module.items for name, module in ours.items()}:
        raise Invalid(
            f"the plan has the modules {_said(theirs)}, and the model "
            f"{_said({name: module.items for name, module in ours.items()})}: give both the same"
        )
    for name, module in ours.items():
        trained = any(parameter.kind == "trained" for parameter in module.spec.parameters.values())
        planned = next(each.trainable for each in plan.modules if each.module == name)
        if planned != trained:
            raise Invalid(
                f"the plan says that {name} is {'trained' if planned else 'frozen'}, and in the model it is "
                f"{'trained' if trained else 'frozen'}: set trainable of its module plan"
            )
        try:
            check_model(plan.view(name), module.spec)
        except Invalid as error:
            raise Invalid(f"module {name}: {error}") from None


def without_items(sample: Any, items: Collection[str]) -> Any:
    """A sample as a collate function gets it: without what modules of items read."""
    if not isinstance(sample, Mapping):
        return sample
    return {key: part for key, part in sample.items() if key not in items}


def module_specs(recipe: Recipe) -> tuple[ModuleSpec, ...]:
    """The modules of a model of several; none of a model of one."""
    graph = recipe.model.graph
    if graph is None:
        return ()
    return tuple(_spec(recipe, name, module) for name, module in graph.modules.items())


def _spec(recipe: Recipe, name: str, module: Module) -> ModuleSpec:
    if not module.items:
        return ModuleSpec(name=name, model=module.spec, takes=module.takes)
    counts, first = item_counts(recipe.dataset, module.items), recipe.first_items[name]
    rows = _rows(recipe, module.items, first, counts)
    return ModuleSpec(
        name=name,
        model=module.spec,
        items=module.items,
        items_a_sample=sum(map(int, counts)) / max(1, len(counts)),
        rows_an_item=rows,
        output_bytes=first.output_bytes * rows / first.rows if first.rows else 0.0,
    )


def _rows(recipe: Recipe, items: str, first: FirstItem, counts: Sequence[int]) -> float:
    """Rows of an item on average, on which blocks work: if the dataset says how many it has or gives, by that;
    else those of its first item; 0: not known."""
    if (known := item_rows(recipe.dataset, items)) is None:
        return float(first.rows)
    return first.ratio * sum(sum(map(int, each)) for each in known) / max(1, sum(map(int, counts)))


def _names(graph: ModelGraph[Module]) -> str:
    return " and ".join(graph.modules)


def _said(modules: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({items or 'samples'})" for name, items in modules.items())
