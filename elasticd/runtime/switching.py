"""A rank's side of a switch at work: runs the effects of `machines.switch` on real groups, models and state.

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

import torch

from elasticd import messages
from elasticd.machines import switch as sw
from elasticd.messages import Abort, Pace, Propose, Recorded, Rejected, Shutdown, ToWorker
from elasticd.records import Proposal
from elasticd.runtime.control import Control
from elasticd.runtime.emulation import Pacer
from elasticd.runtime.engine import Engine, Recipe
from elasticd.runtime.groups import Cancelled, Fabric, KeyValue
from elasticd.runtime.move import SOUND, Prepared, Side, move, prepare

log = logging.getLogger(__name__)

#: Seconds that a rank in doubt, or one that lost the others, waits with its state for the leader's word, which
#: may have to wait for the store.
_PATIENCE = 120.0

#: Seconds that the end of a job waits for threads that let groups go.
_LEAVE = 5.0


class JobStopped(SystemExit):
    """The job cannot go on; the message says why. As a SystemExit it ends a script with that one line."""


class JobOver(Exception):
    """The job ended while this rank stood by."""


class Switcher:
    """Holds the engine in force (None on a standby device) and switches it. `step` is the number of updates
    applied, set by the loop that trains."""

    def __init__(self, recipe: Recipe, control: Control, store: KeyValue, pacer: Pacer, seed: int) -> None:
        self.engine: Engine | None = None
        self.step = 0
        self._recipe, self._seed = recipe, seed
        self._control, self._store, self._pacer = control, store, pacer
        self._device, self._address = control.welcome.device, control.welcome.address
        self._state = sw.State()
        self._lock = threading.RLock()
        self._todo: queue.Queue[sw.Effect] = queue.Queue()
        self._proposals: dict[int, Proposal] = {}
        self._fabrics: dict[int, list[Fabric]] = {}
        self._prepared: dict[int, Prepared] = {}
        self._side: Side | None = None
        self._old: Engine | None = None
        self._threads: list[threading.Thread] = []
        self._over: str | None = None
        self._began = 0.0

    # -- what the control thread does ---------------------------------------------------------------------

    def handle(self, message: ToWorker) -> None:
        """Takes one message of the agent."""
        match message:
            case Propose(proposal=proposal):
                self._proposals = {proposal.number: proposal}
                self._feed(sw.Proposed(number=proposal.number, joins=self._device in proposal.plan.members))
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

    def _close(self, reason: str) -> None:
        """The members made the last step; one that stands by, or waits for them to let it join, ends too."""
        if self.engine is None:
            self._over = reason
            self._shut_all()
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
                self._remember(thread)
            case sw.Cancel(number=number):
                self._cancel(number)
            case sw.Stop(reason=reason):
                self._shut_all()
                self._todo.put(effect)
            case sw.Move() | sw.Say() | sw.Swap() | sw.DropOld():
                self._todo.put(effect)
            case sw.ReportPrepared(number=number):
                self._control.send(messages.Prepared(number=number))
            case sw.ReportRefused(number=number, reason=reason):
                self._control.send(messages.Refused(number=number, reason=reason))
            case sw.ReportKept(number=number, reason=reason):
                self._control.send(messages.Kept(number=number, step=self.step, reason=reason))
            case sw.ReportDoubt(number=number, reason=reason):
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
        return prepare(
            proposal, self._recipe, self._device, self._pacer, lambda part: self._fabric(proposal.number, part)
        )

    def _fabric(self, number: int, part: str) -> Fabric:
        """A fabric that a cancellation of `number` shuts, also one that came while this was under way."""
        fabric = Fabric(f"plan/{number}/{part}", self._device, self._address, self._store)
        with self._lock:
            if self._state.proposal != number or self._state.phase is sw.Phase.STOPPED:
                self._remember(fabric.park())
                raise Cancelled(f"proposal {number} was given up")
            self._fabrics.setdefault(number, []).append(fabric)
        return fabric

    def _remember(self, thread: threading.Thread) -> None:
        """Threads that the end of the job waits for."""
        self._threads = [other for other in self._threads if other.is_alive()] + [thread]

    def _cancel(self, number: int) -> None:
        self._prepared.pop(number, None)
        self._side = None
        for fabric in self._fabrics.pop(number, ()):
            fabric.shut()
            self._remember(fabric.park())

    def _shut_all(self) -> None:
        """Frees every thread that waits in a group."""
        with self._lock:
            for fabrics in self._fabrics.values():
                for fabric in fabrics:
                    fabric.shut()

    # -- what the main thread does ---------------------------------------------------------------------------

    def prepared(self) -> int:
        """The number for this step's vote."""
        self._feed(sw.Voting())
        return self._state.voting

    def voted(self, numbers: tuple[int, ...]) -> None:
        """A vote completed: switches, where all ranks agree to."""
        self._feed(sw.Voted(prepared=numbers))
        while not self._todo.empty() or self._state.phase is sw.Phase.DOUBT:
            try:
                self._do(self._todo.get(timeout=_PATIENCE))
            except queue.Empty:
                raise self._stopped(
                    f"in doubt about plan {self._state.proposal}: this rank said ok, lost the others before it "
                    "heard whether they did, and nobody tells it"
                ) from None

    def wait(self) -> Engine:
        """Stands by until this device is used. Raises `JobOver` or `JobStopped`."""
        while self.engine is None:
            try:
                self._do(self._todo.get(timeout=1.0))
            except queue.Empty:
                if self._control.lost:
                    raise self._stopped(
                        "the agent is gone while this device stood by: nobody can use it"
                    ) from None
        return self.engine

    def bereaved(self, error: Exception) -> JobStopped:
        """A collective of the plan in force failed: what to raise. The leader knows best why, so its word is
        waited for."""
        log.warning("lost the other ranks (%s): waiting for the coordinator's word", error)
        deadline = time.monotonic() + _PATIENCE
        while not self._control.lost and (left := deadline - time.monotonic()) > 0:
            try:
                self._do(self._todo.get(timeout=min(left, 0.2)))
            except queue.Empty:
                continue
            except JobStopped as stopped:
                return stopped
        return self._stopped(f"lost the other ranks: {error}")

    def _stopped(self, reason: str) -> JobStopped:
        self._shut_all()
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
                self._drop_old()
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
        return move(prepared, self.engine, self.step, self._recipe, self._seed)

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
        self._remember(prepared.transition.park())
        with self._lock:
            kept = [f for f in self._fabrics.pop(number, []) if f is not prepared.transition]
            self._fabrics[number] = kept
        self._old, self.engine = self.engine, prepared.engine if member else None
        self.step = self._side.step

    def _report_swapped(self, number: int) -> None:
        side, self._side = self._side, None
        assert side is not None
        self._control.send(
            messages.Swapped(
                number=number,
                step=side.step,
                pause_seconds=time.perf_counter() - self._began,
                bytes_sent=side.bytes_sent,
                bytes_lacking=side.bytes_lacking,
                bytes_state=side.bytes_state,
                checkpoint=side.checkpoint,
            )
        )

    def _drop_old(self) -> None:
        if self._old is not None:
            with self._lock:
                self._fabrics.pop(self._old.plan.number, None)
            self._remember(self._old.fabric.park())
            self._old = None

    def end(self) -> None:
        """Lets all groups go and waits for the threads that do so: an interpreter that ends while one of them
        is inside gloo aborts."""
        with self._lock:
            fabrics = [fabric for number in list(self._fabrics) for fabric in self._fabrics.pop(number)]
            self._prepared.clear()
            self._old = None
        self._threads += [fabric.park() for fabric in fabrics]
        deadline = time.monotonic() + _LEAVE
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
