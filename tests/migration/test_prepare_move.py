"""The rounds of a move can be made while training goes on; whatever has changed since, the move is right."""

from __future__ import annotations

from unittest.mock import patch

import torch
from elasticd_migration import migrate as execute
from elasticd_migration.local_state import LocalState
from elasticd_migration.migrate import Moved, PreparedMove, migrate, prepare_move
from elasticd_migration.schema import Schema
from elasticd_migration.transport import MemoryTransport
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.plan import Plan
from hypothesis import given, settings

from tests.migration.plans import SPEC, plan, plans
from tests.migration.ranks import Training, assert_same_bits, local, members, together, trained
from tests.sizes import examples

BEFORE = plan(1, [(1, [("n0/0", 3), ("n0/1", 1)]), (2, [("n1/0", 1)])])
AFTER = plan(2, [(2, [("n0/0", 1), ("n1/1", 2)]), (1, [("n1/0", 1)])])
BLANK, EARLY, LATE = trained(0), trained(2), trained(3)


def prepared(before: Plan, after: Plan, *wholes: Training) -> list[PreparedMove]:
    """By every rank, from what it held when it was asked: the ranks take turns in `wholes`."""
    old, new = Layouts(SPEC, before), Layouts(SPEC, after)

    def work(end: MemoryTransport) -> PreparedMove | None:
        whole = wholes[end.rank % len(wholes)]
        return prepare_move(old, new, local(whole, old, end.members[end.rank]).schema(), end, limit=20_000)

    found = together(MemoryTransport.connect(members(before, after)), work)
    for each in found:
        assert isinstance(each, PreparedMove), each
    return found  # type: ignore[return-value]


def moved_by(before: Plan, after: Plan, whole: Training, rounds: list[PreparedMove]) -> None:
    """Moves, and compares with the reference."""
    old, new = Layouts(SPEC, before), Layouts(SPEC, after)
    ends = MemoryTransport.connect(members(before, after))

    def work(end: MemoryTransport) -> Moved:
        state = local(whole, old, end.members[end.rank])
        return migrate(old, new, state, end, limit=20_000, prepared=rounds[end.rank])

    for end, result in zip(ends, together(ends, work), strict=True):
        assert isinstance(result, Moved), result
        assert_same_bits(result.state, local(whole, new, end.members[end.rank]))


@settings(max_examples=examples(40))
@given(plans(1), plans(2))
def test_move_by_rounds_that_were_made_before_the_last_steps(before: Plan, after: Plan) -> None:
    """Some ranks were a step ahead of others when they were asked: no matter."""
    torch.set_num_threads(1)
    rounds = prepared(before, after, EARLY, LATE)
    with patch.object(execute, "schedule", side_effect=AssertionError("the rounds are there already")):
        moved_by(before, after, LATE, rounds)


def test_rounds_from_before_the_optimizer_had_state_are_made_again() -> None:
    moved_by(BEFORE, AFTER, LATE, prepared(BEFORE, AFTER, BLANK))


def test_rounds_of_another_limit_are_made_again() -> None:
    old, new = Layouts(SPEC, BEFORE), Layouts(SPEC, AFTER)
    found = prepared(BEFORE, AFTER, LATE)
    ends = MemoryTransport.connect(members(BEFORE, AFTER))

    def work(end: MemoryTransport) -> Moved:
        state = local(LATE, old, end.members[end.rank])
        return migrate(old, new, state, end, limit=2_000, prepared=found[end.rank])

    for result in together(ends, work):
        assert isinstance(result, Moved)
        assert result.bytes_staged <= 4 * 2_000


def test_rank_that_cannot_say_what_it_holds_leaves_all_without() -> None:
    old, new = Layouts(SPEC, BEFORE), Layouts(SPEC, AFTER)

    def work(end: MemoryTransport) -> PreparedMove | None:
        mine = local(LATE, old, end.members[end.rank]).schema() if end.rank else Schema(refused="not now")
        return prepare_move(old, new, mine, end)

    assert together(MemoryTransport.connect(members(BEFORE, AFTER)), work) == [None] * 4


def test_state_that_nobody_holds_leaves_all_without() -> None:
    old, new = Layouts(SPEC, BEFORE), Layouts(SPEC, AFTER)
    ends = MemoryTransport.connect(members(BEFORE, AFTER))
    assert together(ends, lambda end: prepare_move(old, new, LocalState().schema(), end)) == [None] * 4
