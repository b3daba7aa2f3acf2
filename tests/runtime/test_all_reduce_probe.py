"""All-reduces that workers make before they have work: measured between two pieces of computation."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import pytest
from torch import distributed

from elasticd.runtime.comm import all_reduce_probe
from elasticd.runtime.comm.all_reduce_probe import REPEATS, WARM, AllReduceProbe
from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.torch_store import TorchStore
from elasticd.wire.worker import Rehearse, Rehearsed

MEMBERS = ("n0/0", "n0/1")
ORDER = Rehearse(members=MEMBERS, widths=(2,), size=1 << 16)


def joined() -> None:
    for thread in threading.enumerate():
        if thread.name == "elasticd-rehearsal":
            thread.join(180)


def make_groups(device: str, store: TorchStore) -> Callable[[str], PlanGroups]:
    return lambda name: PlanGroups(
        name, device, "127.0.0.1", store, seconds=all_reduce_probe.PROBE_TIMEOUT_SECONDS, patience=60.0
    )


def test_the_first_member_answers_with_the_seconds_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_reduce_probe, "PROBE_TIMEOUT_SECONDS", 60.0)
    store, said = TorchStore(distributed.HashStore()), queue.Queue[tuple[str, Rehearsed]]()  # type: ignore[attr-defined]
    paced: dict[str, int] = dict.fromkeys(MEMBERS, 0)

    def rehearser(device: str) -> AllReduceProbe:
        def pace(start: float) -> None:
            paced[device] += 1
            if device == MEMBERS[1]:  # whose all-reduces begin later: what the first one waits is not counted
                time.sleep(0.05)

        return AllReduceProbe(
            device, make_groups(device, store), lambda: True, pace, lambda body: said.put((device, body))
        )

    members = [rehearser(device) for device in MEMBERS]
    for each in members:
        each.ask(ORDER)
    joined()
    device, body = said.get(timeout=180)
    assert said.empty(), "one answer for the group"
    assert device == MEMBERS[0]
    assert body.seconds.keys() == {2}
    assert 0 < body.seconds[2] < 0.05
    assert paced == dict.fromkeys(MEMBERS, WARM + REPEATS)


def test_a_member_that_does_not_come_is_not_waited_for_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_reduce_probe, "PROBE_TIMEOUT_SECONDS", 0.2)
    store, said = TorchStore(distributed.HashStore()), list[Rehearsed]()  # type: ignore[attr-defined]
    alone = AllReduceProbe(
        MEMBERS[0], make_groups(MEMBERS[0], store), lambda: True, lambda start: None, said.append
    )
    alone.ask(ORDER)
    joined()
    assert said == []
    assert not [thread for thread in threading.enumerate() if thread.name == "elasticd-rehearsal"]


def test_a_device_that_has_work_and_one_that_is_no_member_do_nothing() -> None:
    def refuse(name: str) -> PlanGroups:
        raise AssertionError(name)

    said = list[Rehearsed]()
    AllReduceProbe(MEMBERS[0], refuse, lambda: False, lambda start: None, said.append).ask(ORDER)
    AllReduceProbe("n0/2", refuse, lambda: True, lambda start: None, said.append).ask(ORDER)
    assert not [thread for thread in threading.enumerate() if thread.name == "elasticd-rehearsal"]
