"""Plans in a child process: real answers, failures with a reason, and none that is stale."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable

import psutil
import pytest
from elasticd_planner.cluster import Cluster, Node
from elasticd_planner.problem import Problem
from elasticd_planner.profiles import derive

from elasticd.coordinator.planning import PlannerFailed, Planning, ask
from elasticd.machines.job.effects import Planned
from tests.machines.cast import model, node_record

SLEEP = (sys.executable, "-c", "import time; time.sleep(60)")


def problem() -> Problem:
    nodes = tuple(Node(name=name, devices=node_record(name).devices) for name in ("alpha", "beta"))
    profile = derive(model(), 64.0, 1)
    return Problem(cluster=Cluster(nodes=nodes), profile=profile, global_batch=8, micro_batch=1)


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "time.sleep(60)" in " ".join(child.cmdline())]


async def until(reached: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, "it never came"
        await asyncio.sleep(0.01)


def test_child_answers_with_a_plan() -> None:
    answer = asyncio.run(ask(problem()))
    assert answer.plan is not None
    assert answer.plan.global_batch == 8


def test_child_that_fails_is_told_with_its_last_words() -> None:
    command = (sys.executable, "-c", "import sys; sys.stderr.write('first\\nno memory left\\n'); sys.exit(3)")
    with pytest.raises(PlannerFailed, match="ended with 3: no memory left"):
        asyncio.run(ask(problem(), command))


def test_answer_that_cannot_be_read_is_told() -> None:
    with pytest.raises(PlannerFailed, match="cannot be read"):
        asyncio.run(ask(problem(), (sys.executable, "-c", "print('{}x')")))


def test_planner_that_is_not_there_is_told() -> None:
    with pytest.raises(PlannerFailed, match="did not start"):
        asyncio.run(ask(problem(), ("/no/such/planner",)))


def test_newer_request_ends_the_older_child_and_only_it_is_answered() -> None:
    async def body() -> list[Planned]:
        answers: list[Planned] = []
        planning = Planning(answers.append, command=SLEEP, patience=1.0)
        planning.request("demo", 1, problem())
        await until(lambda: len(children()) == 1)
        first = children()[0]
        planning.request("demo", 2, problem())
        await until(lambda: not first.is_running() or first.status() == psutil.STATUS_ZOMBIE)
        await until(lambda: bool(answers))
        await planning.close()
        return answers

    (answer,) = asyncio.run(body())
    assert answer.token == 2
    assert "did not answer within 1 s" in answer.error
    assert not children()


def test_cancel_and_close_leave_no_child_behind() -> None:
    async def body() -> list[Planned]:
        answers: list[Planned] = []
        planning = Planning(answers.append, command=SLEEP)
        planning.request("one", 1, problem())
        planning.request("two", 1, problem())
        await until(lambda: len(children()) == 2)
        planning.cancel("one")
        await until(lambda: len(children()) == 1)
        await planning.close()
        return answers

    assert asyncio.run(body()) == []
    assert not children()
