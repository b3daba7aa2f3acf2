"""The figures of one device: its host, its kernels, and a step beside plain torch's. Parts of `_on_a_gpu`.

Each part yields figures, a name and a value, as it has them. `Sizes` has the models of a device and of a trial
on the CPU; there what a GPU alone can do (a captured graph, the profiler's spans of kernels) has a stand-in
that takes the same way through this file, or says that there is none.
"""

from __future__ import annotations

import platform
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.utils
from _gpu_sides import LARGE, PEAKS, SMALL, TINY, Ours, Plain, Size, in_turns, parameters, ratio, silent
from torch import Tensor

from elasticd.runtime.accelerator import Accelerator
from elasticd.runtime.checkpoint.staging import pieces, shares, without_planes
from elasticd.runtime.engine import compiled_blocks
from elasticd.runtime.snapshot.memory_file import MemoryFile, size_of

Figures = Iterator[tuple[str, Any]]
#: Steps of ours before its passes are captured, and one in which they are.
EAGER_STEPS = 5
#: Sections of a pass whose backward passes are measured together and by themselves.
SECTIONS = 26


@dataclass(frozen=True)
class Sizes:
    """What is measured on a device."""

    small: Size
    large: Size
    repetitions: int  # of a call of the host
    matrices: int  # products of one kind
    copied: int  # bytes
    watched_seconds: float  # that each side is sampled for

    @classmethod
    def of(cls, accelerator: Accelerator) -> Sizes:
        """Those of a GPU; of the CPU, whose figures say nothing, the smallest."""
        if accelerator.immediate:
            tiny = Size(TINY, 16, 2, steps=1, turns=4, seconds=0.0)
            return cls(tiny, replace(tiny, masters=True), 20, 1, 1 << 20, 0.2)
        small = Size(SMALL, 1024, 4, steps=3, turns=40, seconds=20.0)
        large = Size(LARGE, 4096, 8, steps=1, turns=20, seconds=25.0, masters=True)
        return cls(small, large, 2000, 30, 1 << 30, 4.0)


# -- the machine -----------------------------------------------------------------------------------------------


