"""The job that a command is about: named, or else the one that runs, which standard error says."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from elasticd.wire.api_types import JobStatus, RestartStatus
from elasticd.wire.event_record import EventRecord
from tests.cli.answers import Answers, serving
from tests.cli.support import call, refused
from tests.cli.test_status import STATUS
from tests.cli.test_top_and_why import record

RESTARTING = RestartStatus(
    job="torch",
    round=1,
    step=1,
    step_seconds=1.0,
    silent_seconds=0.0,
    devices={},
    out={},
    sentence="no steps heard",
)


def job(name: str, phase: str = "running") -> JobStatus:
    return msgspec.structs.replace(STATUS.jobs[0], job=name, phase=phase)


@contextmanager
def cluster(*jobs: JobStatus, restarts: Sequence[RestartStatus] = ()) -> Iterator[tuple[str, str]]:
    """The options that name a coordinator with these jobs, each with an event of its own, and one of no job."""
    names = [known.job for known in jobs]
    events = [
        EventRecord(
            id=number, time=0.0, kind="note", job=name, text=f"event of {name or 'the cluster'}", data={}
        )
        for number, name in enumerate(["", *names], start=1)
    ]
    reasons = {name: msgspec.structs.replace(record(7, {}), reason=f"the reason of {name}") for name in names}
    answers = Answers(
        status=msgspec.structs.replace(STATUS, jobs=jobs, restarts=tuple(restarts)),
        events=events,
        histories={name: (reason,) for name, reason in reasons.items()},
    )
    with serving(answers) as url:
        yield "--coordinator", url


@pytest.mark.parametrize("command", ["why", "history"])
def test_the_one_that_runs_is_meant_and_standard_error_says_so(command: str) -> None:
    with cluster(job("a", "done"), job("r"), job("z", "stopped")) as options:
        done = call(command, *options)
        assert done.stderr == "job r, the one that runs\n"
        assert "the reason of r" in done.stdout
        assert "the reason of a" in call(command, "a", *options).stdout
        programs = call(command, "--json", *options)
        assert (programs.stderr, "the reason of r" in programs.stdout) == ("", True)


def test_the_only_one_is_meant_where_it_is_over() -> None:
    with cluster(job("a", "done")) as options:
        assert call("history", *options).stderr == "job a, the only one\n"


@pytest.mark.parametrize(
    ("jobs", "restarts", "said"),
    [
        ((), (), "there is no job: start one with elasticd run"),
        ((job("a"), job("b"), job("c", "done")), (), "2 jobs run: name one of a, b"),
        ((job("a", "done"), job("b", "done")), (), "2 jobs are over and none runs: name one of a, b"),
    ],
    ids=["none", "several run", "several are over"],
)
def test_what_cannot_be_chosen_is_one_message_with_the_names(
    jobs: Any, restarts: Any, said: str, tmp_path: Path
) -> None:
    out = tmp_path / "run.html"
    with cluster(*jobs, restarts=restarts) as options:
        for command in (["why"], ["history"], ["checkpoint", "now"], ["report", "--out", str(out)]):
            assert said in refused(*command, *options)
    assert not out.exists()


def test_a_name_that_is_none_is_answered_with_those_there_are_running_ones_first() -> None:
    with cluster(job("a", "done"), job("b"), restarts=(RESTARTING,)) as options:
        for command in ("why", "history", "status", "logs"):
            assert "there is no job 'x'; there are: b, torch, a" in refused(command, "x", *options)


def test_a_job_in_restart_mode_has_a_status_and_no_plans() -> None:
    with cluster(job("a", "done"), restarts=(RESTARTING,)) as options:
        assert "job torch is in restart mode, which has no plans" in refused("history", "torch", *options)
        for command in (("why", "torch"), ("why",)):
            assert call(*command, *options).stdout == f"now       {RESTARTING.sentence}\n"
        told = json.loads(call("why", "torch", "--json", *options).stdout)
        assert told == {"job": "torch", "reason": RESTARTING.sentence, "exception": None, "failure": ""}
        shown = call("status", "torch", *options).stdout
        assert "job torch  restart mode, round 1" in shown
        assert "job a" not in shown
        assert json.loads(call("status", "torch", "--json", *options).stdout)["job"] == "torch"


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("7",), "the reason of r"),
        (("r", "7"), "the reason of r"),
        (("a", "7"), "the reason of a"),
        (("7", "7"), "the reason of 7"),
        (("--job", "a"), "the reason of a"),
        (("--job", "a", "7"), "the reason of a"),
        (("a/1",), "device a/1"),
        (("r", "a/1"), "device a/1"),
    ],
    ids=" ".join,
)
def test_why_takes_a_job_a_plan_a_device_or_a_job_and_one_of_them(words: tuple[str, ...], wanted: str) -> None:
    with cluster(job("a", "done"), job("r"), job("7", "done")) as options:
        assert wanted in call("why", *words, *options).stdout


def test_why_a_device_is_about_the_job_that_uses_it_also_where_several_run() -> None:
    elsewhere = msgspec.structs.replace(job("a"), plan=None)
    with cluster(elsewhere, job("r")) as options:
        assert call("why", "a/1", *options).stderr == ""
        assert "plan 7 counted with" in call("why", "a/1", *options).stdout
        assert "too many names: a 7 8" in refused("why", "a", "7", "8", *options)
        for word in ("²", "9" * 5000):  # digits, and no number of a plan
            assert "there is no job" in refused("why", word, *options)
            assert "there is no device" in refused("why", "r", word, *options)


def test_status_has_every_job_or_one() -> None:
    with cluster(job("a", "done"), job("r")) as options:
        both, one = call("status", *options).stdout, call("status", "a", *options).stdout
        assert both.index("job r  running") < both.index("a  done")
        assert "job a  done" in one
        assert "job r" not in one
        assert json.loads(call("status", "a", "--json", *options).stdout)["phase"] == "done"
        assert len(json.loads(call("status", "--json", *options).stdout)["jobs"]) == 2
        assert "leave JOB out" in refused("status", "a", "--json", "-f", *options)


@pytest.mark.parametrize(
    ("jobs", "words", "events", "said"),
    [
        ((job("a", "done"), job("r")), (), {"the cluster", "r"}, "job r, the one that runs, and the cluster"),
        ((job("a", "done"), job("r")), ("--all",), {"the cluster", "a", "r"}, ""),
        ((job("a", "done"), job("r")), ("--json",), {"the cluster", "a", "r"}, ""),
        ((job("a", "done"), job("r")), ("a",), {"a"}, ""),
        (
            (job("a"), job("r")),
            (),
            {"the cluster", "a", "r"},
            "2 jobs run: a, r; 'elasticd logs JOB' shows one",
        ),
        ((job("a", "done"),), (), {"the cluster", "a"}, ""),
    ],
    ids=["one runs", "all", "programs", "named", "several run", "none runs"],
)
def test_logs_are_of_the_job_that_runs_and_of_the_cluster(
    jobs: Any, words: tuple[str, ...], events: set[str], said: str
) -> None:
    with cluster(*jobs) as options:
        done = call("logs", *words, *options)
        assert {name for name in ("the cluster", "a", "r") if f"event of {name}" in done.stdout} == events
        assert said in done.stderr
        assert bool(said) == bool(done.stderr)
        assert "leave JOB out" in refused("logs", "--all", "a", *options)


def test_jobs_that_run_come_first_in_every_list() -> None:
    with cluster(job("a", "done"), job("r"), restarts=(RESTARTING,)) as options:
        names = [line.split()[0] for line in call("jobs", *options).stdout.splitlines()[1:]]
        assert names == ["r", "torch", "a"]
        assert "job a" not in call("plan", *options).stdout
        top = call("top", "--once", *options).stdout
        assert top.index("r  running") < top.index("a  done")
        assert top.count("tokens/s") == 1
