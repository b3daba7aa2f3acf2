"""`Engine`: the training of one plan on one rank, with its local model, optimizer and process groups.

A step is made of the forward and backward passes of the pipeline's micro-batches, the reduction of gradients
over the devices that hold a parameter, the vote, and the optimizer. Losses and gradients are sums over targets
until the vote gives the global count; they are divided once.
"""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import NoReturn

import torch
from elasticd_migration.local_state import (
    MASTER,
    VALUE,
    LocalState,
    LocalTensor,
    Owned,
    Shard,
    collect,
    restore_optimizer,
)
from elasticd_migration.text_codec import from_text
from elasticd_planner.layout.channels import channels_of_modules
from elasticd_planner.layout.layouts import Item, Layouts
from elasticd_planner.spec.batch import BatchPlan
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.measurement import Measurement
from elasticd_planner.spec.model import BALANCE_COUNTS
from elasticd_planner.spec.plan import Plan
from elasticd_planner.spec.sample_packing import linear_of
from msgspec.structs import replace

from elasticd.records import Vote
from elasticd.runtime.accelerator import CPU, Accelerator, DeviceLost, Event
from elasticd.runtime.comm.communicators import Communicators, Peers, agreed
from elasticd.runtime.comm.groups import Cancelled, Group, PlanGroups
from elasticd.runtime.data.collate import Collate
from elasticd.runtime.data.loader import Loader
from elasticd.runtime.data.prefetch import Dataset, SampleError
from elasticd.runtime.data.sample_ledger import LedgerError, expected_hash, expected_hashes
from elasticd.runtime.data.shared_samples import SharedSamples
from elasticd.runtime.data.step_samples import Samples
from elasticd.runtime.engine.batches_ahead import BatchesAhead
from elasticd.runtime.engine.device_rest import come_to_rest
from elasticd.runtime.engine.mixed_precision import LossScaler
from elasticd.runtime.engine.module_engine import ModuleEngine
from elasticd.runtime.engine.module_passes import ModulePasses, item_borders
from elasticd.runtime.engine.pass_watch import PassPacer
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.engine.set_aside import SetAside
from elasticd.runtime.engine.stability import StabilityGuard
from elasticd.runtime.engine.state_health import StateHealth
from elasticd.runtime.engine.step_state import Passed
from elasticd.runtime.engine.vote import (
    Draining,
    RankRecord,
    StepOutcome,
    StepVote,
    TpGroup,
    bits_of,
    names_of,
)
from elasticd.runtime.model.batch_format import BatchFormat
from elasticd.runtime.model.model import Loss, Model
from elasticd.runtime.model.optimizer_check import AVERAGE, kinds_of, refuse_kinds, unfused
from elasticd.runtime.model.validation import refuse_modes
from elasticd.runtime.parallel.router_balance import counts_of_step
from elasticd.runtime.parallel.router_choices import counts_of
from elasticd.runtime.telemetry.device_timer import spans_of
from elasticd.runtime.telemetry.main_thread import during, during_step
from elasticd.runtime.telemetry.step_times import Telemetry
from elasticd.wire.main_thread import LOADER, OPTIMIZER, SCHEDULER, UPDATE

log = logging.getLogger(__name__)

#: Steps between two reports of the rows of each expert.
LOAD_EVERY = 10

#: The part of a state that has the position of its stream, see `elasticd.runtime.data.step_samples.Feed`.
DATA = "data"
#: The parts that have the scheduler's state, the classes of the optimizer and the scheduler, and the updates
#: that were left out.
SCHEDULER_STATE, KINDS, STABILITY = "scheduler", "kinds", "stability"


@dataclass(frozen=True, kw_only=True)
class StepDone:
    """A finished step."""

    outcome: StepOutcome  #: the same on every rank
    samples: tuple[int, ...]  #: ids of the global batch
    measurement: Measurement  #: seconds that the step took on this rank


@dataclass(frozen=True, kw_only=True)
class HeldOutReader:
    """A held-out dataset, and what makes its batches, by module."""

    dataset: Dataset
    loaders: Mapping[str, Loader]


