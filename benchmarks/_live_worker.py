"""The worker of the benchmarks of `elasticd.live`: a loop of its own over DDP, HSDP or FSDP.

    elasticd run ... benchmarks/_live_worker.py FOLDER STEPS OPTIONS

Options as JSON: `kind`, of `MESHES`; `seconds` of compute beside each step, which are slept. Each made step is
a line in the ledger of this process: its number, plan and samples, when its body began and when it counted.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import elasticd

MESHES = {"ddp": ("dp",), "hsdp": ("replicate, shard", "shard"), "fsdp": ("shard",)}
BATCH, TOKENS, WORDS, SEED, WIDTH, BLOCKS = 24, 16, 256, 0, 128, 4
SIZE = 4096


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, -1)).unbind(-2)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Text:
    """Samples by their index."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(WORDS, (TOKENS + 1,), generator=torch.Generator().manual_seed(index))


def wrapped(kind: str, mesh: Any, **options: Any) -> nn.Module:
    """The model under DDP or fully_shard; `options` go to DDP."""
    model = Net()
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model, **options)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def build_of(kind: str) -> Any:
    def build(mesh: Any) -> elasticd.State:
        model = wrapped(kind, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10_000)
        return elasticd.State(model=model, optimizer=optimizer, scheduler=schedule)

    return build


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def main() -> None:
    folder, steps, options = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    torch.set_num_threads(1)
    kind = options["kind"]
    live = elasticd.live(build_of(kind), batch=BATCH, steps=steps, meshes=MESHES[kind], data=Text(), seed=SEED)
    ledger = (folder / f"ledger-{live.device.replace('/', ':')}-{os.getpid()}").open("w", buffering=1)
    for step in live:
        began = time.monotonic()
        with step:
            state = step.state
            time.sleep(options["seconds"])
            step.loss = loss = loss_of(state.model, step.data)
            (loss * step.scale).backward()
            state.optimizer.step()
            state.scheduler.step()
            state.optimizer.zero_grad()
        if step.made:
            loss = step.total if step.total == step.total else 0.0  # another rank's vote decided it
            line = {"step": step.index, "plan": live.plan.number, "loss": loss, "samples": [*step.indices]}
            ledger.write(json.dumps({**line, "began": began, "time": time.monotonic()}) + "\n")


if __name__ == "__main__":
    main()
