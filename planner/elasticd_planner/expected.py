"""What a device had to do in a step, by the model's profile: what its seconds are divided by to be a cost."""

from __future__ import annotations

from collections.abc import Callable

from elasticd_planner.measurement import Measurement
from elasticd_planner.plan import Plan
from elasticd_planner.profiles import ModelProfile


def expectation(profile: ModelProfile, plan: Plan) -> Callable[[Measurement], float]:
    """For `rates.observe`: the work of a member of `plan`, in tokens x layers x share, with what the profile
    knows besides: a part in a wide TP group takes longer than that part of the whole, and each pass of a block
    has a fixed time. How cost grows with length is learned in `rates`."""
    block = profile.block
    fixed = block.fixed_seconds / block.seconds
    parts = {
        device: (block.factor(len(stage.devices)), fixed * stage.layers)
        for module in plan.modules
        for pipeline in module.pipelines
        for stage in pipeline.stages
        for device in stage.devices
    }

    def work(measured: Measurement) -> float:
        slowdown, each = parts.get(measured.device, (1.0, 0.0))
        return measured.block_work * slowdown + each * measured.micro_batches

    return work