def connect(plan_groups: PlanGroups, layouts: Layouts, recipe: Recipe) -> Peers:
    """Makes the group of all members, and then this device's communicators, in the same order on all ranks."""
    everyone = plan_groups.group(layouts.plan.members, "vote")
    packing = recipe.data.packing
    listed = channels_of_modules(layouts, plan_groups.me, cuts=packing is not None and packing.cut)
    make = recipe.connect or agreed(everyone, recipe.accelerator)
    made = make(plan_groups, listed, everyone, recipe.accelerator)
    return Peers(everyone=everyone, communicators=made, channels=listed)


def first_state(
    model: Model,
    layouts: Layouts,
    device: str,
    seed: int,
    master: torch.dtype | None = None,
    accelerator: Accelerator = CPU,
) -> LocalState:
    """The state of a device before the first step: parameters, buffers and master weights, no optimizer state.

    Values are drawn on the host, so that they are the same on every type of device.

    Args:
        model: the model.
        layouts: the layout of its state under the first plan.
        device: this device.
        seed: keys the values that the model does not have by itself.
        master: the type of master weights; None: there are none.
        accelerator: where the values are to lie.
    """

    def first(item: Item, box: Box) -> Shard:
        plane, dtype = (MASTER, master) if item.role == "state" else (VALUE, None)
        value = model.first_value(item.name, box, seed, dtype)
        return Shard(box=box, planes={plane: value.to(accelerator.device)})

    return LocalState(
        tensors={
            item: LocalTensor(shards=tuple(first(item, box) for box in boxes))
            for item, boxes in layouts.held(device).items()
            if item.role != "state" or master is not None
        }
    )


