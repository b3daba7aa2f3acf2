"""A record of a run as the demo makes it, by hand: real plans of the real planner, steps that take as long
as these predict, events where the story has them."""

from __future__ import annotations

import msgspec
from elasticd_planner.cost.model_profile import ModelProfile, SectionProfile
from elasticd_planner.problem import Problem
from elasticd_planner.search.planner import plan
from elasticd_planner.spec.batch import Sampler
from elasticd_planner.spec.cluster import Cluster, Device, Node
from elasticd_planner.spec.plan import Plan

from elasticd.demo.record import DemoLine, DemoRecord
from elasticd.demo.scenario import DemoScenario
from elasticd.records import HistoryRecord
from elasticd.wire.event_record import EventRecord, Pacing
from elasticd.wire.step_record import StepRecord

SCENARIO = DemoScenario()
PIDS = {"alpha/0": 10, "alpha/1": 11, "beta/0": 12, "beta/1": 13}
TOKENS = SCENARIO.global_batch * SCENARIO.tokens
PROFILE = ModelProfile(
    name="hand-made",
    layers=5,
    share_units=8,
    tokens=256,
    block=SectionProfile(
        seconds=SCENARIO.forward + SCENARIO.backward, cut_bytes=170_000, cut_activation=5_000, collectives=4
    ),
    groups=4,
    collective_seconds={2: 0.002},
    fitted=True,
)
CLUSTER = Cluster(
    nodes=tuple(
        Node(name=node, devices=tuple(Device(name=f"{node}/{i}", memory=SCENARIO.memory) for i in range(2)))
        for node in SCENARIO.nodes
    )
)


def history() -> tuple[HistoryRecord, ...]:
    """Plan 1 for healthy devices, plan 2 for a slow one, plan 3 as plan 1."""
    made: list[HistoryRecord] = []
    for number, rate in enumerate((1.0, SCENARIO.factor, 1.0), start=1):
        problem = Problem(
            cluster=CLUSTER,
            profile=PROFILE,
            global_batch=SCENARIO.global_batch,
            micro_batch=1,
            rates={SCENARIO.slow_device: rate},
            current=made[-1].plan if made else None,
        )
        answer = plan(problem, number)
        assert answer.plan is not None
        made.append(HistoryRecord(number=number, plan=answer.plan, problem=problem, reason=""))
    return tuple(made)


def seconds_of(made: Plan) -> float:
    assert made.prediction is not None
    return made.prediction.step_seconds


class _Run:
    """Time goes on as steps are made."""

    def __init__(self) -> None:
        self.now, self.steps, self.events = 1000.0, list[StepRecord](), list[EventRecord]()

    def train(self, count: int, number: int, seconds: float) -> None:
        for _ in range(count):
            self.now += seconds
            step = StepRecord(
                step=len(self.steps), plan=number, loss=2.0, tokens=TOKENS, seconds=seconds, time=self.now
            )
            self.steps.append(step)

    def tell(self, kind: str, **data: object) -> None:
        self.events.append(
            EventRecord(id=len(self.events) + 1, time=self.now, kind=kind, job="demo", text=kind, data=data)
        )

    def switch(self, number: int, moved: int) -> None:
        for device, pid in PIDS.items():
            wire = moved if pid == 10 else 0
            self.tell(
                "swapped",
                number=number,
                step=len(self.steps),
                pause_seconds=0.1 + pid / 1000,
                bytes_sent=wire,
                bytes_lacking=wire,
                bytes_state=1 << 20,
                device=device,
            )
        self.tell("recorded", number=number, step=len(self.steps))


def record(*, after: float = 1.0) -> DemoRecord:
    """A run in which all goes well; `after` stretches the steps after the replan."""
    made = history()
    run = _Run()
    run.train(20, 1, seconds_of(made[0].plan))
    run.tell("chaos", device=SCENARIO.slow_device, factor=3.0)
    run.train(4, 1, 3 * seconds_of(made[0].plan))
    run.tell("slow", device=SCENARIO.slow_device)
    run.train(1, 1, 3 * seconds_of(made[0].plan))
    run.switch(2, 300)
    run.train(20, 2, after * seconds_of(made[1].plan))
    run.tell("chaos", device=SCENARIO.slow_device, factor=1.0)
    run.train(3, 2, after * seconds_of(made[1].plan))
    run.tell("recovered", device=SCENARIO.slow_device)
    run.switch(3, 400)
    run.train(SCENARIO.steps - len(run.steps), 3, seconds_of(made[2].plan))
    sampler = Sampler(size=10_000, global_batch=SCENARIO.global_batch, seed=0)
    ledger = tuple(DemoLine(step=s, loss=2.5, samples=sampler.samples(s)) for s in range(SCENARIO.steps))
    return DemoRecord(
        scenario=SCENARIO,
        events=tuple(run.events),
        steps=tuple(run.steps),
        history=made,
        pacing=Pacing(paced=10_000, overruns=3),
        before=PIDS,
        after=PIDS,
        ledger=ledger,
        plain=ledger,
    )


def changed(made: DemoRecord, **values: object) -> DemoRecord:
    return msgspec.structs.replace(made, **values)
