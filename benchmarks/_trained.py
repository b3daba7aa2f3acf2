"""What the benchmark of the runtime trains, our way: a decoder on a rank of a plan, without agent and leader.

The head has a weight of its own: torch's pipelining knows no tied weights, and all are to do the same work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.batch import Sampler
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.plan import ModulePlan, Pipeline, Plan, Span, Stage, Strategy
from torch import nn

from elasticd.models import Decoder, DecoderConfig, next_token_loss
from elasticd.models.decoder import initial
from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.in_memory import unpaced
from elasticd.runtime.data.prefetch import Dataset
from elasticd.runtime.data.step_samples import Feed
from elasticd.runtime.engine.engine import Engine, first_state
from elasticd.runtime.engine.pass_watch import PassPacer
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.model.model import Init, Model
from tests.file_key_value import FileKeyValue

SEED = 1
CONFIG = DecoderConfig(vocabulary=256, width=256, layers=4, heads=8, kv_heads=4, hidden=704)
TOKENS = 64


@dataclass(frozen=True)
class Text:
    """Sequences of one length, each a function of its index, drawn before anything is measured."""

    ids: torch.Tensor

    @classmethod
    def of(cls, vocabulary: int, tokens: int, samples: int = 512) -> Text:
        generator = torch.Generator().manual_seed(SEED)
        return cls(torch.randint(0, vocabulary, (samples, tokens + 1), generator=generator))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": self.ids[index, :-1], "targets": self.ids[index, 1:]}


def untied(config: DecoderConfig) -> Decoder:
    decoder = Decoder(config)
    decoder.head.output.weight = nn.Parameter(torch.empty_like(decoder.embed.tokens.weight))
    return decoder


def described(config: DecoderConfig, init: Init = initial) -> Model:
    """The decoder as elasticd trains it, without the tie."""
    with torch.device("meta"):
        decoder, tied = untied(config), Decoder(config).describe()
    return Model(
        name="bench",
        embed=decoder.embed,
        blocks=list(decoder.blocks),
        head=decoder.head,
        width=config.width,
        init=init,
        rules=tied.rules,
        units=tied.units,
    )


def filled(config: DecoderConfig) -> Decoder:
    """The whole decoder in one process, with the values that every layout starts from."""
    decoder, model = untied(config), described(config)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(model.first_value(name, Box.whole(parameter.shape), SEED))
    return decoder


def stage(start: int, stop: int, *later: Span, **shares: int) -> Stage:
    """`stage(0, 2, (4, 6), a0=1, a1=1)`: blocks [0, 2) and [4, 6) on the devices a/0 and a/1."""
    names = tuple(f"{name[:-1]}/{name[-1]}" for name in shares)
    return Stage(start=start, stop=stop, later=later, devices=names, shares=tuple(shares.values()))


def plan_of(*pipelines: tuple[int, Sequence[Stage]], micro_batch: int) -> Plan:
    made = tuple(Pipeline(stages=tuple(stages), micro_batches=m) for m, stages in pipelines)
    return Plan(
        number=1,
        strategies=(Strategy(modules=(ModulePlan(module="model", pipelines=made),)),),
        micro_batch=micro_batch,
        global_batch=micro_batch * sum(m for m, _ in pipelines),
    )


def adamw(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-3)


def sampler(plan: Plan, data: Dataset) -> Sampler:
    return Sampler(size=len(data), global_batch=plan.global_batch, seed=SEED)


def engine_of(
    folder: Path,
    rank: int,
    address: str,
    plan: Plan,
    config: DecoderConfig,
    data: Dataset,
    pace: PassPacer = unpaced,
    source: Feed | None = None,
) -> Engine:
    """The engine of one rank, as a switch makes it."""
    recipe = Recipe(
        model=described(config),
        loss=next_token_loss,
        optimizer=adamw,
        dataset=data,
        global_batch=plan.global_batch,
        seed=SEED,
        source=source,
    )
    me = plan.members[rank]
    layouts = Layouts(recipe.model.spec, plan)
    plan_groups = PlanGroups("bench", me, address, FileKeyValue(folder / "ours"))
    engine = Engine(recipe, layouts, plan_groups, pace)
    engine.adopt(first_state(recipe.model, layouts, me, SEED))
    return engine


#: One step of one side; its loss where this rank has it.
StepOf = Callable[[int], float | None]
