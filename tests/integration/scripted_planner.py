"""A planner that answers from a file of plans by the set of slow devices: for tests of what a plan does."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
from elasticd_planner.plan import Plan, Prediction
from elasticd_planner.problem import Answer, Problem


def main() -> None:
    problem = msgspec.json.decode(sys.stdin.buffer.read(), type=Problem)
    plans = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=dict[str, Plan])
    slow = ",".join(sorted(device for device, rate in problem.rates.items() if rate > 1))
    plan = plans.get(slow)
    if plan is None:
        answer = Answer(plan=None, refusal=f"no plan for {slow!r}")
    else:
        prediction = Prediction(step_seconds=0.1, bound_seconds=0.1)
        answer = Answer(plan=plan.replace(prediction=prediction, reason=slow), current_seconds=10.0)
    sys.stdout.buffer.write(msgspec.json.encode(answer))


if __name__ == "__main__":
    main()
