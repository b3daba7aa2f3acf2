"""Work that all members of a plan do together between two steps: an evaluation, a full state dict.

The members agree before each task: each sends all others the number of its next task, the smallest number is
done first, and members with another number take part in it and drop the result. For that every process numbers
the tasks alike, see `BetweenSteps`. Devices on standby take no part.

As a rule the members of a plan are at the same place of the script, and their numbers are the same. A script
may ask on some ranks alone: those wait for the others, which are in the next step and wait for them, until the
leader sees that no main thread moves and fences the plan (`machines.job.faults.hangs`). And a fault may
interrupt a task: some members still wait for its end, others have begun the next step, and others joined by the
recovery and know nothing of it. So after a recovery the members agree before the next step, too.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from elasticd.runtime.comm.groups import Cancelled, PeerLost
from elasticd.runtime.control.user_exceptions import lost_within
from elasticd.runtime.engine.engine import Engine
from elasticd.runtime.exits import JobOver
from elasticd.runtime.switch.switcher import Switcher

log = logging.getLogger(__name__)

#: The number of the next step's training, which comes after all tasks.
_TRAIN = 1 << 62
#: A task's number is its count since the last step times this, plus its kind.
_KINDS = 1 << 20
#: Seconds that a member whose script left the loop waits for the others to leave theirs.
_LEAVE_SECONDS = 30.0

#: A task: called with the engine and the number of updates made.
Run = Callable[[Engine, int], Any]
T = TypeVar("T")


class BetweenSteps:
    """Runs tasks on all members of a plan, and recovers from faults during one."""

    def __init__(self, switcher: Switcher[Engine], known: Sequence[Run], closing: Run | None = None) -> None:
        """
        Args:
            switcher: has the engine of the plan in force.
            known: all tasks that can be asked for, in the same order in every process.
            closing: the task of `close`, which comes before all others.
        """
        self._switcher, self._known = switcher, (*known, *((closing,) if closing is not None else ()))
        if len(self._known) > _KINDS:
            raise ValueError(f"more than {_KINDS} things to do between steps")
        self._asked = 0

    def begin_step(self, engine: Engine) -> None:
        """Finishes, before a step, the tasks that other members of a recovered plan are still at.

        Raises:
            PeerLost: a member is lost.
            Cancelled: the plan ends.
        """
        if engine.after_recovery:
            self._until(engine, _TRAIN)
            engine.after_recovery = False
        self._asked = 0

    def run(self, kind: int) -> Any:
        """Runs the task `kind`, which all members ask for; a fault during it is recovered from here.

        Returns:
            Its result; None if this device is on standby, was left out by the recovery, or the job is over.
        """
        self._asked += 1
        mine = self._asked * _KINDS + kind

        def together(engine: Engine) -> Any:
            if not self._switcher.at_work:
                raise Cancelled("a fault came before it began")
            self._until(engine, mine)
            return self._known[kind](engine, self._switcher.step)

        return self.read(together)

    def read(self, call: Callable[[Engine], T]) -> T | None:
        """Calls `call` with the engine in force. A fault meanwhile is recovered from, and `call` is made again.

        Returns:
            As `run`.
        """
        while (engine := self._switcher.engine) is not None:
            try:
                return call(engine)
            except Exception as error:
                lost = lost_within(error, interrupted=engine.interrupted)
                if lost is None:
                    raise
                try:
                    self._switcher.peers_lost(lost)
                except JobOver:
                    log.warning(
                        "the others ended before what was asked for after the last step was done: call it on "
                        "every rank, without `if job.rank == 0`"
                    )
                    return None
        return None

    def all_leave(self, engine: Engine, step: int) -> bool:
        """Returns True if all members have left their loops after the same number of updates. Waits
        `_LEAVE_SECONDS` for them, at most."""
        left = _TRAIN + 1 + step
        numbers = list[int]()

        def meet() -> None:
            with suppress(PeerLost, Cancelled):
                numbers.extend(engine.everyone.meet(left))

        thread = threading.Thread(target=meet, name="elasticd-leave", daemon=True)
        engine.plan_groups.helped_by(thread)
        thread.start()
        thread.join(_LEAVE_SECONDS)
        return numbers == [left] * engine.everyone.size

    def close(self, engine: Engine) -> None:
        """Runs `closing` on all members of a recovered plan, on behalf of one whose script raised."""
        last = len(self._known) - 1  # a task's count is at least 1, so this number is smaller than any other
        self._until(engine, last)
        self._known[last](engine, self._switcher.step)

    def _until(self, engine: Engine, mine: int) -> None:
        """Takes part in the tasks of other members until that of the number `mine` is the next of all: the
        smallest number among the members' next tasks."""
        while (first := min(engine.everyone.meet(mine))) != mine:
            self._known[first % _KINDS](engine, self._switcher.step)
