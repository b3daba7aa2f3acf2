"""What a step cost on this device, by clocks alone: computation apart from communication."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from elasticd_planner.measurement import Measurement

from elasticd.runtime.stopwatch import Stopwatch


class Telemetry:
    """Collects one step's times. Computation of a section is its wall time less what was spent in the
    tensor-parallel group meanwhile."""

    def __init__(self, device: str, stopwatch: Stopwatch) -> None:
        self._device, self._stopwatch = device, stopwatch
        self.begin()

    def begin(self) -> None:
        self._start = time.perf_counter()
        self._stopwatch.take()
        self._compute = {"embed": 0.0, "blocks": 0.0, "head": 0.0, "optimizer": 0.0}
        self._work, self._tokens, self._micro_batches = 0.0, 0, 0

    @contextmanager
    def compute(self, kind: str) -> Iterator[None]:
        """Times a section of kind "embed", "blocks" or "head", or the "optimizer"."""
        start, communicated = time.perf_counter(), self._stopwatch.read("tensor")
        yield
        spent = time.perf_counter() - start
        self._compute[kind] += spent - (self._stopwatch.read("tensor") - communicated)

    def worked(self, tokens: int, layers: int, share: float) -> None:
        """A micro-batch of `tokens` went through `layers` blocks of which this device holds `share`."""
        self._tokens += tokens
        self._micro_batches += 1
        self._work += tokens * layers * share

    def finish(self, plan: int, step: int) -> Measurement:
        spent = self._stopwatch.take()
        return Measurement(
            device=self._device,
            plan=plan,
            step=step,
            tokens=self._tokens,
            block_seconds=self._compute["blocks"],
            block_work=self._work,
            embed_seconds=self._compute["embed"],
            head_seconds=self._compute["head"],
            optimizer_seconds=self._compute["optimizer"],
            tensor_seconds=spent.get("tensor", 0.0),
            boundary_seconds=spent.get("boundary", 0.0),
            reduce_seconds=spent.get("reduce", 0.0),
            vote_seconds=spent.get("vote", 0.0),
            step_seconds=time.perf_counter() - self._start,
            micro_batches=self._micro_batches,
        )
