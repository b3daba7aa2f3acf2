"""Parts of `_on_a_gpu` that run in processes of their own: tests over NCCL, and a cluster inside one GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _gpu_figures import Figures

from elasticd.runtime.accelerator import Accelerator

ROOT = Path(__file__).resolve().parents[1]
TESTS = "tests/accelerators/test_gpu.py"
#: Seconds of a test over NCCL, at most.
TEST_SECONDS = 45.0
#: Tests that run on the emulated device where there is no GPU: what they start is the same.
EMULATED = (
    "(test_an_abort_frees_the_device_and_another_communicator_works or "
    "test_captured_passes_train_as_compiled_ones) and vgpu"
)


@contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A process with its own process group, which is ended with all that it started."""
    environment = dict(os.environ, PYTHONPATH=f"{ROOT}:{ROOT / 'benchmarks'}", OMP_NUM_THREADS="1")
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def nccl_tests(accelerator: Accelerator, seconds: float) -> Figures:
    """The tests over NCCL one at a time: passed, or the end of their output."""
    options = ["-m", "nccl"] if accelerator.device.type == "cuda" else ["-k", EMULATED]
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--full"]
    ends = time.monotonic() + seconds
    with started(*pytest, "--collect-only", *options, TESTS) as process:
        listed, _ = process.communicate(timeout=max(1.0, seconds))
    names = [line for line in listed.splitlines() if "::" in line]
    yield "nccl: tests", len(names)
    for name in names:
        left = min(TEST_SECONDS, ends - time.monotonic())
        if left < 5:
            yield f"nccl: {name.rpartition('::')[2]}", ["not run: no time was left", 0.0]
            continue
        began = time.monotonic()
        with started(*pytest, name) as process:
            try:
                output, _ = process.communicate(timeout=left)
                said = "passed" if process.returncode == 0 else output[-600:]
            except subprocess.TimeoutExpired:
                said = f"came to no end within {left:.0f} s"
        yield f"nccl: {name.rpartition('::')[2]}", [said, round(time.monotonic() - began, 1)]


def shares(accelerator: Accelerator, seconds: float) -> Figures:
    """The figures of `_gpu_shares`, as it prints them."""
    program = str(ROOT / "benchmarks/_gpu_shares.py")
    with started(sys.executable, program, accelerator.device.type, str(seconds)) as process:
        assert process.stdout is not None
        lines = list[str]()
        for line in process.stdout:
            lines.append(line)
            figure = _figure(line)
            if figure is not None:
                yield figure
        if process.wait():
            raise RuntimeError("".join(lines)[-1500:])


def _figure(line: str) -> tuple[str, Any] | None:
    """The figure of a line; None: the line is a message."""
    try:
        name, value = json.loads(line)
    except ValueError:
        return None
    return f"shares: {name}", value
