"""The program for one GPU goes through on the CPU, where nothing of it says anything of speed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import forkserver
from tests.accelerators import vgpu
from tests.forkserver import ROOT

PROGRAM = ROOT / "benchmarks/_on_a_gpu.py"
#: Parts of one process.
OF_ONE_DEVICE = ("host", "kernels", "eager", "large", "compiled", "floor", "paid", "stacks")


def figures(folder: Path, parts: Sequence[str], seconds: float) -> dict[str, Any]:
    """Those that the program prints, which are those of its file."""
    log, out = folder / "log", folder / "figures.json"
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=f"{ROOT}:{ROOT / 'benchmarks'}")
    arguments = ("cpu", *parts, "--seconds", str(seconds), "--out", str(out))
    process = forkserver.start(PROGRAM, *arguments, environment=environment, output=log)
    assert process.wait(seconds + 120) == 0, log.read_text()[-4000:]
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith('{"at"')]
    printed = {line["figure"]: line["value"] for line in lines}
    assert printed == json.loads(out.read_text())
    assert not [name for name in printed if name.endswith((": failed", ": not run"))]
    return printed


def test_both_sides_of_each_pair_train_alike_and_have_equal_graphs(tmp_path: Path) -> None:
    made = figures(tmp_path, OF_ONE_DEVICE, 600)
    for pair in ("eager", "large", "compiled"):
        assert made[f"{pair}: losses, ours"] == pytest.approx(made[f"{pair}: losses, plain"], rel=1e-5)
        assert made[pair][0] > 0
    for pair in ("large", "compiled"):
        assert made[f"{pair}: graphs"] == {"ours": 1, "plain": 1}
    assert made["floor: milliseconds, plain torch captured"] > 0
    assert made["captured"][0] > 0
    assert "bundle.backward" in made["stacks: elasticd's functions, ours"]
    assert "bundle.backward" not in made["stacks: elasticd's functions, plain"]


def test_operations_are_those_of_torchtitans_convention() -> None:
    """Six for each parameter but the embedding's, and 12 x layers x width x tokens: with 953 M parameters and
    4,096 tokens 6.94 billion a token."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from _gpu_figures import covered
        from _gpu_sides import LARGE, Size, parameters
    finally:
        sys.path.pop(0)
    size = Size(LARGE, 4096, 8)
    assert parameters(LARGE) == pytest.approx(953.2e6, rel=1e-3)
    assert size.operations() / (4096 * 8) == pytest.approx(6.94e9, rel=1e-3)
    assert covered([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0)]) == 4.0


@pytest.mark.full
@pytest.mark.slow
def test_tests_over_nccl_and_a_cluster_of_unequal_shares_run_on_emulated_devices(tmp_path: Path) -> None:
    vgpu.needed()
    made = figures(tmp_path, ("nccl", "shares"), 600)
    tests = {name: value for name, value in made.items() if name.startswith("nccl: test_")}
    assert len(tests) == made["nccl: tests"] == 2
    assert [said for said, _ in tests.values()] == ["passed"] * 2
    assert made["shares: seconds from a kill to the next step"] > 0
    assert made["shares: over the bound"] > 0.3
    assert made["shares: ranks at first"] == ["a/0", "b/0", "c/0"]
