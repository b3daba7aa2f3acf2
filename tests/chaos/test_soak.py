"""The soak on real processes: one with a fixed seed, one with a seed of its own, which is printed."""

from __future__ import annotations

import secrets
import subprocess
import sys
from pathlib import Path

import pytest

#: Faults of each: a few minutes on a busy machine.
FAULTS = 8


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [4, None])
def test_a_real_job_goes_on_through_random_faults(seed: int | None, tmp_path: Path) -> None:
    chosen = secrets.randbelow(1_000_000) if seed is None else seed
    print(f"--seed {chosen} --faults {FAULTS}")
    command = (sys.executable, "-m", "elasticd.chaos.soak", "--seed", str(chosen), "--faults", str(FAULTS))
    done = subprocess.run((*command, "--out", str(tmp_path)), capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, f"{done.stdout[-5000:]}\n{done.stderr[-3000:]}"
    assert f"seed {chosen}:" in done.stdout
    assert "all that must hold does" in done.stdout
