"""Starts one torchrun for each device of this node, with its GPU and its threads, and waits for them all.

No torchrun outlives this process. Each starts one worker. torchrun itself sets what several workers of one node
need only where it starts several, so it is set here:

- Threads: `OMP_NUM_THREADS=1` where there are several workers and the user chose nothing, as torchrun does.
  Otherwise each worker would take as many threads as there are cores, and they would wait for each other.
- Devices: each worker sees its own GPU alone, as cuda:0, and its LOCAL_RANK is 0. That is what
  `torchrun --virtual-local-rank` gives its workers. Of which device of the node it is `$ELASTICD_SLOT` tells
  elasticd.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

from elasticd.system import torch_build
from elasticd.system.end_signals import noted
from elasticd.system.parent_death_signal import ending_with_us
from elasticd.wire.unix_socket import SLOT_VARIABLE, default_path

#: The number of threads that a worker's torch computes with, and the GPUs that it may use, by CUDA's names.
THREADS_VARIABLE = "OMP_NUM_THREADS"
GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"
_ORDER_VARIABLE = "CUDA_DEVICE_ORDER"
#: Seconds from the signal that ends torchruns to SIGKILL; torchrun itself gives its workers 30.
GRACE = 40.0
_POLL = 0.1


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What is to run: `command` is a script and its options; nodes from `least` to `most`, of as many
    `devices` each. `gpus` names the GPU of each device, as CUDA does; it is empty on the CPU."""

    job: str
    least: int
    most: int
    devices: int
    gpus: tuple[str, ...]
    socket: str | None
    max_restarts: int
    command: tuple[str, ...]


def launch(what: Launch) -> int:
    """Runs until all torchruns have ended; the exit code. A signal that asks us to end goes on to them."""
    children: dict[int, subprocess.Popen[bytes]] = {}
    with noted() as told:
        try:
            for index, slot in enumerate(slots(what)):
                children[slot] = _start(what, environment(what, index, os.environ))
            return _wait(children, told)
        finally:
            _end(children)


def _start(what: Launch, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
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
    return subprocess.Popen(ending_with_us(torchrun), env=dict(environment), start_new_session=True)


def visible(ours: Mapping[str, str]) -> tuple[str, ...] | None:
    """The GPUs that this process may use; None where nothing limits them."""
    said = ours.get(GPUS_VARIABLE)
    return None if said is None else torch_build.visible(said)


def slots(what: Launch) -> tuple[int, ...]:
    """Which of the node's devices each worker is, by the agent's numbers. The agent counts the GPUs of the
    whole node, so GPU 4 is device 4, even where it is the first that this job may use. GPUs with names of
    another kind are counted from 0."""
    if what.gpus and all(name.isdigit() for name in what.gpus):
        return tuple(int(name) for name in what.gpus)
    return tuple(range(what.devices))


def environment(what: Launch, index: int, ours: Mapping[str, str]) -> dict[str, str]:
    """Of the torchrun of this node's worker `index`, which hands it to its worker."""
    found = {**ours, SLOT_VARIABLE: str(slots(what)[index])}
    if what.gpus:
        # The agent's order is NVML's. CUDA's own default puts the fastest GPU first.
        queues = {torch_build.CONNECTIONS_VARIABLE: str(torch_build.CONNECTIONS)}
        found = {_ORDER_VARIABLE: "PCI_BUS_ID", **queues, **found, GPUS_VARIABLE: what.gpus[index]}
    if what.devices > 1:
        found = {THREADS_VARIABLE: "1", **found}
    return found


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
