"""Groups over NCCL behind the same seam as those over gloo: made, freed and let go in the same way.

NCCL has an abort of its own, which frees a blocked collective on the device and on the host, so no socket is
searched for. Two ranks cannot share a device, and every tensor must lie on it.

Not in use yet: no plan makes its groups here, only a test for machines with two GPUs does. It has not been run.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore

from elasticd.runtime.comm.groups import MEANWHILE, Cancelled, PlanGroups


class NcclPlanGroups(PlanGroups):
    """`PlanGroups` that run on the CUDA device that is current when it is made; `address` is unused."""

    def _open(self, address: str) -> None:
        nccl = getattr(torch._C._distributed_c10d, "ProcessGroupNCCL", None)
        if nccl is None or not torch.cuda.is_available():
            raise RuntimeError("NCCL needs a CUDA device and a torch that is built for it: use gloo")
        self._nccl, self._device = nccl, torch.device("cuda", torch.cuda.current_device())

    def _meet(self, members: tuple[str, ...]) -> None:
        """NCCL's connections need not be known: its abort finds them."""

    def _make(self, members: tuple[str, ...]) -> Any:
        options = self._nccl.Options()
        options._timeout = timedelta(seconds=self._patience)
        store = PrefixStore("group/" + "_".join(members), self._store)
        device, backend = self._device, self._nccl(store, members.index(self.me), len(members), options)
        self.backends[members] = backend  # before it connects, which waits for all: `shut` is to find it
        if self.dead:  # it was looked for before
            backend.abort()
            raise Cancelled(MEANWHILE)
        try:
            backend.eager_connect_single_device(device)
        except RuntimeError:
            if self.dead:
                raise Cancelled(MEANWHILE) from None
            raise
        return backend

    def _cut(self) -> int:
        """Aborts the communicators: what runs on the device ends, with an error."""
        backends = list(self.backends.values())
        for backend in backends:
            backend.abort()
        return len(backends)
