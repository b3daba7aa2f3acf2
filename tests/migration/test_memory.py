"""Memory of a move: bounded staging beside both states, or little more than one state in place."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from elasticd_migration.local_state import VALUE, LocalState, LocalTensor, Shard
from elasticd_migration.migrate import Corrupt, Moved, migrate
from elasticd_migration.target_buffers import TargetBuffers
from elasticd_migration.transport import MemoryTransport
from elasticd_planner.layout.layouts import Item, Layouts
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.plan import Plan
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.house import ROOT
from tests.migration.memory import LIMIT
from tests.migration.plans import SPEC, plans
from tests.migration.ranks import assert_same_bits, local, members, together, trained
from tests.sizes import examples

WHOLE = trained()
MIB = 1 << 20


@pytest.fixture(scope="module")
def peaks() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.migration.memory"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_beside_both_states_a_move_takes_two_rounds_each_way(peaks: dict[str, Any]) -> None:
    """The allowance is for what is no state: messages, schedules, the interpreter's own."""
    found = peaks["sliced"]
    assert MIB < found["staged"] <= 2 * 4 * LIMIT
    changed = found["state"]
    assert found["peak"] <= found["state"] + changed + 2 * 4 * LIMIT + 16 * MIB


@pytest.mark.slow
def test_in_place_a_move_takes_little_more_than_one_state(peaks: dict[str, Any]) -> None:
    beside, in_place = peaks["beside"], peaks["in place"]
    assert beside["peak"] >= 1.9 * beside["state"]
    assert in_place["peak"] <= 1.35 * in_place["state"]


@pytest.mark.parametrize("in_place", [False, True])
def test_a_box_that_stays_keeps_no_memory_of_those_that_leave(in_place: bool) -> None:
    """Boxes of one parameter, as experts are, lie in one memory."""
    memory, item = torch.arange(24.0).view(8, 3), Item("experts", "value")
    boxes = (Box(start=(0, 0), stop=(6, 3)), Box(start=(7, 0), stop=(8, 3)))
    parts = memory[:6], memory[6:7], memory[7:]
    shards = tuple(
        Shard(box=box, planes={VALUE: part}) for box, part in zip(boxes, (parts[0], parts[2]), strict=True)
    )
    state = LocalState(tensors={item: LocalTensor(shards=shards)})
    side = TargetBuffers(state, {item: boxes[1:]}, state.schema(), torch.device("cpu"), in_place=in_place)
    (shard,) = side.result("a/0").tensors[item].shards
    assert shard.planes[VALUE].tolist() == [[21.0, 22.0, 23.0]]
    assert shard.planes[VALUE].untyped_storage().nbytes() == 12
    assert memory.untyped_storage().nbytes() == (0 if in_place else 96)
    kept = TargetBuffers(state, {item: boxes}, state.schema(), torch.device("cpu")) if not in_place else None
    assert kept is None or kept.result("a/0").tensors[item].shards[0].planes[VALUE] is parts[0]


@settings(max_examples=examples(40))
@given(plans(1), plans(2), st.sampled_from([2_000, 20_000]))
def test_in_place_equals_the_reference_too(before: Plan, after: Plan, limit: int) -> None:
    old, new = Layouts(SPEC, before), Layouts(SPEC, after)
    ends = MemoryTransport.connect(members(before, after))
    states = {device: local(WHOLE, old, device) for device in ends[0].members}
    results = together(
        ends, lambda end: migrate(old, new, states[end.members[end.rank]], end, limit=limit, in_place=True)
    )
    for device, result in zip(ends[0].members, results, strict=True):
        assert isinstance(result, Moved), result
        assert_same_bits(result.state, local(WHOLE, new, device))
        kept = {id(p) for t in result.state.tensors.values() for s in t.shards for p in s.planes.values()}
        for tensor in states[device].tensors.values():
            for shard in tensor.shards:
                for plane in shard.planes.values():
                    assert id(plane) in kept or not plane.untyped_storage().nbytes(), (
                        "memory that is not let go"
                    )


class Damaging(MemoryTransport):
    """Turns one bit of the first data message."""

    done = False

    def send(self, destination: int, tensor: torch.Tensor, *, channel: int = 0) -> int:
        if channel == 0 and not self.done:
            self.done = True
            tensor = tensor.clone()
            tensor.view(torch.uint8).reshape(-1)[3] ^= 1
        return super().send(destination, tensor, channel=channel)


def test_in_place_damage_says_that_the_old_state_is_gone() -> None:
    from tests.migration.memory import HALVES, SWAPPED, state_of  # the larger model
    from tests.migration.memory import SPEC as LARGE

    old, new = Layouts(LARGE, HALVES), Layouts(LARGE, SWAPPED)
    results = together(
        Damaging.connect(("n0/0", "n1/0")),
        lambda end: migrate(old, new, state_of(old, end.members[end.rank]), end, in_place=True),
    )
    assert all(isinstance(result, Corrupt) and "the old state is gone" in str(result) for result in results)
