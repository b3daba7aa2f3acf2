"""Ranks of a plan that communicate over NCCL, also where they share a GPU.

NCCL refuses two ranks on one GPU of a machine. Told that each is on a machine of its own, it takes them, and
its messages go by way of sockets: its own rules, aborts and errors are tried so, and no figure of speed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from elasticd_planner.layout.channels import Channel
from torch._C import _distributed_c10d as c10d

from elasticd.runtime.accelerator import Accelerator
from elasticd.runtime.comm import nccl
from elasticd.runtime.comm.communicators import BY_DEVICE, Connect
from elasticd.runtime.comm.device_communicators import DeviceCommunicators
from elasticd.runtime.comm.groups import Group, PlanGroups
from tests.accelerators.strict_process_group import struck


def settle(name: str) -> None:
    """Before CUDA begins: this rank is on a machine of its own."""
    os.environ |= {"NCCL_HOSTID": name, "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4"}
    nccl.settle_environment()


def used(rank: int) -> Accelerator:
    """The GPU of a rank, made its current one."""
    settle(f"rank-{rank}")
    made = Accelerator(f"cuda:{rank % torch.cuda.device_count()}")
    made.use()
    return made


def groups_class(before: Callable[[str], None]) -> Any:
    """ProcessGroupNCCL, which calls `before` with each connection and launch: "all_reduce tensor a/0 a/1"."""

    class Noted(c10d.ProcessGroupNCCL):  # type: ignore[misc]
        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            self._noted = options.group_name
            super().__init__(store, rank, size, options)

        def eager_connect_single_device(self, device: torch.device) -> None:
            before(f"connect {self._noted}")
            super().eager_connect_single_device(device)

        def allreduce(self, tensors: Any) -> Any:
            before(f"all_reduce {self._noted}")
            return super().allreduce(tensors)

        def _allgather_base(self, out: Any, tensor: Any) -> Any:
            before(f"all_gather {self._noted}")
            return super()._allgather_base(out, tensor)

        def send(self, tensors: Any, to: int, tag: int) -> Any:
            before(f"send {self._noted}")
            return super().send(tensors, to, tag)

        def recv(self, tensors: Any, source: int, tag: int) -> Any:
            before(f"recv {self._noted}")
            return super().recv(tensors, source, tag)

        def _start_coalescing(self) -> None:
            before(f"batch {self._noted}")
            super()._start_coalescing()

    return Noted


def connected(before: Callable[[str], None] = lambda what: None) -> Connect:
    """As `nccl_communicators`."""

    def connect(
        plan_groups: PlanGroups, channels: tuple[Channel, ...], everyone: Group, accelerator: Accelerator
    ) -> DeviceCommunicators:
        if channels:
            nccl.check(nccl.version(), len(channels), os.environ, nccl.missing())
        library = nccl.NcclLibrary(accelerator.device, groups_class(before))
        return DeviceCommunicators(plan_groups, channels, everyone, library)

    return connect


def take_place(name: str, drill: tuple[str, int, int] | None = None) -> None:
    """From now on a job of this process has its GPU as if for itself, and its tensors go over NCCL. `drill`:
    see `struck`."""
    settle(name)
    BY_DEVICE["cuda"] = connected(struck(*drill) if drill is not None else lambda what: None)
    begin = Accelerator.__init__

    def alone(self: Accelerator, device: Any = "cpu", *, shared: bool = False) -> None:
        begin(self, device)

    Accelerator.__init__ = alone  # type: ignore[method-assign]
    identity = cached_property(lambda self: "" if self.immediate else f"{self.device} of {name}")
    identity.__set_name__(Accelerator, "identity")
    Accelerator.identity = identity  # type: ignore[method-assign, assignment]
