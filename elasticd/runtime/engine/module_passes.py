"""The passes of a step of a model of several modules, in their one order.

Each rank carries out its own part of the order (`module_step`), in which sums of gradients have places.
The first act of it that is not over can always go on, whatever devices the modules share.
"""

from __future__ import annotations

import logging
import math
import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import groupby

import torch
from elasticd_planner.batching.item_dealing import ItemDealing
from elasticd_planner.batching.lane_tree import NORMAL
from elasticd_planner.detection.lengths import item_rise
from elasticd_planner.layout.channels import item_channel
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.batch import BatchPlan
from elasticd_planner.spec.item_batch import ItemBatch
from elasticd_planner.spec.plan import Plan

from elasticd.runtime.comm.communicators import Peers
from elasticd.runtime.data.loader import Loader, item_sizes
from elasticd.runtime.data.prefetch import SampleError, SampleKey
from elasticd.runtime.data.sample_ledger import NO_SAMPLES, expected_hash
from elasticd.runtime.engine.item_border import ItemBorder
from elasticd.runtime.engine.module_engine import ModuleEngine
from elasticd.runtime.engine.module_step import GradientSum, ModuleStep, StepMaker, together
from elasticd.runtime.engine.p2p import HEADERS
from elasticd.runtime.engine.pipeline_stage import StageRunner
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.engine.step_state import Passed
from elasticd.runtime.model.model import Loss, Model, Module
from elasticd.runtime.model.model_graph import ModelGraph

log = logging.getLogger(__name__)


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
            implies_all_received=_waits(recipe.module(edge.target), views[edge.target].plan),
            first_tag=(len(plan.modules) + number) * HEADERS,
        )
        for number, edge in enumerate(plan.edges)
    }


def _waits(model: Model, plan: Plan) -> bool:
    """Returns True if the members of each first stage wait for each other in a pass of its first blocks."""
    return all(
        model.communicates(f"blocks.{layer}" for layer in range(*pipeline.spans[0]))
        for pipeline in plan.pipelines
    )


