"""State set aside: it is whole in host memory, and comes back into the same tensors."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from elasticd_migration.local_state import LocalState, LocalTensor, Shard
from elasticd_planner.layout.layouts import Item
from elasticd_planner.spec.box import Box

from elasticd.runtime.accelerator import CPU, Accelerator
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


def test_what_is_kept_stays_and_the_rest_gives_its_memory_back() -> None:
    tensors = {KEPT: numbers(), LENT: numbers() + 100}
    kept = {KEPT: HALVES[:1], LENT: (Box.whole((4, 3)),)}  # one box of the first; the other is cut otherwise
    set_apart = SetAside(state_of(tensors), kept, CPU)
    assert set_apart.bytes == 48
    assert tensors[LENT].untyped_storage().nbytes() == 0
    assert torch.equal(tensors[KEPT], numbers()), "its boxes lie in one memory, and one of them is used on"
    assert torch.equal(whole(set_apart.state, LENT), numbers() + 100)
    assert torch.equal(whole(set_apart.state, KEPT), numbers())
    assert set_apart.state.extras == {"scheduler": "{}"}
    assert set_apart.state.tensors[LENT].scalars == {"step": 3}
    set_apart.back()
    assert torch.equal(tensors[LENT], numbers() + 100), "the same tensor as before"
    assert set_apart.bytes == 0


def test_nothing_is_changed_where_the_host_has_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {LENT: numbers()}

    def none(size: int, accelerator: Accelerator) -> torch.Tensor:
        raise RuntimeError("cannot allocate memory")

    monkeypatch.setattr(set_aside, "_host_memory", none)
    with pytest.raises(NoHostMemory, match=r"no 0 MiB for what .*cannot allocate memory.*snapshot_every"):
        SetAside(state_of(tensors), {}, CPU)
    assert torch.equal(tensors[LENT], numbers())