class Engine:
    """Trains one plan on one device, once `adopt` gave it its state and an optimizer."""

    rank: int  #: of this device under the plan
    loss_plan: Plan  #: of the module that computes the loss, to whose lanes samples are dealt
    accelerator: Accelerator  #: where it trains
    everyone: Group  #: all members of the plan, for the words of the host
    communicators: Communicators  #: for tensors of the model
    linear: int  #: see `elasticd_planner.spec.sample_packing.linear_of`
    modules: dict[str, ModuleEngine]  #: by name
    health: StateHealth  #: of the state here
    reduced: int | None  #: index of the step whose gradients are reduced here and wait for their update
    last: Vote | None  #: that of the last update
    lent: SetAside | None  #: its state, a part of which lies in host memory until `back`; None: nothing does
    guard: StabilityGuard  #: leaves updates out
    leave_out: int  #: index of the last step whose update is left out, since the job went back; -1: of none
    copied: Callable[[], None]  #: returns when no snapshot reads the state any more: it may change
    #: Its members may be at different places between two steps (`between_steps`): after a recovery, and after
    #: an evaluation that ended here alone.
    after_recovery: bool

    def __init__(self, recipe: Recipe, layouts: Layouts, plan_groups: PlanGroups, pace: PassPacer) -> None:
        """Makes the groups and modules of one member of a plan. It has no state until `adopt`.

        Raises:
            Invalid: the plan has several modules.
        """
        peers = connect(plan_groups, layouts, recipe)
        accelerator = self.accelerator = recipe.accelerator
        self.plan, self.device, self.plan_groups = layouts.plan, plan_groups.me, plan_groups
        self.layouts, self.rank = layouts, layouts.plan.rank(plan_groups.me)
        self.everyone, self.linear = peers.everyone, linear_of(recipe.model.spec)
        self._recipe, self.communicators = recipe, peers.communicators
        precision = recipe.precision
        self.scaler = LossScaler(precision.scale) if precision is not None and precision.scale else None
        self.guard = StabilityGuard(recipe.stability, scaled=self.scaler is not None)
        graph = recipe.model.graph
        # Of modules of items each has its own. The last one, of the module with the loss, has the stopwatch's
        # marks.
        apart = {
            name: Telemetry(self.device, plan_groups.stopwatch, spans=spans_of(accelerator))
            for name in (graph.encoders if graph else ())
            if self.device in layouts.views[name].plan.places
        }
        self._apart = apart
        self._telemetry = Telemetry(
            self.device,
            plan_groups.stopwatch,
            memory=accelerator.used_bytes,
            spans=spans_of(accelerator),
        )
        borders = item_borders(recipe, layouts, peers) if graph is not None else {}
        samples = recipe.feed if graph is None else SharedSamples(recipe.feed)
        self.modules = {}
        for name, view in layouts.views.items():
            takes = {} if graph is None else {key: borders[of] for key, of in graph.modules[name].takes.items()}
            self.modules[name] = ModuleEngine(
                recipe,
                view,
                peers,
                samples,
                apart.get(name, self._telemetry),
                pace,
                self._look,
                takes=takes,
                gives=borders.get(name),
            )
        #: Runs the passes of a plan of several modules; None: the plan has one.
        self._several = (
            None if graph is None else ModulePasses(recipe, graph, layouts, self.modules, borders, self.device)
        )
        self.loss_plan = layouts.plan if graph is None else layouts.views[graph.own].plan
        self._trained = self.layouts.trained
        rank = {device: index for index, device in enumerate(self.plan.members)}
        self._vote = StepVote(
            peers.everyone,
            len(self._trained),
            len(graph.encoders) if graph else 0,
            len(self.modules),
            [
                TpGroup(index, tuple(rank[device] for device in stage.devices))
                for index, view in enumerate(layouts.views.values())
                for _, _, stage in view.plan.walk()
                if len(stage.devices) > 1
            ],
        )
        self._bits = set[str](), bits_of((), self._trained)
        self._skipped = "", frozenset[str]()
        self._zeros = (0,) * len(self.plan.members)
        self._carried: dict[str, str] = {}
        self._after: str | None = None
        self._delivered: Event | None = None  # after the last step's deliveries; None: they are over
        self.copied = lambda: None
        self.health = StateHealth()
        self.after_recovery = self._met = False
        self._batches = BatchesAhead(
            recipe.feed, self.loss_plan, self.linear, recipe.planning, self.plan.members
        )
        self.reduced = self.last = self.lent = None
        self.leave_out = -1
        self.scheduler: torch.optim.lr_scheduler.LRScheduler | None = None

    @property
    def module(self) -> ModuleEngine:
        """The module of a plan that has one. Refuses a plan of several."""
        return self.modules[self.plan.module.module]

    @property
    def owned(self) -> list[Owned]:
        """The parts of parameters that the optimizer steps on, of all modules."""
        return [part for module in self.modules.values() for part in module.owned]

    def adopt(self, state: LocalState) -> None:
        """Loads `state` into the local model and into a new optimizer and scheduler.

        They are made here and not before, because a plan that is prepared may never be executed.
        """
        for module in self.modules.values():
            module.adopt(state)
        counted = self._recipe.model.counted
        self._counted = [part for part in self.owned if part.name in counted and not part.box.empty]
        owned = [part for part in self.owned if part.name not in counted]
        where = self.plan_groups.stopwatch.where
        with during(where, OPTIMIZER):
            groups, slices = self._recipe.parameter_groups, [(part.name, part.parameter) for part in owned]
            self.optimizer = groups.optimizer(self._recipe.optimizer, slices)
        unfused(self.optimizer)
        if self._recipe.scheduler is not None:
            with during(where, SCHEDULER):
                self.scheduler = self._recipe.scheduler(self.optimizer)
        self._carried = dict(state.extras)
        kinds = kinds_of(self.optimizer, self.scheduler)
        saved = from_text(text) if (text := self._carried.pop(KINDS, None)) is not None else kinds
        refuse_kinds(saved, kinds)
        restore_optimizer(
            state, owned, self.optimizer, masters=self._recipe.master is not None
        )  # undoes the changes of the new scheduler
        if AVERAGE in saved and AVERAGE not in kinds:  # the script keeps none any more
            for kept in self.optimizer.state.values():
                kept.pop(AVERAGE, None)
        if self.scheduler is not None and (text := self._carried.pop(SCHEDULER_STATE, None)) is not None:
            self.scheduler.load_state_dict(from_text(text))
        if self.scaler is not None and (text := self._carried.pop("scaler", None)) is not None:
            self.scaler.load_state_dict(from_text(text))
        if (text := self._carried.pop(STABILITY, None)) is not None:
            self.guard.load_state_dict(from_text(text))
        self.guard.leave_out(self.leave_out)

    def state(self) -> LocalState:
        """The state of this device, by reference: values, its part of the optimizer's state, settings.

        Settings that nothing here uses are kept as they came.
        """
        if self.lent is not None:
            return self.lent.state
        extras: dict[str, object] = {name: from_text(text) for name, text in self._carried.items()}
        extras[STABILITY] = self.guard.state_dict()
        extras[KINDS] = kinds_of(self.optimizer, self.scheduler)
        if self.scheduler is not None:
            extras[SCHEDULER_STATE] = self.scheduler.state_dict()
        if self.scaler is not None:
            extras["scaler"] = self.scaler.state_dict()
        held = self.modules.values()
        return collect(
            dict(chain.from_iterable(module.named(module.zero.values).items() for module in held)),
            self.owned,
            self.optimizer,
            buffers=dict(chain.from_iterable(module.named(module.zero.buffers).items() for module in held)),
            extras=extras,
            masters=self._recipe.master is not None,
        )

    def set_aside(self, kept: Mapping[Item, Sequence[Box]]) -> LocalState:
        """Lends this device's memory to another plan; it cannot train until `back`.

        Args:
            kept: The boxes of that plan here, by item.

        Returns:
            The state of this device, as `state` gives it from now on.

        Raises:
            NoHostMemory: nothing was changed.
        """
        if self.lent is None:
            self.copied()
            for module in self.modules.values():
                if module.runner is not None:
                    module.runner.release()  # graphs have addresses of what goes away
            self.lent = SetAside(self.state(), self.accelerator)
        self.lent.lend(kept)
        size = self.lent.bytes / (1 << 20)
        log.info("%s: %.0f MiB of plan %d wait in host memory", self.device, size, self.plan.number)
        return self.lent.state

    def back(self) -> None:
        """Takes back what was set aside, once the other plan's memory is free. Nothing where nothing was.

        Raises:
            RuntimeError: there is no memory for it; `state` has it as before.
        """
        if self.lent is not None:
            self.lent.back()
            self.lent = None

    def delivered_state(self) -> LocalState:
        """`state`, once all of it is here: it is to be kept. Raises as `delivered`."""
        self.delivered()
        return self.state()

    def forward(self, batch: BatchPlan, held_out: HeldOutReader, loss: Loss) -> Passed:
        """Runs the forward passes of a round of an evaluation, if this device has any.

        Args:
            batch: of the round.
            held_out: reads its dataset.
            loss: called with each output instead of the loss of the training.
        """
        if self._several is not None:
            try:
                self._several.make_round(batch, held_out.dataset)
            except SampleError:
                self._compare("an evaluation", 0)
                raise
            self._compare("an evaluation", self._several.digest(batch) >> 1)
            return self._several.forward(batch, held_out.loaders, loss)
        return self.module.forward(batch, held_out.loaders[self.module.name], loss)

    def held_out(self, dataset: Dataset, collate: Collate, reads: BatchFormat | None) -> HeldOutReader:
        """Makes the readers of a held-out dataset.

        Args:
            dataset: a map-style one.
            collate: makes a padded batch of samples.
            reads: makes of samples and batches what the model reads; None: they are that.
        """
        reader: Samples = self._recipe.reader_of(dataset)
        if self._several is not None:
            reader = SharedSamples(reader)
        loaders = {
            name: module.loader(reader, dataset, collate, reads) for name, module in self.modules.items()
        }
        return HeldOutReader(dataset=dataset, loaders=loaders)

    def evaluated(self) -> None:
        """Checks, after an evaluation, that it changed no buffer of the state dict.

        Buffers outside of the state dict, such as a cache of keys, may change.

        Raises:
            ModelError: another buffer changed.
        """
        for module in self.modules.values():
            module.constants.check(training=False)

    @property
    def scale(self) -> float:
        """The factor in gradients until the update: the scale of the loss."""
        return self.scaler.scale if self.scaler is not None else 1.0

    @property
    def interrupted(self) -> bool:
        """True where the plan's groups are shut and the state here is whole."""
        return self.plan_groups.dead and not self.health.torn

    def check(self) -> None:
        """Raises Cancelled once the plan's groups are shut: what came from others may be garbage."""
        if self.plan_groups.dead:
            raise Cancelled("shut while the device was waited for")

    def delivered(self) -> None:
        """Returns when this device has the values that were sent to it.

        Raises:
            Cancelled: the plan's groups were shut meanwhile.
        """
        self.accelerator.passed(self.check)
        self._arrived()

    def _arrived(self) -> None:
        """Marks the parameters as ready: the values that were sent after the last update have arrived."""
        if self._delivered is not None:
            self.health.receive_parameters()
            self._delivered = None

    def _look(self) -> None:
        """Marks the parameters as ready if their values have arrived. An abort may end messages under way, so
        its mark is looked at later."""
        if self._delivered is None or self.plan_groups.dead:
            return
        if self._delivered.query() and not self.plan_groups.dead:
            self._arrived()

    def rest(self) -> None:
        """Returns when the device has come to rest, after another member was lost. It waits for nobody then.

        Raises:
            DeviceLost: it did not, and what it has is lost with it.
        """
        if self.accelerator.immediate:
            return
        try:
            come_to_rest(self.device, self.plan_groups, self.communicators.rest, self.accelerator)
        except DeviceLost:
            self.health.lose()
            raise

    def settle(self) -> None:
        """Returns when every member has the values that were sent to it. All members call it together."""
        self.delivered()
        if self.plan.state.zero:
            self.gather(0)
        self.communicators.received()

    def gather(self, word: int) -> tuple[int, ...]:
        """All-gathers a number. All members call it, between two steps.

        Returns:
            The numbers in rank order.
        """
        return tuple(self.everyone.all_gather(torch.tensor(word)).tolist())

    def expert_load(self) -> dict[str, list[int]]:
        """The rows of each expert in the last step, of all ranks, by section. All members call it together,
        between two steps."""
        load = {}
        for name, module in self.modules.items():
            counts = counts_of(self._recipe.module(name))
            own = module.expert_rows()
            mine = [rows for block, count in counts.items() for rows in own.get(block, [0] * count)]
            if not mine:
                continue
            every = iter(self.everyone.all_gather(torch.tensor(mine)).view(-1, len(mine)).sum(0).tolist())
            for block, count in counts.items():
                load[f"{module.prefix}blocks.{block}"] = [*islice(every, count)]
        return load

    def step(
        self,
        step: int,
        prepared: Callable[[], int],
        saving: Callable[[], int] = int,
        snapshot: Callable[[], bool] = bool,
        draining: Callable[[], Draining] = lambda: Draining.NO,
        stopping: Callable[[], bool] = bool,
    ) -> StepDone:
        """Trains one step. The functions are called once, when the record for the vote is made.

        Args:
            step: its index, from 0.
            prepared: gives the number of the plan that this rank has prepared; 0: none.
            saving: gives its word on checkpoints.
            snapshot: gives whether a snapshot is due and this rank can make it.
            draining: gives whether this process is to leave the job.
            stopping: gives whether its script wants this step to be the last.

        Raises:
            SampleError: a rank could not read a sample; on every rank. The state is that before the step.
        """
        where = self.plan_groups.stopwatch.where
        with during_step(where, step, self.plan.number):
            self.accelerator.use()  # whatever the user's code has made of it since
            refuse_modes(self.accelerator.device)
            for module in self.modules.values():
                module.refuse_unfrozen()
            self.meet()
            batch, passed = self._passes(step)
            # The one wait for the device in a step: all its gradients are reduced then.
            reduced = [module.reduce() for module in self.modules.values()]
            digests = [module.choices.digest for module in self.modules.values()]
            loss, count, balance, *values = self.accelerator.read(
                passed.loss, passed.count, passed.balance, *reduced, *digests, check=self.check
            )
            terms, choices = values[: len(reduced)], values[len(reduced) :]
            self._arrived()
            load = {} if step % LOAD_EVERY else self.modules[self.loss_plan.module.module].expert_rows()
            squares = sum(terms) / self.scale**2
            self.reduced = step
            record = RankRecord(
                step=step,
                prepared=prepared(),
                saving=saving(),
                snapshot=snapshot(),
                finite=math.isfinite(squares),
                tokens=passed.tokens,
                squares=squares,
                loss=loss,
                targets=count,
                balance=balance,
                samples=self._seen(batch, passed.samples),
                failed=passed.failure.index + 1 if passed.failure is not None else 0,
                draining=draining(),
                stop=stopping(),
                reached=self._reached(),
                seconds=self._telemetry.block_seconds() if batch.packed else 0.0,
                items=self._several.ratios() if self._several is not None else b"",
                next=self._digest(self._batches.next(step)),
                choices=struct.pack(f"<{len(choices)}q", *map(int, choices)),
            )
            outcome = self._vote.vote(record, self._expected(batch))
            outcome = replace(outcome, vote=self.guard.judged(outcome.vote))
            self._batches.voted(batch, outcome.seconds)
            self.communicators.received()
            if outcome.failed is not None:
                self._drop(*outcome.failed, passed.failure)
            if self._several is not None:
                self._several.voted(step, outcome.items)
                self._several.read_ahead()
            where.at(UPDATE)
            self.copied()
            self._telemetry.mark()
            self.apply(outcome.vote)
            self._telemetry.passed("optimizer")
            for module in self.modules.values():
                if outcome.vote.apply:
                    module.zero.all_gather_params()
                module.zero.broadcast_buffers()
            self._delivered = self.accelerator.event()
            self._delivered.record()
            self._look()
            measurement = self._telemetry.finish(
                self.plan.number,
                step,
                slowdown=self._batches.slowdown_of(self.device),
                batch=self._batches.summary(batch) if self.rank == 0 else None,
                longest_so_far=self._recipe.feed.longest,
                modules=self._apart,
                item_slowdowns=self._several.slowdowns() if self._several is not None else None,
                expert_rows=load,
            )
            return StepDone(outcome=outcome, samples=batch.samples(), measurement=measurement)

    def _digest(self, after: BatchPlan | None) -> int:
        """`RankRecord.next`. Padded batches of a model of one module follow from the step's number alone."""
        if self._several is not None:
            return self._several.digest(after)
        return after.digest if after is not None and after.packed else 0

    def _seen(self, batch: BatchPlan, samples: int) -> int:
        """`RankRecord.samples`. A packed batch plan is the same on all ranks, as a vote or `_compare` said: a
        rank compares its own samples then, and brings 0 if they are right."""
        if not batch.packed:
            return samples
        if self._several is not None:
            return samples ^ self._several.expected_of(self.device)
        return samples ^ expected_hash(self.plan, batch, self.device)

    def _expected(self, batch: BatchPlan) -> Sequence[int]:
        """`RankRecord.samples` of each rank, in rank order."""
        return self._zeros if batch.packed else self.hashes(batch)

    def hashes(self, batch: BatchPlan) -> Sequence[int]:
        """The hash of the samples that each rank is to see, in rank order."""
        if self._several is None:
            return expected_hashes(self.plan, batch)
        return [self._several.expected_of(device) for device in self.plan.members]

    def _reached(self) -> bytes:
        """The bits of `RankRecord.reached`, which are the same in most steps."""
        reached = set[str]().union(*(module.reached for module in self.modules.values()))
        if self._bits[0] != reached:
            self._bits = reached, bits_of(reached, self._trained)
        return self._bits[1]

    def _unreached(self, vote: Vote) -> frozenset[str]:
        """The parameters that the optimizer skips, which are the same in most steps."""
        if self._skipped[0] != vote.unreached:
            self._skipped = vote.unreached, names_of(vote.unreached, self._trained)
        return self._skipped[1]

    def meet(self) -> None:
        """Before the first passes of the plan: connects its members on the device. All of them call it
        together, and from the second time on nothing is done."""
        if not self._met:
            sums = (module.reducer.sums for module in self.modules.values())
            self.communicators.first_launches(chain.from_iterable(sums))
            self._met = True

    def _passes(self, step: int) -> tuple[BatchPlan, Passed]:
        """Begins a step and runs its forward and backward passes, if this device has any."""
        self._telemetry.begin()
        for module in self.modules.values():
            module.begin(step)
        self.plan_groups.stopwatch.where.at(LOADER)  # a stream is read here, and the lengths of samples
        self._after = self._recipe.feed.begin(
            step, self.loss_plan, self.everyone, self._carried.get(DATA), self._batches.agreed
        )
        batch = self._batch(step)
        if self._several is not None:
            passed = self._several.run(batch, self.scale)
            self._several.look_ahead(self._batches.next(step))
            return batch, passed
        return batch, self.module.run(batch, self._batches.next(step), self.scale)

    def _batch(self, step: int) -> BatchPlan:
        """The batch plan of a step that has begun. A packed one, and one with items, that no vote has compared,
        of a plan's first step or of samples of the script, is compared now.

        Raises:
            SampleError: a sample goes into no row, or its items cannot be dealt; on all ranks.
            LedgerError: a rank deals otherwise; on all of them.
        """
        compares = self._recipe.feed.packed or self._several is not None
        known = not compares or self._batches.compared(step)
        try:
            batch = self._batches.of(step)
            if self._several is not None:
                self._several.make(batch)
        except SampleError:
            if not known:
                self._compare(f"step {step}", 0)
            raise
        if not known:
            digest = batch.digest if self._several is None else self._several.digest(batch)
            self._compare(f"step {step}", digest >> 1)
        return batch

    def _compare(self, what: str, digest: int) -> None:
        """Raises LedgerError, on all ranks, if some deal the samples of a step, `what`, otherwise."""
        digests = self.gather(digest)
        if len(set(digests)) > 1:
            usual = max(digests, key=digests.count)
            odd = [self.plan.members[rank] for rank, digest in enumerate(digests) if digest != usual]
            raise LedgerError(
                f"{what}: {', '.join(odd)} deal the samples otherwise than the others: do their "
                "nodes have other lengths, counts or rows in the dataset, or another elasticd or NumPy?"
            )

    def _drop(self, rank: int, index: int, mine: SampleError | None) -> NoReturn:
        """Drops the gradients of a step with a sample that could not be read, and raises its error."""
        self.reduced = None
        for module in self.modules.values():
            module.zero.clear()
        if mine is not None and mine.index == index:
            raise mine
        raise SampleError(index, f"see the output of {self.plan.members[rank]}")

    def apply(self, vote: Vote) -> None:
        """Makes the update of a step whose reduced gradients are here.

        Divides the summed gradients by the global count, clips them by the global norm, and steps the
        optimizer. Under ZeRO only the parts that this device owns have new values after it.

        Raises:
            RuntimeError: the gradients here are of another step than the vote.
        """
        if self.reduced != vote.step:
            raise RuntimeError(f"the gradients here are of step {self.reduced}, the vote is of {vote.step}")
        self.copied()
        self.reduced, self.last = None, vote
        self.health.begin_update()
        if self._after is not None:
            self._carried[DATA], self._after = self._after, None
        self._delivered = None
        if vote.apply:
            unreached = self._unreached(vote)
            counted = self._recipe.model.counted
            gradients = [grad for module in self.modules.values() for grad in module.agree(unreached, counted)]
            scale = 1.0 / vote.count / self.scale
            if self._recipe.clip is not None and vote.norm is not None:
                scale *= min(1.0, self._recipe.clip / (vote.norm + 1e-6))
            if gradients:
                torch._foreach_mul_(gradients, scale)
            self.optimizer.step()
            self._move_counted(vote)
            for module in self.modules.values():
                module.zero.round()
        if self.scaler is not None and vote.count:  # without a target nothing was scaled
            self.scaler.after(applied=vote.norm is not None)
        self.guard.after(vote)
        if self.scheduler is not None:
            self.scheduler.step()
        self.health.end_update(stale=self.plan.state.zero > 0)
        for module in self.modules.values():
            module.zero.clear()

    @torch.no_grad()
    def _move_counted(self, vote: Vote) -> None:
        """Moves the parameters that follow from counts of the step, see `router_balance`."""
        balance = self._recipe.balance
        for name, box, parameter in self._counted:
            counts = parameter.grad
            if balance is None or counts is None:
                continue
            if name.endswith(f".{BALANCE_COUNTS}"):
                ends = box.stop == self._recipe.model.parameter(name).shape
                parameter.copy_(counts_of_step(counts, vote.count, ends=ends))
            elif balance.bias is not None:
                parameter.sub_(counts.sign().to(parameter.dtype), alpha=balance.bias)
