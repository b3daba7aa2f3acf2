"""A planner that answers from a file of plans by the slowest device, if one is slow beyond what noise on a
busy machine makes of tiny blocks ("" if none is), or for lack of devices by "without" and their names: for
tests of what a plan does."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
from elasticd_planner.problem import Answer, Problem
from elasticd_planner.spec.plan import Plan, Prediction

#: Rates up to this count as noise.
NOISE = 1.7


def main() -> None:
    plans = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=dict[str, Plan])
    for line in sys.stdin.buffer:
        answer = answered(msgspec.json.decode(line, type=Problem), plans)
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.flush()


def answered(problem: Problem, plans: Mapping[str, Plan]) -> Answer:
    rate, slow = max(((rate, device) for device, rate in problem.rates.items()), default=(1.0, ""))
    slow = slow if rate > NOISE else ""
    here = {device.name for device in problem.cluster.devices}
    every = {device for plan in plans.values() for device in (*plan.members, *plan.idle)}
    if every - here:
        slow = " ".join(["without", *sorted(every - here)])
    plan = plans.get(slow)
    if plan is None:
        return Answer(plan=None, refusal=f"no plan for {slow!r}")
    prediction = plan.prediction or Prediction(step_seconds=0.1, bound_seconds=0.1)
    return Answer(plan=plan.replace(prediction=prediction, reason=slow), current_seconds=10.0)


if __name__ == "__main__":
    main()
