"""Python calls and counted instructions of a step of `elasticd.live` in one process, beside plain torch's.

    python benchmarks/_live_instructions.py KIND BUFFERS    # the calls of both sides, as JSON

KIND: see `_live_worker`. BUFFERS: MiB of buffers, which a step that comes again begins with as they were.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from _instructions import WARM, report
from _live_worker import BATCH, MESHES, Text, loss_of, wrapped
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import default_collate

import elasticd

#: Steps that the loop has at most; callgrind counts a few.
MANY = 1_000_000


def made(kind: str, mesh: Any, buffers: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A model, its optimizer and its schedule."""
    model = wrapped(kind, mesh)
    getattr(model, "module", model).register_buffer("table", torch.zeros(buffers << 18))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, MANY)


def step_of(model: nn.Module, optimizer: Any, schedule: Any, batch: Any, told: Callable[[Any], None]) -> None:
    """The body of both sides."""
    loss = loss_of(model, batch)
    told(loss)
    loss.backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()


def ours(kind: str, buffers: int) -> Callable[[], None]:
    """A step of the loop, with all between it and the one before."""

    def build(mesh: Any) -> elasticd.State:
        model, optimizer, schedule = made(kind, mesh, buffers)
        return elasticd.State(model=model, optimizer=optimizer, scheduler=schedule)

    steps = iter(elasticd.live(build, batch=BATCH, steps=MANY, meshes=MESHES[kind], data=Text()))

    def step() -> None:
        each = next(steps)
        with each:
            state = each.state
            step_of(
                state.model,
                state.optimizer,
                state.scheduler,
                each.data,
                lambda loss: setattr(each, "loss", loss),
            )

    return step


def plain(kind: str, buffers: int) -> Callable[[], None]:
    """A step of a loop of plain torch."""
    mesh = init_device_mesh("cpu", (1,) * len(MESHES[kind][0].split(",")))
    model, optimizer, schedule = made(kind, mesh, buffers)
    data, count = Text(), 0

    def step() -> None:
        nonlocal count
        count += 1
        batch = default_collate([data[(count * BATCH + index) % len(data)] for index in range(BATCH)])
        step_of(model, optimizer, schedule, batch, lambda loss: None)

    return step


def sides(kind: str, buffers: int) -> dict[str, Callable[[], None]]:
    """A step of each, warm. Ours, whose first call makes the loop, goes last: there is one world at a time."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    theirs = plain(kind, buffers)
    for _ in range(WARM):
        theirs()
    gc.disable()
    loop: list[Callable[[], None]] = []

    def step() -> None:
        if not loop:
            dist.destroy_process_group()
            loop.append(ours(kind, buffers))
            for _ in range(WARM):
                loop[0]()
        loop[0]()

    return {"plain": theirs, "ours": step}


if __name__ == "__main__":
    kind, buffers, *library = sys.argv[1:]
    report(sides(kind, int(buffers)), *(library or [""]))
    os._exit(0)
