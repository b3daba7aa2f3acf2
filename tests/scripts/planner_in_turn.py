"""A planner whose first plan has two stages, the next the one device that is left, and the last both again.

    planner_in_turn.py tp|dp

The last plan has one TP group of both, or two replicas of unequal batches.
"""

from __future__ import annotations

import sys

import msgspec
from elasticd_planner.problem import Answer, Problem
from elasticd_planner.spec.plan import ModulePlan, Pipeline, Plan, Prediction, Stage, Strategy


def main() -> None:
    layout, was_alone = sys.argv[1], False
    for line in sys.stdin.buffer:
        problem = msgspec.json.decode(line, type=Problem)
        devices = [device.name for device in problem.cluster.devices]
        was_alone = was_alone or len(devices) == 1
        plan = plan_for(problem, devices, layout if was_alone else "stages")
        sys.stdout.buffer.write(msgspec.json.encode(Answer(plan=plan, current_seconds=10.0)) + b"\n")
        sys.stdout.flush()


def plan_for(problem: Problem, devices: list[str], layout: str) -> Plan:
    layers, count = problem.profile.layers, problem.global_batch // problem.micro_batch

    def stage(start: int, stop: int, *members: str) -> Stage:
        # the first member holds more of what can be divided unequally
        shares = tuple(2 if place == 0 and len(members) > 1 else 1 for place in range(len(members)))
        return Stage(start=start, stop=stop, devices=members, shares=shares)

    if len(devices) == 1:
        pipelines = [(count, [stage(0, layers, *devices)])]
    elif layout == "stages":
        pipelines = [(count, [stage(0, 1, devices[0]), stage(1, layers, devices[1])])]
    elif layout == "tp":
        pipelines = [(count, [stage(0, layers, *devices)])]
    else:
        pipelines = [(count - 1, [stage(0, layers, devices[0])]), (1, [stage(0, layers, devices[1])])]
    parts = tuple(
        Pipeline(stages=tuple(stages), micro_batches=rows, rows=(rows,)) for rows, stages in pipelines
    )
    return Plan(
        number=0,
        strategies=(Strategy(modules=(ModulePlan(module="model", pipelines=parts),)),),
        micro_batch=problem.micro_batch,
        global_batch=problem.global_batch,
        prediction=Prediction(step_seconds=0.1, bound_seconds=0.1),
        reason=f"{len(devices)} devices",
    )


if __name__ == "__main__":
    main()
