"""Synthetic workers: what a plan's members would measure at given rates, from a table of their own."""

import numpy as np
from elasticd_planner.spec.measurement import Measurement
from elasticd_planner.spec.plan import Plan

BLOCK, EMBED, HEAD, COLLECTIVE = 3e-4, 2e-5, 1e-4, 0.004
TOKENS = 256
#: What a block's second forward pass takes of its two passes.
AGAIN = 0.4


def measure(
    plan: Plan,
    step: int,
    rates: dict[str, float] | None = None,
    *,
    noise: float = 0.0,
    wild: dict[str, float] | None = None,
    step_seconds: float = 2.0,
    reduce_seconds: float = 0.03,
) -> list[Measurement]:
    """One step's measurements of all members. `wild`: factors on single devices' compute in this step alone.
    In a group all wait for the slowest member, which waits for none."""
    rates, wild = rates or {}, wild or {}
    rng = np.random.default_rng([step, plan.number])
    made = []
    for pipeline in plan.pipelines:
        tokens = TOKENS * pipeline.micro_batches
        for stage in pipeline.stages:
            first, last = stage.start == 0, stage.stop == pipeline.layers
            collectives = ((6 if stage.recompute else 4) + stage.sliced) * stage.layers + first + last
            speed = {
                device: rates.get(device, 1.0) * wild.get(device, 1.0) * (1 + noise * rng.standard_normal())
                for device in stage.devices
            }
            compute = {
                device: tokens * stage.layers * stage.fraction(i) * BLOCK * speed[device]
                for i, device in enumerate(stage.devices)
            }
            slowest = max(compute.values())
            own = collectives * pipeline.micro_batches * COLLECTIVE if len(stage.devices) > 1 else 0.0
            for i, device in enumerate(stage.devices):
                part = tokens * stage.fraction(i) * speed[device]
                made.append(
                    Measurement(
                        device=device,
                        plan=plan.number,
                        step=step,
                        tokens=tokens,
                        block_seconds=compute[device],
                        again_seconds=AGAIN * compute[device] if stage.recompute else 0.0,
                        block_work=tokens * stage.layers * stage.fraction(i),
                        embed_seconds=part * EMBED if first else 0.0,
                        head_seconds=part * HEAD if last else 0.0,
                        tensor_seconds=own + slowest - compute[device],
                        reduce_seconds=reduce_seconds + 0.1 * i,
                        step_seconds=step_seconds,
                        micro_batches=pipeline.micro_batches,
                    )
                )
    return made
