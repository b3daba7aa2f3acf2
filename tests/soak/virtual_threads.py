"""Threads on the simulator's clock: code that blocks runs as it is, and one thread at a time.

`VirtualThreads` stands in for the modules `threading` and `time` in a module of the product. A thread of it is
a thread of the machine that runs only while the engine waits for it: from the event that wakes it to the next
`wait` or `join`, which take their seconds from the engine. So two runs are the same run.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

from elasticd.simulator.engine import EventEngine

#: Seconds of the machine's clock after which a thread that does not come back is a defect of a test.
STUCK_SECONDS = 120.0


class ProcessEnded(BaseException):
    """Raised in a thread whose process was killed."""


class Process:
    """Threads that end together. `alive` is False once it was killed."""

    def __init__(self, threads: VirtualThreads) -> None:
        self._all, self.alive = threads, True
        self.threads: list[VirtualThread] = []
        self.waiting: list[VirtualThread] | None = None  # what is due while it is held

    def start(self, work: Callable[[], None]) -> VirtualThread:
        """Runs `work` on a thread of this process, from the next event on."""
        return VirtualThread(self._all, work, process=self).start()

    def kill(self) -> None:
        """All its threads end where they are, without another word."""
        self.alive, self.waiting = False, None
        for thread in [*self.threads]:
            thread.resume()

    def hold(self) -> None:
        """Nothing runs until `release`, as in a process that is stopped."""
        if self.waiting is None:
            self.waiting = []

    def release(self) -> None:
        """Runs the calls that were due meanwhile, in its order."""
        waiting, self.waiting = self.waiting or [], None
        for thread in waiting:
            self._all.later(thread)


class VirtualThread:
    """`threading.Thread`, as far as it is used."""

    def __init__(self, threads: VirtualThreads, target: Callable[[], None], *, process: Process) -> None:
        self._all, self._target, self.process = threads, target, process
        self._turn = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.begun = self.ended = False
        self._joining: list[VirtualThread] = []
        process.threads.append(self)

    def start(self) -> VirtualThread:
        self.begun = True
        self._thread.start()
        self._all.later(self)
        return self

    def is_alive(self) -> bool:
        return self.begun and not self.ended

    def join(self, timeout: float | None = None) -> None:
        running = self._all.running
        if running is None:
            raise RuntimeError("only a thread of the simulation waits")
        if self.is_alive():
            self._joining.append(running)
            running.pause()

    def resume(self) -> None:
        """Lets it run until it waits again or ends; only for the engine."""
        if not self.is_alive():
            return
        if self.process.waiting is not None:
            self.process.waiting.append(self)
            return
        before, self._all.running = self._all.running, self
        self._turn.release()
        if not self._all.engine_turn.acquire(timeout=STUCK_SECONDS):
            raise RuntimeError("a simulated thread neither waits nor ends")
        self._all.running = before

    def pause(self) -> None:
        """Lets the engine go on, until this thread is resumed."""
        self._all.engine_turn.release()
        self._turn.acquire()
        if not self.process.alive:
            raise ProcessEnded

    def _run(self) -> None:
        self._turn.acquire()
        try:
            if self.process.alive:
                self._target()
        except ProcessEnded:
            pass
        except Exception as error:
            self._all.errors.append(f"{type(error).__name__}: {error}")
        finally:
            self.ended = True
            self.process.threads.remove(self)
            for waiting in self._joining:
                self._all.later(waiting)
            self._all.engine_turn.release()


class VirtualEvent:
    """`threading.Event`."""

    def __init__(self, threads: VirtualThreads) -> None:
        self._all, self._set = threads, False
        self._waiting: dict[int, VirtualThread] = {}

    def is_set(self) -> bool:
        return self._set

    def clear(self) -> None:
        self._set = False

    def set(self) -> None:
        self._set = True
        waiting, self._waiting = self._waiting, {}
        for thread in waiting.values():
            self._all.later(thread)

    def wait(self, timeout: float | None = None) -> bool:
        running = self._all.running
        if running is None:
            raise RuntimeError("only a thread of the simulation waits")
        if not self._set and (timeout is None or timeout > 0):
            number = next(self._all.numbers)
            self._waiting[number] = running
            if timeout is not None:
                self._all.engine.after(timeout, lambda: self._late(number))
            running.pause()
        return self._set

    def _late(self, number: int) -> None:
        thread = self._waiting.pop(number, None)
        if thread is not None:
            thread.resume()


class VirtualThreads:
    """The threads of one simulation; `errors` are those that ended one."""

    Lock = staticmethod(threading.Lock)  # which nobody holds while he waits

    def __init__(self, engine: EventEngine) -> None:
        self.engine = engine
        self.engine_turn = threading.Semaphore(0)
        self.running: VirtualThread | None = None
        self.numbers = itertools.count()
        self.errors: list[str] = []

    def process(self) -> Process:
        """Another process, without threads."""
        return Process(self)

    def later(self, thread: VirtualThread) -> None:
        """Has the engine resume it, after the event that is being played."""
        self.engine.after(0.0, thread.resume)

    # -- what modules of the product call ---------------------------------------------------------------------

    def Thread(  # as `threading` has it
        self, *, target: Callable[[], None], name: str = "", daemon: bool = True
    ) -> VirtualThread:
        if self.running is None:
            raise RuntimeError("only a thread of the simulation starts others")
        return VirtualThread(self, target, process=self.running.process)

    def Event(self) -> VirtualEvent:
        return VirtualEvent(self)

    def current_thread(self) -> VirtualThread | None:
        return self.running

    def monotonic(self) -> float:
        return self.engine.now()
