"""`elasticd status` of a job in restart mode: the slowest process first, and who is out and why."""

from __future__ import annotations

import io

from rich.console import Console

from elasticd.cli.status import screen
from elasticd.coordinator.api_types import (
    ClusterStatus,
    DeviceStatus,
    LeaderStatus,
    NodeStatus,
    Pace,
    RestartStatus,
)


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
