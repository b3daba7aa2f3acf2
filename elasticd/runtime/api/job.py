"""`elasticd.Job`, which is all that a training script needs to know, and the callbacks that it calls."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from typing import Any, Unpack

from elasticd_planner.spec.box import Box
from elasticd_planner.spec.plan import Plan
from torch import Tensor

from elasticd.runtime.api import full_state_dict
from elasticd.runtime.api.between_steps import BetweenSteps, Run
from elasticd.runtime.api.deprecated import DEFAULTS, Groups, OldKeywords, with_old_keywords
from elasticd.runtime.api.evaluation import Evaluation, EvaluationOptions, evaluate
from elasticd.runtime.api.hello import check_optimizer, environment, hello, job_spec
from elasticd.runtime.api.rank_info import RankInfo
from elasticd.runtime.api.step import Step as Step
from elasticd.runtime.api.train_loop import Loop, Next
from elasticd.runtime.checkpoint.options import CheckpointingOptions
from elasticd.runtime.checkpoint.saver import Saver
from elasticd.runtime.comm.all_reduce_probe import Rehearser, fabric_of
from elasticd.runtime.control import parent_death
from elasticd.runtime.control.agent_client import AgentKeyValue, Control
from elasticd.runtime.control.sigterm import NOTICE, Notice
from elasticd.runtime.control.user_exceptions import Farewell, Uncaught
from elasticd.runtime.data.loader import Dataset
from elasticd.runtime.data.options import DataOptions
from elasticd.runtime.data.prefetch import SampleError
from elasticd.runtime.data.sample_ledger import LedgerError
from elasticd.runtime.data.step_samples import Mapped
from elasticd.runtime.data.stream import Stream
from elasticd.runtime.engine.engine import Engine
from elasticd.runtime.engine.parallelism import ParallelismOptions
from elasticd.runtime.engine.pipeline_stage import Loss
from elasticd.runtime.engine.recipe import MakeOptimizer, MakeScheduler, Recipe
from elasticd.runtime.engine.warmup import warm
from elasticd.runtime.exits import Departed, JobOver, JobStopped
from elasticd.runtime.model.model import Model
from elasticd.runtime.snapshot.restore import Snapshots
from elasticd.runtime.snapshot.snapshotter import Snapper
from elasticd.runtime.switch.switcher import Switcher
from elasticd.runtime.telemetry.device_probe import Prober
from elasticd.runtime.telemetry.emulation import Pacer
from elasticd.runtime.telemetry.main_thread import during, shared
from elasticd.system import logs
from elasticd.wire.main_thread import CALLBACK, EVALUATION, Whereabouts
from elasticd.wire.messages import Goodbye, Leaving, Published, ToWorker, Welcome
from elasticd.wire.probes import Probe, Rehearse
from elasticd.wire.snapshots import Freed
from elasticd.wire.unix_socket import default_path

log = logging.getLogger(__name__)

#: The weights that an evaluation may be of.
WEIGHTS = ("value", "average")
#: The variable with the job's name, which torchrun sets.
_NAME = "TORCHELASTIC_RUN_ID"


class Callback:
    """Its methods are called on every rank that is in the plan, in the thread that trains, between steps: what
    they take, all wait for. What they raise ends the loop, as if its body had raised it."""

    def on_plan(self, job: Job, plan: Plan) -> None:
        """Another plan is in force, and this device is in it; of one that stands by nothing is told."""

    def on_step(self, job: Job, step: Step) -> None:
        """A step is done, and the loop is about to be given it."""

    def on_evaluation(self, job: Job, evaluation: Evaluation) -> None:
        """An evaluation of the script's is done."""

    def on_end(self, job: Job) -> None:
        """The last step is done, or the loop was left; the process has no plan any more."""


