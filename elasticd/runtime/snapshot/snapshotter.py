"""A rank's side of snapshots at work: copies its share into a memory file after a step, and hands it over.

The machine in `machines.worker.snapshotting` says when and where. One thread copies while the next step is
computed; another one makes the files, writes what they hold, and gives them to the agent, who keeps them. The
training thread lists the state's tensors, and waits for the copy only where the state is to change before it is
made: at the next update as a rule (`Engine.copied`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial

from elasticd_migration.local_state import LocalState, NotElementWise
from elasticd_planner.layout.holdings import Holdings
from elasticd_planner.spec.cluster import node_of
from elasticd_planner.spec.mesh import JobPlan

from elasticd.codec.message import Message
from elasticd.machines.worker import snapshotting
from elasticd.runtime.accelerator import CPU, Accelerator
from elasticd.runtime.checkpoint.staging import Piece, pieces, shares, without_planes
from elasticd.runtime.snapshot.memory_file import BadSnapshot, MemoryFile, size_of
from elasticd.runtime.threads import DaemonThreads
from elasticd.wire.snapshots import Held, Snapped
from elasticd.wire.worker import Welcome

log = logging.getLogger(__name__)

#: Seconds that the end of a process waits for the thread.
_LEAVE_SECONDS = 5.0

#: Sends a message to the agent, with a descriptor that stays the caller's.
Tell = Callable[[Message, int], None]


class Snapshotter:
    """Makes this rank's snapshots every `every` steps. `welcome` gives who this worker is now.

    The thread that trains calls `ready` for a vote's record and `voted` after it, and `copied` before the state
    changes; `freed` and `welcomed` are called by the control thread, `end` by whoever ends the process.
    """

    def __init__(
        self,
        every: int,
        job: str,
        welcome: Callable[[], Welcome],
        tell: Tell,
        accelerator: Accelerator = CPU,
    ) -> None:
        self._accelerator = accelerator
        self.copy_seconds = 0.0  # for which the training thread was held up by the last snapshot so far
        self._cost_before = 0.0  # likewise by the one before it, in all
        self.bytes = 0  # of the last one
        self._job, self._welcome, self._tell = job, welcome, tell
        self._lock = threading.Lock()
        self._state = snapshotting.first(every)
        self._files: list[MemoryFile | None] = [None] * len(self._state.slots)
        self._layouts: Holdings | None = None
        self._beside = DaemonThreads("snapshot")
        self._copier = DaemonThreads("snapshot-copy")  # no copy waits for a file to be made, which takes longer
        self._copying: Future[None] | None = None  # of the last snapshot, until it is known to have ended

    # -- what the training thread does -----------------------------------------------------------------------

    def ready(self, plan: int, step: int) -> bool:
        """This rank's bit in the vote after which `step` updates are applied."""
        with self._lock:
            return self._state.ready(plan, step)

    def voted(
        self, step: int, bits: Sequence[bool], layouts: Holdings, state: Callable[[], LocalState]
    ) -> None:
        """After that vote and its update: begins a snapshot where all ranks may. Until `copied` returns, the
        state's tensors must not change.

        Args:
            step: updates that are applied.
            bits: of all ranks, in rank order.
            layouts: of the plan in force.
            state: gives this rank's state, by reference.
        """
        began = time.perf_counter()
        with self._lock:
            self._state, slot = snapshotting.voted(self._state, step, bits)
            file = self._files[slot] if slot is not None else None
        plan = layouts.plan.number
        try:
            if file is not None:
                self._cost_before = self.copy_seconds
                self._copy(step, file, layouts, state())
                self.copy_seconds = time.perf_counter() - began
        except (NotElementWise, BadSnapshot, RuntimeError) as error:
            self._give_up(error, plan, step)
        if layouts is not self._layouts:  # a new plan, or the state has outgrown its files
            self.measure(step, layouts, state)

    def copied(self) -> None:
        """Returns when no snapshot reads the state any more."""
        if self._copying is not None:
            began = time.perf_counter()
            with suppress(CancelledError):  # the process ends
                self._copying.result()
            self._copying = None
            self.copy_seconds += time.perf_counter() - began

    def _give_up(self, error: Exception, plan: int, step: int) -> None:
        log.warning("no snapshot of step %d: %s", step, error)
        if isinstance(error, BadSnapshot):
            self._layouts = None  # there is more state than at first: it is measured anew
        self._step(lambda old: snapshotting.freed(old, plan, step))

    def measure(self, step: int, layouts: Holdings, state: Callable[[], LocalState]) -> None:
        """Has files made for this rank's share of a plan's state, beside training: call it before the plan's
        first step where all of its state is there, so that the step has a snapshot. `voted` does it after that
        step."""
        self._layouts = layouts
        try:
            self._share = shares(layouts)[self._welcome().device]
            local = state()
            need = size_of(pieces(local, self._share), without_planes(local, self._share))
        except (NotElementWise, RuntimeError) as error:
            self._give_up(error, layouts.plan.number, step)
            return
        self._step(lambda old: snapshotting.sized(old, layouts.plan.number, need))

    def _copy(self, step: int, file: MemoryFile, layouts: Holdings, state: LocalState) -> None:
        held, small, me = pieces(state, self._share), without_planes(state, self._share), self._welcome()
        file.prepare(held)
        hand_over = partial(self._hand_over, me, step, file, layouts.plan, held, small)
        versions, updated = [piece.values._version for piece in held], self._accelerator.now()

        def copy() -> None:
            try:
                self._accelerator.use()  # this thread is another than the training's
                file.copy(held, updated)
                _refuse_writes(held, versions)
            except Exception as error:  # also what nobody thought of: the slot must come free
                self._give_up(error, layouts.plan.number, step)
            else:
                self._beside.run(hand_over)

        self._copying = self._copier(copy)

    def end(self) -> None:
        """Ends the threads after the work that they are at; waits for each 5 s at most."""
        self._copier.end(_LEAVE_SECONDS)
        self._beside.end(_LEAVE_SECONDS)

    # -- what the control thread does ------------------------------------------------------------------------

    def freed(self, plan: int, step: int) -> None:
        """The agent let this snapshot go."""
        self._step(lambda old: snapshotting.freed(old, plan, step))

    def welcomed(self) -> None:
        """Another agent let this worker in, or this one another incarnation: files that were handed over are
        not this worker's any more."""
        self._step(snapshotting.left)

    # -- what the threads beside do --------------------------------------------------------------------------

    def _step(self, change: Callable[[snapshotting.SnapshotState], snapshotting.SnapshotStep]) -> None:
        with self._lock:
            self._state, makes = change(self._state)
            for make in makes:
                self._files[make.slot] = None
                self._beside.run(partial(self._make, make))

    def _make(self, make: snapshotting.Make) -> None:
        try:
            self._accelerator.use()  # this thread is another than the training's
            file = MemoryFile(make.size, self._accelerator)
        except (OSError, MemoryError, RuntimeError) as error:  # the last of a device that registers the memory
            log.warning("no snapshots: there is no memory for files of %d MiB: %s", make.size >> 20, error)
            self._step(lambda old: snapshotting.unmade(old, make.slot, make.size))
            return
        with self._lock:
            self._files[make.slot] = file
        self._step(lambda old: snapshotting.made(old, make.slot, make.size))

    def _hand_over(
        self, me: Welcome, step: int, file: MemoryFile, plan: JobPlan, held: Sequence[Piece], small: LocalState
    ) -> None:
        """`held` serves to describe what was copied; its values are of a later step by now."""
        try:
            self.bytes = file.close(self._job, me.device, plan.number, step, held, small)
        except Exception as error:  # also what nobody thought of: the slot must come free
            self._give_up(error, plan.number, step)
            return
        made = Held(
            job=self._job,
            device=me.device,
            incarnation=me.incarnation,
            plan=plan.number,
            step=step,
            node=node_of(me.device),
            size=self.bytes,
            every=self._state.every,
            seconds=self._cost_before,
        )
        first = plan.members[0] == me.device
        self._tell(Snapped(held=made, plan=plan if first else None), file.fd)


def _refuse_writes(held: Sequence[Piece], versions: Sequence[int]) -> None:
    """Raises RuntimeError where torch counted a write to a piece since `versions` were read."""
    for (item, *_, values), version in zip(held, versions, strict=True):
        if values._version != version:
            raise RuntimeError(
                f"the script wrote to {item.name} while it was copied: do so within the optimizer's step, in a "
                "hook of register_step_post_hook"
            )
