"""A gang of savers: asynchronous, agreed, fenced by the leader's word, and gone when it is given up."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from elasticd_planner.layout.layouts import Layouts

from elasticd.checkpoints.disk import LocalDisk, WritableFile
from elasticd.checkpoints.folder import UNFINISHED, damages, scan
from elasticd.codec.message import Message
from elasticd.machines.worker.checkpointing import Status
from elasticd.runtime.checkpoint.loader import longest_trained
from elasticd.runtime.checkpoint.options import CheckpointingOptions
from elasticd.runtime.checkpoint.saver import Saver
from elasticd.testing.waiting import until
from elasticd.wire.worker import Saved, SaveFailed
from tests.checkpoints.support import ONE, SPEC_OF_JOB, THREE, WHOLE
from tests.migration.ranks import local


class _Filling:
    """A file on a disk that is full after so many bytes."""

    def __init__(self, file: WritableFile, room: int) -> None:
        self._file, self._room = file, room

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._room -= len(data)
        if self._room < 0:
            raise OSError(28, "No space left on device")
        self._file.write(data)

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()


class Held(LocalDisk):
    """A disk whose files are not written before `go` is set; a `broken` one has no space left, one with `room`
    has that many bytes for each file."""

    def __init__(self) -> None:
        self.go, self.broken = threading.Event(), False
        self.room: int | None = None
        self.go.set()

    def create(self, path: Path) -> WritableFile:
        assert self.go.wait(30)
        if self.broken:
            raise OSError(28, "No space left on device")
        file = super().create(path)
        return file if self.room is None else _Filling(file, self.room)


class Gang:
    """The savers of a plan's members, and the leader: it publishes at once, unless `silent`."""

    def __init__(self, folder: Path, layouts: Layouts, *, silent: bool = False, every: int = 2) -> None:
        self.layouts, self.silent = layouts, silent
        self.said: list[Saved] = []
        self.failed: list[SaveFailed] = []
        self.disks: dict[str, Held] = {}
        self.savers: dict[str, Saver] = {}
        self.states = {device: local(WHOLE, layouts, device) for device in layouts.plan.members}
        self.lost = False
        self.longest = 0  # of the sequences so far
        options = CheckpointingOptions(folder=folder, every=every, keep=2)
        for device in layouts.plan.members:
            self.disks[device] = Held()
            self.savers[device] = Saver(
                options,
                SPEC_OF_JOB,
                device,
                self._tell,
                lambda: self.lost,
                self.disks[device],
                longest=lambda: self.longest,
            )

    def _tell(self, message: Message) -> None:
        if isinstance(message, SaveFailed):
            self.failed.append(message)
            return
        assert isinstance(message, Saved)
        self.said.append(message)
        if not self.silent:
            threading.Timer(0.01, lambda: self.publish(message.name)).start()

    def publish(self, name: str) -> None:
        for saver in self.savers.values():
            saver.published(name)

    def vote(self, step: int) -> None:
        words = [saver.word for saver in self.savers.values()]
        for device, saver in self.savers.items():
            saver.voted(step, words, self.layouts, lambda device=device: self.states[device])  # type: ignore[misc]

    def settle(self, step: int, done: Callable[[], object], seconds: float = 30) -> None:
        """Votes at steps at which nothing is due until something is true."""
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, [saver.word for saver in self.savers.values()]
            self.vote(step)
            time.sleep(0.01)

    def free(self) -> bool:
        return not any(saver.word for saver in self.savers.values())


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[Gang]:
    torch.set_num_threads(1)
    gang = Gang(tmp_path, THREE)
    yield gang
    for saver in gang.savers.values():
        saver.end()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step-*"))


def test_checkpoints_are_written_published_and_kept_as_many_as_wanted(gang: Gang, tmp_path: Path) -> None:
    for step in (2, 4, 6):
        gang.vote(step)
        gang.settle(step + 1, gang.free)
    found = scan(tmp_path)
    assert [(item.step, item.plan) for item in found] == [(6, 7), (4, 7)]
    assert all(damages(item.path) == () for item in found)
    assert names(tmp_path) == ["step-00000004.plan-7.aa", "step-00000006.plan-7.aa"]
    assert [said.step for said in gang.said] == [2, 4, 6]
    assert gang.said[0].plan == 7