def host(accelerator: Accelerator, sizes: Sizes) -> Figures:
    """Seconds of what the host does for a device: every other figure is to be read beside them."""
    yield "device", accelerator.text
    yield "torch", torch.__version__
    yield "python", platform.python_version()
    names = [
        line.split(":")[1] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    yield "processor", names[0].strip() if names else platform.processor()
    if accelerator.device.type == "cuda":
        asked = [
            "nvidia-smi",
            "--query-gpu=clocks.sm,clocks.max.sm,power.limit,temperature.gpu",
            "--format=csv",
        ]
        yield "clocks", subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    x, event = torch.zeros(8, device=accelerator.device), accelerator.event(timing=True)
    for name, call in (
        ("python_loop_us", lambda: [None for _ in range(1000)]),
        ("launch_us", lambda: x.add_(1)),
        ("event_us", event.record),
    ):
        yield name, _microseconds(accelerator, call, sizes.repetitions)
    for separate in (False, True):
        for threads in (False, True):
            spent = [_backward(accelerator, separate, threads) for _ in range(10)]
            where = "the device's thread" if threads else "the caller's thread"
            graphs = f"{SECTIONS} graphs" if separate else "one graph"
            yield f"backward_us: {SECTIONS} sections, {graphs}, in {where}", statistics.median(spent)


def _microseconds(accelerator: Accelerator, call: Callable[[], object], repetitions: int) -> float:
    """Of the host for a call, while the device may lag behind."""
    for _ in range(20):
        call()
    accelerator.wait()
    began = time.perf_counter()
    for _ in range(repetitions):
        call()
    spent = time.perf_counter() - began
    accelerator.wait()
    return spent / repetitions * 1e6


def _backward(accelerator: Accelerator, separate: bool, threads: bool) -> float:
    """Microseconds of the host for the backward pass of sections. `separate`: each is a graph."""
    options = {"device": accelerator.device}
    weight = torch.randn(8, 8, requires_grad=True, **options)
    x, ones = torch.randn(8, 8, **options), torch.ones(8, 8, **options)
    graphs: list[tuple[Tensor, Tensor]] = []
    for _ in range(SECTIONS):
        entered = x.detach().requires_grad_() if separate else x
        x = (entered @ weight) * 2
        graphs.append((entered, x))
    accelerator.wait()
    began = time.perf_counter()
    with torch.autograd.set_multithreading_enabled(threads):
        gradient: Tensor | None = ones
        for entered, out in reversed(graphs if separate else graphs[-1:]):
            torch.autograd.backward(out, gradient)
            gradient = entered.grad if separate else None
    return (time.perf_counter() - began) * 1e6


def kernels(accelerator: Accelerator, sizes: Sizes) -> Figures:
    """Operations a second of the large model's matrix products and bytes a second of copies: no step is
    quicker than these allow."""
    size, options = sizes.large, {"device": accelerator.device, "dtype": torch.bfloat16}
    config = size.config
    shapes = {
        "attention": (config.width, config.width),
        "up": (config.width, config.hidden),
        "down": (config.hidden, config.width),
        "head": (config.width, config.vocabulary),
    }
    for name, (inputs, outputs) in shapes.items():
        a, b = torch.randn(size.tokens, inputs, **options), torch.randn(outputs, inputs, **options)
        seconds = _seconds(accelerator, lambda: a @ b.t(), sizes.matrices)  # noqa: B023
        yield f"product_tflops: {name}", 2 * size.tokens * inputs * outputs / seconds / 1e12
    source = torch.empty(sizes.copied, dtype=torch.uint8, device=accelerator.device)
    to = torch.empty_like(source)
    yield "copy_bytes_per_second", 2 * sizes.copied / _seconds(accelerator, lambda: to.copy_(source), 10)
    yield "to_host", _to_host(accelerator, sizes.copied)


def _seconds(accelerator: Accelerator, call: Callable[[], object], repetitions: int) -> float:
    """Of the device for a call."""
    for _ in range(3):
        call()
    accelerator.wait()
    began = time.perf_counter()
    for _ in range(repetitions):
        call()
    accelerator.wait()
    return (time.perf_counter() - began) / repetitions


def _to_host(accelerator: Accelerator, size: int) -> float:
    """Bytes a second into a snapshot's memory over those into memory that the driver gave."""
    values = torch.ones(size, dtype=torch.uint8, device=accelerator.device)
    file = MemoryFile(size, accelerator)
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=not accelerator.immediate)

    def seconds(memory: Tensor) -> float:
        began = time.perf_counter()
        accelerator.to_host([(memory, values)])
        return time.perf_counter() - began

    pairs = [(seconds(pinned), seconds(file._raw)) for _ in range(10)][2:]
    return statistics.median(theirs / ours for theirs, ours in pairs)


# -- a step beside plain torch's -------------------------------------------------------------------------------


def pair(accelerator: Accelerator, name: str, size: Size, *, compiled: bool) -> Figures:
    """A step beside plain torch's: seconds, graphs, losses, the device's busy time, operations, memory."""
    if compiled:  # what modules keep of their first call (the rotary table) is then in no side's graphs
        Plain(replace(size, micro_batches=1), accelerator).step()
    sides: dict[str, Ours | Plain] = {}
    peaks, graphs = {}, {}
    for side, make in (("ours", Ours), ("plain", Plain)):
        others, before = _memory(accelerator), graphs_made()
        sides[side] = make(size, accelerator, compiled=compiled)
        losses = [sides[side].step()]
        _memory(accelerator, reset=True)
        losses.append(sides[side].step())
        peaks[side], graphs[side] = _peak(accelerator) - others, graphs_made() - before
        yield f"{name}: losses, {side}", losses
    if compiled:
        yield f"{name}: graphs", graphs
    ours, theirs = in_turns(accelerator, size, *(side.step for side in sides.values()))
    yield name, ratio(ours, theirs)
    yield f"{name}: milliseconds", {"ours": _median_ms(ours), "plain": _median_ms(theirs), "turns": len(ours)}
    if any(peaks.values()):
        yield f"{name}: peak memory", peaks["ours"] / peaks["plain"]
    busy = {side: busy_ms(accelerator, step.step) for side, step in sides.items()}
    yield f"{name}: the device is busy, milliseconds", busy
    peak = next((value for text, value in PEAKS.items() if text in accelerator.name), None)
    for side, seconds in (("ours", ours), ("plain", theirs)):
        rate = size.operations() / statistics.median(seconds)
        yield f"{name}: flops, {side}", rate
        yield f"{name}: mfu, {side}", rate / peak if peak else None
    yield f"{name}: parameters", parameters(size.config)