class Callbacks(Callback):
    """Several, called in order."""

    def __init__(self, callbacks: tuple[Callback, ...]) -> None:
        self._callbacks = callbacks
        self._plan: int | None = None

    def on_plan(self, job: Job, plan: Plan) -> None:
        """Told of each plan once."""
        if plan.number != self._plan:
            self._plan = plan.number
            for each in self._callbacks:
                each.on_plan(job, plan)

    def on_step(self, job: Job, step: Step) -> None:
        for each in self._callbacks:
            each.on_step(job, step)

    def on_evaluation(self, job: Job, evaluation: Evaluation) -> None:
        for each in self._callbacks:
            each.on_evaluation(job, evaluation)

    def on_end(self, job: Job) -> None:
        for each in self._callbacks:
            each.on_end(job)


class Job(RankInfo):
    """Trains a model under whatever plan the coordinator has in force, and switches between plans in place.

    Start the script with `elasticd run`, or with `torchrun --rdzv-backend=elasticd`, and loop over `steps`.
    """

    def __init__(
        self,
        *,
        model: Model,
        loss: Loss,
        optimizer: MakeOptimizer,
        dataset: Dataset | Stream,
        global_batch: int,
        micro_batch: int = 1,
        seed: int = 0,
        clip: float | None = None,
        scheduler: MakeScheduler | None = None,
        data: DataOptions = DEFAULTS.data,
        parallelism: ParallelismOptions = DEFAULTS.parallelism,
        checkpointing: CheckpointingOptions = DEFAULTS.checkpointing,
        evaluation: EvaluationOptions = DEFAULTS.evaluation,
        callbacks: Sequence[Callback] = (),
        grace: float = 25.0,
        **old: Unpack[OldKeywords],
    ) -> None:
        """Connects to this node's agent and announces the job.

        Args:
            model: the model, by its sections and rules.
            loss: called as loss(output, batch) with the head's output for a micro-batch; returns the sum of the
                losses and the count of targets. Sums are divided once, by the count of the global batch.
            optimizer: makes a torch optimizer with element-wise state of (name, parameter) pairs. It is called
                after every switch, on every rank, with all trained parameters: the slices that this device
                steps on, which may be several of one parameter, and an empty tensor for a parameter that others
                step on. State and settings of groups are restored after it, so form groups by name.
            dataset: a map-style dataset, or a `Stream`.
            global_batch: samples of a step, over all devices.
            micro_batch: samples of one pass through a pipeline. Divides `global_batch`.
            seed: keys the order of samples, the first values of parameters and the draws of dropout.
            clip: the largest norm of a step's gradient; longer ones are scaled down to it. None: no clipping.
            scheduler: makes a learning-rate scheduler of an optimizer. It is stepped after every step, and its
                state moves with every switch. None: the learning rate stays.
            data: how samples are read and batched.
            parallelism: ZeRO, precision, recomputation, and a profile for the first plan.
            checkpointing: checkpoints on a shared disk, snapshots in memory. The default keeps neither.
            evaluation: held-out sets for `evaluate`.
            callbacks: called in order, on every rank of the plan; see `Callback`.
            grace: seconds from SIGTERM until this process ends, whatever it is doing. Within them its state
                moves to the other devices, and the script ends with exit code 0. If every worker gets the
                signal, they make a last checkpoint, the job stops, and the exit code is 1. torchrun kills its
                workers 30 s after it has passed the signal on.
            old: keywords of release 0.1 that are fields of the groups now, with a DeprecationWarning.

        Raises:
            SystemExit: the job cannot start, for a reason that is printed in one line.
        """
        try:
            groups = Groups(
                data=data, parallelism=parallelism, checkpointing=checkpointing, evaluation=evaluation
            )
            groups = with_old_keywords(groups, old)
            self._recipe = Recipe(
                model=model,
                loss=loss,
                optimizer=optimizer,
                dataset=dataset,
                global_batch=global_batch,
                micro_batch=micro_batch,
                seed=seed,
                clip=clip,
                scheduler=scheduler,
                data=groups.data,
                parallelism=groups.parallelism,
                checkpointing=groups.checkpointing,
                snapshots=Snapshots(
                    job=os.environ.get(_NAME, ""), fetch=lambda held: self._control.fetch(held)
                ),
            )
            check_optimizer(self._recipe)
            self._held_out = groups.evaluation.sets
            self._callbacks = Callbacks(tuple(callbacks))
            self._connect()
        except (ValueError, TypeError, RuntimeError, ConnectionError) as error:
            raise JobStopped(f"elasticd: {error}") from error
        self._start(grace)

    def _connect(self) -> None:
        name = environment(_NAME)
        parent_death.end_with(os.getppid())
        if remedy := parent_death.without_restarts(os.environ):
            log.warning(remedy)
        spec, options = job_spec(self._recipe, name), self._recipe.checkpointing
        self._control = Control(default_path(), hello(spec, options.path))
        control, saves, snaps = self._control, options.path is not None, options.snapshot_every
        self._saver = Saver(options, spec, self.device, control.send, lambda: control.lost) if saves else None
        self._snapper = (
            Snapper(snaps, name, lambda: control.welcome, lambda message, fd: control.send(message, fd=fd))
            if snaps is not None
            else None
        )

    def _start(self, grace: float) -> None:
        """From here on the agent is heard."""
        self._taken = self._left = self._ended = False
        self._running: Generator[Next | Step, None, None] | None = None
        self._now: Next | None = None
        recipe = self._recipe
        pacer = Pacer(self._control.welcome.pace)
        self._where = shared()
        self._switcher = Switcher(
            recipe, self._control, AgentKeyValue(self._control), pacer, recipe.seed, self._where
        )
        self._between_steps = BetweenSteps(self._switcher, list(self._known().values()), self._close)
        self._loop = Loop(
            switcher=self._switcher,
            control=self._control,
            pacer=pacer,
            feed=recipe.feed,
            between_steps=self._between_steps,
            saver=self._saver,
            snapper=self._snapper,
        )
        idle = self._idle
        self._prober = Prober(idle, pacer.product, self._control.send)
        device, address = self._control.welcome.device, self._control.welcome.address
        fabrics = fabric_of(device, address, AgentKeyValue(self._control))
        self._rehearser = Rehearser(device, fabrics, idle, pacer.product, self._control.send)
        logs.for_worker(self._about)
        self._control.start(self._hear)
        self._show()
        self._failed = False
        self._uncaught = Uncaught(self._fail_later)
        self._farewell = Farewell(lambda: self._part("the script left the loop before the last step"))
        self._grace = grace
        self._notice = Notice(grace, self._told_to_go)
        self._notice.install()

    def _idle(self) -> bool:
        return self._switcher.engine is None

    def _show(self) -> None:
        """Gives the agent the memory that says where the main thread is."""
        self._control.send(Whereabouts(signal=self._where.signal), fd=self._where.fd)

    def _about(self) -> dict[str, Any]:
        """What a line of the log is about now."""
        plan = self.plan
        return {
            "job": os.environ.get(_NAME),
            "plan": plan.number if plan is not None else None,
            "step": self._switcher.step,
            "device": self.device,
        }

    def _told_to_go(self) -> None:
        """On the notice's thread."""
        log.warning(
            "%s is told to go: it stays until the others, or a checkpoint, have what it holds", self.device
        )
        self._control.send(Leaving(reason=NOTICE, saves=self._saver is not None))
        self._switcher.told_to_go()

    def _hear(self, message: ToWorker) -> None:
        """On the control thread."""
        match message:
            case Published(name=name):
                if self._saver is not None:
                    self._saver.published(name)
            case Freed(plan=plan, step=step):
                if self._snapper is not None:
                    self._snapper.freed(plan, step)
            case Probe():
                self._prober.ask()
            case Rehearse():
                self._rehearser.ask(message)
            case Welcome():
                self._show()
                if self._snapper is not None:
                    self._snapper.welcomed()
            case _:
                self._switcher.handle(message)

    # -- the loop --------------------------------------------------------------------------------------------

    def steps(self, total: int) -> Iterator[Step]:
        """Trains until `total` updates were made, and gives each step after it is done.

        A device that the plan does not use waits here; when it is used, the steps go on from there. A job's
        steps are taken once: raises RuntimeError the second time."""
        for each in self._begun(total):
            if isinstance(each, Step):
                yield each

    def next(self, total: int) -> int | None:
        """The index of the step that `step` trains next, None once `total` updates were made. A device that the
        plan does not use waits here. The lower level of `steps`: a job's script uses one or the other."""
        if self._running is None:
            self._running = self._begun(total)
        while self._now is None:
            each = next(self._running, None)
            if each is None:
                return None
            self._now = each if isinstance(each, Next) else None
        return self._now.index

    def step(self, batch: Sequence[Any]) -> Step | None:
        """Trains the step whose index `next` gave on `batch`: all samples of the global batch, as indices of
        the dataset or as samples, the same on every rank (they compare a hash first, and all stop with
        JobStopped where one differs). None where a fault came between: ask `next` again, it may be an earlier
        step.

        Raises ValueError or TypeError for what is no global batch, RuntimeError where `next` was not asked."""
        if self._running is None or self._now is None:
            raise RuntimeError("ask job.next(total) which step it is before each job.step(batch)")
        feed = self._recipe.feed
        if not isinstance(feed, Mapped):
            raise RuntimeError("a stream's samples are trained on in its own order: loop over job.steps(total)")
        feed.give(self._now.index, batch)
        self._now = None
        each = next(self._running, None)
        self._now = each if isinstance(each, Next) else None
        return each if isinstance(each, Step) else None

    def close(self) -> None:
        """Leaves the lower level of the loop before its last step: the job goes on without this process."""
        if self._running is not None:
            self._running.close()
            if self._left:
                self._farewell.now()

    def _begun(self, total: int) -> Generator[Next | Step, None, None]:
        if self._taken:
            raise RuntimeError("a Job's steps are taken once: ask for all of them in one call of steps()")
        self._taken = True
        self._uncaught.install()
        warm(self._recipe.model)
        try:
            try:
                yield from self._told(self._loop.run(total))
            except JobOver:
                yield from self._told(self._loop.missed())  # the last, it may be
        except Departed:
            self._leave("it was told to go, and the job goes on without it")
            raise
        except GeneratorExit as closed:
            if self._failed:
                self._notice.restore()
            else:
                self._leave_later(closed.__context__)
            raise
        except BaseException as error:
            if isinstance(error, Exception):
                self._fail(error)
            self._end_threads()
            self._notice.restore()
            raise
        self._leave("")

    def _leave_later(self, handled: BaseException | None) -> None:
        """The loop was left: by `break`, or by an exception of its body, which `_fail_later` may hear of.
        handled: the exception around the loop, in whose `except` the script is."""
        self._left = True
        self._notice.restore()
        self._farewell.later(handled)
        with during(self._where, CALLBACK):
            self._callbacks.on_end(self)

    def _fail_later(self, error: Exception) -> None:
        """An exception ends the main thread: of the body of the loop, it may be, and then nothing of this rank
        has ended yet."""
        if self._left and not self._farewell.withdrawn():
            return
        if self._left:
            self._notice = Notice(self._grace, self._told_to_go)
            self._notice.install()
        self._fail(error)

    def _fail(self, error: Exception) -> None:
        """The script's code raised. The leader is told, and this process stays while its state is of use."""
        if self._failed or self._ended:
            return
        self._failed = True
        try:
            self._loop.fail(error)
        except JobStopped as end:
            log.warning("%s", end)
        except (JobOver, Departed):
            pass
        self._end_threads()

    def _close(self, engine: Engine, step: int) -> None:
        self._loop.close(engine, step)

    def _told(self, running: Iterator[Next | Step]) -> Iterator[Next | Step]:
        """Callbacks hear of it first."""
        for each in running:
            with during(self._where, CALLBACK):
                if self.plan is not None:
                    self._callbacks.on_plan(self, self.plan)
                if isinstance(each, Step):
                    self._callbacks.on_step(self, each)
            yield each

    def _end_threads(self) -> None:
        """Ends what copies the state, and lets all groups go: an interpreter that ends while a thread is inside
        gloo aborts."""
        self._ended = True
        for maker in (self._saver, self._snapper):
            if maker is not None:
                maker.end()
        self._switcher.end()

    def _leave(self, reason: str) -> None:
        self._notice.restore()
        self._part(reason)
        with during(self._where, CALLBACK):
            self._callbacks.on_end(self)

    def _part(self, reason: str) -> None:
        self._end_threads()
        self._uncaught.restore()
        self._control.close(Goodbye(reason=reason))

    # -- between two steps -----------------------------------------------------------------------------------

    def evaluate(self, name: str | None = None, *, weights: str = "value") -> Evaluation | None:
        """The mean loss, and the set's other measures, over the whole of the held-out set `name` (None: the
        only one) under the plan in force: each sample counts once. weights: "average" for the running mean that
        `elasticd.average` keeps.

        Call it in the loop's body, at the same place on every rank: all members of the plan take part and get
        the same result. None on a device that stands by, or that a fault left out meanwhile; a fault that
        leaves it in is recovered from, and the evaluation is made anew under the next plan. Raises JobStopped,
        with the state saved, where a sample cannot be read."""
        if name is None and len(self._held_out) == 1:
            (name,) = self._held_out
        if name not in self._held_out:
            there = (
                ", ".join(self._held_out)
                or "none: give Job(evaluation=elasticd.EvaluationOptions(held_out=...))"
            )
            raise ValueError(f"there is no held-out set {name!r}; there are: {there}")
        if weights not in WEIGHTS:
            raise ValueError(f"weights must be one of {', '.join(WEIGHTS)}, not {weights!r}")
        found: Evaluation | None = self._together("evaluate", name, weights)
        if found is not None:
            with during(self._where, CALLBACK):
                self._callbacks.on_evaluation(self, found)
        return found

    def state_dict(
        self, contents: str = "value", *, sharded: bool = False
    ) -> dict[str, Tensor] | dict[str, list[tuple[Box, Tensor]]] | None:
        """The state between two steps. contents: "value", parameters and buffers by full name; "average", with
        the running mean in the parameters' place; "all", with what the optimizer keeps beside them, as
        "optimizer.state.NAME.PLANE".

        Whole (the default): new tensors on the host of the plan's first rank, an empty dict on the others. All
        members of the plan take part, at the same place of the loop's body; None as of `evaluate`.
        sharded: what this device holds, each as (box of the global tensor, values, not a copy), empty while it
        stands by; nobody else takes part."""
        if contents not in full_state_dict.CONTENTS:
            raise ValueError(f"contents must be one of {', '.join(full_state_dict.CONTENTS)}, not {contents!r}")
        engine = self._switcher.engine
        if sharded:
            return (
                full_state_dict.named(full_state_dict.of(engine.state(), contents), contents)
                if engine is not None
                else {}
            )
        found: dict[str, Tensor] | None = self._together("state", contents)
        return found

    def _known(self) -> dict[tuple[str, ...], Run]:
        """All that can be asked for between steps, in one order in every process."""
        known: dict[tuple[str, ...], Run] = {}
        for name in self._held_out:
            for weights in WEIGHTS:
                known["evaluate", name, weights] = partial(self._evaluate, name, weights)
        for contents in full_state_dict.CONTENTS:
            known["state", contents] = partial(self._whole, contents)
        return known

    def _together(self, *what: str) -> Any:
        if not self._taken or self._left or self._ended:
            raise RuntimeError(f"{what[0]}: ask for it in the body of the loop, between two steps")
        return self._between_steps.run(list(self._known()).index(what))

    def _evaluate(self, name: str, weights: str, engine: Engine, step: int) -> Evaluation:
        recipe = self._recipe
        try:
            with during(self._where, EVALUATION):
                return evaluate(
                    engine, self._held_out[name], name, step, recipe.loss, recipe.data.collate, weights
                )
        except SampleError as error:
            raise self._loop.unreadable(engine, step, error) from error
        except LedgerError as error:
            raise self._loop.stopped(engine, error) from error

    def _whole(self, contents: str, engine: Engine, step: int) -> dict[str, Tensor]:
        return full_state_dict.gathered(engine, contents)
