"""A rank's side of checkpoints at work: copies its share at a step's end, writes it in a thread, closes it.

The machine in `machines.worker.checkpointing` says what to do and when; what a step waits for is the copy
alone. A checkpoint gets its name only when the leader has published it, by a write to the store that its key
fences: so a rank that was cut off and trains on alone never makes one that a later start would take.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from elasticd_migration.local_state import LocalState
from elasticd_planner.layout.holdings import Holdings
from elasticd_planner.layout.layouts import Item
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.model import frozen_names, fused_parameters

from elasticd.checkpoints import folder as folders
from elasticd.checkpoints.checksums import Damaged
from elasticd.checkpoints.disk import Disk, LocalDisk
from elasticd.checkpoints.folder_use import FolderUse
from elasticd.codec.message import Message
from elasticd.machines.worker import checkpointing
from elasticd.machines.worker.checkpointing import Status
from elasticd.records import JobSpec
from elasticd.runtime.accelerator import CPU, Accelerator
from elasticd.runtime.checkpoint.options import CheckpointingOptions
from elasticd.runtime.checkpoint.staging import Staging, pieces, shares, without_planes
from elasticd.runtime.checkpoint.writer import Task, origin_of, path_of, write_part, write_whole
from elasticd.runtime.threads import DaemonThreads
from elasticd.wire.worker import Saved, SaveFailed

log = logging.getLogger(__name__)

#: Seconds without a byte written, or without the word that a checkpoint is published, after which the end of a
#: job gives its last checkpoint up.
STALLED_SECONDS = 600.0
#: Seconds that ranks wait for their own part before they say again how far they are: less than a collective may
#: take, so that nobody waits in one for a rank that writes.
_ROUND_SECONDS = 20.0
#: Seconds that the end of a process waits for the thread that writes.
_LEAVE_SECONDS = 5.0


class _Stopped(Exception):
    """The checkpoint that is being written was given up, or the process ends."""


def _cause(error: BaseException) -> BaseException:
    """The error of the disk, or the order to stop, that another one came of; else the error itself."""
    at: BaseException | None = error
    while at is not None and not isinstance(at, OSError | _Stopped):
        at = at.__cause__ or at.__context__
    return error if at is None else at


class Saver:
    """Makes this rank's checkpoints. `tell` sends to the leader; `lost` says that nobody hears it any more;
    `names`, `pretrained` and `frozen` are the manifest's; `user` is for `FolderUse`, where no job saves. Raises
    ValueError where another job saves to the folder.

    The thread that trains calls `voted` after each vote, and `finish` after the last; `published` and `ask` are
    called by the control thread, `end` by whoever ends the process.
    """

    def __init__(
        self,
        options: CheckpointingOptions,
        spec: JobSpec,
        device: str,
        tell: Callable[[Message], None],
        lost: Callable[[], bool] = lambda: False,
        disk: Disk | None = None,
        accelerator: Accelerator = CPU,
        longest: Callable[[], int] = lambda: 0,
        names: Mapping[str, str] | None = None,
        pretrained: str = "",
        frozen: str = "",
        user: str = "",
    ) -> None:
        if options.path is None:
            raise ValueError("checkpointing: there is no folder to save to")
        self._use = FolderUse(options.path, user or f"job {spec.job}")
        self.options, self._folder = options, options.path
        self._spec, self._device, self._tell, self._lost = spec, device, tell, lost
        self._longest, self._pretrained, self._frozen = longest, pretrained, frozen
        self._names = dict(names or {})
        self._left_out = frozen_names(spec.specs) if frozen else frozenset[str]()
        self._disk: Disk = disk or LocalDisk()
        self._state = checkpointing.CheckpointState(every=options.every)
        self._changed = threading.Condition()
        self._published: set[str] = set()
        self._given_up: set[int] = set()
        self._completed = -1  # updates in the last checkpoint that this rank, as the first, gave its name
        self._moved_at = 0.0  # when the checkpoint under way last came forward
        self._why_failed = self._failure = ""
        self._task: Task | None = None
        self._staging = Staging(accelerator)
        self._share: tuple[int, dict[Item, tuple[Box, ...]]] | None = None
        self._writer = DaemonThreads("checkpoint")
        self._ending = False

    # -- what the training thread does ---------------------------------------------------------------------

    @property
    def word(self) -> int:
        """For the vote's record."""
        with self._changed:
            return self._state.word

    def voted(
        self,
        step: int,
        words: Sequence[int],
        layouts: Holdings,
        state: Callable[[], LocalState],
        *,
        begins: bool = True,
    ) -> None:
        """After the vote by which `step` updates are applied.

        Args:
            step: updates that are applied.
            words: of all ranks, in rank order.
            layouts: of the plan in force.
            state: gives this rank's state, by reference.
            begins: a checkpoint may begin; False: the job goes back to a state before this step.
        """
        due = checkpointing.due(self._state, step)
        self._feed(step, words, layouts, state, due=due, begins=begins)

    def finish(
        self,
        step: int,
        gather: Callable[[int], Sequence[int]],
        layouts: Holdings,
        state: Callable[[], LocalState],
    ) -> bool:
        """Makes the last checkpoint, of `step`, and returns when it is published or cannot be.

        Every member of the plan calls this, also one that recovered from a fault in the midst of it: then what
        some had begun is made anew. `gather` gives all members' words, in rank order.

        Returns:
            Whether there is a whole checkpoint of that step under its name; the same on every member.
        """
        tried = False
        while True:
            self._rest()
            with self._changed:
                busy = self._state.busy_word
            words = gather(busy)
            free = not any(words)
            if free and any(gather(int(self._completed == step))):
                return True
            if free and tried:
                return False
            self._feed(step, words, layouts, state, due=free)
            tried = tried or free

    def _feed(
        self,
        step: int,
        words: Sequence[int],
        layouts: Holdings,
        state: Callable[[], LocalState],
        *,
        due: bool,
        begins: bool = True,
    ) -> None:
        rank = layouts.plan.rank(self._device)
        with self._changed:
            self._state, effects = checkpointing.voted(
                self._state, step, words, rank, now_due=due, begins=begins
            )
        for effect in effects:
            match effect:
                case checkpointing.Begin():
                    self._begin(step, layouts, state)
                case checkpointing.Close():
                    self._put(self._close)
                case checkpointing.GiveUp():
                    self._give_up(effect)
                case checkpointing.Skip(reason=reason):
                    if rank == 0:
                        log.warning("no checkpoint of step %d: %s", step, reason)
                        plan = layouts.plan.number
                        self._tell(SaveFailed(step=step, plan=plan, reason=f"skips it: {reason}", skipped=True))

    def left(self) -> None:
        """This device stands by: it has no part in checkpoints."""
        self._drop(checkpointing.left)

    def went_back(self, step: int) -> None:
        """An engine with the state after `step` updates is in force: gives up a checkpoint of a later state."""
        if self._state.step not in self._given_up:
            self._drop(lambda state: checkpointing.went_back(state, step))

    def _drop(self, change: Callable[[checkpointing.CheckpointState], checkpointing.CheckpointStep]) -> None:
        with self._changed:
            self._state, effects = change(self._state)
        for effect in effects:
            assert isinstance(effect, checkpointing.GiveUp)
            self._give_up(effect)

    def _give_up(self, effect: checkpointing.GiveUp) -> None:
        """One rank logs it: the first that failed, which knows why, else the first of all."""
        self._given_up.add(effect.step)
        first = self._task is not None and self._task.rank == 0
        reports, logs = (effect.failed_here, effect.first) if effect.said else (first, first)
        reason = self._why_failed if effect.said else f"gives it up: {effect.reason}"
        if logs:
            log.warning("no checkpoint of step %d: %s %s", effect.step, self._device, reason)
        if reports and self._task is not None:
            self._report_failed(self._task, reason)
        self._put(self._let_go)

    def _begin(self, step: int, layouts: Holdings, state: Callable[[], LocalState]) -> None:
        plan = layouts.plan
        if self._share is None or self._share[0] != plan.number:
            self._share = plan.number, shares(layouts, self._left_out)[self._device]
        task = Task(
            origin=origin_of(self._spec, plan, step, self._longest()),
            path=path_of(self._folder, plan, step),
            device=self._device,
            members=plan.members,
            shapes={},
            fused=fused_parameters(self._spec.specs),
            small=LocalState(),
            names=self._names,
            pretrained=self._pretrained,
            frozen=self._frozen,
        )
        self._task, self._given_up = task, self._given_up - {step}
        self._completed = -1
        try:
            local, mine = state(), self._share[1]
            self._task = replace(
                task,
                held=self._staging.copy(pieces(local, mine)),
                shapes={item: layouts.layout(item).shape for item in mine if item in local.tensors},
                small=without_planes(local, mine),
            )
        except (RuntimeError, ValueError, MemoryError) as error:
            self._failed(task, error)
            return
        self._put(self._write)

    def _rest(self) -> None:
        """Waits until the thread has nothing under way, for a round at most; what stalls is given up."""
        deadline = time.monotonic() + _ROUND_SECONDS
        with self._changed:
            while self._state.status in (Status.WRITING, Status.BUSY):
                now, step = time.monotonic(), self._state.step
                if now - self._moved_at >= STALLED_SECONDS:
                    why = f"it did not come forward for {STALLED_SECONDS:g} s"
                    log.warning("no checkpoint of step %d: %s gives it up: %s", step, self._device, why)
                    if self._task is not None:
                        self._report_failed(self._task, f"gives it up: {why}")
                    self._given_up.add(step)
                    self._state = checkpointing.done(checkpointing.wrote(self._state, step, ok=False), step)
                if now >= deadline:
                    return
                self._changed.wait(0.5)

    def end(self) -> None:
        """Lets the thread leave what it is at: an interpreter that ends while it is in torch could abort."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        self._writer.end(_LEAVE_SECONDS)
        self._use.end()

    # -- what the control thread does ------------------------------------------------------------------------

    def ask(self) -> None:
        """The leader's word that a checkpoint is to be made now; it tells one rank."""
        with self._changed:
            self._state = checkpointing.asked(self._state)

    def published(self, name: str) -> None:
        """The leader's word, as read from the store."""
        with self._changed:
            self._published.add(name)
            self._changed.notify_all()

    # -- what the writing thread does ------------------------------------------------------------------------

    def _put(self, work: Callable[[Task], None]) -> None:
        assert self._task is not None
        self._moved_at = time.monotonic()
        self._writer.run(partial(work, self._task))

    def _check(self, step: int) -> None:
        if self._ending or step in self._given_up:
            raise _Stopped

    def _advance(self, step: int) -> None:
        """Before each block."""
        self._moved_at = time.monotonic()
        self._check(step)

    def _write(self, task: Task) -> None:
        try:
            write_part(self._disk, task, lambda: self._advance(task.step))
        except _Stopped:
            return  # `_let_go` follows
        except Exception as error:  # also what nobody thought of: the others wait for this rank's word
            if not isinstance(_cause(error), _Stopped):
                self._failed(task, error)
            return
        with self._changed:
            self._state = checkpointing.wrote(self._state, task.step, ok=True)
            self._changed.notify_all()

    def _failed(self, task: Task, error: Exception) -> None:
        """This is told when a vote has it as well: another rank may have given the checkpoint up by then, and
        removed the folder that this one writes to."""
        with self._changed:
            self._why_failed = f"could not write: {self._sentence(error)}"
            self._state = checkpointing.wrote(self._state, task.step, ok=False)
            self._changed.notify_all()

    @property
    def failure(self) -> str:
        """Why this rank could not do its part in a checkpoint, the last time; empty: it always could."""
        return self._failure

    def _report_failed(self, task: Task, reason: str) -> None:
        self._failure = reason
        self._tell(SaveFailed(step=task.step, plan=task.origin.plan, reason=reason))

    def _sentence(self, error: Exception) -> str:
        """Why nothing more could be written, in plain words: torch's writer hides what the disk said."""
        cause = _cause(error)
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"no space left in {self._folder}"
        if isinstance(cause, OSError) and cause.strerror:
            return f"{cause.strerror[0].lower()}{cause.strerror[1:]}: {cause.filename or self._folder}"
        return " ".join(str(cause).split())

    def _close(self, task: Task) -> None:
        """The first rank's: makes one checkpoint of all parts, and names it once it is published."""
        folder = self._folder
        try:
            serial = folders.next_serial(folders.scan(folder))
            write_whole(self._disk, task, serial, lambda: self._advance(task.step))
            if damage := folders.look(task.path).damage:
                raise Damaged(damage)
            if self._is_published(task):
                self._disk.rename(task.path, folder / task.name)
                self._disk.sync_folder(folder)
                self._completed = task.step
                self._retain()
        except _Stopped:
            pass
        except Exception as error:  # the next checkpoint waits until this one is done with
            if not isinstance(_cause(error), _Stopped):
                why = f"could not complete it: {self._sentence(error)}"
                log.warning("no checkpoint of step %d: %s %s", task.step, self._device, why)
                self._report_failed(task, why)
            self._remove(task)
        finally:
            self._free(task)

    def _is_published(self, task: Task) -> bool:
        """Waits for the leader's word, however long the store is away: nothing is decided without it."""
        self._tell(Saved(name=task.name, step=task.step, plan=task.origin.plan))
        with self._changed:
            while task.name not in self._published:
                self._check(task.step)
                if self._lost():
                    log.warning("the checkpoint of step %d stays unpublished: the agent is gone", task.step)
                    return False
                self._changed.wait(0.2)
            self._published.discard(task.name)
        return True

    def _retain(self) -> None:
        found = folders.scan(self._folder)
        for item in folders.superfluous(found, self.options.keep, self.options.keep_every):
            try:
                folders.remove(self._disk, item)
            except OSError as error:
                log.warning("%s is left behind: %s", item.path, error)

    def _let_go(self, task: Task) -> None:
        """Given up; after `_write`, on the same thread, so that nothing of it is at work here any more. Other
        ranks may still write: the last to let go leaves nothing behind."""
        self._remove(task)
        self._free(task)

    def _free(self, task: Task) -> None:
        with self._changed:
            self._state = checkpointing.done(self._state, task.step)
            self._changed.notify_all()

    def _remove(self, task: Task) -> None:
        try:
            self._disk.remove_folder(task.path)
        except OSError as error:
            log.warning("%s is left behind: %s", task.path, error)
