"""State set aside: it is whole in host memory, and comes back into the same tensors."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from elasticd_migration.local_state import LocalState, LocalTensor, Shard
from elasticd_planner.layout.layouts import Item
from elasticd_planner.spec.box import Box

from elasticd.runtime.accelerator import CPU
from elasticd.runtime.engine import set_aside
from elasticd.runtime.engine.set_aside import NoHostMemory, SetAside

HALVES = tuple(Box(start=(start, 0), stop=(start + 2, 3)) for start in (0, 2))
KEPT, LENT = Item("kept", "value"), Item("lent", "value")


def state_of(tensors: Mapping[Item, torch.Tensor]) -> LocalState:
    """Each in two boxes, which lie in one memory."""
    return LocalState(
        tensors={
            item: LocalTensor(
                shards=tuple(
                    Shard(box=box, planes={"value": values[box.slices(Box.whole((4, 3)))]}) for box in HALVES
                ),
                scalars={"step": 3},
            )
            for item, values in tensors.items()
        },
        extras={"scheduler": "{}"},
    )


def numbers() -> torch.Tensor:
    return torch.arange(12.0).reshape(4, 3)


def whole(state: LocalState, item: Item) -> torch.Tensor:
    return torch.cat([shard.planes["value"] for shard in state.tensors[item].shards])


def set_apart(tensors: Mapping[Item, torch.Tensor], kept: Mapping[Item, tuple[Box, ...]]) -> SetAside:
    made = SetAside(state_of(tensors), CPU)
    made.lend(kept)
    return made


def test_what_is_kept_stays_and_the_rest_gives_its_memory_back() -> None:
    tensors = {KEPT: numbers(), LENT: numbers() + 100}
    kept = {KEPT: HALVES, LENT: HALVES[:1]}  # of the second one box, whose memory has the other one, too
    aside = set_apart(tensors, kept)
    assert aside.bytes == 48
    assert tensors[LENT].untyped_storage().nbytes() == 0
    assert torch.equal(tensors[KEPT], numbers())
    assert torch.equal(whole(aside.state, LENT), numbers() + 100)
    assert torch.equal(whole(aside.state, KEPT), numbers())
    assert [shard.aside for item in (KEPT, LENT) for shard in aside.state.tensors[item].shards] == [0, 0, 1, 1]
    assert aside.state.extras == {"scheduler": "{}"}
    assert aside.state.tensors[LENT].scalars == {"step": 3}
    aside.back()
    assert torch.equal(tensors[LENT], numbers() + 100), "the same tensor as before"
    assert aside.bytes == 0


def test_more_can_be_set_aside_for_another_plan_and_all_comes_back() -> None:
    """What lies in host memory already stays there: the device may have no room for it."""
    tensors = {KEPT: numbers(), LENT: numbers() + 100}
    aside = set_apart(tensors, {KEPT: HALVES})
    here = whole(aside.state, LENT)
    aside.lend({LENT: HALVES})
    assert [tensors[item].untyped_storage().nbytes() for item in (KEPT, LENT)] == [0, 0]
    assert torch.equal(whole(aside.state, KEPT), numbers())
    assert torch.equal(whole(aside.state, LENT), here)
    aside.back()
    assert torch.equal(tensors[KEPT], numbers())
    assert torch.equal(tensors[LENT], numbers() + 100)


def test_tensors_of_several_types_and_strides_are_copied_as_they_are() -> None:
    memory = torch.arange(24, dtype=torch.bfloat16)
    odd = torch.arange(5, dtype=torch.uint8)
    box = Box.whole((3, 4))
    shard = Shard(box=box, planes={"value": memory[12:].view(4, 3).t(), "first": memory[:12].view(3, 4)})
    flags = Shard(box=Box.whole((5,)), planes={"value": odd})
    state = LocalState(
        tensors={LENT: LocalTensor(shards=(shard,)), KEPT: LocalTensor(shards=(flags,))},
    )
    aside = SetAside(state, CPU)
    aside.lend({})
    found = aside.state.tensors[LENT].shards[0].planes
    assert torch.equal(found["value"], torch.arange(12, 24, dtype=torch.bfloat16).view(4, 3).t())
    assert found["value"].stride() == (1, 3)
    assert torch.equal(found["first"].flatten(), torch.arange(12, dtype=torch.bfloat16))
    assert aside.state.tensors[KEPT].shards[0].planes["value"].tolist() == [0, 1, 2, 3, 4]
    aside.back()
    assert memory.tolist() == list(range(24))
    assert odd.tolist() == [0, 1, 2, 3, 4]


def test_nothing_is_changed_where_the_host_has_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {LENT: numbers()}
    aside = SetAside(state_of(tensors), CPU)

    def none(size: int, **options: object) -> torch.Tensor:
        raise RuntimeError("cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(set_aside.torch, "empty", none)
        with pytest.raises(NoHostMemory, match=r"no 0 MiB for what .*cannot allocate memory.*snapshot_every"):
            aside.lend({})
    assert torch.equal(tensors[LENT], numbers())
