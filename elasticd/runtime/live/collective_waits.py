"""Waits for the script's own collectives: how long they take, and what becomes of them once a peer is lost.

The last update of a step may be followed by a collective, as of the loss for a log. By then the vote has
decided the step: where that collective fails the body of the step must come to its end all the same, or the
scheduler would lack a step that the parameters have. So its result is NaN then, and nothing is raised.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch.distributed import Work

from elasticd.runtime.live.world import functional_collectives as functional
from elasticd.runtime.telemetry.main_thread import MainThread, during
from elasticd.wire.main_thread import OTHER, SCRIPT


class CollectiveWaits:
    """Measures the waits of the thread that called `install`, until `remove`: `Work.wait`, and DTensors'.

    DDP waits for its reductions in C++, where nothing is measured.

    Args:
        decided: called with an error of a wait; returns whether the step's updates are all made, so that the
            result may be NaN.
        where: is told of the waits.
    """

    def __init__(self, decided: Callable[[Exception], bool], where: MainThread) -> None:
        self.seconds = 0.0  # waited so far
        self._decided, self._where = decided, where
        self._before: tuple[Any, Any] | None = None
        self._thread = 0

    def install(self) -> None:
        """Takes the place of torch's functions."""
        self._thread = threading.get_ident()
        self._before = of_work, of_tensor = Work.wait, functional.wait_tensor

        def wait(work: Any, *args: Any, **options: Any) -> Any:
            return self._wait(lambda: of_work(work, *args, **options), work.result, True)

        def wait_tensor(tensor: Any) -> Any:
            if torch.compiler.is_compiling():
                return of_tensor(tensor)
            return self._wait(lambda: of_tensor(tensor), lambda: [tensor], tensor)

        Work.wait = wait  # type: ignore[method-assign, assignment]
        functional.wait_tensor = wait_tensor

    def _wait(self, call: Callable[[], Any], results: Callable[[], Iterable[Any]], instead: Any) -> Any:
        if threading.get_ident() != self._thread:
            return call()
        began = time.perf_counter()
        try:
            place = self._where.place
            with during(self._where, OTHER if place == SCRIPT else place):
                return call()
        except RuntimeError as error:
            if not self._decided(error):
                raise
            with suppress(RuntimeError), torch.no_grad():  # of a work that has no result
                for tensor in results():
                    tensor.fill_(float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0)
            return instead
        finally:
            self.seconds += time.perf_counter() - began

    def remove(self) -> None:
        """Puts torch's functions back."""
        if self._before is not None:
            (Work.wait, functional.wait_tensor), self._before = self._before, None  # type: ignore[method-assign]
