"""One rank of the runtime's benchmark: our step and torch's own, in turns, on the same batches.

    python benchmarks/_runtime_sides.py FOLDER RANK ADDRESS SCENE PAIRS

Both sides live in one process, start from the same values and see the same samples; their losses are compared
in every step. A pair is one step of each, in an order that changes, after a barrier. Prints one JSON object: of
each step its seconds, its loss and the main thread's processor time.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from _instructions import TOKENS as SMALL_TOKENS
from _instructions import WARM, small
from _torch_sides import ddp, pipelined, tensor_parallel
from _trained import CONFIG, TOKENS, StepOf, Text, engine_of, plan_of, sampler, stage
from elasticd_planner.spec.plan import Plan

from elasticd.models import DecoderConfig

#: The largest difference of two losses that sums taken in another order explain, in float32.
CLOSE = 5e-3

HALF = CONFIG.layers // 2
PLANS: dict[str, Plan] = {
    "DDP": plan_of((1, [stage(0, 4, a0=1)]), (1, [stage(0, 4, a1=1)]), micro_batch=8),
    "DDP, small layers": plan_of((4, [stage(0, 12, a0=1)]), (4, [stage(0, 12, a1=1)]), micro_batch=1),
    "TP": plan_of((1, [stage(0, 4, a0=1, a1=1)]), micro_batch=8),
    "GPipe": plan_of((4, [stage(0, HALF, a0=1), stage(HALF, 4, a1=1)]), micro_batch=4),
}
PLANS["1F1B"] = PLANS["GPipe"]
#: The model of a scene, and the tokens of its samples; of the others `CONFIG` and `TOKENS`.
MODELS = {"DDP, small layers": (small(12), SMALL_TOKENS)}


def their_step(scene: str, rank: int, plan: Plan, config: DecoderConfig, data: Text) -> StepOf:
    drawn, size, ranks = sampler(plan, data), plan.micro_batch, len(plan.members)
    if scene.startswith("DDP"):
        return ddp(rank, config, data, drawn, size, plan.pipelines[0].micro_batches)
    if scene == "TP":
        return tensor_parallel(rank, ranks, CONFIG, data, drawn, size)
    return pipelined(scene, rank, ranks, CONFIG, data, drawn, plan.pipelines[0].micro_batches)


def main(folder: Path, rank: int, address: str, scene: str, pairs: int) -> dict[str, object]:
    torch.set_num_threads(1)
    plan, (config, tokens) = PLANS[scene], MODELS.get(scene, (CONFIG, TOKENS))
    data = Text.of(config.vocabulary, tokens)
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(folder / "theirs")), rank=rank, world_size=len(plan.members)
    )
    engine = engine_of(folder, rank, address, plan, config, data)
    theirs = their_step(scene, rank, plan, config, data)

    def ours(index: int) -> float:
        return engine.step(index, lambda: 0).outcome.vote.loss

    found: dict[str, list[list[float | None]]] = {"ours": [], "theirs": []}
    for index in range(WARM + pairs):
        sides = [("ours", ours), ("theirs", theirs)]
        for name, step in sides if index % 2 else reversed(sides):
            dist.barrier()
            start, worked = time.perf_counter(), time.thread_time()
            loss = step(index)
            found[name].append([time.perf_counter() - start, loss, time.thread_time() - worked])
    dist.barrier()
    return {name: steps[WARM:] for name, steps in found.items()}


if __name__ == "__main__":
    folder, rank, address, scene, pairs = sys.argv[1:]
    print(json.dumps(main(Path(folder), int(rank), address, scene, int(pairs))), flush=True)
    os._exit(0)
