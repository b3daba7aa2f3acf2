"""One process of four that train a Qwen3-MoE of transformers: its experts as ours, and as transformers' own.

Each process takes a sample of its own through attention, and has two of the eight experts of each block, to
which rows go from all. Ours are four lanes of one stage that share experts, with the optimizer's state sharded;
transformers' own are `DistributedConfig(fsdp_size=4, ep_size=4)`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.plan import HeldExperts, ModulePlan, Pipeline, Plan, Stage, StatePolicy, Strategy

import elasticd
from elasticd.models import next_token_loss
from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.in_memory import unpaced
from elasticd.runtime.engine.engine import Engine, first_state
from elasticd.runtime.engine.recipe import Recipe

DEVICES = ("a/0", "a/1", "b/0", "b/1")
HELD: HeldExperts = ((0, 1), (2, 3), (4, 5), (6, 7))
LAYERS, TOKENS, WORDS, WIDTH = 4, 256, 256, 256


def model() -> Any:
    """A small one, with random weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=WIDTH // 4,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=2 * WIDTH,
        tie_word_embeddings=False,
    )
    return Qwen3MoeForCausalLM(config)


class Words:
    """Samples of random words."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, WORDS, (TOKENS + 1,), generator=torch.Generator().manual_seed(index))
        return {"inputs": ids[:-1], "targets": ids[1:]}


def optimizer(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-4)


def ours(device: str, store: Any) -> Callable[[int], float]:
    """A step of four lanes that share experts; gives its loss."""
    stage = Stage(
        start=0, stop=LAYERS, devices=DEVICES, shares=(1,) * 4, lanes=(1,) * 4, experts=(HELD,) * LAYERS
    )
    pipeline = Pipeline(stages=(stage,), micro_batches=4, rows=(1,) * 4)
    plan = Plan(
        number=1,
        strategies=(Strategy(modules=(ModulePlan(module="model", pipelines=(pipeline,)),)),),
        micro_batch=1,
        global_batch=4,
        state=StatePolicy(zero=1, replicas=1),
    )
    described = elasticd.from_hf(model(), experts="experts")
    recipe = Recipe(
        model=described, loss=next_token_loss, optimizer=optimizer, dataset=Words(), global_batch=4, seed=0
    )
    layouts = Layouts(described.spec, plan)
    engine = Engine(recipe, layouts, PlanGroups("step", device, "127.0.0.1", store), unpaced)
    engine.adopt(first_state(described, layouts, device, 0))

    def step(number: int) -> float:
        done = engine.step(number, lambda: 0, lambda: 0)
        engine.settle()
        return float(done.outcome.vote.loss or 0.0)

    return step


def theirs(place: int, folder: str) -> Callable[[int], float]:
    """A step of transformers' own experts and FSDP; gives its loss."""
    from transformers import Qwen3MoeForCausalLM
    from transformers.distributed import DistributedConfig

    split = Qwen3MoeForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(fsdp_size=len(DEVICES), ep_size=len(DEVICES))
    )
    update, data = optimizer(split.named_parameters()), Words()

    def step(number: int) -> float:
        sample = data[number * len(DEVICES) + place]
        update.zero_grad()
        logits = split(input_ids=sample["inputs"][None]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), sample["targets"])
        loss.backward()
        update.step()
        return float(loss.detach())

    return step


def worker(device: str, store: Any, folder: str, steps: int) -> dict[str, Any]:
    """Steps of both, in turn. Returns their seconds, and losses of the first step."""
    torch.set_num_threads(1)
    place = DEVICES.index(device)
    os.environ |= {"RANK": str(place), "LOCAL_RANK": str(place), "WORLD_SIZE": str(len(DEVICES))}
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(Path(folder) / "store"), len(DEVICES)),
        rank=place,
        world_size=len(DEVICES),
    )
    ways = {"ours": ours(device, store), "theirs": theirs(place, folder)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    losses: dict[str, float] = {}
    for number in range(steps):
        for name in sorted(ways, reverse=bool(number % 2)):
            dist.barrier()
            began = time.perf_counter()
            loss = ways[name](number)
            dist.barrier()
            seconds[name].append(time.perf_counter() - began)
            losses.setdefault(name, loss)
    return {"seconds": seconds, "losses": losses}
