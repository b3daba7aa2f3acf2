"""Starts one torchrun for each device of this node and waits for them all; none outlives this process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from elasticd.offspring import ending_with_us
from elasticd.packets import SLOT_VARIABLE, default_path

#: Seconds from the signal that ends torchruns to SIGKILL; torchrun itself gives its workers 30.
GRACE = 40.0
_POLL = 0.1


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What is to run: `command` is a script and its options; nodes from `least` to `most`, of as many
    `devices` each."""

    job: str
    least: int
    most: int
    devices: int
    socket: str | None
    max_restarts: int
    command: tuple[str, ...]


def launch(what: Launch) -> int:
    """Runs until all torchruns have ended; the exit code. A signal that asks us to end goes on to them."""
    children: dict[int, subprocess.Popen[bytes]] = {}
    with _signals() as told:
        try:
            for slot in range(what.devices):
                children[slot] = _start(what, slot)
            return _wait(children, told)
        finally:
            _end(children)


def _start(what: Launch, slot: int) -> subprocess.Popen[bytes]:
    torchrun = [
        *(sys.executable, "-m", "torch.distributed.run"),
        f"--nnodes={what.least * what.devices}:{what.most * what.devices}",
        "--nproc-per-node=1",
        f"--max-restarts={what.max_restarts}",
        "--rdzv-backend=elasticd",
        f"--rdzv-endpoint={what.socket or default_path()}",
        f"--rdzv-id={what.job}",
        *what.command,
    ]
    # A session of its own: the terminal's Ctrl-C is for us, who pass it on once.
    return subprocess.Popen(ending_with_us(torchrun), env=environment(slot, os.environ), start_new_session=True)


def environment(slot: int, ours: Mapping[str, str]) -> dict[str, str]:
    """Of the GPUs that we may use a torchrun sees its own alone, which its worker then calls number 0."""
    visible = [gpu for gpu in ours.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    gpu = visible[slot] if slot < len(visible) else str(slot)
    return {**ours, SLOT_VARIABLE: str(slot), "CUDA_VISIBLE_DEVICES": gpu}


def _wait(children: Mapping[int, subprocess.Popen[bytes]], told: list[int]) -> int:
    codes: dict[int, int] = {}
    passed = 0
    while len(codes) < len(children):
        for number in told[passed:]:
            passed += 1
            for slot, child in children.items():
                if slot not in codes:
                    child.send_signal(number)
        for slot, child in children.items():
            if slot not in codes and (code := child.poll()) is not None:
                codes[slot] = code
                if code and len(codes) < len(children) and not told:
                    print(
                        f"elasticd: device {slot} is out, torchrun ended with code {code}: the others go on",
                        file=sys.stderr,
                        flush=True,
                    )
        time.sleep(_POLL)
    if told:
        return 128 + told[0]
    failed = [code for code in codes.values() if code]
    return 0 if len(failed) < len(codes) else failed[0]


def _end(children: Mapping[int, subprocess.Popen[bytes]]) -> None:
    """For the case that something went wrong here: by the processes' own ids."""
    left = [child for child in children.values() if child.poll() is None]
    for child in left:
        child.terminate()
    deadline = time.monotonic() + GRACE
    for child in left:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects the signals that ask us to end, instead of ending."""
    told: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        told.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
