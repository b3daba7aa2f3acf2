"""Counted instructions and Python calls of the host for a step on one processor, beside plain torch's.

    python benchmarks/_instructions.py LAYERS MICRO_BATCHES    # the calls of both sides, as JSON

A machine that others use does not change these counts, as it does any time. Both sides train the same small
decoder (width 64, one sample of 16 tokens a micro-batch) with a fused AdamW and clipped gradients. Instructions
are counted by valgrind's callgrind, which this program is started under; a library of four lines, made by the C
compiler at hand, tells it where a step begins and ends.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from _gpu_sides import Ours, Plain, Size
from _movers import environment
from _results import ROOT, Row, row

from elasticd.models import DecoderConfig
from elasticd.runtime.accelerator import CPU

WIDTH, TOKENS = 64, 16
#: Steps before some are counted: lists and caches of a plan are made in the first ones, all reads of their
#: samples are watched for draws, and Python adapts its code of a function after eight calls, some of them one a
#: step.
WARM = 12
#: Steps that are counted together: not each has the same work, and samples are read ahead by a thread.
COUNTED = 4
#: Goals: instructions and Python calls of our step over plain torch's.
MOST_INSTRUCTIONS, MOST_CALLS = 1.01, 1.0
#: Each request of callgrind as a function.
_REQUESTS = """
#include <valgrind/callgrind.h>
void begin(void) { CALLGRIND_START_INSTRUMENTATION; }
void zero(void) { CALLGRIND_ZERO_STATS; }
void dump(const char *name) { CALLGRIND_DUMP_STATS_AT(name); }
"""


def lacking() -> str:
    """The programs that counting instructions needs and that are not here; empty: all are."""
    return " and ".join(name for name in ("valgrind", "cc") if shutil.which(name) is None)


def small(layers: int) -> DecoderConfig:
    """The model of both sides."""
    return DecoderConfig(
        vocabulary=256, width=WIDTH, layers=layers, heads=4, kv_heads=4, hidden=WIDTH * 11 // 4
    )


def sides(layers: int, micro_batches: int) -> dict[str, Callable[[], None]]:
    """A step of each, warm."""
    torch.set_num_threads(1)
    size = Size(small(layers), TOKENS, micro_batches)
    made = {"plain": Plain(size, CPU, fused=True).step, "ours": Ours(size, CPU, fused=True).step}
    for step in made.values():
        for _ in range(WARM):
            step()
    gc.disable()  # its pauses are another matter
    return made


def calls(step: Callable[[], None]) -> int:
    """Python functions that a step calls, on average."""
    count = 0

    def counted(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(counted)
    try:
        for _ in range(COUNTED):
            step()
    finally:
        sys.setprofile(None)
    return count // COUNTED


def instructions(layers: int, micro_batches: int, tree: Path = ROOT) -> dict[str, int]:
    """Instructions of a step of each side, on average; `tree`: of the elasticd that is counted."""
    return instructions_of(Path(__file__).name, (str(layers), str(micro_batches)), tree)


def instructions_of(program: str, arguments: Sequence[str], tree: Path = ROOT) -> dict[str, int]:
    """Instructions of a step of each side of a program of this folder, which ends with `report`."""
    with tempfile.TemporaryDirectory() as folder:
        source, library, out = Path(folder, "requests.c"), Path(folder, "requests.so"), Path(folder, "out")
        source.write_text(_REQUESTS)
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
        valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--smc-check=none"]
        command = [*valgrind, f"--callgrind-out-file={out}", sys.executable, str(tree / "benchmarks" / program)]
        command += [*arguments, str(library)]
        parts = ":".join(str(tree / part) for part in ("benchmarks", "", "agent", "planner", "migration"))
        single = dict(environment(), OMP_NUM_THREADS="1", PYTHONHASHSEED="0", PYTHONPATH=parts)
        subprocess.run(command, env=single, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return dict(map(_counted, Path(folder).glob("out.*")))


def _counted(dump: Path) -> tuple[str, int]:
    """A side, and a step's share of its dump."""
    found = dict(line.split(":", 1) for line in dump.read_text().splitlines() if ": " in line)
    return found["desc"].rpartition(":")[2].strip(), int(found["summary"]) // COUNTED


def rows(layers: int, micro_batches: int) -> Iterator[Row]:
    """Counts of our step over plain torch's."""
    name = f"one processor, {layers} blocks of width {WIDTH}, {micro_batches} micro-batches"
    arguments = (str(layers), str(micro_batches))
    yield from counted_rows(name, Path(__file__).name, arguments, MOST_CALLS, MOST_INSTRUCTIONS)


def counted_rows(
    name: str, program: str, arguments: Sequence[str], calls: float | None, instructions: float
) -> Iterator[Row]:
    """Python calls and instructions of our step over plain torch's in a program of this folder, which ends with
    `report`; with the most that each may be."""
    command = [sys.executable, str(Path(__file__).with_name(program)), *arguments]
    said = subprocess.run(command, env=environment(), check=True, stdout=subprocess.PIPE).stdout
    yield from _rows(f"{name}: Python calls of a step", json.loads(said), calls)
    if missing := lacking():
        print(f"instructions are not counted: there is no {missing} here")
        return
    yield from _rows(f"{name}: instructions of a step", instructions_of(program, arguments), instructions)


def _rows(name: str, counts: dict[str, int], most: float | None) -> Iterator[Row]:
    value = counts["ours"] / counts["plain"]
    goal = None if most is None else f"<= {most}"
    yield row(f"{name} over plain torch's", value, "x", goal=goal, met=None if most is None else value <= most)
    yield row(f"{name}: plain torch", counts["plain"], "")


def main(layers: int, micro_batches: int, library: str = "") -> None:
    """Counts the sides of a small decoder."""
    report(sides(layers, micro_batches), library)


def report(steps: dict[str, Callable[[], None]], library: str) -> None:
    """Prints the calls of each side's step; under callgrind, with the library that speaks to it, has it count
    instructions."""
    if not library:
        counts = {}
        for name, step in steps.items():
            step()
            counts[name] = calls(step)
        print(json.dumps(counts))
        return
    requests = ctypes.CDLL(library)
    requests.begin()
    for name, step in steps.items():
        step()  # its code is translated
        requests.zero()
        for _ in range(COUNTED):
            step()
        requests.dump(name.encode())
    os._exit(0)  # what is counted of the end is of no use


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
