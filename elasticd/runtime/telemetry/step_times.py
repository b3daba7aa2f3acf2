"""Times of a step on this device, by clocks alone: computation apart from communication.

The host's clock tells where the host computes. For a device that computes behind its back, `spans` tell. Each
module that the device computes with has a `Telemetry` of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from elasticd_planner.spec.batch import BatchSummary
from elasticd_planner.spec.measurement import Measurement, ModuleMeasurement
from elasticd_planner.spec.sequence_lengths import bucket

from elasticd.runtime.accelerator import CPU
from elasticd.runtime.telemetry.comm_timer import INSIDE, Stopwatch
from elasticd.runtime.telemetry.device_timer import DeviceTimer

#: What a block's computation is told apart in.
PASSES = ("blocks", "forward", "backward", "recompute")
#: Communication that is told apart by modules.
_OF_MODULES = ("tensor", "reduce")


#: Passes of which the device says one time for all kinds of computation, and those kinds.
CAPTURED, _KINDS = "captured", ("embed", "forward", "head", "backward")


class SequenceHere(NamedTuple):
    """The part of a sequence on this device."""

    tokens: int  #: here, padding included
    length: int  #: of the whole sequence, padding included
    begins: bool  #: its first token is here, so that it is counted here


class _Counts(NamedTuple):
    """The tokens that a step's passes were on: as in `Measurement`."""

    tokens: int
    work: float
    squares: float
    longest: int
    shortest: int
    sequence_tokens: int
    lengths: dict[int, int]


