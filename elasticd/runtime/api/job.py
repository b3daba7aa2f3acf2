"""`elasticd.Job`, which is all that a training script needs to know, and the callbacks that it calls."""

from __future__ import annotations

import inspect
import logging
import os
import socket
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from numbers import Real
from types import TracebackType
from typing import Any, Self, Unpack

import torch
from elasticd_migration.local_state import LocalState
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.plan import Plan
from torch import Tensor

from elasticd.runtime.accelerator import Accelerator, placed
from elasticd.runtime.api import full_state_dict, pretrained_folder
from elasticd.runtime.api.between_steps import BetweenSteps, Run
from elasticd.runtime.api.connection import NAME, connect, refuse_torch_groups
from elasticd.runtime.api.deprecated import (
    DEFAULTS,
    OldKeywords,
    OptionGroups,
    refuse_unknown,
    with_old_keywords,
)
from elasticd.runtime.api.ema import AVERAGE, refuse_without_average
from elasticd.runtime.api.evaluation import Evaluation, EvaluationOptions, evaluate
from elasticd.runtime.api.hello import (
    check_arguments,
    check_batch_format,
    check_callbacks,
    check_grace,
    check_modules,
    check_optimizer,
    check_packing,
    check_padding,
    check_plan,
    job_spec,
    loss_of,
    warn_of_repeats,
)
from elasticd.runtime.api.pretrained_folder import Folder
from elasticd.runtime.api.rank_info import RankInfo
from elasticd.runtime.api.several_modules import check_graph
from elasticd.runtime.api.step import Step
from elasticd.runtime.api.train_loop import Loop, Next
from elasticd.runtime.checkpoint.options import CheckpointingOptions
from elasticd.runtime.checkpoint.saver import Saver
from elasticd.runtime.comm.all_reduce_probe import AllReduceProbe, plan_groups_of
from elasticd.runtime.comm.communicators import settle
from elasticd.runtime.control.agent_client import RejectedByAgent
from elasticd.runtime.control.loop_end import LoopEnd, leave_at_exit
from elasticd.runtime.control.one_process import EndSignals, OneProcess, ended
from elasticd.runtime.control.preemption_notice import PreemptionNotice
from elasticd.runtime.data.options import DataOptions
from elasticd.runtime.data.prefetch import Dataset, NothingRead, SampleError
from elasticd.runtime.data.sample_ledger import LedgerError
from elasticd.runtime.data.step_samples import MapStyleSamples
from elasticd.runtime.data.stream import Stream
from elasticd.runtime.engine.engine import Engine
from elasticd.runtime.engine.parallelism import ParallelismOptions
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.engine.stability import StabilityOptions
from elasticd.runtime.engine.warmup import warm
from elasticd.runtime.exits import Drained, JobOver, JobStopped, refused, stopped
from elasticd.runtime.model.balance import Balance
from elasticd.runtime.model.model import Loss, Model
from elasticd.runtime.model.optimizer_check import MakeScheduler, ScriptOptimizer
from elasticd.runtime.model.parameter_groups import MakeOptimizer
from elasticd.runtime.model.pretrained import SHARD_SIZE
from elasticd.runtime.snapshot.restore import Snapshots
from elasticd.runtime.snapshot.snapshotter import Snapshotter
from elasticd.runtime.switch.move import JobMoves
from elasticd.runtime.switch.switcher import Switcher
from elasticd.runtime.telemetry.device_probe import Prober
from elasticd.runtime.telemetry.emulation import SpeedEmulator
from elasticd.runtime.telemetry.main_thread import during, during_task, shared
from elasticd.system import logs
from elasticd.system.logs import is_first_worker
from elasticd.system.user_line import raised_by_user
from elasticd.wire.main_thread import CALLBACK, EVALUATION, TASKS, Whereabouts
from elasticd.wire.snapshots import Freed
from elasticd.wire.worker import DrainNotice, Goodbye, Probe, Published, Rehearse, SaveNow, ToWorker, Welcome

