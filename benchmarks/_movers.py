"""Starts the ranks of the migration benchmark as processes, on loopback or in network namespaces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

#: glibc keeps what was freed, so that after the first repetition both exchanges find memory that is in use
#: already: how fast this machine gives pages to a process is not what is compared.
WARM = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 36), "MALLOC_TOP_PAD_": str(64 << 20)}


def environment() -> dict[str, str]:
    """One thread for each process, and memory that is warm after the first time."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE.parent}:{HERE}", **WARM}


def gang(
    program: str,
    addresses: Sequence[str],
    arguments: Sequence[str],
    *,
    within: Sequence[Sequence[str]] | None = None,
    seconds: float = 300.0,
) -> list[Any]:
    """What each process of `program FOLDER RANK ADDRESS ARGUMENTS...` printed as JSON, by rank; `within` are
    words before each command. Raises RuntimeError with the first one's complaint where one fails."""
    with tempfile.TemporaryDirectory(prefix="elasticd-bench-") as folder:
        started = [
            subprocess.Popen(
                [
                    *(within[rank] if within else ()),
                    *(sys.executable, str(HERE / program), folder, str(rank), address, *arguments),
                ],
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, address in enumerate(addresses)
        ]
        try:
            ended = [process.communicate(timeout=seconds) for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
    for rank, (process, (_, complaint)) in enumerate(zip(started, ended, strict=True)):
        if process.returncode:
            raise RuntimeError(f"rank {rank} of {program} ended with {process.returncode}:\n{complaint}")
    return [json.loads(out) for out, _ in ended]
