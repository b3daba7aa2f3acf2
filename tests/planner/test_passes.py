"""1F1B, plain and interleaved: every pass once, after what it needs, nobody in a circle, memory as promised."""

from __future__ import annotations

from itertools import product

import pytest
from elasticd_planner.cost.schedule import Pass, most_alive, passes
from elasticd_planner.cost.schedule_timeline import played_seconds
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sizes import examples

SMALL = list(product(range(1, 6), range(1, 5), range(1, 14)))


def orders(stages: int, chunks: int, micro_batches: int) -> list[list[Pass]]:
    return [list(passes(stages, stage, micro_batches, chunks)) for stage in range(stages)]


def played(stages: int, chunks: int, micro_batches: int) -> list[tuple[str, int, int]]:
    """All stages against each other: what is done in which order, (kind, place, micro-batch), until nothing
    that is next anywhere has what it needs."""
    left = orders(stages, chunks, micro_batches)
    last = stages * chunks - 1
    done: dict[tuple[str, int, int], None] = {}
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(left):
            while order:
                kind, micro, chunk = order[0]
                place = chunk * stages + stage
                needs = [("forward", place - 1, micro)] if kind == "forward" and place else []
                if kind == "backward":
                    needs = [("forward", place, micro)]
                    needs += [("backward", place + 1, micro)] if place < last else []
                if not all(need in done for need in needs):
                    break
                done[kind, place, micro] = None
                order.pop(0)
                moved = True
    return list(done)


@pytest.mark.parametrize(("stages", "chunks"), list(product(range(1, 6), range(1, 5))))
def test_the_stages_of_a_pipeline_never_wait_for_each_other_in_a_circle(stages: int, chunks: int) -> None:
    for micro_batches in range(1, 14):
        done = played(stages, chunks, micro_batches)
        assert len(done) == 2 * stages * chunks * micro_batches, "every pass ran"
        for micro in range(micro_batches):
            of_it = [(kind, place) for kind, place, m in done if m == micro]
            places = range(stages * chunks)
            assert of_it == [
                *(("forward", place) for place in places),
                *(("backward", place) for place in reversed(places)),
            ], "chunk after chunk"


@given(stages=st.integers(1, 9), chunks=st.integers(1, 5), micro_batches=st.integers(1, 60))
@settings(max_examples=examples(80))
def test_large_pipelines_do_not_either(stages: int, chunks: int, micro_batches: int) -> None:
    assert len(played(stages, chunks, micro_batches)) == 2 * stages * chunks * micro_batches


def test_each_chunk_sees_the_micro_batches_in_order() -> None:
    for stages, chunks, micro_batches in SMALL:
        for order in orders(stages, chunks, micro_batches):
            for kind, chunk in product(("forward", "backward"), range(chunks)):
                seen = [at.micro_batch for at in order if (at.kind, at.chunk) == (kind, chunk)]
                assert seen == list(range(micro_batches))


def test_the_order_is_megatrons_where_groups_are_whole() -> None:
    """Narayanan et al. 2021, figure 4: 4 stages, 2 chunks, 8 micro-batches; the first stage's order there."""
    order = list(passes(4, 0, 8, 2))
    ahead = [(at.micro_batch, at.chunk) for at in order if at.kind == "forward"]
    assert ahead == [(m, c) for g in (0, 4) for c in (0, 1) for m in range(g, g + 4)]
    back = [(at.micro_batch, at.chunk) for at in order if at.kind == "backward"]
    assert back == [(m, c) for g in (0, 4) for c in (1, 0) for m in range(g, g + 4)]
    assert [at.kind for at in order[:12]] == ["forward"] * 11 + ["backward"]
    assert [at.kind for at in list(passes(4, 3, 8, 2))[:6]] == ["forward"] * 5 + ["backward"]


@pytest.mark.parametrize(("stages", "chunks"), list(product(range(2, 6), range(2, 5))))
def test_equal_stages_wait_for_no_more_than_filling_and_draining_by_the_chunk(stages: int, chunks: int) -> None:
    """(m + (p - 1) / v) (f + b), for every m >= p, also where p does not divide it."""
    places = stages * chunks
    for micro_batches in range(stages, 4 * stages):
        seconds = played_seconds([1 / chunks] * places, [2 / chunks] * places, (), micro_batches, chunks)
        assert seconds == pytest.approx(3 * (micro_batches + (stages - 1) / chunks)), micro_batches


def test_activations_are_those_of_plain_1f1b_where_there_is_one_chunk() -> None:
    for stages, _, micro_batches in SMALL:
        for stage in range(stages):
            assert most_alive(stages, stage, micro_batches) == min(micro_batches, stages - stage)


def test_activations_of_an_interleaved_stage_are_as_the_docstring_says() -> None:
    for stages, chunks, micro_batches in SMALL:
        if chunks == 1 or stages == 1:
            continue
        group = -(-micro_batches // max(1, micro_batches // stages))
        for stage in range(stages):
            most = (chunks - 1) * group + 2 * (stages - stage) - 1
            found = most_alive(stages, stage, micro_batches, (1,) * chunks)
            assert found == min(chunks * micro_batches, most)


def test_unequal_chunks_count_by_their_size() -> None:
    # Stage 1 of 2, 2 micro-batches: F0 F1 | F0' B0' F1' B1' B0 B1: two of the first chunk, one of the second.
    assert most_alive(2, 1, 2, (3, 5)) == 3 + 3 + 5
