"""The order of a stage's passes and messages: it comes to its end even where each stage does one after the
other, and keeps nothing waiting that need not wait."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
from elasticd_planner.cost.schedule import Pass, passes
from elasticd_planner.layout.pass_order import AHEAD, Act, Schedule, acts_of_rows, stage_order
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticd.runtime.engine.pipeline_stage import all_forward
from tests import sizes
from tests.planner.drawn_orders import RECORDED, digest


def orders(stages: int, micro_batches: int, chunks: int, schedule: Schedule = passes) -> list[list[Act]]:
    return [list(stage_order(schedule, stages, at, micro_batches, chunks)) for at in range(stages)]


def message(stages: int, stage: int, act: Act) -> tuple[str, int, int]:
    """What an act is an end of: both ends give the same."""
    turn = act.chunk * stages + stage
    if act.what == "send":
        turn += 1 if act.kind == "forward" else -1
    return act.kind, act.micro_batch, turn


def left_over(listed: Sequence[Sequence[Act]]) -> list[Act | None]:
    """What the stages wait for when each has done all that it can, one act after the other; None: nothing."""
    at = [0] * len(listed)
    moved = True
    while moved:
        moved = False
        waiting: dict[tuple[str, int, int], int] = {}
        for stage, acts in enumerate(listed):
            while at[stage] < len(acts) and acts[at[stage]].what == "pass":
                at[stage] += 1
                moved = True
            if at[stage] == len(acts):
                continue
            ends = message(len(listed), stage, acts[at[stage]])
            if ends in waiting:
                at[stage] += 1
                at[waiting.pop(ends)] += 1
                moved = True
            else:
                waiting[ends] = stage
    return [acts[number] if number < len(acts) else None for acts, number in zip(listed, at, strict=True)]


@pytest.mark.parametrize(
    ("what", "block"),
    sizes.beside(
        [(what, block) for what in ("acts", "times", "borders") for block in range(3)] + [("launches", 0)],
        [(what, block) for what, blocks in RECORDED.items() for block in range(len(blocks))],
    ),
)
def test_plans_of_one_module_have_the_acts_times_borders_and_launches_that_they_have_always_had(
    what: str, block: int
) -> None:
    assert digest(what, block) == RECORDED[what][block]


@given(st.integers(2, 6), st.integers(1, 14), st.integers(1, 4), st.randoms(use_true_random=False))
@settings(max_examples=sizes.examples(200), deadline=None)
def test_one_after_the_other_all_stages_come_to_their_end(
    stages: int, micro_batches: int, chunks: int, drawn: random.Random
) -> None:
    """So do those of a lane that has some of the rows alone, and those of an evaluation."""
    for schedule in (passes, all_forward):
        listed = orders(stages, micro_batches, chunks, schedule)
        assert left_over(listed) == [None] * stages
        rows = [row for row in range(micro_batches) if drawn.random() < 0.6]
        assert left_over([list(acts_of_rows(acts, rows)) for acts in listed]) == [None] * stages


@given(st.integers(1, 6), st.integers(1, 14), st.integers(1, 4))
@settings(max_examples=sizes.examples(200), deadline=None)
def test_passes_are_those_of_the_schedule_and_messages_are_around_them(
    stages: int, micro_batches: int, chunks: int
) -> None:
    chunks = chunks if stages > 1 else 1
    for stage, acts in enumerate(orders(stages, micro_batches, chunks)):
        assert [act[1:] for act in acts if act.what == "pass"] == [
            tuple(each) for each in passes(stages, stage, micro_batches, chunks)
        ]
        assert len(set(acts)) == len(acts)
        for at, act in enumerate(acts):
            turn = act.chunk * stages + stage
            first, last = turn == 0, turn == stages * chunks - 1
            if act.kind == "backward":
                first, last = last, first
            own = acts.index(act._replace(what="pass"))
            if act.what == "pass":
                assert (act._replace(what="receive") in acts) is not first
                assert (act._replace(what="send") in acts) is not last
            elif act.what == "send":
                assert at > own
            else:
                between = [each for each in acts[at:own] if each.what == "pass"]
                assert at < own
                assert len(between) <= (AHEAD if act.kind == "backward" else 0)
                if act.kind == "backward":
                    assert acts.index(Act("pass", "forward", act.micro_batch, act.chunk)) < at


@pytest.mark.parametrize("stages", [2, 3, 5, 8])
@pytest.mark.parametrize("micro_batches", [1, 4, 16])
def test_a_plain_pipeline_sends_at_once_and_receives_gradients_before_a_pass_that_does_not_need_them(
    stages: int, micro_batches: int
) -> None:
    early = []
    for acts in orders(stages, micro_batches, 1):
        for at, act in enumerate(acts):
            own = acts.index(act._replace(what="pass"))
            if act.what == "send":
                assert not any(each.what == "pass" for each in acts[own + 1 : at]), (
                    "it need not wait for a pass"
                )
                assert not any(each[:2] == ("receive", "forward") for each in acts[own:at]), "nor for a header"
            if act[:2] == ("receive", "backward"):
                early.append(any(each.what == "pass" for each in acts[at:own]))
    if micro_batches > 2 * stages:
        assert sum(early) > 0.6 * len(early)


def test_a_gradient_is_received_before_the_activation_is_sent_that_comes_after_it() -> None:
    """What hung: the first stage sent micro-batch 1 behind a receipt that waits for the second stage to send
    back micro-batch 0, and that one received micro-batch 1 first."""
    first, second, third = orders(3, 3, 1)
    assert left_over([first, second, third]) == [None] * 3
    for acts, after in ((first, 2), (second, 1)):
        received = acts.index(Act("receive", "backward", 0, 0))
        assert acts.index(Act("send", "forward", after - 1, 0)) < received
        assert received < acts.index(Act("send", "forward", after, 0))
    earlier = [each for each in first if each != Act("receive", "backward", 0, 0)]
    earlier.insert(earlier.index(Act("send", "forward", 1, 0)), Act("receive", "backward", 0, 0))
    assert None not in left_over([earlier, second, third])


def test_a_schedule_whose_passes_wait_for_each_other_is_refused() -> None:
    def backward_first(stages: int, stage: int, micro_batches: int, chunks: int) -> Iterator[Pass]:
        yield from (
            (Pass("backward", 0), Pass("forward", 0))
            if stage == 0
            else (Pass("forward", 0), Pass("backward", 0))
        )

    with pytest.raises(ValueError, match="wait for each other"):
        stage_order(backward_first, 2, 0, 1)
