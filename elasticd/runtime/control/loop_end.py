"""The end of a script's loop: its last step, a `break`, an exception, a signal, or the interpreter's end."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable, Generator
from typing import Any

from elasticd.codec.message import Message
from elasticd.runtime.control.control import Control
from elasticd.runtime.control.one_process import EndSignals
from elasticd.runtime.control.preemption_notice import PreemptionNotice
from elasticd.runtime.control.user_exceptions import Uncaught, UserExceptionExit
from elasticd.runtime.exits import Drained, JobOver, JobStopped, is_told

log = logging.getLogger(__name__)


class LoopEnd:
    """The end of this process's part in a job, at most one. It hears signals from the beginning, unless the job
    is this process alone.

    Attributes:
        notice: hears the signals by which this process is asked to end.
        uncaught: hears of an exception that ends the main thread.
        farewell: takes leave of the other ranks.
        left: the script left the loop before its last step.
        finished: all steps are made.
        failed: the script's code raised.
        ended: threads and groups are ended.
    """

    def __init__(
        self,
        control: Control,
        *,
        make_notice: Callable[[], PreemptionNotice | EndSignals],
        depart: Callable[[], None],
        give_state: Callable[[Exception], None],
        end_threads: Callable[[], None],
    ) -> None:
        """
        Args:
            control: the way to the leader.
            make_notice: makes what hears the signals.
            depart: takes leave of the others, after the last step or before it.
            give_state: called with an exception of the script's code; tells the leader, and returns or raises
                JobStopped, JobOver or Drained once the state here is of no more use to other ranks.
            end_threads: ends the threads that copy the state, and all groups.
        """
        self._control, self._make_notice = control, make_notice
        self._give_state, self._end_threads = give_state, end_threads
        self._pid = os.getpid()
        self.left = self.finished = self.failed = self.ended = False
        self.uncaught = Uncaught(self.fail_later)
        self.farewell = UserExceptionExit(depart, control.alone)
        self.notice = make_notice()
        if not control.alone:
            self.notice.install()

    @property
    def forked(self) -> bool:
        """True in a child by fork of the process that made the job. It has no part in it, and ends
        without a word: what it would say, or shut, is its parent's."""
        return os.getpid() != self._pid

    def finish(self) -> None:
        """All steps are made. With other ranks, this one stays until the script ends, for what it does after
        the loop."""
        self.finished = True
        self.notice.restore()
        self.uncaught.restore()
        if self._control.alone or threading.current_thread() is not threading.main_thread():
            self.farewell.now()
        else:
            self.farewell.at_end()

    def leave_later(self, handled: BaseException | None) -> None:
        """The loop was left, by `break` or by an exception of its body, which may reach `fail_later`.

        Args:
            handled: the exception that the script handles around the loop, if it is inside an `except`.
        """
        self.left = True
        self.notice.restore()
        self.farewell.later(handled)

    def fail_later(self, error: Exception) -> None:
        """An exception ends the main thread. If the loop's body raised it, this rank is still running."""
        if self.left and not self.farewell.withdrawn():
            return
        if self.left and not self._control.alone:
            self.notice = self._make_notice()
            self.notice.install()
        self.fail(error)

    def fail(self, error: Exception) -> None:
        """The script's code raised: tells the leader, and keeps this process while its state is of use."""
        if self.failed or self.finished or self.ended or self.forked:
            return
        self.failed = True
        try:
            self._give_state(error)
        except JobStopped as end:
            if not is_told(end):
                log.warning("%s", end.reason)
        except (JobOver, Drained):
            pass
        self.end_threads()

    def end_threads(self) -> None:
        """Ends threads and groups. An interpreter that ends while a thread is inside gloo aborts."""
        if self.forked or self.ended:
            return
        self.ended = True
        self._end_threads()

    def part(self, goodbye: Message) -> None:
        """Ends threads and groups, and says goodbye."""
        self.end_threads()
        self.uncaught.restore()
        self._control.close(goodbye)


def leave_at_exit(running: Generator[Any, Any, Any]) -> None:
    """Has a loop that the script does not finish left at the end of the script, while threads can still be
    started: not at that of the interpreter, which drops its objects last."""
    atexit.register(_leave_unfinished, weakref.ref(running))


def _leave_unfinished(running: weakref.ref[Generator[Any, Any, Any]]) -> None:
    if (unfinished := running()) is not None:
        unfinished.close()
