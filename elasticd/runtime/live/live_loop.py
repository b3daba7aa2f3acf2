"""`elasticd.live`: the loop of a script of its own over a DDP, FSDP2 or DTensor model, kept alive.

How a step goes. The script computes its gradients in the body of `with step:`. Its first `optimizer.step()`
pauses in a hook before the update, for the vote: an all-gather of one record of each rank, over all members of
the plan. All gradients are reduced everywhere by then, and the update that follows is local. So a step is
decided once one rank heard its vote. A rank that lost the others in the vote waits in the hook for the leader's
word: it returns, and the update is made, where the step was decided; else it leaves the body, and the step
comes again.

How a fault goes is the switch machine's matter (`elasticd.machines.worker.switch`), as in a job whose model
elasticd cuts: here the plan's copy is a `LiveCopy`, and a recovery calls the script's `build` for the new mesh.
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from traceback import clear_frames
from typing import Any

import torch
from elasticd_planner.layout.mesh_layouts import MeshLayouts
from elasticd_planner.spec.measurement import Measurement
from msgspec.structs import replace
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import default_collate

from elasticd.records import Vote
from elasticd.runtime.comm.groups import Cancelled, PeerLost, first_sentence
from elasticd.runtime.control.control import Control
from elasticd.runtime.control.loop_end import LoopEnd, leave_at_exit
from elasticd.runtime.control.preemption_notice import PreemptionNotice
from elasticd.runtime.control.user_exceptions import lost_within, raised
from elasticd.runtime.data.sample_ledger import LedgerError
from elasticd.runtime.engine.vote import Draining, RankRecord
from elasticd.runtime.exits import Drained, JobOver, stopped
from elasticd.runtime.garbage_collector import GarbageCollector
from elasticd.runtime.live import world
from elasticd.runtime.live.collective_waits import CollectiveWaits
from elasticd.runtime.live.live_copy import LiveCopy
from elasticd.runtime.live.live_state import LiveRefusal, SmallState
from elasticd.runtime.live.loop_step import LoopStep, UsualMoves, counts_of
from elasticd.runtime.live.moves import LiveMoves
from elasticd.runtime.live.pointwise_sharding import PointwiseSharding
from elasticd.runtime.live.refusals import (
    refuse_another_optimizer,
    refuse_kept_gradients,
    refuse_later_moves,
)
from elasticd.runtime.snapshot.snapshotter import Snapshotter
from elasticd.runtime.switch.switcher import Switcher
from elasticd.runtime.telemetry.emulation import SpeedEmulator
from elasticd.runtime.telemetry.main_thread import shared
from elasticd.system import logs
from elasticd.wire.main_thread import Whereabouts
from elasticd.wire.snapshots import Freed
from elasticd.wire.worker import DrainNotice, Finished, Goodbye, Report, ToWorker, Welcome

log = logging.getLogger(__name__)

#: Seconds that a fault may take to be heard of after an error, which may also be the script's own.
_FAULT_SECONDS = 0.5

#: Gives the indices of a step's samples.
Samples = Callable[[int], Sequence[int]]


class StepLost(RuntimeError):
    """The body of a step ends here, and the step comes again: `with step:` alone catches it."""


class LiveLoop:
    """The steps of a job whose loop is the script's own. Iterate over it once.

    Attributes:
        state: what `build` returned for the mesh in force; None on standby.
    """

    def __init__(
        self,
        *,
        control: Control,
        moves: LiveMoves,
        steps: int,
        samples: Samples,
        data: Any,
        collate: Callable[[list[Any]], Any] | None,
        job: str,
        snapshot_every: int | None,
        grace: float,
    ) -> None:
        self._control, self._total, self._samples = control, steps, samples
        self._data, self._collate = data, collate or default_collate
        self._where = shared()
        pacer = self._pacer = SpeedEmulator(control.welcome.pace)
        self._switcher: Switcher[LiveCopy] = Switcher(moves, control, control.key_value(), pacer, self._where)
        self._snapper = None
        if snapshot_every is not None and not control.alone:
            self._snapper = Snapshotter(
                snapshot_every,
                job,
                lambda: control.welcome,
                lambda message, fd: control.send(message, fd=fd),
                moves.accelerator,
            )
        self._measured: MeshLayouts | None = None  # of the plan that snapshots have files for
        self._step: LoopStep | None = None
        self._waits = CollectiveWaits(self._decided, self._where)
        self._pointwise = PointwiseSharding()
        self._garbage = GarbageCollector()
        self._hooks: list[Any] = []
        self._began = self._waited = 0.0
        self._last_gradient: tuple[float, float] | None = None
        self._last: tuple[int, Vote] | None = None
        self._taken = False
        self._told_of: set[str] = set()  # that the log has a line of
        self._votes = False  # its vote waits, also at the end of a body: a loss there decides the step
        self._updating: torch.optim.Optimizer | None = None  # of the state, within its `step()`
        self._usual = UsualMoves()
        #: How this rank's part in the job ended, within the body of a step: the loop raises it.
        self._exit: JobOver | SystemExit | None = None
        logs.for_worker(self._about)
        control.start(self._hear)
        self._show()
        self._end = LoopEnd(
            control,
            make_notice=lambda: PreemptionNotice(grace, self._drain),
            depart=self._depart,
            give_state=self._give_state,
            end_threads=self._end_threads,
        )

    @property
    def state(self) -> Any:
        """The state that `build` returned for the mesh in force; None on standby."""
        return self._switcher.engine.user if self._switcher.engine is not None else None

    @property
    def plan(self) -> Any:
        """The plan in force; None on standby."""
        return self._switcher.engine.plan if self._switcher.engine is not None else None

    @property
    def rank(self) -> int | None:
        """The rank of this process under the plan in force; None on standby. (torchrun's RANK is stale.)"""
        return self._switcher.engine.rank if self._switcher.engine is not None else None

    @property
    def device(self) -> str:
        """The device of this worker, "node/index"."""
        return self._control.welcome.device

    # -- what the control thread does ------------------------------------------------------------------------

    def _hear(self, message: ToWorker) -> None:
        match message:
            case Freed(plan=plan, step=step):
                if self._snapper is not None:
                    self._snapper.freed(plan, step)
            case Welcome():
                self._show()
                if self._snapper is not None:
                    self._snapper.welcomed()
            case _:
                self._switcher.handle(message)

    def _show(self) -> None:
        """Gives the agent the shared memory that says where the main thread is."""
        self._control.send(Whereabouts(signal=self._where.signal), fd=self._where.fd)

    def _about(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "plan": plan.number if plan is not None else None,
            "step": self._switcher.step,
            "device": self.device,
        }

    def _drain(self, signal_name: str) -> None:
        log.warning("%s: %s leaves the job once others have its state", signal_name, self.device)
        self._control.send(DrainNotice(reason=signal_name))
        self._switcher.begin_drain()

    # -- the loop ----------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[LoopStep]:
        """The steps, each to be made in `with step:`.

        Raises:
            RuntimeError: the steps were asked for before.
            SystemExit: the job cannot continue, or continues without this process.
        """
        if self._taken:
            raise RuntimeError("the steps of elasticd.live are taken once: loop over it in one `for`")
        self._taken = True
        running = self._steps()
        leave_at_exit(running)
        return running

    def _steps(self) -> Generator[LoopStep, None, None]:
        self._end.uncaught.install()
        self._waits.install()
        self._pointwise.install()
        self._hooks += [
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        ]
        try:
            with suppress(JobOver):
                yield from self._run()
        except Drained as drained:
            self._end.part(Goodbye(reason=drained.reason, drained=True))
            raise
        except GeneratorExit as closed:
            if not self._end.forked:
                self._unhook()
                if not self._end.failed:
                    self._end.leave_later(closed.__context__)
            raise
        except BaseException as error:
            if isinstance(error, Exception):
                self._end.fail(error)
            self._end.end_threads()
            raise
        self._unhook()
        self._end.finish()

    def _run(self) -> Generator[LoopStep, None, None]:
        switcher = self._switcher
        while True:
            copy = switcher.wait()
            world.enter(copy.world)
            switcher.taken()  # the script saw them
            made = switcher.step
            if made >= self._total:
                if self._all_made(copy):
                    break
                continue
            step = self._step = LoopStep(copy, made, self._samples(made), self._read, self._enter, self._leave)
            self._time(copy)
            self._measure_snapshots(copy)
            in_force = weakref.ref(copy)
            del copy  # while this rank stands by, nothing keeps the state that it had
            yield step
            self._step = None
            if self._exit is not None:
                raise self._exit
            if not step.closed:
                raise RuntimeError(f"step {made}: put the body of the loop into `with step:`")
            if step.made:
                refuse_later_moves(step)
            if switcher.step >= self._total:
                continue
            step.let_go()
            if step.lost is not None and not step.decided and not step.told:
                switcher.peers_lost(step.lost)
            if step.lost is not None and not step.decided:
                continue
            if step.outcome is not None and switcher.engine is in_force():
                switcher.voted(step.outcome.prepared)
        made = switcher.step
        if self._last is not None and self._last[1].step == made - 1:
            plan, vote = self._last
            self._control.send(Finished(step=made, plan=plan, loss=vote.loss, tokens=vote.tokens))
        else:
            self._control.send(Finished(step=made))

    def _all_made(self, copy: LiveCopy) -> bool:
        """Waits until all ranks made the last step: what the script saves after its loop has parts of each.

        Returns:
            False where one was lost before: the others have its part of the state again, or of an earlier step.
        """
        try:
            copy.everyone.all_gather(torch.ones(1))
        except (PeerLost, Cancelled, RuntimeError) as error:
            self._switcher.peers_lost(error)
            return False
        return True

    def _measure_snapshots(self, copy: LiveCopy) -> None:
        """Has a plan's first step end in a snapshot: until then the state of lost devices may be of an older
        one. The very first step makes the optimizers' state, which nothing tells the size of before."""
        if self._snapper is not None and self._measured is not copy.layouts and self._switcher.step > 0:
            self._measured = copy.layouts
            self._snapper.measure(self._switcher.step, copy.layouts, copy.state)

    def _read(self, indices: Sequence[int]) -> Any:
        if self._data is None:
            raise ValueError("step.data: give elasticd.live(data=...) a map-style dataset, or use step.indices")
        return self._collate([self._data[index] for index in indices])

    # -- a step ------------------------------------------------------------------------------------------------

    def _enter(self, step: LoopStep) -> None:
        if step is not self._step or step.closed or step.small is not None:
            state = "over" if step.closed or step is not self._step else "entered already"
            raise RuntimeError(f"step {step.index} is {state}: enter each step once, in the loop that gave it")
        self._updating = None
        self._where.begin(step.index, step.copy.plan.number)
        assert step.copy.tensors is not None
        step.small = SmallState(step.copy.tensors)
        self._began, self._waited, self._last_gradient = time.perf_counter(), self._waits.seconds, None

    def _leave(self, step: LoopStep, error: BaseException | None) -> bool:
        """Ends the body of a step. Returns whether the exception that ended it is a fault's, and dealt with."""
        step.closed = True
        took = time.perf_counter() - self._began
        try:
            if error is None and step.lost is not None and not step.decided:
                raise StepLost("the script caught the loss of a peer")
            if error is None and not step.decided:  # no optimizer stepped: a GradScaler left the update out
                self._vote(step)  # first: a script that caught the loss of a peer is not to blame
                refuse_kept_gradients(step, computed=self._last_gradient is not None)
        except StepLost as lost:
            error = lost
        if error is not None and not isinstance(error, Exception):
            return False
        if error is not None:
            fault = self._fault(step, error)
            if fault is None:
                self._where.end(None)
                return False
            clear_frames(error.__traceback__)
            if not self._usual.complete(step):
                self._where.end(None)
                if step.small is not None and not step.decided:
                    if not step.told:
                        step.copy.rest()  # what hangs on the device may write to memory that is let go
                    step.small.restore()
                step.lost, step.decided = fault, False
                return True
            log.warning("a collective ended the body of step %d after its update: %s", step.index, fault)
        step.copy.health.end_update(stale=False)
        step.made = True
        self._warn_of(step)
        if step.stepped:  # a scaler that leaves an update out may leave those of schedulers out, too
            self._usual.note(step)
        step.counts = counts_of(step.state)
        self._switcher.step = step.index + 1
        self._where.end(took)
        self._committed(step, took)
        self._garbage.stepped(step.copy.built_for, step.index)
        return error is not None

    def _warn_of(self, step: LoopStep) -> None:
        """Says once what a body does that gives wrong gradients, or a total of NaN, and no error."""
        if step.stepped and step.unscaled:
            self._say_once(
                "ranks have unlike numbers of samples, and the body of a step did not ask for step.scale: its "
                "gradients are not the mean over all samples. Multiply the loss with it before backward()"
            )
        if step.loss is not None and not step.loss_known:
            self._say_once(
                "step.loss was set after the vote of a step, and step.total is NaN: set it before "
                "optimizer.step()"
            )

    def _fault(self, step: LoopStep | None, error: Exception) -> Exception | None:
        """The loss of another rank that an exception of the script comes of; None: it is the script's own.

        Once the update is decided an exception counts where a collective gave it nothing to go on with.
        """
        if isinstance(error, StepLost) and step is not None:
            return step.lost
        copy = self._switcher.engine if step is None else step.copy
        if copy is None:
            return lost_within(error)
        late = step is None or (step.closed and step.made) or step.decided
        # Of zeros in place of a failed collective's result any error may come, as of reading an object.
        cause = step.broken if step is not None and step.broken is not None else error
        fault = lost_within(cause, interrupted=copy.interrupted and (cause is not error or not late))
        if fault is None and (cause is not error or _of_a_collective(error)):
            return PeerLost(first_sentence(cause))
        if fault is None and isinstance(error, RuntimeError) and not late:
            deadline = time.monotonic() + _FAULT_SECONDS
            while not copy.interrupted and time.monotonic() < deadline:
                time.sleep(0.001)
            fault = lost_within(error, interrupted=copy.interrupted)
        return fault

    def _before_update(self, optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
        step = self._step
        if step is None or step.closed:
            return
        if not any(optimizer is each for each in step.state.optimizers):
            if self._updating is None:  # else one of the state's has it make its update
                refuse_another_optimizer(optimizer, step)
            return
        if next((each for each in (*args[1:], options.get("closure")) if callable(each)), None) is not None:
            raise LiveRefusal(
                f"{type(optimizer).__name__}.step has a closure, whose gradients would come after the vote: "
                "compute the gradients first, and call step() without one"
            )
        if world.in_backward():
            raise LiveRefusal(
                f"{type(optimizer).__name__}.step runs within backward(), before all gradients are reduced: "
                "call it after backward()"
            )
        if step.lost is not None and not step.decided:
            raise StepLost(f"step {step.index} comes again")
        if step.broken is not None:  # a gradient may be of it
            step.lost = PeerLost("a collective failed between two updates")
            raise StepLost(f"step {step.index} is torn between its updates")
        if id(optimizer) in step.stepped:
            self._say_once(
                "an optimizer steps more than once in the body of a step: a device that is lost between the "
                "updates of a step leaves no rank with its state, and the job goes back to a snapshot. Give "
                "elasticd.live snapshot_every=1, or make each update a step of its own"
            )
        if not step.decided:
            self._vote(step)
        self._updating = optimizer

    def _say_once(self, text: str) -> None:
        if text not in self._told_of:
            self._told_of.add(text)
            log.warning("%s", text)

    def _after_update(self, optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
        if optimizer is self._updating:
            self._updating = None
        step = self._step
        if step is not None and any(optimizer is each for each in step.state.optimizers):
            step.stepped.add(id(optimizer))
            step.updates += 1

    def _decided(self, error: Exception) -> bool:
        """Returns True if a collective failed after the last update of the step, or after its body."""
        step = self._step
        if step is None or self._votes or not (step.closed or step.updated):
            return False
        if step.broken is None:
            log.warning(
                "a collective after the update of step %d failed (%s): its result is NaN",
                step.index,
                first_sentence(error),
            )
        step.broken = error
        return True

    def _vote(self, step: LoopStep) -> None:
        """All-gathers the records of all ranks, and decides the step.

        Raises:
            StepLost: another rank is lost, and nobody heard the outcome.
            LedgerError: a rank gave other samples to its script than the plan says.
        """
        copy, switcher, snapper = step.copy, self._switcher, self._snapper
        try:
            copy.reduced_here()
        except (Cancelled, RuntimeError) as error:
            step.lost = error
            raise StepLost(f"step {step.index} comes again") from error
        copy.reduced = step.index
        asked = time.perf_counter()
        until, waited = asked, self._waits.seconds
        if copy.accelerator.immediate and self._last_gradient is not None:
            until, waited = self._last_gradient
        self._seconds = max(1e-9, until - self._began - (waited - self._waited))
        self._pace(len(step.indices))
        loss, count = step.terms
        step.loss_known = step.loss is not None
        record = RankRecord(
            step=step.index,
            prepared=switcher.prepared(),
            saving=0,
            snapshot=snapper is not None
            and step.index + 1 < self._total
            and snapper.ready(copy.plan.number, step.index + 1),
            finite=True,
            tokens=len(step.indices),
            squares=0.0,
            loss=loss,
            targets=count,
            samples=step.hash,
            draining=Draining.SAVED if switcher.draining else Draining.NO,
        )
        self._votes = True
        try:
            outcome = copy.vote.vote(record, step.hashes)
        except LedgerError as error:
            step.lost, self._exit = error, stopped(str(error))
            raise StepLost(str(error)) from error
        except (PeerLost, Cancelled, RuntimeError) as error:
            step.lost, step.told = error, True
            vote = self._outcome(step, error)
            step.total = math.nan if vote.loss is None else vote.loss
            self._last = copy.plan.number, vote
        else:
            step.outcome, vote = outcome, outcome.vote
            step.total = outcome.loss
            self._last = copy.plan.number, vote
        finally:
            self._votes = False
        self._vote_seconds = time.perf_counter() - asked
        copy.reduced, copy.last, step.decided = None, vote, True
        copy.health.begin_update()
        copy.trains_on()
        if snapper is not None:
            snapper.copied()

    def _outcome(self, step: LoopStep, error: Exception) -> Vote:
        """The step's vote, that another rank heard, after this one lost the others in it.

        Raises:
            StepLost: nobody heard it; or this rank's part in the job ends, which the loop raises.
        """
        try:
            vote = self._switcher.outcome(error)
        except JobOver as over:  # the others made this step, which is the last
            self._exit = over
            if step.index + 1 == self._total:
                return Vote(step=step.index, loss=None, norm=None, count=0.0, tokens=0, apply=True)
            raise StepLost(over) from None
        except SystemExit as end:
            self._exit = end
            raise StepLost(end) from None
        if vote is None:
            raise StepLost(f"step {step.index} comes again: {error}") from None
        return vote

    def _pace(self, samples: int) -> None:
        """Sleeps where the speed of the device is emulated, of which a sample counts as a token."""
        pace = self._pacer.pace
        target = self._seconds * pace.factor
        if pace.forward is not None:
            target = (pace.forward + (pace.backward or 0.0)) * samples * pace.factor
            self._pacer.paced += 1
            self._pacer.overruns += self._seconds > target
        if target > self._seconds:
            time.sleep(target - self._seconds)
            self._seconds = target

    def _committed(self, step: LoopStep, took: float) -> None:
        copy, outcome = step.copy, step.outcome
        if outcome is None:
            return  # another rank's vote: it has told of the step
        first, (paced, overruns) = copy.rank == 0, self._pacer.take()
        self._control.send(
            Report(
                measurement=Measurement(
                    device=copy.device,
                    plan=copy.plan.number,
                    step=step.index,
                    tokens=len(step.indices),
                    block_seconds=self._seconds,
                    block_work=len(step.indices) / len(copy.plan.lanes[copy.plan.lane_of[copy.device]]),
                    vote_seconds=self._vote_seconds,
                    step_seconds=took,
                ),
                loss=outcome.vote.loss if first else None,
                tokens=outcome.vote.tokens if first else None,
                ended_at=time.monotonic() if first else 0.0,
                paced=paced,
                overruns=overruns,
            )
        )
        if self._snapper is not None:
            self._snapper.voted(step.index + 1, outcome.snapshot, copy.layouts, copy.state)

    def _time(self, copy: LiveCopy) -> None:
        """Has the clock of a step stop at the last gradient: DDP waits for its reductions after it, in C++."""
        if copy.tensors is not None and not copy.tensors.timed:
            copy.tensors.timed = True
            for parameter in copy.tensors.trained.values():
                parameter.register_post_accumulate_grad_hook(self._gradient)

    def _gradient(self, parameter: torch.Tensor) -> None:
        self._last_gradient = time.perf_counter(), self._waits.seconds

    # -- the end -----------------------------------------------------------------------------------------------

    def _give_state(self, error: Exception) -> None:
        """Has the other ranks take over the state here. Returns if there is none of use.

        Raises:
            JobStopped, JobOver, Drained: the state is safe.
        """
        switcher, copy = self._switcher, self._switcher.engine
        if copy is None:
            return
        index = self._step.index if self._step is not None else None
        word = raised(
            error,
            plan=copy.plan.number,
            step=switcher.step,
            holds=not copy.health.torn,
            saves=False,
            index=index,
        )
        lost = self._fault(self._step, error)
        if lost is None:
            self._control.send(word)
        if not word.holds or self._control.alone:
            return
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            clear_frames(error.__traceback__)
        why = f"its code raised {word.kind}"
        self._control.send(DrainNotice(reason=why))
        switcher.begin_drain()
        switcher.peers_lost(lost or Cancelled(why))
        copy = switcher.wait()
        self._control.send(replace(word, plan=copy.plan.number, ends=True))

    def _depart(self) -> None:
        why = "" if self._end.finished else f"the script left the loop after {self._switcher.step} steps"
        self._end.part(Goodbye(reason=why))

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._waits.remove()
        self._pointwise.remove()
        self._garbage.release()

    def _end_threads(self) -> None:
        self._unhook()
        self._end.notice.restore()
        self._end.uncaught.restore()
        if self._snapper is not None:
            self._snapper.end()
        if not (self._end.finished and self._control.alone):
            world.over()
            self._switcher.end()


def _of_a_collective(error: Exception) -> bool:
    """Returns True if an error comes from torch's collectives over gloo."""
    text = str(error)
    return isinstance(error, RuntimeError) and ("gloo/" in text or "Connection closed by peer" in text)
