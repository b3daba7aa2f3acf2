"""One rank of the runtime's benchmark: our step and torch's own, in turns, on the same batches.

    python benchmarks/_runtime_sides.py FOLDER RANK ADDRESS SCENE PAIRS

Both sides live in one process, start from the same values and see the same samples; their losses are compared
in every step. A pair is one step of each, in an order that changes, after a barrier. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from _torch_sides import ddp, pipelined, tensor_parallel
from _trained import CONFIG, TOKENS, StepOf, Text, engine_of, plan_of, sampler, stage
from elasticd_planner.spec.plan import Plan

#: Steps of each side before the first that counts.
WARM = 4
#: The largest difference of two losses that sums taken in another order explain, in float32.
CLOSE = 5e-3

HALF = CONFIG.layers // 2
PLANS: dict[str, Plan] = {
    "DDP": plan_of((1, [stage(0, 4, a0=1)]), (1, [stage(0, 4, a1=1)]), micro_batch=8),
    "TP": plan_of((1, [stage(0, 4, a0=1, a1=1)]), micro_batch=8),
    "GPipe": plan_of((4, [stage(0, HALF, a0=1), stage(HALF, 4, a1=1)]), micro_batch=4),
}
PLANS["1F1B"] = PLANS["GPipe"]


def their_step(scene: str, rank: int, plan: Plan, data: Text) -> StepOf:
    drawn, size, ranks = sampler(plan, data), plan.micro_batch, len(plan.members)
    if scene == "DDP":
        return ddp(rank, CONFIG, data, drawn, size)
    if scene == "TP":
        return tensor_parallel(rank, ranks, CONFIG, data, drawn, size)
    return pipelined(scene, rank, ranks, CONFIG, data, drawn, plan.pipelines[0].micro_batches)


def main(folder: Path, rank: int, address: str, scene: str, pairs: int) -> dict[str, object]:
    torch.set_num_threads(1)
    plan = PLANS[scene]
    data = Text.of(CONFIG.vocabulary, TOKENS)
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(folder / "theirs")), rank=rank, world_size=len(plan.members)
    )
    engine = engine_of(folder, rank, address, plan, CONFIG, data)
    theirs = their_step(scene, rank, plan, data)

    def ours(index: int) -> float:
        return engine.step(index, lambda: 0).outcome.vote.loss

    found: dict[str, list[list[float | None]]] = {"ours": [], "theirs": []}
    for index in range(WARM + pairs):
        sides = [("ours", ours), ("theirs", theirs)]
        for name, step in sides if index % 2 else reversed(sides):
            dist.barrier()
            start = time.perf_counter()
            loss = step(index)
            found[name].append([time.perf_counter() - start, loss])
    dist.barrier()
    return {name: steps[WARM:] for name, steps in found.items()}


if __name__ == "__main__":
    folder, rank, address, scene, pairs = sys.argv[1:]
    print(json.dumps(main(Path(folder), int(rank), address, scene, int(pairs))), flush=True)
    os._exit(0)
