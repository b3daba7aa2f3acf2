"""A process that ends at any operation of a checkpoint, or loses power there, leaves the one before valid."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from elasticd.checkpoints.disk import LocalDisk
from elasticd.checkpoints.folder import damages, remove, scan, sound, superfluous, tidy
from elasticd.runtime.checkpoint.loader import load
from elasticd.runtime.checkpoint.writer import Task
from tests import sizes
from tests.checkpoints.crashing import CrashingDisk
from tests.checkpoints.support import ONE, THREE, WHOLE, save, task_of, write
from tests.migration.ranks import assert_same_bits, local

ENOUGH = 10_000


def child(folder: Path, tasks: Sequence[Task], disk: CrashingDisk) -> int:
    """Writes the checkpoint of step 2, and removes that of step 1, in a process of its own; how it ended."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        write(folder, tasks, disk)
        for item in superfluous(scan(folder), 1, None):
            remove(disk, item)
        (folder.parent / "operations").write_text(str(ENOUGH - disk.left))
    finally:
        os._exit(0)


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("before") / "checkpoints"
    save(folder, ONE, 1)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("power", [False, True], ids=["kill", "power"])
def test_an_end_at_any_operation_leaves_a_valid_checkpoint(before: Path, tmp_path: Path, power: bool) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(before, folder)
    tasks = [task_of(folder, THREE, device, 2, local(WHOLE, THREE, device)) for device in THREE.plan.members]
    assert child(folder, tasks, CrashingDisk(ENOUGH)) == 0
    operations = int((tmp_path / "operations").read_text())
    assert operations > 30
    assert [item.step for item in scan(folder)] == [2]
    seen = set()
    for number in sizes.every(range(operations), 2):
        shutil.rmtree(folder)
        shutil.copytree(before, folder)
        assert child(folder, tasks, CrashingDisk(number, power=power)) == 9, f"operation {number}"
        found = scan(folder)
        assert found, f"after operation {number} there is no checkpoint"
        assert sound(found) == found, f"after operation {number}: {[item.damage for item in found]}"
        for item in found:
            assert damages(item.path) == (), f"after operation {number}"
        seen.add(found[0].step)
        tidy(LocalDisk(), folder)
        assert {item.name for item in folder.iterdir()} == {item.name for item in found}
    assert seen == {1, 2}, "both were the newest at some time"


def test_the_checkpoint_that_a_crash_left_is_loaded(before: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(before, folder)
    tasks = [task_of(folder, THREE, device, 2, local(WHOLE, THREE, device)) for device in THREE.plan.members]
    assert child(folder, tasks, CrashingDisk(20)) == 9
    (found,) = scan(folder)
    assert found.manifest is not None
    assert found.step == 1
    for device in THREE.plan.members:
        state = load(found.path, found.manifest, THREE.held(device))
        assert_same_bits(state, local(WHOLE, THREE, device))
