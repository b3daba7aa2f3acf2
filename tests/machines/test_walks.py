"""Random walks of a job's machine.

The other tests of the machine interrupt a story that somebody thought of. Here nobody did: nothing may raise,
`Checked` looks at each write, and once all is healed the job trains on, or was stopped for state that nobody
who lives holds.
"""

from __future__ import annotations

import pytest

from elasticd.machines.job.state.job_state import OVER
from tests import sizes
from tests.machines.meshed import MeshWalk
from tests.machines.test_recovery import recovered
from tests.machines.walk import Walk, whole

SEEDS = sizes.number(full=1500, quick=15)
#: Walks that found something, each with what it was.
FOUND = {641273: "a leader that took over while a proposal was given up waited for ever for its joiner"}

FOUND_ON_MESH = {1131: "a job whose only standby workers could not be reached ended as if all of them drained"}


@pytest.mark.parametrize("part", range(3))
def test_nothing_raises_and_what_is_healed_trains_on_or_has_lost_state(part: int, seed: int) -> None:
    for number in range(part, SEEDS, 3):
        _walked(seed + number)


@pytest.mark.parametrize("number", FOUND)
def test_so_it_is_where_a_walk_found_otherwise(number: int) -> None:
    _walked(number)


@pytest.mark.parametrize("part", range(2))
def test_so_it_is_with_jobs_on_a_mesh(part: int, seed: int) -> None:
    for number in range(part, SEEDS, 2):
        _walked(seed + number, MeshWalk)


@pytest.mark.parametrize("number", FOUND_ON_MESH)
def test_so_it_is_where_a_walk_of_such_a_job_found_otherwise(number: int) -> None:
    _walked(number, MeshWalk)


def _walked(number: int, kind: type[Walk] = Walk) -> None:
    world = kind(number)
    try:
        world.walk()
        world.heal()
    except Exception as error:
        raise AssertionError(f"walk {number}") from error
    said = f"walk {number}: {world.phase.value}: {world.job.reason}"
    assert "defect" not in world.kinds(), said
    if world.phase in OVER:
        assert "state is lost" in world.job.reason, said
        assert not whole(world), said
    else:
        assert recovered(world), said
