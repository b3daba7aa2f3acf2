"""The device vgpu computes what the CPU computes, and breaks where a GPU breaks."""

from __future__ import annotations

import copy
import ctypes
import io
import os
import pickle
import signal
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.accelerators import vgpu


class Attends(nn.Module):
    """A transformer's parts, small."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.projection, self.head = nn.Linear(8, 24), nn.Linear(8, 11)
        self.norm = nn.LayerNorm(8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embedding(tokens)
        query, key, value = self.projection(self.norm(x)).unflatten(-1, (3, 2, 4)).transpose(1, 3).unbind(2)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        logits: torch.Tensor = self.head(x + attended.transpose(1, 2).flatten(2))
        return logits


def trained(device: str, **options: Any) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and weights of three steps."""
    torch.manual_seed(0)
    model = Attends().double().to(device)
    tokens = torch.arange(24).reshape(4, 6).remainder(11).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1).flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses, [parameter.detach().cpu() for parameter in model.parameters()]


@vgpu.alone
def test_a_model_trains_as_on_the_cpu_with_each_kind_of_optimizer() -> None:
    losses, weights = trained("cpu")
    # What is capturable corrects its bias in float32.
    for options in ({}, {"foreach": True}, {"fused": True}, {"capturable": True}):
        close = 1e-5 if "capturable" in options else 1e-10
        found, values = trained("vgpu:1", **options)
        assert found == pytest.approx(losses, abs=close), options
        for mine, his in zip(weights, values, strict=True):
            torch.testing.assert_close(mine, his, rtol=0, atol=close)


@vgpu.alone
def test_a_kernel_takes_tensors_and_generators_of_its_own_device_alone() -> None:
    here, there, host = torch.ones(3, device="vgpu:0"), torch.ones(3, device="vgpu:1"), torch.ones(3)
    for foreign in (there, host):
        for kernel in (torch.add, torch.dot, torch.outer):
            with pytest.raises(RuntimeError, match=r"[Ee]xpected all tensors to be on"):
                kernel(here, foreign)
    for several in (torch.cat, torch.stack):
        with pytest.raises(RuntimeError, match="expected all tensors to be on vgpu:0, but found one"):
            several([here, host])
    with pytest.raises(RuntimeError, match=r"[Ee]xpected all tensors"):
        torch.zeros(()).add_(here.sum())
    assert (here + torch.tensor(2.0)).tolist() == [3, 3, 3], "a number of the CPU is none of its tensors"
    assert here[torch.tensor([0, 2])].tolist() == [1, 1], "nor are indices"
    for foreign_generator in (torch.Generator(), torch.Generator("vgpu:1")):
        with pytest.raises(RuntimeError, match="expected a generator of vgpu:0"):
            torch.rand(3, device="vgpu:0", generator=foreign_generator)


@vgpu.alone
def test_the_host_cannot_read_the_devices_memory() -> None:
    tensor = torch.ones(3, device="vgpu")
    with pytest.raises(TypeError, match="can't convert vgpu:0 device type tensor to numpy"):
        tensor.numpy()
    reads, writes = os.pipe()
    if (child := os.fork()) == 0:
        os.dup2(writes, 2)
        ctypes.string_at(tensor.data_ptr(), 4)
        os._exit(0)
    os.close(writes)
    with open(reads, "rb") as said:
        assert b"the host used memory of the device (a data_ptr)" in said.read()
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV
    assert tensor.tolist() == [1, 1, 1]
    assert torch.empty(2, device="vgpu").isnan().all(), "and nobody can rely on what new memory holds"


@vgpu.alone
def test_streams_that_use_the_same_memory_need_an_event_between_them() -> None:
    current, side = torch.accelerator.current_stream(), torch.Stream(device="vgpu")
    tensor = torch.zeros(8, device="vgpu")
    with side, pytest.raises(RuntimeError, match=r"on stream 1 of vgpu:0 reads what .* on stream 0 .* writes"):
        tensor.sum()
    event = current.record_event()
    side.wait_event(event)
    with side:
        tensor.sum()
    tensor.sum()
    with pytest.raises(RuntimeError, match=r"on stream 0 of vgpu:0 writes what .* on stream 1 of vgpu:0 reads"):
        tensor.zero_()
    current.wait_stream(side)
    side.wait_stream(current)
    tensor[:4].zero_()
    with side:
        tensor[4:].add_(1)  # other bytes
    with pytest.raises(RuntimeError, match="vgpu race"):
        tensor.sum()
    side.synchronize()
    assert tensor.sum().item() == 4, "a host that has waited orders them, too"