def test_a_checkpoint_knows_the_longest_sequence_of_any_step_before_it(gang: Gang, tmp_path: Path) -> None:
    assert longest_trained(tmp_path) == 0
    for step, gang.longest in ((2, 5000), (4, 9000)):
        gang.vote(step)
        gang.settle(step + 1, gang.free)
        assert longest_trained(tmp_path) == gang.longest


def test_a_step_waits_for_the_copy_alone_and_what_is_written_is_the_copy(gang: Gang, tmp_path: Path) -> None:
    for disk in gang.disks.values():
        disk.go.clear()
    gang.vote(2)
    assert not gang.free()
    first = gang.states["n0/0"]
    values = [tensor for item, tensor in first.tensors.items() if item.role == "value"]
    values[0].shards[0].planes["value"].zero_()  # training goes on
    for step in (3, 4, 5):
        gang.vote(step)
    assert not any(scan(tmp_path))
    for disk in gang.disks.values():
        disk.go.set()
    gang.settle(7, gang.free)
    (found,) = scan(tmp_path)
    assert found.step == 2, "the one due at step 4 was skipped"
    assert damages(found.path) == ()
    assert found.manifest is not None
    from tests.checkpoints.test_layouts import loaded
    from tests.migration.ranks import assert_same_bits

    assert_same_bits(loaded(found.path, ONE, "n0/0"), local(WHOLE, ONE, "n0/0"))


