"""Pipelines played pass by pass, plain and interleaved: their times are those of the longest path."""

from __future__ import annotations

import numpy as np
import pytest
from elasticd_planner.cost.schedule import passes
from elasticd_planner.cost.schedule_timeline import one_f_one_b_seconds, played_seconds
from elasticd_planner.layout.pass_order import timed_passes
from elasticd_planner.numeric import Floats
from elasticd_planner.value import Invalid
from hypothesis import given
from hypothesis import strategies as st

from tests import sizes
from tests.planner.longest_paths import ends

SECONDS = st.floats(0.01, 4.0)


def drawn(seed: int) -> tuple[Floats, Floats, Floats, int, int]:
    """A random pipeline: forward, backward and boundary by place, micro-batches, chunks. The boundary between
    two stages is the same in each turn."""
    rng = np.random.default_rng(seed)
    stages, chunks, micro_batches = (int(rng.integers(*limits)) for limits in ((2, 7), (1, 5), (1, 30)))
    forward = rng.uniform(0.2, 2.0, stages * chunks)
    backward = forward * rng.uniform(1.0, 3.0, stages * chunks)
    hops = rng.uniform(0, 0.5, stages) * (rng.random() < 0.7)
    return forward, backward, np.tile(hops, chunks)[:-1], micro_batches, chunks


@given(st.data())
def test_each_pass_runs_when_all_that_it_needs_is_there(data: st.DataObject) -> None:
    """Also where micro-batches are unlike."""
    stages = data.draw(st.integers(1, 4))
    chunks = data.draw(st.integers(1, 3)) if stages > 1 else 1
    count, places = data.draw(st.integers(1, 9)), stages * chunks
    times = st.lists(st.lists(SECONDS, min_size=count, max_size=count), min_size=places, max_size=places)
    forward, backward = data.draw(times), data.draw(times)
    boundary = data.draw(st.lists(SECONDS, min_size=places - 1, max_size=places - 1))
    expected = ends(forward, backward, boundary, chunks)
    for stage, line in enumerate(timed_passes(passes, forward, backward, boundary, chunks)):
        assert [one[:3] for one in line] == list(passes(stages, stage, count, chunks))
        for kind, micro, chunk, start, stop in line:
            place = chunk * stages + stage
            assert stop == pytest.approx(expected[kind, place, micro], rel=1e-12)
            assert stop - start == pytest.approx((forward if kind == "forward" else backward)[place][micro])


def test_it_is_the_longest_path_through_all_passes_and_messages() -> None:
    for seed in range(sizes.number(full=100, quick=30)):
        forward, backward, boundary, micro_batches, chunks = drawn(seed)
        each = [[[seconds] * micro_batches for seconds in times.tolist()] for times in (forward, backward)]
        longest = max(ends(each[0], each[1], boundary.tolist(), chunks).values())
        found = played_seconds(forward, backward, boundary, micro_batches, chunks)
        assert found == pytest.approx(longest, rel=1e-12), seed


def test_with_one_chunk_it_is_the_plain_schedule() -> None:
    for seed in range(60):
        forward, backward, boundary, micro_batches, _ = drawn(seed)
        plain = float(one_f_one_b_seconds(forward, backward, boundary, micro_batches))
        found = played_seconds(forward, backward, boundary, micro_batches)
        assert found == pytest.approx(plain, rel=1e-12), seed


def test_a_slow_boundary_makes_more_chunks_take_longer() -> None:
    """What interleaving saves in filling it pays in transfers."""

    def seconds(chunks: int, hop: float) -> float:
        places = 4 * chunks
        return played_seconds([1 / chunks] * places, [2 / chunks] * places, [hop] * (places - 1), 8, chunks)

    assert seconds(2, 0.0) < seconds(1, 0.0)
    assert seconds(2, 3.0) > seconds(1, 3.0)


@pytest.mark.parametrize(
    ("forward", "backward", "boundary", "wrong"),
    [
        ([[1.0, 1.0]], [[1.0]], (), r"1 forward and 1 backward of \[1, 2\] micro-batches"),
        ([[1.0], [1.0]], [[1.0]], (), "2 forward and 1 backward"),
        ([[]], [[]], (), r"of \[0\] micro-batches"),
        ([[1.0], [1.0]], [[1.0], [1.0]], (1.0, 2.0), "boundary needs 1 times, not 2"),
    ],
)
def test_times_that_do_not_fit_are_refused(
    forward: list[list[float]], backward: list[list[float]], boundary: tuple[float, ...], wrong: str
) -> None:
    with pytest.raises(Invalid, match=wrong):
        timed_passes(passes, forward, backward, boundary)


@pytest.mark.parametrize(
    ("places", "chunks", "micro_batches", "wrong"),
    [(5, 2, 3, "5 chunks of layers are not 2 on each"), (2, 2, 3, "two stages or more"), (4, 2, 0, "0 micro-")],
)
def test_what_is_no_interleaved_pipeline_is_refused(
    places: int, chunks: int, micro_batches: int, wrong: str
) -> None:
    with pytest.raises(Invalid, match=wrong):
        played_seconds([1.0] * places, [1.0] * places, (), micro_batches, chunks)
