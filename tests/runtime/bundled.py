"""A model of which every section gives named tensors, and the same model as plain torch trains it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from elasticd_planner.spec.box import Box
from torch import Tensor, nn

from elasticd.models import next_token_loss
from elasticd.runtime.accelerator import CPU, Accelerator
from elasticd.runtime.comm.communicators import Connect, GlooCommunicators
from elasticd.runtime.data.collate import pad
from elasticd.runtime.engine.parallelism import ParallelismOptions
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.model.model import Model
from elasticd.runtime.model.tp_rules import Column, Row, UnitsOf

LAYERS, WIDTH, HEADS, VOCABULARY, BATCH, SEED = 6, 16, 4, 23, 8, 5
#: The block that reads the feature, as DeepStack has it. It is gone after that.
READS = 3
RULES = {"blocks.*.[qkv].*": Column("heads"), "blocks.*.o.weight": Row("heads")}

Named = dict[str, Tensor]


class Embed(nn.Module):
    """Hidden states, and what blocks need beside them: integers, a mask, a feature with a gradient, a table."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.float64)
        self.feature = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, batch: Mapping[str, Tensor]) -> Named:
        ids = batch["inputs"]
        positions = torch.arange(ids.shape[1], device=ids.device).repeat(len(ids), 1)
        hidden = self.tokens(ids)
        angles = torch.arange(1, 1 + WIDTH, device=ids.device).outer(torch.arange(64, device=ids.device))
        return {
            "positions": positions,
            "hidden": hidden,
            "real": (batch["targets"] != -100)[:, None, None],
            "feature": torch.tanh(self.feature(hidden)),
            "table": (angles / WIDTH).to(hidden.dtype).cos().T,
        }


class Block(nn.Module):
    """Attention of the real tokens, with positions. The first block adds a gate, which the head reads,
    and something that nobody reads."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.heads = index, HEADS
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        self.q, self.k, self.v, self.o = (
            nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64) for _ in range(4)
        )
        if index == 0:
            self.gate = nn.Linear(WIDTH, 2, dtype=torch.float64)
            self.unread = nn.Linear(WIDTH, 1, dtype=torch.float64)  # it has no gradient, and is not decayed

    def forward(self, bundle: Named) -> Named:
        x = bundle["hidden"]
        y = self.norm(x + bundle["table"][bundle["positions"]])
        if self.index == READS:
            y = y + bundle["feature"]
        q, k, v = (part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bundle["real"])
        made = {**bundle, "hidden": x + self.o(y.transpose(1, 2).flatten(2))}
        if self.index == 0:
            gate = self.gate(x).softmax(-1)
            made |= {"gate": gate, "busy": gate.detach().sum((0, 1)), "spare": self.unread(self.norm(x))}
        if self.index == READS:
            del made["feature"]
        return made


class Head(nn.Module):
    """Logits, and what the loss adds to theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(WIDTH, VOCABULARY, dtype=torch.float64)

    def forward(self, bundle: Named) -> Named:
        real = bundle["real"].flatten(1)[..., None]
        return {
            "logits": self.output(bundle["hidden"]),
            "balance": (bundle["gate"].square() * real).sum() + 0 * bundle["busy"].sum(),
        }


class Whole(nn.Module):
    """All sections after each other, in one autograd graph. `frozen` are not trained, `blocks` of a kind of
    their own."""

    def __init__(self, frozen: Collection[str] = (), blocks: Mapping[int, type[Block]] | None = None) -> None:
        super().__init__()
        kinds = dict.fromkeys(range(LAYERS), Block) | dict(blocks or {})
        self.embed, self.head = Embed(), Head()
        self.blocks = nn.ModuleList(kind(index) for index, kind in kinds.items())
        for section in frozen:
            self.get_submodule(section).requires_grad_(False)

    def forward(self, batch: Mapping[str, Tensor]) -> Named:
        bundle = self.embed(batch)
        for block in self.blocks:
            bundle = block(bundle)
        made: Named = self.head(bundle)
        return made


def loss(output: Named, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    """That of the next token, and a sum over tokens beside it."""
    total, count = next_token_loss(output["logits"], batch)
    return total + output["balance"], count


class Text:
    """Samples of unequal length, each a function of its index."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, VOCABULARY, (5 + index % 7,), generator=generator)
        return {"inputs": ids[:-1], "targets": ids[1:]}


def make_recipe(
    accelerator: Accelerator = CPU,
    connect: Connect = GlooCommunicators,
    frozen: Collection[str] = (),
    blocks: Mapping[int, type[Block]] | None = None,
    **options: Any,
) -> Recipe:
    """See `Whole`; `options`: of parallelism."""
    with torch.device("meta"):
        whole = Whole(frozen, blocks)
    model = Model(
        embed=whole.embed,
        blocks=list(whole.blocks),
        head=whole.head,
        rules=RULES,
        units={"heads": UnitsOf(attribute="blocks.*.heads")},
        name="bundled",
    )
    return Recipe(
        model=model,
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2, weight_decay=0.1),
        dataset=Text(),
        global_batch=BATCH,
        seed=SEED,
        accelerator=accelerator,
        connect=connect,
        parallelism=ParallelismOptions(**options),
    )


@cache
def reference(steps: int, frozen: tuple[str, ...] = ()) -> tuple[list[float], dict[str, Tensor], float]:
    """Plain torch: losses of the steps, parameters after them, and the mean loss over samples 0 to 10."""
    recipe, whole = make_recipe(frozen=frozen), Whole(frozen)
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            parameter.copy_(recipe.model.first_value(name, Box.whole(parameter.shape), SEED))
    optimizer = torch.optim.AdamW(
        [each for each in whole.parameters() if each.requires_grad], lr=1e-2, weight_decay=0.1
    )
    losses = []
    for step in range(steps):
        batch = pad([Text()[i] for i in recipe.sampler.samples(step)])
        total, count = loss(whole(batch), batch)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        losses.append(float(total.detach()) / count)
    with torch.no_grad():
        batch = pad([Text()[i] for i in range(11)])
        total, count = loss(whole(batch), batch)
    return losses, {name: p.detach() for name, p in whole.named_parameters()}, float(total) / count
