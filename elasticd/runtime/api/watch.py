"""`elasticd.watch()`: detects stragglers among the processes of a script in restart mode.

It measures, in each optimizer step of each process, the seconds from the end of the last `optimizer.step()` to
the last gradient of this process, without the seconds in which Python code waited for collectives. That is the
process' own computation, with its data loading. DDP starts its reductions during the backward pass and waits
for them after the last gradient, so its communication, overlapped or not, is not measured. FSDP2 waits for its
gathers and reductions in Python, and these waits are subtracted. Two things remain in the result: processor
time of communication in the background, and the broadcast of a DDP module's buffers (which can make other ranks
look as slow as the first one, never slower).
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.distributed import Work
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from elasticd.backoff import jittered
from elasticd.codec.message import encode
from elasticd.runtime.exits import refuse_in_one_line
from elasticd.version import __version__
from elasticd.wire import unix_socket
from elasticd.wire.rendezvous import Lap, Watching

_RETRY_SECONDS = 5.0
_watch: StepWatch | None = None


def watch() -> StepWatch:
    """Measures every optimizer step of this process, and reports it to the agent.

    Call it once, anywhere before training. If the work of a step differs between processes or steps, as with
    sequences of unequal length, call `watch().work(tokens)` before each `optimizer.step()`. Outside of
    elasticd's restart mode it does nothing.
    """
    global _watch
    if _watch is None:
        place = _place()
        _watch = StepWatch(_Reports(place).send if place is not None else None)
    return _watch


class StepWatch:
    """The hooks into torch, and the clocks of a step."""

    def __init__(self, report: Callable[[Lap], None] | None) -> None:
        """Args: report: called after each step; None: nothing is measured."""
        self._report = report
        self._first: int | None = None
        self._step = 0
        self._work = 0.0
        self._begin: float | None = None
        self._waited = 0.0
        self._last: tuple[float, float] | None = None
        self._hooks: list[Any] = []
        self._wait = Work.wait
        if report is not None:
            self._hooks += [
                register_optimizer_step_pre_hook(self._before_step),
                register_optimizer_step_post_hook(self._after_step),
            ]
            Work.wait = self._timed_wait()  # type: ignore[method-assign]

    def work(self, amount: float) -> None:
        """Adds to the work of this step. The unit, for example tokens, must be the same in all processes."""
        self._work += amount

    def close(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        Work.wait = self._wait  # type: ignore[method-assign]

    def _timed_wait(self) -> Callable[..., Any]:
        waiting = self._wait

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return waiting(work, *args, **kwargs)
            finally:
                self._waited += time.perf_counter() - start

        return wait

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._report is None or self._first not in (None, id(optimizer)):
            return
        if self._first is None:
            self._adopt(optimizer)
            return
        now = time.perf_counter()
        if self._begin is not None:
            until, waited = self._last or (now, self._waited)
            self._step += 1
            seconds = max(until - self._begin - waited, 1e-9)
            self._report(Lap(step=self._step, seconds=seconds, wall=now - self._begin, work=self._work or 1.0))
            self._begin = None  # torch calls the hook again if the step calls that of a base class

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._first == id(optimizer):
            self._begin, self._waited, self._work, self._last = time.perf_counter(), 0.0, 0.0, None

    def _adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Measures the steps of this optimizer, the first one that made a step."""
        self._first = id(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        if any(p.device.type != "cpu" for p in parameters):
            self._report = None
            self.close()
            _say("watch() measures training on CPUs alone so far: nothing is reported")
            return
        self._hooks += [p.register_post_accumulate_grad_hook(self._arrived) for p in parameters]

    def _arrived(self, parameter: torch.Tensor) -> None:
        self._last = (time.perf_counter(), self._waited)


class _Reports:
    """Sends reports to the agent without blocking. A report that it does not take at once is dropped."""

    def __init__(self, place: Watching) -> None:
        self._place = place
        self._path = unix_socket.default_path()
        self._sock: socket.socket | None = None
        self._again = 0.0
        self._connect()
        if self._sock is None:
            _say(f"watch() finds no agent at {self._path}: it goes on trying")

    def send(self, lap: Lap) -> None:
        """Sends a report, and connects before that if it is time to try."""
        if self._sock is None and time.monotonic() >= self._again:
            self._connect()
        if self._sock is None:
            return
        try:
            unix_socket.send(self._sock, encode(lap))
        except BlockingIOError:
            return
        except OSError:
            self._sock.close()
            self._sock = None

    def _connect(self) -> None:
        self._again = time.monotonic() + jittered(_RETRY_SECONDS)
        with suppress(OSError):
            sock = unix_socket.connect(self._path)
            unix_socket.send(sock, encode(self._place))
            sock.setblocking(False)
            self._sock = sock


def _place() -> Watching | None:
    """This process in its rendezvous round, from the environment; None outside of restart mode."""
    place = os.environ.get(unix_socket.ROUND_VARIABLE)
    if place is None:
        refuse_in_one_line()  # what follows is an `init_process_group`, which needs a launcher
        _say(
            "watch() does nothing here: this process was not started by 'elasticd run', or by torchrun with "
            "mode=restart"
        )
        return None
    number, nodes, least = map(int, place.split(","))
    return Watching(
        job=os.environ["TORCHELASTIC_RUN_ID"],
        torchrun=os.environ[unix_socket.TORCHRUN_VARIABLE],
        local_rank=int(os.environ.get(unix_socket.SLOT_VARIABLE) or os.environ["LOCAL_RANK"]),
        pid=os.getpid(),
        round=number,
        world=int(os.environ["WORLD_SIZE"]),
        nodes=nodes,
        least=least,
        release=__version__,
    )


def _say(text: str) -> None:
    print(f"elasticd: {text}", file=sys.stderr, flush=True)
