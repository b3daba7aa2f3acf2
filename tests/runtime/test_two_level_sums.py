"""Gradients are summed in two levels over gloo: the same bits on all members, whatever the timing."""

from __future__ import annotations

import hashlib
import os
import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from elasticd_planner.layout.channels import Channel
from elasticd_planner.spec.cluster import node_of
from elasticd_planner.spec.plan import Plan, StatePolicy

from elasticd.runtime.comm import two_level_sums
from elasticd.runtime.comm.communicators import GlooCommunicators
from elasticd.runtime.comm.groups import Cancelled, Group, PeerLost, PlanGroups
from elasticd.runtime.comm.groups_by_plan import GroupsByPlan
from elasticd.runtime.comm.two_level_sums import TwoLevelTeam
from tests import sizes
from tests.runtime import gang, test_engine_parity
from tests.runtime.test_engine_parity import plan_of, stage

#: Two nodes of two; three nodes of two.
FOUR = ("a/0", "a/1", "b/0", "b/1")
SIX = (*FOUR, "c/0", "c/1")
#: Each emulated node has an address of its own.
ADDRESSES = {"a": "127.0.0.1", "b": "127.0.0.2", "c": "127.0.0.3"}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)


def groups_of(name: str, store: Any, plan: str = "plan/1") -> PlanGroups:
    return PlanGroups(plan, name, ADDRESSES[node_of(name)], store)


def teams_of(plan_groups: PlanGroups, *sets: Sequence[str]) -> list[Any]:
    """The teams of the sets that this device is in."""
    everyone = plan_groups.group(SIX if plan_groups.me in SIX[4:] or SIX in sets else FOUR, "vote")
    channels = tuple(Channel("reduce", tuple(each)) for each in sets if plan_groups.me in each)
    communicators = GlooCommunicators(plan_groups, channels, everyone)
    return [communicators.team(channel) for channel in channels]


def sums_left() -> list[str]:
    """Threads of sums that have not ended, after the time that they may take."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("elasticd-sums")]
        if not left:
            break
        time.sleep(0.01)
    return left


def end_together(name: str, store: Any, members: Sequence[str]) -> None:
    """Nobody ends while others are at work."""
    store.set(f"done/{name}", b"")
    for member in members:
        store.get(f"done/{member}", 60)


def whole(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, whose sums are exact in every type."""
    return ((torch.arange(size) * 7 + rank * 5) % 11).to(dtype)


def summed(name: str, store: Any, members: Sequence[str]) -> dict[str, Any]:
    """Sums of all sizes and types, then random numbers."""
    two_level_sums.PART = 1 << 16
    plan_groups = groups_of(name, store)
    (team,) = teams_of(plan_groups, members)
    wrong, bits = list[str](), hashlib.sha256()
    count = len(members)
    for dtype in DTYPES:
        part = two_level_sums.PART // dtype.itemsize
        for size in (0, 1, 2, 3, 7, 1000, part, part + 1, 2 * part + 5):
            total = sum(whole(rank, size, torch.int64) for rank in range(count))
            assert isinstance(total, torch.Tensor)
            found = whole(team.rank, size, dtype)
            result = team.all_reduce(found)
            if result is not found or not torch.equal(found, total.to(dtype)):
                wrong.append(f"{dtype} {size}")
    for dtype in DTYPES[:4]:
        nothing = torch.full((5,), -0.0, dtype=dtype)
        if not team.all_reduce(nothing).signbit().all():
            wrong.append(f"{dtype}: a sum without a term is -0.0")
        drawn = [torch.rand(10_001, generator=torch.Generator().manual_seed(rank)) for rank in range(count)]
        found = team.all_reduce(drawn[team.rank].to(dtype, copy=True).view(73, 137))
        near = 1e-2 if dtype.itemsize == 2 else 1e-6
        exact = torch.stack([each.to(dtype).double() for each in drawn]).sum(dim=0)
        if not torch.allclose(found.double().view(-1), exact, rtol=near):
            wrong.append(f"{dtype}: random numbers")
        bits.update(found.view(torch.uint8).numpy().tobytes())
    strided = torch.arange(12.0).view(3, 4).T
    if not torch.equal(team.all_reduce(strided), count * torch.arange(12.0).view(3, 4).T):
        wrong.append("strided")
    gathered = team.all_gather(torch.tensor([team.rank, -0.0]))
    if gathered[:, 0].tolist() != list(range(count)) or not gathered[:, 1].signbit().all():
        wrong.append("gathered")
    if team.members != tuple(members) or not isinstance(team, TwoLevelTeam):
        wrong.append("team")
    end_together(name, store, members)
    return {"wrong": wrong, "bits": bits.hexdigest(), "threads": sums_left()}


