"""A rank's side of switches and faults at work: runs the effects of `machines.worker.switch` on real groups,
models and state.

Three threads meet here. The control thread feeds what it reads. A preparer thread, one for each proposal,
makes modules and groups while training goes on. The main thread, which trains, feeds votes and is alone in
moving and swapping. The machine's state is stepped under one lock; what the main thread is to do waits in a
queue for it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from functools import partial

import torch

from elasticd.machines.worker import switch as sw
from elasticd.records import Proposal, Vote
from elasticd.runtime.comm.groups import Cancelled, Fabric, KeyValue
from elasticd.runtime.comm.plan_groups import Fabrics
from elasticd.runtime.control.agent_client import Control
from elasticd.runtime.engine.engine import Engine
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.exits import Departed, JobOver, JobStopped
from elasticd.runtime.switch.copies import Copies
from elasticd.runtime.switch.move import SOUND, Prepared, Side, move, prepare
from elasticd.runtime.telemetry.emulation import Pacer
from elasticd.runtime.telemetry.main_thread import Nowhere, Where, during
from elasticd.wire import messages
from elasticd.wire.main_thread import IDLE
from elasticd.wire.messages import Abort, Fenced, Pace, Propose, Recorded, Rejected, Shutdown, ToWorker

log = logging.getLogger(__name__)

#: Seconds after which a rank that waits for the leader's word says again that it waits.
_REMIND = 60.0


class Switcher:
    """Holds the engine in force (None on a standby device) and switches it. `step` is the number of updates
    applied, set by the loop that trains."""

    #: Phases in which the engine in force may train, unless a fence holds it.
    _AT_WORK = (sw.Phase.TRAINING, sw.Phase.PREPARING, sw.Phase.READY, sw.Phase.WITHDRAWN)

    def __init__(
        self,
        recipe: Recipe,
        control: Control,
        store: KeyValue,
        pacer: Pacer,
        seed: int,
        where: Where | None = None,
    ) -> None:
        self.engine: Engine | None = None
        self.step = 0
        self._recipe, self._seed, self._where = recipe, seed, where or Nowhere()
        self._control, self._store, self._pacer = control, store, pacer
        self._device, self._address = control.welcome.device, control.welcome.address
        self._state = sw.State()
        self._lock = threading.RLock()
        self._todo: queue.Queue[sw.Effect] = queue.Queue()
        self._proposals: dict[int, Proposal] = {}
        self._fabrics = Fabrics()
        self._prepared: dict[int, Prepared] = {}
        self._side: Side | None = None
        self._loaded: int | None = None
        self._copies, self._began = Copies(self._let_go), 0.0
        self._missed: list[tuple[int, Vote]] = []
        self._over: str | None = None

    # -- what the control thread does ---------------------------------------------------------------------

    def handle(self, message: ToWorker) -> None:
        """Takes one message of the agent."""
        match message:
            case Propose(proposal=proposal):
                self._proposals = {proposal.number: proposal}
                self._feed(sw.Proposed(number=proposal.number, joins=self._device in proposal.plan.members))
            case Fenced(number=number, evicted=evicted):
                self._feed(sw.Fenced(number=number, evicted=evicted))
            case Abort(number=number, reason=reason):
                self._feed(sw.Aborted(number=number, reason=reason))
            case Recorded(number=number):
                self._feed(sw.Recorded(number=number))
            case Shutdown(reason=reason) | Rejected(reason=reason):
                self._feed(sw.Ordered(reason=reason))
            case messages.Closed(reason=reason):
                self._close(reason)
            case Pace():
                self._pacer.pace = message
            case _:
                log.warning("the agent sent %s, which a running worker does not expect", type(message).__name__)

    def told_to_go(self) -> None:
        """On any thread: `wait` or `voted` raise Departed once nobody needs anything of this rank."""
        self._feed(sw.ToldToGo())

    def _close(self, reason: str) -> None:
        """The last step is made. A rank that is at work ends by itself, or learns it when it loses the others;
        one that waits for them, whatever for, ends now."""
        with self._lock:
            self._over = reason
            waits = self.engine is None or not self.at_work
        if waits:
            self._fabrics.shut()
            self._todo.put(sw.Stop(reason=reason))

    def _feed(self, event: sw.Event) -> None:
        with self._lock:
            self._state, effects = sw.step(self._state, event)
            for effect in effects:
                self._run(effect)

    def _run(self, effect: sw.Effect) -> None:
        """Effects that take no time are run where they arise; the rest waits for its thread."""
        match effect:
            case sw.Prepare(number=number):
                thread = threading.Thread(
                    target=self._prepare, args=(number,), name=f"elasticd-prepare-{number}", daemon=True
                )
                thread.start()
                self._fabrics.remember(thread)
            case sw.Cancel(number=number):
                self._cancel(number)
            case sw.Move() | sw.Say() | sw.Swap() | sw.DropOld() | sw.Retire() | sw.Renounce() | sw.Depart():
                self._todo.put(effect)
            case sw.Stop() | sw.Interrupt():
                self._fabrics.shut()
                self._todo.put(effect)  # wakes a main thread that waits here
            case sw.ReportLost(reason=reason):
                plan = self.engine.plan.number if self.engine is not None else 0
                self._control.send(messages.Bereft(step=self.step, reason=reason, plan=plan))
            case sw.ReportStanding(fence=fence):
                self._control.send(self._standing(fence))
            case sw.ReportPrepared(number=number):
                self._control.send(messages.Prepared(number=number))
            case sw.ReportRefused(number=number, reason=reason):
                self._control.send(messages.Refused(number=number, reason=reason))
            case sw.ReportKept(number=number, reason=reason):
                self._control.send(messages.Kept(number=number, step=self.step, reason=reason))
            case sw.ReportDoubt(number=number, reason=reason):
                self._keep_side(number)
                self._control.send(messages.Doubt(number=number, step=self.step, reason=reason))
            case sw.ReportSwapped():
                self._todo.put(effect)  # after the swap that it reports
            case _:
                raise AssertionError(effect)

    # -- what a preparer thread does -----------------------------------------------------------------------

    def _prepare(self, number: int) -> None:
        try:
            prepared = self._make(self._proposals[number])
        except Exception as error:
            log.debug("preparing %d", number, exc_info=True)
            self._feed(sw.Failed(number=number, reason=f"{self._device}: {type(error).__name__}: {error}"))
            return
        with self._lock:
            if self._state.proposal == number:
                self._prepared[number] = prepared
        self._feed(sw.Stands(number=number))

    def _make(self, proposal: Proposal) -> Prepared:
        fabric_of = partial(self._fabric, proposal.number)
        prepared = prepare(proposal, self._recipe, self._device, self._pacer, fabric_of, self.engine)
        prepared.transition.stopwatch.where = self._where  # until here this thread waited on them
        if prepared.engine is not None:
            prepared.engine.fabric.stopwatch.where = self._where
        return prepared

    def _fabric(self, number: int, part: str) -> Fabric:
        """A fabric that a cancellation of `number` shuts, also one that came while this was under way."""
        fabric = Fabric(f"plan/{number}/{part}", self._device, self._address, self._store)
        with self._lock:
            if self._state.proposal != number or self._state.phase is sw.Phase.STOPPED:
                self._fabrics.release(fabric)
                raise Cancelled(f"proposal {number} was given up")
            self._fabrics.add(number, fabric)
        return fabric

    def _keep_side(self, number: int) -> None:
        """The verified copy counts like an old one from now on."""
        prepared = self._prepared.get(number)
        if self._side is not None and prepared is not None and prepared.engine is not None:
            self._copies.keep(number, prepared.engine, self._side.step)

    def _standing(self, fence: int) -> messages.Standing:
        """What is held here, the main thread being at rest."""
        if self._state.side:
            self._keep_side(self._state.side)
        return self._copies.standing(fence, self.engine, self.step)

    def _cancel(self, number: int) -> None:
        self._prepared.pop(number, None)
        self._side = None
        self._fabrics.cancel(number)

    # -- what the main thread does ---------------------------------------------------------------------------

    def prepared(self) -> int:
        """The number for this step's vote."""
        self._feed(sw.Voting())
        return self._state.voting

    def voted(self, numbers: tuple[int, ...]) -> None:
        """A vote completed: switches, where all ranks agree to, or recovers."""
        self._fabrics.release_spent()
        self._feed(sw.Voted(prepared=numbers))
        self._rest()

    def wait(self) -> Engine:
        """The engine to train with; a device that is not used stands by. Raises what `exits` has."""
        while True:
            self._rest()
            if self.engine is not None and self.at_work:
                return self.engine
            self._next("stands by")

    def bereaved(self, error: Exception) -> None:
        """A collective of the plan in force failed: returns once a recovery swapped, or this rank stands by.

        An update that was made all the same, by a vote that completed, counts. Raises `JobOver` where the
        others are gone because they made the last step."""
        engine = self.engine
        assert engine is not None
        if engine.last is not None and engine.last.step == self.step:
            self.missed(engine.plan.number, engine.last)
        with self._lock:
            if self._over is not None:
                raise JobOver(self._over)
            log.warning("lost the other ranks (%s): waiting for the coordinator's word", error)
            self._feed(sw.Lost(reason=str(error)))
        self._rest()

    @property
    def leaving(self) -> bool:
        """Whether this process was told to go."""
        return self._state.leaving

    def missed(self, plan: int, vote: Vote) -> None:
        """A step of which the loop has not heard, though its update is made."""
        self.step = vote.step + 1
        self._missed.append((plan, vote))

    def taken(self) -> list[tuple[int, Vote]]:
        """Steps that the loop is to give, which it did not hear the end of, each with its plan's number."""
        missed, self._missed = self._missed, []
        return missed

    def loaded(self, step: int) -> bool:
        """Whether the state after `step` updates is that of a checkpoint, on every member of the plan alike."""
        return self._loaded == step

    @property
    def at_work(self) -> bool:
        """Whether the engine in force may make a step."""
        state = self._state
        return state.trains and not state.fenced and state.phase in self._AT_WORK

    def _rest(self) -> None:
        """Does what there is to do, until this rank may train or stands by."""
        while True:
            while not self._todo.empty():
                self._do(self._todo.get_nowait())
            if self._state.phase is sw.Phase.INTERRUPTED:
                self._feed(sw.Rested())
                continue
            standby = not self._state.trains and not self._state.fenced and self.engine is None
            if self._todo.empty() and self.at_work and self.engine is not None and self.engine.spent:
                self._feed(sw.Lost(reason="the move in place failed, and took the state that it began with"))
                continue
            if self._todo.empty() and (self.at_work or standby):
                return
            if self._todo.empty():
                self._next(f"waits ({self._state.phase.value})")

    def _next(self, what: str) -> None:
        """The next thing to do, whenever it comes."""
        since = time.monotonic()
        while True:
            try:
                with during(self._where, IDLE):
                    effect = self._todo.get(timeout=1.0)
                self._do(effect)
                return
            except queue.Empty:
                if self._control.lost:
                    raise self._stopped(f"the agent is gone while it {what}: nobody tells it more") from None
                if time.monotonic() - since >= _REMIND:
                    since = time.monotonic()
                    log.warning("%s %s for the coordinator's word, its state is safe", self._device, what)

    def _stopped(self, reason: str) -> JobStopped:
        self._fabrics.shut()
        self.end()
        return JobStopped(f"elasticd: {reason}")

    def _do(self, effect: sw.Effect) -> None:
        match effect:
            case sw.Move(number=number):
                self._move(number)
            case sw.Say(number=number, ok=ok):
                self._say(number, ok)
            case sw.Swap(number=number, member=member):
                self._swap(number, member)
            case sw.ReportSwapped(number=number):
                self._report_swapped(number)
            case sw.DropOld():
                self._copies.drop()
            case sw.Retire() | sw.Renounce():
                self._retire()
                if isinstance(effect, sw.Renounce):
                    self._renew()
            case sw.Interrupt():
                pass
            case sw.Depart():
                raise Departed
            case sw.Stop(reason=reason):
                if self._over is not None:
                    raise JobOver(self._over)
                raise self._stopped(reason)

    def _move(self, number: int) -> None:
        self._began = time.perf_counter()
        prepared = self._prepared.get(number)
        if prepared is None:
            return  # superseded meanwhile
        try:
            self._side = self._moved(prepared)
        except SOUND as error:
            self._feed(sw.MoveFailed(number=number, reason=f"{self._device}: {error}"))
        except Exception as error:
            log.debug("moving to %d", number, exc_info=True)
            prepared.transition.shut()  # frees the others, who learn it the same way
            self._feed(sw.MoveFailed(number=number, reason=f"{self._device}: {error}"))
        else:
            self._feed(sw.Moved(number=number))

    def _moved(self, prepared: Prepared) -> Side:
        engine, step = self.engine, self.step
        recovery = prepared.recovery
        if recovery is not None and prepared.old is not None and not recovery.snapshots:
            engine, step = self._copies.get(prepared.old.plan.number, engine, step)
            vote = recovery.vote
            if engine is not None and vote is not None and step == recovery.step - 1:
                engine.apply(vote)  # decided, and this rank had not heard it
                self.missed(engine.plan.number, vote)
                step = self.step
        return move(prepared, engine, step, self._recipe, self._seed)

    def _say(self, number: int, ok: bool) -> None:
        prepared = self._prepared.get(number)
        if prepared is None:
            return
        try:
            oks = prepared.group.all_gather(torch.tensor([int(ok)]))
        except RuntimeError as error:
            prepared.transition.shut()
            self._feed(sw.GatherFailed(number=number, reason=str(error)))
        else:
            self._feed(sw.Gathered(number=number, oks=tuple(bool(o) for o in oks)))

    def _swap(self, number: int, member: bool) -> None:
        prepared = self._prepared.pop(number)
        assert self._side is not None
        self._fabrics.spent(prepared.transition, now=not member)
        if self.engine is not None:
            self._copies.keep(self.engine.plan.number, self.engine, self.step)
        self.engine = prepared.engine if member else None
        self.step = self._side.step
        self._missed = [(plan, vote) for plan, vote in self._missed if vote.step < self.step]  # it goes back
        self._loaded = self.step if self._side.checkpoint else None

    def _report_swapped(self, number: int) -> None:
        side, self._side = self._side, None
        assert side is not None
        self._control.send(
            messages.Swapped(
                number=number,
                step=side.step,
                pause_seconds=time.perf_counter() - (self._began if self._copies else side.began),
                bytes_sent=side.bytes_sent,
                bytes_lacking=side.bytes_lacking,
                bytes_state=side.bytes_state,
                checkpoint=side.checkpoint,
                flows=dict(side.flows),
            )
        )

    def _let_go(self, number: int, engine: Engine) -> None:
        self._prepared.pop(number, None)
        self._fabrics.release(engine.fabric)

    def _retire(self) -> None:
        """All copies go: this rank stands by."""
        if self.engine is not None:
            self._copies.keep(self.engine.plan.number, self.engine, self.step)
            self.engine = None
        for number in list(self._prepared):
            self._cancel(number)
        self._copies.drop()

    def _renew(self) -> None:
        """Fenced off: what comes from here on is the work of another incarnation."""
        log.warning("%s was fenced off; it comes again as a new incarnation", self._device)
        self._control.renew()
        self._missed.clear()

    def end(self) -> None:
        """Lets all groups go."""
        self._prepared.clear()
        self._copies.clear()
        self._fabrics.end()