def test_a_rank_whose_disk_is_full_costs_the_checkpoint_and_not_the_training(
    gang: Gang, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gang.disks["n1/0"].broken = True
    gang.vote(2)
    gang.settle(3, gang.free)
    assert names(tmp_path) == []
    assert caplog.messages == [f"no checkpoint of step 2: n1/0 could not write: no space left in {tmp_path}"]
    gang.disks["n1/0"].broken = False
    gang.vote(4)
    gang.settle(5, gang.free)
    assert [item.step for item in scan(tmp_path)] == [4]


def test_ranks_that_all_find_the_disk_full_write_one_line_of_it(
    gang: Gang, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for disk in gang.disks.values():
        disk.broken = True
    gang.vote(2)
    gang.settle(3, gang.free)
    first = next(iter(gang.savers))
    assert caplog.messages == [f"no checkpoint of step 2: {first} could not write: no space left in {tmp_path}"]


def test_without_the_leaders_word_it_never_gets_its_name(tmp_path: Path) -> None:
    gang = Gang(tmp_path, THREE, silent=True)
    try:
        gang.vote(2)
        gang.settle(3, lambda: gang.said)
        gang.vote(4)
        assert names(tmp_path) == ["step-00000002.plan-7.aa" + UNFINISHED]
        assert scan(tmp_path) == ()
        gang.publish(gang.said[0].name)
        gang.settle(5, gang.free)
        assert names(tmp_path) == ["step-00000002.plan-7.aa"]
        gang.vote(6)
        gang.settle(7, lambda: len(gang.said) == 2)
        gang.lost = True
        gang.settle(7, gang.free)
        assert [item.step for item in scan(tmp_path)] == [2]
    finally:
        for saver in gang.savers.values():
            saver.end()


def test_the_last_checkpoint_is_made_and_published_before_the_end(gang: Gang, tmp_path: Path) -> None:
    """Every rank calls `finish`; one that is due at the same step is not made twice."""
    for last in (5, 6):
        if last == 6:
            gang.vote(6)
        barrier = threading.Barrier(len(gang.savers))
        words: dict[str, int] = {}

        def gather(device: str, word: int, barrier: threading.Barrier, words: dict[str, int]) -> list[int]:
            words[device] = word
            barrier.wait(30)
            told = [words[name] for name in gang.savers]
            barrier.wait(30)
            return told

        with ThreadPoolExecutor(len(gang.savers)) as pool:
            ends = [
                pool.submit(
                    saver.finish,
                    last,
                    lambda word, d=device, b=barrier, w=words: gather(d, word, b, w),  # type: ignore[misc]
                    gang.layouts,
                    lambda d=device: gang.states[d],  # type: ignore[misc]
                )
                for device, saver in gang.savers.items()
            ]
            for end in ends:
                end.result(60)
        assert scan(tmp_path)[0].step == last
    assert [said.step for said in gang.said] == [5, 6]


def test_one_buffer_serves_all_checkpoints_of_a_plan(gang: Gang, tmp_path: Path) -> None:
    sizes = set()
    for step in (2, 4, 6):
        gang.vote(step)
        gang.settle(step + 1, gang.free)
        sizes.add(tuple(saver._staging._buffer.numel() for saver in gang.savers.values()))
    assert len(sizes) == 1
    whole = local(WHOLE, ONE, "n0/0").bytes
    assert whole <= sum(next(iter(sizes))) < 1.1 * whole, "each element once, over all ranks"


@pytest.mark.parametrize("room", [None, 1000])
def test_a_rank_whose_disk_is_full_says_so_in_plain_words_and_nobody_else_does(
    room: int | None, gang: Gang, tmp_path: Path
) -> None:
    disk = gang.disks["n1/0"]
    disk.broken, disk.room = room is None, room
    gang.vote(2)
    gang.settle(3, gang.free)
    assert [(said.step, said.plan, said.reason) for said in gang.failed] == [
        (2, 7, f"could not write: no space left in {tmp_path}")
    ]
    assert not scan(tmp_path)


def test_a_rank_whose_folder_another_removed_tells_no_failure_of_its_own(gang: Gang, tmp_path: Path) -> None:
    full, *slow = reversed(gang.savers)
    gang.disks[full].broken = True
    for device in slow:
        gang.disks[device].go.clear()
    gang.vote(2)
    until(lambda: gang.savers[full].word % 8 == Status.FAILED)
    words = [saver.word for saver in gang.savers.values()]
    gang.savers[full].voted(3, words, gang.layouts, lambda: gang.states[full])
    until(lambda: not names(tmp_path))
    for device in slow:
        gang.disks[device].go.set()
        until(lambda device=device: gang.savers[device].word % 8 == Status.FAILED)
        gang.savers[device].voted(3, words, gang.layouts, lambda device=device: gang.states[device])  # type: ignore[misc]
    gang.settle(5, gang.free)
    assert [said.reason for said in gang.failed] == [f"could not write: no space left in {tmp_path}"]


def test_a_folder_that_nobody_gave_up_and_is_gone_is_told(gang: Gang, tmp_path: Path) -> None:
    slow = next(iter(gang.savers))
    gang.disks[slow].go.clear()
    gang.vote(2)
    others = [saver for device, saver in gang.savers.items() if device != slow]
    until(lambda: all(saver.word % 8 == Status.WRITTEN for saver in others))
    shutil.rmtree(next(tmp_path.glob("step-*")))
    gang.disks[slow].go.set()
    gang.settle(3, gang.free)
    (said,) = gang.failed
    assert said.reason.startswith("could not write: no such file or directory")


def test_a_checkpoint_that_the_first_rank_cannot_complete_is_told(
    gang: Gang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, *rest: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gang.disks[gang.layouts.plan.members[0]], "rename", full)
    gang.vote(2)
    gang.settle(3, gang.free)
    assert [said.reason for said in gang.failed] == [f"could not complete it: no space left in {tmp_path}"]


def test_a_step_whose_checkpoint_is_skipped_is_told_as_such(gang: Gang) -> None:
    for disk in gang.disks.values():
        disk.go.clear()
    gang.vote(2)
    gang.vote(4)
    for disk in gang.disks.values():
        disk.go.set()
    gang.settle(5, gang.free)
    (said,) = gang.failed
    assert (said.step, said.skipped) == (4, True)
    assert "the checkpoint of step 2 is still being written" in said.reason


@pytest.mark.parametrize("written", [False, True])
def test_a_job_that_goes_back_leaves_no_checkpoint_of_a_later_step(
    gang: Gang, tmp_path: Path, written: bool
) -> None:
    """One that is still written, or waits for the leader's word."""
    gang.silent = True
    for disk in gang.disks.values():
        if not written:
            disk.go.clear()
    gang.vote(4)
    if written:
        gang.settle(5, lambda: gang.said)
    for _ in range(3):  # at each of the next steps
        for saver in gang.savers.values():
            saver.went_back(2)
    for disk in gang.disks.values():
        disk.go.set()
    until(lambda: gang.free() and names(tmp_path) == [])
    gang.silent = False
    gang.vote(4)
    gang.settle(5, gang.free)
    assert [item.step for item in scan(tmp_path)] == [4]
