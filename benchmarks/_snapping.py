"""The worker of the benchmark's snapshots: a real job, whose snapshots are off in every other block of steps.

    torchrun --rdzv-backend=elasticd ... benchmarks/_snapping.py FOLDER STEPS

Each worker writes into FOLDER what each of its steps took, the processor time of its training thread, the
seconds for which that was held up by the snapshot of the state after the step, and after steps without one what
a plain copy of as many bytes takes, while the other workers make theirs.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from elasticd_migration.local_state import LocalState
from elasticd_planner.layout.layouts import Layouts

import elasticd
from elasticd.models import Decoder, DecoderConfig, next_token_loss
from elasticd.runtime.snapshot.snapshotter import Snapshotter

CONFIG = DecoderConfig(vocabulary=256, width=512, layers=16, heads=8, kv_heads=4, hidden=1344)
#: Steps of a block; its first is not counted: what the block before has under way may reach into it.
BLOCK = 5
TOKENS = 8


class Text:
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 256, (TOKENS + 1,), generator=torch.Generator().manual_seed(index))
        return {"inputs": ids[:-1], "targets": ids[1:]}


def wanted(step: int) -> bool:
    """Whether the state after so many steps is to be kept."""
    return (step - 1) // BLOCK % 2 == 1


class Watched(Snapshotter):
    """Snapshots as they are, in their blocks alone; tells which were made."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.made: set[int] = set()
        self.held_up: dict[int, float] = {}  # seconds, by the updates that the state of the snapshot had

    def ready(self, plan: int, step: int) -> bool:
        return wanted(step) and super().ready(plan, step)

    def voted(
        self, step: int, bits: tuple[bool, ...], layouts: Layouts, state: Callable[[], LocalState]
    ) -> None:
        super().voted(step, bits, layouts, state)
        if all(bits):
            self.made.add(step)
            self.held_up[step] = self.copy_seconds

    def copied(self) -> None:
        super().copied()
        if self.held_up:
            self.held_up[max(self.held_up)] = self.copy_seconds


class Plainly:
    """One copy of as many bytes as a snapshot has, into memory that is in use."""

    def __init__(self) -> None:
        self._from = self._to = torch.empty(0, dtype=torch.uint8)

    def __call__(self, size: int) -> float:
        if self._from.numel() != size:
            self._from, self._to = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
        start = time.perf_counter()
        self._to.copy_(self._from)
        return time.perf_counter() - start


def main(folder: str, steps: int) -> None:
    import elasticd.runtime.api.job as runtime

    runtime.Snapshotter = Watched  # type: ignore[misc]
    with torch.device("meta"):
        model = Decoder(CONFIG).describe()
    job = elasticd.Job(
        model=model,
        loss=next_token_loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
        dataset=Text(),
        global_batch=4,
        micro_batch=1,
        checkpointing=elasticd.CheckpointingOptions(snapshot_every=1),
    )
    snapshotter, plainly = job._snapshotter, Plainly()
    assert isinstance(snapshotter, Watched)
    found: list[dict[str, Any]] = []
    since, worked = time.perf_counter(), time.thread_time()
    for step in job.steps(steps):
        number = step.index + 1
        found.append(
            {
                "step": number,
                "seconds": time.perf_counter() - since,
                "processor": time.thread_time() - worked,
                "on": wanted(number),
                "made": number in snapshotter.made,
                "plain": plainly(snapshotter.bytes) if not wanted(number) else 0.0,
            }
        )
        since, worked = time.perf_counter(), time.thread_time()
    for each in found:
        each["copy"] = snapshotter.held_up.get(each["step"], 0.0)
    body = {"bytes": snapshotter.bytes, "steps": found}
    (Path(folder) / f"{job.device.replace('/', ':')}.json").write_text(json.dumps(body))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
