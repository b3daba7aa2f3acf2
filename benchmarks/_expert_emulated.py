"""A mixture of experts on eight emulated devices: engines of the runtime in threads, whose blocks take a set
time.

One TP group of eight has 64 experts of each block, of which each row goes to two, some of them far more often
than others. Losses and gradients are real; what a block takes is slept: its dense part by the device's share,
that of its experts by the rows that go to them. The planner places the experts for the load that this is, with
all devices alike and with one that is twice slower. *Contiguous* is its plan without a load: as many experts as
the share says, in order. The bound is all work over all speed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import numpy as np
import torch
from _module_emulated import Run, run_row
from _results import Row, row
from elasticd_planner.cost.model_profile import ModelProfile, SectionProfile
from elasticd_planner.problem import Problem, SearchSpace
from elasticd_planner.search.planner import plan
from elasticd_planner.spec.cluster import Cluster, Link
from elasticd_planner.spec.expert_load import ExpertLoad, costed
from elasticd_planner.spec.plan import Plan
from torch import Tensor, nn

import elasticd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from elasticd import Column, Experts, UnitsOf
from elasticd import Row as RowOf
from elasticd.models import next_token_loss
from elasticd.runtime.comm.communicators import GlooCommunicators
from elasticd.runtime.engine.recipe import Recipe
from tests.models.mixture import StackedExperts
from tests.planner.drawn_module_problems import GIB, MIB, cluster_of

#: Devices of the group, experts of a block, those of a row, and blocks.
DEVICES, EXPERTS, CHOSEN, LAYERS = 8, 64, 2, 2
#: Width of a row, columns that the dense part has, columns of an expert, tokens of a sample, and words.
WIDTH, COLUMNS, INNER, TOKENS, WORDS = 16, 64, 128, 512, 31
#: Samples of a step, each a micro-batch.
BATCH, SEED = 4, 3
#: Seconds of a token in a block, forward and backward.
FORWARD, BACKWARD = 1 / TOKENS, 2 / TOKENS
#: Steps of a run; and all times are multiplied by this.
STEPS, SECONDS = 2, 3.0
SLOW, FACTOR = "n0/1", 2.0


@cache
def choices(block: int) -> Tensor:
    """The experts of each row of a sample in a block [TOKENS, CHOSEN]: by Zipf's chances, each expert once."""
    rng = np.random.default_rng(block)
    chances = (1 / np.arange(1, EXPERTS + 1) ** 0.9)[rng.permutation(EXPERTS)]
    drawn = [rng.choice(EXPERTS, CHOSEN, replace=False, p=chances / chances.sum()) for _ in range(TOKENS)]
    return torch.tensor(np.array(drawn))


class Block(nn.Module):
    """A dense part and experts, whose router's choice is set; its weights are learned."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up, self.down = nn.Linear(WIDTH, COLUMNS), nn.Linear(COLUMNS, WIDTH)
        self.experts = StackedExperts(EXPERTS, WIDTH, INNER)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        scores = self.router(rows).softmax(-1)
        index = choices(self.number)
        dense: Tensor = self.down(self.up(rows).relu())
        return x + (dense + self.experts(rows, index, scores.gather(1, index))).view_as(x)


class Words:
    """Samples of random words."""

    def __len__(self) -> int:
        return BATCH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, WORDS, (TOKENS + 1,), generator=torch.Generator().manual_seed(index))
        return {"inputs": ids[:-1], "targets": ids[1:]}


class Tokens(nn.Module):
    """The embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        y: Tensor = self.table(batch["inputs"])
        return y


@cache
def recipe() -> Recipe:
    """Once for all ranks."""
    torch.manual_seed(0)
    model = elasticd.Model(
        embed=Tokens(),
        blocks=[Block(number) for number in range(LAYERS)],
        head=nn.Linear(WIDTH, WORDS),
        rules={
            "blocks.*.up.*": Column("columns"),
            "blocks.*.down.*": RowOf("columns"),
            "blocks.*.experts.*": Experts("experts"),
        },
        units={"experts": UnitsOf(attribute="blocks.*.experts.count")},
    )
    return Recipe(
        model=model,
        loss=next_token_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=1e-3),
        dataset=Words(),
        global_batch=BATCH,
        seed=SEED,
        connect=GlooCommunicators,
    )


def load() -> ExpertLoad:
    """That of a step."""
    rows = {
        block: tuple((torch.bincount(choices(block).flatten(), minlength=EXPERTS) * float(BATCH)).tolist())
        for block in range(LAYERS)
    }
    found = costed(recipe().model.spec, TOKENS, rows, CHOSEN)
    assert found is not None
    return found


def asked(rates: dict[str, float], experts: ExpertLoad | None) -> Problem:
    """The emulated devices as a problem of the planner: communication takes nothing."""
    cluster, link = cluster_of(1, DEVICES, 64 * GIB), Link(bandwidth=1e15, latency=0.0)
    per_token = FORWARD + BACKWARD
    profile = ModelProfile(
        name="mixture",
        layers=LAYERS,
        share_units=COLUMNS,
        tokens=float(TOKENS),
        block=SectionProfile(seconds=per_token, cut_bytes=MIB),
        gradient_factor=0.0,
        optimizer_factor=0.0,
        forward=FORWARD / per_token,
    )
    return Problem(
        cluster=Cluster(nodes=cluster.nodes, inside=link, between=link),
        profile=profile,
        global_batch=BATCH,
        micro_batch=1,
        rates=rates,
        search_space=SearchSpace(fixed_tp=DEVICES, fixed_dp=1),
        experts=experts,
    )


def answer(rates: dict[str, float], experts: ExpertLoad | None) -> Plan:
    """The planner's, of one group."""
    found = plan(asked(rates, experts))
    assert found.plan is not None, found.refusal
    print(found.plan.reason, file=sys.stderr)
    return found.plan


def rows(smallest: bool = False) -> Iterator[Row]:
    """Throughput over the bound of placed experts, and of contiguous ones, without a slow device and with."""
    steps, seconds = (1, 0.1) if smallest else (STEPS, SECONDS)
    torch.set_num_threads(1)
    for rates, words in (({}, "skewed load"), ({SLOW: FACTOR}, "skewed load, one device 2 x slow")):
        ours, even = answer(rates, load()), answer(rates, None)
        assert ours.prediction is not None
        bound = ours.prediction.bound_seconds * seconds
        title = f"8 emulated devices, {words}: throughput over the bound"
        yield row(
            f"{title}, predicted", bound / (ours.prediction.step_seconds * seconds), "x", kind="simulated"
        )
        for each, more, least in ((ours, "", 0.90), (even, ", contiguous experts", None)):
            run = Run.of(each, steps, seconds, rates, recipe(), (FORWARD, BACKWARD))
            yield run_row(f"{title}{more}", bound / run.step, (run,), least=least)
