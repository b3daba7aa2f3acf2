"""The passes of a step of a model of several modules, in their one order.

Every rank makes the batches of items and the order by itself, the same to the bit, and carries out its own part
of the order. The first act of the order that is not over can always go on, whatever devices the modules share.
Sums of gradients begin when all passes of the step are launched: their order is that of the modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import reduce
from itertools import groupby
from operator import attrgetter, xor

import torch
from elasticd_planner.cost.schedule import Pass
from elasticd_planner.layout.channels import item_channel
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.layout.module_order import ModuleAct, module_order
from elasticd_planner.spec.batch import BatchPlan
from elasticd_planner.spec.item_batch import ItemBatch, item_batch
from elasticd_planner.spec.plan import Place, Plan

from elasticd.runtime.comm.communicators import Peers
from elasticd.runtime.data.loader import Loader, item_counts
from elasticd.runtime.data.sample_ledger import NO_SAMPLES, expected_hash
from elasticd.runtime.engine.item_border import ItemBorder
from elasticd.runtime.engine.module_engine import ModuleEngine
from elasticd.runtime.engine.p2p import HEADERS
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.engine.step_state import Passed
from elasticd.runtime.model.model import Loss, Module
from elasticd.runtime.model.model_graph import ModelGraph


def item_borders(recipe: Recipe, layouts: Layouts, peers: Peers) -> dict[str, ItemBorder]:
    """The borders of a plan, by the module of items."""
    plan, views = layouts.plan, layouts.views
    return {
        edge.source: ItemBorder(
            peers,
            views[edge.source].plan,
            views[edge.target].plan,
            item_channel(plan, edge),
            recipe.module(edge.source).dtype,
            recipe.accelerator,
            trained=bool(views[edge.source].trained),
            first_tag=(len(plan.modules) + number) * HEADERS,
        )
        for number, edge in enumerate(plan.edges)
    }


#: By module what it takes in a step.
_Batches = Mapping[str, BatchPlan | ItemBatch]


class ModulePasses:
    """Runs the passes of all modules that a device is in."""

    def __init__(
        self,
        recipe: Recipe,
        graph: ModelGraph[Module],
        plan: Plan,
        modules: Mapping[str, ModuleEngine],
        borders: Mapping[str, ItemBorder],
        device: str,
    ) -> None:
        """
        Args:
            recipe: of the job.
            graph: the modules of the model.
            plan: of all modules.
            modules: those of this device.
            borders: by the module of items.
            device: this one.
        """
        self._recipe, self._own, self._plan, self._device = recipe, graph.own, plan, device
        self._items = {name: module.items for name, module in graph.modules.items() if module.items}
        self._counts = {name: item_counts(recipe.dataset, items) for name, items in self._items.items()}
        self._modules, self._borders = modules, borders
        self._known: tuple[BatchPlan, _Batches] | None = None  # of the step
        self._places: dict[str, Place] = {
            name: module.layouts.plan.places[device]
            for name, module in modules.items()
            if device in module.layouts.plan.places
        }

    def _batches(self, batch: BatchPlan, dataset: object = None) -> _Batches:
        """The batch of each module in a step, in which the module that computes the loss takes `batch`; of an
        evaluation of a held-out dataset."""
        if self._known is not None and self._known[0] is batch:
            return self._known[1]
        samples, known = batch.samples(), self._counts
        if dataset is not None:
            known = {name: item_counts(dataset, items) for name, items in self._items.items()}
        items = {
            name: item_batch(self._plan, name, batch, {each: counts[each] for each in samples})
            for name, counts in known.items()
        }
        batches: dict[str, BatchPlan | ItemBatch] = {self._own: batch, **items}
        self._known = batch, batches
        return batches

    def expected(self, batch: BatchPlan) -> list[int]:
        """The hash of samples and items that each rank is to bring, in rank order, for the batch of the module
        that computes the loss."""
        views = [(self._modules[name].layouts.plan, each) for name, each in self._batches(batch).items()]
        return [
            _together(expected_hash(view, each, device) for view, each in views)
            for device in self._plan.members
        ]

    def forward(self, batch: BatchPlan, dataset: object, loaders: Mapping[str, Loader], loss: Loss) -> Passed:
        """Runs the forward passes of a round of an evaluation.

        Args:
            batch: of the module that computes the loss.
            dataset: the held-out one.
            loaders: make its batches, by module.
            loss: called with each output instead of the loss of the training.
        """
        self._batches(batch, dataset)
        with ExitStack() as evaluating:
            for name in self._places:
                runner = self._modules[name].runner
                assert runner is not None
                evaluating.enter_context(runner.evaluating(loaders[name], loss))
            return self.run(batch, reader=loaders[self._own])

    def run(self, batch: BatchPlan, scale: float = 1.0, reader: Loader | None = None) -> Passed:
        """Runs the passes of a step.

        Args:
            batch: of the module that computes the loss.
            scale: the gradients are those of the loss times this.
            reader: has the samples read ahead; None: those of the training are.
        """
        batches = self._batches(batch)
        order = module_order(self._plan, batches, self._recipe.schedule, backward=torch.is_grad_enabled())
        for name, border in self._borders.items():
            items = batches[name]
            assert isinstance(items, ItemBatch)
            border.begin_step(items)
        wanted = self._wanted(order, batches)
        if reader is None:
            self._recipe.feed.want(wanted)
        else:
            reader.prepare(wanted)
        for name, place in self._places.items():
            self._begin(name, place, order, batches[name], scale)
        mine = (each for each in order if each.module in self._places and self._mine(each))
        for name, acts in groupby(mine, key=attrgetter("module")):
            runner = self._modules[name].runner
            assert runner is not None
            with self._running(name):
                for each in acts:
                    runner.carry_out(each.act, each.group if name == self._own else None)
        passed = {name: self._end(name) for name in self._modules}
        for border in self._borders.values():
            border.end_step()
        failures = [each.failure for each in passed.values() if each.failure is not None]
        return replace(
            passed[self._own],
            samples=_together(each.samples for each in passed.values()),
            failure=failures[0] if failures else None,
        )

    def _mine(self, each: ModuleAct) -> bool:
        place = self._places[each.module]
        return (each.pipeline, each.lane, each.stage) == (place.pipeline, place.lane, place.stage)

    def _begin(
        self, name: str, place: Place, order: Sequence[ModuleAct], batch: BatchPlan | ItemBatch, scale: float
    ) -> None:
        module = self._modules[name]
        assert module.runner is not None
        stages = len(module.layouts.plan.pipeline(place).stages)
        before = (place.stage - 1) % stages
        in_lane = [
            each
            for each in order
            if (each.module, each.pipeline, each.lane) == (name, place.pipeline, place.lane)
            and each.group is None
        ]
        passes = [
            Pass("forward" if each.act.kind == "forward" else "backward", each.act.micro_batch, each.act.chunk)
            for each in in_lane
            if each.stage == before and each.act.what == "pass"
        ]
        mine = [each.act for each in in_lane if each.stage == place.stage]
        micro = [group.items for group in batch.of(place)] if isinstance(batch, ItemBatch) else batch.of(place)
        with self._running(name):
            module.runner.begin(micro, mine, passes, scale, sums_wait=True)

    def _end(self, name: str) -> Passed:
        module = self._modules[name]
        if module.runner is None:
            return Passed(loss=0.0, count=0.0, tokens=0, samples=NO_SAMPLES)
        with self._running(name):
            passed = module.runner.end()
        module.constants.check()
        return passed

    @contextmanager
    def _running(self, name: str) -> Iterator[None]:
        module = self._modules[name]
        assert module.runner is not None
        # Nothing goes back into a module of items that is frozen.
        trains = module.trained or name == self._own
        with module.runner.running(), nullcontext() if trains else torch.no_grad():
            yield

    def _wanted(self, order: Sequence[ModuleAct], batches: _Batches) -> list[int]:
        """The samples that this device reads, in their order."""
        wanted: list[int] = []
        for each in order:
            if each.act.what != "pass" or each.act.kind != "forward" or each.module not in self._places:
                continue
            runner, batch = self._modules[each.module].runner, batches[each.module]
            if runner is not None and self._mine(each) and runner.reads_in(each.act):
                place = self._places[each.module]
                if isinstance(batch, ItemBatch):
                    wanted += [item.sample for item in batch.of(place)[each.act.micro_batch].items]
                else:
                    wanted += [piece.sample for piece in batch.of(place)[each.act.micro_batch]]
        return wanted


def _together(hashes: Iterable[int]) -> int:
    """One hash of those of all modules."""
    return reduce(xor, hashes, 0)
