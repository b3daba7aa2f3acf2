"""Jobs of `elasticd.live` on four real processes: deaths, joins, drains; compared with one process of torch."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from elasticd_planner.policy.policy import PolicySettings
from elasticd_planner.spec.batch import Sampler

from elasticd.client import ApiClient
from elasticd.machines.job.state.job_state import JobSettings
from elasticd.testing.waiting import until
from tests.integration import train_live
from tests.integration.cluster import Cluster
from tests.integration.train_live import BATCH, RATE, SEED, reference

SCRIPT = Path(train_live.__file__)
SETTINGS = JobSettings(retry_seconds=0.5)
NODES = {"a": 2, "b": 2}


def entries(cluster: Cluster) -> dict[str, list[list[Any]]]:
    """By process the steps that it made: index, loss, its samples, number of the plan, time."""
    return {
        path.name: [json.loads(line) for line in path.read_text().splitlines()]
        for path in cluster.folder.glob("ledger-*")
    }


def tries(cluster: Cluster) -> list[tuple[int, int, tuple[int, ...]]]:
    """Each step that a device began, the number of its plan, and its samples."""
    lines = [line for path in cluster.folder.glob("tries-*") for line in path.read_text().splitlines()]
    return [(step, plan, tuple(samples)) for step, plan, samples in map(json.loads, lines)]


def differences(
    cluster: Cluster, kind: str, steps: int, first: int = 0, rate: float = RATE
) -> tuple[float, float]:
    """The largest differences from one process: of a loss, and of a weight or a second moment. `first`: the
    step that the job began with."""
    losses, weights, moments = reference(steps, kind, rate)
    of_losses, known = 0.0, set[int]()
    for rows in entries(cluster).values():
        for step, loss, *_ in rows:
            if loss == loss:
                known.add(step)
                of_losses = max(of_losses, abs(loss - losses[step]))
    assert known == set(range(first, steps))
    outs = sorted(cluster.folder.glob("weights-*"))
    assert outs
    of_weights = 0.0
    for path in outs:
        for own, expected in zip(torch.load(path), (weights, moments), strict=True):
            assert own.keys() == expected.keys()
            of_weights = max(of_weights, *(float((own[name] - expected[name]).abs().max()) for name in own))
    return of_losses, of_weights


def check(
    cluster: Cluster,
    kind: str,
    steps: int,
    *,
    first: int = 0,
    loss_apart: float = 1e-13,
    apart: float = 1e-11,
    rate: float = RATE,
) -> None:
    """Losses, weights and second moments are those of one process, and each step has its samples once."""
    of_losses, of_weights = differences(cluster, kind, steps, first, rate)
    assert of_losses <= loss_apart
    assert of_weights <= apart
    shares = [(row[0], row[3], tuple(row[2])) for rows in entries(cluster).values() for row in rows]
    shares += tries(cluster)
    sampler = Sampler(size=100, global_batch=BATCH, seed=SEED)
    for step in range(first, steps):
        newest = max((plan for index, plan, _ in shares if index == step), default=0)
        taken = {share for index, plan, share in shares if (index, plan) == (step, newest)}
        assert sorted(i for share in taken for i in share) == sorted(sampler.samples(step)), step


def members_of(cluster: Cluster) -> int:
    """The number of devices of the plan in force."""
    return len((cluster.job().get("plan") or {}).get("members", ()))


def codes_of(cluster: Cluster, victim: str) -> None:
    codes = cluster.wait(120)
    assert codes.pop(victim) == -signal.SIGKILL, cluster.log(victim)[-3000:]
    assert set(codes.values()) == {0}, {device: cluster.log(device)[-3000:] for device in codes}


def recovery_of(cluster: Cluster) -> dict[str, Any]:
    """The event by which the plan after the only fence is recorded; shares may change beside it."""
    (fenced,) = cluster.events("fenced")
    recovered, *others = (event for event in cluster.events("recorded") if event["id"] > fenced["id"])
    assert all(other["data"]["again"] == 0 for other in others), others
    return recovered


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["ddp", "fsdp", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("hsdp", "tp"))]
)
def test_a_kill_in_the_backward_pass_loses_one_device_alone(kind: str) -> None:
    """No committed step is lost: where there are no replicas, the dead device's part is read from its snapshot
    of the same step, which its agent has. It dies in a step in which an epoch ends, whose samples neither four
    ranks nor three have equal shares of."""
    steps, alone = 20, kind in ("fsdp", "tp")
    at = next(step for step in range(5, steps) if step * BATCH < 200 < (step + 1) * BATCH)
    with Cluster(NODES, settings=SETTINGS, emulated=False) as cluster:
        cluster.run(SCRIPT, kind=kind, steps=steps, dies={"b/1": ["kept" if alone else "backward", at]})
        codes_of(cluster, "b/1")
        check(cluster, kind, steps)
        recovered = recovery_of(cluster)
        assert recovered["data"]["again"] == 0
        number = recovered["data"]["number"]
        proposed = next(e["text"] for e in cluster.events("proposed") if e["data"]["number"] == number)
        read = f"the part of b/1 is read from snapshots of step {recovered['data']['step']} in memory on "
        assert (read in proposed) == alone, proposed


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_a_device_that_dies_at_the_end_of_the_last_step_takes_nothing_of_the_state_with_it(kind: str) -> None:
    """The script saves all weights after its loop."""
    steps = 10
    with Cluster(NODES, settings=SETTINGS, emulated=False) as cluster:
        cluster.run(SCRIPT, kind=kind, steps=steps, dies={"b/1": ["log", steps - 1]}, logs="loss", seconds=0.01)
        codes_of(cluster, "b/1")
        check(cluster, kind, steps)


@pytest.mark.slow
def test_all_go_back_to_a_snapshot_of_an_older_step_and_samples_count_once() -> None:
    steps = 14
    with Cluster(NODES, settings=SETTINGS, emulated=False) as cluster:
        options = {"kind": "fsdp", "steps": steps, "snapshot_every": 4, "seconds": 0.01}
        cluster.run(SCRIPT, dies={"b/1": ["backward", 11]}, **options)
        codes_of(cluster, "b/1")
        check(cluster, "fsdp", steps)
        recovered = recovery_of(cluster)
        step, again = recovered["data"]["step"], recovered["data"]["again"]
        assert step in (4, 8), "a busy machine makes no snapshot now and then"
        assert step + again == 11


@pytest.mark.slow
def test_without_any_snapshot_the_job_ends_and_names_the_box() -> None:
    with Cluster(NODES, settings=SETTINGS, emulated=False) as cluster:
        cluster.run(SCRIPT, kind="fsdp", snapshot_every=10**6, dies={"b/1": ["backward", 3]})
        codes = cluster.wait(120)
        assert codes.pop("b/1") == -signal.SIGKILL
        assert 0 not in codes.values()
        reason = cluster.job()["reason"]
        assert re.search(r"state is lost: embed.weight \[\d+:\d+, 0:30\]", reason), reason
        assert "there is no snapshot or checkpoint to go back to" in reason


def full(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.full)


KINDS = ("ddp", "fsdp", "hsdp", "tp")
#: Moments of a step, and of a switch, in order.
IN_STEP = ("forward", "backward", "clipping", "vote", "after the vote", "update", "log")
IN_SWITCH = ("groups", "world", "build", "move", "moved", "adopt", "ok", "swap")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "moment"),
    [
        ("ddp", "unheard"),
        full("fsdp", "unheard"),
        full("ddp", "objects"),
        full("fsdp", "objects"),
        *(full(kind, moment) for kind in KINDS for moment in IN_STEP if (kind, moment) != ("tp", "clipping")),
    ],
)
def test_a_step_counts_on_all_ranks_or_on_none_wherever_one_is_lost(kind: str, moment: str) -> None:
    """A rank that did not hear a decided vote makes the update all the same. An all-reduce for a log after the
    update does not break the body off; one of objects does, and the scheduler moves all the same."""
    steps, logs = 10, moment if moment == "objects" else "loss"
    with Cluster(NODES, settings=SETTINGS, emulated=False) as cluster:
        cluster.run(SCRIPT, kind=kind, steps=steps, dies={"b/1": [moment, 5]}, logs=logs, seconds=0.01)
        if moment == "unheard":
            assert set(cluster.wait(120).values()) == {0}
        else:
            codes_of(cluster, "b/1")
        check(cluster, kind, steps)
        assert len(cluster.events("fenced")) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "moment"),
    [
        ("hsdp", "swap"),
        *(full(kind, moment) for kind in KINDS for moment in IN_SWITCH if (kind, moment) != ("hsdp", "swap")),
    ],
)
def test_a_second_death_at_any_point_of_a_recovery_is_recovered_from(kind: str, moment: str) -> None:
    """The two that die hold the same part of the state, or the only copies of two."""
    steps = 10
    with Cluster(NODES, settings=SETTINGS, emulated=False) as cluster:
        cluster.run(
            SCRIPT, kind=kind, steps=steps, dies={"b/1": ["backward", 5], "a/1": [moment, 2]}, seconds=0.01
        )
        codes = cluster.wait(120)
        assert codes == {"a/0": 0, "b/0": 0, "a/1": -signal.SIGKILL, "b/1": -signal.SIGKILL}
        check(cluster, kind, steps)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moment", IN_SWITCH)
def test_a_death_at_any_point_of_a_drains_switch_is_recovered_from(kind: str, moment: str) -> None:
    steps = 20
    with Cluster(NODES, settings=SETTINGS, emulated=False) as cluster:
        cluster.run(SCRIPT, kind=kind, steps=steps, dies={"a/1": [moment, 2]}, drains={"b/1": 5}, seconds=0.01)
        codes = cluster.wait(120)
        assert codes == {"a/0": 0, "b/0": 0, "b/1": 0, "a/1": -signal.SIGKILL}
        check(cluster, kind, steps)


@pytest.mark.full  # a busy machine hides a device that is three times slower
@pytest.mark.slow
def test_a_slow_device_gets_fewer_samples_and_its_share_back_in_the_same_groups() -> None:
    """A plan of the same mesh moves nothing, and calls no `build`. The learning rate is so low that rounding
    does not grow over so many steps."""
    steps, rate, slow = 300, 1e-4, 3.0
    with Cluster(NODES, settings=SETTINGS, forward=4e-3) as cluster:
        cluster.run(SCRIPT, kind="fsdp", steps=steps, features={"rate": rate})
        cluster.runs(1, 4)

        def shares() -> list[int]:
            """Each device's samples of its last step."""
            return [len(rows[-1][2]) for _, rows in sorted(entries(cluster).items())]

        def over_the_bound() -> float:
            """The slowest device's time by its share, over that of samples divided perfectly."""
            first, *others = shares()
            return max(slow * first, *others) / (BATCH / (len(others) + 1 / slow))

        even = shares()
        slowed = time.time()
        cluster.pace("a/0", slow)
        until(lambda: over_the_bound() <= 1.15, shares)
        assert time.time() - slowed <= 10.0
        cluster.pace("a/0", 1.0)
        until(lambda: shares() == even, shares)
        codes = cluster.wait(180)
        assert set(codes.values()) == {0}, {device: cluster.log(device)[-3000:] for device in codes}
        check(cluster, "fsdp", steps, rate=rate)
        assert not cluster.events("fenced")
        assert len(cluster.events("recorded")) > 2, "shares changed, and changed back"


