"""A snapshot in a memory file: bit by bit what was copied, and refused when it is anything else."""

from __future__ import annotations

import os

import pytest
import torch
from elasticd_migration.local_state import LocalState, LocalTensor, Shard
from elasticd_migration.schema import Group
from elasticd_planner.layout.layouts import Item, Layouts
from elasticd_planner.spec.box import Box
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticd.runtime.checkpoint.staging import Piece, pieces, shares, without_planes
from elasticd.runtime.snapshot.memory_file import BadSnapshot, MemoryFile, joined, read, size_of
from tests.migration.plans import SPEC, plans
from tests.migration.ranks import assert_same_bits, local, same_bits, trained
from tests.sizes import examples

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int8,
    torch.bool,
    torch.complex64,
]
SHAPES = [(), (1,), (3, 5), (2, 3, 4, 5), (0, 4), (7_001, 3)]
WHOLE = trained()


def bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Any bits at all, also those of NaNs."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def state_of(tensors: dict[str, torch.Tensor], **scalars: object) -> LocalState:
    made = {
        Item(name, "state"): LocalTensor(
            shards=(Shard(box=Box.whole(tuple(value.shape)), planes={"m": value}),),
            scalars=scalars,  # type: ignore[arg-type]
        )
        for name, value in tensors.items()
    }
    return LocalState(tensors=made, groups=(Group(settings="{}", names=("a",)),), extras={"scheduler": "{}"})


def written(
    state: LocalState, boxes: dict[Item, tuple[Box, ...]], file: MemoryFile | None = None, step: int = 7
) -> tuple[MemoryFile, int]:
    held, small = pieces(state, boxes), without_planes(state, boxes)
    file = file or MemoryFile(size_of(held, small))
    file.copy(held)
    return file, file.close("job", "a/0", 3, step, held, small)


def whole_boxes(state: LocalState) -> dict[Item, tuple[Box, ...]]:
    return {item: tuple(shard.box for shard in tensor.shards) for item, tensor in state.tensors.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape_comes_back_bit_by_bit(dtype: torch.dtype) -> None:
    tensors = {f"t{i}": bits(dtype, shape, i) for i, shape in enumerate(SHAPES)}
    scalars = {
        "step": torch.tensor(41.5),
        "small": bits(torch.float8_e4m3fn, ()),
        "count": 3,
        "rate": 0.1,
        "on": True,
        "none": None,
    }
    state = state_of(tensors, **scalars)
    file, size = written(state, whole_boxes(state))
    contents, found = read(file.fd, size)
    assert (contents.job, contents.device, contents.plan, contents.step) == ("job", "a/0", 3, 7)
    assert (found.groups, found.extras) == (state.groups, state.extras)
    for name, value in tensors.items():
        there = found.tensors[Item(name, "state")]
        (shard,) = there.shards
        assert same_bits(shard.planes["m"], value), name
        for key, scalar in scalars.items():
            got = there.scalars[key]
            if isinstance(scalar, torch.Tensor):
                assert isinstance(got, torch.Tensor)
                assert same_bits(got, scalar)
            else:
                assert (type(got), got) == (type(scalar), scalar)


def test_what_was_read_has_memory_of_its_own() -> None:
    state = state_of({"a": torch.arange(6.0)})
    file, size = written(state, whole_boxes(state))
    _, found = read(file.fd, size)
    mine = found.tensors[Item("a", "state")].shards[0].planes["m"]
    mine.add_(1.0)
    _, again = read(file.fd, size)
    assert torch.equal(again.tensors[Item("a", "state")].shards[0].planes["m"].cpu(), torch.arange(6.0))
    file.copy([Piece(Item("a", "state"), "m", Box.whole((6,)), torch.zeros(6))])
    assert torch.equal(mine.cpu(), torch.arange(6.0) + 1.0)


def test_a_file_serves_one_snapshot_after_another() -> None:
    """Also a smaller one after a larger one, whose bytes still lie behind it."""
    large, small = state_of({"a": torch.randn(500), "b": torch.randn(70)}), state_of({"c": torch.randn(3, 3)})
    file, size = written(large, whole_boxes(large))
    assert_same_bits(read(file.fd, size)[1], large)
    file, size = written(small, whole_boxes(small), file, step=8)
    contents, found = read(file.fd, size)
    assert contents.step == 8
    assert_same_bits(found, small)


def test_state_that_no_step_made_yet_is_told_too() -> None:
    box = Box.whole((4,))
    nothing = LocalTensor(shards=(Shard(box=box, planes={}),))
    state = LocalState(tensors={Item("a", "state"): nothing})
    file, size = written(state, {Item("a", "state"): (box,)})
    assert read(file.fd, size)[1].schema() == state.schema()


@settings(max_examples=examples(150))
@given(at=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_a_byte_that_changed_is_noticed(at: int, flip: int) -> None:
    state = state_of({"a": torch.arange(40.0), "b": torch.zeros(3)})
    file, size = written(state, whole_boxes(state))
    at %= size
    os.pwrite(file.fd, bytes([os.pread(file.fd, 1, at)[0] ^ flip]), at)
    with pytest.raises(BadSnapshot):
        read(file.fd, size)


@pytest.mark.parametrize("size", [0, 5, 64, 1 << 40])
def test_what_is_no_snapshot_is_refused(size: int) -> None:
    file = MemoryFile(4096)
    with pytest.raises(BadSnapshot):
        read(file.fd, size)


def test_what_does_not_fit_is_refused_before_a_byte_is_written() -> None:
    file = MemoryFile(4096)
    with pytest.raises(BadSnapshot, match="do not fit"):
        file.copy([Piece(Item("a", "state"), "m", Box.whole((2000,)), torch.zeros(2000))])


@settings(max_examples=examples(25))
@given(plan=plans(1))
def test_the_members_snapshots_are_together_the_whole_state(plan) -> None:  # type: ignore[no-untyped-def]
    layouts = Layouts(SPEC, plan)
    dealt, read_back = shares(layouts), {}
    for member in plan.members:
        file, size = written(local(WHOLE, layouts, member), dealt[member])
        read_back[member] = read(file.fd, size)[1]
    state = joined(read_back)
    whole = WHOLE.state()
    assert set(state.tensors) == set(whole.tensors)
    for item, tensor in whole.tensors.items():
        (source,) = tensor.shards
        parts = state.tensors[item].shards
        assert sum(part.box.size for part in parts) == (source.box.size if source.planes else 0)
        assert set(state.tensors[item].scalars) == set(tensor.scalars)
        for part in parts:
            for plane in source.planes:
                assert same_bits(part.planes[plane], source.part(plane, part.box)), item
    assert state.groups == whole.groups


def test_snapshots_of_two_steps_are_not_joined() -> None:
    one, two = state_of({"a": torch.zeros(2)}, step=1), state_of({"a": torch.zeros(2)}, step=2)
    with pytest.raises(BadSnapshot, match="do not fit"):
        joined({"a/0": one, "a/1": two})
