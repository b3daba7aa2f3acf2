"""Copies between the device and the host: whole, in their order, and without a wait where none is needed."""

from __future__ import annotations

import mmap
import threading

import pytest
import torch
from elasticd_migration.local_state import (
    LocalState,
    LocalTensor,
    Owned,
    Shard,
    collect,
    restore,
    restore_optimizer,
)
from elasticd_planner.layout.layouts import Item
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.plan import Stage

from elasticd.runtime.accelerator import Accelerator
from elasticd.runtime.api.evaluation import _Sums
from elasticd.runtime.checkpoint.staging import Piece, Staging
from elasticd.runtime.engine.set_aside import SetAside
from elasticd.runtime.engine.warmup import warm
from elasticd.runtime.model.local_model import local_model
from elasticd.runtime.model.model import Model
from elasticd.runtime.model.rng import Dropout, ModelRng
from elasticd.runtime.snapshot.memory_file import MemoryFile, read, size_of
from elasticd.runtime.telemetry.device_probe import REPEATS, product
from tests.accelerators import vgpu

ITEM, SHAPE = Item("w", "state"), (300, 7)


def piece(accelerator: Accelerator, first: float = 0.0) -> Piece:
    """Values that the device has computed just now: nobody waited for them."""
    values = torch.arange(2100.0, device=accelerator.device).reshape(SHAPE) * 2 + first
    return Piece(ITEM, "m", Box.whole(SHAPE), values)


def expected(first: float = 0.0) -> torch.Tensor:
    return torch.arange(2100.0).reshape(SHAPE) * 2 + first


@vgpu.alone
def test_a_checkpoints_copy_is_whole_and_that_of_the_step() -> None:
    accelerator = Accelerator("vgpu:0")
    staging = Staging(accelerator)
    for first in (0.0, 5.0):
        held = piece(accelerator, first)
        (copied,) = staging.copy([held])
        held.values.zero_()  # as the next step's update does
        assert copied.values.is_pinned()
        assert torch.equal(copied.values, expected(first))


@vgpu.alone
def test_a_snapshot_goes_into_pinned_memory_and_comes_back_to_the_device() -> None:
    accelerator = Accelerator("vgpu:0")
    held = piece(accelerator)
    tensor = LocalTensor(shards=(Shard(box=held.box, planes={"m": held.values}),))
    small = LocalState(tensors={ITEM: LocalTensor(shards=())})
    file = MemoryFile(size_of([held], LocalState(tensors={ITEM: tensor})), accelerator)
    torch.empty(1, pin_memory=True)  # until some was made torch says of all memory that it is not pinned
    assert file._raw.is_pinned()
    with vgpu.counting() as spent:
        file.copy([held])
    assert spent.synchronizations == 0
    held.values.zero_()
    size = file.close("job", "a/0", 1, 3, [held], small)
    _, found = read(file.fd, size, accelerator.device)
    values = found.tensors[ITEM].shards[0].planes["m"]
    assert values.device == accelerator.device
    assert torch.equal(values.cpu(), expected())


@vgpu.alone
def test_a_snapshot_is_copied_by_another_thread_behind_the_update_alone() -> None:
    accelerator = Accelerator("vgpu:0")
    held = piece(accelerator)
    file = MemoryFile(size_of([held], LocalState()), accelerator)
    updated = accelerator.now()
    held_up = held.values.clone()

    def copies() -> None:
        accelerator.use()
        file.copy([held], updated)

    with vgpu.counting() as spent:
        thread = threading.Thread(target=copies)
        thread.start()
        for _ in range(3):
            held_up = held_up * 2  # the next step's passes
        thread.join(60)
    assert not thread.is_alive()
    assert spent.synchronizations == 0
    held.values.zero_()
    assert torch.equal(file._cut[0], expected())


@vgpu.alone
def test_numbers_are_read_and_batches_put_without_a_synchronization() -> None:
    accelerator = Accelerator("vgpu:0")
    batch = torch.arange(40)
    total = accelerator.put(batch).sum()
    with vgpu.counting() as spent:
        there = accelerator.put(batch)
        assert accelerator.read(there.sum(), 7, total) == [780.0, 7.0, 780.0]
    assert spent.synchronizations == 0
    assert there.device == accelerator.device


