"""The last checkpoint, by ranks that a fault left at different points of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from elasticd_planner.layout.layouts import Layouts

from elasticd.checkpoints.folder import damages, scan
from elasticd.machines.worker.checkpointing import Status
from elasticd.runtime.checkpoint import saver as saver_module
from elasticd.runtime.checkpoint.saver import Saver
from elasticd.testing.waiting import until
from tests.checkpoints.support import SPEC_OF_JOB, THREE
from tests.checkpoints.test_saver import Gang


def finish(gang: Gang, step: int) -> set[bool]:
    """All ranks at once, as members of one plan do. Returns their answers."""
    words: dict[str, int] = {}
    barrier = threading.Barrier(len(gang.savers))

    def run(device: str) -> bool:
        def gather(word: int) -> list[int]:
            words[device] = word
            barrier.wait(60)
            told = [words[name] for name in gang.savers]
            barrier.wait(60)
            return told

        return gang.savers[device].finish(step, gather, gang.layouts, lambda: gang.states[device])

    with ThreadPoolExecutor(len(gang.savers)) as pool:
        return {end.result(120) for end in [pool.submit(run, device) for device in gang.savers]}


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[Gang]:
    torch.set_num_threads(1)
    gang = Gang(tmp_path, THREE)
    savers = list(gang.savers.values())
    yield gang
    for saver in (*savers, *gang.savers.values()):
        saver.end()


def replaced(gang: Gang, device: str) -> None:
    """Another process takes the place of one that was lost."""
    old = gang.savers[device]
    gang.savers[device] = Saver(
        old.options, SPEC_OF_JOB, device, gang._tell, lambda: gang.lost, gang.disks[device]
    )
    gang.layouts = Layouts(gang.layouts.spec, gang.layouts.plan.replace(number=9))


def newest(folder: Path) -> tuple[int, int]:
    found = scan(folder)[0]
    assert damages(found.path) == ()
    return found.step, found.plan


def test_what_a_fault_gave_up_is_made_by_all(gang: Gang, tmp_path: Path) -> None:
    gang.disks["n1/0"].broken = True
    gang.vote(6)
    gang.settle(7, gang.free)
    gang.disks["n1/0"].broken = False
    gang.layouts = Layouts(gang.layouts.spec, gang.layouts.plan.replace(number=9))
    assert finish(gang, 6) == {True}
    assert newest(tmp_path) == (6, 9)
    assert gang.free()


def test_what_is_published_is_not_made_again_for_one_that_came_later(gang: Gang, tmp_path: Path) -> None:
    gang.vote(6)
    gang.settle(7, gang.free)
    replaced(gang, gang.layouts.plan.members[-1])
    assert finish(gang, 6) == {True}
    assert newest(tmp_path)[0] == 6
    assert len(gang.said) == 1


def test_what_the_first_rank_left_unpublished_is_made_again(gang: Gang, tmp_path: Path) -> None:
    """The others have written their parts and are free: only the first knows of the end."""
    gang.silent = True
    gang.vote(6)
    gang.settle(7, lambda: gang.said)
    first = gang.layouts.plan.members[0]
    gang.savers[first].end()
    replaced(gang, first)
    gang.silent = False
    assert finish(gang, 6) == {True}
    assert newest(tmp_path) == (6, 9)


@pytest.mark.parametrize("device", ["first", "last"])
def test_a_checkpoint_that_cannot_be_written_is_no_end(gang: Gang, device: str, tmp_path: Path) -> None:
    member = gang.layouts.plan.members[0 if device == "first" else -1]
    gang.disks[member].broken = True
    assert finish(gang, 6) == {False}
    assert gang.savers[member].failure == f"could not write: no space left in {tmp_path}"
    assert scan(tmp_path) == ()


class Clock:
    """The saver's time: it goes on by itself with each look, or by what a disk takes."""

    def __init__(self, each_look: float = 0.0) -> None:
        self.now, self._each_look = 1000.0, each_look

    def monotonic(self) -> float:
        self.now += self._each_look
        return self.now


def test_a_disk_that_is_slow_has_the_time_that_it_takes(
    gang: Gang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are done long before; then the first closes the checkpoint."""
    clock, blocks = Clock(), [0]
    monkeypatch.setattr(saver_module, "time", clock)
    *others, last = (gang.savers[device] for device in gang.layouts.plan.members)
    advance = last._advance

    def slowly(step: int) -> None:
        if not blocks[0]:
            until(lambda: all(saver.word % 8 == Status.WRITTEN for saver in others))
        clock.now += 0.9 * saver_module.STALLED_SECONDS
        blocks[0] += 1
        advance(step)

    monkeypatch.setattr(last, "_advance", slowly)
    assert finish(gang, 6) == {True}
    assert blocks[0] > 1, "longer in all than a stall may be"
    assert newest(tmp_path)[0] == 6


def test_a_disk_that_stands_still_is_given_up(gang: Gang, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver_module, "time", Clock(each_look=saver_module.STALLED_SECONDS / 5))
    disk = gang.disks[gang.layouts.plan.members[-1]]
    disk.go.clear()
    try:
        assert finish(gang, 6) == {False}
    finally:
        disk.go.set()
    assert any("did not come forward for 600 s" in said.reason for said in gang.failed)
