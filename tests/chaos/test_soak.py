"""The soak on real processes: a few faults of a fixed seed; under `make test-all` many, of its seed, too."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import forkserver, sizes

FIXED = 4


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("drawn", sizes.beside([False], [False, True]), ids=["fixed", "drawn"])
def test_a_real_job_goes_on_through_random_faults(drawn: bool, seed: int, tmp_path: Path) -> None:
    chosen, faults = seed if drawn else FIXED, sizes.number(full=10, quick=2)
    print(f"--seed {chosen} --faults {faults}")
    printed = tmp_path / "printed"
    devices, rest = sizes.number(full=2, quick=1), sizes.number(full=160, quick=60)
    command = ("--seed", str(chosen), "--faults", str(faults), "--devices", str(devices), "--rest", str(rest))
    command += ("--out", str(tmp_path / "out"))
    environment = {**os.environ, "PYTHONPATH": str(forkserver.ROOT)}
    done = forkserver.start("elasticd.chaos.soak", *command, environment=environment, output=printed)
    try:
        code = done.wait(850)
    finally:
        done.terminate()  # it ends all that it started
        done.wait(60)
    said = printed.read_text()
    assert code == 0, said[-8000:]
    assert f"seed {chosen}:" in said
    assert "all that must hold does" in said
