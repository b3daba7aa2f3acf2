"""`ModuleEngine`: one module of the model on one device under one plan.

It has the module's sections that the device computes with, their passes, the reduction of their gradients, and
the values that the device holds, for itself or for others. The vote, the optimizer and the update are those of
all modules of the device: `Engine`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from typing import TypeVar

from elasticd_migration.local_state import LocalState, Owned
from elasticd_planner.layout.channels import Channel
from elasticd_planner.layout.gradient_buckets import buckets, last_users, passed_on
from elasticd_planner.layout.gradient_reduction import reductions
from elasticd_planner.layout.layouts import Item, Layouts
from elasticd_planner.spec.batch import BatchPlan
from elasticd_planner.spec.model import block_of
from elasticd_planner.spec.plan import Plan
from torch import Tensor

from elasticd.runtime.accelerator import Accelerator
from elasticd.runtime.comm.communicators import Communicators, Peers
from elasticd.runtime.comm.running_group import OneDevice
from elasticd.runtime.data.collate import Collate
from elasticd.runtime.data.loader import ItemLoader, Loader, item_counts
from elasticd.runtime.data.sample_ledger import NO_SAMPLES
from elasticd.runtime.data.step_samples import Samples
from elasticd.runtime.engine.item_border import ItemBorder, ItemSource
from elasticd.runtime.engine.pass_watch import PassPacer
from elasticd.runtime.engine.pipeline_stage import StageRunner
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.engine.step_state import Passed
from elasticd.runtime.model.batch_format import BatchFormat
from elasticd.runtime.model.buffer_check import BufferCheck
from elasticd.runtime.model.local_model import LocalModel, local_model
from elasticd.runtime.model.model import Loss, Model
from elasticd.runtime.model.validation import ModelError
from elasticd.runtime.parallel import tp_hooks
from elasticd.runtime.parallel.expert_exchange import ExpertExchange
from elasticd.runtime.parallel.expert_pairs import ExpertPairs
from elasticd.runtime.parallel.gradient_reduction import GradientReducer, gradient_dtype
from elasticd.runtime.parallel.router_balance import RouterBalance
from elasticd.runtime.parallel.router_choices import RouterChoices
from elasticd.runtime.parallel.sequence_parallel import SequenceSlices
from elasticd.runtime.parallel.zero import ZeroState
from elasticd.runtime.telemetry.step_times import Telemetry

_Held = TypeVar("_Held")


def build(model: Model, plan: Plan, device: str, accelerator: Accelerator) -> LocalModel:
    """The local modules of a device, without values. A device that only carries state has none."""
    if device not in plan.places:
        return LocalModel(modules={}, passes={}, parameters={}, buffers={})
    place = plan.places[device]
    return local_model(model, plan.stage(place), place.position, accelerator)


class ModuleEngine:
    """Runs a module's passes on one device, and holds its values there."""

    layouts: Layouts  #: of the module
    samples: Samples  #: gives the samples of the training
    prefix: str  #: of its names among those of all modules; empty in a model of one
    trained: bool  #: it has parameters that are trained
    local: LocalModel  #: the sections that this device computes with
    runner: StageRunner | None  #: their passes; None: the device only carries replicas of state
    #: The parts of its parameters that the optimizer steps on, by their names among those of all modules.
    owned: list[Owned]
    zero: ZeroState  #: its parameters, and the parts of them that its optimizer steps on
    reducer: GradientReducer  #: reduces its gradients, and measures the seconds of that
    slices: SequenceSlices | None  #: those of its TP group, under sequence parallelism
    constants: BufferCheck  #: the buffers that no pass may change
    exchange: ExpertExchange | None  #: of rows for experts; None: its lane has all of them
    choices: RouterChoices  #: of the routers here
    balance: RouterBalance | None  #: of the routers here
    telemetry: Telemetry | None  #: of a module of items, of that alone

    def __init__(
        self,
        recipe: Recipe,
        layouts: Layouts,
        peers: Peers,
        samples: Samples,
        telemetry: Telemetry,
        pace: PassPacer,
        before_sums: Callable[[], None],
        *,
        takes: Mapping[str, ItemBorder] | None = None,
        gives: ItemBorder | None = None,
    ) -> None:
        """Makes the local modules. They have no values until `adopt`.

        Args:
            recipe: of the job.
            layouts: of the module.
            peers: the other members of the plan.
            samples: gives those of the training.
            telemetry: measures passes.
            pace: called after every pass of a block; slows an emulated device down.
            before_sums: called when all gradients are there that this device adds to a section.
            takes: by key in the batch: the border with the module that makes what is there.
            gives: the border with the module that takes what this one makes of items; None: it runs on samples.
        """
        self.layouts, self._device, self._before_sums = layouts, peers.me, before_sums
        self.samples = samples
        self.name, self._seed = layouts.plan.module.module, recipe.seed
        self._graph = recipe.model.graph
        self.prefix = f"{self.name}." if self._graph is not None else ""
        model = recipe.module(self.name)
        self.trained = bool(layouts.trained)
        local = self.local = build(model, layouts.plan, peers.me, recipe.accelerator)
        if recipe.precision is not None:
            recipe.precision.add_up(held.tensor for held in local.parameters.values())
        self.reducer = self._reducer(peers, model.counted)
        self.zero = ZeroState(
            layouts, peers, local, self.reducer, recipe.master, recipe.accelerator, counts=model.counted
        )
        self.constants = BufferCheck(
            {self.prefix + section: module for section, module in local.modules.items()}
        )
        self.choices = RouterChoices(recipe.accelerator.device)
        self._pairs = ExpertPairs(model.spec)
        self.owned: list[Owned] = []
        here = peers.me in layouts.plan.places
        self.telemetry = telemetry if gives is not None and here else None
        self._frozen = {name: p for name, (_, p) in local.parameters.items() if not p.requires_grad}
        self.slices = self.runner = self.exchange = None
        self.balance = None
        if peers.me in layouts.plan.places:
            if recipe.balance is not None and gives is None:
                self.balance = RouterBalance(
                    recipe.balance, recipe.balanced, local.drawing, recipe.known_length
                )
                for section, module in local.modules.items():
                    self.balance.attach(section, module)
            self._attach(model, peers.communicators)
            place = layouts.plan.places[peers.me]
            self.runner = StageRunner(
                recipe=recipe,
                model=model,
                plan=layouts.plan,
                local=local,
                peers=peers,
                loader=self.loader(samples, recipe.dataset, recipe.data.collate, recipe.reads),
                telemetry=telemetry,
                pace=pace,
                on_section_done=self._section_done,
                sums_begin=self.reducer.begins,
                slices=self.slices,
                exchange=self.exchange,
                pairs=self._pairs,
                balance=self.balance,
                takes=takes,
                gives=ItemSource(gives, self.name, place.pipeline, place.lane) if gives is not None else None,
            )

    def loader(self, reader: Samples, dataset: object, collate: Collate, reads: BatchFormat | None) -> Loader:
        """Makes the batches of the module.

        Args:
            reader: gives the samples of the dataset.
            dataset: the training's or a held-out one.
            collate: makes a padded batch of samples.
            reads: makes of samples and batches what the model reads; None: they are that.

        Raises:
            ValueError: the dataset does not say how many items its samples have.
        """
        drawing, graph = self.local.drawing, self._graph
        if graph is None:
            return Loader(reader, collate, reads, drawing)
        counts = {items: item_counts(dataset, items) for items in sorted(graph.items)}
        items, parts = graph.modules[self.name].items, hasattr(dataset, "part")
        if items:
            return ItemLoader(reader, items, counts, drawing, (items,) if parts else None)
        places = graph.modules[self.name].places
        return Loader(reader, collate, reads, drawing, counts=counts, part=() if parts else None, places=places)

    def forward(self, batch: BatchPlan, loader: Loader, loss: Loss) -> Passed:
        """Runs the forward passes of a round of an evaluation, if this device has any.

        Args:
            batch: of the round.
            loader: makes its batches.
            loss: called with each output instead of the loss of the training.
        """
        if self.runner is None:
            return Passed(loss=0.0, count=0.0, tokens=0, samples=NO_SAMPLES)
        place = self.layouts.plan.places[self._device]
        mine = batch.of(place)
        if self.runner.reads:
            loader.prepare([piece.sample for micro in mine for piece in micro])
        return self.runner.forward(mine, loader, loss, batch.rows(place), batch.pipelines[place.pipeline])

    def _reducer(self, peers: Peers, counts: Collection[str]) -> GradientReducer:
        layouts, parameters = self.layouts, self.local.parameters
        mine = reductions(layouts, self._device)

        def dtype_of(name: str) -> str:
            return str(gradient_dtype(parameters[name].tensor)).removeprefix("torch.")

        own = {channel.members for channel in peers.channels if channel.use == "reduce"}
        listed = buckets(layouts, mine, dtype_of)
        return GradientReducer(
            self._device,
            [piece for each in mine if len(each.devices) == 1 for piece in each.pieces],
            [bucket for bucket in listed if bucket.devices in own],
            passed_on(layouts, listed, own),
            peers,
            parameters,
            self.local.modules,
            members=layouts.plan.members,
            gates=last_users(layouts.spec, list(self.local.modules)),
            keep_all=layouts.plan.state.zero < 2,
            stopwatch=peers.everyone.plan_groups.stopwatch,
            counts=counts,
        )

    def _attach(self, model: Model, communicators: Communicators) -> None:
        """Hooks the collectives of its TP group, if it has one, around its modules."""
        place = self.layouts.plan.places[self._device]
        stage = self.layouts.plan.stage(place)
        of_lanes = self.layouts.plan.pipelines[place.pipeline].stages[place.stage]
        alone = len(stage.devices) == 1
        team = None if alone else communicators.team(Channel("tensor", stage.devices))
        for section, module in self.local.modules.items():
            self.choices.attach(model, section, module, compares=team is not None)
        if of_lanes.shared_blocks:
            if items := self.layouts.plan.module.items:
                raise ModelError(
                    f"plan {self.layouts.plan.number}: lanes share experts of module {self.name}, which takes "
                    f"{items}, each lane its own: have each lane hold all experts"
                )
            mesh = communicators.mesh(Channel("experts", of_lanes.devices))
            lane = team or OneDevice(self._device)
            self.exchange = ExpertExchange(model.spec, of_lanes, self._device, mesh, lane, self._pairs)
            for section, module in self.local.modules.items():
                self.exchange.attach(model, section, module)
        if team is None:
            return
        shared = self.exchange.sections if self.exchange is not None else ()
        if stage.sliced:
            self.slices = SequenceSlices(team, stage.shares)
        for section, module in self.local.modules.items():
            tp_hooks.attach(model, section, module, stage, team, self.slices, shared, self._pairs)

    def _section_done(self, section: str) -> None:
        self._before_sums()
        self.reducer.section_done(section)

    def launch_sum(self, bucket: int) -> None:
        """Launches a sum of gradients; see `GradientReducer.launch`."""
        self._before_sums()
        with self.telemetry.apart("reduce") if self.telemetry is not None else nullcontext():
            self.reducer.launch(bucket)

    def adopt(self, state: LocalState) -> None:
        """Loads the module's part of a state into the local modules."""
        if self.prefix:
            mine = {item: tensor for item, tensor in state.tensors.items() if item.name.startswith(self.prefix)}
            own = {Item(item.name.removeprefix(self.prefix), item.role): mine[item] for item in mine}
            state = LocalState(tensors=own)
        self.zero.install(state)
        self.constants.note()
        listed = self.zero.attach(state)
        self.owned = [part._replace(name=self.prefix + part.name) for part in listed] if self.prefix else listed

    def begin(self, step: int) -> None:
        """Begins a step: keys its draws, in each module by other numbers."""
        seed = draw_seed(self._seed, self.name) if self.prefix else self._seed
        self.local.drawing.begin(seed, step, dataset=self._seed)
        self.choices.begin()
        if self.telemetry is not None:
            self.telemetry.begin()

    def expert_rows(self) -> dict[int, list[int]]:
        """By block the rows of each expert in this step, of a device that tells of its lane; empty of others.

        The device has passed them.
        """
        place = self.layouts.plan.places.get(self._device)
        if place is None or place.position:
            return {}
        listed = ((block_of(section), rows) for section, rows in self.choices.rows.items())
        return {block: rows.tolist() for block, rows in listed if block is not None}

    @property
    def reached(self) -> set[str]:
        """The parameters that a backward pass of the step reached here, as `owned` names them."""
        own = self.reducer.reached
        return {self.prefix + name for name in own} if self.prefix else own

    def reduce(self) -> float | Tensor:
        """See `ZeroState.reduce`."""
        if self.telemetry is None:
            return self.zero.reduce()
        with self.telemetry.apart("reduce"):
            return self.zero.reduce()

    def agree(self, unreached: Collection[str], counts: Collection[str] = ()) -> list[Tensor]:
        """See `ZeroState.agree`; names are as in `owned`. Those of counts are left out of the gradients."""
        if self.prefix:
            unreached = {name.removeprefix(self.prefix) for name in unreached if name.startswith(self.prefix)}
        return self.zero.agree(unreached, counts)

    def named(self, values: Mapping[str, _Held]) -> Mapping[str, _Held]:
        """Values by their names among those of all modules."""
        return {self.prefix + name: value for name, value in values.items()} if self.prefix else values

    def run(self, batch: BatchPlan, after: BatchPlan | None, scale: float) -> Passed:
        """Runs the passes of a step, if this device has any.

        Args:
            batch: of the step.
            after: of the next step, whose samples are read meanwhile; None: it is not known.
            scale: the gradients are those of the loss times this.
        """
        if self.runner is None:
            return Passed(loss=0.0, count=0.0, tokens=0, samples=NO_SAMPLES)
        place = self.layouts.plan.places[self._device]
        mine = batch.of(place)
        self.runner.prepare([*mine, *(after.of(place) if after is not None else ())])
        passed = self.runner.run(mine, scale, batch.rows(place), batch.pipelines[place.pipeline])
        self.constants.check()
        return passed

    def refuse_unfrozen(self) -> None:
        """Raises ModelError where a parameter that the optimizer does not have is frozen no more."""
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise ModelError(
                    f"{self.prefix}{name} was frozen when its module was given to elasticd.Model, and the "
                    "job's optimizer does not have it: give it unfrozen, and freeze it in Callback.before_step "
                    "until then"
                )


def draw_seed(seed: int, module: str) -> int:
    """The seed of the draws of one of several modules, under a job's seed."""
    digest = hashlib.blake2b(f"{seed}/{module}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")
