"""The boxes of all devices of a mesh, by torch's own arithmetic, and what a job's holdings say of them."""

from __future__ import annotations

import math
from itertools import product

import msgspec
import pytest
import torch
from elasticd_migration.checkpoint_writers import writers
from elasticd_migration.reshard import Lost, bytes_lacking, reshard
from elasticd_planner.layout.holdings import Holdings, holdings_of
from elasticd_planner.layout.layouts import Item
from elasticd_planner.layout.mesh_layouts import MeshLayouts, placed_boxes
from elasticd_planner.layout.snapshot_layouts import SnapshotLayouts
from elasticd_planner.layout.surviving_layouts import SurvivingLayouts
from elasticd_planner.spec.box import Box, subtract
from elasticd_planner.spec.mesh import AllowedMesh, MeshModel, MeshPlan, MeshTensor, Placement
from elasticd_planner.value import Invalid
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as torch_box
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.distributed.tensor.placement_types import _StridedShard

from tests.migration.plans import alone
from tests.sizes import examples


def torch_placements(mesh: tuple[int, ...], placements: tuple[Placement, ...]) -> list[TorchPlacement]:
    """As FSDP makes them: `_fsdp_param.py`."""
    made: list[TorchPlacement] = []
    for d, placement in enumerate(placements):
        if placement.dim is None:
            made.append(Replicate())
            continue
        later = math.prod(mesh[e] for e in range(d + 1, len(mesh)) if placements[e].dim == placement.dim)
        made.append(
            _StridedShard(placement.dim, split_factor=later)
            if placement.strided and later > 1
            else Shard(placement.dim)
        )
    return made


