"""What was saved under one layout is loaded under any other, bit by bit, and no byte is written twice."""

import tempfile
from pathlib import Path

import msgspec
import pytest
import torch
from elasticd_migration.local_state import LocalState
from elasticd_planner.layout.layouts import Item, Layouts
from elasticd_planner.spec.box import Box, subtract
from elasticd_planner.spec.plan import Plan
from hypothesis import given, settings

from elasticd.checkpoints.checksums import BLOCK_BYTES, ChecksumWriter, Damaged
from elasticd.checkpoints.disk import LocalDisk
from elasticd.checkpoints.folder import look
from elasticd.checkpoints.manifest import Manifest
from elasticd.checkpoints.reader import CheckpointReader, Wanted
from elasticd.runtime.checkpoint.loader import load
from elasticd.runtime.checkpoint.staging import shares
from tests.checkpoints.support import THREE, WHOLE, save
from tests.migration.plans import SPEC, plans
from tests.migration.ranks import assert_same_bits, local
from tests.sizes import examples


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def manifest(path: Path) -> Manifest:
    found = look(path)
    assert found.manifest is not None, found.damage
    return found.manifest


def loaded(path: Path, layouts: Layouts, device: str) -> LocalState:
    return load(path, manifest(path), layouts.held(device))


@settings(max_examples=examples(40))
@given(plans(1), plans(2))
def test_a_checkpoint_of_any_layout_is_loaded_under_any_other_bit_by_bit(before: Plan, after: Plan) -> None:
    old, new = Layouts(SPEC, before), Layouts(SPEC, after)
    with tempfile.TemporaryDirectory() as folder:
        path = save(Path(folder), old)
        for device in after.members:
            state = loaded(path, new, device)
            expected = local(WHOLE, new, device)
            assert_same_bits(state, expected)
            assert state.groups == manifest(path).groups
            assert state.extras == expected.extras


@settings(max_examples=examples(60))
@given(plans(1))
def test_every_element_is_written_once_and_replicas_share_the_work(plan: Plan) -> None:
    layouts = Layouts(SPEC, plan)
    dealt = shares(layouts)
    for item in layouts.items:
        boxes = [box for mine in dealt.values() for box in mine.get(item, ())]
        shape = layouts.layout(item).shape
        assert sum(box.size for box in boxes) == Box.whole(shape).size, item
        assert not subtract(Box.whole(shape), boxes), item
        for device, mine in dealt.items():
            held = layouts.layout(item).of(device)
            assert all(any(own.contains(box) for own in held) for box in mine.get(item, ()))


def test_only_the_blocks_that_are_needed_are_read(tmp_path: Path) -> None:
    """A narrow column of a wide matrix, a row of it, and all of it."""
    wide = torch.arange(1 << 21, dtype=torch.float64).reshape(4, 1 << 19)
    path, found = tmp_path, manifest(save(tmp_path))
    file, entry = "big", found.tensors["value"]["embed.tokens.weight"]
    chunk = entry.planes[0].chunks[0]
    summed = ChecksumWriter(LocalDisk().create(path / file))
    summed.write(wide.numpy().tobytes())
    whole = Box.whole((4, 1 << 19))
    record = msgspec.structs.replace(chunk.record, file=file)
    plane = msgspec.structs.replace(
        entry.planes[0],
        dtype="float64",
        itemsize=8,
        chunks=(msgspec.structs.replace(chunk, box=whole, record=record, data=0),),
    )
    found = msgspec.structs.replace(
        found,
        tensors={"value": {"w": msgspec.structs.replace(entry, shape=(4, 1 << 19), planes=(plane,))}},
        files=(summed.finish(file),),
    )
    for box, most in (
        (Box(start=(0, 7), stop=(4, 9)), 4 * BLOCK_BYTES),
        (Box(start=(2, 0), stop=(3, 1 << 19)), 4 * BLOCK_BYTES),
        (Box(start=(1, 100), stop=(2, 101)), BLOCK_BYTES),
        (whole, 16 * BLOCK_BYTES),
    ):
        reader = CheckpointReader(path, found)
        into = torch.empty(box.shape, dtype=torch.float64)
        reader.read([Wanted(Item("w", "value"), "value", box, into.reshape(-1).view(torch.uint8).numpy())])
        assert torch.equal(into, wide[box.slices(whole)])
        assert reader.bytes_read <= most, box


def test_what_a_checkpoint_does_not_have_is_named(tmp_path: Path) -> None:
    path = save(tmp_path)
    found = manifest(path)
    del found.tensors["value"]["embed.tokens.weight"]
    with pytest.raises(Damaged, match=r"embed\.tokens\.weight"):
        load(path, found, THREE.held("n0/0"))