def _median_ms(seconds: list[float]) -> float:
    return statistics.median(seconds) * 1e3


def _memory(accelerator: Accelerator, *, reset: bool = False) -> int:
    """Bytes that tensors have on the device. `reset`: the peak counts from now on."""
    if accelerator.immediate:
        return 0
    if reset:
        torch.accelerator.reset_peak_memory_stats(accelerator.device)
    return torch.accelerator.memory_allocated(accelerator.device)


def _peak(accelerator: Accelerator) -> int:
    """The most bytes that tensors had on the device."""
    return 0 if accelerator.immediate else torch.accelerator.max_memory_allocated(accelerator.device)


def graphs_made() -> int:
    """Graphs that torch.compile made in this process so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def busy_ms(accelerator: Accelerator, step: Callable[[], object]) -> float | None:
    """Milliseconds of a step in which the device runs a kernel, by the profiler; None: it says nothing of this
    device."""
    if accelerator.device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
        accelerator.wait()
    spans = [
        (each.time_range.start, each.time_range.end)
        for each in profiled.events()
        if each.device_type.name == "CUDA"
    ]
    return covered(spans) / 1e3


def covered(spans: list[tuple[float, float]]) -> float:
    """The length of the union of spans."""
    total, last = 0.0, -float("inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, last))
        last = max(last, end)
    return total


def floor(accelerator: Accelerator, sizes: Sizes) -> Figures:
    """A step of plain torch whose passes are captured as a CUDA graph, the least that its kernels take. Ours
    with captured passes is beside it; on a device that captures nothing with compiled blocks."""
    size = sizes.small
    side = Plain(size, accelerator, compiled=True)
    for _ in range(3):
        side.step()
    batch = {key: value.to(accelerator.device) for key, value in next(side.batches()).items()}
    for parameter in side.parameters:
        parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in side.parameters]
    total, count = torch.zeros((2,), dtype=torch.float32, device=accelerator.device)

    def passes() -> None:
        loss, targets = side.loss(batch)
        loss.backward()
        total.add_(loss.detach())
        count.add_(targets)

    replay, losses = _captured(accelerator, passes), list[float]()

    def step() -> None:
        torch._foreach_zero_([*gradients, total, count])
        for values in side.batches():
            for key, value in values.items():
                batch[key].copy_(value, non_blocking=True)
            replay()
        side.update(count)
        losses.append(float(total / count))

    ours = Ours(size, accelerator, compiled="graphs" if accelerator.captures else True)
    own = [ours.step() for _ in range(EAGER_STEPS)]
    captured, seconds = in_turns(accelerator, replace(size, seconds=size.seconds / 2), ours.step, step)
    yield "floor: milliseconds, plain torch captured", _median_ms(seconds)
    yield "floor: losses", losses[:1] + losses[-1:]
    yield "captured", ratio(captured, seconds)
    yield "captured: milliseconds", _median_ms(captured)
    yield "captured: losses", [*own[:1], ours.step()]
    if (busy := busy_ms(accelerator, ours.step)) is not None:
        yield "captured: busy", busy / _median_ms(captured)


def _captured(accelerator: Accelerator, passes: Callable[[], object]) -> Callable[[], object]:
    """The passes as a CUDA graph, which is replayed; themselves on a device that has no such graphs."""
    if accelerator.device.type != "cuda":
        passes()
        return passes
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            passes()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        passes()
    return graph.replay


# -- what a step of ours pays for ------------------------------------------------------------------------------


def paid(accelerator: Accelerator, sizes: Sizes) -> Figures:
    """A step beside one without telemetry, and beside one without a snapshot; the device around the vote."""
    size = replace(sizes.small, seconds=sizes.small.seconds / 4)
    yield "vote", _standing_ms(Ours(size, accelerator), accelerator)
    ours, other = Ours(size, accelerator), Ours(size, accelerator)

    def unmeasured() -> None:
        with silent():
            other.step()

    yield "telemetry", ratio(*in_turns(accelerator, size, ours.step, unmeasured))
    yield "snapshot", ratio(*in_turns(accelerator, size, _copying(other, accelerator), ours.step))


def _copying(ours: Ours, accelerator: Accelerator) -> Callable[[], None]:
    """A step, and the copy of all state into a memory file."""
    ours.step()
    share = shares(ours.layouts)["a/0"]
    state = ours.engine.state()
    file = MemoryFile(size_of(pieces(state, share), without_planes(state, share)), accelerator)

    def step() -> None:
        ours.step()
        file.copy(pieces(ours.engine.delivered_state(), share))

    return step


def _standing_ms(ours: Ours, accelerator: Accelerator) -> float:
    """Milliseconds that the device stands still around the vote: from the end of all that was asked of it
    before until the update's first kernel may begin; the median of some steps."""
    read, apply, gaps = accelerator.read, ours.engine.apply, []
    before, after = accelerator.event(timing=True), accelerator.event(timing=True)

    def reads(*numbers: Any, **options: Any) -> list[float]:
        before.record()
        return read(*numbers, **options)

    def applies(vote: Any) -> None:
        after.record()
        apply(vote)

    vars(accelerator)["read"], vars(ours.engine)["apply"] = reads, applies
    try:
        for _ in range(20):
            ours.step()
            accelerator.wait()
            gaps.append(before.elapsed_time(after))
    finally:
        del vars(accelerator)["read"], vars(ours.engine)["apply"]
    return statistics.median(gaps)


