"""What all ranks hold is told to all with few bytes, and still found out when it differs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from elasticd_migration.local_state import LocalState, LocalTensor, Shard
from elasticd_migration.migrate import agree
from elasticd_migration.schema import Disagreement, Schema, merge
from elasticd_migration.transport import MemoryTransport
from elasticd_planner.layout.layouts import Item, Layouts
from elasticd_planner.spec.box import Box
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.migration.plans import DEVICES, SPEC, plans
from tests.migration.ranks import local, together, trained
from tests.sizes import examples

WHOLE = trained()
RANKS = tuple(f"n{rank}/0" for rank in range(8))


class Counted:
    """A transport that counts what its gatherings carry: each payload goes to all others, padded to the
    longest, as gloo's all-gather has it."""

    def __init__(self, end: MemoryTransport) -> None:
        self._end, self.carried, self.gatherings = end, 0, 0

    def all_gather(self, payload: bytes) -> list[bytes]:
        rows = self._end.all_gather(payload)
        self.gatherings += 1
        self.carried += max(map(len, rows)) * (len(rows) - 1) + 8 * (len(rows) - 1)
        return rows

    def __getattr__(self, name: str) -> object:
        return getattr(self._end, name)


def agreed(states: Sequence[LocalState], members: Sequence[str]) -> tuple[list[object], int]:
    """What each rank came to, and the bytes that went over the wire in all."""
    counted = [Counted(end) for end in MemoryTransport.connect(members)]
    by_rank = dict(zip(members, states, strict=True))
    found = together(counted, lambda end: agree(end, by_rank[end.members[end.rank]].schema()))  # type: ignore[arg-type]
    return list(found), sum(end.carried for end in counted)


@settings(max_examples=examples(60))
@given(plan=plans(1))
def test_it_is_what_merging_all_full_schemas_gives(plan) -> None:  # type: ignore[no-untyped-def]
    layouts = Layouts(SPEC, plan)
    states = [local(WHOLE, layouts, device) for device in DEVICES]
    found, _ = agreed(states, DEVICES)
    assert found == [merge([state.schema() for state in states], DEVICES)] * len(DEVICES)


def large(tensors: int, first: int = 0) -> LocalState:
    """Parameters and AdamW's state, described as those of a real decoder are."""
    made: dict[Item, LocalTensor] = {}
    for index in range(first, first + tensors // 2):
        name = f"blocks.{index // 9}.attention.projection.{index % 9}.weight"
        box, value = Box.whole((2,)), torch.zeros(2)
        planes = {"exp_avg": value, "exp_avg_sq": value}
        made[Item(name, "value")] = LocalTensor(shards=(Shard(box=box, planes={"value": value}),))
        made[Item(name, "state")] = LocalTensor(
            shards=(Shard(box=box, planes=planes),), scalars={"step": torch.tensor(3.0)}
        )
    return LocalState(tensors=made, extras={"scheduler": "{}"})


def in_full(states: Sequence[LocalState]) -> int:
    """Bytes that it took when every rank gathered every other's whole text."""
    longest = max(len(state.schema().to_json()) for state in states)
    return len(states) * (len(states) - 1) * (longest + 8)


SCENES = {
    "all alike": [large(2000)] * 8,
    "eight stages": [large(250, 125 * rank) for rank in range(8)],
    "two stages of four, and joiners": [
        *[large(1000)] * 3,
        *[large(1000, 500)] * 3,
        LocalState(),
        LocalState(),
    ],
}


@pytest.mark.parametrize("name", SCENES)
def test_eight_ranks_tell_2000_tensors_with_few_bytes(name: str) -> None:
    states = SCENES[name]
    found, carried = agreed(states, RANKS)
    assert found == [merge([state.schema() for state in states], RANKS)] * 8
    before = in_full(states)
    print(f"{name}: {before / 1e3:.0f} kB before, {carried / 1e3:.0f} kB now")
    assert carried * (40 if name == "all alike" else 5) < before


@pytest.mark.parametrize(("states", "gatherings"), [([large(20)] * 3, 1), ([large(2000), large(20)], 2)])
def test_short_schemas_are_told_in_one_gathering(states: list[LocalState], gatherings: int) -> None:
    members = RANKS[: len(states)]
    counted = [Counted(end) for end in MemoryTransport.connect(members)]
    found = together(counted, lambda end: agree(end, states[end.rank].schema()))  # type: ignore[arg-type]
    assert found == [merge([state.schema() for state in states], members)] * len(states)
    assert [end.gatherings for end in counted] == [gatherings] * len(states)


@settings(max_examples=examples(30))
@given(odd=st.integers(0, 7))
def test_one_rank_that_differs_is_found_by_all(odd: int) -> None:
    states = [large(20)] * 8
    tensors = dict(states[odd].tensors)
    item = Item("blocks.0.attention.projection.1.weight", "state")
    tensors[item] = LocalTensor(shards=tensors[item].shards, scalars={"step": torch.tensor(4.0)})
    states[odd] = LocalState(tensors=tensors, extras=states[odd].extras)
    found, _ = agreed(states, RANKS)
    assert all(isinstance(each, Disagreement) for each in found), found
    assert len({str(each) for each in found}) == 1
    assert RANKS[odd] in str(found[0])
    assert "projection.1" in str(found[0])


def test_nobody_holds_anything() -> None:
    found, _ = agreed([LocalState()] * 3, RANKS[:3])
    assert found == [Schema()] * 3
