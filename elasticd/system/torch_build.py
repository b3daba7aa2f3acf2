"""The devices that the torch of this environment computes on, asked of a process of its own: importing torch
takes seconds, and the programs that ask stay free of it."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import msgspec
from elasticd_planner.value import Value

#: The device that workers are to compute on, where the script does not say: "cpu", "cuda" or "cuda:1".
DEVICE_VARIABLE = "ELASTICD_DEVICE"
#: Queues between the host and a GPU. Each communicator launches on a stream of its own, and a stream that
#: shares a queue waits for the other one's kernels, which may wait for it at a peer. CUDA reads it once.
CONNECTIONS_VARIABLE, CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS", 32
#: One of these is there where a driver of GPUs that torch calls CUDA is: NVIDIA's (three, one of them of Linux
#: under Windows), AMD's.
DRIVERS = ("/dev/nvidiactl", "/dev/nvmap", "/usr/lib/wsl/lib/libcuda.so.1", "/dev/kfd")
#: PCI devices of this machine, each a folder, whether a driver is loaded for them or not.
PCI = Path("/sys/bus/pci/devices")
#: The vendors, as PCI numbers them, of what torch calls CUDA.
NVIDIA, AMD = "0x10de", "0x1002"
#: How the class of a PCI device begins that is a GPU: a display controller.
_DISPLAY = "0x03"
#: The module that answers, in the interpreter that workers run in.
_ANSWERS = "elasticd.runtime.torch_answer"
#: Begins the line of the answer.
ANSWER = "torch-build "
#: Seconds for it: torch is imported in some, on a busy machine in many.
TORCH_IMPORT_TIMEOUT_SECONDS = 120.0


class TorchBuild(Value, frozen=True, kw_only=True):
    """A build of torch, on this machine."""

    version: str  # of torch
    devices: tuple[str, ...]  # the devices beside the CPU that it finds, as people name them
    distributed: bool  # it has torch.distributed
    computes_on: str  # what a worker computes on whose script does not say ("": on nothing, see `refusal`)
    refusal: str = ""  # why a worker is refused, with the remedy
    library: str = "gloo"  # over which tensors travel between workers, as "NCCL 2.27.5"
    unusable: str = ""  # why that library cannot carry out a plan here, with the remedy


class CannotTell(RuntimeError):
    """Torch cannot be imported; its last words are in the message."""


def visible(variable: str) -> tuple[str, ...]:
    """The GPUs of a list of visible ones. CUDA ignores an entry that is no GPU, and all behind it: so `-1` or
    an empty text hides every GPU."""
    names = (name.strip() for name in variable.split(","))
    return tuple(takewhile(lambda name: name.isdigit() or name.startswith(("GPU-", "MIG-")), names))


def driver_is_there() -> bool:
    """Returns True if this machine has a driver of GPUs."""
    return any(map(os.path.exists, DRIVERS))


def gpu_is_there(vendor: str) -> bool:
    """Returns True if this machine has a GPU of a vendor, or does not list its devices."""
    if not PCI.is_dir():
        return True
    for device in PCI.iterdir():
        try:
            of_vendor = (device / "vendor").read_text().strip() == vendor
            if of_vendor and (device / "class").read_text().startswith(_DISPLAY):
                return True
        except OSError:
            continue
    return False


def torch_build() -> TorchBuild:
    """The build of torch that workers of this node would compute with.

    Raises:
        CannotTell: torch cannot be imported.
    """
    command = [sys.executable, "-m", _ANSWERS]
    try:
        asked = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TORCH_IMPORT_TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise CannotTell(
            f"it did not answer within {TORCH_IMPORT_TIMEOUT_SECONDS:g} s: does the GPU's driver hang?"
        ) from None
    if asked.returncode != 0:
        raise CannotTell((asked.stderr.strip().splitlines() or ["it says nothing"])[-1])
    for line in asked.stdout.splitlines():  # torch, too, may print
        if line.startswith(ANSWER):
            try:
                return msgspec.json.decode(line.removeprefix(ANSWER), type=TorchBuild)
            except msgspec.MsgspecError as error:
                raise CannotTell(str(error)) from None
    raise CannotTell("it says nothing")
