"""The real planner, asked at a virtual time: answers are kept, and how long it takes is modelled."""

from __future__ import annotations

import hashlib

import msgspec
from elasticd_planner.problem import JobAnswer, JobProblem
from elasticd_planner.search.planner import answer

from elasticd.simulator.scenarios.scenario import Times


class Planner:
    """Answers by problem, for all runs of one simulation."""

    def __init__(self, times: Times) -> None:
        self._times = times
        self._answers: dict[str, JobAnswer] = {}

    def answer(self, problem: JobProblem) -> JobAnswer:
        """The planner's answer, computed once for equal problems. No virtual time passes: `seconds` says how
        long the answer is taken to need."""
        key = hashlib.sha256(msgspec.json.encode(problem)).hexdigest()
        if key not in self._answers:
            self._answers[key] = self.plan(problem)
        return self._answers[key]

    def plan(self, problem: JobProblem) -> JobAnswer:
        """One call of the planner."""
        return answer(problem)

    def seconds(self, problem: JobProblem) -> float:
        """The seconds that planning is taken to last: wall time would make every run another."""
        return self._times.planning + self._times.planning_per_device * len(problem.cluster.devices)
