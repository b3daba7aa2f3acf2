"""The training loop of one process: it waits until a plan uses its device, trains, recovers and switches."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from traceback import clear_frames

import torch
from elasticd_planner.readable import counted
from msgspec.structs import replace

from elasticd.records import Vote
from elasticd.runtime.accelerator import DeviceLost
from elasticd.runtime.api.between_steps import BetweenSteps
from elasticd.runtime.api.step import Step
from elasticd.runtime.checkpoint.saver import Saver
from elasticd.runtime.comm.groups import Cancelled, PeerLost
from elasticd.runtime.control.control import Control
from elasticd.runtime.control.user_exceptions import lost_within, raised
from elasticd.runtime.data.prefetch import NothingRead, SampleError
from elasticd.runtime.data.sample_ledger import LedgerError
from elasticd.runtime.data.step_samples import BatchesDiffer, Feed
from elasticd.runtime.engine.engine import Engine, StepDone
from elasticd.runtime.engine.vote import Draining, UnlikeChoices
from elasticd.runtime.exits import JobStopped, stopped
from elasticd.runtime.garbage_collector import GarbageCollector
from elasticd.runtime.snapshot.snapshotter import Snapshotter
from elasticd.runtime.switch.switcher import Switcher
from elasticd.runtime.telemetry.emulation import SpeedEmulator
from elasticd.runtime.telemetry.main_thread import during
from elasticd.system.logs import say
from elasticd.wire.main_thread import SAVING
from elasticd.wire.worker import DrainNotice, Finished, Raised, Report

log = logging.getLogger(__name__)

#: Seconds that members wait for the job's end once their last checkpoint is made, before they train on: steps
#: beyond it would be lost.
_END_SECONDS = 2.0


@dataclass(frozen=True)
class Next:
    """A plan uses this device, and a step is trained next."""

    index: int  #: of the step


class NoProgress(RuntimeError):
    """The job ends because steps changed no weight, or would have harmed them."""


class _Closed(Cancelled):
    """The job ends on behalf of some members, and its last checkpoint was tried."""

    def __init__(self, saved: bool) -> None:
        super().__init__("the state is saved, and the job ends" if saved else "the job ends, its state unsaved")
        self.saved = saved


@dataclass(kw_only=True)
class Loop:
    """The training loop, as a generator of steps."""

    switcher: Switcher[Engine]
    control: Control
    pacer: SpeedEmulator
    feed: Feed  #: must know the samples of a step when the loop is resumed after its `Next`
    between_steps: BetweenSteps
    saver: Saver | None  #: None: the job makes no checkpoints
    snapshotter: Snapshotter | None  #: None: the job makes no snapshots
    #: The script wants the next step to be the last.
    stopping: bool = field(default=False, init=False)
    #: Updates after which a vote ended the job, for the script of a rank had stopped it. None: no vote did.
    _stops_at: int | None = field(default=None, init=False)
    #: All members are to leave, and the last checkpoint is made.
    _drained: bool = field(default=False, init=False)
    #: Of the step that the script has, or is about to have: it is in the loop's body, or waits for the step.
    index: int | None = field(default=None, init=False)
    #: The last step whose vote this rank knows of, with the number of its plan.
    _last: tuple[int, Vote] | None = field(default=None, init=False)
    garbage: GarbageCollector = field(default_factory=GarbageCollector, init=False)

    def run(self, total: int) -> Iterator[Next | Step]:
        """Trains until `total` updates are made, or the script of a rank stops the job.

        Yields:
            `Next` before each step, and the `Step` after it.

        Raises:
            JobStopped, JobOver, Drained: the job, or this rank's part in it, ended earlier.
        """
        switcher = self.switcher
        while True:
            if switcher.engine is None and self.saver is not None:
                self.saver.left()
            engine = switcher.wait()
            if self.saver is not None:
                self.saver.went_back(switcher.step)
            if self.control.ending and not switcher.draining:
                switcher.begin_drain()
            yield from self.missed()
            made, done, saved = switcher.step, None, True
            if made < total and not self.control.alone and (why := engine.guard.back_reason):
                switcher.go_back(why)
                continue
            if made < total and (why := engine.guard.stop_reason):
                try:
                    raise self.no_progress(engine, made, why)
                except (PeerLost, Cancelled) as error:
                    switcher.peers_lost(error)
                    continue
            stops = made < total and self._stops_at is not None and made >= self._stops_at
            if made < total and not stops:
                yield Next(made)
            if switcher.engine is not engine:
                continue  # a fault during an evaluation, or another task of the script
            try:
                if stops:  # a fault ended the last checkpoint
                    saved = self._close(engine)
                elif made < total:
                    self.between_steps.begin_step(engine)
                    done = self._train(engine, made, last=made + 1 >= total)
                    made += 1
                    self._last = engine.plan.number, done.outcome.vote
                    self._report(engine, done)  # before others can end the job
                    if done.outcome.stop:
                        self._stops_at = made
                ends = stops or made >= total or (done is not None and done.outcome.stop)
                if ends and not stops:
                    saved = self.finish(engine, made)
                elif done is not None and done.outcome.last:
                    # All are to leave. The leader, which also knows the devices on standby, then ends the job,
                    # or continues it with others.
                    self.finish(engine, made)
                    self._drained = True
                switcher.step = made  # a rank that loses the others before this knows of the step by its vote
            except (PeerLost, Cancelled) as error:
                switcher.peers_lost(error)
                continue
            except UnlikeChoices as error:  # the same on every rank, whose states are those before the step
                self.finish(engine, made)
                raise self.stopped(engine, error) from error
            except (LedgerError, BatchesDiffer) as error:  # the same on every rank
                raise self.stopped(engine, error) from error
            except Exception as error:
                lost = lost_within(error, interrupted=engine.interrupted)
                if lost is None:
                    raise
                switcher.peers_lost(lost)
                continue
            if ends and saved:
                self.control.send(self._finished(made))
            elif done is not None and done.outcome.last:
                self.control.send(DrainNotice(reason="it is done with its last checkpoint"))
            try:
                if done is not None:
                    yield self._step(engine.plan.number, done.outcome.vote)
            finally:
                if not saved:  # after the body of the last step, in which the script may save by itself
                    self.control.send(replace(self._finished(made), saved=False))
            if not saved:
                raise stopped(f"no checkpoint after {counted(made, 'step')}, the last: {self._unsaved()}")
            if done is None or ends:
                return
            if switcher.engine is engine:  # else a recovery came after this vote
                switcher.voted(done.outcome.prepared)
            if done.outcome.last:
                switcher.await_order(_END_SECONDS)

    def _finished(self, made: int) -> Finished:
        """The end of the job, with its last step if this rank knows of it."""
        if self._last is None or self._last[1].step != made - 1:
            return Finished(step=made)
        plan, vote = self._last
        return Finished(step=made, plan=plan, loss=vote.loss, tokens=vote.tokens)

    def fail(self, error: Exception) -> None:
        """Reports an exception of the script's own code, and keeps this rank until its state is safe. One that
        comes of another rank's loss is not reported: this rank leaves as if its node did.

        That is until the other ranks have taken over the state, or have saved it with this rank if the leader
        ends the job. Returns at once if this rank holds no state that is of use.

        Raises:
            JobStopped, JobOver, Drained: the state is safe.
        """
        switcher = self.switcher
        engine = switcher.engine
        if engine is None:
            return
        if not engine.health.torn:
            with suppress(DeviceLost):  # then the state here is lost, and the word says so
                engine.rest()
        lost: Exception | None = lost_within(error)
        word = self._raised(engine, error)
        if lost is None:
            self.control.send(word)
        if not word.holds:
            return
        if self.control.alone:
            self.save_alone(engine)
            return
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            # The frames keep the activations of the step, whose memory the move of the state needs.
            clear_frames(error.__traceback__)
        why = f"its code raised {word.kind}"
        self.control.send(DrainNotice(reason=why))
        switcher.begin_drain()
        lost = lost or Cancelled(why)
        while True:
            switcher.peers_lost(lost)
            engine = switcher.wait()
            try:
                self.between_steps.close(engine)
            except _Closed as closed:
                self.control.send(replace(word, plan=engine.plan.number, ends=True))
                lost = closed
            except Exception as again:
                lost = lost_within(again, interrupted=engine.interrupted)
                if lost is None:
                    raise

    def _report_error(self, engine: Engine, error: Exception, *, saves: bool = True) -> None:
        """Tells the leader that the job ends by an error."""
        self.control.send(self._raised(engine, error, ends=True, saves=saves))

    def _raised(self, engine: Engine, error: Exception, *, ends: bool = False, saves: bool = True) -> Raised:
        """An exception in the words for the leader."""
        return raised(
            error,
            plan=engine.plan.number,
            step=self.switcher.step,
            holds=engine.health.usable,
            saves=saves and self.saver is not None,
            ends=ends,
            index=self.index,
        )

    def close(self, engine: Engine, step: int) -> None:
        """Makes a last checkpoint, together with all members of the plan, which then wait for the job's end."""
        raise _Closed(self.finish(engine, step))

    def _close(self, engine: Engine) -> bool:
        """Has all members of a recovered plan make the last checkpoint, some of which may not know that the job
        ends. Returns as `finish`."""
        try:
            self.between_steps.close(engine)
        except _Closed as closed:
            return closed.saved
        raise AssertionError("the last task between steps ends by an exception")

    def _wants_stop(self, step: int) -> bool:
        """Returns whether this rank wants the step of this index to be the last."""
        return self.stopping if self._stops_at is None else step + 1 >= self._stops_at

    def missed(self) -> Iterator[Step]:
        """Steps that were made without this rank hearing of their end."""
        for plan, vote in self.switcher.taken():
            self._last = plan, vote
            yield self._step(plan, vote)

    def _step(self, plan: int, vote: Vote) -> Step:
        return Step(
            index=vote.step,
            loss=math.nan if vote.loss is None else vote.loss,
            norm=math.inf if vote.norm is None else vote.norm,
            balance=vote.balance,
            tokens=vote.tokens,
            samples=self.feed.samples(vote.step),
            plan=plan,
            applied=vote.apply,
        )

    def _train(self, engine: Engine, step: int, *, last: bool) -> StepDone:
        """Trains one step, and begins a checkpoint and a snapshot if they are due. `last`: no snapshot."""
        if self.snapshotter is not None:
            engine.copied = self.snapshotter.copied
        saver, snapshotter = self.saver, self.snapshotter if not last else None
        try:
            done = engine.step(
                step,
                self.switcher.prepared,
                lambda: saver.word if saver else 0,
                lambda: snapshotter is not None and snapshotter.ready(engine.plan.number, step + 1),
                self._draining,
                lambda: self._wants_stop(step),
            )
        except SampleError as error:
            raise self.unreadable(engine, step, error) from error
        except NothingRead as error:
            raise self.nothing_read(engine, step, error) from error
        self.garbage.stepped(engine.plan.number, step)
        goes_back = bool(engine.guard.back_reason)  # to a state of before this step
        if saver is not None:
            words, state = done.outcome.saving, engine.delivered_state
            saver.voted(step + 1, words, engine.layouts, state, begins=not goes_back)
        if snapshotter is not None:
            ready = [each and not goes_back for each in done.outcome.snapshot]
            snapshotter.voted(step + 1, ready, engine.layouts, engine.delivered_state)
        return done

    def nothing_read(self, engine: Engine, step: int, error: NothingRead) -> NothingRead | JobStopped:
        """The exception where this rank alone knows that it can read no sample. The others wait for its passes,
        and make no checkpoint with it: to them it is an exception of this rank's script. The end of the job,
        where there are no others."""
        return error if engine.everyone.size > 1 else self.unreadable(engine, step, error)

    def unreadable(self, engine: Engine, step: int, error: SampleError | NothingRead) -> JobStopped:
        """The end of the job because of an unreadable sample. Every rank saves the state before the step."""
        self.finish(engine, step)
        if error.__cause__ is not None:
            self._report_error(engine, error)
        return stopped(str(error))

    def no_progress(self, engine: Engine, step: int, why: str) -> JobStopped:
        """The end of the job because its steps change no weight. Every rank saves the state."""
        self.finish(engine, step)
        self._report_error(engine, NoProgress(why))
        return stopped(why)

    def stopped(self, engine: Engine, error: Exception) -> JobStopped:
        """The end of the job because of an error that every rank has."""
        self._report_error(engine, error, saves=False)
        return stopped(str(error))

    def _draining(self) -> Draining:
        if not self.switcher.draining:
            return Draining.NO
        return Draining.UNSAVED if self.saver is not None and not self._drained else Draining.SAVED

    def finish(self, engine: Engine, step: int) -> bool:
        """Makes the last checkpoint. All members of the plan call it, and again after a fault during it.

        Returns:
            Whether the state is in a checkpoint, or the job keeps none; the same on every member.
        """
        saved = True
        if self.saver is not None and step > 0 and not self.switcher.loaded(step):
            with during(engine.plan_groups.stopwatch.where, SAVING):
                saved = self.saver.finish(step, engine.gather, engine.layouts, engine.delivered_state)
        engine.settle()
        return saved

    def save_alone(self, engine: Engine) -> None:
        """Makes a checkpoint where this process trains alone, and says so."""
        step = self.switcher.step
        if self.finish(engine, step) and self.saver is not None and step > 0:
            steps, verb = counted(step, "step"), "is" if step == 1 else "are"
            say(f"{steps} {verb} saved in {self.saver.options.path}: the same command goes on from there")

    def saved_by_all(self, engine: Engine) -> bool:
        """Returns True if all members have left their loops after the same step, and a checkpoint has it."""
        step = self.switcher.step
        try:
            return self.between_steps.all_leave(engine, step) and self.finish(engine, step)
        except (PeerLost, Cancelled):
            return False

    def _unsaved(self) -> str:
        """Why the last checkpoint was not made, if this rank knows."""
        return (self.saver.failure if self.saver is not None else "") or "see the output of the other workers"

    def _report(self, engine: Engine, done: StepDone) -> None:
        first, guard, vote = engine.rank == 0, engine.guard, done.outcome.vote
        if first and guard.told == guard.limit:
            log.warning(
                "the last %d steps changed no weight: of step %d, %s. Look at the samples and the learning "
                "rate; float16 needs a loss that is scaled, ParallelismOptions(precision='fp16')",
                guard.left_out,
                vote.step,
                guard.why,
            )
        paced, overruns = self.pacer.take()
        self.control.send(
            Report(
                measurement=done.measurement,
                loss=vote.loss if first else None,
                tokens=vote.tokens if first else None,
                ended_at=time.monotonic() if first else 0.0,
                paced=paced,
                overruns=overruns,
                left_out=guard.told if first else 0,
                left_out_why=guard.why if first and guard.told else "",
            )
        )
