"""A tied parameter without a rule takes its partner's, and trains as plain torch does, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elasticd import Column, Model, PartialGrad, Row
from elasticd.models import next_token_loss
from elasticd.runtime.model.tp_rules import UnitsOf
from elasticd.runtime.model.validation import ModelError
from examples import train_gpt2
from tests import sizes
from tests.models.layouts import Training, alone, furthest, layouts_of, under
from tests.models.texts import Text

LAYERS, VOCABULARY, WIDTH = 4, 41, 32
PLANS = layouts_of(LAYERS)
UNEVEN = "tp3 uneven beside a pipeline"
BLOCKS = {
    "blocks.*.attention.qkv.*": Column("heads", parts=3),
    "blocks.*.attention.out.*": Row("heads"),
    "blocks.*.up.*": Column("columns"),
    "blocks.*.down.*": Row("columns"),
}


class BiasedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.output = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.output(self.norm(x))
        return logits


class Functional(nn.Module):
    """A head that is no nn.Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.table = nn.LayerNorm(WIDTH), nn.Parameter(torch.zeros(VOCABULARY, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.norm(x), self.table)


def tied(head: Callable[[], nn.Module] | None = None) -> train_gpt2.GPT:
    torch.manual_seed(0)
    gpt = train_gpt2.GPT(VOCABULARY, WIDTH, LAYERS, heads=8, longest=16, dropout=0.0)
    if head is not None:
        gpt.head = head()
        output = getattr(gpt.head, "output", None)
        if output is None:
            gpt.head.table = gpt.embed.tokens.weight
        else:
            output.weight = gpt.embed.tokens.weight
    return gpt.double()


def described(gpt: train_gpt2.GPT, rules: Mapping[str, Any], **arguments: Any) -> Model:
    return Model(
        embed=gpt.embed,
        blocks=gpt.blocks,
        head=gpt.head,
        width=WIDTH,
        rules={**BLOCKS, **rules},
        units={"heads": UnitsOf(attribute="blocks.*.attention.heads")},
        **arguments,
    )


#: Each has a rule for one of two tied parameters.
ONE_RULE: dict[str, tuple[Any, Mapping[str, Any]]] = {
    "the head's": (None, {"head.output.weight": Column("vocabulary", gather=True)}),
    "the embedding's": (None, {"embed.tokens.weight": Row("vocabulary")}),
    "the embedding's, features": (None, {"embed.tokens.weight": Column("features", gather=True)}),
    "the head's, features": (None, {"head.output.weight": Row("features", split=True)}),
    "the embedding's, of a head with a bias": (BiasedHead, {"embed.tokens.weight": Row("vocabulary")}),
    "the embedding's features, of a head with a bias": (
        BiasedHead,
        {"embed.tokens.weight": Column("features", gather=True)},
    ),
}
REPRESENTATIVES = [("the head's", UNEVEN), ("the embedding's, of a head with a bias", UNEVEN)]


@pytest.mark.parametrize(
    ("case", "plan"), sizes.beside(REPRESENTATIVES, [(case, plan) for case in ONE_RULE for plan in PLANS])
)
def test_one_rule_of_two_tied_parameters_trains_like_one_process(case: str, plan: str) -> None:
    head, rules = ONE_RULE[case]
    gpt = tied(head)
    training = Training(model=described(gpt, rules), loss=next_token_loss, dataset=Text(VOCABULARY))
    expected, found = alone(training, copy.deepcopy(gpt)), under(training, PLANS[plan])
    assert found[0] == pytest.approx(expected[0], abs=1e-12)
    assert furthest(found, expected, {full: full for full, _ in gpt.named_parameters()}) < (1e-12, "")


@pytest.mark.parametrize("case", ONE_RULE)
def test_a_parameter_takes_the_cut_of_its_partner(case: str) -> None:
    head, rules = ONE_RULE[case]
    spec = described(tied(head), rules).spec
    (embedding,) = [p for p in spec.embed if p.name == "tokens.weight"]
    (output,) = [p for p in spec.head if p.name == "output.weight"]
    assert embedding.cut == output.cut is not None


@pytest.mark.parametrize("word", ["head.output", "embed.tokens"])
def test_one_word_of_a_plan_is_enough(word: str) -> None:
    words = {"head.output": "colwise_gather_output", "embed.tokens": "embedding_rowwise"}
    both, one = (described(tied(), {}, tp_plan=plan).spec for plan in (words, {word: words[word]}))
    assert one == both


def test_a_tie_that_the_sections_lack_yet_takes_its_rule_too() -> None:
    gpt = tied()
    gpt.head.output.weight = nn.Parameter(gpt.head.output.weight.detach().clone())
    rules = {"head.output.weight": Column("vocabulary", gather=True)}
    model = described(gpt, rules, ties={"head.output.weight": "embed.tokens.weight"})
    assert model.spec == described(tied(), rules).spec


def test_a_tie_without_any_rule_stays_in_full() -> None:
    assert all(parameter.cut is None for parameter in described(tied(), {}).spec.head)


@pytest.mark.parametrize(
    ("head", "rules", "message"),
    [
        (
            None,
            {"embed.tokens.weight": Row("vocabulary"), "head.output.weight": Row("features", split=True)},
            "'embed.tokens.weight' cuts dimension 0 in 'vocabulary', and 'head.output.weight' cuts dim",
        ),
        (
            None,
            {
                "embed.tokens.weight": Row("rows"),
                "head.output.weight": Column("columns of logits", gather=True),
            },
            "Leave one of the rules out: a tied parameter takes the rule of the other",
        ),
        (
            None,
            {"embed.tokens.weight": PartialGrad(), "head.output.weight": Column("vocabulary", gather=True)},
            "'embed.tokens.weight' does not cut it, and 'head.output.weight' cuts dimension 0",
        ),
        (
            Functional,
            {"embed.tokens.weight": Row("vocabulary")},
            "head.table has no rule, and embed.tokens.weight, which it is tied to, is cut in dimension 0 by "
            "the rule 'embed.tokens.weight': give head (Functional) a rule that cuts that dimension in",
        ),
    ],
)
def test_what_cannot_be_cut_alike_is_refused_with_the_remedy(
    head: Any, rules: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(ModelError) as refused:
        described(tied(head), rules)
    assert message in str(refused.value)
