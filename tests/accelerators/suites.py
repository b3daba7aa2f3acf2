"""Suites whose tests run on vgpu, too, by the plugin `tests.accelerators.on_vgpu`, in their own processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]

#: By what they are about. Tests that start processes are left out: their processes compute on the CPU.
SUITES = {
    "layouts": (
        "tests/runtime/test_engine_parity.py",
        "tests/runtime/test_engine.py",
        "tests/runtime/test_step_samples.py",
    ),
    "streams": ("tests/runtime/test_stream.py",),
    "micro-batches without targets": ("tests/runtime/test_engine_masked.py",),
    "groups and averages": ("tests/runtime/test_parameter_groups.py",),
    "interleaved pipelines": ("tests/runtime/test_pipeline_stage_interleaved.py",),
    "lanes": ("tests/runtime/test_lanes.py",),
    "ZeRO": ("tests/runtime/test_zero.py",),
    "precision": ("tests/models/test_precision.py", "tests/runtime/test_precision.py"),
    # Two of its tests make the CPU's generators those of all devices.
    "recomputation": ("tests/models/test_recompute.py", "-k", "not draws_without_a_key"),
    "layouts x precisions x optimizers": ("tests/models/test_mixed_precision_matrix.py",),
    "draws": ("tests/runtime/test_rng.py",),
    "evaluation and averages": ("tests/runtime/test_evaluation.py",),
    "checkpoints and snapshots": ("tests/runtime/test_snapshots.py", "tests/runtime/test_memory_file.py"),
    "moves in place": ("tests/runtime/test_move.py",),
    # From the host to the device; one of its tests installs into parameters of the host.
    "moves": ("tests/migration/test_execute.py", "-k", "not training_goes_on_from_the_moved_state"),
}


class Ran(NamedTuple):
    """Tests that passed and that did not, and the end of what pytest said."""

    passed: int
    failed: int
    said: str


def run(name: str, *options: str, seconds: float = 1800.0) -> Ran:
    """One suite on vgpu."""
    return ran("-p", "tests.accelerators.on_vgpu", "-m", "not slow", *options, *SUITES[name], seconds=seconds)


def ran(*options: str, seconds: float = 1800.0) -> Ran:
    """Tests in a process of their own, with all sizes."""
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--full", *options)
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )
    counts = {kind: int(number) for number, kind in re.findall(r"(\d+) (passed|failed|error)", done.stdout)}
    failed = counts.get("failed", 0) + counts.get("error", 0)
    if done.returncode and not failed:
        failed = 1  # it did not come to run any
    return Ran(counts.get("passed", 0), failed, (done.stdout + done.stderr)[-6000:])
