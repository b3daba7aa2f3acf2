"""The speed of this device while it has no work: a small matrix product, timed a few times."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from elasticd.runtime import threads
from elasticd.runtime.accelerator import CPU, Accelerator
from elasticd.wire.worker import Probed

#: Rows and columns of the product; its repetitions; seconds after which no further one begins.
SIZE = 256
REPEATS = 9
MOST_SECONDS = 1.0


def product(paced: Callable[[float], None], accelerator: Accelerator = CPU) -> tuple[float, ...]:
    """Seconds of each of some equal products. `paced` is called after each with the time at which it began: it
    sleeps on emulated devices."""
    accelerator.use()
    generator = torch.Generator().manual_seed(0)
    sides = (torch.rand(SIZE, SIZE, generator=generator, device="cpu") for _ in range(2))
    left, right = map(accelerator.put, sides)
    out = torch.empty_like(left)
    torch.mm(left, right, out=out)  # the first one loads what is needed
    accelerator.wait()
    seconds: list[float] = []
    began = time.perf_counter()
    while len(seconds) < REPEATS and time.perf_counter() - began < MOST_SECONDS:
        start = time.perf_counter()
        torch.mm(left, right, out=out)
        accelerator.wait()
        paced(start)
        seconds.append(time.perf_counter() - start)
    return tuple(seconds)


class Prober:
    """Answers an agent's `Probe`, on a thread of its own, while the device is `idle`; else it says nothing."""

    def __init__(
        self,
        idle: Callable[[], bool],
        paced: Callable[[float], None],
        send: Callable[[Probed], None],
        accelerator: Accelerator = CPU,
    ) -> None:
        self._idle, self._paced, self._send, self._accelerator = idle, paced, send, accelerator
        self._running = threading.Lock()

    def ask(self) -> None:
        """Returns at once. A probe that is under way is the answer to this one as well."""
        if self._idle() and self._running.acquire(blocking=False):
            threads.start(self._probe, "elasticd-probe")

    def _probe(self) -> None:
        try:
            seconds = product(self._paced, self._accelerator)
            if self._idle():  # it was given work meanwhile: what was measured is no measure
                self._send(Probed(seconds=seconds))
        finally:
            self._running.release()
