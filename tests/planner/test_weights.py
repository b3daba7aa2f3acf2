"""What an answer says that a model weighs is enough to count what its profile counts."""

from __future__ import annotations

import msgspec
import pytest
from elasticd_planner.cost.model_profile import derive
from elasticd_planner.placement.state_bytes import StateBytes, weights_of
from elasticd_planner.placement.state_movement import bytes_by_member, bytes_to_move
from elasticd_planner.spec.plan import Plan, StatePolicy
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.models import LAYERS, SPEC, plans
from tests.sizes import examples

MODEL = derive(SPEC, sample_tokens=16, micro_batch=2)
POLICIES = (StatePolicy(), StatePolicy(zero=1, replicas=1), StatePolicy(zero=2, replicas=3))


@given(old=st.none() | plans(), new=plans(), policies=st.tuples(*[st.sampled_from(POLICIES)] * 2))
@settings(max_examples=examples(200))
def test_bytes_are_those_of_the_profile_and_of_its_members_together(
    old: Plan | None, new: Plan, policies: tuple[StatePolicy, StatePolicy]
) -> None:
    old, new = old.replace(state=policies[0]) if old else None, new.replace(state=policies[1])
    text = msgspec.json.encode(weights_of(MODEL))
    read = msgspec.json.decode(text, type=StateBytes).profile(LAYERS)
    assert bytes_to_move(read, old, new) == bytes_to_move(MODEL, old, new)
    by_member = bytes_by_member(read, old, new)
    assert set(by_member) == set(new.members)
    assert min(by_member.values()) >= 0
    assert sum(by_member.values()) == pytest.approx(bytes_to_move(MODEL, old, new), abs=1)