@vgpu.alone
def test_clocks_hold_across_devices_and_copies_between_them() -> None:
    first, second = torch.Stream(device="vgpu:0"), torch.Stream(device="vgpu:1")
    with first:
        source = torch.ones(4, device="vgpu:0")
        target = source.to("vgpu:1", non_blocking=True)
    assert (target + 1).device == torch.device("vgpu:1"), "the current streams of both wait for each other"
    with second, pytest.raises(RuntimeError, match=r"vgpu race: .* on stream 1 of vgpu:1 reads"):
        target.sum()
    second.wait_event(first.record_event())
    second.wait_stream(torch.accelerator.current_stream("vgpu:1"))
    with second:
        assert target.sum().item() == 4
        target.zero_()
    with first, pytest.raises(RuntimeError, match="vgpu race"):
        source.copy_(target)
    torch.accelerator.synchronize("vgpu:1")


@vgpu.alone
def test_a_copy_to_the_host_is_not_there_until_the_host_knows_it() -> None:
    values, pinned = torch.arange(4.0, device="vgpu"), torch.zeros(4).pin_memory()
    assert pinned.is_pinned()
    pinned.copy_(values, non_blocking=True)
    assert pinned.isnan().all()
    torch.accelerator.synchronize()
    assert pinned.tolist() == [0, 1, 2, 3]
    copied = values.to("cpu", non_blocking=True)
    event = torch.accelerator.current_stream().record_event()
    assert not event.query()
    assert copied.isnan().all()
    while not event.query():
        pass
    assert copied.tolist() == [0, 1, 2, 3]
    table = torch.zeros(4, 2).pin_memory()
    table[:, 1].copy_(values, non_blocking=True)
    assert table[:, 0].tolist() == [0, 0, 0, 0]
    assert table[:, 1].isnan().all()
    torch.accelerator.current_stream().synchronize()
    assert table[:, 1].tolist() == [0, 1, 2, 3]
    pinned.copy_(values * 2, non_blocking=True)
    back = pinned.to("vgpu", non_blocking=True)  # behind it on the same stream
    assert back.tolist() == [0, 2, 4, 6]
    pinned.copy_(values, non_blocking=True)
    with torch.Stream(device="vgpu"), pytest.raises(RuntimeError, match="vgpu race"):
        pinned.to("vgpu", non_blocking=True)
    pinned.zero_()
    assert vgpu.settled_errors() == [
        "the host wrote to the target of a non_blocking copy from the device before it was over"
    ]


@vgpu.alone
def test_the_source_of_a_copy_to_the_device_must_stay_until_the_copy_is_over() -> None:
    pinned, owned = torch.ones(4, pin_memory=True), torch.ones(4)
    vgpu.register_host(owned)
    assert owned.is_pinned()
    for source in (pinned, owned):
        copied = source.to("vgpu", non_blocking=True)
        source.zero_()
        torch.accelerator.synchronize()
        (error,) = vgpu.errors()
        assert error.startswith("the host changed the source of a non_blocking copy to the device")
        source.fill_(3)
        copied.copy_(source, non_blocking=True)
        event = torch.accelerator.current_stream().record_event()
        event.synchronize()
        source.zero_()
        assert copied.tolist() == [3, 3, 3, 3]
    vgpu.unregister_host(owned)
    assert not owned.is_pinned()
    assert vgpu.settled_errors() == []


@vgpu.alone
def test_memory_that_is_freed_while_a_stream_may_use_it_is_noted() -> None:
    current, side = torch.accelerator.current_stream(), torch.Stream(device="vgpu")

    def used(record: bool = False, join: bool = False) -> None:
        tensor = torch.ones(4, device="vgpu")
        side.wait_stream(current)
        with side:
            tensor.sum()
        if record:
            tensor.record_stream(side)
        if join:
            current.wait_stream(side)

    used(record=True)
    used(join=True)
    assert vgpu.errors() == []
    used()
    (error,) = vgpu.errors()
    assert error.startswith("memory of 16 bytes, allocated for stream 0 of vgpu:0, is freed while aten::sum on")


@vgpu.alone
def test_a_device_has_as_much_memory_as_it_has_and_says_so() -> None:
    vgpu.limit(1 << 20)
    tensor = torch.zeros(1 << 17, device="vgpu")
    assert torch.accelerator.memory_allocated() == torch.accelerator.memory_reserved() == 1 << 19
    assert torch.accelerator.get_memory_info() == (1 << 19, 1 << 20)
    with pytest.raises(torch.OutOfMemoryError, match=r"vgpu out of memory: .* 524288 of 1048576 are in use"):
        torch.zeros(1 << 18, device="vgpu")
    assert torch.zeros(1 << 18, device="vgpu:1").sum().item() == 0, "another device has its own"
    storage = tensor.untyped_storage()
    storage.resize_(0)
    assert torch.accelerator.memory_allocated() == 0
    assert torch.accelerator.memory_reserved() == 1 << 19, "cached"
    larger = torch.zeros(1 << 18, device="vgpu")  # takes the cached memory's place
    assert torch.accelerator.max_memory_allocated() == torch.accelerator.memory_reserved() == 1 << 20
    del larger
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.memory_reserved() == torch.accelerator.max_memory_allocated() == 0
    storage.resize_(1 << 19)
    assert tensor.zero_().sum().item() == 0
    assert torch.accelerator.memory_stats()["num_ooms"] == 1
    torch.accelerator.empty_host_cache()


