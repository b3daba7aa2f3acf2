"""The training loop of one process: waits until its device is used, trains, recovers, switches, ends."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from elasticd.messages import Finished, Leaving, Report
from elasticd.records import Vote
from elasticd.runtime.control import Control
from elasticd.runtime.emulation import Pacer
from elasticd.runtime.endings import JobStopped
from elasticd.runtime.engine import Engine, StepDone
from elasticd.runtime.feed import BatchesDiffer, Feed
from elasticd.runtime.groups import Cancelled, PeerLost
from elasticd.runtime.interludes import Interludes
from elasticd.runtime.notice import NOTICE
from elasticd.runtime.reader import SampleError
from elasticd.runtime.saver import Saver
from elasticd.runtime.snapper import Snapper
from elasticd.runtime.step import Step
from elasticd.runtime.switching import Switcher
from elasticd.runtime.vote import Going, LedgerError


@dataclass(frozen=True)
class Next:
    """This device is used, and the step of this index is trained next."""

    index: int


@dataclass(kw_only=True)
class Loop:
    """What the loop works with. `feed` must know a step's samples when the loop goes on after its `Next`."""

    switcher: Switcher
    control: Control
    pacer: Pacer
    feed: Feed
    interludes: Interludes
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
                    self.interludes.begin_step(engine)
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
                raise JobStopped(f"elasticd: {error}") from error
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
                self._going,
            )
        except SampleError as error:
            raise self.unreadable(engine, step, error) from error
        if saver is not None:
            saver.voted(step + 1, done.outcome.saving, engine.layouts, engine.state)
        if snapper is not None:
            snapper.voted(step + 1, done.outcome.snapshot, engine.layouts, engine.state)
        return done

    def unreadable(self, engine: Engine, step: int, error: SampleError) -> JobStopped:
        """On every rank alike, with nothing of the step in the state: saves it."""
        self.finish(engine, step)
        return JobStopped(f"elasticd: {error}")

    def _going(self) -> Going:
        if not self.switcher.leaving:
            return Going.STAYS
        return Going.UNSAVED if self.saver is not None and not self._parted else Going.SAVED

    def _part(self, engine: Engine, step: int) -> None:
        """All members were told to go: by all of them, a last checkpoint. The leader, which knows of those that
        are no members too, then ends the job or goes on with others."""
        self.finish(engine, step)
        self._parted = True

    def finish(self, engine: Engine, step: int) -> None:
        """After the last step, by all members of the plan: also of one that recovered from it."""
        if self.saver is not None and step > 0 and not self.switcher.loaded(step):
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
