"""All that is slow to import, imported once by the process that `tests.forkserver` forks test workers from.

So are the modules of workers' scripts, pytest among them: 0.13 s of processor for each worker otherwise.

A fork copies one thread alone. So nothing here may start a thread, neither OpenMP's nor one of Python's.
"""

from __future__ import annotations

import gc
import os

import elasticd_agent.command  # noqa: F401
import elasticd_planner.__main__
import elasticd_planner.detection.stragglers
import elasticd_planner.policy.policy  # noqa: F401
import numpy.ma  # noqa: F401
import torch
import torch._dynamo  # an optimizer's first step imports it
import torch.distributed.checkpoint
import torch.distributed.run

import elasticd
import elasticd.cli.app
import elasticd.coordinator.daemon
import elasticd.dashboard.daemon
import elasticd.models
import elasticd.runtime.checking
import elasticd.runtime.checkpoint.dcp_format
import tests.accelerators.strict_process_group
import tests.accelerators.vgpu  # noqa: F401
from elasticd.runtime.comm import groups

assert torch.get_num_threads() == 1, "start the fork server with OMP_NUM_THREADS=1"
assert elasticd.Job, "the runtime is imported when a name of it is first used"

if (threads := len(os.listdir("/proc/self/task"))) != 1:
    raise AssertionError(f"importing torch and elasticd started {threads - 1} threads: a fork would lose them")

# What a child's garbage collector looks at it also writes to, and so copies.
gc.collect()
gc.freeze()


def prepare_worker() -> None:
    """Called in each worker: those of many jobs wait at the same time, for devices that sleep."""
    groups.LONGEST_PAUSE_SECONDS = 5e-3
