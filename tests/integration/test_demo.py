"""`elasticd demo` as a user calls it: the whole story once, and Ctrl-C while the cluster is up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests import sizes
from tests.liveness import living

pytestmark = pytest.mark.slow

#: Checks that need the machine for themselves: other tests run beside this one.
SPEED = {"as predicted", "better than without", "replan pays", "emulation in time"}
DEADLINE = 60.0


def start(out: Path, *options: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ELASTICD_")}
    return subprocess.Popen(
        [sys.executable, "-m", "elasticd", "demo", "--out", str(out), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


@pytest.mark.full  # three minutes of both cores; CI runs it by itself
@pytest.mark.timeout(1800)
def test_demo_tells_its_story_and_every_figure_holds(tmp_path: Path) -> None:
    process = start(tmp_path, "--steps", "140")
    try:
        said, _ = process.communicate(timeout=1700)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(DEADLINE)
    assert (tmp_path / "report.json").exists(), said
    report = json.loads((tmp_path / "report.json").read_text())
    failed = {check["name"] for check in report["checks"] if not check["met"]}
    assert failed <= SPEED, said
    assert process.returncode == (1 if failed else 0), said
    assert [speed["phase"] for speed in report["speeds"]][-1] == "recovered"
    assert (tmp_path / "throughput.png").stat().st_size > 10_000
    assert "speed of its devices is emulated" in said


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "moment",
    sizes.beside(
        ["logs/torchrun-beta.log"], ["logs/agent-alpha.log", "logs/torchrun-beta.log", "logs/plain.log"]
    ),
)
def test_interrupt_leaves_no_process_behind(moment: str, tmp_path: Path) -> None:
    process = start(tmp_path)
    tree: set[psutil.Process] = set()
    try:
        deadline = time.monotonic() + 2 * DEADLINE
        while not (tmp_path / moment).exists():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            tree |= set(psutil.Process(process.pid).children(recursive=True))
            time.sleep(0.01)
        tree |= set(psutil.Process(process.pid).children(recursive=True))
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=DEADLINE)
        assert process.returncode == 130, said
        assert "every process that the demo started was ended" in said
        assert tree
        assert not living(tree)
    finally:
        process.kill()
        process.wait()
