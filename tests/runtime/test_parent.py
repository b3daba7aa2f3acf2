"""A worker ends with whoever started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from elasticd.runtime.control import parent_death
from elasticd.wire.unix_socket import SLOT_VARIABLE

CHILD = """
import os, time
from elasticd.runtime.control import parent_death
parent_death.end_with(os.getppid())
print(os.getpid(), flush=True)
time.sleep(600)
"""
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"


def test_a_worker_whose_torchrun_is_killed_does_not_live_on() -> None:
    torchrun = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert torchrun.stdout is not None
    worker = int(torchrun.stdout.readline())
    try:
        torchrun.kill()
        torchrun.wait()
        deadline = time.monotonic() + 10
        while alive(worker):
            assert time.monotonic() < deadline, "it lives on as an orphan"
            time.sleep(0.01)
    finally:
        torchrun.stdout.close()
        if alive(worker):
            os.kill(worker, signal.SIGKILL)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_torchrun_without_restarts_is_named_once_with_what_to_do() -> None:
    off = {"TORCHELASTIC_MAX_RESTARTS": "0", "LOCAL_RANK": "0"}
    said = parent_death.without_restarts(off)
    assert "'elasticd run'" in said
    assert "--max-restarts=N" in said
    assert not parent_death.without_restarts({**off, "LOCAL_RANK": "1"}), "once for each torchrun"
    assert not parent_death.without_restarts({**off, "TORCHELASTIC_MAX_RESTARTS": "3"})
    assert not parent_death.without_restarts({"LOCAL_RANK": "0"}), "without torchrun"
    assert not parent_death.without_restarts({**off, SLOT_VARIABLE: "1"}), "elasticd run was told how often"
