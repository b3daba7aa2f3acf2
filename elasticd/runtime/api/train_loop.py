"""The training loop of one process: waits until its device is used, trains, recovers, switches, ends."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from traceback import clear_frames

import torch
from msgspec.structs import replace

from elasticd.records import Vote
from elasticd.runtime.api.between_steps import BetweenSteps
from elasticd.runtime.api.step import Step
from elasticd.runtime.checkpoint.saver import Saver
from elasticd.runtime.comm.groups import Cancelled, PeerLost
from elasticd.runtime.control.agent_client import Control
from elasticd.runtime.control.sigterm import NOTICE
from elasticd.runtime.control.user_exceptions import lost_within, raised
from elasticd.runtime.data.prefetch import SampleError
from elasticd.runtime.data.sample_ledger import LedgerError
from elasticd.runtime.data.step_samples import BatchesDiffer, Feed
from elasticd.runtime.engine.engine import Engine, StepDone
from elasticd.runtime.engine.vote import Draining
from elasticd.runtime.exits import JobStopped
from elasticd.runtime.snapshot.snapshotter import Snapper
from elasticd.runtime.switch.switcher import Switcher
from elasticd.runtime.telemetry.emulation import Pacer
from elasticd.runtime.telemetry.main_thread import during
from elasticd.wire.main_thread import SAVING
from elasticd.wire.messages import Finished, Leaving, Raised, Report


@dataclass(frozen=True)
class Next:
    """This device is used, and the step of this index is trained next."""

    index: int


class _Closed(Cancelled):
    """The last checkpoint of a job was made that ends because of an exception."""


@dataclass(kw_only=True)
class Loop:
    """What the loop works with. `feed` must know a step's samples when the loop goes on after its `Next`."""

    switcher: Switcher
    control: Control
    pacer: Pacer
    feed: Feed
    between_steps: BetweenSteps
    saver: Saver | None
    snapper: Snapper | None
    #: All were told to go, and the last checkpoint was made.
    _parted: bool = field(default=False, init=False)

    def run(self, total: int) -> Iterator[Next | Step]:
        """Until `total` updates were made: what comes next, and each step after it is done. Raises what
        `endings` has."""
        switcher = self.switcher
        while True:
            if switcher.engine is None and self.saver is not None:
                self.saver.left()
            engine = switcher.wait()
            yield from self.missed()
            made, done = switcher.step, None
            if made < total:
                yield Next(made)
            if switcher.engine is not engine:
                continue  # a fault in what the script asked for meanwhile
            try:
                if made < total:
                    self.between_steps.begin_step(engine)
                    done = self._train(engine, made, last=made + 1 >= total)
                    made += 1
                if made >= total:
                    self.finish(engine, made)
                elif done is not None and done.outcome.last:
                    self._part(engine, made)
                switcher.step = made  # until here the vote alone tells of it, to whoever loses the others
            except (PeerLost, Cancelled) as error:
                switcher.bereaved(error)
                continue
            except (LedgerError, BatchesDiffer) as error:  # the same on every rank
                raise self.stopped(engine, error) from error
            except Exception as error:
                lost = lost_within(error)
                if lost is None:
                    raise
                switcher.bereaved(lost)
                continue
            if done is not None:
                self._report(done, first=engine.rank == 0)
            if made >= total:
                self.control.send(Finished(step=made))
            elif done is not None and done.outcome.last:
                self.control.send(Leaving(reason=NOTICE))
            if done is not None:
                yield self._step(engine.plan.number, done.outcome.vote)
            if done is None or made >= total:
                return
            if switcher.engine is engine:  # else a recovery came after this vote
                switcher.voted(done.outcome.prepared)

    def fail(self, error: Exception) -> None:
        """The script's own code raised: says so, and stays until the others have what this rank holds, or have
        saved the state with it where the leader ends the job for it. Raises what `endings` has; returns where
        nothing is held here that is of use."""
        switcher = self.switcher
        engine = switcher.engine
        if engine is None:
            return
        word = self._say(engine, error)
        if not word.holds:
            return
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            # They keep the step's activations, and the state is to be given away.
            clear_frames(error.__traceback__)
        why = f"its code raised {word.kind}"
        self.control.send(Leaving(reason=why))
        switcher.told_to_go()
        lost: Exception = Cancelled(why)
        while True:
            switcher.bereaved(lost)
            engine = switcher.wait()
            try:
                self.between_steps.close(engine)
            except _Closed as closed:
                self.control.send(replace(word, plan=engine.plan.number, ends=True))
                lost = closed
            except (PeerLost, Cancelled) as again:
                lost = again

    def _say(self, engine: Engine, error: Exception, *, ends: bool = False, saves: bool = True) -> Raised:
        word = raised(
            error,
            plan=engine.plan.number,
            step=self.switcher.step,
            holds=not (engine.torn or engine.spent),
            saves=saves and self.saver is not None,
            ends=ends,
        )
        self.control.send(word)
        return word

    def close(self, engine: Engine, step: int) -> None:
        """By all members of a plan: a last checkpoint. Then they wait for the job's end."""
        self.finish(engine, step)
        raise _Closed("the state is saved, and the job ends")

    def missed(self) -> Iterator[Step]:
        """Steps that were made, and whose end this rank did not hear."""
        for plan, vote in self.switcher.taken():
            yield self._step(plan, vote)

    def _step(self, plan: int, vote: Vote) -> Step:
        return Step(
            index=vote.step,
            loss=math.nan if vote.loss is None else vote.loss,
            norm=math.inf if vote.norm is None else vote.norm,
            tokens=vote.tokens,
            samples=self.feed.samples(vote.step),
            plan=plan,
            applied=vote.apply,
        )

    def _train(self, engine: Engine, step: int, *, last: bool) -> StepDone:
        """One step, and what is kept of the state after it: no snapshot of the last."""
        saver, snapper = self.saver, self.snapper if not last else None
        try:
            done = engine.step(
                step,
                self.switcher.prepared,
                lambda: saver.word if saver else 0,
                lambda: snapper is not None and snapper.ready(engine.plan.number, step + 1),
                self._draining,
            )
        except SampleError as error:
            raise self.unreadable(engine, step, error) from error
        if saver is not None:
            saver.voted(step + 1, done.outcome.saving, engine.layouts, engine.state)
        if snapper is not None:
            snapper.voted(step + 1, done.outcome.snapshot, engine.layouts, engine.state)
        return done

    def unreadable(self, engine: Engine, step: int, error: SampleError) -> JobStopped:
        """On every rank alike, with nothing of the step in the state: saves it. Who met the error says so."""
        self.finish(engine, step)
        if error.__cause__ is not None:
            self._say(engine, error, ends=True)
        return JobStopped(f"elasticd: {error}")

    def stopped(self, engine: Engine, error: Exception) -> JobStopped:
        """What ends every rank alike."""
        self._say(engine, error, ends=True, saves=False)
        return JobStopped(f"elasticd: {error}")

    def _draining(self) -> Draining:
        if not self.switcher.leaving:
            return Draining.NO
        return Draining.UNSAVED if self.saver is not None and not self._parted else Draining.SAVED

    def _part(self, engine: Engine, step: int) -> None:
        """All members were told to go: by all of them, a last checkpoint. The leader, which knows of those that
        are no members too, then ends the job or goes on with others."""
        self.finish(engine, step)
        self._parted = True

    def finish(self, engine: Engine, step: int) -> None:
        """After the last step, by all members of the plan: also of one that recovered from it."""
        if self.saver is not None and step > 0 and not self.switcher.loaded(step):
            with during(engine.fabric.stopwatch.where, SAVING):
                self.saver.finish(step, engine.gather, engine.layouts, engine.state)
        engine.settle()

    def _report(self, done: StepDone, *, first: bool) -> None:
        paced, overruns = self.pacer.take()
        self.control.send(
            Report(
                measurement=done.measurement,
                loss=done.outcome.loss if first else None,
                tokens=done.outcome.tokens if first else None,
                paced=paced,
                overruns=overruns,
            )
        )
