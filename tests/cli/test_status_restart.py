"""`elasticd status` of a job in restart mode: the slowest process first, and who is out and why."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from elasticd.cli.jobs import listed
from elasticd.cli.status import screen, status_of
from elasticd.cli.top import drawn
from elasticd.wire.api_types import ClusterStatus, DeviceStatus, LeaderStatus, NodeStatus, Pace, RestartStatus


def test_straggler_comes_first_and_an_excluded_torchrun_with_its_reason() -> None:
    device = DeviceStatus(name="a/0", memory=1 << 30, rate=1.0, pace=1.0)
    node = NodeStatus(node="a", connected=True, address="127.0.0.1", emulated=False, devices=(device,))
    job = RestartStatus(
        job="j",
        round=3,
        step=17,
        step_seconds=0.6,
        silent_seconds=0.1,
        devices={"a/0": Pace(seconds=0.1, ratio=1.0), "b/0": Pace(seconds=0.5, ratio=5.0)},
        out={"host_7_0": "c/0 takes 9 times as long"},
    )
    leader = LeaderStatus(name="l", url="http://h:1", epoch=1)
    out = io.StringIO()
    Console(file=out, width=120).print(
        screen(ClusterStatus(cluster="c", leader=leader, nodes=(node,), jobs=(), restarts=(job,)), {})
    )
    said = out.getvalue()
    assert "restart mode, round 3" in said
    assert "silent" not in said
    assert said.index("b/0") < said.rindex("a/0")
    assert "out: host_7_0: c/0 takes 9 times as long" in said
    assert "no job" not in said


def cluster(*jobs: RestartStatus, nodes: tuple[NodeStatus, ...] = ()) -> ClusterStatus:
    leader = LeaderStatus(name="l", url="http://h:1", epoch=1)
    return ClusterStatus(cluster="c", leader=leader, nodes=nodes, jobs=(), restarts=jobs)


def restart_job(name: str, phase: str, **fields: Any) -> RestartStatus:
    values = {"round": -1, "step": 0, "step_seconds": 0.0, "silent_seconds": 0.0, "devices": {}, "out": {}}
    return RestartStatus(**{"job": name, "phase": phase, "nodes": ("a",), **values, **fields})


DEVICE = DeviceStatus(name="a/0", memory=1 << 30, rate=1.0, pace=1.0)
NODE = NodeStatus(node="a", connected=True, address="127.0.0.1", emulated=False, devices=(DEVICE,))
OVER = (
    restart_job("b", "stopped", sentence="stopped by SIGINT"),
    restart_job("c", "failed", sentence="a worker failed: ValueError: no", failure="Traceback\nValueError: no"),
)


def shown(status: ClusterStatus, **options: bool) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=160).print(screen(status, {}, **options))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_those_that_are_over_have_a_line_each_after_all_that_run() -> None:
    said = shown(cluster(*OVER, restart_job("d", "running", sentence="2 workers on a"), nodes=(NODE,)))
    at = {name: [n for n, line in enumerate(said) if line.split()[:1] == [name]] for name in "bc"}
    assert [len(lines) for lines in at.values()] == [1, 1]
    assert said.index("job d  restart mode  2 workers on a") < at["b"][0] < at["c"][0]
    assert said[at["b"][0]].split("  ") == ["b", "stopped", "step -", "restart mode", "stopped by SIGINT"]
    assert not any("Traceback" in line for line in said)


def test_of_one_job_its_failure_is_shown_in_full_and_no_empty_table() -> None:
    said = shown(status_of(cluster(OVER[1], nodes=(NODE,)), "c"), one=True)
    assert "    ValueError: no" in said
    assert not any(line.startswith("device") for line in said)


def test_jobs_and_top_list_those_that_are_over_last() -> None:
    status = cluster(*OVER, restart_job("d", "running"), nodes=(NODE,))
    for screened in (listed(status), drawn(status, {}, ())):
        out = io.StringIO()
        Console(file=out, width=160).print(screened)
        said = out.getvalue()
        assert said.index("d  ") < said.index("stopped by SIGINT")
        assert said.count("stopped by SIGINT") == 1
