"""Seconds from the command with a wrong script to its message and the end, by the clock of a user.

Two kinds of wrong: one that elasticd refuses (a batch that does not divide), and one whose own code raises
(KeyError). Each with real processes, two workers, nothing preloaded.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from _results import Row, row

from tests.integration.launches import Launches
from tests.torchruns import environment

ROOT = Path(__file__).resolve().parent.parent
ODD_BATCH = '{"out": "/", "steps": 1, "global_batch": 7, "micro_batch": 2}'
RAISES = "import torch\nimport elasticd\n{}['inputs']\n"


def rows(smallest: bool) -> Iterator[Row]:
    """The slower of both kinds, in the fastest of some tries; the smallest size tries each once."""
    slowest = 0.0
    with Launches({"a": 2}) as launches:
        cases = {
            "refused": (str(ROOT / "tests" / "integration" / "train.py"), "does not divide into micro-batches"),
            "raises": (str(launches.script(RAISES)), "KeyError: 'inputs'"),
        }
        for kind, (script, words) in cases.items():
            tries = [
                _seconds(launches, f"{kind}-{number}", script, words) for number in range(1 if smallest else 3)
            ]
            print(f"{kind}: {', '.join(f'{seconds:.1f}' for seconds in tries)} s")
            slowest = max(slowest, min(tries))
    name = "seconds from a wrong script to its message and the end"
    yield row(name, round(slowest, 1), "s", kind="measured", goal="<= 15", met=slowest <= 15)


def _seconds(launches: Launches, job: str, script: str, words: str) -> float:
    command = [sys.executable, "-m", "elasticd", "run", "--job", job, "--devices", "2"]
    command += ["--socket", launches.cluster.socket("a"), script]
    running = {**os.environ, **environment(), "OPTIONS": ODD_BATCH}
    began = time.monotonic()
    done = subprocess.run(command, env=running, capture_output=True, text=True, timeout=300)
    seconds = time.monotonic() - began
    ours = [line for line in done.stderr.splitlines() if line.startswith("elasticd: ") and words in line]
    if done.returncode != 1 or len(ours) != 1:
        raise AssertionError(f"exit code {done.returncode}:\n{done.stderr}")
    return seconds
