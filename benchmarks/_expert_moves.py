"""What new placements of experts move: by the runtime's own migration, and in a job whose leader makes them.

The first is of a block of 64 experts on eight devices, as threads of this process, which is placed anew every
20 steps for a load that drifts. The second is examples/train_moe.py on three devices in processes, one of which
becomes slow: where the planner gives it fewer experts, the seconds of the switch are counted in steps.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import _expert_loads as expert_loads
import msgspec
import numpy as np
import torch
from _results import Row, row
from elasticd_migration.migrate import Moved, migrate
from elasticd_migration.transport import MemoryTransport
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.placement.expert_forecast import ExpertForecast
from elasticd_planner.placement.expert_placement import arrivals, placed
from elasticd_planner.spec.plan import HeldExperts, Plan
from torch import nn

import elasticd
from elasticd import Experts, UnitsOf
from elasticd.machines.job.state.job_state import JobSettings
from elasticd.runtime.engine.engine import first_state
from elasticd.runtime.model.model import Model

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.integration.cluster import Cluster
from tests.integration.test_moe_example import SCRIPT, SMALL, places, plan_in, wait
from tests.migration.ranks import together
from tests.models.layouts import BATCH, plan_of, stage
from tests.models.mixture import StackedExperts

EXPERTS, DEVICES, WIDTH, DRIFT = 64, 8, 4, 0.01


class Layer(nn.Module):
    """Experts alone."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = StackedExperts(EXPERTS, WIDTH, WIDTH)


def model() -> Model:
    """A block of them."""
    return elasticd.Model(
        embed=nn.Embedding(3, WIDTH),
        blocks=[Layer()],
        head=nn.Linear(WIDTH, 3),
        rules={"blocks.*.experts.*": Experts("experts")},
        units={"experts": UnitsOf(attribute="blocks.*.experts.count")},
    )


def plan_with(held: HeldExperts, number: int) -> Plan:
    """A TP group with these experts on its devices."""
    group = stage(0, 1, *((f"n0/{device}", 1) for device in range(DEVICES)))
    return plan_of((1, [msgspec.structs.replace(group, experts=(held,))])).replace(number=number)


def placements(steps: int) -> Iterator[HeldExperts]:
    """Placements of a drifting load, one device being twice slower, every 20 steps."""
    rng = np.random.default_rng(EXPERTS)
    slowdown = [1.0, 2.0, *[1.0] * (DEVICES - 2)]
    forecast = ExpertForecast()
    held: HeldExperts = ()
    for step, load in enumerate(expert_loads.drifting(EXPERTS, steps, rng, DRIFT, stays=True)):
        if step % expert_loads.REPORTED == 0:
            forecast = forecast.after({0: tuple(load.tolist())})
        if step % expert_loads.EVERY == 0 and step:
            held = placed(forecast.rows[0], slowdown, held).held
            yield held


def migration_rows(steps: int) -> Iterator[Row]:
    """Bytes that the runtime moves over the least, and experts that a placement moves."""
    of = model()
    expert_bytes = sum(p[0].numel() * p.element_size() for p in Layer().experts.parameters())
    before = expert_loads.contiguous(EXPERTS, DEVICES)
    received, least, moves = 0, 0, []
    for number, held in enumerate(placements(steps), 1):
        old, new = (
            Layouts(of.spec, plan_with(each, at)) for each, at in ((before, number - 1), (held, number))
        )
        states = {device: first_state(of, old, device, 1) for device in old.plan.members}
        ends = MemoryTransport.connect(old.plan.members)
        results = together(ends, lambda end: migrate(old, new, states[end.members[end.rank]], end))  # noqa: B023
        assert all(isinstance(result, Moved) for result in results), results
        received += sum(result.bytes_received for result in results)
        moves.append(arrivals(before, held))
        least += moves[-1] * expert_bytes
        before = held
    title = "new placements, 64 experts on 8 devices, drift 0.01, one 2 x slow: bytes that move over the least"
    yield row(title, received / least, "", goal="1.00", met=received == least)
    title = "new placements, 64 experts on 8 devices, drift 0.01, one 2 x slow: experts moved a placement"
    moved = statistics.mean(moves[1:])  # the first is from contiguous experts
    yield row(title, moved, "experts", goal="<= 4", met=moved <= 4)


def job_rows(steps: int) -> Iterator[Row]:
    """The pause of a leader's new placement in a job, in steps."""
    arguments = [*SMALL, f"--micro-batch={BATCH}"]
    with Cluster({"a": 3}, settings=JobSettings(retry_seconds=0.5), forward=1e-3, flops=1e6) as cluster:
        cluster.run(SCRIPT, example="train_moe", arguments=arguments)
        wait(cluster, lambda: places(plan_in(cluster)))
        first = plan_in(cluster).number
        cluster.pace("a/1", 3.0)
        wait(cluster, lambda: plan_in(cluster).number > first)
        number = plan_in(cluster).number
        cluster.runs(number, steps=steps)
        seconds = cluster.job()["step_seconds"]
        swapped = [event["data"] for event in cluster.events("swapped") if event["data"]["number"] == number]
        cluster.finish()
        cluster.wait(120)
    pause = max(data["pause_seconds"] for data in swapped)
    title = "a leader's new placement in a job of 3 processes: pause of the step loop over a step"
    yield row(title, pause / seconds, "steps", goal="<= 1", met=pause <= seconds)


def rows(smallest: bool = False) -> Iterator[Row]:
    """What new placements move, and the steps that they stall."""
    torch.set_num_threads(1)
    yield from migration_rows(100 if smallest else 400)
    yield from job_rows(2 if smallest else 10)
