"""The worker of a test of `elasticd.live`: features of training scripts, drawn together into one loop.

Three optimizers in a step, one of two groups, one of bfloat16 parameters with float32 masters and moments;
schedulers, an average, a scaler that leaves updates out, four micro-batches, tied embeddings, a frozen part,
and vectors shorter than the number of ranks. `train` is the body for the job's ranks and for the one process of
plain torch that they are compared with.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from elasticd_planner.spec.batch import Sampler
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from elasticd import State, live
from elasticd.runtime.live.live_state import LiveTensors
from tests.integration.train_live import BATCH, SEED, WORDS, Block, Text, die_at, whole

MESHES = {"ddp": ("dp",), "fsdp": ("shard",), "hsdp": ("replicate, shard", "shard")}
WIDTH, MICRO_BATCHES, CLIP = 30, 4, 0.3
#: Steps whose updates a scaler leaves out: all of them, and all but those of the bfloat16 part.
ALL_SKIPPED, SOME_SKIPPED = 3, 7


class Low(nn.Module):
    """A part in bfloat16, whose gradients are the same for all samples, and exact in any mean over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 42).view(7, 6).bfloat16())

    def forward(self, index: int) -> Tensor:
        at = torch.arange(42).view(7, 6)
        pattern = 3.0 * 2.0 ** -((at + index) % 5) * (1 - 2 * ((at * 7 + index) % 2))
        return (self.weight * pattern.bfloat16()).float().sum()


class Rich(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.gate = nn.Parameter(torch.ones(2))  # shorter than the number of ranks
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))
        self.double()
        self.low = Low()

    def forward(self, tokens: Tensor, index: int) -> tuple[Tensor, Tensor]:
        self.passes += 1
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.gate[0] + self.frozen(x) * self.gate[1]), self.low(index)


class MasterAdam(torch.optim.Optimizer):
    """Adam of low-precision parameters, with masters and moments in float32."""

    def __init__(self, params: Iterable[Tensor], rate: float) -> None:
        super().__init__(params, {"lr": rate})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, gradient = self.state[parameter], parameter.grad.float()
                if not state:
                    state["step"], state["master"] = 0, parameter.detach().float().clone()
                    state["mean"], state["square"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
                state["step"] += 1
                state["mean"].mul_(0.9).add_(gradient, alpha=0.1)
                state["square"].mul_(0.99).add_(gradient * gradient, alpha=0.01)
                state["master"].sub_(state["mean"] / (state["square"].sqrt() + 1e-6), alpha=group["lr"])
                parameter.copy_(state["master"])


class Count:
    """An object of the script's own, with state."""

    def __init__(self) -> None:
        self.skipped = 0

    def state_dict(self) -> dict[str, int]:
        return {"skipped": self.skipped}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skipped = state["skipped"]


def state_of(model: nn.Module, average: AveragedModel) -> State:
    own = getattr(model, "module", model)
    matrices = [p for block in own.blocks for p in block.parameters() if p.dim() > 1]
    vectors = [p for block in own.blocks for p in block.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 1e-3}]
    adam = torch.optim.AdamW(groups, lr=3e-3)
    sgd = torch.optim.SGD([own.embed.weight, own.head.bias, own.gate], lr=0.05, momentum=0.9, nesterov=True)
    warm = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: min(1.0, (step + 1) / 10))
    return State(
        model=model,
        optimizer=[adam, sgd, MasterAdam(own.low.parameters(), 2.0**-6)],
        scheduler=[warm, torch.optim.lr_scheduler.StepLR(sgd, 4)],
        ema=average,
        scaler=torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3),
        extra={"count": Count()},
    )


def averaged(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))


def sharded(model: Any, mesh: Any) -> None:
    for block in (*model.blocks, model.low):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def build_of(kind: str) -> Any:
    def build(mesh: Any) -> State:
        model = Rich()
        average = averaged(model)
        if kind == "ddp":
            return state_of(nn.parallel.DistributedDataParallel(model), average)
        sharded(model, mesh)
        sharded(average.module, mesh)
        return state_of(model, average)

    return build


