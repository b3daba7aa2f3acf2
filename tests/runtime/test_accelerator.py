"""The seam to devices: copies to the host are whole; each worker computes on its device or is told why not."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from elasticd.runtime import accelerator
from elasticd.runtime.accelerator import CPU, Accelerator, NoDevice, placed
from elasticd.system import torch_build

SIZE = 1 << 20


def mapped() -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(-1, SIZE), dtype=torch.uint8)


def test_values_of_any_stride_go_where_they_belong() -> None:
    memory = mapped()
    table = torch.arange(24.0).reshape(4, 6)
    first, second = memory[:96].view(torch.float32).reshape(6, 4), memory[128:136].view(torch.int64)
    CPU.to_host([(first, table.T), (second, torch.tensor([-7]))])
    assert torch.equal(first, table.T)
    assert second.tolist() == [-7]
    assert not memory[136:].any()


def test_the_cpu_is_an_accelerator_whose_work_is_done_at_once() -> None:
    start, end = (CPU.event(timing=True) for _ in range(2))
    start.record()
    sum(range(10_000))
    end.record()
    assert end.query()
    assert 0 < start.elapsed_time(end) < 60_000
    assert CPU.read(torch.tensor(1.5), 2) == [1.5, 2.0]
    assert CPU.put(same := torch.ones(2)) is same
    assert CPU.pin(mapped()) is None
    assert CPU.used_bytes() > 1 << 20
    assert CPU.free_bytes() > 0
    assert CPU.name == "cpu"


# -- which one a worker computes on --------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> object:
    """Sets what torch was built for, the devices that it finds, and whether there is a driver, or a GPU."""

    def of(built: str | None, count: int = 0, *, driver: bool = False, gpu: bool = True) -> None:
        device = torch.device(built) if built is not None else None
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: device)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(accelerator, "driver_is_there", lambda: driver)
        monkeypatch.setattr(accelerator, "gpu_is_there", lambda vendor: gpu)

    return of


@pytest.mark.parametrize(
    ("asked", "environ", "found"),
    [
        (None, {}, "cuda:0"),
        (None, {"LOCAL_RANK": "2"}, "cuda:2"),
        ("cuda", {"LOCAL_RANK": "3"}, "cuda:3"),
        ("cuda:1", {"LOCAL_RANK": "3"}, "cuda:1"),
        ("cpu", {"LOCAL_RANK": "3"}, "cpu"),
        (None, {"ELASTICD_DEVICE": "cpu"}, "cpu"),
        ("cuda", {"ELASTICD_DEVICE": "cpu"}, "cuda:0"),
        (None, {"CUDA_VISIBLE_DEVICES": ""}, "cpu"),
        (None, {"CUDA_VISIBLE_DEVICES": "-1"}, "cpu"),
        (None, {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, "cpu"),
        (None, {"ROCR_VISIBLE_DEVICES": ""}, "cpu"),
        ("CPU", {}, "cpu"),
        ("cpu:0", {}, "cpu"),
    ],
)
def test_a_worker_computes_on_the_device_of_its_local_rank(machine, asked, environ, found) -> None:  # type: ignore[no-untyped-def]
    machine("cuda", 4, driver=True)
    assert placed(asked, environ).device == torch.device(found)


@pytest.mark.parametrize(
    ("kind", "count", "environ", "found"),
    [
        # `elasticd run` hides CUDA's GPUs from workers, and gives each a slot.
        ("xpu", 4, {"CUDA_VISIBLE_DEVICES": "", "ELASTICD_SLOT": "3", "LOCAL_RANK": "0"}, "xpu:3"),
        ("cuda", 4, {"ELASTICD_SLOT": "3", "LOCAL_RANK": "0"}, "cuda:3"),
        ("cuda", 1, {"CUDA_VISIBLE_DEVICES": "3", "LOCAL_RANK": "3"}, "cuda:0"),
        ("cuda", 1, {"CUDA_VISIBLE_DEVICES": "3", "ELASTICD_SLOT": "3", "LOCAL_RANK": "0"}, "cuda:0"),
    ],
)
def test_a_worker_that_has_a_torchrun_of_its_own_goes_by_its_slot(machine, kind, count, environ, found) -> None:  # type: ignore[no-untyped-def]
    machine(kind, count, driver=True)
    assert placed(None, environ).device == torch.device(found)


def test_without_any_device_it_is_the_cpu(machine) -> None:  # type: ignore[no-untyped-def]
    machine(None)
    assert placed(None, {}) is CPU


def test_a_torch_for_gpus_trains_on_the_cpu_of_a_machine_that_has_none(machine) -> None:  # type: ignore[no-untyped-def]
    """It is the build that pip takes by default."""
    machine("cuda", 0, gpu=False)
    assert placed(None, {}) is CPU
    with pytest.raises(NoDevice, match="finds no such device"):
        placed("cuda", {})
    machine("cuda", 0, driver=True, gpu=False)
    with pytest.raises(NoDevice, match="finds no such device"):
        placed(None, {})


def test_a_gpu_is_a_display_of_its_vendor_whatever_else_that_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_build, "PCI", tmp_path / "devices")
    assert torch_build.gpu_is_there(torch_build.NVIDIA), "nobody knows"
    for vendor, kind in (("0x10de", "0x040300"), ("0x1002", "0x030200"), ("0x1af4", "0x020000")):
        folder = tmp_path / "devices" / vendor
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "class").write_text(f"{kind}\n")
    (tmp_path / "devices" / "3").mkdir()
    assert torch_build.gpu_is_there(torch_build.AMD)
    assert not torch_build.gpu_is_there(torch_build.NVIDIA), "a sound controller"


@pytest.mark.parametrize(
    ("built", "count", "driver", "asked", "environ", "said"),
    [
        (None, 0, True, None, {}, r"this machine has a GPU, and this torch .* ask for the CPU by ELASTICD_DEV"),
        ("cuda", 0, False, None, {}, r"is built for cuda, and finds no such device.*ELASTICD_DEVICE=cpu"),
        ("cuda", 2, True, None, {"LOCAL_RANK": "2"}, r"cuda:2: this process sees 2 .* share one"),
        ("cuda", 2, True, "cuda:2", {}, r"cuda:2: this process sees 2 of cuda alone$"),
        ("cuda", 2, True, "tpu", {}, r"device 'tpu': this torch .* computes on cpu and cuda"),
        ("cuda", 2, True, None, {"LOCAL_RANK": "x"}, r"LOCAL_RANK is 'x'"),
        ("cuda", 2, True, "cuda:x", {}, r"device 'cuda:x'"),
        ("cuda", 2, True, "cuda:²", {}, r"device 'cuda:²'"),
        (None, 0, False, "cuda", {}, r"device 'cuda': this torch .* computes on CPUs alone"),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(machine, built, count, driver, asked, environ, said) -> None:  # type: ignore[no-untyped-def]
    machine(built, count, driver=driver)
    with pytest.raises(NoDevice, match=said):
        placed(asked, environ)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs a GPU")
def test_values_on_a_gpu_go_into_pinned_memory_behind_what_is_still_to_be_computed() -> None:
    gpu = Accelerator(torch.accelerator.current_accelerator() or "cpu")
    memory = mapped()
    to = memory.view(torch.float32)
    assert not to.is_pinned()
    unpin = gpu.pin(memory)
    large = torch.ones(4096, 4096, device=gpu.device)
    for turn in range(2):
        values = (large @ large @ large).reshape(-1)[: to.numel()] * (turn + 1)
        gpu.to_host([(to, values)])
        kept = to.clone()
        values.zero_()  # as the next step does
        gpu.wait()
        assert to.is_pinned()
        assert torch.equal(kept, to)
        assert set(kept.tolist()) == {4096.0**2 * (turn + 1)}
    assert unpin is not None
    unpin()
    assert not to.is_pinned()
