"""The planner of several modules: over the best of an enumeration, its proved gap, its processor seconds."""

from __future__ import annotations

import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from _results import Row, row
from elasticd_planner.cost.memory import fits
from elasticd_planner.cost.schedule import passes
from elasticd_planner.layout.module_order import module_order
from elasticd_planner.problem import Answer, Problem, SearchSpace
from elasticd_planner.search.module_cost import ModuleCosts
from elasticd_planner.search.modules import Candidate, ModulePlanner, left_devices, with_pair
from elasticd_planner.search.options import Form
from elasticd_planner.search.planner import plan
from elasticd_planner.spec.cluster import Cluster, Device, Link, Node

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.planner.drawn_module_problems import GIB, LOSS, MIB, drawn_problem, encoder, language

#: Drawn problems of 8 devices, and what is tried of each: TP sizes, pipelines, devices left to items, pairs.
PROBLEMS = 100
SIZES, LEFT, AHEADS, LEADS = (None, 1, 2, 4), (0, 1, 2, 3, 4), (1, 2, 4, 8, 16, 32), (0, 1, 3)
#: Devices, and the most processor seconds that planning two modules for them may take.
LARGE = ((64, 2.0), (1024, 10.0))


def plan_rows(problems: int = PROBLEMS) -> Iterator[Row]:
    """Plans of drawn problems over the best of all that are tried, and over their proved bound."""
    with multiprocessing.get_context("spawn").Pool() as pool:
        tried = pool.map(over, range(problems), chunksize=1)
    gaps = sorted(gap for gap, _ in tried)
    proved = statistics.median(bound for _, bound in tried)
    here = f"{problems} drawn problems of 8 devices"
    for title, gap, most in (
        ("median", statistics.median(gaps), 0.01),
        ("p90", gaps[int(0.9 * (len(gaps) - 1))], 0.03),
    ):
        text = f"{here}: plan over the best of an enumeration, {title}"
        yield row(text, 100 * gap, "%", kind="simulated", goal=f"<= {100 * most:g}", met=gap <= most)
    text = f"{here}: proved gap, median"
    yield row(text, 100 * proved, "%", kind="simulated", goal="<= 12", met=proved <= 0.12)


def over(seed: int) -> tuple[float, float]:
    """The seconds of the plan of a drawn problem over the best of an enumeration, and its proved gap."""
    problem = drawn_problem(seed)
    found = plan(problem).plan
    assert found is not None
    assert found.prediction is not None
    best = min([found.prediction.step_seconds, *enumerated(problem)])
    return found.prediction.step_seconds / best - 1, found.prediction.gap


def enumerated(problem: Problem) -> Iterator[float]:
    """Seconds of the plans of all TP sizes, numbers of pipelines, devices left to items, and pairs."""
    usable = [device.name for device in problem.cluster.devices]
    for tp in SIZES:
        for dp in SIZES:
            space = SearchSpace(fixed_tp=tp, fixed_dp=dp)
            pinned = msgspec.structs.replace(problem, search_space=space)
            planner = ModulePlanner(problem=pinned, search=_alone, number=0, tolerance=0.0)
            for count in LEFT:
                left = left_devices(problem, count)
                loss = planner.loss_plan(left, {}, None)
                for devices in (usable, left) if loss is not None and count else (usable,):
                    for each in planner.placed(loss, devices) if loss is not None else ():
                        yield from _pairs(planner, each)


def _alone(problem: Problem, like: Form | None, brief: bool) -> Answer:
    return plan(problem, like=like, brief=brief)


def _pairs(planner: ModulePlanner, candidate: Candidate) -> Iterator[float]:
    most = candidate.plan.global_batch // candidate.plan.micro_batch
    for ahead in AHEADS:
        for lead in LEADS:
            if lead <= ahead <= most:
                paired = with_pair(candidate.plan, ahead, lead)
                if fits(planner.costs.memory(paired), planner.problem.cluster):
                    yield planner.costs.seconds(planner.costs.timed(paired))


def planning_rows(sizes: int = len(LARGE)) -> Iterator[Row]:
    """An encoder and a language model on many devices, one of them slow."""
    for devices, most in LARGE[:sizes]:
        problem = large(devices)
        start = time.process_time()
        answer = plan(problem)
        seconds = time.process_time() - start
        assert answer.plan is not None
        title = f"processor's seconds of planning two modules for {devices:,} devices"
        yield row(title, seconds, "s", goal=f"<= {most:g}", met=seconds <= most)
        batches = ModuleCosts(problem).batches(answer.plan)
        for whose, device in (("one rank", answer.plan.members[0]), ("all ranks", None)):
            start = time.process_time()
            module_order(answer.plan, batches, passes, device=device)
            title = f"processor's milliseconds of the order of {whose} of {devices:,} devices"
            yield row(title, 1e3 * (time.process_time() - start), "ms")


def large(devices: int) -> Problem:
    """Nodes of eight; four samples a device."""
    nodes = tuple(
        Node(name=f"n{k}", devices=tuple(Device(name=f"n{k}/{i}", memory=80 * GIB) for i in range(8)))
        for k in range(devices // 8)
    )
    link = Link(bandwidth=5e10, latency=1e-5)
    batch = 4 * devices
    return Problem(
        cluster=Cluster(nodes=nodes, inside=link, between=Link(bandwidth=1e10, latency=2e-5)),
        profile=language(48, 2e-3, 400 * MIB),
        global_batch=batch,
        micro_batch=1,
        rates={"n0/3": 2.0},
        module=LOSS,
        modules=(encoder(random.Random(1), "vision", 48 * 2e-3 * batch / 2, batch),),
    )