@pytest.mark.slow
@pytest.mark.parametrize("nodes", sizes.beside([2], [2, 3]))
def test_sums_of_any_size_and_type_have_the_same_bits_on_all_members(nodes: int) -> None:
    members = SIX[: 2 * nodes]
    results = gang.run(__file__, "summed", members, members)
    for result in results.values():
        assert result == {"wrong": [], "bits": results["a/0"]["bits"], "threads": []}


def overlapping(name: str, store: Any) -> list[str]:
    """Sums of two sets in turns, with other collectives of the same devices between them; every member comes
    when it likes."""
    plan_groups = groups_of(name, store)
    teams = teams_of(plan_groups, FOUR, SIX)
    near = tuple(device for device in SIX if node_of(device) == node_of(name))
    inside, across = plan_groups.group(near, "tensor"), None
    if name in FOUR:
        across = plan_groups.group(tuple(device for device in FOUR if device[1:] == name[1:]), "reduce")
    draw, wrong = random.Random(name), list[str]()
    for turn in range(6):
        begun = []
        for number in range(8):
            for team in teams:
                time.sleep(draw.choice((0, 0, 0.003)))
                tensor = torch.full((1 + 50_000 * (number % 3),), float(number + team.rank))
                begun.append((team, number, tensor, team.begin_all_reduce(tensor)))
            for group in (inside, across):
                if group is not None and group.all_reduce(torch.ones(20_000))[-1] != 2:
                    wrong.append(f"{turn}: {group.label}")
        for team, number, tensor, work in begun:
            team.finish(work)
            total = float(number * team.size + sum(range(team.size)))
            if not (tensor == total).all():
                wrong.append(f"{turn}: {number} of {team.size}")
    end_together(name, store, SIX)
    return wrong + sums_left()


@pytest.mark.slow
def test_sets_that_overlap_are_summed_whatever_the_timing() -> None:
    assert gang.run(__file__, "overlapping", SIX) == {name: [] for name in SIX}


def faulty(name: str, store: Any, phase: int, how: str) -> dict[str, Any]:
    """b/1 dies, or stands still, where it would enter a phase of the third sum. Others are told half a second
    later, as by their agents, and meet anew without it."""
    members, victim = FOUR, FOUR[-1]
    by_plan = GroupsByPlan()
    plan_groups = groups_of(name, store)
    by_plan.add(1, plan_groups)
    (team,) = teams_of(plan_groups, members)
    entered, enter = [0], team._enter

    def fail(part: Any, after: int) -> None:
        entered[0] += after == phase
        if entered[0] == 3:
            if how == "dies":
                os._exit(0)
            store.set("still", b"")
            store.get("over/a/0", 120)
            os._exit(0)
        enter(part, after)

    if name == victim:
        team._enter = fail
    tensors = [torch.full((300_001,), float(number)) for number in range(6)]
    begun = [team.begin_all_reduce(tensor) for tensor in tensors]
    if name != victim and how == "stands":
        store.get("still", 60)
    ordered = threading.Timer(0.5, by_plan.cancel, args=(1,))
    ordered.start()
    start, ended = time.monotonic(), list[str]()
    for number, work in enumerate(begun):
        try:
            team.finish(work)
            ended.append("summed" if (tensors[number] == 4.0 * number).all() else "wrong")
        except (Cancelled, PeerLost) as error:
            ended.append(type(error).__name__)
    spent = time.monotonic() - start
    ordered.join()
    by_plan.end()
    left = [each.name for each in threading.enumerate() if each.name.startswith(("park", "elasticd-sums"))]
    try:
        team.finish(team.begin_all_reduce(torch.ones(3)))
        later = "summed"
    except (Cancelled, PeerLost) as error:
        later = type(error).__name__
    left += sums_left()
    again = groups_of(name, store, "plan/2").group(members[:-1], "reduce").all_reduce(torch.ones(5000))
    store.set(f"over/{name}", b"")
    return {
        "ended": ended,
        "seconds": spent,
        "threads": left,
        "later": later,
        "again": float(again[0]),
        "groups": len(plan_groups.backends),
    }


