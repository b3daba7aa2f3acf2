"""More freedom makes no plan worse: what a pin, fewer settings or fewer devices leave is among the plans."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import msgspec
import pytest
from elasticd_planner.cost.model_profile import SectionProfile
from elasticd_planner.problem import Problem, without
from elasticd_planner.search.planner import plan
from elasticd_planner.spec.cluster import Cluster, Device, Link, Node

from tests import sizes
from tests.planner.freedom import FEW, MANY, drawn, restricted
from tests.planner.models import profile
from tests.planner.real_models import ZERO, job


def seconds(problem: Problem) -> float:
    """Seconds of a step under the problem's plan; inf where it has none."""
    made = plan(problem).plan
    if made is None:
        return math.inf
    assert made.prediction is not None
    return made.prediction.step_seconds


def slower(problem: Problem, others: Sequence[tuple[str, Problem]]) -> dict[str, float]:
    """Restrictions under which the plan is quicker than the problem's own, and by how much."""
    free = seconds(problem)
    least = {words: seconds(other) for words, other in others}
    return {words: free / other for words, other in least.items() if free > other * (1 + 1e-9)}


@pytest.mark.parametrize("seed", sizes.beside([1, 13], range(60)))
def test_no_restriction_of_a_drawn_job_makes_its_plan_quicker(seed: int) -> None:
    rng = random.Random(seed)
    problem = drawn(rng, FEW, slow=seed >= 40)
    assert not slower(problem, [(one.words, one.problem) for one in restricted(rng, problem, 4)])


@pytest.mark.full
@pytest.mark.parametrize("seed", range(30))
def test_no_restriction_of_a_drawn_large_job_makes_its_plan_quicker(seed: int) -> None:
    rng = random.Random(seed)
    problem = drawn(rng, MANY, slow=False)
    assert not slower(problem, [(one.words, one.problem) for one in restricted(rng, problem, 8)])


@pytest.mark.parametrize(
    ("problem", "pins"),
    [
        (job("Mistral-Nemo-12B", (8, 8)), {"tp": (2,), "dp": (4,)}),
        (
            job("OLMo-2-7B", (8,) * 8, batch=16, tokens=1024, recompute=False, links={"between": 1.0}),
            {"tp": (2,), "dp": (1,)},
        ),
        (job("Qwen2.5-0.5B", (8, 4), batch=64, links={"between": 5.0}), {"tp": (None,), "dp": (1, 2)}),
    ],
    ids=["more-pipelines-need-zero", "slow-network", "head-of-many-layers"],
)
def test_nothing_pinned_is_no_slower_than_a_pinned_size_and_number(
    problem: Problem, pins: dict[str, Sequence[int | None]]
) -> None:
    space = problem.search_space
    others = [
        (
            f"tp {tp}, dp {dp}",
            msgspec.structs.replace(
                problem, search_space=msgspec.structs.replace(space, fixed_tp=tp, fixed_dp=dp)
            ),
        )
        for tp in pins["tp"]
        for dp in pins["dp"]
    ]
    assert not slower(problem, others)


def slow_network(*nodes: int, memory: int, layers: int, micro_batches: int) -> Problem:
    """A small block, and boundaries between nodes that take as long as many layers."""
    model = profile(
        layers=layers,
        share_units=8,
        tokens=512.0,
        block=SectionProfile(seconds=1e-6, cut_bytes=40_000_000, collectives=4),
        boundary_bytes=1024.0,
    )
    cluster = Cluster(
        nodes=tuple(
            Node(name=f"n{n}", devices=tuple(Device(name=f"n{n}/{i}", memory=memory) for i in range(count)))
            for n, count in enumerate(nodes)
        ),
        inside=Link(bandwidth=200e9, latency=5e-6),
        between=Link(bandwidth=1e9, latency=2e-5),
    )
    return Problem(cluster=cluster, profile=model, global_batch=micro_batches, micro_batch=1)


@pytest.mark.parametrize(
    ("nodes", "fewer", "memory", "layers", "micro_batches"),
    [((4, 4, 2), ((4,), (4, 4), (4, 2)), 1 << 30, 6, 16), ((5, 5), ((5,),), 16 << 30, 24, 32)],
)
def test_more_nodes_behind_a_slow_link_leave_the_plan_of_fewer(
    nodes: tuple[int, ...], fewer: Sequence[tuple[int, ...]], memory: int, layers: int, micro_batches: int
) -> None:
    size = {"memory": memory, "layers": layers, "micro_batches": micro_batches}
    others = [(str(some), slow_network(*some, **size)) for some in fewer]
    assert not slower(slow_network(*nodes, **size), others)


@pytest.mark.parametrize(
    ("tp", "words"),
    [
        (8, "tp is pinned to 8, and TP groups of this model can have 1 to 4 members"),
        (4, "tp is pinned to 4, and no node has more than 2 devices that can be used"),
    ],
)
def test_a_pinned_size_that_no_group_can_have_is_refused_by_name(tp: int, words: str) -> None:
    problem = job("Gemma-3-1b", (2, 2), fixed_tp=tp)
    answer = plan(problem)
    assert answer.plan is None
    assert words in answer.refusal
    assert answer.refusal.endswith("unpin tp" if tp == 8 else "pin a smaller tp")


def test_a_slow_device_does_not_hide_the_plan_whose_wide_last_group_has_the_head() -> None:
    # Without the slowest device: seven stages of one device each, and a last one of three with a layer and the
    # head, which takes as long as nine layers.
    problem = drawn(random.Random(44), FEW, slow=True)
    space = msgspec.structs.replace(problem.search_space, micro_batches=(), states=ZERO[:1], fixed_dp=1)
    problem = msgspec.structs.replace(problem, search_space=space)
    assert problem.rates["n1/0"] == 5.42
    assert not slower(problem, [("without n1/0", without(problem, "n1/0"))])


def test_groups_of_mixed_sizes_are_found_in_a_setting_that_is_nearly_the_best_without_them() -> None:
    problem = drawn(random.Random("771204 few-healthy 15"), FEW, slow=False)
    space = msgspec.structs.replace(problem.search_space, micro_batches=(1,), states=ZERO[:2], recompute=False)
    problem = msgspec.structs.replace(problem, search_space=space)
    assert seconds(problem) < 6.136  # two pipelines of groups of one and of two; regular ones take 6.141


def test_more_settings_and_no_pins_are_no_slower_on_a_slow_device() -> None:
    problem = job("Qwen2.5-0.5B", (4, 4, 2), batch=32, tokens=1024, rates={"n0/1": 2.57}, states=ZERO)
    space = problem.search_space
    fewer = [
        msgspec.structs.replace(space, states=ZERO[:1]),
        msgspec.structs.replace(space, recompute=False),
        msgspec.structs.replace(space, fixed_dp=2),
    ]
    assert not slower(
        problem,
        [(str(some), msgspec.structs.replace(problem, search_space=some)) for some in fewer],
    )
