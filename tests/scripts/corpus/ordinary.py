"""Small common pieces of the scripts: a corpus of tokens, a plain model, and the loop of plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

import elasticd

WIDTH, HEADS, VOCABULARY, TOKENS = 8, 2, 11, 6
#: Steps of a script; samples of a step, of which each is a micro-batch; the seed of its job.
STEPS, BATCH, SEED = 45, 4, 3
#: indices of the samples of each step
Order = Sequence[Sequence[int]]


@dataclass
class Outcome:
    """The result of a script: the loss of each step, the last weights by the job's names, and its notes."""

    losses: list[float]
    weights: dict[str, Tensor]
    notes: dict[str, float] = field(default_factory=dict)


class Text:
    """Rows of tokens and those that follow them, each a function of its index."""

    def __init__(self, size: int = 64, first: int = 0) -> None:
        self.size, self.first = size, first

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.first + index)
        ids = torch.randint(0, VOCABULARY, (TOKENS + 1,), generator=generator)
        return {"inputs": ids[:-1], "targets": ids[1:]}


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(TOKENS, WIDTH)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        ids = batch["inputs"]
        return self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


class Network(nn.Module):
    """A plain model: what a user has before elasticd."""

    def __init__(self, block: Any = Block, embed: Any = Embed, head: Any = Head, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.head = embed(), head()
        self.blocks = nn.ModuleList(block() for _ in range(layers))

    def forward(self, batch: dict[str, Tensor]) -> Any:
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def made(make: Callable[[], Any] = Network) -> Any:
    """The model with its first values, in float64."""
    torch.manual_seed(0)
    model = make()
    return model.double()


def token_loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Any]:
    """Sum and count, as a job wants its loss."""
    targets = batch["targets"]
    total = nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, (targets != -100).sum()


def arguments(gpt: Any, **changes: Any) -> dict[str, Any]:
    """The arguments that the jobs of most scripts have in common."""
    if "model" not in changes:
        changes["model"] = elasticd.Model(embed=gpt.embed, blocks=gpt.blocks, head=gpt.head)
    common = {
        "loss": token_loss,
        "dataset": Text(),
        "global_batch": BATCH,
        "seed": SEED,
    }
    return common | changes


def cut_model(gpt: Any) -> elasticd.Model:
    """The model with rules for TP groups, whose `up` and `down` are cut in columns and rows."""
    rules = {"blocks.*.up.*": elasticd.Column("columns"), "blocks.*.down.*": elasticd.Row("columns")}
    return elasticd.Model(embed=gpt.embed, blocks=gpt.blocks, head=gpt.head, rules=rules, width=WIDTH)


def trained(**arguments: Any) -> None:
    """Makes the job and takes all its steps."""
    for _step in elasticd.Job(**arguments).steps(STEPS):
        pass


def loop(
    model: Any,
    optimizer: torch.optim.Optimizer,
    order: Order,
    dataset: Any = None,
    *,
    loss: Callable[..., tuple[Tensor, Any]] = token_loss,
    collate: Callable[[list[Any]], Any] = default_collate,
    scheduler: Any = None,
    clip: float | None = None,
    after: Callable[[int, float], Any] = lambda step, loss: None,
) -> Outcome:
    """The loop of plain torch. `after` is called after each step; it ends the loop if it returns True."""
    dataset, losses = dataset or Text(), []
    for step, indices in enumerate(order):
        batch = collate([dataset[index] for index in indices])
        total, count = loss(model(batch), batch)
        optimizer.zero_grad()
        (total / count).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(float(total.detach()) / float(count))
        if after(step, losses[-1]):
            break
    return Outcome(losses, weights_of(model))


def weights_of(model: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def held_out_loss(model: Any, dataset: Any, collate: Callable[[list[Any]], Any] = default_collate) -> float:
    """The mean loss over a set, in plain torch."""
    with torch.no_grad():
        batch = collate([dataset[index] for index in range(len(dataset))])
        total, count = token_loss(model(batch), batch)
    return float(total) / float(count)


def parameters(named: Iterable[tuple[str, Tensor]]) -> list[Tensor]:
    return [parameter for _, parameter in named]
