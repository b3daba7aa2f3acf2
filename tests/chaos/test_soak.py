"""The soak on real processes: a few faults of a fixed seed; under `make test-all` many, of its seed, too."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import forkserver, sizes

#: It draws a broken data network, a node that a new leader never met, a pause between two steps and a hang in
#: the loss (both with the interpreter's lock), and an exception of the user's code.
FIXED = 4853


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("kind", sizes.beside(["fixed"], ["fixed", "drawn", "modules", "live"]))
def test_a_real_job_goes_on_through_random_faults(kind: str, seed: int, tmp_path: Path) -> None:
    """ "modules": of a model of two; "live": of a loop of its own over FSDP2."""
    drawn = kind == "drawn"
    chosen, faults = (seed, 60) if drawn else (FIXED, 6)
    print(f"--seed {chosen} --faults {faults}")
    printed = tmp_path / "printed"
    devices, rest = (2, 160) if drawn else (1, 30)
    command = ("--seed", str(chosen), "--faults", str(faults), "--devices", str(devices), "--rest", str(rest))
    # In one namespace the processes are forked: in several each starts an interpreter of its own.
    command += ("--out", str(tmp_path / "out"), *(() if drawn else ("--together",)))
    command += (f"--{kind}",) * (kind in ("modules", "live"))
    environment = {**os.environ, "PYTHONPATH": str(forkserver.ROOT)}
    done = forkserver.start("tests.soak.soak", *command, environment=environment, output=printed)
    try:
        code = done.wait(2300)
    finally:
        done.terminate()  # it ends all that it started
        done.wait(60)
    said = printed.read_text()
    assert code == 0, said[-8000:]
    assert f"seed {chosen}:" in said
    assert "all that must hold does" in said
