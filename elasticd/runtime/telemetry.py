"""What a step cost on this device, by clocks alone: computation apart from communication.

The host's clock tells where the host computes. For a device that computes behind its back, `spans` tell.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from elasticd_planner.lengths import bucket
from elasticd_planner.measurement import Measurement

from elasticd.runtime.spans import Spans
from elasticd.runtime.stopwatch import INSIDE, Stopwatch

#: Bytes of a page of memory.
_PAGE = os.sysconf("SC_PAGE_SIZE")
#: What a block's computation is told apart in.
PASSES = ("blocks", "forward", "backward", "again")


def resident() -> int:
    """Bytes of memory that this process has now; 0 where the system does not say."""
    try:
        return int(os.pread(_statm(os.getpid()), 128, 0).split()[1]) * _PAGE
    except OSError:
        return 0


@lru_cache(maxsize=1)
def _statm(pid: int) -> int:
    """Open as long as the process lives: it is read in every step."""
    return os.open(f"/proc/{pid}/statm", os.O_RDONLY | os.O_CLOEXEC)


class Telemetry:
    """Collects one step's times. Computation of a section is its wall time less what was spent in the
    tensor-parallel group meanwhile. `memory` gives the bytes in use; `spans` the times of a device that
    computes by itself."""

    def __init__(
        self,
        device: str,
        stopwatch: Stopwatch,
        memory: Callable[[], int] = resident,
        spans: Spans | None = None,
    ) -> None:
        self._device, self._stopwatch, self._memory, self._spans = device, stopwatch, memory, spans
        stopwatch.marks = spans
        self.begin()

    def begin(self) -> None:
        self._start = time.perf_counter()
        self._stopwatch.take()
        self._compute = dict.fromkeys((*PASSES, "embed", "head", "optimizer"), 0.0)
        self._squares, self._longest, self._lengths = 0.0, 0, dict[int, int]()
        self._work, self._tokens, self._micro_batches = 0.0, 0, 0
        self._modalities: dict[str, int] = {}
        if self._spans is not None:  # passes since the last step, of an evaluation, are no part of this one
            self._compute["optimizer"] += self._spans.take().get("optimizer", 0.0)

    def compute(self, kind: str) -> Computing:
        """A context that times a section of kind "embed" or "head", the "forward" or "backward" pass of a block
        ("blocks": either; "again": a forward pass that is run once more), or the "optimizer"."""
        return Computing(self._compute, kind, self._stopwatch, self._spans)

    def named(self, batch: Any) -> None:
        """A micro-batch that this device read: what it names of its modalities, as {"image": 3}."""
        counts = batch.get("modalities") if isinstance(batch, Mapping) else None
        if isinstance(counts, Mapping):
            for name, count in counts.items():
                self._modalities[str(name)] = self._modalities.get(str(name), 0) + int(count)

    def worked(self, tokens: int, layers: int, share: float, length: int = 0) -> None:
        """A micro-batch of `tokens`, in sequences of `length` with their padding (0: not known), went through
        `layers` blocks of which this device holds `share`."""
        self._tokens += tokens
        self._micro_batches += 1
        self._work += tokens * layers * share
        if length:
            self._squares += tokens * length
            self._longest = max(self._longest, length)
            at = bucket(length)
            self._lengths[at] = self._lengths.get(at, 0) + tokens // length

    def finish(self, plan: int, step: int) -> Measurement:
        spent, compute = self._stopwatch.take(), self._compute
        if self._spans is not None:
            for kind, seconds in self._spans.take().items():
                to = spent if kind == INSIDE else compute
                to[kind] = to.get(kind, 0.0) + seconds
        return Measurement(
            device=self._device,
            plan=plan,
            step=step,
            tokens=self._tokens,
            block_seconds=compute["blocks"] + compute["forward"] + compute["backward"],
            forward_seconds=compute["forward"],
            backward_seconds=compute["backward"],
            block_work=self._work,
            again_seconds=compute["again"],
            embed_seconds=compute["embed"],
            head_seconds=compute["head"],
            optimizer_seconds=compute["optimizer"],
            tensor_seconds=spent.get("tensor", 0.0),
            boundary_seconds=spent.get("boundary", 0.0),
            reduce_seconds=spent.get("reduce", 0.0),
            vote_seconds=spent.get("vote", 0.0),
            input_seconds=spent.get("input", 0.0),
            step_seconds=time.perf_counter() - self._start,
            micro_batches=self._micro_batches,
            squares=self._squares,
            longest=self._longest,
            lengths=self._lengths,
            modalities=self._modalities,
            memory_bytes=self._memory(),
        )


class Computing:
    """One section's time: what it took without the communication in it. Nothing is counted where it fails."""

    __slots__ = ("_began", "_compute", "_kind", "_spans", "_stopwatch")

    def __init__(
        self, compute: dict[str, float], kind: str, stopwatch: Stopwatch, spans: Spans | None = None
    ) -> None:
        self._compute, self._kind, self._stopwatch, self._spans = compute, kind, stopwatch, spans

    def __enter__(self) -> None:
        if self._spans is not None:
            self._spans.begin(self._kind)
            return
        self._began = time.perf_counter() - self._stopwatch.read("tensor")

    def __exit__(self, failed: object, *_: object) -> None:
        if self._spans is not None:
            self._spans.end(counts=failed is None)
        elif failed is None:
            self._compute[self._kind] += time.perf_counter() - self._stopwatch.read("tensor") - self._began
