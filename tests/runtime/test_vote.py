"""The vote's fold: the same on every rank, and unforgiving about samples."""

from __future__ import annotations

import math
import struct
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticd.codec.decoding import SMALL
from elasticd.records import Vote
from elasticd.runtime.comm.groups import Group
from elasticd.runtime.comm.in_memory import MemoryPlanGroups, run_threads
from elasticd.runtime.data.sample_ledger import LedgerError, hash_samples
from elasticd.runtime.engine.vote import (
    RankRecord,
    StepVote,
    TpGroup,
    UnlikeChoices,
    bits_of,
    fold,
    names_of,
)


def record(**changes: object) -> RankRecord:
    given: dict[str, object] = {
        "step": 3,
        "prepared": 0,
        "saving": 0,
        "snapshot": False,
        "finite": True,
        "tokens": 8,
        "squares": 4.0,
        "loss": 2.0,
        "targets": 4.0,
        "samples": 7,
    }
    return RankRecord(**{**given, **changes})  # type: ignore[arg-type]


@given(
    step=st.integers(0, 2**40),
    prepared=st.integers(0, 2**40),
    saving=st.integers(0, 2**40),
    snapshot=st.booleans(),
    squares=st.floats(0, 1e300),
    loss=st.floats(-1e300, 1e300),
    samples=st.integers(0, 2**64 - 1),
    finite=st.booleans(),
)
def test_a_record_survives_the_wire(**fields: object) -> None:
    made = {"a/0": record(**fields), "b/0": record(**fields)._replace(step=7), "c/0": record()}

    def votes(plan_groups: MemoryPlanGroups) -> list[list[tuple[Any, ...]]]:
        vote = StepVote(cast(Group, plan_groups.group([*made], "vote")))
        return [vote.gather(made[plan_groups.me]) for _ in range(2)]

    for found in run_threads([*made], votes).values():
        assert found == [[*made.values()]] * 2


def test_a_parameter_that_no_rank_has_a_gradient_of_is_named() -> None:
    trained = [f"w{index}" for index in range(19)]
    made = {"a/0": record(reached=bits_of({"w0", "w8", "w18"}, trained)), "b/0": record(reached=bytes(3))}
    made["c/0"] = record(reached=bits_of({*trained} - {"w0", "w3"}, trained))

    def vote(plan_groups: MemoryPlanGroups) -> Vote:
        voting = StepVote(cast(Group, plan_groups.group([*made], "vote")), len(trained))
        return voting.vote(made[plan_groups.me], [7] * 3).vote

    (unreached,) = {each.unreached for each in run_threads([*made], vote).values()}
    assert names_of(unreached, trained) == {"w3"}
    assert fold([record()], [7]).vote.unreached == "", "a model without trained parameters"


def test_the_parameters_of_a_large_model_that_none_reached_fit_into_the_smallest_message() -> None:
    trained = [
        f"blocks.{layer}.mlp.experts.{index}.down_proj.weight" for layer in range(48) for index in range(384)
    ]
    vote = fold([record(reached=bits_of({trained[0]}, trained))], [7], len(trained)).vote
    assert len(msgspec.json.encode(vote)) < SMALL / 32
    assert names_of(vote.unreached, trained) == set(trained[1:])


def test_a_rank_that_deals_the_next_batch_otherwise_is_named() -> None:
    assert fold([record(next=5), record(next=5)], [7, 7]).vote.apply
    with pytest.raises(LedgerError, match=r"step 3: ranks \[1\] have another batch plan for step 4"):
        fold([record(next=5), record(next=6), record(next=5)], [7, 7, 7])


def test_members_of_a_tp_group_whose_routers_chose_otherwise_are_named() -> None:
    groups = [TpGroup(0, (0, 1)), TpGroup(1, (1, 2))]

    def of(*choices: int) -> RankRecord:
        return record(choices=struct.pack(f"<{len(choices)}q", *choices))

    assert fold([of(1, 0), of(1, 2), of(0, 2)], [7] * 3, 0, groups).vote.apply
    with pytest.raises(
        UnlikeChoices, match=r"step 3: routers on ranks \[1, 2\], one TP group, chose unlike experts"
    ):
        fold([of(1, 0), of(1, 2), of(1, 3)], [7] * 3, 0, groups)
    unread = of(1, 2)._replace(failed=12)  # it computed with another sample in that one's place
    assert fold([of(1, 0), unread, of(1, 3)], [7] * 3, 0, groups).failed == (1, 11)


def test_sums_are_divided_once_by_the_global_count() -> None:
    outcome = fold([record(loss=2.0, targets=4.0), record(loss=10.0, targets=2.0, squares=5.0)], [7, 7])
    assert outcome.vote.loss == pytest.approx(2.0)
    assert outcome.vote.norm == pytest.approx(math.sqrt(9.0) / 6.0)
    assert outcome.vote.apply


def test_one_rank_that_is_not_finite_keeps_all_from_applying() -> None:
    assert not fold([record(), record(finite=False)], [7, 7]).vote.apply
    assert not fold([record(), record(squares=math.inf)], [7, 7]).vote.apply


def test_other_samples_than_those_of_the_batch_plan_are_an_error_on_every_rank() -> None:
    with pytest.raises(LedgerError, match=r"ranks \[1\] did not see the samples"):
        fold([record(), record(samples=8)], [7, 7])


def test_ranks_at_different_steps_are_an_error() -> None:
    with pytest.raises(LedgerError, match="different steps"):
        fold([record(), record(step=4)], [7, 7])


def test_a_batch_without_a_single_target_has_no_loss_and_is_not_applied() -> None:
    outcome = fold([record(targets=0.0, loss=0.0, squares=0.0)], [7])
    assert outcome.vote.loss is None
    assert not outcome.vote.apply


def test_what_is_not_finite_reaches_who_did_not_hear_it() -> None:
    """JSON has neither infinities nor NaN."""
    for records in (
        [record(squares=math.inf)],
        [record(loss=math.nan)],
        [record(loss=math.inf), record(loss=-math.inf)],
    ):
        vote = fold(records, [7] * len(records)).vote
        assert msgspec.json.decode(msgspec.json.encode(vote), type=Vote) == vote
    assert fold([record(squares=math.inf)], [7]).vote.norm is None
    assert fold([record(squares=1e308), record(squares=1e308)], [7, 7]).vote.norm is None


def test_every_rank_learns_whether_all_can_make_a_snapshot() -> None:
    assert fold([record(snapshot=True), record()], [7, 7]).snapshot == (True, False)


def test_the_hash_depends_on_the_order_of_samples() -> None:
    assert hash_samples([1, 2]) != hash_samples([2, 1])


def test_a_sample_that_one_rank_could_not_read_is_named_on_all_and_nothing_is_applied() -> None:
    outcome = fold([record(), record(failed=18), record(failed=3)], [7, 7, 7])
    assert outcome.failed == (1, 17)
    assert not outcome.vote.apply
    assert fold([record()], [7]).failed is None


def test_one_rank_whose_script_stops_the_job_is_enough() -> None:
    assert fold([record(), record(stop=True)], [7, 7]).stop
    assert not fold([record(), record()], [7, 7]).stop