@st.composite
def placed(draw) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]:  # type: ignore[no-untyped-def]
    shape = tuple(draw(st.lists(st.integers(1, 17), max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dims = st.sampled_from([None, *range(len(shape))])
    placements = [Placement(dim=draw(dims)) for _ in mesh]
    placements = [Placement(dim=p.dim, strided=p.dim is not None and draw(st.booleans())) for p in placements]
    return shape, mesh, tuple(placements)


def local_part(
    full: torch.Tensor, mesh: tuple[int, ...], at: tuple[int, ...], placements: list[TorchPlacement]
) -> torch.Tensor:
    """The elements that torch cuts for one rank: what `distribute_tensor` does, without a group."""
    part = full
    for extent, index, placement in zip(mesh, at, placements, strict=True):
        if isinstance(placement, Shard | _StridedShard):
            part = placement._split_tensor(part, extent, with_padding=False, contiguous=True)[0][index]
    return part


@settings(max_examples=examples(150), deadline=None)
@given(placed())
def test_boxes_are_those_of_torch(case: tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]) -> None:
    shape, mesh, placements = case
    full = torch.arange(math.prod(shape)).reshape(shape)
    theirs = torch_placements(mesh, placements)
    for at, boxes in zip(product(*map(range, mesh)), placed_boxes(shape, mesh, placements), strict=True):
        size, start = torch_box(shape, mesh, list(at), theirs)
        assert math.prod(size) == sum(box.size for box in boxes)
        if boxes:
            assert boxes[0].start == tuple(start)
        ours = [full[tuple(map(slice, box.start, box.stop))].flatten() for box in boxes]
        held = torch.cat(ours) if ours else full.new_empty(0)
        part = local_part(full, mesh, at, theirs)
        assert sorted(held.tolist()) == sorted(part.flatten().tolist())
        if len({(box.start[1:], box.stop[1:]) for box in boxes}) <= 1:  # cut unevenly in one dimension at most
            assert held.tolist() == part.flatten().tolist(), "in the order of the local tensor"
        if len(boxes) == 1:
            assert boxes[0].shape == tuple(size)


HSDP, FSDP, TP = (AllowedMesh.from_text(text) for text in ("replicate, shard", "shard", "dp, tp=2"))
R, S0, S1 = Placement(), Placement(dim=0), Placement(dim=1)
MODEL = MeshModel(
    meshes=(HSDP, FSDP, TP),
    tensors=(
        MeshTensor(
            name="up.weight",
            shape=(10, 6),
            dtype="float32",
            placements=((R, S0), (S0,), (Placement(dim=0, strided=True), S0)),
        ),
        MeshTensor(name="down.weight", shape=(6, 10), dtype="float32", placements=((R, S0), (S0,), (S0, S1))),
        MeshTensor(
            name="bias", shape=(3,), dtype="float32", kind="frozen", placements=((R, S0), (S0,), (S0, R))
        ),
        MeshTensor(name="freq", shape=(), dtype="float32", kind="buffer", placements=((R, R), (R,), (R, R))),
    ),
)
SIZES = {
    Item(t.name, role): 8 if role == "state" else 4
    for t in MODEL.tensors
    for role in ("value", "state", "buffer")
}


def mesh_plan(number: int, mesh: AllowedMesh, shape: tuple[int, ...], devices: int = 0) -> MeshPlan:
    count = math.prod(shape)
    lanes = count // 2 if "tp" in mesh.names else count
    members = tuple(f"n{i}/0" for i in range(devices, devices + count))
    return MeshPlan(number=number, names=mesh.names, shape=shape, members=members, samples=(2,) * lanes)


PLANS = st.one_of(
    st.builds(
        lambda a, b, d: mesh_plan(1, HSDP, (a, b), d), st.integers(1, 3), st.integers(1, 4), st.integers(0, 3)
    ),
    st.builds(lambda a, d: mesh_plan(1, FSDP, (a,), d), st.integers(1, 7), st.integers(0, 3)),
    st.builds(lambda a, d: mesh_plan(1, TP, (a, 2), d), st.integers(1, 3), st.integers(0, 3)),
)


@settings(max_examples=examples(100), deadline=None)
@given(old=PLANS, new=PLANS, data=st.data())
def test_state_moves_between_any_two_meshes(old: MeshPlan, new: MeshPlan, data: st.DataObject) -> None:
    """By the arithmetic of pipelines: from what a fault left, each lacking byte once, or the loss by name."""
    gone = data.draw(st.sets(st.sampled_from(old.members), max_size=len(old.members) - 1))
    before, after = (
        SurvivingLayouts(holdings_of(MODEL, old), gone=gone),
        holdings_of(MODEL, new.replace(number=2)),
    )
    lost = dict(before.lost())
    for item in before.items:
        held = [box for device in old.members for box in before.boxes(item, device)]
        whole = Box.whole(before.layout(item).shape)
        assert sum(box.size for box in lost.get(item, ())) == sum(box.size for box in subtract(whole, held))
        for device in (*old.members, *new.members):
            assert before.held(device).get(item, ()) == before.boxes(item, device)
            assert after.boxes(item, device) == after.layout(item).of(device)
    if lost:  # a mesh has all of every tensor, so that what is lost is wanted
        with pytest.raises(Lost) as error:
            reshard(before, after, SIZES)
        assert {str(item) for item in error.value.boxes} <= {str(item) for item in lost}
        return
    transfers = reshard(before, after, SIZES)
    moved = sum(t.box.size * sum(SIZES[item] for item in t.items) for t in transfers)
    assert moved == sum(bytes_lacking(before, after, SIZES).values())


def dealt(layouts: Holdings) -> dict[str, dict[Item, tuple[Box, ...]]]:
    """The share of each member in a set of snapshots."""
    members = layouts.plan.members
    shares: dict[str, dict[Item, tuple[Box, ...]]] = {member: {} for member in members}
    for role in ("value", "state", "buffer"):
        items = {item.name: item for item in layouts.items if item.role == role}
        held = writers([layouts.layout(item) for item in items.values()], members)
        for member, boxes in held.items():
            shares[member] |= {items[name]: own for name, own in boxes.items()}
    return shares


@settings(max_examples=examples(60), deadline=None)
@given(old=PLANS, new=PLANS, data=st.data())
def test_snapshots_of_the_dead_and_copies_of_the_living_fill_any_other_mesh(
    old: MeshPlan, new: MeshPlan, data: st.DataObject
) -> None:
    layouts = holdings_of(MODEL, old)
    gone = data.draw(st.sets(st.sampled_from(old.members), max_size=len(old.members) - 1))
    left = SurvivingLayouts(layouts, gone=gone)
    lost, living = dict(left.lost()), [device for device in old.members if device not in gone]
    assert left.last_holders() <= gone
    stands = {member: data.draw(st.sampled_from(living)) for member in sorted(left.last_holders())}
    before = SnapshotLayouts(layouts, shares=dealt(layouts), stands=stands, left=left)
    for item in before.items:
        read = before.layout(item).holdings[len(left.layout(item).holdings) :]
        assert sum(h.box.size for h in read) == sum(box.size for box in lost.get(item, ())), "those boxes alone"
    after = holdings_of(MODEL, new.replace(number=2))
    moved = sum(t.box.size * sum(SIZES[item] for item in t.items) for t in reshard(before, after, SIZES))
    assert moved == sum(bytes_lacking(before, after, SIZES).values())


@settings(max_examples=examples(60), deadline=None)
@given(old=PLANS, new=PLANS, data=st.data())
def test_snapshots_of_a_mesh_fill_any_other(old: MeshPlan, new: MeshPlan, data: st.DataObject) -> None:
    """Each element is in one member's share, and whoever stands in for the members has all that is wanted."""
    bound = old.replace(binding=dict.fromkeys(old.members, "old"))
    layouts = holdings_of(MODEL, bound)
    stands = {member: data.draw(st.sampled_from(new.members)) for member in old.members}
    before = SnapshotLayouts(layouts, shares=dealt(layouts), stands=stands)
    for item in before.items:
        layout = before.layout(item)
        boxes = [holding.box for holding in layout.holdings]
        assert sum(box.size for box in boxes) == Box.whole(layout.shape).size, "exactly once"
        assert not subtract(Box.whole(layout.shape), boxes), "all of it"
    after = holdings_of(MODEL, new.replace(number=2, binding=dict.fromkeys(new.members, "new")))
    moved = sum(t.box.size * sum(SIZES[item] for item in t.items) for t in reshard(before, after, SIZES))
    assert moved == sum(bytes_lacking(before, after, SIZES).values())


def test_replicas_survive_one_death_and_plain_shards_do_not() -> None:
    assert not dict(SurvivingLayouts(MeshLayouts(MODEL, mesh_plan(1, HSDP, (2, 2))), gone={"n3/0"}).lost())
    lost = dict(SurvivingLayouts(MeshLayouts(MODEL, mesh_plan(1, FSDP, (4,))), gone={"n3/0"}).lost())
    assert lost[Item("up.weight", "state")] == (Box(start=(9, 0), stop=(10, 6)),)
    assert Item("bias", "value") not in lost, "its last shard is empty"


def test_items_that_lie_alike_are_one_family() -> None:
    layouts = MeshLayouts(MODEL, mesh_plan(1, TP, (2, 2)))
    up, state = Item("up.weight", "value"), Item("up.weight", "state")
    assert layouts.family(up) == layouts.family(state) != layouts.family(Item("down.weight", "value"))
    twin = next(each for each in MODEL.tensors if each.name == up.name)
    twin = msgspec.structs.replace(twin, name="twin")
    both = MeshLayouts(msgspec.structs.replace(MODEL, tensors=(*MODEL.tensors, twin)), mesh_plan(1, TP, (2, 2)))
    shared = both.layout(up).holdings is both.layout(Item("twin", "value")).holdings
    assert shared, "whoever deals them out cuts them once"


def test_devices_of_tensor_parallelism_take_the_same_samples() -> None:
    plan = mesh_plan(1, TP, (2, 2))
    assert plan.lanes == (("n0/0", "n1/0"), ("n2/0", "n3/0"))
    assert [plan.lane_of[device] for device in plan.members] == [0, 0, 1, 1]
    assert plan.global_batch == 4


def test_a_plan_of_the_other_kind_is_refused_by_name() -> None:
    with pytest.raises(Invalid, match="plan 0 has pipelines, and the job trains on a mesh"):
        holdings_of(MODEL, alone())
    with pytest.raises(Invalid, match="none of those that the job may have: replicate, shard; shard; dp, tp=2"):
        holdings_of(MODEL, mesh_plan(1, AllowedMesh(names=("ep",)), (4,)))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is no name of a dimension"),
        ("replicate, replicate", "is there twice"),
        ("shard=0", "give a number of devices"),
        ("shard=many", "give a number of devices"),
    ],
)
def test_a_mesh_that_makes_no_sense_is_refused(text: str, words: str) -> None:
    with pytest.raises(Invalid, match=words):
        AllowedMesh.from_text(text)


def test_a_mesh_has_one_text() -> None:
    assert AllowedMesh.from_text("replicate=*,shard=8").text == "replicate, shard=8"
    assert AllowedMesh.from_text("replicate=*, shard=*") == HSDP
