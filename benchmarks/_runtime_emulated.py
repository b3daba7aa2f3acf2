"""One rank of eight emulated devices under an uneven plan, and what the event-driven simulation says of it.

    python benchmarks/_runtime_emulated.py FOLDER RANK ADDRESS STEPS PLAN

The table is seconds of a whole block for a micro-batch; one device is three times slower than the others and
has the smallest share of its group. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from _trained import Text, engine_of, plan_of, stage
from elasticd_planner.cost.schedule_timeline import played_seconds
from elasticd_planner.spec.plan import Pipeline, Plan

from elasticd.models import DecoderConfig
from elasticd.runtime.telemetry.emulation import SpeedEmulator
from elasticd.wire.worker import EmulatedSpeed

CONFIG = DecoderConfig(vocabulary=64, width=32, layers=6, heads=8, kv_heads=8, hidden=48)
TOKENS = 8
#: Seconds of one whole block for one micro-batch on a device of rate 1.
FORWARD, BACKWARD = 0.1, 0.2
FACTORS = {"a/1": 3.0}
PLANS = {
    "uneven": plan_of(
        (5, [stage(0, 3, a0=3, a1=1), stage(3, 6, a2=1, a3=1)]),
        (3, [stage(0, 2, b0=1), stage(2, 6, b1=2, b2=1, b3=1)]),
        micro_batch=1,
    ),
    "interleaved": plan_of(
        (5, [stage(0, 1, (3, 4), a0=3, a1=1), stage(1, 2, (4, 5), a2=1, a3=1), stage(2, 3, (5, 6), b0=1)]),
        (3, [stage(0, 1, (3, 4), b1=1), stage(1, 2, (4, 5), b2=1), stage(2, 3, (5, 6), b3=1)]),
        micro_batch=1,
    ),
}
WARM = 2


def simulated(plan: Plan) -> float:
    """Seconds of a step of the slowest pipeline, fed with the table."""
    return max(_pipeline(pipeline) for pipeline in plan.pipelines)


def _pipeline(pipeline: Pipeline) -> float:
    slowest = [
        max(stage.fraction(i) * FACTORS.get(device, 1.0) for i, device in enumerate(stage.devices))
        for stage in pipeline.stages
    ] * pipeline.chunks
    widest = [(stop - start) * each for (start, stop), each in zip(pipeline.spans, slowest, strict=True)]
    times = [[seconds * each for each in widest] for seconds in (FORWARD, BACKWARD)]
    return played_seconds(*times, (), pipeline.micro_batches, pipeline.chunks)


def main(folder: Path, rank: int, address: str, steps: int, plan: Plan) -> dict[str, object]:
    torch.set_num_threads(1)
    pacer = SpeedEmulator(
        EmulatedSpeed(
            forward=FORWARD / TOKENS, backward=BACKWARD / TOKENS, factor=FACTORS.get(plan.members[rank], 1.0)
        )
    )
    engine = engine_of(folder, rank, address, plan, CONFIG, Text.of(CONFIG.vocabulary, TOKENS), pacer)
    seconds = []
    for index in range(WARM + steps):
        start = time.perf_counter()
        engine.step(index, lambda: 0)
        seconds.append(time.perf_counter() - start)
        if index < WARM:
            pacer.take()
    paced, overruns = pacer.take()
    return {"seconds": seconds[WARM:], "paced": paced, "overruns": overruns}


if __name__ == "__main__":
    folder, rank, address, steps, name = sys.argv[1:]
    print(json.dumps(main(Path(folder), int(rank), address, int(steps), PLANS[name])), flush=True)
    os._exit(0)