class Telemetry:
    """Collects one step's times. Computation of a section is its wall time less what was spent in the
    tensor-parallel group meanwhile. `memory` gives the bytes in use; `spans` the times of a device that
    computes by itself."""

    def __init__(
        self,
        device: str,
        stopwatch: Stopwatch,
        memory: Callable[[], int] = CPU.used_bytes,
        spans: DeviceTimer | None = None,
    ) -> None:
        self._device, self._stopwatch, self._memory, self._spans = device, stopwatch, memory, spans
        stopwatch.marks = spans
        self._worked: list[tuple[int, float, Sequence[SequenceHere]]] = []
        self._modalities: dict[str, int] = {}
        #: Of each kind of computation its share in all passes, by the last step without captured ones.
        self._shares: dict[str, float] = {}
        self._optimizer = 0.0  # seconds of the optimizer in the last step, if they are known by now
        self.begin()

    def begin(self) -> None:
        """A step begins: all times and counts start at 0."""
        self._start = time.perf_counter()
        self._stopwatch.take()
        self._compute = dict.fromkeys((*PASSES, "embed", "head", "optimizer", CAPTURED), 0.0)
        self._apart = dict.fromkeys(_OF_MODULES, 0.0)
        self.forget()
        self._compute["optimizer"], self._optimizer = self._optimizer, 0.0

    def forget(self) -> None:
        """Drops what was measured since the last step, but for its optimizer. An evaluation is a part of no
        step, and may have any number of passes."""
        self._worked, self._modalities = [], {}
        if self._spans is not None:
            self._optimizer += self._spans.take().get("optimizer", 0.0)

    def mark(self) -> None:
        """Begins a part, whose name `passed` gives."""
        if self._spans is not None:
            self._spans.mark()
        else:
            self._since = time.perf_counter() - self._stopwatch.inside

    def passed(self, kind: str) -> None:
        """Adds the seconds since the mark to a kind of computation, and sets the mark anew.

        What fails before it is passed counts for nothing.

        Args:
            kind: "embed"; "head"; the "forward" or "backward" pass of blocks ("blocks": either); "recompute", a
                forward pass that the backward pass repeats; "optimizer"; or `CAPTURED`, the passes of a
                micro-batch together, whose seconds are parted as those of eager passes were.
        """
        if self._spans is not None:
            self._spans.passed(kind)
        else:
            now = time.perf_counter() - self._stopwatch.inside
            self._compute[kind] += now - self._since
            self._since = now

    def named(self, batch: Any) -> None:
        """A micro-batch that this device read: what it names of its modalities, as {"image": 3}."""
        counts = batch.get("modalities") if isinstance(batch, Mapping) else None
        if isinstance(counts, Mapping):
            for name, count in counts.items():
                self._modalities[str(name)] = self._modalities.get(str(name), 0) + int(count)

    def worked(self, tokens: int, layers: int, share: float, sequences: Sequence[SequenceHere] = ()) -> None:
        """A micro-batch went through `layers` blocks.

        Args:
            tokens: of the micro-batch, padding included.
            layers: the blocks.
            share: of each, that this device holds.
            sequences: those that its tokens are of. Empty: not known.
        """
        self._worked.append((tokens, layers * share, sequences))

    def block_seconds(self) -> float:
        """Seconds of computation of blocks in this step, as far as it has come; the device has passed it."""
        if self._spans is not None:
            for kind, seconds in self._spans.take().items():
                to = self._stopwatch.seconds if kind in INSIDE else self._compute
                to[kind] = to.get(kind, 0.0) + seconds
        return sum(self._compute[kind] for kind in PASSES)

    def _part_captured(self) -> None:
        """Gives the seconds of captured passes to the kinds of computation in them."""
        captured, self._compute[CAPTURED] = self._compute[CAPTURED], 0.0
        if captured:
            for kind, share in self._shares.items():
                self._compute[kind] += captured * share
        elif total := sum(self._compute[kind] for kind in _KINDS):
            self._shares = {kind: self._compute[kind] / total for kind in _KINDS}

    def finish(
        self,
        plan: int,
        step: int,
        slowdown: int = 0,
        batch: BatchSummary | None = None,
        longest_so_far: int = 0,
        modules: Mapping[str, Telemetry] | None = None,
        item_slowdowns: Mapping[str, int] | None = None,
        expert_rows: Mapping[int, Sequence[int]] | None = None,
    ) -> Measurement:
        """The measurement of the step that ends now.

        Args:
            plan: number of the plan in force.
            step: index of the step.
            slowdown: of this device's lane [64ths], see `Measurement`.
            batch: the packed batch of the step, if this device is to tell of it.
            longest_so_far: tokens of the longest sequence of any step.
            modules: the other modules that this device computes with, by name; all are of items.
            item_slowdowns: of its lanes in them [64ths], see `ModuleMeasurement`.
            expert_rows: of this device's lane by block and expert, if it is to tell of them.

        Returns:
            Times in seconds, work in tokens x blocks, memory in bytes.
        """
        slow = item_slowdowns or {}
        others = {name: each.measured(slow.get(name, 0)) for name, each in modules.items()} if modules else {}
        spent, compute = self._stopwatch.take(), self._compute
        if self._spans is not None:
            for kind, seconds in self._spans.take().items():
                to = spent if kind in INSIDE else compute
                to[kind] = to.get(kind, 0.0) + seconds
        self._part_captured()
        tokens, work, squares, longest, shortest, sequence_tokens, lengths = self._counts()
        return Measurement(
            device=self._device,
            plan=plan,
            step=step,
            tokens=tokens,
            block_seconds=compute["blocks"] + compute["forward"] + compute["backward"],
            forward_seconds=compute["forward"],
            backward_seconds=compute["backward"],
            block_work=work,
            again_seconds=compute["recompute"],
            embed_seconds=compute["embed"],
            head_seconds=compute["head"],
            optimizer_seconds=compute["optimizer"],
            tensor_seconds=spent.get("tensor", 0.0),
            slowdown=slowdown,
            batch=batch,
            longest_so_far=max(longest, longest_so_far),
            context_seconds=spent.get("context", 0.0),
            boundary_seconds=spent.get("boundary", 0.0),
            reduce_seconds=spent.get("reduce", 0.0),
            vote_seconds=spent.get("vote", 0.0),
            input_seconds=spent.get("input", 0.0),
            step_seconds=time.perf_counter() - self._start,
            micro_batches=len(self._worked),
            squares=squares,
            longest=longest,
            shortest=shortest,
            sequence_tokens=sequence_tokens,
            lengths=lengths,
            modalities=self._modalities,
            memory_bytes=self._memory(),
            modules=others,
            expert_rows={block: tuple(rows) for block, rows in (expert_rows or {}).items()},
        )

    @contextmanager
    def apart(self, label: str) -> Iterator[None]:
        """Around passes ("tensor") or sums ("reduce") of a module of items: what is communicated in them under
        this label counts for that module."""
        stopwatch = self._stopwatch
        marks, stopwatch.marks = stopwatch.marks, self._spans
        before = stopwatch.read(label)
        try:
            yield
        finally:
            stopwatch.marks = marks
            self._apart[label] += stopwatch.read(label) - before

    def passes(self) -> tuple[float, int, float]:
        """Seconds of the passes of a module of items in this step, with the communication in them, as far as it
        has come; the tokens that they were on; the sum of squares of the tokens of each item."""
        self._read_apart()
        seconds = self.block_seconds() + self._compute["embed"] + self._compute["head"] + self._apart["tensor"]
        counted = self._counts()
        return seconds, counted.tokens, counted.squares

    def _read_apart(self) -> None:
        """Takes in the device's own times of a module of items."""
        if self._spans is not None:
            for kind, seconds in self._spans.take().items():
                to = self._apart if kind in INSIDE else self._compute
                to[kind] = to.get(kind, 0.0) + seconds

    def measured(self, slowdown: int = 0) -> ModuleMeasurement:
        """The measurement of a module of items in the step that ends now. What its communication took counts
        for no other module any more.

        Args:
            slowdown: of this device's lane [64ths].
        """
        compute, spent = self._compute, self._apart
        for label in _OF_MODULES:
            if spent[label] and (self._spans is None or label not in INSIDE):
                self._stopwatch.seconds[label] -= spent[label]
        self._read_apart()
        counts = self._counts()
        return ModuleMeasurement(
            block_seconds=compute["blocks"] + compute["forward"] + compute["backward"],
            block_work=counts.work,
            tokens=counts.tokens,
            items=len(self._worked),
            squares=counts.squares,
            forward_seconds=compute["forward"],
            backward_seconds=compute["backward"],
            again_seconds=compute["recompute"],
            embed_seconds=compute["embed"],
            head_seconds=compute["head"],
            tensor_seconds=spent["tensor"],
            reduce_seconds=spent["reduce"],
            slowdown=slowdown,
        )

    def _counts(self) -> _Counts:
        tokens = longest = shortest = sequence_tokens = 0
        work = squares = 0.0
        lengths: dict[int, int] = {}
        for each, blocks, sequences in self._worked:
            tokens += each
            work += each * blocks
            for here, length, begins in sequences:
                squares += here * length
                longest, shortest = max(longest, length), min(shortest or length, length)
                sequence_tokens += here
                if begins:
                    at = bucket(length)
                    lengths[at] = lengths.get(at, 0) + 1
        return _Counts(tokens, work, squares, longest, shortest, sequence_tokens, lengths)
