"""Groups in memory refuse what gloo would read as something else, or die of."""

from __future__ import annotations

import os

import pytest
import torch

from elasticd.runtime.comm.in_memory import MemoryPlanGroups, run_threads

BOTH = ("a/0", "b/0")


def crossing(plan_groups: MemoryPlanGroups, sent: torch.Tensor, room: torch.Tensor) -> torch.Tensor | None:
    group = plan_groups.group(BOTH, "boundary")
    if group.rank == 0:
        group.send(sent, 1, 7)
        return None
    return group.receive(room, 0, 7)


def test_bytes_cross_whatever_the_receiver_takes_them_for() -> None:
    sent = torch.tensor([1.5, -2.0])
    found = run_threads(
        BOTH, lambda plan_groups: crossing(plan_groups, sent, torch.empty(12, dtype=torch.uint8))
    )["b/0"]
    assert found is not None
    assert torch.equal(found[:8].view(torch.float32), sent)


def test_messages_come_in_the_order_in_which_they_are_awaited() -> None:
    """Whichever is taken first, as over gloo."""

    def crossed(plan_groups: MemoryPlanGroups) -> list[float]:
        group = plan_groups.group(BOTH, "boundary")
        if group.rank == 0:
            for value in (1.0, 2.0):
                group.send(torch.tensor([value]), 1, 7)
            return []
        rooms = torch.empty(1), torch.empty(1)
        posted = [group.post(room, 0, 7) for room in rooms]
        for work in reversed(posted):
            group.take(work)
        return [float(room) for room in rooms]

    assert run_threads(BOTH, crossed)["b/0"] == [1.0, 2.0]


def test_more_bytes_than_there_is_room_for_are_refused() -> None:
    with pytest.raises(RuntimeError, match="16 bytes came where 8"):
        run_threads(
            BOTH, lambda plan_groups: crossing(plan_groups, torch.ones(2, dtype=torch.float64), torch.ones(2))
        )


@pytest.mark.parametrize("other", [torch.ones(2, dtype=torch.float64), torch.ones(3)])
def test_a_collective_of_tensors_that_are_not_alike_is_refused(other: torch.Tensor) -> None:
    def summed(plan_groups: MemoryPlanGroups) -> torch.Tensor:
        return plan_groups.group(BOTH, "reduce").all_reduce(torch.ones(2) if plan_groups.me == "a/0" else other)

    with pytest.raises(RuntimeError, match="has tensors of"):
        run_threads(BOTH, summed)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads cannot be kept on a core here")
@pytest.mark.parametrize("threads", [1, 2])
def test_threads_stay_on_one_core_where_torch_computes_on_one(threads: int) -> None:
    here, before = os.sched_getaffinity(0), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = run_threads(["a/0", "a/1"], lambda memory: os.sched_getaffinity(0))
    finally:
        torch.set_num_threads(before)
    assert found["a/0"] == found["a/1"]
    assert len(found["a/0"]) == (1 if threads == 1 else len(here))
    assert os.sched_getaffinity(0) == here, "the calling thread is left alone"