class ModulePasses:
    """Runs the passes of all modules that a device is in."""

    def __init__(
        self,
        recipe: Recipe,
        graph: ModelGraph[Module],
        layouts: Layouts,
        modules: Mapping[str, ModuleEngine],
        borders: Mapping[str, ItemBorder],
        device: str,
    ) -> None:
        """
        Args:
            recipe: of the job.
            graph: the modules of the model.
            layouts: of all of them.
            modules: by name.
            borders: by the module of items.
            device: this one.
        """
        self._recipe, self._own, self._plan = recipe, graph.own, layouts.plan
        self._items = {name: module.items for name, module in graph.modules.items() if module.items}
        self._modules, self._borders = modules, borders
        buckets = {name: module.reducer.queue for name, module in modules.items()}
        self._make = StepMaker(layouts, graph.own, device, recipe.schedule, buckets)
        self._runners = {name: module.runner for name, module in modules.items() if module.runner is not None}
        self._device = device
        self._rises = {name: item_rise(layouts.views[name].spec) for name in self._items}
        self._dealing = {name: ItemDealing(layouts.plan, name, rise) for name, rise in self._rises.items()}
        self._ratios = struct.Struct(f"<{len(self._items)}d")
        self._now: tuple[BatchPlan, ModuleStep] | None = None
        self._next: tuple[BatchPlan, Future[ModuleStep]] | None = None

    def _making(self, batch: BatchPlan, dataset: object, *, backward: bool) -> Callable[[], ModuleStep]:
        """A function that makes the step of a batch, in any thread. The dataset is asked here."""
        samples = batch.samples()
        sizes = {
            name: item_sizes(dataset, items, samples, self._recipe.row_ratio(name)).costs(self._rises[name])
            for name, items in self._items.items()
        }
        speeds = {name: dealing.of(batch.step) for name, dealing in self._dealing.items()}
        return partial(self._make, batch, sizes, speeds, backward=backward)

    def ratios(self) -> bytes:
        """`RankRecord.items` of the step whose passes are over."""
        found = []
        for name, dealing in self._dealing.items():
            telemetry = self._modules[name].telemetry
            spent = (0.0, 0, 0.0) if telemetry is None else telemetry.passes()
            found.append(dealing.ratio(self._device, *spent))
        return self._ratios.pack(*found)

    def voted(self, step: int, ratios: Sequence[bytes]) -> None:
        """A step ends.

        Args:
            step: its index.
            ratios: of each rank, as in its record.
        """
        by_module = zip(*map(self._ratios.unpack, ratios), strict=True)
        for (name, dealing), listed in zip(self._dealing.items(), by_module, strict=True):
            for change in dealing.voted(step, listed):
                log.info(
                    "step %d: the lane of %s in %s takes %.2f times as long as planned (before: %.2f); its "
                    "share of items follows",
                    step,
                    dealing.head(change.lane),
                    name,
                    change.after / NORMAL,
                    change.before / NORMAL,
                )

    def slowdowns(self) -> dict[str, int]:
        """Of this device's lanes, by module of items [64ths of what was planned]; 0: shares do not follow."""
        return {name: dealing.slowdown_of(self._device) for name, dealing in self._dealing.items()}

    def make(self, batch: BatchPlan) -> None:
        """Makes the step of a batch of the training, if it is not made.

        Raises:
            SampleError: the dataset has no sizes of a sample's items that fit.
        """
        if self._now is None or self._now[0] is not batch:
            ahead, self._next = self._next, None
            if ahead is not None and ahead[0] is batch and not ahead[1].cancelled():
                self._now = batch, ahead[1].result()
            else:
                self._now = batch, self._making(batch, self._recipe.dataset, backward=True)()

    def look_ahead(self, batch: BatchPlan | None) -> None:
        """Has the next step made in another thread, once the passes of this one are launched.

        Args:
            batch: of the next step; None: it is not known.
        """
        if batch is None or (self._next is not None and self._next[0] is batch):
            return
        with suppress(SampleError):  # which the next step raises
            making = self._making(batch, self._recipe.dataset, backward=True)
            self._next = batch, self._recipe.planning(making)

    def digest(self, batch: BatchPlan | None) -> int:
        """A hash of the items of a step, the same on all ranks that know of the same items; 0: the batch is not
        known, or a sample of it goes into no batch of items, which its step says.

        Args:
            batch: of the step that begins, or of the one that `look_ahead` got.
        """
        if batch is None:
            return 0
        if self._next is not None and self._next[0] is batch and not self._next[1].cancelled():
            made = self._next[1].result()
        elif self._now is not None and self._now[0] is batch:
            made = self._now[1]
        else:
            return 0
        return made.digest

    def read_ahead(self) -> None:
        """Has the samples of the next step read from now on, if that step is made."""
        if self._next is not None and (future := self._next[1]).done() and not future.cancelled():
            with suppress(Exception):  # which the next step raises
                self._recipe.feed.want(list(dict.fromkeys(self._wanted(future.result()))))

    def expected_of(self, device: str) -> int:
        """The hash of samples and items that a device is to bring for the step whose passes have run."""
        assert self._now is not None
        views = ((self._modules[name].layouts.plan, each) for name, each in self._now[1].batches.items())
        return together(expected_hash(view, each, device) for view, each in views)

    def make_round(self, batch: BatchPlan, dataset: object) -> None:
        """Makes a round of an evaluation.

        Args:
            batch: of the module that computes the loss.
            dataset: the held-out one.

        Raises:
            SampleError: the dataset has no sizes of a sample's items that fit.
        """
        self._now = batch, self._making(batch, dataset, backward=False)()

    def forward(self, batch: BatchPlan, loaders: Mapping[str, Loader], loss: Loss) -> Passed:
        """Runs the forward passes of a round of an evaluation, which is made.

        Args:
            batch: of the module that computes the loss.
            loaders: make its batches, by module.
            loss: called with each output instead of the loss of the training.
        """
        assert self._now is not None
        assert self._now[0] is batch, "made before"
        step = self._now[1]
        with ExitStack() as evaluating:
            for name, runner in self._runners.items():
                evaluating.enter_context(runner.evaluating(loaders[name], loss))
            loaders[self._own].prepare(self._wanted(step))
            return self._run(step)

    def run(self, batch: BatchPlan, scale: float) -> Passed:
        """Runs the passes of a step.

        Args:
            batch: of the module that computes the loss.
            scale: the gradients are those of the loss times this.
        """
        assert self._now is not None
        assert self._now[0] is batch, "made before"
        step = self._now[1]
        self._modules[self._own].samples.want(self._wanted(step))
        return self._run(step, scale)

    def _run(self, step: ModuleStep, scale: float = 1.0) -> Passed:
        for name, border in self._borders.items():
            items = step.batches[name]
            assert isinstance(items, ItemBatch)
            border.begin_step(items)
        for name, (micro, acts, before, rows) in step.lanes.items():
            with self._running(name) as runner:
                runner.begin(micro, acts, before, scale, rows=rows, sums_wait=True)
        sums = deque(step.sums)
        for name, listed in groupby(step.acts, key=lambda each: each[1].module):
            with self._running(name) as runner:
                for place, (_, _, _, _, act, group) in listed:
                    self._sum(sums, place)
                    runner.carry_out(act, group if name == self._own else None)
        self._sum(sums)
        passed = {name: self._end(name) for name in self._modules}
        for border in self._borders.values():
            border.end_step()
        failures = [each.failure for each in passed.values() if each.failure is not None]
        return replace(
            passed[self._own],
            samples=together(each.samples for each in passed.values()),
            failure=failures[0] if failures else None,
        )

    def _sum(self, sums: deque[GradientSum], before: float = math.inf) -> None:
        """Launches the sums of gradients that stand before this place in the order."""
        while sums and sums[0].after < before:
            self._modules[sums[0].module].launch_sum(sums.popleft().bucket)

    def _end(self, name: str) -> Passed:
        if name not in self._runners:
            return Passed(loss=0.0, count=0.0, tokens=0, samples=NO_SAMPLES)
        with self._running(name) as runner:
            passed = runner.end()
        if torch.is_grad_enabled():  # an evaluation looks at its end, see `Engine.evaluated`
            self._modules[name].constants.check()
        return passed

    @contextmanager
    def _running(self, name: str) -> Iterator[StageRunner]:
        runner = self._runners[name]
        module = self._modules[name]
        # Nothing goes back into a module of items that is frozen.
        trains = module.trained or name == self._own
        apart = module.telemetry.apart("tensor") if module.telemetry is not None else nullcontext()
        with runner.running(), nullcontext() if trains else torch.no_grad(), apart:
            yield runner

    def _wanted(self, step: ModuleStep) -> list[SampleKey]:
        """The samples that this device reads, in the order of their uses."""
        wanted: list[SampleKey] = []
        for _, each in step.acts:
            act, runner = each.act, self._runners[each.module]
            if act.what == "pass" and act.kind == "forward" and runner.reads_in(act):
                wanted += runner.keys_of(step.lanes[each.module].micro[act.micro_batch])
        return wanted