MEMBERS = {"hsdp": (3, 4, 3), "ddp": (3, 4, 3), "fsdp": (3, 4, 3), "tp": (2, 4, 2)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hsdp", full("tp"), full("fsdp"), full("ddp")])
def test_a_device_dies_another_comes_and_one_is_drained(kind: str) -> None:
    """Of three that FSDP over tensor parallelism has left two work, and one stands by until a fourth comes."""
    steps, nodes = 70, {"a": 1, "b": 1, "c": 1, "d": 1}
    after_death, after_join, after_drain = MEMBERS[kind]

    with Cluster(nodes, settings=SETTINGS, emulated=False) as cluster:
        # Seconds of a sample: a fourth device saves a quarter.
        options = {"kind": kind, "steps": steps, "seconds": 0.04}
        cluster.run(SCRIPT, **options)
        cluster.runs(1, 4)
        dead = cluster.workers.pop("d/0")
        os.kill(dead.pid, signal.SIGKILL)
        dead.wait()
        until(lambda: members_of(cluster) == after_death, cluster.events)
        cluster.rejoin("d")
        cluster.start_worker("d/0", SCRIPT, options)
        until(lambda: members_of(cluster) == after_join, cluster.events)
        os.kill(cluster.workers["b/0"].pid, signal.SIGTERM)
        codes = cluster.wait(120)
        assert set(codes.values()) == {0}, {device: cluster.log(device)[-3000:] for device in codes}
        check(cluster, kind, steps)
        joined = entries(cluster)[f"ledger-d-0-{cluster.workers['d/0'].pid}"]
        assert joined, "it took part"
        assert members_of(cluster) == after_drain
        assert len(cluster.events("fenced")) == 1, "neither the join nor the drain was a fault"


def held(pid: int) -> dict[str, int]:
    """The threads, the descriptors and the KiB of a process's own memory."""
    process = Path(f"/proc/{pid}")
    rollup = (process / "smaps_rollup").read_text().splitlines()[1:]
    sizes = {line.split(":")[0]: int(line.split()[1]) for line in rollup}
    return {
        "threads": len(os.listdir(process / "task")),
        "descriptors": len(os.listdir(process / "fd")),
        "kib": sizes["Private_Clean"] + sizes["Private_Dirty"],
    }


@pytest.mark.slow
@pytest.mark.parametrize("swaps", [4, full(40)])
def test_swaps_leave_no_thread_no_descriptor_and_no_memory(swaps: int) -> None:
    """A node is drained and taken again, over and over; the first swaps make what later ones use again."""
    first, most = 2, 1024 * swaps
    # A device that comes and goes on purpose is not to be damped.
    settings = JobSettings(retry_seconds=0.5, policy=PolicySettings(horizon_steps=40))
    with Cluster({"a": 1, "b": 1}, settings=settings, emulated=False) as cluster:
        cluster.run(SCRIPT, kind="fsdp", seconds=0.01)
        cluster.runs(1, 3)
        pid = cluster.workers["a/0"].pid
        with ApiClient(cluster.coordinator.url) as api:

            def swap_twice() -> None:
                for on in (True, False):
                    api.drain("b", on=on)
                    until(lambda n=1 if on else 2: members_of(cluster) == n, cluster.events)  # type: ignore[misc]
                    number = cluster.job()["plan"]["number"]
                    cluster.runs(number, 3)

            for _ in range(first // 2):
                swap_twice()
            before = held(pid)
            for _ in range(swaps // 2):
                swap_twice()

            def left() -> bool:
                now = held(pid)
                same = all(now[name] <= before[name] for name in ("threads", "descriptors"))
                return same and now["kib"] - before["kib"] <= most

            until(left, lambda: (before, held(pid)), seconds=30.0)
        assert not cluster.events("fenced")
