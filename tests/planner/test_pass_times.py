"""When each pass runs: the same as the schedule played event by event, plain and interleaved."""

from __future__ import annotations

import numpy as np
import pytest
from elasticd_planner.cost.schedule_timeline import interleaved_seconds, one_f_one_b_seconds, pass_times
from hypothesis import given
from hypothesis import strategies as st

from tests.planner.timeline import simulate

SECONDS = st.floats(0.01, 4.0)


@given(st.data())
def test_passes_run_as_the_schedule_played_event_by_event_has_them(data: st.DataObject) -> None:
    stages, chunks = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    if stages == 1:
        chunks = 1
    micro_batches, places = data.draw(st.integers(1, 9)), stages * chunks
    forward = data.draw(st.lists(SECONDS, min_size=places, max_size=places))
    backward = data.draw(st.lists(SECONDS, min_size=places, max_size=places))
    boundary = data.draw(st.lists(SECONDS, min_size=places - 1, max_size=places - 1))
    found = pass_times(forward, backward, boundary, micro_batches, chunks)
    played = simulate(
        np.repeat(np.array(forward)[:, None], micro_batches, 1),
        np.repeat(np.array(backward)[:, None], micro_batches, 1),
        boundary,
        chunks=chunks,
    )
    for mine, theirs in zip(found, played.stages, strict=True):
        assert [(one.kind, one.micro_batch, one.chunk) for one in mine] == [
            (work.kind, work.micro_batch, work.chunk) for work in theirs.work
        ]
        assert [one.start for one in mine] == pytest.approx([work.start for work in theirs.work])
        assert [one.stop for one in mine] == pytest.approx([work.stop for work in theirs.work])
    ends = max(one.stop for stage in found for one in stage)
    if chunks > 1:
        assert ends == pytest.approx(interleaved_seconds(forward, backward, boundary, micro_batches, chunks))
    else:
        assert ends == pytest.approx(float(one_f_one_b_seconds(forward, backward, boundary, micro_batches)))
