"""The last checkpoint, by ranks that a fault left at different points of it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from elasticd_planner.layout.layouts import Layouts

from elasticd.checkpoints.folder import damages, scan
from elasticd.runtime.checkpoint.saver import Saver
from tests.checkpoints.support import SPEC_OF_JOB, THREE
from tests.checkpoints.test_saver import Gang


def finish(gang: Gang, step: int) -> None:
    """All ranks at once, as members of one plan do."""
    words: dict[str, int] = {}
    barrier = threading.Barrier(len(gang.savers))

    def run(device: str) -> None:
        def gather(word: int) -> list[int]:
            words[device] = word
            barrier.wait(60)
            told = [words[name] for name in gang.savers]
            barrier.wait(60)
            return told

        gang.savers[device].finish(step, gather, gang.layouts, lambda: gang.states[device])

    with ThreadPoolExecutor(len(gang.savers)) as pool:
        for end in [pool.submit(run, device) for device in gang.savers]:
            end.result(120)


@pytest.mark.parametrize("began", [True, False])
def test_what_some_had_made_and_one_that_came_later_had_not_is_made_by_all(began: bool, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    gang = Gang(tmp_path, THREE)
    savers = list(gang.savers.values())
    try:
        if began:  # a fault gave it up
            gang.disks["n1/0"].broken = True
            gang.vote(6)
            gang.settle(7, gang.free)
            gang.disks["n1/0"].broken = False
        else:
            device = gang.layouts.plan.members[-1]
            gang.vote(6)
            gang.settle(7, gang.free)
            saver = gang.savers[device]
            gang.savers[device] = Saver(
                saver.options, SPEC_OF_JOB, device, gang._tell, lambda: gang.lost, gang.disks[device]
            )
            savers.append(gang.savers[device])
        gang.layouts = Layouts(gang.layouts.spec, gang.layouts.plan.replace(number=9))
        finish(gang, 6)
        newest = scan(tmp_path)[0]
        assert (newest.step, newest.plan) == (6, 9)
        assert damages(newest.path) == ()
        assert gang.free()
    finally:
        for saver in savers:
            saver.end()