def synced(model: nn.Module, last: bool) -> Any:
    """Reduces gradients in the last micro-batch alone."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return nullcontext() if last else model.no_sync()
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
    return nullcontext()


def train(state: State, batch: Tensor, index: int, scale: float, told: Any) -> None:
    """The body of a step. `told` gets the loss before the optimizers step."""
    adam, sgd, master = state.optimizers
    total = 0.0
    parts = batch.tensor_split(MICRO_BATCHES)
    for number, part in enumerate(parts):
        with synced(state.model, number == MICRO_BATCHES - 1):
            logits, low = state.model(part[:, :-1], index)
            targets = part[:, 1:].flatten()
            loss = F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum") / batch[:, 1:].numel()
            total += float(loss.detach())
            if index in (ALL_SKIPPED, SOME_SKIPPED):
                loss = loss * math.inf
            if index == ALL_SKIPPED:
                low = low * math.inf
            state.scaler.scale(loss * scale + low / MICRO_BATCHES).backward()
    told(total)
    state.scaler.unscale_(adam)
    nn.utils.clip_grad_norm_([p for group in adam.param_groups for p in group["params"]], CLIP)
    before = state.scaler.get_scale()
    for optimizer in (adam, sgd, master):
        state.scaler.step(optimizer)
    state.scaler.update()
    if state.scaler.get_scale() < before:
        state.extra["count"].skipped += 1
    else:
        for scheduler in state.schedulers:
            scheduler.step()
    state.ema.update_parameters(getattr(state.model, "module", state.model))
    for optimizer in (adam, sgd, master):
        optimizer.zero_grad()


def results(state: State, names: tuple[str, ...]) -> dict[str, Tensor]:
    """All of a state, as plain tensors by name. Call it on all ranks."""
    tensors = LiveTensors(state, names)
    known = {id(kept.tensor): name for name, kept in tensors._kept.items()}
    found = {name: whole(kept.tensor) for name, kept in tensors._kept.items()}
    for optimizer in state.optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for key, value in sorted(optimizer.state[parameter].items()):
                    value = whole(value) if isinstance(value, Tensor) else torch.tensor(value)
                    found[f"{known[id(parameter)]} {key}"] = value
        found[f"rates of {type(optimizer).__name__}"] = torch.tensor(
            [group["lr"] for group in optimizer.param_groups], dtype=torch.float64
        )
    found["scale"] = torch.tensor(state.scaler.get_scale())
    found["grown"] = torch.tensor(state.scaler.state_dict()["_growth_tracker"])
    found["skipped"] = torch.tensor(state.extra["count"].skipped)
    found["schedules"] = torch.tensor([each.last_epoch for each in state.schedulers])
    return found


def reference(steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and the state of one process of plain torch."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = Rich()
        state = state_of(model, averaged(model))
    sampler, data, losses = Sampler(size=100, global_batch=BATCH, seed=SEED), Text(), list[float]()
    for index in range(steps):
        batch = torch.stack([data[i] for i in sampler.samples(index)])
        train(state, batch, index, 1.0, losses.append)
    return losses, results(state, ())


def main() -> None:
    options = json.loads(os.environ["OPTIONS"])
    out, kind = Path(options["out"]), options["kind"]
    torch.set_num_threads(1)
    running = live(
        build_of(kind), batch=BATCH, steps=options["steps"], meshes=MESHES[kind], data=Text(), seed=SEED
    )
    me = running.device.replace("/", "-")
    ledger = (out / f"ledger-{me}-{os.getpid()}").open("a", buffering=1)
    begin = die_at(*options["dies"][running.device]) if running.device in options.get("dies", {}) else None
    for step in running:
        with step:
            if begin is not None:
                begin(step.index, step.state.model)
            train(step.state, step.data, step.index, step.scale, partial(setattr, step, "loss"))
        if step.made:
            entry = [step.index, step.total, list(step.indices), running.plan.number, time.time()]
            ledger.write(json.dumps(entry) + "\n")
    if running.plan is not None:
        found = results(running.state, running.plan.names)
        torch.save(found, out / f"{me}.new")
        os.replace(out / f"{me}.new", out / f"state-{me}")


if __name__ == "__main__":
    main()