def spent(what: object) -> tuple[int, int]:
    """Synchronizations and launches of a call."""
    with vgpu.counting() as counts:
        what()  # type: ignore[operator]
    return counts.synchronizations, counts.launches


@vgpu.alone
def test_waits_of_the_host_and_launches_are_counted() -> None:
    x, pinned = torch.ones(4, 4, device="vgpu"), torch.ones(4, 4).pin_memory()
    mask, index = x > 0, torch.tensor([1, 2], device="vgpu")
    heads = x.reshape(1, 1, 4, 4)
    assert spent(lambda: x.t()[1:].reshape(3, 1, 4).transpose(0, 2).detach()) == (0, 0)
    assert spent(lambda: x @ x) == (0, 1)
    assert spent(lambda: x.sum().item()) == (1, 2)
    assert spent(lambda: x.nonzero()) == (1, 1)
    assert spent(lambda: x[index]) == (0, 1)
    assert spent(lambda: x[mask]) == (1, 2)
    assert spent(lambda: x[torch.tensor([0, 1])]) == (1, 2)
    assert spent(lambda: torch.equal(x, x)) == (1, 1)
    assert spent(lambda: x.cpu()) == (1, 1)
    assert spent(lambda: pinned.to("vgpu")) == (1, 1)
    assert spent(lambda: pinned.to("vgpu", non_blocking=True)) == (0, 1)
    assert spent(lambda: pinned.copy_(x, non_blocking=True)) == (0, 1)
    assert spent(lambda: torch.ones(4).to("vgpu", non_blocking=True)) == (1, 1), "not pinned: the driver waits"
    assert spent(lambda: F.scaled_dot_product_attention(heads, heads, heads)) == (0, 1)
    assert spent(torch.accelerator.synchronize) == (1, 0)
    assert spent(lambda: torch.ones(4, device="vgpu:1").sum().item()) == (0, 0), "of another device"


@vgpu.alone
def test_events_tell_the_time_between_them_when_they_are_over() -> None:
    first, last = (torch.Event("vgpu", enable_timing=True) for _ in range(2))
    x = torch.ones(64, 64, device="vgpu")
    first.record()
    for _ in range(10):
        x = x @ x / 64
    last.record()
    with pytest.raises(RuntimeError, match="must be completed"):
        first.elapsed_time(last)
    last.synchronize()
    assert 0 < first.elapsed_time(last) < 60_000
    with pytest.raises(ValueError, match="enable_timing"):
        torch.Event("vgpu").elapsed_time(last)


@vgpu.alone
def test_random_numbers_come_from_the_devices_own_generator() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, dropped = torch.rand(9, device="vgpu"), F.dropout(torch.ones(99, device="vgpu"))
    assert torch.equal(before, torch.get_rng_state()), "not from the CPU's"
    assert 0 < (dropped == 0).sum().item() < 99
    assert not torch.equal(first.cpu(), torch.rand(9)), "the same seed gives other numbers there"
    torch.manual_seed(5)
    assert torch.equal(first, torch.rand(9, device="vgpu"))
    assert torch.equal(dropped, F.dropout(torch.ones(99, device="vgpu")))
    generator = torch.vgpu.default_generators[0]  # type: ignore[attr-defined]
    state = generator.get_state()
    with torch.random.fork_rng([0]):
        drawn = torch.randperm(20, device="vgpu")
    assert torch.equal(state, generator.get_state())
    assert torch.equal(drawn, torch.randperm(20, device="vgpu"))
    own = torch.Generator("vgpu").manual_seed(7)
    assert own.initial_seed() == 7
    drawn = torch.rand(3, device="vgpu", generator=own)
    assert torch.equal(drawn, torch.rand(3, device="vgpu", generator=own.manual_seed(7)))


