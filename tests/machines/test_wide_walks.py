"""Random walks with every word that the job machine's table has a cell for, and how many cells they reach.

`python -m tests.machines.test_wide_walks --first 0 --seeds 1000` says which cells no walk came to.
"""

from __future__ import annotations

from collections import Counter

import click
import pytest

from elasticd.machines.job.state.job_state import OVER, JobPhase
from tests import sizes
from tests.machines.test_recovery import recovered
from tests.machines.wide_walk import CELLS, Cell, WideWalk

WALKS = sizes.number(full=3600, quick=90)
PARTS = 3
#: Cells of the table that the walks of one part come to at least. These numbers only grow.
LEAST_CELLS = sizes.number(full=190, quick=115)


@pytest.mark.parametrize("part", range(PARTS))
def test_nothing_raises_whatever_is_said_in_which_phase_and_what_is_healed_trains_on_or_is_over(
    part: int,
) -> None:
    cells = {cell for number in range(part, WALKS, PARTS) for cell in walked(number)}
    assert len(cells & CELLS) >= LEAST_CELLS, f"never: {unreached(cells)}"


def walked(number: int) -> set[Cell]:
    """The cells that a walk came to, once it is checked."""
    walk = WideWalk(number)
    try:
        walk.walk()
        walk.heal()
    except Exception as error:
        raise AssertionError(f"walk {number}") from error
    assert "defect" not in walk.kinds(), f"walk {number}"
    assert not walk.logs, f"walk {number}: {walk.logs}"
    assert walk.known, f"walk {number}: its torchruns wait, and no job is known"
    line = f"walk {number}: {walk.phase.value}: {walk.job.reason}"
    if walk.phase in OVER:
        assert walk.job.reason or walk.phase is JobPhase.DONE, line
    else:
        assert recovered(walk), line
    return walk.cells


def unreached(cells: set[Cell]) -> dict[str, list[str]]:
    """The phases of each event in which no walk came to something."""
    missing: dict[str, list[str]] = {}
    for phase, event in sorted(CELLS - cells, key=lambda cell: (cell[1].__name__, cell[0].value)):
        missing.setdefault(event.__name__, []).append(phase.value)
    return missing


@click.command()
@click.option("--first", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--seeds", type=click.IntRange(min=1), default=1000, show_default=True)
def command(first: int, seeds: int) -> None:
    """Walks, and prints what was wrong and what was never reached."""
    cells: set[Cell] = set()
    wrong: Counter[str] = Counter()
    for number in range(first, first + seeds):
        try:
            cells |= walked(number)
        except AssertionError as error:
            wrong["wrong"] += 1
            print(f"WRONG: {error}: {error.__cause__!r}" if error.__cause__ else f"WRONG: {error}", flush=True)
    print(f"{seeds} walks, {wrong['wrong']} with something wrong; {len(cells & CELLS)} of {len(CELLS)} cells")
    print(f"never: {unreached(cells)}")


if __name__ == "__main__":
    command(prog_name="python -m tests.machines.test_wide_walks")
