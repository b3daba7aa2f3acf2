"""The host's work for a step beside plain torch's, counted: what a later change adds is seen here.

Each limit is the count of the day on which it was set, and a little. A change that goes beyond one either adds
what training needs, and raises it, or does not belong into a step.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests import forkserver

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(FOLDER))

import _instructions  # noqa: E402

#: Python calls and instructions of our step over plain torch's, 12 blocks of width 64, 4 micro-batches.
MOST_CALLS, MOST_INSTRUCTIONS = 0.73, 1.01


def test_a_step_calls_hardly_more_python_functions_than_plain_torchs(tmp_path: Path) -> None:
    out = tmp_path / "calls"
    counting = forkserver.start(FOLDER / "_instructions.py", "12", "4", environment=os.environ, output=out)
    assert counting.wait(240) == 0, out.read_text()[-2000:]
    calls = json.loads(out.read_text().splitlines()[-1])
    assert calls["ours"] / calls["plain"] <= MOST_CALLS, calls


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.skipif(bool(_instructions.lacking()), reason=f"there is no {_instructions.lacking()} here")
def test_a_step_takes_hardly_more_instructions_than_plain_torchs() -> None:
    counts = _instructions.instructions(12, 4)
    assert counts["ours"] / counts["plain"] <= MOST_INSTRUCTIONS, counts
