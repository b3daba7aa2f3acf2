"""Plans in a child process: real answers, failures with a reason, and none that is stale."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import Process

import psutil
import pytest
from elasticd_planner.cost.model_profile import derive
from elasticd_planner.problem import Answer, Problem
from elasticd_planner.spec.cluster import Cluster, Node

from elasticd.coordinator import planner_process as module
from elasticd.coordinator.planner_process import COMMAND, PlannerFailed, Planning, ask, ended, start
from elasticd.machines.job.state.events import Planned
from tests.coordinator.agents import until
from tests.liveness import living
from tests.machines.cast import model, node_record

SLEEP = (sys.executable, "-c", "import time; time.sleep(60)")


def problem() -> Problem:
    nodes = tuple(Node(name=name, devices=node_record(name).devices) for name in ("alpha", "beta"))
    profile = derive(model(), 64.0, 1)
    return Problem(cluster=Cluster(nodes=nodes), profile=profile, global_batch=8, micro_batch=1)


def children(what: str = "time.sleep(60)") -> list[psutil.Process]:
    """Of this process, those that live and have this in their command line."""
    return living(psutil.Process().children(), what)


async def asked(command: tuple[str, ...] = COMMAND) -> Answer:
    child = await start(command)
    try:
        return await ask(problem(), child)
    finally:
        await ended(child)


def test_child_answers_with_a_plan() -> None:
    answer = asyncio.run(asked())
    assert answer.plan is not None
    assert answer.plan.global_batch == 8


def test_child_goes_on_after_an_answer_and_is_ended_after_a_failure() -> None:
    async def body() -> None:
        child = await start()
        first = await ask(problem(), child)
        assert child.returncode is None
        assert await ask(problem(), child) == first
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await ask(problem(), child)
        assert child.returncode is not None

    asyncio.run(body())


def test_child_that_fails_is_told_with_its_last_words() -> None:
    command = (sys.executable, "-c", "import sys; sys.stderr.write('first\\nno memory left\\n'); sys.exit(3)")
    with pytest.raises(PlannerFailed, match="ended with 3: no memory left"):
        asyncio.run(asked(command))


def test_answer_that_cannot_be_read_is_told() -> None:
    with pytest.raises(PlannerFailed, match="cannot be read"):
        asyncio.run(asked((sys.executable, "-c", "print('{}x')")))


@pytest.mark.parametrize("line", [b'{"refusal": "\xff"}', b'{"newer": ' + b"[" * 3000 + b"]" * 3000 + b"}"])
def test_whatever_a_planner_answers_the_job_that_asked_is_told(line: bytes) -> None:
    """Text that is no UTF-8, and values nested too deep."""

    async def body() -> list[Planned]:
        answers: list[Planned] = []
        print_it = f"import sys; sys.stdin.readline(); sys.stdout.buffer.write({line!r} + b'\\n')"
        planning = Planning(answers.append, command=(sys.executable, "-c", print_it))
        planning.request("demo", 1, problem())
        await until(lambda: bool(answers))
        await planning.close()
        return answers

    (answer,) = asyncio.run(body())
    assert answer.answer is None
    assert "cannot be read" in answer.error


def test_a_defect_while_a_job_is_planned_is_told_to_the_job(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(asked: Problem, child: Process) -> Answer:
        await ended(child)
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr(module, "ask", fails)

    async def body() -> list[Planned]:
        answers: list[Planned] = []
        planning = Planning(answers.append, command=SLEEP)
        planning.request("demo", 1, problem())
        await until(lambda: bool(answers))
        await planning.close()
        return answers

    (answer,) = asyncio.run(body())
    assert answer.error == "ZeroDivisionError: of ours"
    assert "failed on planning job demo" in caplog.text


def test_planner_that_is_not_there_is_told() -> None:
    with pytest.raises(PlannerFailed, match="did not start"):
        asyncio.run(asked(("/no/such/planner",)))


def test_newer_request_ends_the_older_child_and_only_it_is_answered() -> None:
    async def body() -> list[Planned]:
        answers: list[Planned] = []
        planning = Planning(answers.append, command=SLEEP, patience=5.0)
        planning.request("demo", 1, problem())
        await until(lambda: len(children()) == 1)
        first = children()[0]
        planning.request("demo", 2, problem())
        await until(lambda: not living([first]))
        await until(lambda: bool(answers))
        await planning.close()
        return answers

    (answer,) = asyncio.run(body())
    assert answer.token == 2
    assert "did not answer within 5 s" in answer.error
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


def test_a_child_that_was_started_ahead_answers_one_request_after_another() -> None:
    """And where it died meanwhile, another does."""

    async def body() -> list[Planned]:
        answers: list[Planned] = []
        planning = Planning(answers.append)
        planning.warm()
        await until(lambda: len(started()) == 1)
        (ahead,) = started()
        for token in (1, 2):
            planning.request("demo", token, problem())
            await until(lambda: len(answers) == token)  # noqa: B023
            assert started() == [ahead]
        ahead.kill()
        await until(lambda: not started())
        planning.request("demo", 3, problem())
        await until(lambda: len(answers) == 3)
        assert len(started()) == 1
        await planning.close()
        return answers

    first, *others = asyncio.run(body())
    assert first.answer is not None
    assert first.answer.plan is not None
    assert [other.answer for other in others] == [first.answer] * 2
    assert not started()


def test_of_two_children_that_answered_one_waits_for_the_next_request() -> None:
    async def body() -> list[Planned]:
        answers: list[Planned] = []
        planning = Planning(answers.append)
        planning.request("one", 1, problem())
        planning.request("two", 1, problem())
        await until(lambda: len(started()) == 2)
        await until(lambda: len(answers) == 2)
        await until(lambda: len(started()) == 1)
        await planning.close()
        return answers

    assert all(answer.answer is not None for answer in asyncio.run(body()))
    assert not started()


def test_a_child_that_a_search_made_large_gives_way_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        answers: list[Planned] = []
        planning = Planning(answers.append)
        planning.warm()
        await until(lambda: len(started()) == 1)
        (large,) = started()
        planning.request("demo", 1, problem())
        await until(lambda: bool(answers))
        await until(lambda: len(started()) == 1 and large not in started())
        await planning.close()

    monkeypatch.setattr(module, "LARGE_BYTES", 1 << 20)
    asyncio.run(body())
    assert not started()


def test_after_a_request_that_is_called_off_another_child_is_started_ahead() -> None:
    async def body() -> None:
        planning = Planning(lambda _: None, command=SLEEP)
        planning.request("demo", 1, problem())
        await until(lambda: len(children()) == 1)
        (first,) = children()
        planning.cancel("demo")
        await until(lambda: bool(children()) and first not in children())
        await planning.close()

    asyncio.run(body())
    assert not children()


def test_child_ahead_that_cannot_be_started_fails_the_request_alone() -> None:
    async def body() -> list[Planned]:
        answers: list[Planned] = []
        planning = Planning(answers.append, command=("/no/such/planner",))
        planning.warm()
        planning.request("demo", 1, problem())
        await until(lambda: bool(answers))
        await planning.close()
        return answers

    (answer,) = asyncio.run(body())
    assert "did not start" in answer.error


def started() -> list[psutil.Process]:
    """Planners of this process that live."""
    return children("elasticd_planner")
