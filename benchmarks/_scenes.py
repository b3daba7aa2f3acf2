"""What the migration benchmark moves: a state of 1 GiB in about 2,000 tensors, and between which plans.

A decoder of 74 layers and width 320 under AdamW in float32: value and two moments of 668 parameters, most
of them 400 KiB or 1.1 MiB large, as they are on a rank of a larger job.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from elasticd_planner.spec.plan import ModulePlan, Pipeline, Plan, Stage, Strategy

from elasticd.simulator.scenarios.model_shapes import Shapes, model_spec

#: Names the layers of a smaller state; for the ranks, which inherit it.
LAYERS_VARIABLE = "BENCHMARK_LAYERS"
LAYERS = int(os.environ.get(LAYERS_VARIABLE, "74"))
SPEC = model_spec(
    "gib", Shapes(layers=LAYERS, width=320, heads=10, hidden=864, vocabulary=320, dtype="float32")
)

#: Stages: number of layers, devices, shares.
Line = Sequence[tuple[int, Sequence[str], Sequence[int]]]


def plan(number: int, *pipelines: Line) -> Plan:
    made = []
    for line in pipelines:
        start, stages = 0, []
        for layers, devices, shares in line:
            stages.append(Stage(start=start, stop=start + layers, devices=tuple(devices), shares=tuple(shares)))
            start += layers
        made.append(Pipeline(stages=tuple(stages), micro_batches=1))
    return Plan(
        number=number,
        strategies=(Strategy(modules=(ModulePlan(module="model", pipelines=tuple(made)),)),),
        micro_batch=1,
        global_batch=len(made),
    )


def _whole(device: str) -> Line:
    return [(LAYERS, [device], [1])]


#: By name: the plan before and the plan after.
SCENES = {
    # A device joins as one more replica: all goes from one rank to another, as it lies.
    "join": (plan(1, _whole("n0/0")), plan(2, _whole("n0/0"), _whole("n1/0"))),
    # Four ranks, every box cut anew: two stages with TP 2 become one with TP 4 and unequal shares.
    "recut": (
        plan(1, [(LAYERS // 2, ["n0/0", "n0/1"], [1, 1]), (LAYERS - LAYERS // 2, ["n1/0", "n1/1"], [1, 1])]),
        plan(2, [(LAYERS, ["n0/0", "n0/1", "n1/0", "n1/1"], [3, 3, 2, 2])]),
    ),
}
