"""The soak on real processes: a few faults of a fixed seed; under `make test-all` many, of its seed, too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import sizes

FIXED = 4


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("drawn", sizes.beside([False], [False, True]), ids=["fixed", "drawn"])
def test_a_real_job_goes_on_through_random_faults(drawn: bool, seed: int, tmp_path: Path) -> None:
    chosen, faults = seed if drawn else FIXED, sizes.number(full=10, quick=3)
    print(f"--seed {chosen} --faults {faults}")
    command = (sys.executable, "-m", "elasticd.chaos.soak", "--seed", str(chosen), "--faults", str(faults))
    done = subprocess.run((*command, "--out", str(tmp_path)), capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, f"{done.stdout[-5000:]}\n{done.stderr[-3000:]}"
    assert f"seed {chosen}:" in done.stdout
    assert "all that must hold does" in done.stdout
