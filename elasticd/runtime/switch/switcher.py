"""Runs the switch machine of one rank (`machines.worker.switch`) on real groups, models and state.

Three threads meet here. The control thread feeds the machine the messages that it reads. A preparer thread,
one for each proposal, makes modules and groups while training goes on. The main thread, which trains, feeds
votes and is alone in moving and swapping. The machine is stepped under one lock; effects for the main thread
wait in a queue.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Generic

import torch

from elasticd.machines.worker import switch as sw
from elasticd.records import Proposal, Vote
from elasticd.runtime import threads
from elasticd.runtime.accelerator import DeviceLost
from elasticd.runtime.comm.groups import BootstrapKeyValue, Cancelled, PlanGroups
from elasticd.runtime.comm.groups_by_plan import GroupsByPlan
from elasticd.runtime.control.control import Control
from elasticd.runtime.engine.device_rest import DRAIN_SECONDS
from elasticd.runtime.engine.set_aside import NoHostMemory
from elasticd.runtime.exits import Drained, JobOver, JobStopped, refused, stopped
from elasticd.runtime.switch.copies import Copies
from elasticd.runtime.switch.move import SOUND
from elasticd.runtime.switch.plan_copy import Held, MoveResult, PlanMoves, PreparedPlan
from elasticd.runtime.telemetry.emulation import SpeedEmulator
from elasticd.runtime.telemetry.main_thread import MainThread, during
from elasticd.system.logs import say
from elasticd.system.user_line import described, raised_by_user
from elasticd.wire.main_thread import IDLE
from elasticd.wire.worker import (
    Closed,
    EmulatedSpeed,
    PeersLost,
    Prepared,
    Propose,
    Refused,
    StateReport,
    Switched,
    ToWorker,
)

log = logging.getLogger(__name__)

#: Seconds between two log lines of a rank that waits for the leader.
_REMIND_SECONDS = 60.0


class _MoveHeld(Exception):
    """A move is due while a step waits for the outcome of its vote."""

    def __init__(self, number: int) -> None:
        super().__init__(f"the move to plan {number} is due")
        self.number = number


class Switcher(Generic[Held]):
    """Holds the engine in force and switches it. The engine is the copy of the state that this rank trains on.

    Attributes:
        engine: The engine of the plan in force; None on a standby device.
        step: Updates applied, set by the loop that trains.
    """

    def __init__(
        self,
        moves: PlanMoves[Held],
        control: Control,
        store: BootstrapKeyValue,
        pacer: SpeedEmulator,
        where: MainThread | None = None,
    ) -> None:
        self.engine: Held | None = None
        self.step = 0
        self._moves, self._where = moves, where or MainThread()
        self._control, self._store, self._pacer = control, store, pacer
        self._device, self._address = control.welcome.device, control.welcome.address
        self._state = sw.SwitchState()
        self._lock = threading.RLock()
        self._todo: queue.Queue[sw.SwitchEffect] = queue.Queue()  # of the main thread
        self._proposals: dict[int, Proposal] = {}  # the newest, by its plan's number
        self._groups_by_plan = GroupsByPlan()
        self._prepared: dict[int, PreparedPlan[Held]] = {}  # by number
        self._results: dict[int, MoveResult] = {}  # of moves whose swap is not made, by the plan's number
        self._loaded: int | None = None  # the step of the checkpoint that the state was read from
        self._copies, self._began = (
            Copies[Held](self._let_go),
            0.0,
        )  # seconds on the clock at the start of a move
        self._missed: list[tuple[int, Vote]] = []  # plan and vote of steps that the loop did not see end
        self._over: str | None = None  # why the job is over
        self._holds_moves = False  # a step waits for the outcome of its vote
        self._start_said = False  # the user has been told where the job begins
        #: Effects that take no time, which run where they arise, and those that the main thread runs in turn.
        self._at_once: dict[type, Callable[[Any], None]] = {
            sw.Prepare: self._begin_to_prepare,
            sw.Cancel: lambda effect: self._cancel(effect.number),
            sw.SendToLeader: lambda effect: control.send(effect.message),
            sw.ReportState: lambda effect: control.send(self._state_report(effect.fence)),
        }
        self._in_turn: dict[type, Callable[[Any], None]] = {
            sw.MoveState: self._on_move,
            sw.AllGatherOk: lambda effect: self._all_gather_ok(effect.number, effect.ok),
            sw.Swap: lambda effect: self._swap(effect.number, effect.member),
            sw.DropOld: lambda effect: self._copies.drop(),
            sw.DropState: lambda effect: self._drop_state(),
            sw.DropStateAndRejoin: lambda effect: self._drop_and_rejoin(),
            sw.LeaveJob: self._leave_job,
            sw.StopTraining: self._stop_training,
        }

    # -- what the control thread does ---------------------------------------------------------------------

    def handle(self, message: ToWorker) -> None:
        """Takes one message of the agent, on the control thread."""
        match message:
            case Propose(proposal=proposal):
                self._proposals = {proposal.number: proposal}
                self._feed(sw.Proposed(number=proposal.number, joins=self._device in proposal.plan.members))
            case _ if isinstance(message, sw.AgentOrder):
                self._feed(message)
            case Closed(reason=reason):
                self._close(reason)
            case EmulatedSpeed():
                self._pacer.pace = message
            case _:
                log.warning("the agent sent %s, which a running worker does not expect", type(message).__name__)

    def begin_drain(self) -> None:
        """Begins to drain, on any thread: `wait` or `voted` raise `Drained` once no rank needs its state."""
        self._feed(sw.DrainRequested())

    def _close(self, reason: str) -> None:
        """The last step is made. A rank that is at work ends by itself, or when it loses the others; one that
        waits for them ends now."""
        with self._lock:
            self._over = reason
            waits = self.engine is None or not self.at_work
        if waits:
            self._groups_by_plan.shut()
            self._todo.put(sw.StopTraining(reason=reason))

    def _feed(self, event: sw.SwitchEvent) -> None:
        with self._lock:
            self._state, effects = sw.step(self._state, event, self.step)
            for effect in effects:
                self._run(effect)

    def _run(self, effect: sw.SwitchEffect) -> None:
        """Runs an effect that takes no time where it arises; the main thread's wait in its queue."""
        handler = self._at_once.get(type(effect))
        if handler is not None:
            handler(effect)
            return
        if isinstance(effect, sw.StopTraining | sw.Interrupt):
            self._groups_by_plan.shut()
        self._todo.put(effect)  # wakes a main thread that waits here

    def _begin_to_prepare(self, effect: sw.Prepare) -> None:
        thread = threads.start(partial(self._prepare, effect.number), f"elasticd-prepare-{effect.number}")
        self._groups_by_plan.remember(thread)

    # -- what a preparer thread does -----------------------------------------------------------------------

    def _prepare(self, number: int) -> None:
        try:
            prepared = self._make(self._proposals[number])
        except Exception as error:
            self._feed(Refused(number=number, reason=self._reason(error, f"prepare plan {number}")))
            return
        with self._lock:
            if self._state.proposal == number:
                self._prepared[number] = prepared
        self._feed(Prepared(number=number))

    def _make(self, proposal: Proposal) -> PreparedPlan[Held]:
        plan_groups_of = partial(self._plan_groups, proposal.number)
        prepared = self._moves.prepare(proposal, self._device, plan_groups_of, self.engine)
        prepared.transition.stopwatch.where = self._where  # until here this thread waited on them
        if prepared.engine is not None:
            prepared.engine.plan_groups.stopwatch.where = self._where
        return prepared

    def _plan_groups(self, number: int, part: str) -> PlanGroups:
        """Groups that a cancellation of `number` shuts, also one that came while this was under way."""
        plan_groups = PlanGroups(f"plan/{number}/{part}", self._device, self._address, self._store)
        with self._lock:
            if self._state.proposal != number or self._state.phase is sw.SwitchPhase.STOPPED:
                self._groups_by_plan.release(plan_groups)
                raise Cancelled(f"proposal {number} was given up")
            self._groups_by_plan.add(number, plan_groups)
        return plan_groups

    def _state_report(self, fence: int) -> StateReport:
        """The report of the state that is held here at rest. A verified copy counts like an old one from now
        on."""
        number = self._state.side
        prepared, result = self._prepared.get(number), self._results.get(number)
        if result is not None and prepared is not None and prepared.engine is not None:
            self._copies.keep(number, prepared.engine, result.step)
        return self._copies.report(fence, self.engine, self.step)

    def _cancel(self, number: int) -> None:
        self._prepared.pop(number, None)
        self._results.pop(number, None)
        self._groups_by_plan.cancel(number)

    # -- what the main thread does ---------------------------------------------------------------------------

    def prepared(self) -> int:
        """Returns the number of the plan that this rank votes for in this step (0: none)."""
        self._feed(sw.Voting())
        return self._state.voting

    def voted(self, numbers: tuple[int, ...]) -> None:
        """Takes a completed vote: switches if all ranks voted for the same plan.

        Args:
            numbers: The plan that each rank voted for, in rank order.
        """
        self._groups_by_plan.release_spent()
        self._feed(sw.Voted(prepared=numbers))
        self._rest()

    def wait(self) -> Held:
        """Returns the engine to train with; a device that is not used stands by until it is.

        Raises:
            JobStopped, JobOver, Drained: The job, or this rank's part in it, ends.
        """
        while True:
            self._rest()
            if self.engine is not None and self.at_work:
                return self.engine
            self._next("stands by")

    def peers_lost(self, error: Exception) -> None:
        """A collective of the plan in force failed: returns once a recovery swapped, or this rank stands by.

        An update that was made all the same, by a vote that completed, counts.

        Raises:
            JobOver: The others are gone because they made the last step.
            DeviceLost: the device does not come to rest.
        """
        engine = self.engine
        assert engine is not None
        engine.rest()
        if engine.last is not None and engine.last.step == self.step:
            self.missed(engine.plan.number, engine.last)
        with self._lock:
            if self._over is not None:
                raise JobOver(self._over)
            what = "stops the step" if isinstance(error, Cancelled) else "lost the other ranks"
            log.warning("%s (%s): waiting for the coordinator", what, error)
            self._lose_peers(str(error))
        self._rest()

    def outcome(self, error: Exception) -> Vote | None:
        """The vote of the plan in force failed, and its step's update waits for its outcome.

        Returns:
            The vote, where another rank heard it: the caller makes the update, counts it as `step`, and calls
            `wait`. None: the step is not decided: the caller leaves it, and calls `wait`. No state moves before
            that.

        Raises:
            JobStopped, JobOver, Drained: The job, or this rank's part in it, ends.
        """
        engine = self.engine
        assert engine is not None
        with self._lock:
            if self._over is not None:
                raise JobOver(self._over)
            log.warning("lost the other ranks in a vote (%s): waiting for the coordinator", error)
            self._lose_peers(str(error))
        self._holds_moves = True
        try:
            self._rest()
        except _MoveHeld as held:
            with self._todo.mutex:
                self._todo.queue.appendleft(sw.MoveState(number=held.number))
            prepared = self._prepared[held.number]
            recovery, old = prepared.proposal.recovery, prepared.proposal.old
            if recovery is None or prepared.all_read or old is None or old.number != engine.plan.number:
                return None
            vote = recovery.vote
            return vote if vote is not None and vote.step == self.step == recovery.step - 1 else None
        finally:
            self._holds_moves = False
        return None

    def go_back(self, reason: str) -> None:
        """Has the job go on from an older state, and leave out the updates from there up to that of the last
        step. All members call it after the same step. Returns once a recovery swapped, or this rank stands by.

        Where there is no older state, the job goes on from the one here.

        Raises:
            JobOver: The job is over.
            DeviceLost: the device does not come to rest.
        """
        assert self.engine is not None
        self.engine.rest()
        with self._lock:
            if self._over is not None:
                raise JobOver(self._over)
            log.warning("%s: waiting for the coordinator", reason)
            self._lose_peers(reason, self.step - 1)
        self._rest()

    def _lose_peers(self, reason: str, back: int = -1) -> None:
        assert self.engine is not None
        self._feed(PeersLost(step=self.step, reason=reason, plan=self.engine.plan.number, back=back))

    @property
    def draining(self) -> bool:
        """True if this process drains."""
        return self._state.draining

    def missed(self, plan: int, vote: Vote) -> None:
        """Notes a step whose update is made, though the loop did not see it end.

        Args:
            plan: Number of the plan that it was made under.
            vote: What the ranks agreed on at its end.
        """
        self.step = vote.step + 1
        self._missed.append((plan, vote))

    def taken(self) -> list[tuple[int, Vote]]:
        """Returns the `missed` steps, which the loop is to give to the script, each with its plan's number."""
        missed, self._missed = self._missed, []
        return missed

    def loaded(self, step: int) -> bool:
        """Returns True if the state after `step` updates was read from a checkpoint, by all members of the
        plan."""
        return self._loaded == step

    def await_order(self, seconds: float) -> None:
        """Waits for the next order to this rank, for so many seconds at most, and follows it.

        Raises:
            JobStopped, JobOver, Drained: The job, or this rank's part in it, ends.
        """
        try:
            effect = self._todo.get(timeout=seconds)
        except queue.Empty:
            return
        self._do(effect)

    @property
    def at_work(self) -> bool:
        """True if the engine in force may make a step."""
        return self._state.at_work

    def _rest(self) -> None:
        """Runs the main thread's effects until this rank may train or stands by."""
        while True:
            while not self._todo.empty():
                self._do(self._todo.get_nowait())
            if self._state.phase is sw.SwitchPhase.STOPPING:
                if self.engine is not None:
                    self.engine.rest()
                self._feed(sw.Rested())
                continue
            standby = not self._state.trains and not self._state.fenced and self.engine is None
            if self._todo.empty() and self.at_work and self.engine is not None and self.engine.health.consumed:
                self._lose_peers("the move in place failed, and took the state that it began with")
                continue
            if self._todo.empty() and self.at_work and self.engine is not None and self.engine.lent is not None:
                try:
                    self.engine.back()  # the job stays on its plan
                except RuntimeError as error:  # others may go on from what lies in host memory
                    self._lose_peers(f"its device has no memory for the state that was set aside ({error})")
                    continue
            if self._todo.empty() and (self.at_work or standby):
                return
            if self._todo.empty():
                self._next(f"waits ({self._state.phase.value})")

    def _next(self, what: str) -> None:
        """Runs the next effect, whenever it comes."""
        since = time.monotonic()
        while True:
            try:
                with during(self._where, IDLE):
                    effect = self._todo.get(timeout=1.0)
                self._do(effect)
                return
            except queue.Empty:
                if self._control.lost:
                    reason = f"the agent is gone while it {what}: no order can reach it"
                    raise self._ended(stopped(reason)) from None
                if time.monotonic() - since >= _REMIND_SECONDS:
                    since = time.monotonic()
                    log.warning("%s %s for the coordinator, its state is safe", self._device, what)

    def _ended(self, error: JobStopped) -> JobStopped:
        """Ends what this rank runs; returns the error."""
        self._groups_by_plan.shut()
        self.end()
        return error

    def _do(self, effect: sw.SwitchEffect) -> None:
        if (handler := self._in_turn.get(type(effect))) is not None:
            handler(effect)

    def _on_move(self, effect: sw.MoveState) -> None:
        if self._holds_moves and effect.number in self._prepared:
            raise _MoveHeld(effect.number)
        self._move(effect.number)

    def _drop_and_rejoin(self) -> None:
        self._drop_state()
        self._rejoin()

    def _leave_job(self, effect: sw.LeaveJob) -> None:
        raise Drained

    def _stop_training(self, effect: sw.StopTraining) -> None:
        if self._over is not None:
            raise JobOver(self._over)
        if effect.orderly:
            raise Drained(effect.reason)
        raise self._ended(refused(effect.reason) if effect.refused else stopped(effect.reason))

    def _move(self, number: int) -> None:
        self._began = time.perf_counter()
        prepared = self._prepared.get(number)
        if prepared is None:
            return  # superseded meanwhile
        try:
            self._results[number] = self._moved(prepared)
        except SOUND as error:
            self._feed(sw.MoveFailed(number=number, reason=f"{self._device}: {error}"))
        except Exception as error:
            reason = self._reason(error, f"move to plan {number}")
            prepared.transition.shut()  # frees the others, who learn it the same way
            if prepared.communicators is not None and not prepared.communicators.rest(DRAIN_SECONDS):
                if self.engine is not None:
                    self.engine.health.lose()
                raise DeviceLost(f"{self._device}: it did not come to rest after a failed move") from error
            self._feed(sw.MoveFailed(number=number, reason=reason))
        else:
            self._feed(sw.StateMoved(number=number))

    def _reason(self, error: Exception, work: str) -> str:
        """Logs an error, with its traceback where the user's own code raised it. Returns it for the others."""
        level = logging.ERROR if raised_by_user(error) else logging.DEBUG
        log.log(level, "%s cannot %s", self._device, work, exc_info=error)
        return f"{self._device}: {described(error)}"

    def _moved(self, prepared: PreparedPlan[Held]) -> MoveResult:
        engine, step = self.engine, self.step
        recovery = prepared.proposal.recovery
        if recovery is not None and prepared.old is not None and not prepared.all_read:
            engine, step = self._copies.get(prepared.old.plan.number, engine, step)
            if self._device not in recovery.sources:
                engine = None  # it is torn, or of another step: this rank only joins
            vote = recovery.vote
            if engine is not None and vote is not None and step == recovery.step - 1:
                engine.back()
                engine.apply(vote)  # decided, and this rank had not heard it
                self.missed(engine.plan.number, vote)
                step = self.step
            if engine is not None and engine.lent is not None:
                # It was set aside because both plans did not fit. The other copies may still be needed.
                with contextlib.suppress(NoHostMemory):
                    for other in self._copies.others(engine, self.engine):
                        other.set_aside({})
        if recovery is None and engine is not None:
            engine.delivered()  # the new engine takes tensors of this one for true, and frees its communicators
        return self._moves.move(prepared, engine, step)

    def _all_gather_ok(self, number: int, ok: bool) -> None:
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
        prepared, result = self._prepared.pop(number), self._results.pop(number)
        self._groups_by_plan.spent(prepared.transition, now=not member)
        if self.engine is not None:
            self._copies.keep(self.engine.plan.number, self.engine, self.step)
        self.engine = prepared.engine if member else None
        self.step = result.step
        self._missed = [(plan, vote) for plan, vote in self._missed if vote.step < self.step]  # it goes back
        self._loaded = self.step if result.checkpoint else None
        self._log_start(result.checkpoint)
        self._control.send(
            Switched(
                number=number,
                step=result.step,
                pause_seconds=time.perf_counter() - (self._began if self._copies else result.began),
                bytes_sent=result.bytes_sent,
                bytes_lacking=result.bytes_lacking,
                bytes_state=result.bytes_state,
                checkpoint=result.checkpoint,
                flows=dict(result.flows),
            )
        )

    def _log_start(self, checkpoint: str) -> None:
        """Tells the user where the job begins, or goes on from a checkpoint: on the plan's first rank."""
        folder = self._moves.folder
        if folder is None or self.engine is None or self.engine.rank != 0 or self._control.alone:
            return
        if checkpoint:
            say(f"continues from step {self.step} of {folder}")
        elif self.step == 0 and not self._start_said:
            say(f"no checkpoint in {folder}: starts at step 0")
        self._start_said = True

    def _let_go(self, number: int, engine: Held) -> None:
        self._results.pop(number, None)
        if self._prepared.pop(number, None) is not None:  # never switched to: the move's own groups go, too
            self._groups_by_plan.cancel(number)
        elif self.engine is None or engine.plan_groups is not self.engine.plan_groups:  # else it took them over
            self._groups_by_plan.release(engine.plan_groups)

    def _drop_state(self) -> None:
        """Drops all copies: this rank stands by."""
        if self.engine is not None:
            self._copies.keep(self.engine.plan.number, self.engine, self.step)
            self.engine = None
        for number in list(self._prepared):
            self._cancel(number)
        self._copies.drop()

    def _rejoin(self) -> None:
        """Comes again as another incarnation, after a fence closed this one."""
        log.warning("%s was fenced off; it comes again as a new incarnation", self._device)
        self._control.renew()
        self._missed.clear()

    def end(self) -> None:
        """Drops all groups and copies, at the end of the process."""
        self._prepared.clear()
        self._copies.clear()
        self._groups_by_plan.end()
