"""The reference step that a job makes before its first one: what it costs beside a plain step.

The job's first worker compares one step of the user's own modules with one of the engine. A plain step is the
forward and backward pass of the same modules on the same micro-batch in plain torch, with the update.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from _results import Row, row
from torch import nn
from torch.utils.data import default_collate

import elasticd
from elasticd.runtime.api.job import Job
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.reference.comparison import refuse_differences
from tests.scripts.corpus import ordinary

#: Width, layers, tokens and samples of a micro-batch; and the times that both are measured.
SIZES, SMALL = (512, 8, 256, 4, 7), (64, 2, 16, 2, 2)


class Embed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(1000, width)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.tokens(batch["inputs"])


class Rows:
    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 1000, (self.tokens + 1,), generator=torch.Generator().manual_seed(index))
        return {"inputs": ids[:-1], "targets": ids[1:]}


def rows(smallest: bool) -> Iterator[Row]:
    width, layers, tokens, micro_batch, times = SMALL if smallest else SIZES
    torch.set_num_threads(1)

    def layer() -> nn.Module:
        return nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)

    torch.manual_seed(0)
    network = ordinary.Network(layer, lambda: Embed(width), lambda: nn.Linear(width, 1000), layers)
    dataset = Rows(tokens)
    recipe = _recipe(network, dataset, micro_batch)
    batch = default_collate([dataset[index] for index in range(micro_batch)])
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)

    def plain() -> None:
        total, count = ordinary.token_loss(network(batch), batch)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()

    plain()
    refuse_differences(recipe, micro_batch)
    ratios, seconds = [], []
    for _ in range(times):
        one, compared = _seconds(plain), _seconds(lambda: refuse_differences(recipe, micro_batch))
        ratios.append(compared / one)
        seconds.append(compared)
    over = statistics.median(ratios)
    noise = (max(ratios) - min(ratios)) / over
    what = "reference step at the start of a job"
    yield row(f"{what}: over one plain step", over, "x", goal="<= 3", met=over <= 3, noise=noise)
    yield row(f"{what}: seconds, of {layers} layers of width {width}", statistics.median(seconds), "s")


def _recipe(network: Any, dataset: Rows, micro_batch: int) -> Recipe:
    """The recipe of a job that is described and not begun."""
    connect, recipes = Job._connect, list[Recipe]()

    class Described(Exception):
        pass

    def describe(job: Job, *_: object) -> None:
        recipes.append(job._recipe)
        raise Described

    Job._connect = describe  # type: ignore[method-assign]
    try:
        elasticd.Job(
            model=elasticd.Model(embed=network.embed, blocks=network.blocks, head=network.head),
            loss=ordinary.token_loss,
            optimizer=torch.optim.AdamW,
            dataset=dataset,
            global_batch=micro_batch,
            micro_batch=micro_batch,
            check=False,
        )
    except Described:
        return recipes[0]
    finally:
        Job._connect = connect  # type: ignore[method-assign]
    raise AssertionError("the Job did not come to its connection")


def _seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began
