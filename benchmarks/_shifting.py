"""A real job on emulated devices whose data shifts: the standard library's files in windows of 256 tokens, then
of 512, of 2,048, and of 256 again (`train_shifting.ShiftingLibrary`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from _results import Row, row
from elasticd_planner.spec.plan import Plan

from elasticd.client import ApiClient
from elasticd.testing.waiting import until
from elasticd.wire.api_types import JobStatus
from tests.integration import train_shifting
from tests.integration.cluster import JOB, Cluster

#: Bytes of a device: two replicas fit with windows of 512 tokens, with 2,048 only half of the model does.
MEMORY = 9_200_000
#: Seconds of a token in a block, forward; backward takes twice as long. Much, so that what a busy machine takes
#: for the real computation is little.
FORWARD = 3e-4
#: Steps from which on windows have 512 tokens, 2,048, and 256 as before: time enough to answer each, and to
#: measure the plan that the second is answered with.
FIRST, SECOND, BACK = 40, 70, 104
#: Steps of a plan whose median is compared with its prediction, after its first.
STEPS = 6
#: Seconds within which anything happens, on a busy machine.
PATIENCE = 600.0


class Run:
    """The job, and what its coordinator tells of it."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.api = ApiClient(cluster.coordinator.url)

    @property
    def job(self) -> JobStatus:
        """The job as its leader sees it."""
        found = self.api.status().job(JOB)
        assert found is not None
        return found

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        plan = self.job.plan
        assert plan is not None
        return plan

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The leader's events of a kind."""
        return self.cluster.events(kind)

    def until(self, condition: Callable[[], object]) -> None:
        """Returns when it is true."""
        until(condition, lambda: [event["text"] for event in self.cluster.events()], seconds=PATIENCE)

    @property
    def recorded(self) -> int:
        """The first step of the plan in force."""
        return int(self.events("recorded")[-1]["data"]["step"])

    def answered(self, shifts: int) -> None:
        """Returns when so many shifts were told of, and the last was decided on."""

        def there() -> bool:
            told = [
                event
                for event in self.cluster.events()
                if event["kind"] in ("shifted", "kept_plan", "recorded")
            ]
            at = [index for index, event in enumerate(told) if event["kind"] == "shifted"]
            return len(at) >= shifts and len(told) > at[shifts - 1] + 1

        self.until(there)

    def seconds(self, number: int) -> float:
        """The median of a plan's steps, of enough of them, but for its first two."""

        def steps() -> list[float]:
            return [step.seconds for step in self.api.steps(JOB).steps if step.plan == number][2:]

        self.until(lambda: len(steps()) >= STEPS)
        return median(steps()[:STEPS])


def shifting(back: bool = True) -> Iterator[Row]:
    """The rows; `back`: those of the shifts that pay, too."""
    with Cluster({"a": 1, "b": 1}, forward=FORWARD, memory=MEMORY) as cluster:
        shifts = [(FIRST, SECOND, 512), (SECOND, BACK, 2048)]
        cluster.run(Path(train_shifting.__file__), steps=1_000_000, shifts=shifts)
        run = Run(cluster)
        run.until(lambda: cluster.events("fitted"))
        first = run.plan
        run.answered(1)
        switched = run.plan.strategies != first.strategies
        yield _row("emulated, 256 to 512 tokens, which pays nothing: switches", int(switched), "", 0)
        if not back:
            return

        before = run.plan.number
        run.answered(2)
        run.until(lambda: run.plan.number > before)
        longer, told = run.plan, run.recorded - SECOND
        yield _row("emulated, 512 to 2,048 tokens: steps until another plan ran", told, "steps", 20)
        assert longer.prediction is not None
        most = max(longer.prediction.memory.values()) / MEMORY
        yield _row("emulated, 2,048 tokens: fullest device, part of its memory", most, "", 1)
        yield _off("emulated, 2,048 tokens: step off the planner's prediction", run, longer)

        run.until(lambda: run.plan.number > longer.number)
        back, told = run.plan, run.recorded - BACK
        yield _row("emulated, back to 256 tokens: steps until the first plan ran again", told, "steps", 20)
        same = int(back.strategies == first.strategies)
        yield row(
            "emulated, back to 256 tokens: the layout is the first",
            same,
            "",
            kind="emulated",
            goal="1",
            met=same == 1,
        )
        yield _off("emulated, back to 256 tokens: step off the planner's prediction", run, back)
        slow = len(run.events("slow"))
        yield _row("emulated, lengths shift: devices called slow", slow, "", 0)
        pacing = run.api.steps(JOB).pacing
        late = pacing.overruns / max(1, pacing.paced)
        yield _row("emulated, lengths shift: sections that took longer than they were to", late, "", 0.01)
        run.api.close()


def _off(name: str, run: Run, plan: Plan) -> Row:
    assert plan.prediction is not None
    taken, predicted = run.seconds(plan.number), plan.prediction.step_seconds
    print(f"plan {plan.number}: {predicted:.3f} s a step predicted, {taken:.3f} s taken: {plan.reason}")
    return _row(name, abs(taken / predicted - 1), "", 0.1)


def _row(name: str, value: float, unit: str, most: float) -> Row:
    return row(name, value, unit, kind="emulated", goal=f"<= {most:g}", met=value <= most)
