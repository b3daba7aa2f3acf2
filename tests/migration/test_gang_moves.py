"""State moves bit by bit through random plans also between processes, over gloo."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house import ROOT


@pytest.mark.slow
@pytest.mark.parametrize(("size", "moves"), [(4, 12), (6, 12), (8, 8)])
def test_gloo_processes_move_state_through_random_plans_as_the_reference_does(
    size: int, moves: int, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "tests.migration.gang_moves"]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(size), str(tmp_path / "store"), str(moves)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        ended = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [out.strip() for out, _ in ended] == [str(moves)] * size, "\n".join(err[-2000:] for _, err in ended)
