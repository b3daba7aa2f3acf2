"""A process group on an emulated device for torch's own wrappers, as DDP and FSDP, by way of the host.

At a fault it does what NCCL's does. A collective of which a member is gone hangs. `abort` frees it from another
thread; then it raises nothing, and has garbage in its tensors. One that begins after the abort raises.

The product's own code for NCCL makes it (`NcclLibrary`), in the place of ProcessGroupNCCL.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import Store, _create_work_from_future
from torch.distributed import distributed_c10d as c10d
from torch.futures import Future

from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.nccl import NcclLibrary
from elasticd.runtime.live import device_groups
from tests.accelerators import vgpu
from tests.accelerators.strict_process_group import KeyValue, Options

#: Collectives that ended with garbage in this process.
garbage = [0]


class WrapperGroup(dist.ProcessGroup):
    """One member's end."""

    Options = Options

    def __init__(self, store: Store, rank: int, size: int, options: Options) -> None:
        super().__init__(rank, size)
        self._at, self._count = rank, size
        self._members = tuple(options.group_name.split()[1:])
        self._groups = PlanGroups("wrapper", self._members[rank], "127.0.0.1", KeyValue(store))
        self._aborted = threading.Event()
        self._backend: Any = None

    def eager_connect_single_device(self, device: torch.device) -> None:
        self._backend = self._groups.group(self._members, "wrapper").backend

    def abort(self) -> None:
        self._aborted.set()
        self._groups.shut()
        self._groups.park()

    def getBackendName(self) -> str:
        return "wrapper"

    @property
    def group_name(self) -> str:
        """As torch's tables have it: a group without a backend of C++ keeps none."""
        return c10d._world.pg_names[self]

    def size(self) -> int:
        return self._count

    def rank(self) -> int:
        return self._at

    # -- collectives -------------------------------------------------------------------------------------------

    def _run(self, call: Callable[[Any], Any], results: Sequence[tuple[Tensor, Tensor]]) -> Any:
        """Makes a collective of host tensors, and copies its results: pairs of the device's and the host's."""
        if self._aborted.is_set():
            raise RuntimeError("NCCL communicator was aborted")
        try:
            if self._backend is not None:
                call(self._backend).wait()
        except RuntimeError:
            self._aborted.wait()
            garbage[0] += 1
            for on_device, _ in results:
                on_device.fill_(7)
        else:
            for on_device, on_host in results:
                on_device.copy_(on_host)
        future: Future[list[Tensor]] = Future()
        future.set_result([on_device for on_device, _ in results])
        return _create_work_from_future(future)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        hosts = [tensor.cpu() for tensor in tensors]
        how, mean = _sum(opts)

        def call(backend: Any) -> Any:
            for host in hosts:
                work = backend.allreduce([host], how)
                work.wait()
                if mean:
                    host.div_(self._count)
            return work

        return self._run(call, list(zip(tensors, hosts, strict=True)))

    allreduce_coalesced = allreduce

    def barrier(self, opts: Any = None) -> Any:
        return self.allreduce([torch.ones(1)])

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        hosts = [tensor.cpu() for tensor in tensors]
        return self._run(
            lambda backend: backend.broadcast(hosts, opts or dist.BroadcastOptions()),
            list(zip(tensors, hosts, strict=True)),
        )

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        out, parts = outputs[0].cpu(), [[each.cpu() for each in listed] for listed in inputs]
        if self._backend is None:
            out = parts[0][0]
        return self._run(lambda backend: backend.scatter([out], parts, opts), [(outputs[0], out)])

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        hosts = [torch.empty_like(each, device="cpu") for each in outputs[0]]
        own = inputs[0].cpu()
        if self._backend is None:
            hosts = [own]
        return self._run(
            lambda backend: backend.allgather([hosts], [own]), list(zip(outputs[0], hosts, strict=True))
        )

    def _allgather_base(self, out: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        return self.allgather([list(out.view(self._count, -1))], [tensor.reshape(-1)])

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(
        self, outs: list[Tensor], tensors: list[Tensor], opts: Any = None
    ) -> Any:
        return [self._allgather_base(out, tensor) for out, tensor in zip(outs, tensors, strict=True)][-1]

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        return self._reduce_scatter_base(outputs[0], torch.cat([each.reshape(-1) for each in inputs[0]]), opts)

    def _reduce_scatter_base(self, out: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        host = tensor.cpu()
        how, mean = _sum(opts)

        def call(backend: Any) -> Any:
            work = backend.allreduce([host], how)
            work.wait()
            if mean:
                host.div_(self._count)
            return work

        return self._run(call, [(out, host.view(self._count, -1)[self._at].view(out.shape))])

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(
        self, outs: list[Tensor], tensors: list[Tensor], opts: Any = None
    ) -> Any:
        return [self._reduce_scatter_base(out, each, opts) for out, each in zip(outs, tensors, strict=True)][-1]

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced


def _sum(opts: Any) -> tuple[Any, bool]:
    """gloo's operation, and whether a mean is asked for, which gloo has not."""
    how = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    mean = how == dist.ReduceOp.AVG
    return (dist.ReduceOp.SUM if mean else how), mean


def take_place() -> None:
    """From now on loops of this process train on vgpu over such groups, as those on GPUs over NCCL's."""
    device_groups.LIBRARIES["vgpu"] = lambda accelerator: NcclLibrary(accelerator.device, WrapperGroup)
    vgpu.load()
