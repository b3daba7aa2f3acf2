"""1F1B over any number of stages and micro-batches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elasticd.runtime.schedule import live_activations, one_forward_one_backward


@given(stages=st.integers(1, 7), micro_batches=st.integers(1, 12))
def test_the_stages_of_a_pipeline_never_wait_for_each_other_in_a_circle(
    stages: int, micro_batches: int
) -> None:
    """Plays all stages against each other: everything runs, each pass after those that it needs."""
    orders = [list(one_forward_one_backward(stages, s, micro_batches)) for s in range(stages)]
    done: set[tuple[str, int, int]] = set()
    moved = True
    while moved:
        moved = False
        for s, order in enumerate(orders):
            while order:
                kind, m = order[0]
                needs = [("forward", s - 1, m)] if kind == "forward" and s else []
                if kind == "backward":
                    needs = [("forward", s, m)] + ([("backward", s + 1, m)] if s + 1 < stages else [])
                if not all(need in done for need in needs):
                    break
                done.add((kind, s, m))
                order.pop(0)
                moved = True
    assert len(done) == 2 * stages * micro_batches


@given(stages=st.integers(1, 7), micro_batches=st.integers(1, 12))
def test_no_more_activations_live_than_promised(stages: int, micro_batches: int) -> None:
    for stage in range(stages):
        alive = most = 0
        for kind, _ in one_forward_one_backward(stages, stage, micro_batches):
            alive += 1 if kind == "forward" else -1
            most = max(most, alive)
        assert most == live_activations(stages, stage, micro_batches)
