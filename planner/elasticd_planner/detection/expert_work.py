"""The work of devices with experts: one to whose experts more rows go has more of it, and is not slower."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
import numpy as np

from elasticd_planner.numeric import Floats
from elasticd_planner.spec.cluster import Rates, rate_of
from elasticd_planner.spec.expert_load import ExpertLoad, blocks_of, fractions_in, rows_by_device
from elasticd_planner.spec.plan import Plan, Stage
from elasticd_planner.spec.step_measurements import COLUMNS, Step


def expert_work(plan: Plan, load: ExpertLoad, rates: Rates) -> tuple[dict[str, float], float]:
    """The work of a load on the devices of a plan of one module.

    Args:
        plan: in force.
        load: of its experts.
        rates: slowdowns of devices.

    Returns:
        By device its work in blocks over that by its share (1 is left out); and how many times as long as under
        the best placement the busiest device of a lane takes for its experts, of the worst lane, less 1.
    """
    work: dict[str, float] = {}
    worst = 0.0
    for lane, shares, fractions in _groups(plan, load):
        if len(lane.devices) == 1:
            continue
        slow = np.array([rate_of(rates, device) for device in lane.devices])
        busiest = float((fractions * slow).max(1).sum())
        worst = max(worst, busiest * float((1 / slow).sum()) / len(fractions) - 1)
        factors = (1 - load.part) + load.part * (fractions / shares).mean(0)
        for device, factor in zip(lane.devices, factors.tolist(), strict=True):
            if factor != 1:
                work[device] = factor
    return work, worst


def _groups(plan: Plan, load: ExpertLoad) -> Iterator[tuple[Stage, Floats, Floats]]:
    """Of each lane, or of each stage whose lanes compute for each other, the part of its rows that each device
    has by its share, and in each block computes [blocks, devices]."""
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            lanes = stage.by_lane
            shares = [np.array([lane.fraction(place) for place in range(len(lane.devices))]) for lane in lanes]
            if not stage.shared_blocks:
                for lane, own in zip(lanes, shares, strict=True):
                    yield lane, own, np.array(fractions_in(lane, load))
                continue
            parts = np.array(pipeline.micro_batches_by_lane) / pipeline.micro_batches
            within = [np.array(fractions_in(lane, load)) for lane in lanes]
            fractions = np.concatenate([part * own for part, own in zip(parts, within, strict=True)], axis=1)
            for at, block in enumerate(blocks_of(stage)):
                if block in stage.shared_blocks and block in load.rows:
                    fractions[at] = rows_by_device(
                        load.weights(block), stage.experts_of(block), stage.splits_of(block)
                    )
            yield (
                stage,
                np.concatenate([part * own for part, own in zip(parts, shares, strict=True)]),
                fractions,
            )


def with_work(step: Step, work: Mapping[str, float]) -> Step:
    """The step with the work of each device times its factor."""
    if not work:
        return step
    table = step.table.copy()
    table[:, COLUMNS.index("block_work")] *= [work.get(device, 1.0) for device in step.devices]
    return msgspec.structs.replace(step, numbers=table.astype("<f8").tobytes(), columns=COLUMNS)
