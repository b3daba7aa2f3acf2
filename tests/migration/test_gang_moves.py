"""State moves bit by bit through random plans also between processes, over gloo."""

from pathlib import Path

import pytest

from tests import forkserver, sizes
from tests.migration import gang_moves


@pytest.mark.slow
@pytest.mark.parametrize(("size", "moves"), sizes.beside([(6, 12)], [(4, 12), (6, 12), (8, 8)]))
def test_gloo_processes_move_state_through_random_plans_as_the_reference_does(
    size: int, moves: int, tmp_path: Path
) -> None:
    ranks = [(str(rank), str(size), str(tmp_path / "store"), str(moves)) for rank in range(size)]
    ended = forkserver.outputs(Path(gang_moves.__file__), ranks, tmp_path, seconds=300)
    assert [text.strip() for text in ended] == [str(moves)] * size