FAULTS = [(phase, how) for phase in (1, 2, 3, 4) for how in ("dies", "stands")]


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "how"), sizes.beside(FAULTS[::3], FAULTS))
def test_a_fault_in_any_phase_ends_all_sums_and_leaves_nothing(phase: int, how: str) -> None:
    victim = FOUR[-1]
    results = gang.run(__file__, "faulty", FOUR, phase, how, dying=[victim], seconds=120)
    assert set(results) == set(FOUR) - {victim}
    for name, result in results.items():
        said = f"{name}: {result}"
        good = result["ended"].count("summed")
        assert result["ended"][:good] == ["summed"] * good, said
        assert set(result["ended"][good:]) <= {"Cancelled", "PeerLost"}, said
        assert good < 6 or node_of(name) != node_of(victim), "the node of the victim cannot gather the last sum"
        assert result["later"] in ("Cancelled", "PeerLost"), said
        assert result["seconds"] < 10, said
        assert result["threads"] == [], said
        assert result["again"] == 3.0, said
        assert result["groups"] == 0, said


def kinds(name: str, store: Any) -> dict[str, str]:
    """The teams of sets on one node, with one device on each, and of nodes that have not as many."""
    plan_groups = groups_of(name, store)
    sets = (("a/0", "a/1"), ("a/0", "b/0"), ("a/0", "a/1", "b/0"), FOUR, ("a/0", "b/0", "b/1"))
    mine = [each for each in sets if name in each]
    teams = teams_of(plan_groups, *sets)
    for team in teams:
        assert float(team.all_reduce(torch.ones(1))) == team.size
    end_together(name, store, FOUR)
    return {" ".join(each): type(team).__name__ for each, team in zip(mine, teams, strict=True)}


@pytest.mark.slow
def test_sets_on_one_node_or_unevenly_on_several_are_one_ring() -> None:
    found = gang.run(__file__, "kinds", FOUR)
    for kind in found.values():
        for devices, team in kind.items():
            assert team == (TwoLevelTeam if devices == " ".join(FOUR) else Group).__name__, devices


#: Four pipelines that take turns on two nodes; and two of them cut as well.
PLANS = {
    "data parallel": plan_of(*((2, [stage(0, 6, (device, 1))]) for device in ("a/0", "b/0", "a/1", "b/1"))),
    "stages, and a slow device": plan_of(
        (3, [stage(0, 4, ("a/0", 1)), stage(4, 6, ("b/2", 1))]),
        (2, [stage(0, 4, ("b/0", 1)), stage(4, 6, ("a/2", 1))]),
        (2, [stage(0, 4, ("a/1", 1)), stage(4, 6, ("b/3", 1))]),
        (1, [stage(0, 4, ("b/1", 1)), stage(4, 6, ("a/3", 1))]),
    ),
}
PLANS["data parallel, zero 2"] = PLANS["data parallel"].replace(state=StatePolicy(zero=2, replicas=2))


class Watched(GlooCommunicators):
    """Counts sums by the kind of their team."""

    count = 0

    def team(self, channel: Channel) -> Any:
        team = super().team(channel)
        if isinstance(team, TwoLevelTeam):
            Watched.count += 1
        return team


def trained(device: str, store: Any, plan: Plan, part: int) -> dict[str, Any]:
    two_level_sums.PART = part
    plan_groups = groups_of(device, store)
    return test_engine_parity.trained(device, plan, plan_groups, connect=Watched) | {"teams": Watched.count}


@pytest.mark.slow
@pytest.mark.parametrize("name", sizes.beside(["data parallel, zero 2"], PLANS))
def test_processes_on_two_nodes_train_like_one(name: str) -> None:
    plan = PLANS[name]
    results = gang.run(__file__, "trained", plan.members, plan, 1 << 12)
    test_engine_parity.check(plan, results)
    for device, result in results.items():
        assert result["teams"], device
        for other in results.values():
            for parameter, (start, stop, value) in result["weights"].items():
                if (same := other["weights"].get(parameter)) is not None and same[:2] == (start, stop):
                    assert value.tobytes() == same[2].tobytes(), (parameter, "has the same bits everywhere")
