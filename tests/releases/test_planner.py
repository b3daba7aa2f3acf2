"""A coordinator and its planner are of two releases where another was installed while the coordinator runs."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys

import msgspec
import pytest
from elasticd_planner.cost.model_profile import derive
from elasticd_planner.problem import Answer, Problem
from elasticd_planner.search.planner import plan
from elasticd_planner.spec.cluster import Cluster, Node

from elasticd.codec import decoding
from elasticd.coordinator.planner_process import COMMAND, PlannerFailed, ask, ended, start
from elasticd.records import MeshHistoryRecord, MeshJobSpec, PlanRecord, encode
from tests.machines.cast import model, node_record
from tests.planner.models import at_rest
from tests.releases import kept
from tests.releases.samples import MESH_PLAN, MODULES, sample

NODES = tuple(Node(name=name, devices=node_record(name).devices) for name in ("alpha", "beta"))
#: Without bytes of passes, of which the earliest release knows nothing.
PROBLEM = Problem(
    cluster=Cluster(nodes=NODES), profile=at_rest(derive(model(), 64.0, 1)), global_batch=8, micro_batch=1
)
#: Reads one of the values that a release's coordinator and planner exchange, and writes it.
AGAIN = (
    "import msgspec, sys; from elasticd_planner import problem; "
    "kind = getattr(problem, sys.argv[1]); value = msgspec.json.decode(sys.stdin.buffer.read(), type=kind); "
    "sys.stdout.buffer.write(msgspec.json.encode(value))"
)


def run(command: tuple[str, ...], text: bytes) -> bytes:
    return subprocess.run(command, input=text, capture_output=True, timeout=120, check=True).stdout


def python(release: str) -> tuple[str, ...]:
    """Starts Python with a release that was."""
    return ("/usr/bin/env", f"PYTHONPATH={kept.wheel(release)}", sys.executable)


def printing(answer: bytes) -> tuple[str, ...]:
    """A planner with this answer."""
    return (
        sys.executable,
        "-c",
        f"import sys; sys.stdin.readline(); sys.stdout.buffer.write({answer!r} + b'\\n')",
    )


async def asked(command: tuple[str, ...], problem: Problem = PROBLEM) -> Answer:
    child = await start(command)
    try:
        return await ask(problem, child)
    finally:
        await ended(child)


@pytest.mark.parametrize("release", kept.RELEASED)
def test_a_coordinator_of_an_earlier_release_has_its_job_planned_by_this_planner(release: str) -> None:
    its_own = run((*python(release), "-c", AGAIN, "Problem"), msgspec.json.encode(PROBLEM))
    assert b"planner-problem" not in its_own
    answer = run(COMMAND, its_own)
    read = msgspec.json.decode(run((*python(release), "-c", AGAIN, "Answer"), answer), type=Answer)
    assert read.plan is not None
    assert read == plan(PROBLEM)


@pytest.mark.parametrize("release", kept.RELEASED)
def test_this_coordinator_has_its_job_planned_by_a_planner_of_an_earlier_release(release: str) -> None:
    answer = asyncio.run(asked((*python(release), "-m", "elasticd_planner")))
    assert answer.plan is not None
    assert {*answer.plan.members} == {device.name for device in PROBLEM.cluster.devices}


@pytest.mark.parametrize("release", kept.RELEASED)
def test_an_earlier_release_refuses_a_plan_of_modules_by_its_version(release: str) -> None:
    folder = "elasticd_planner" if release == "0.1.0" else "elasticd_planner.spec"
    read = f"import sys; from {folder}.plan import Plan; Plan.from_json(sys.stdin.buffer.read())"
    done = subprocess.run(
        (*python(release), "-c", read), input=MODULES.to_json(), capture_output=True, timeout=120
    )
    assert done.returncode == 1
    assert b"version 4 of the format; this elasticd reads versions 1 to" in done.stderr


@pytest.mark.parametrize("release", kept.RELEASED)
def test_an_earlier_release_refuses_what_is_stored_of_a_job_on_a_mesh_by_its_tag(release: str) -> None:
    """A coordinator that cannot read it does not lead; a leader tells its worker so."""
    record = PlanRecord(plan=MESH_PLAN, epoch=1, step=0)
    for text, kind, tag in (
        (encode(record), "PlanRecord", "mesh-plan"),
        (encode(sample(MeshJobSpec)), "JobSpec", "mesh-job-spec"),
        (encode(sample(MeshHistoryRecord)), "HistoryRecord", "mesh-plan-history"),
    ):
        read = f"import sys; from elasticd.records import {kind}, decode; "
        command = *python(release), "-c", f"{read}decode(sys.stdin.buffer.read(), {kind})"
        done = subprocess.run(command, input=text, capture_output=True, timeout=120, cwd="/")
        assert done.returncode == 1
        assert f"Invalid value '{tag}'".encode() in done.stderr


def test_a_planner_refuses_a_problem_that_is_newer_than_it_and_says_what_to_do() -> None:
    newer = msgspec.structs.replace(PROBLEM, version=Problem.newest + 1)
    with pytest.raises(PlannerFailed, match=r"ended with 2: .* version 3, .* version 2: .* restart"):
        asyncio.run(asked(COMMAND, newer))


def test_a_newer_problem_is_refused_by_its_version_before_the_rest_is_read() -> None:
    done = subprocess.run(COMMAND, input=b'{"version": 3, "cluster": 3}', capture_output=True, timeout=120)
    assert done.returncode == 2
    assert b"it has version 3" in done.stderr


def test_a_field_more_of_a_problem_is_skipped() -> None:
    raw = msgspec.json.decode(msgspec.json.encode(PROBLEM)) | {"sparkle": 1}
    answer = msgspec.json.decode(run(COMMAND, msgspec.json.encode(raw)), type=Answer)
    assert answer == plan(PROBLEM)


def test_a_field_more_of_an_answer_is_skipped_with_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(decoding, "_logged", set())
    monkeypatch.setattr(decoding, "_next_look", {})
    told = plan(PROBLEM)
    raw = msgspec.json.decode(msgspec.json.encode(told)) | {"glitter": 1}
    with caplog.at_level(logging.WARNING):
        assert asyncio.run(asked(printing(msgspec.json.encode(raw)))) == told
    assert "'planner-answer' has a field 'glitter'" in caplog.text


def test_an_answer_that_is_too_new_is_told_with_both_versions() -> None:
    raw = msgspec.json.decode(msgspec.json.encode(plan(PROBLEM))) | {"version": 9}
    with pytest.raises(PlannerFailed, match=r"'planner-answer' has version 9, and .* version 1"):
        asyncio.run(asked(printing(msgspec.json.encode(raw))))
