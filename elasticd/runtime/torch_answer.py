"""Answers `elasticd.system.torch_build`: what this environment's torch computes and communicates on."""

from __future__ import annotations

import os

import msgspec
import torch
from elasticd_planner.layout.channels import MOST

from elasticd.runtime.accelerator import Accelerator, NoDevice, placed
from elasticd.runtime.comm import nccl
from elasticd.system.torch_build import ANSWER, TorchBuild


def build() -> TorchBuild:
    """This torch, on this machine."""
    if nccl.available():
        nccl.settle_environment()  # as a worker does before it asks anything of CUDA
    found, names, refusal, on = torch.accelerator.current_accelerator(), [], "", ""
    if found is not None:
        count = torch.accelerator.device_count()
        names = [Accelerator(torch.device(found.type, index)).name for index in range(count)]
    try:
        on = placed(None, os.environ).device.type
    except NoDevice as error:
        refusal = str(error)
    library, unusable = "gloo", ""
    if on == "cuda" and nccl.available():
        library = f"NCCL {'.'.join(map(str, nccl.version()))}"
        try:
            nccl.check(nccl.version(), MOST, os.environ, nccl.missing())
        except nccl.NotUsable as error:
            unusable = str(error)
    return TorchBuild(
        version=str(torch.__version__),
        devices=tuple(names),
        distributed=torch.distributed.is_available(),
        computes_on=on,
        refusal=refusal,
        library=library,
        unusable=unusable,
    )


if __name__ == "__main__":
    print(f"\n{ANSWER}{msgspec.json.encode(build()).decode()}")