log = logging.getLogger(__name__)

#: What the script calls for a task of another name.
_CALLS = {"state": "state_dict"}
#: The weights that an evaluation may be of.
WEIGHTS = ("value", "average")


def _keywords() -> list[str]:
    """The keywords that a Job takes today."""
    return [name for name in inspect.signature(Job.__init__).parameters if name not in ("self", "old")]


class Callback:
    """Base of the user's callbacks.

    Methods are called on every rank of the plan, in the training thread, between steps: every rank waits for
    them. An exception ends the loop, as if the loop's body had raised it.
    """

    def on_plan(self, job: Job, plan: Plan) -> None:
        """A new plan is in force, and uses this device. Devices on standby are not called."""

    def before_step(self, job: Job, index: int) -> None:
        """The step of this index comes next: `job.modules()` may be changed for it, as a function of the index
        alone. A device that joins begins with it, and after a fault an earlier one may come again."""

    def on_step(self, job: Job, step: Step) -> None:
        """A step is done; the loop gets it next."""

    def on_evaluation(self, job: Job, evaluation: Evaluation) -> None:
        """An evaluation is done."""

    def on_end(self, job: Job) -> None:
        """The last step is done, or the loop was left: this process trains no more."""


class Job(RankInfo):
    """Trains a model under whatever plan the coordinator has in force, and switches between plans in place.

    Start the script with `elasticd run`, or with `torchrun --rdzv-backend=elasticd`, and loop over `steps`. As
    `python SCRIPT` it trains in one process, without an agent.
    """

    def __new__(cls, *_: object, **keywords: object) -> Self:
        """Refuses a misspelled keyword: Python would only name the one that is missing then."""
        if cls is Job:
            try:
                refuse_unknown(keywords, _keywords())
            except TypeError as error:
                raise refused(str(error)) from error
        return super().__new__(cls)

    def __init__(
        self,
        *,
        model: Model,
        loss: Loss | None = None,
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
        stability: StabilityOptions = DEFAULTS.stability,
        balance: Balance | None = None,
        callbacks: Sequence[Callback] = (),
        grace: float = 25.0,
        check: bool = True,
        **old: Unpack[OldKeywords],
    ) -> None:
        """Connects to this node's agent and announces the job; a process without a launcher trains alone.

        Args:
            model: the model, by its sections and rules.
            loss: called as loss(output, batch) with the head's output for a micro-batch; returns the sum of the
                losses and the count of targets. Sums are divided once, by the count of the global batch. None:
                the model's own, which a model of `from_hf` has.
            optimizer: makes a torch optimizer with element-wise state of (name, parameter) pairs. It is called
                first with all trained parameters as the modules have them, without memory, which says their
                groups; and after every switch, on every rank, with the slices that this device steps on, which
                may be several of one parameter. State and settings of groups are restored after it.
            dataset: a map-style dataset, or a `Stream`.
            global_batch: samples of a step, over all devices.
            micro_batch: samples of one pass through a pipeline. Divides `global_batch`.
            seed: keys the order of samples, the first values of parameters and the draws of dropout.
            clip: the largest norm of a step's gradient; longer ones are scaled down to it. None: no clipping.
            scheduler: makes a learning-rate scheduler of an optimizer. It is stepped after every step, and its
                state moves with every switch. None: the learning rate stays.
            data: how samples are read and batched.
            parallelism: ZeRO, precision, recomputation; the first plan, or a profile to make it from.
            checkpointing: checkpoints on a shared disk, snapshots in memory. The default keeps neither.
            evaluation: held-out sets for `evaluate`.
            stability: what becomes of steps whose gradient is not finite, or far larger than usual.
            balance: how the experts of a mixture are kept evenly loaded. None: nothing does.
            callbacks: called in order, on every rank of the plan; see `Callback`.
            grace: seconds from a signal until this process ends, whatever it is doing. Within them its state
                moves to the other devices; if every worker gets the signal, they make a last checkpoint and
                the job stops. The script ends with exit code 0. The signals are SIGTERM, SIGINT, SIGHUP, and
                SIGUSR1 and SIGUSR2 unless the script has its own handlers for these two.
            check: before the job starts, its first worker takes one step of your own modules and one of the
                copies that train, where the model fits on its device, and refuses the job where they differ.
            old: keywords of release 0.1 that are fields of the groups now, with a DeprecationWarning.

        Raises:
            SystemExit: the job cannot start, for a reason that is printed in one line.
        """
        logs.for_worker(self._about)
        try:
            groups = OptionGroups(
                data=data,
                parallelism=parallelism,
                checkpointing=checkpointing,
                evaluation=evaluation,
                stability=stability,
            )
            refuse_unknown(old, _keywords())  # of a class that is derived from this one
            groups = with_old_keywords(groups, old)
            groups.stability.check(groups.checkpointing.interval)
            check_arguments(model, optimizer, scheduler, dataset, groups.data.collate)
            check_callbacks(callbacks, Callback)
            check_grace(grace)
            accelerator = self._accelerator_of(groups.parallelism.device)
            groups.parallelism.refuse_device(accelerator)
            settle(accelerator)
            accelerator.use()
            self._recipe = Recipe(
                model=model,
                loss=loss_of(model, loss),
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
                stability=groups.stability,
                balance=balance,
                snapshots=Snapshots(job=os.environ.get(NAME, ""), fetch=lambda held: self._control.fetch(held)),
                accelerator=accelerator,
            )
            tried = check_optimizer(self._recipe)
            check_plan(self._recipe)
            warn_of_repeats(self._recipe)
            self._held_out = groups.evaluation.sets
            check_graph(self._recipe, self._held_out)
            check_batch_format(self._recipe)
            check_padding(self._recipe)
            check_packing(self._recipe, self._held_out)
            self._callbacks = tuple(callbacks)
            self._check = check
            self._connect(tried)
        except (ConnectionError, RejectedByAgent) as error:
            raise stopped(str(error)) from error
        except (ValueError, TypeError, RuntimeError) as error:
            if raised_by_user(error):
                raise
            raise refused(str(error)) from error
        self._start(grace)

    def _connect(self, optimizer: ScriptOptimizer | None) -> None:
        refuse_torch_groups()
        restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"  # then it was compared before
        if self._check and is_first_worker() and not restarted:
            # Refuses a wrong batch before a step is tried.
            job_spec(self._recipe, "tried", self._held_out, measures=False)
            check_modules(self._recipe)
        self._control, spec, longest = connect(self._recipe, self._held_out, optimizer, tries=self._check)
        options = self._recipe.checkpointing
        control, saves, snaps = self._control, options.path is not None, options.snapshot_every
        accelerator, feed = self._recipe.accelerator, self._recipe.feed
        feed.longest = max(feed.longest, longest)  # so that the next checkpoints know of it, too
        self._saver = self._snapshotter = None
        if saves:
            own_names = self._recipe.model.all_own_names
            names = own_names if any(own != full for own, full in own_names.items()) else {}
            self._saver = Saver(
                options,
                spec,
                self.device,
                control.send,
                lambda: control.lost,
                accelerator=accelerator,
                longest=lambda: feed.longest,
                names=names,
                pretrained=self._recipe.model.pretrained.describe() if self._recipe.model.pretrained else "",
                frozen=self._recipe.model.frozen_digest,
                user=f"process {os.getpid()} on {socket.gethostname()}" if control.alone else "",
            )
        if snaps is not None and not control.alone:  # else no agent is there to keep any
            self._snapshotter = Snapshotter(
                snaps,
                spec.job,
                lambda: control.welcome,
                lambda message, fd: control.send(message, fd=fd),
                accelerator,
            )

    def _start(self, grace: float) -> None:
        """Makes the loop and all that serves the agent's messages, and begins to receive them."""
        self._taken = False
        self._running: Generator[Next | Step, None, None] | None = None
        self._total = 0  # steps that the script asks for
        self._now: Next | None = None
        self._folder: Folder | None = None  # that `save_pretrained` is writing
        self._announced: int | None = None  # the plan that callbacks were called with last
        recipe = self._recipe
        pacer = SpeedEmulator(self._control.welcome.pace)
        self._where = shared()
        moves = JobMoves(recipe, pacer)
        self._switcher = Switcher(moves, self._control, self._control.key_value(), pacer, self._where)
        tasks = list(self._known().values())
        self._between_steps = BetweenSteps(self._switcher, tasks, lambda *at: self._loop.close(*at))
        self._loop = Loop(
            switcher=self._switcher,
            control=self._control,
            pacer=pacer,
            feed=recipe.feed,
            between_steps=self._between_steps,
            saver=self._saver,
            snapshotter=self._snapshotter,
        )
        self._prober = Prober(self._idle, pacer.product, self._control.send, recipe.accelerator)
        device, address = self._control.welcome.device, self._control.welcome.address
        make_groups = plan_groups_of(device, address, self._control.key_value())
        self._all_reduce_probe = AllReduceProbe(
            device, make_groups, self._idle, pacer.product, self._control.send, recipe.accelerator
        )
        self._handlers: dict[type, Callable[[Any], None]] = {  # of messages that are not for the switcher
            Published: self._on_published,
            SaveNow: self._on_save_now,
            Freed: self._on_freed,
            Probe: lambda message: self._prober.ask(),
            Rehearse: self._all_reduce_probe.ask,
            Welcome: self._on_welcome,
        }
        self._control.start(self._hear)
        log.info("%s computes on %s, over gloo", self.device, recipe.accelerator.text)
        self._show()
        self._grace = grace
        self._end = LoopEnd(
            self._control,
            make_notice=self._make_notice,
            depart=self._depart,
            give_state=self._loop.fail,
            end_threads=self._end_threads,
        )

    def _make_notice(self) -> PreemptionNotice | EndSignals:
        """Hears the signals by which this process is asked to end."""
        if isinstance(self._control, OneProcess):
            return EndSignals(self._control)
        return PreemptionNotice(self._grace, self._drain)

    def _accelerator_of(self, asked: str | None) -> Accelerator:
        return placed(asked, os.environ)

    @property
    def torch_device(self) -> torch.device:
        """The device that this worker computes on, as "cuda:0" or "cpu". (`device` is its name in the
        cluster.)"""
        return self._recipe.accelerator.device

    def _idle(self) -> bool:
        return self._switcher.engine is None

    def _show(self) -> None:
        """Gives the agent the shared memory that says where the main thread is."""
        self._control.send(Whereabouts(signal=self._where.signal), fd=self._where.fd)

    def _about(self) -> dict[str, Any]:
        """The fields of a line of the log."""
        if not hasattr(self, "_switcher"):  # the job is not started yet
            return {"job": os.environ.get(NAME)}
        plan = self.plan
        return {
            "job": os.environ.get(NAME),
            "plan": plan.number if plan is not None else None,
            "step": self._switcher.step,
            "device": self.device,
        }

    def _drain(self, signal_name: str) -> None:
        """Called after a signal that is notice, on the thread of the notice."""
        text = "%s: %s leaves the job once others, or a checkpoint, have its state"
        log.warning(text, signal_name, self.device)
        self._control.send(DrainNotice(reason=signal_name, saves=self._saver is not None))
        self._switcher.begin_drain()

    def _hear(self, message: ToWorker) -> None:
        """Takes a message of the agent, on the control thread."""
        self._handlers.get(type(message), self._switcher.handle)(message)

    def _on_published(self, message: Published) -> None:
        if self._saver is not None:
            self._saver.published(message.name)

    def _on_save_now(self, message: SaveNow) -> None:
        if self._saver is not None and not self._idle():
            self._saver.ask()

    def _on_freed(self, message: Freed) -> None:
        if self._snapshotter is not None:
            self._snapshotter.freed(message.plan, message.step)

    def _on_welcome(self, message: Welcome) -> None:
        self._show()
        if self._snapshotter is not None:
            self._snapshotter.welcomed()

    # -- the loop --------------------------------------------------------------------------------------------

    def steps(self, total: int) -> Iterator[Step]:
        """Trains until `total` updates are made. Call it once for a job.

        A device on standby waits inside; when a plan uses it, it gets the steps from there on.

        Args:
            total: updates, counted from the beginning of the job.

        Yields:
            Each step after it is done. After the job rolled back, steps are yielded again.

        Raises:
            RuntimeError: the steps of this job were asked for before.
            TypeError: `total` is no number.
            ValueError: `total` is negative, or NaN.
            SystemExit: the job cannot continue, or continues without this process, which got SIGTERM.
        """
        for each in self._begin(total):
            if isinstance(each, Step):
                yield each

    def next(self, total: int) -> int | None:
        """The index of the step that `step` trains next. Use either `next` and `step`, or `steps`.

        A device on standby waits inside.

        Args:
            total: updates, counted from the beginning of the job.

        Returns:
            The index; None once `total` updates are made.
        """
        if self._running is None:
            self._running = self._begin(total)
        while self._now is None:
            each = next(self._running, None)
            if each is None:
                return None
            self._now = each if isinstance(each, Next) else None
        return self._now.index

    def step(self, batch: Sequence[Any]) -> Step | None:
        """Trains the step whose index `next` gave.

        Args:
            batch: the whole global batch, as indices of the dataset or as samples, the same on every rank. The
                ranks compare a hash of it first.

        Returns:
            The step; None after a fault: call `next` again, which may give an earlier step.

        Raises:
            ValueError, TypeError: `batch` is no global batch.
            RuntimeError: `next` was not called, or the dataset is a stream.
            SystemExit: the batch differs between ranks, or the job cannot continue.
        """
        if self._running is None or self._now is None:
            raise RuntimeError("ask job.next(total) which step it is before each job.step(batch)")
        feed = self._recipe.feed
        if not isinstance(feed, MapStyleSamples):
            raise RuntimeError("a stream's samples are trained on in its own order: loop over job.steps(total)")
        if self._recipe.model.graph is not None and any(isinstance(each, Mapping) for each in batch):
            raise ValueError(
                "a model of several modules takes the batch of job.step as indices of the dataset, whose "
                "counts say how many items each sample has: give job.step([3, 17, ...]), not the samples "
                "themselves"
            )
        feed.give(self._now.index, batch)
        self._now = None
        each = next(self._running, None)
        self._now = each if isinstance(each, Next) else None
        return each if isinstance(each, Step) else None

    def stop(self) -> None:
        """Ends the job after the next step, on all ranks, as if that were the last: with its checkpoint.

        Call it in the loop's body, for early stopping: on every rank, or on any one. The step that follows is
        the last that the loop gives.

        Raises:
            RuntimeError: called outside of the loop's body.
        """
        if not self._taken or self._end.left or self._end.finished or self._end.ended:
            raise RuntimeError("stop: call it in the body of the loop, between two steps")
        self._loop.stopping = True

    def __enter__(self) -> Self:
        """`with elasticd.Job(...) as job:` tells at its end whether the body raised, or left the loop."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """After an exception of the body: tells the other ranks, and returns once the state here is of no more
        use. After a `break`: returns once the state is saved, or cannot be. After the last step: leaves."""
        if isinstance(error, Exception) and not self._end.finished:
            self._end.fail_later(error)
            return
        if self._running is not None:
            self._running.close()
        if self._end.left or self._end.finished:
            self._end.farewell.now()

    def close(self) -> None:
        """Leaves: a loop of `next` and `step` before its last step, after which the job continues without this
        process; after the last step of any loop what `evaluate` and others would need."""
        self._now = None
        if self._running is not None:
            self._running.close()
        if self._end.left or self._end.finished:
            self._end.farewell.now()

    def _begin(self, total: int) -> Generator[Next | Step, None, None]:
        running = self._begun(total)
        leave_at_exit(running)
        return running

    def _begun(self, total: int) -> Generator[Next | Step, None, None]:
        if self._taken:
            raise RuntimeError("a Job's steps are taken once: ask for all of them in one call of steps()")
        if not isinstance(total, Real) or isinstance(total, bool):
            raise TypeError(
                f"the total of steps is {total!r}; it must be a number of updates, from the beginning"
            )
        if not total >= 0:  # NaN, too
            raise ValueError(f"the total of steps is {total!r}; it must be 0 or more updates in all")
        self._taken, self._total = True, total
        self._end.uncaught.install()
        if self._control.alone and self._saver is not None:  # else a signal may end this process at once
            self._end.notice.install()
        warm(self._recipe.model, self._recipe.accelerator)
        try:
            try:
                yield from self._with_callbacks(self._loop.run(total))
            except JobOver:
                yield from self._with_callbacks(self._loop.missed())  # perhaps the last step
        except Drained as drained:
            self._end.notice.restore()
            self._end.part(Goodbye(reason=drained.reason, drained=True))
            self._notify(lambda each: each.on_end(self))
            raise
        except GeneratorExit as closed:
            if self._end.failed or self._end.forked:
                self._end.notice.restore()
            else:
                self._end.leave_later(closed.__context__)
                self._notify(lambda each: each.on_end(self))
            raise
        except BaseException as error:
            if isinstance(error, Exception):
                self._end.fail(error)
            self._end.end_threads()
            self._end.notice.restore()
            if isinstance(error, JobStopped) and self._control.ending:
                raise ended(self._control.ending, str(error)) from None
            raise
        self._end.finish()
        self._notify(lambda each: each.on_end(self))

    def _depart(self) -> None:
        """Takes leave of the others, after the last step or before it."""
        if self._end.finished:
            self._end.part(Goodbye(reason=""))
        else:
            self._left_early()

    def _left_early(self) -> None:
        """The script left the loop by `break`: takes leave. Before that the state is saved if every member of
        the plan left the loop after the same step."""
        step, engine = self._switcher.step, self._switcher.engine
        why = f"the script left the loop after {step} of {self._total} steps"
        if engine is not None and self._saver is not None and not (engine.health.torn or self._end.ended):
            if self._control.alone:
                self._loop.save_alone(engine)
            elif not self._loop.saved_by_all(engine):
                log.warning(
                    "%s, without a checkpoint of them: not every rank left it there within half a minute. "
                    "On one rank alone, job.stop() ends the job with a checkpoint",
                    why,
                )
        self._end.part(Goodbye(reason=why))

    def _with_callbacks(self, running: Iterator[Next | Step]) -> Iterator[Next | Step]:
        """Calls the callbacks before the loop gets a step. This device has the first state then."""
        try:
            for event in running:
                self._recipe.model.retire()
                self._loop.index = event.index
                self._announce(event)
                yield event
        finally:
            self._loop.garbage.release()

    def _announce(self, event: Next | Step) -> None:
        plan = self.plan
        if plan is not None and plan.number != self._announced:
            self._announced = plan.number
            self._notify(lambda each: each.on_plan(self, plan))
        if isinstance(event, Step):
            self._notify(lambda each: each.on_step(self, event))
        else:
            self._notify(lambda each: each.before_step(self, event.index))

    def _notify(self, call: Callable[[Callback], None]) -> None:
        """Calls each callback, in order."""
        with during(self._where, CALLBACK):
            for each in self._callbacks:
                call(each)

    def _end_threads(self) -> None:
        """Ends the threads that copy the state, and all groups."""
        for maker in (self._saver, self._snapshotter):
            if maker is not None:
                maker.end()
        if not (self._end.finished and self._control.alone):  # that engine is used after the loop, too
            self._switcher.end()

    # -- between two steps -----------------------------------------------------------------------------------

    def evaluate(self, name: str | None = None, *, weights: str = "value") -> Evaluation | None:
        """Computes the mean loss, and the other measures, over a held-out set under the plan in force.

        Call it in the loop's body or after the loop, at the same place on every rank: all members of the plan
        take part. After a fault the evaluation is repeated under the next plan.

        Args:
            name: of the held-out set; None: the only one.
            weights: "value": the parameters; "average": their moving average, which `elasticd.average` keeps.

        Returns:
            The result, the same on every rank; None on standby, or if a fault excluded this device.

        Raises:
            ValueError: there is no such set, or there are no such weights.
            MeasureError: the loss or a measure raised, on this rank or another one; on every rank.
            RuntimeError: called before the loop, or after a `break`.
            SystemExit: a sample cannot be read. The state is saved.
        """
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
            self._notify(lambda each: each.on_evaluation(self, found))
        return found

    def state_dict(
        self, contents: str = "value", *, sharded: bool = False
    ) -> dict[str, Tensor] | dict[str, list[tuple[Box, Tensor]]] | None:
        """The state between two steps, by the names that the state dict of your own modules has: that of the
        module of `from_module`; "embed.…", "blocks.3.…", "head.…" of a `Model`. A tied parameter has all of its
        names.

        Args:
            contents: "value": parameters and buffers; "average": the moving average in place of the parameters;
                "all": also the optimizer's state, as "optimizer.state.NAME.PLANE".
            sharded: return what this device holds. Otherwise call it in the loop's body or after the loop, at
                the same place on every rank: all members of the plan take part.

        Returns:
            Full tensors, new ones on the host, on the plan's first rank, and an empty dict on the others; None
            as from `evaluate`. Sharded: the box of the global tensor and the values, not a copy, of each piece;
            empty on standby.

        Raises:
            ValueError: there are no such contents, or there is no average.
            RuntimeError: called for full tensors before the loop, or after a `break`.
        """
        if contents not in full_state_dict.CONTENTS:
            raise ValueError(f"contents must be one of {', '.join(full_state_dict.CONTENTS)}, not {contents!r}")
        if sharded:
            if (state := self._own_state()) is None:
                return {}
            if contents == AVERAGE and (engine := self._switcher.engine) is not None:
                refuse_without_average(engine)
            held = full_state_dict.of(state, contents)
            return full_state_dict.by_own_names(
                full_state_dict.named(held, contents), self._recipe.model.all_own_names
            )
        return self._together("state", contents)

    def expert_load(self) -> dict[str, list[int]] | None:
        """The load of the experts in the last step: how many rows each had, of all ranks.

        Call it in the loop's body or after the loop, at the same place on every rank: all members of the plan
        take part. Counted are modules with a rule for experts stacked as dimension 0. After a switch or a
        recovery all are 0 until the next step: the devices of the plan before had counted.

        Returns:
            The rows by section ("blocks.3") and expert, the same on every rank; None as from `evaluate`.

        Raises:
            RuntimeError: called before the loop, or after a `break`.
        """
        found: dict[str, list[int]] | None = self._together("expert_load")
        return found

    def _own_state(self) -> LocalState | None:
        """The state that this device holds; None on standby."""
        engine = self._switcher.engine
        if engine is None or not (self._end.left or self._end.ended):
            return self._between_steps.read(lambda engine: engine.delivered_state())
        return (
            engine.delivered_state() if engine.health.stale else engine.state()
        )  # the plan's groups may be shut

    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        *,
        weights: str = "value",
        base: str | os.PathLike[str] | None = None,
        max_shard_size: int | str = SHARD_SIZE,
        merge: bool = False,
    ) -> None:
        """Writes a model of `from_hf` as a folder of transformers, from which `from_pretrained` loads it.

        Call it in the loop's body or after the loop, at the same place on every rank: all members of the plan
        take part. The plan's first rank writes, and holds a file's weights at a time. A device on standby does
        nothing.

        Args:
            folder: where the plan's first rank writes; it is made where it is not there.
            weights: "value": the parameters; "average": their moving average, which `elasticd.average` keeps.
            base: the folder of the model that was trained on, whose tokenizer is copied. None: that from which
                `from_pretrained` loaded the model, if it is a folder.
            max_shard_size: of a file of weights, in bytes or as "5GB".
            merge: of a model with LoRA adapters: write the whole model, the adapters merged into it. False:
                write the adapter alone, as PEFT does, which `PeftModel.from_pretrained` loads.

        Raises:
            ValueError: the model is none of transformers, there are no such weights, or no adapters to merge.
            OSError: the folder cannot be written; on every rank.
            RuntimeError: called before the loop, or after a `break`.
        """
        if self._recipe.model.pretrained is None:
            raise ValueError(
                f"save_pretrained: {self._recipe.model.name} is no model of transformers (elasticd.from_hf); "
                "job.state_dict() gives its weights, and 'elasticd checkpoint export' a safetensors file"
            )
        if weights not in WEIGHTS:
            raise ValueError(f"weights must be one of {', '.join(WEIGHTS)}, not {weights!r}")
        if merge and not self._recipe.model.pretrained.adapted:
            raise ValueError(f"save_pretrained: {self._recipe.model.name} has no adapters: leave merge out")
        self._folder = Folder(
            path=os.path.abspath(folder),
            base=None if base is None else os.path.abspath(base),
            max_shard_size=max_shard_size,
            merge=merge,
        )
        try:
            if failure := self._together("save_pretrained", weights):
                raise OSError(f"save_pretrained: {failure}")
        finally:
            self._folder = None

    def _known(self) -> dict[tuple[str, ...], Run]:
        """The tasks between two steps, in the same order in every process."""
        known: dict[tuple[str, ...], Run] = {}
        for name in self._held_out:
            for weights in WEIGHTS:
                known["evaluate", name, weights] = partial(self._evaluate, name, weights)
        for contents in full_state_dict.CONTENTS:
            known["state", contents] = partial(self._gathered, contents)
        if self._recipe.model.pretrained is not None:
            for weights in WEIGHTS:
                known["save_pretrained", weights] = partial(self._save_pretrained, weights)
        known["expert_load",] = lambda engine, _: engine.expert_load()
        return known

    def _together(self, *what: str) -> Any:
        works_on = self._end.finished and self._control.alone  # its engine is used after the loop, too
        if not self._taken or self._end.left or (self._end.ended and not works_on):
            raise RuntimeError(
                f"{what[0]}: ask for it in the body of the loop, or after its last step, on every rank"
            )
        call = f"job.{_CALLS.get(what[0], what[0])}()"
        with during_task(self._where, TASKS.index(call)):
            result = self._between_steps.run(list(self._known()).index(what))
        if result is None and self._end.finished and self._switcher.engine is not None:
            raise RuntimeError(
                f"{call}: another rank ended, or was lost, before it was done, and the job is over: call it on "
                "every rank, without `if job.rank == 0`; a checkpoint has the state, if the job keeps any"
            )
        return result

    def _evaluate(self, name: str, weights: str, engine: Engine, step: int) -> Evaluation:
        recipe = self._recipe
        try:
            with during(self._where, EVALUATION):
                return evaluate(
                    engine, self._held_out[name], name, step, recipe.loss, recipe.data, weights, recipe.reads
                )
        except SampleError as error:
            raise self._loop.unreadable(engine, step, error) from error
        except NothingRead as error:
            raise self._loop.nothing_read(engine, step, error) from error
        except LedgerError as error:
            raise self._loop.stopped(engine, error) from error

    def _gathered(self, contents: str, engine: Engine, step: int) -> dict[str, Tensor]:
        held = full_state_dict.gathered(engine, contents)
        return full_state_dict.by_own_names(held, self._recipe.model.all_own_names)

    def _save_pretrained(self, weights: str, engine: Engine, step: int) -> str:
        assert self._recipe.model.pretrained is not None
        if weights == AVERAGE:
            refuse_without_average(engine)
        return pretrained_folder.save(engine, self._recipe.model.pretrained, weights, self._folder)