# -- where the host is -----------------------------------------------------------------------------------------


def stacks(accelerator: Accelerator, sizes: Sizes, traces: Path | None) -> Figures:
    """The share of a step that the host is in each function, sampled each millisecond; on a GPU the profiler's
    sums too, and a trace of a step of each side as a file."""
    for side, make in (("ours", Ours), ("plain", Plain)):
        step = make(sizes.small, accelerator).step
        for _ in range(4):
            step()
        yield f"stacks: elasticd's functions, {side}", _sampled(step, sizes.watched_seconds)
        if accelerator.device.type == "cuda":
            yield f"stacks: the profiler's milliseconds, {side}", _profiled(accelerator, step, side, traces)


def _sampled(step: Callable[[], object], seconds: float) -> dict[str, float]:
    """The share of samples of the calling thread's stack, by the innermost function of elasticd in it."""
    thread, over, at = threading.get_ident(), threading.Event(), Counter[str]()

    def sample() -> None:
        while not over.wait(0.001):
            frame = sys._current_frames().get(thread)
            while frame is not None and "/elasticd/runtime/" not in frame.f_code.co_filename:
                frame = frame.f_back
            code = None if frame is None else frame.f_code
            at["torch"] += code is None
            if code is not None:
                at[f"{Path(code.co_filename).stem}.{code.co_name}"] += 1

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        step()
    over.set()
    sampler.join()
    return {name: round(count / max(1, at.total()), 3) for name, count in at.most_common(16)}


def _profiled(
    accelerator: Accelerator, step: Callable[[], object], side: str, traces: Path | None
) -> dict[str, float]:
    """Launches of a step, and milliseconds of the host in them, in operators and in autograd."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        step()
        accelerator.wait()
    if traces is not None:
        profiled.export_chrome_trace(str(traces / f"{side}.json"))
    rows = profiled.key_averages()
    prefixes = {"launches": ("cuda",), "operators": ("aten::",), "autograd": ("autograd::", "Compiled")}
    sums = {
        name: sum(row.self_cpu_time_total for row in rows if row.key.startswith(prefix)) / 1e3
        for name, prefix in prefixes.items()
    }
    return sums | {"kernels": float(sum(row.count for row in rows if "LaunchKernel" in row.key))}


def parts(accelerator: Accelerator, sizes: Sizes, traces: Path | None) -> dict[str, Callable[[], Figures]]:
    """The parts of this file by name, what says most in least time first."""
    if accelerator.immediate:
        compiled_blocks.BACKEND = "aot_eager"  # a trial needs no compiler
    return {
        "host": lambda: host(accelerator, sizes),
        "kernels": lambda: kernels(accelerator, sizes),
        "eager": lambda: pair(accelerator, "eager", sizes.small, compiled=False),
        "large": lambda: pair(accelerator, "large", sizes.large, compiled=True),
        "compiled": lambda: pair(accelerator, "compiled", sizes.small, compiled=True),
        "floor": lambda: floor(accelerator, sizes),
        "paid": lambda: paid(accelerator, sizes),
        "stacks": lambda: stacks(accelerator, sizes, traces),
    }