@vgpu.alone
def test_numbers_are_whole_whatever_the_current_device_is() -> None:
    """Another thread, or the user's code, may have another one."""
    accelerator = Accelerator("vgpu:3")
    accelerator.use()
    total = accelerator.put(torch.arange(40.0)).sum()
    torch.accelerator.set_device_index(0)
    assert accelerator.read(total, torch.ones(1, device="vgpu:3")) == [780.0, 1.0]


@vgpu.alone
def test_a_batch_is_its_owners_again_at_once() -> None:
    accelerator = Accelerator("vgpu:0")
    pinned = torch.arange(4000.0).pin_memory()
    there = accelerator.put(pinned)
    pinned.zero_()
    assert torch.equal(there.cpu(), torch.arange(4000.0))
    positions = torch.arange(5).expand(3, 5)
    assert torch.equal(accelerator.put(positions).cpu(), positions)


@vgpu.alone
def test_a_copy_that_fails_leaves_none_under_way() -> None:
    accelerator = Accelerator("vgpu:0")
    held = [torch.full((1 << 16,), 2.0, device="vgpu:0") for _ in range(3)]
    to = [torch.empty(1 << 16, pin_memory=True) for _ in range(2)]
    with pytest.raises(RuntimeError):
        accelerator.to_host(zip([*to, torch.empty(3)], held, strict=True))
    del held, to


@vgpu.alone
def test_a_whole_set_is_measured_on_the_device_though_a_measure_gives_one_tensor_again() -> None:
    kept = torch.zeros((), device="vgpu:0")

    def again(output: torch.Tensor, batch: object) -> tuple[torch.Tensor, int]:
        return kept.copy_(output.sum()), 2

    sums = _Sums({"again": again})
    for value in (1.0, 2.5):
        sums(torch.full((1,), value, device="vgpu:0"), {})
    assert sums.values(Accelerator("vgpu:0")).tolist() == [[3.5, 4.0]]


@vgpu.alone
def test_steps_are_counted_where_the_scripts_optimizer_counts_them() -> None:
    """A state of the CPU goes on on a device, fused or not, and one of the device without."""
    parameters = {place: torch.nn.Parameter(torch.ones(8, device=place)) for place in ("cpu", "vgpu:0")}

    def made(place: str, **options: bool) -> tuple[torch.optim.Optimizer, list[Owned], LocalState]:
        parameter = torch.nn.Parameter(parameters[place].detach().clone())
        owned = [Owned("w", Box.whole((8,)), parameter)]
        optimizer = torch.optim.AdamW([parameter], **options)
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return optimizer, owned, collect({"w": [(Box.whole((8,)), parameter)]}, owned, optimizer)

    for source, before, after, counted in (
        ("cpu", {}, {"fused": True}, "vgpu"),
        ("cpu", {"fused": True}, {}, "cpu"),
        ("vgpu:0", {"fused": True}, {}, "cpu"),
        ("vgpu:0", {}, {"capturable": True}, "vgpu"),
    ):
        _, _, state = made(source, **before)
        there = LocalState(
            tensors={
                item: LocalTensor(
                    shards=tuple(
                        Shard(
                            box=s.box,
                            planes={k: v.detach().to("vgpu:0", copy=True) for k, v in s.planes.items()},
                        )
                        for s in tensor.shards
                    ),
                    scalars={
                        scalar.name: restore(scalar, torch.device("vgpu:0"))
                        for scalar in state.schema().tensors[item.role][item.name].scalars
                    },
                )
                for item, tensor in state.tensors.items()
            },
            groups=state.groups,
        )
        optimizer, owned, _ = made("vgpu:0", **after)
        restore_optimizer(there, owned, optimizer)
        assert optimizer.state[owned[0].parameter]["step"].device.type == counted
        for name in after:
            assert optimizer.param_groups[0][name]
        optimizer.step()
        assert float(optimizer.state[owned[0].parameter]["step"]) == 2


