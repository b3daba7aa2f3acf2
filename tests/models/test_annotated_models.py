"""A model trained under a plan that annotations of its parameters describe is one process's."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import pytest
import torch
from elasticd_planner.spec.plan import Plan
from torch import Tensor, nn

import elasticd
from elasticd.annotations import Annotation, annotations_of, plan_of
from elasticd.models import next_token_loss
from tests.models.layouts import Training, alone, furthest, under
from tests.models.texts import Text

WIDTH, LAYERS, VOCABULARY = 8, 8, 23
ONE, TWO = ("a/0", "a/1"), ("a/2", "a/3")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        out: Tensor = self.tokens(batch["inputs"])
        return out


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = Embed(), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def model_of(whole: Whole) -> elasticd.Model:
    parts = copy.deepcopy(whole)
    rules = {"blocks.*.up.*": elasticd.Column("inner"), "blocks.*.down.weight": elasticd.Row("inner")}
    return elasticd.Model(embed=parts.embed, blocks=list(parts.blocks), head=parts.head, rules=rules)


def tp(*groups: tuple[str, ...], parts: tuple[int, ...] = ()) -> Annotation:
    """A group for each pipeline; `parts`: proportions of the first."""
    states = [{"tp": len(group)} if len(group) > 1 else {} for group in groups]
    return Annotation(groups=groups, states=[{"tp": parts}, *states[1:]] if parts else states)  # type: ignore[list-item]


def seven_devices(model: elasticd.Model) -> Plan:
    """TP 2 for 5 blocks and TP 2 for 3 in one pipeline; TP 2 for 6 blocks and one device for 2 in the other."""
    b, last = ("b/0", "b/1"), ("b/2",)
    return plan_of(
        model,
        {
            "embed.*": tp(ONE, b, parts=(2, 1)),
            "blocks.0-4.*": tp(ONE, b, parts=(2, 1)),
            "blocks.5.*": tp(TWO, b),
            "blocks.6-7.*": tp(TWO, last),
            "head.*": tp(TWO, last),
        },
        [5, 3],
    )


def named_dimensions(model: elasticd.Model) -> Plan:
    """Copies around parts: two pipelines of one group."""
    four = (*ONE, *TWO)

    def split(dim: int) -> Annotation:
        return Annotation(groups=[four], states=[{"same": 2, dim: 2}])

    whole = Annotation(groups=[four], states=[{"same": 4}])
    return plan_of(model, {"*.up.*": split(0), "*.down.weight": split(1), "*": whole}, [4, 4])


@pytest.mark.parametrize("make", [seven_devices, named_dimensions])
def test_a_plan_of_annotations_trains_as_one_process(make: object) -> None:
    whole = Whole().double()
    model = model_of(whole)
    plan: Plan = make(model)  # type: ignore[operator]
    micro_batches = [pipeline.micro_batches for pipeline in plan.pipelines]
    assert plan_of(model, annotations_of(model, plan), micro_batches).digest == plan.digest
    given = Training(model=model, loss=next_token_loss, dataset=Text(VOCABULARY), steps=3)
    names = {name: name for name, _ in whole.named_parameters()}
    assert furthest(under(given, plan), alone(given, whole), names) < (1e-12, "")
