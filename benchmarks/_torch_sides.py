"""The same training by torch's own means, for the runtime's benchmark: DDP, parallelize_module, pipelining.

Each function makes one rank's `step(index) -> loss`, where the loss is a mean over what this rank computed it
of, or None where it computed none. The default group stands, with as many ranks as the plan has.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from _trained import StepOf, Text, adamw, filled
from elasticd_planner.spec.batch import Sampler
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from elasticd.models import DecoderConfig, next_token_loss
from elasticd.runtime.data.collate import pad


def ddp(
    rank: int, config: DecoderConfig, data: Text, sampler: Sampler, micro_batch: int, micro_batches: int
) -> StepOf:
    """Each rank takes its part of the batch; gradients are averaged in the last pass of a step."""
    model = DistributedDataParallel(filled(config))
    optimizer, own = adamw(model.named_parameters()), micro_batch * micro_batches

    def step(index: int) -> float:
        ids = sampler.samples(index)[rank * own : (rank + 1) * own]
        optimizer.zero_grad()
        loss = 0.0
        for first in range(0, own, micro_batch):
            batch = pad([data[i] for i in ids[first : first + micro_batch]])
            with nullcontext() if first + micro_batch == own else model.no_sync():
                total, count = next_token_loss(model(batch), batch)
                mean = total / (count * micro_batches)
                mean.backward()
            loss += float(mean.detach())
        optimizer.step()
        return loss

    return step


def tensor_parallel(
    rank: int, ranks: int, config: DecoderConfig, data: Text, sampler: Sampler, micro_batch: int
) -> StepOf:
    """All ranks in one group, which splits every matrix; micro-batches accumulate."""
    model = filled(config)
    mesh = init_device_mesh("cpu", (ranks,))
    for block in model.blocks:
        plan = {
            "attention.q": ColwiseParallel(),
            "attention.k": ColwiseParallel(),
            "attention.v": ColwiseParallel(),
            "attention.o": RowwiseParallel(),
            "feed_forward.gate": ColwiseParallel(),
            "feed_forward.up": ColwiseParallel(),
            "feed_forward.down": RowwiseParallel(),
        }
        attention = block.attention
        attention.heads, attention.kv_heads = config.heads // ranks, config.kv_heads // ranks
        parallelize_module(block, mesh, plan)
    parallelize_module(
        model,
        mesh,
        {
            "embed.tokens": RowwiseParallel(input_layouts=Replicate()),
            "head.output": ColwiseParallel(output_layouts=Replicate()),
        },
    )
    optimizer = adamw(model.named_parameters())

    def step(index: int) -> float:
        ids = sampler.samples(index)
        optimizer.zero_grad()
        losses, counts = 0.0, 0
        for first in range(0, len(ids), micro_batch):
            batch = pad([data[i] for i in ids[first : first + micro_batch]])
            total, count = next_token_loss(model(batch), batch)
            (total / (count * len(ids) // micro_batch)).backward()
            losses, counts = losses + float(total.detach()), counts + count
        optimizer.step()
        return losses / counts

    return step


class _Part(nn.Module):
    """The blocks of one stage, with what begins and ends the model."""

    def __init__(self, embed: nn.Module | None, blocks: list[nn.Module], head: nn.Module | None) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = embed, nn.ModuleList(blocks), head

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed({"inputs": x}) if self.embed is not None else x
        for block in self.blocks:
            x = block(x)
        return self.head(x) if self.head is not None else x


def pipelined(
    kind: str,
    rank: int,
    ranks: int,
    config: DecoderConfig,
    data: Text,
    sampler: Sampler,
    micro_batches: int,
) -> StepOf:
    """Equal stages, "GPipe" or "1F1B"."""
    model = filled(config)
    each = config.layers // ranks
    part = _Part(
        model.embed if rank == 0 else None,
        list(model.blocks[rank * each : (rank + 1) * each]),
        model.head if rank == ranks - 1 else None,
    )
    made = PipelineStage(part, rank, ranks, torch.device("cpu"))

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), targets.flatten())

    schedule = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}[kind](made, micro_batches, loss_fn=loss)
    optimizer = adamw(part.named_parameters())

    def step(index: int) -> float | None:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if rank == 0:
            batch = pad([data[i] for i in sampler.samples(index)])
            schedule.step(batch["inputs"])
        elif rank == ranks - 1:
            batch = pad([data[i] for i in sampler.samples(index)])
            schedule.step(target=batch["targets"], losses=losses)
        else:
            schedule.step()
        optimizer.step()
        return float(torch.stack(losses).mean()) if losses else None

    return step
