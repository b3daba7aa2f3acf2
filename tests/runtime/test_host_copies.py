"""Copies to the host: all bytes are there at the end, also where the memory is a mapping that gets pinned."""

from __future__ import annotations

import mmap

import pytest
import torch

from elasticd.runtime.snapshot.pinned_copy import HostMemory

SIZE = 1 << 20


def mapped() -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(-1, SIZE), dtype=torch.uint8)


def test_values_of_any_stride_go_where_they_belong() -> None:
    memory = mapped()
    host = HostMemory(memory)
    table = torch.arange(24.0).reshape(4, 6)
    first, second = memory[:96].view(torch.float32).reshape(6, 4), memory[128:136].view(torch.int64)
    host.copy([(first, table.T), (second, torch.tensor([-7]))])
    assert torch.equal(first, table.T)
    assert second.tolist() == [-7]
    assert not memory[136:].any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_values_on_a_gpu_go_into_pinned_memory_behind_what_is_still_to_be_computed() -> None:
    memory = mapped()
    host = HostMemory(memory)
    to = memory.view(torch.float32)
    assert not to.is_pinned()
    large = torch.ones(4096, 4096, device="cuda")
    for turn in range(2):
        values = (large @ large @ large).reshape(-1)[: to.numel()] * (turn + 1)
        host.copy([(to, values)])
        kept = to.clone()
        values.zero_()  # as the next step does
        torch.cuda.synchronize()
        assert to.is_pinned()
        assert torch.equal(kept, to)
        assert set(kept.tolist()) == {4096.0**2 * (turn + 1)}
    del host
    assert not to.is_pinned()