@vgpu.alone
def test_host_memory_of_others_is_pinned_as_long_as_it_is_wanted() -> None:
    accelerator = Accelerator("vgpu:0")
    torch.empty(1, pin_memory=True)  # until some was made torch says of all memory that it is not pinned
    memory = torch.frombuffer(mmap.mmap(-1, 1 << 16), dtype=torch.uint8)
    unpin = accelerator.pin(memory)
    assert unpin is not None
    assert memory.is_pinned()
    unpin()
    assert not memory.is_pinned()


@vgpu.alone
def test_a_dropouts_mask_is_that_of_the_cpu_and_nobody_waits_for_its_keys() -> None:
    accelerator = Accelerator("vgpu:0")
    drop, x = Dropout(0.4, "site"), torch.ones(3, 50)
    drop.drawing = ModelRng()
    drop.drawing.begin(1, 2)
    here = drop(x)
    there = accelerator.put(x)
    with vgpu.counting() as spent:
        masked = drop(there)
    assert spent.synchronizations == 0
    assert torch.equal(masked.cpu(), here)


@vgpu.alone
def test_what_a_section_draws_on_the_device_is_keyed() -> None:
    accelerator = Accelerator("vgpu:1")
    accelerator.use()
    drawing = ModelRng()
    drawing.begin(3, 5)
    drawing.drew = set()
    drawn = []
    for _ in range(2):
        with drawing.keyed("site"):
            drawn.append(torch.rand(4, device=accelerator.device).cpu())
        torch.rand(7, device=accelerator.device)
    assert torch.equal(*drawn)
    assert "site" in drawing.drew


class _Scaled(torch.nn.Module):
    """Has a buffer that is not in its state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.register_buffer("scale", torch.full((8,), 3.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


@vgpu.alone
def test_the_pass_before_all_others_is_on_the_device_and_buffers_come_along() -> None:
    accelerator = Accelerator("vgpu:0")
    model = Model(name="m", embed=torch.nn.Embedding(4, 8), blocks=[_Scaled()] * 2, head=torch.nn.Linear(8, 4))
    with vgpu.counting() as spent:
        warm(model, accelerator)
    assert spent.launches > 5
    stage = Stage(start=0, stop=2, devices=("a/0",), shares=(1,))
    local = local_model(model, stage, 0, accelerator)
    assert local.modules["blocks.0"].scale.device == accelerator.device
    assert local.modules["blocks.0"].scale.tolist() == [3.0] * 8


@vgpu.alone
def test_the_idle_probe_and_the_times_of_sections_are_the_devices() -> None:
    accelerator = Accelerator("vgpu:0")
    with vgpu.counting() as spent:
        assert len(product(lambda start: None, accelerator)) == REPEATS
    assert spent.launches > REPEATS
    start, end = (accelerator.event(timing=True) for _ in range(2))
    start.record()
    torch.ones(64, 64, device=accelerator.device) @ torch.ones(64, 64, device=accelerator.device)
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) > 0
    assert accelerator.used_bytes() > 0
    assert accelerator.free_bytes() > 0


@vgpu.alone
def test_state_set_aside_makes_room_on_the_device_and_comes_back() -> None:
    vgpu.limit(3 << 19)  # the old state, and half of as much
    accelerator = Accelerator("vgpu:0")
    box = Box.whole((1 << 18,))
    values = torch.arange(1.0 * (1 << 18), device=accelerator.device)
    old = LocalState(tensors={ITEM: LocalTensor(shards=(Shard(box=box, planes={"m": values}),))})
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(1 << 18, device="vgpu")
    aside = SetAside(old, accelerator)
    torch.empty(1, pin_memory=True)  # until some was made torch says of all memory that it is not pinned
    aside.lend({})
    here = aside.state.tensors[ITEM].shards[0].planes["m"]
    assert here.is_pinned()
    assert torch.equal(here, torch.arange(1.0 * (1 << 18)))
    new = here.to("vgpu")  # what the new plan has here
    with pytest.raises(torch.OutOfMemoryError):
        aside.back()
    assert torch.equal(here, torch.arange(1.0 * (1 << 18))), "nothing is lost by that"
    assert values.untyped_storage().nbytes() == 0
    del new
    aside.back()
    assert torch.equal(values.cpu(), torch.arange(1.0 * (1 << 18)))
