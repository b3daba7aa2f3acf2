"""One rank of four: a step of `elasticd.live` and one of plain torch, in turns, over the same processes.

Started by `live.py` with $OPTIONS: `out`, a folder; `kind`, see `_live_worker`; `pairs`; `snapshot_every`.

Plain torch has a second model of the same first values, whose step has no vote and no `with`, and whose samples
are read the same way. A barrier ends each side, so that a time is that of the slowest rank. The time of a step
of `elasticd.live` has all in it that happens between two bodies.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from _live_worker import BATCH, MESHES, SEED, Text, loss_of, wrapped
from torch import distributed as dist
from torch import nn
from torch.utils.data import default_collate

import elasticd

#: Steps before those that count.
WARM = 10


def trained(kind: str, mesh: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, of the same first values each time."""
    torch.manual_seed(SEED)
    model = wrapped(kind, mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def main() -> None:
    options = json.loads(os.environ["OPTIONS"])
    kind, data = options["kind"], Text()
    torch.set_num_threads(1)
    plain: list[tuple[nn.Module, torch.optim.Optimizer]] = []

    def build(mesh: Any) -> elasticd.State:
        plain[:] = [trained(kind, mesh)]
        model, optimizer = trained(kind, mesh)
        return elasticd.State(model=model, optimizer=optimizer)

    live = elasticd.live(
        build,
        batch=BATCH,
        steps=WARM + options["pairs"],
        meshes=MESHES[kind],
        data=data,
        seed=SEED,
        snapshot_every=options["snapshot_every"],
    )
    seconds: dict[str, list[float]] = {"ours": [], "plain": []}
    losses: dict[str, list[float]] = {"ours": [], "plain": []}
    began = time.perf_counter()
    for step in live:
        with step:
            model, optimizer = step.state.model, step.state.optimizer
            loss = loss_of(model, step.data)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()
        between = time.perf_counter()
        losses["ours"].append(float(loss.detach()))
        seconds["ours"].append(between - began)
        model, optimizer = plain[0]
        loss = loss_of(model, default_collate([data[index] for index in step.indices]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        began = time.perf_counter()
        losses["plain"].append(float(loss.detach()))
        seconds["plain"].append(began - between)
    apart = max(abs(a - b) for a, b in zip(losses["ours"], losses["plain"], strict=True))
    assert apart < 1e-4, f"the losses of both sides differ by {apart}"
    if live.rank == 0:
        found = {side: each[WARM:] for side, each in seconds.items()}
        (Path(options["out"]) / "seconds.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