@vgpu.alone
def test_tensors_are_copied_pickled_viewed_and_exchanged() -> None:
    tensor = torch.arange(6.0, device="vgpu:2").reshape(2, 3)
    file = io.BytesIO()
    torch.save({"tensor": tensor}, file)
    for place, device in ((None, "vgpu:2"), ("cpu", "cpu"), ("vgpu:0", "vgpu:0")):
        file.seek(0)
        loaded = torch.load(file, map_location=place)["tensor"]
        assert loaded.device == torch.device(device)
        assert loaded.tolist() == tensor.tolist()
    assert pickle.loads(pickle.dumps(tensor)).tolist() == tensor.tolist()
    model = copy.deepcopy(nn.Linear(3, 2, device="vgpu"))
    model.weight.data = tensor.to("vgpu:0")
    assert torch.equal(model.weight, tensor.to("vgpu:0"))
    view = tensor.t()[1:]
    view.add_(10)
    assert tensor.tolist() == [[0, 11, 12], [3, 14, 15]]
    storage = tensor.to("vgpu").untyped_storage()
    assert torch.empty(0, device="vgpu").set_(storage).tolist() == [0, 11, 12, 3, 14, 15]
    bits = tensor.view(torch.int32)
    assert bits.view(torch.float32).data_ptr() == tensor.data_ptr()
    assert torch.cat([tensor, tensor]).shape == (4, 3)
    out = torch.empty(0, device="vgpu:2")
    torch.add(tensor, 1, out=out)
    assert out.tolist() == [[1, 12, 13], [4, 15, 16]]
    assert f"{tensor}".endswith("device='vgpu:2')")


@vgpu.alone
def test_torch_distributed_works_beside_it_by_copies_on_the_host() -> None:
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    tensor = torch.arange(3.0, device="vgpu")
    host = tensor.cpu()
    torch.distributed.all_reduce(host)
    tensor.copy_(host + 1)
    assert tensor.tolist() == [1, 2, 3]
    with pytest.raises((RuntimeError, ValueError)):
        torch.distributed.all_reduce(tensor)
    torch.distributed.destroy_process_group()


@vgpu.alone
def test_there_are_eight_devices_and_each_thread_has_its_own_current_one() -> None:
    assert torch.accelerator.device_count() == vgpu.DEVICES
    assert str(torch.accelerator.current_accelerator()) == "vgpu"

    def work(index: int) -> torch.device:
        torch.accelerator.set_device_index(index)
        weight = torch.ones(3, 3, device="vgpu", requires_grad=True)
        (weight @ torch.ones(3, device="vgpu")).sum().backward()  # type: ignore[no-untyped-call]
        assert weight.grad is not None
        assert weight.grad.tolist() == [[1.0] * 3] * 3
        return weight.grad.device

    with ThreadPoolExecutor(vgpu.DEVICES) as threads:
        found = list(threads.map(work, range(vgpu.DEVICES)))
    assert found == [torch.device("vgpu", index) for index in range(vgpu.DEVICES)]
    assert torch.accelerator.current_device_index() == 0
    with pytest.raises(RuntimeError, match="there is no vgpu:8: there are 8"):
        torch.ones(1, device="vgpu:8")


@vgpu.alone
def test_what_backward_raises_reaches_the_caller() -> None:
    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, *gradients: torch.Tensor) -> torch.Tensor:
            raise KeyError(threading.current_thread().name)

    x = torch.ones(2, device="vgpu", requires_grad=True)
    with pytest.raises(KeyError) as raised:
        Raises.apply(x).sum().backward()  # type: ignore[no-untyped-call]
    assert raised.value.args != (threading.current_thread().name,), "it runs in the device's thread"


# -- the compiled library, without a device ------------------------------------------------------------------


def compiler(folder: Path, does: str) -> None:
    """A compiler on PATH, as a shell script."""
    program = folder / "g++"
    program.write_text(f"#!/bin/sh\n{does}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


def test_the_library_is_compiled_once_by_those_that_ask_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    compiler(tmp_path, '[ "$1" = --version ] || { echo made >> "$0.calls"; sleep 0.2; touch "$6"; }')
    monkeypatch.setattr(vgpu, "OPTIONS", ("1", "2", "3"))
    with ThreadPoolExecutor(4) as threads:
        (path,) = set(threads.map(lambda _: vgpu.library(), range(4)))
    assert path.exists()
    assert (tmp_path / "g++.calls").read_text() == "made\n"
    monkeypatch.setattr(vgpu, "OPTIONS", ("1", "2", "4"))
    assert vgpu.library() != path
    compiler(tmp_path, 'echo an error >&2; [ "$1" = --version ]')
    monkeypatch.setattr(vgpu, "OPTIONS", ("1", "2", "5"))
    with pytest.raises(RuntimeError, match=r"vgpu.cpp does not compile with torch .*\n.*an error"):
        vgpu.library()


def test_without_a_compiler_the_tests_are_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(pytest.skip.Exception, match=r"no C\+\+ compiler is on PATH"):
        vgpu.needed()
