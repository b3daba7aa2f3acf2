"""Processor time of a step beside plain torch's, in turns: eager, compiled, and all blocks as one graph.

    python benchmarks/_runtime_pairs.py LAYERS MICRO_BATCHES PAIRS    # seconds and graphs of all sides, as JSON

The model is that of `_instructions`, whose layers are so small that the host's work is most of a step. Plain
torch's blocks are compiled one by one, as a script would have it. The processor time is that of all threads of
the process, with one thread for kernels: a machine that others use lengthens it less than it does a clock's.
"""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from _gpu_figures import graphs_made
from _gpu_sides import Ours, Plain, Size
from _instructions import TOKENS, WARM, small
from _movers import environment
from _pairs import ratio, ratio_rows
from _results import Row, row

from elasticd.runtime.accelerator import CPU

#: Processes that a pair's turns are divided among, and how many turns one has at least: where a process has its
#: memory makes a side faster or slower by up to 2 %, to its end.
STARTS, TURNS = 4, 20
#: Each pair by name: our side, plain torch's, and the goal of their ratio.
PAIRS = {
    "eager": ("eager", "plain", 1.03),
    "both compiled by block": ("compiled", "plain compiled", 1.02),
    "our blocks as one graph, plain torch's compiled by block": ("chunks", "plain compiled", 0.9),
}


def sides(size: Size, *, compiles: bool) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """The name of each side, the graphs that it made, and its step, which is warm. The eager ones come first:
    the rotary table that they keep is then in no graph."""
    makers: dict[str, Callable[[], Ours | Plain]] = {
        "plain": lambda: Plain(size, CPU, fused=True),
        "eager": lambda: Ours(size, CPU, fused=True),
        "plain compiled": lambda: Plain(size, CPU, compiled=True, fused=True),
        "compiled": lambda: Ours(size, CPU, compiled=True, fused=True),
        "chunks": lambda: Ours(size, CPU, compiled="chunks", fused=True),
    }
    for name, make in makers.items():
        if compiles or name in ("plain", "eager"):
            before, side = graphs_made(), make()
            for _ in range(WARM):
                side.step()
            yield name, graphs_made() - before, side.step


def measured(layers: int, micro_batches: int, pairs: int) -> dict[str, Any]:
    """Processor seconds of each side by turn, and its graphs."""
    torch.set_num_threads(1)
    size = Size(small(layers), TOKENS, micro_batches)
    found = list(sides(size, compiles=shutil.which("g++") is not None))
    seconds: dict[str, list[float]] = {name: [] for name, _, _ in found}
    gc.disable()  # its pauses are another matter
    for turn in range(pairs):
        for name, _, step in found if turn % 2 else found[::-1]:
            began = time.process_time()
            step()
            seconds[name].append(time.process_time() - began)
    return {"seconds": seconds, "graphs": {name: graphs for name, graphs, _ in found}}


def rows(layers: int, micro_batches: int, pairs: int) -> Iterator[Row]:
    """The ratio of each pair. Raises RuntimeError where the sides of a pair made unequal numbers of graphs: a
    side whose graphs are broken is no peer."""
    starts = max(1, min(STARTS, pairs // TURNS))
    command = [sys.executable, __file__, *map(str, (layers, micro_batches, pairs // starts))]
    single = dict(environment(), OMP_NUM_THREADS="1")
    seconds: dict[str, list[float]] = {}
    for _ in range(starts):
        printed = subprocess.run(command, env=single, check=True, stdout=subprocess.PIPE).stdout
        found = json.loads(printed.splitlines()[-1])
        _refuse_unequal(found["graphs"])
        for side, spent in found["seconds"].items():
            seconds.setdefault(side, []).extend(spent)
    words = f"one processor, {layers} blocks of width 64, {micro_batches} micro-batches"
    for pair, (ours, theirs, most) in PAIRS.items():
        if ours not in seconds:
            print(f"{pair}: not measured, there is no g++ here")
            continue
        name = f"{words}: processor time of a step over plain torch's, {pair}"
        yield from ratio_rows(name, ratio(seconds[ours], seconds[theirs]), most)
    for side, spent in seconds.items():
        yield row(f"{words}: processor time of a step, {side}, least", min(spent) * 1e3, "ms")


def _refuse_unequal(graphs: Mapping[str, int]) -> None:
    for pair, (ours, theirs, _) in PAIRS.items():
        if ours in graphs and graphs[ours] != graphs[theirs]:
            raise RuntimeError(f"{pair}: {ours} made {graphs[ours]} graphs, {theirs} {graphs[theirs]}")


def main(arguments: Sequence[str]) -> None:
    """Prints what is measured."""
    print(json.dumps(measured(*map(int, arguments))))


if __name__ == "__main__":
    main(sys.argv[1:])
