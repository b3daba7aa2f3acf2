"""Groups of one plan: made by their members alone, freed from a blocked collective, parked and made anew."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from elasticd.runtime.comm.groups import AT_ONCE, Cancelled, PlanGroups
from elasticd.runtime.comm.torch_store import TorchStore
from elasticd.testing.waiting import until
from tests.runtime import gang


def overlapping(name: str, store: Any) -> list[float]:
    """Groups that share members, made in sorted order by each member alone."""
    plan_groups = PlanGroups("plan/1", name, "127.0.0.1", store)
    results = []
    for members in (("a", "b"), ("a", "b", "c"), ("b", "c")):
        if name in members:
            group = plan_groups.group(members, "reduce")
            results.append(float(group.all_reduce(torch.tensor([float(group.rank + 1)]))))
    assert plan_groups.stopwatch.read("reduce") > 0
    return results


@pytest.mark.slow
def test_groups_are_made_by_their_members_alone() -> None:
    results = gang.run(__file__, "overlapping", ["a", "b", "c"])
    assert results == {"a": [3.0, 6.0], "b": [3.0, 6.0, 3.0], "c": [6.0, 3.0]}


def terms(size: int, round_: int, rank: int) -> torch.Tensor:
    return torch.rand(size, generator=torch.Generator().manual_seed(100 * round_ + rank))


def exchanged(name: str, store: Any) -> dict[str, Any]:
    """Collectives of all sizes in a row, with messages between them."""
    members = ("a", "b", "c")
    plan_groups = PlanGroups("plan/1", name, "127.0.0.1", store)
    group, other = plan_groups.group(members, "tensor"), plan_groups.group(members, "vote")
    limit, wrong, sums, kept = AT_ONCE // 4, list[str](), list[float](), 0
    after, before = (group.rank + 1) % 3, (group.rank - 1) % 3
    for number, size in enumerate([1, 7, limit - 1, limit, limit + 1, 5, 3 * limit, 1] * 6):
        mine, all_ = terms(size, number, group.rank), [terms(size, number, rank) for rank in range(3)]
        group.send(mine, after, 1)
        total = group.all_reduce(mine.clone())
        if not torch.allclose(total, all_[0] + all_[1] + all_[2]):
            wrong.append(f"sum of {size}")
        if not torch.equal(group.receive(torch.empty(size), before, 1), all_[before]):
            wrong.append(f"message of {size}")
        if not torch.equal(other.all_gather(mine), torch.stack(all_)):
            wrong.append(f"gathering of {size}")
        sums.append(float(total.double().sum()))
    for _ in range(9):
        group.all_reduce(torch.rand(3, 5).T)
    group.received()
    for _ in range(9):
        group.all_reduce(torch.ones(1))
        kept = max(kept, len(group._sent))
    group.all_reduce(torch.zeros(1))
    store.set(f"done/{name}", b"")
    for member in members:
        store.get(f"done/{member}", 20)
    return {"wrong": wrong, "sums": sums, "kept": kept}


@pytest.mark.slow
def test_collectives_of_any_size_give_all_members_the_same_bits() -> None:
    results = gang.run(__file__, "exchanged", ["a", "b", "c"])
    for result in results.values():
        assert result["wrong"] == []
        assert result["sums"] == results["a"]["sums"]
        assert result["kept"] == 2, "the terms of the last exchange alone"


def meeting(name: str, store: Any) -> list[Any]:
    """One member is at a meeting while the other is at a sum of another size, and the other way round."""
    group = PlanGroups("plan/1", name, "127.0.0.1", store).group(("a", "b"), "vote")
    numbers = list[list[int]]()
    thread = threading.Thread(target=lambda: numbers.append(group.meet(group.rank + 5)), daemon=True)
    if name == "a":
        thread.start()
        until(lambda: len(group._meeting) == 1)
        store.set("meets", b"")
    else:
        store.get("meets", 20)
    total = float(group.all_reduce(torch.ones(100)).sum())
    if name == "b":
        thread.start()
    thread.join(20)
    store.set(f"done/{name}", b"")
    for member in group.members:
        store.get(f"done/{member}", 20)
    return [numbers, total]


def meetings_beside_sums(name: str, store: Any) -> list[Any]:
    """A thread meets again and again while another sums, and lets go of all that has arrived."""
    group = PlanGroups("plan/1", name, "127.0.0.1", store).group(("a", "b"), "vote")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    numbers = list[list[int]]()
    rounds = range(1000)
    thread = threading.Thread(
        target=lambda: numbers.extend(group.meet(n + group.rank) for n in rounds), daemon=True
    )
    thread.start()
    wrong = 0
    for _ in rounds:
        wrong += float(group.all_reduce(torch.ones(100)).sum()) != 200.0
        group.received()
    thread.join(60)
    sys.setswitchinterval(interval)
    return [wrong, numbers == [[n, n + 1] for n in rounds], len(group._sent)]


def test_a_thread_may_meet_while_another_sums() -> None:
    results = gang.run(__file__, "meetings_beside_sums", ["a", "b"])
    assert results == {name: [0, True, 2] for name in "ab"}, "the messages of the last of each alone are kept"


def test_a_meeting_is_not_taken_for_another_operation_of_its_group() -> None:
    results = gang.run(__file__, "meeting", ["a", "b"])
    assert results == {"a": [[[5, 6]], 200.0], "b": [[[5, 6]], 200.0]}


def shut_in_gloo(name: str, store: Any) -> dict[str, Any]:
    return shut_while_blocked(name, store, AT_ONCE)


def shut_while_blocked(name: str, store: Any, size: int = 1) -> dict[str, Any]:
    """c never comes to the collective; a shuts its groups from another thread; all leave and meet anew."""
    members = ("a", "b", "c")
    other = PlanGroups("plan/2", name, "127.0.0.1", store)
    untouched = other.group(members, "vote")
    plan_groups = PlanGroups("plan/1", name, "127.0.0.1", store)
    group = plan_groups.group(members, "vote")
    group.all_reduce(torch.ones(size))
    left = ""
    start = time.monotonic()
    if name == "c":
        store.get("left/a", 20)
        plan_groups.shut()
        left = "late"
    else:
        if name == "a":
            threading.Timer(0.2, plan_groups.shut).start()
        try:
            group.all_reduce(torch.ones(size))
        except Cancelled:
            left = "cancelled"
        except RuntimeError:
            left = "error"
        store.set(f"left/{name}", b"")
    plan_groups.park()
    spent = time.monotonic() - start
    total = float(untouched.all_reduce(torch.ones(1)))  # the other plan's sockets were spared
    again = PlanGroups("plan/3", name, "127.0.0.1", store).group(members, "vote")
    return {"left": left, "seconds": spent, "spared": total, "again": float(again.all_reduce(torch.ones(1)))}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["shut_while_blocked", "shut_in_gloo"])
def test_shutting_a_plans_groups_frees_its_ranks_and_spares_the_others(how: str) -> None:
    results = gang.run(__file__, how, ["a", "b", "c"])
    assert results["a"]["left"] == "cancelled"
    assert results["b"]["left"] in ("error", "cancelled"), "its peer's socket closed"
    for result in results.values():
        assert result["seconds"] < 10
        assert result["spared"] == result["again"] == 3.0


def killed_in_gloo(name: str, store: Any) -> str:
    return killed(name, store, AT_ONCE)


def killed(name: str, store: Any, size: int = 1) -> str:
    """c dies in the collective: the others see an error, soon."""
    plan_groups = PlanGroups("plan/1", name, "127.0.0.1", store)
    group = plan_groups.group(("a", "b", "c"), "vote")
    group.all_reduce(torch.ones(size))
    if name == "c":
        os._exit(0)
    try:
        group.all_reduce(torch.ones(size))
    except RuntimeError:
        plan_groups.shut()
        return "error"
    return "completed"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "killed_in_gloo"])
def test_a_death_in_a_collective_reaches_the_others(how: str) -> None:
    results = gang.run(__file__, how, ["a", "b", "c"], dying=["c"])
    assert results == {"a": "error", "b": "error"}


class Silent:
    """A bootstrap store to which nobody else ever comes."""

    def set(self, key: str, value: bytes) -> None:
        pass

    def get(self, key: str, seconds: float) -> bytes:
        if key.endswith("/a"):
            return b"127.0.0.1 1"
        time.sleep(min(seconds, 0.05))
        raise TimeoutError(key)

    def get_all(self, keys: Sequence[str], seconds: float) -> list[bytes]:
        return [self.get(key, seconds) for key in keys]

    def add(self, key: str, amount: int) -> int:
        return amount

    def check(self, keys: Any) -> bool:
        return False


def test_making_a_group_gives_up_when_the_peers_do_not_come() -> None:
    with pytest.raises(RuntimeError, match="peers did not arrive within 0 s"):
        PlanGroups("plan/1", "a", "127.0.0.1", Silent(), seconds=0.2).group(("a", "b"), "vote")


class Known(Silent):
    """Every key has come; at the last of two something happens on another thread."""

    def __init__(self) -> None:
        self.gets, self.then = 0, print

    def get(self, key: str, seconds: float) -> bytes:
        self.gets += 1
        if self.gets == 2:
            thread = threading.Thread(target=self.then)
            thread.start()
            thread.join()
        return b"127.0.0.1 1"


def test_groups_that_are_let_go_while_one_is_made_say_so() -> None:
    """gloo ends the process where it is given no device."""
    store = Known()
    plan_groups = PlanGroups("plan/1", "a", "127.0.0.1", store)
    store.then = plan_groups.park
    with pytest.raises(Cancelled):
        plan_groups.group(("a", "b"), "vote")
    assert not plan_groups.backends


def test_making_a_group_ends_when_the_plans_groups_are_shut() -> None:
    plan_groups = PlanGroups("plan/1", "a", "127.0.0.1", Silent(), seconds=30)
    threading.Timer(0.1, plan_groups.shut).start()
    with pytest.raises(Cancelled):
        plan_groups.group(("a", "b"), "vote")


class Counted(TorchStore):
    """Counts what is asked one after the other."""

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self.asked: list[int] = []

    def get(self, key: str, seconds: float) -> bytes:
        self.asked.append(1)
        return super().get(key, seconds)

    def get_all(self, keys: Sequence[str], seconds: float) -> list[bytes]:
        values = [super(Counted, self).get(key, seconds) for key in keys]
        self.asked.append(len(keys))
        return values


def test_members_ask_for_each_others_addresses_at_once() -> None:
    """gloo asks twice for each member: with a thousand of them a group would take two thousand answers."""
    members, stores = tuple("abcd"), {}
    shared = torch.distributed.HashStore()

    def make(me: str) -> PlanGroups:
        stores[me] = Counted(shared)
        groups = PlanGroups("plan/1", me, "127.0.0.1", stores[me], seconds=60)
        groups.group(members, "vote")
        groups.group_apart(members, "vote", "again")
        return groups

    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(make, members))
    assert {me: store.asked for me, store in stores.items()} == {me: [4, 4, 4] for me in members}
    for groups in made:
        groups.park()
