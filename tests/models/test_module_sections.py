"""A module with one forward trains under every layout as it does in plain torch, or is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import elasticd
from elasticd.models import next_token_loss
from elasticd.runtime.model.validation import ModelError, replace_dropouts
from examples.tutorial import gpt as plain_gpt
from examples.tutorial import gpt_tp
from tests import sizes
from tests.models.layouts import Training, alone, furthest, layouts_of, under
from tests.models.texts import Text

VOCABULARY, LAYERS = 41, 4
CONFIG = plain_gpt.GPTConfig(block_size=16, vocab_size=VOCABULARY, n_layer=LAYERS, n_head=8, n_embd=32)
EXAMPLE = {"idx": torch.arange(10).view(2, 5)}
PLANS = layouts_of(LAYERS)
TP_PLAN = {
    "attn.c_attn": elasticd.Column(parts=3),
    "attn.c_proj": "rowwise",
    "mlp.c_fc": "colwise",
    "mlp.c_proj": "rowwise",
    "lm_head": "colwise_gather_output",
}


class Asked(nn.Module):
    """Plain torch's side: the module, called with the batch."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: dict[str, Tensor]) -> Any:
        result = self.module(batch["inputs"])
        return result[0] if isinstance(result, tuple) else result


class Nested(nn.Module):
    """As nanoGPT has it: containers, a loss in forward, and a dropout before the blocks."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        inner = gpt_tp.GPT(CONFIG)
        self.transformer = nn.ModuleDict(
            {"wte": inner.wte, "wpe": inner.wpe, "drop": nn.Dropout(dropout), "h": inner.h, "ln_f": inner.ln_f}
        )
        self.lm_head = inner.lm_head
        self.register_buffer("places", torch.arange(CONFIG.block_size), persistent=False)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        parts = self.transformer
        x = parts["drop"](parts["wte"](idx) + parts["wpe"](self.places[: idx.size(1)]))
        for block in parts["h"]:
            x = block(x)
        logits = self.lm_head(parts["ln_f"](x))
        loss = None
        if targets is not None:
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


MODULES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "plain, no rules": (lambda: plain_gpt.GPT(CONFIG), {"blocks": "h"}),
    "rules": (lambda: gpt_tp.GPT(CONFIG), {"blocks": "h", "tp_plan": TP_PLAN}),
    "nested, with dropout and rules": (Nested, {"blocks": "transformer.h", "tp_plan": TP_PLAN}),
}
CASES = [(name, plan) for name in MODULES for plan in PLANS if name != "plain, no rules" or plan == "replicas"]


@pytest.mark.parametrize(
    ("name", "plan"),
    sizes.beside(
        [("plain, no rules", "replicas"), ("nested, with dropout and rules", "tp3 uneven beside a pipeline")],
        CASES,
    ),
)
def test_a_module_with_one_forward_trains_like_one_process(name: str, plan: str) -> None:
    make, options = MODULES[name]
    torch.manual_seed(0)
    module = make().double()
    whole = Asked(copy.deepcopy(module))
    before = {key: value.clone() for key, value in module.state_dict().items()}
    model = elasticd.from_module(
        module, example=EXAMPLE, inputs=lambda batch: {"idx": batch.get("inputs", batch.get("idx"))}, **options
    )
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    training = Training(model=model, loss=next_token_loss, dataset=Text(VOCABULARY))
    _key_dropouts(whole, options["blocks"])
    expected, found = alone(training, whole), under(training, PLANS[plan])
    assert found[0] == pytest.approx(expected[0], abs=1e-12)
    names = {
        full: "module."
        + full.replace("blocks.", options["blocks"] + ".", 1).removeprefix("embed.").removeprefix("head.")
        for full in found[1]
    }
    assert furthest(found, expected, names) < (1e-12, "")


def _key_dropouts(whole: Asked, blocks: str) -> None:
    """Draws masks as elasticd does, under the names of its sections."""
    if isinstance(whole.module, Nested):
        replace_dropouts("embed", whole.module)
        for index, block in enumerate(whole.get_submodule(f"module.{blocks}")):
            replace_dropouts(f"blocks.{index}", block)


def test_sections_have_the_modules_names_and_its_values() -> None:
    module = Nested()
    model = elasticd.from_module(module, blocks="transformer.h", example=EXAMPLE)
    names = [f"embed.{p.name}" for p in model.spec.embed] + [f"head.{p.name}" for p in model.spec.head]
    assert names == [
        "embed.transformer.wte.weight",
        "embed.transformer.wpe.weight",
        "head.transformer.ln_f.weight",
        "head.transformer.ln_f.bias",
        "head.lm_head.weight",
    ]
    assert model.ties == {"head.lm_head.weight": "embed.transformer.wte.weight"}
    assert model.width == 32
    assert module.training


class Changed(plain_gpt.GPT):
    """A GPT of which some part of forward is another."""

    def __init__(self) -> None:
        super().__init__(CONFIG)

    def hidden(self, idx: Tensor) -> Tensor:
        x: Tensor = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        return x


class LastToken(Changed):
    def forward(self, idx: Tensor) -> Tensor:
        x = self.hidden(idx)
        for block in self.h:
            x = block(x)
        logits: Tensor = self.lm_head(self.ln_f(x)[:, [-1]])
        return logits


class Sliced(Changed):
    def forward(self, idx: Tensor) -> Tensor:
        logits: Tensor = super().forward(idx)[:, -1]
        return logits


class Reversed(Changed):
    def forward(self, idx: Tensor) -> Tensor:
        x = self.hidden(idx)
        for block in reversed(self.h):
            x = block(x)
        logits: Tensor = self.lm_head(self.ln_f(x))
        return logits


class Skips(Changed):
    def forward(self, idx: Tensor) -> Tensor:
        first = x = self.hidden(idx)
        for block in self.h:
            x = block(x) + first
        logits: Tensor = self.lm_head(self.ln_f(x))
        return logits


class Half(Changed):
    def forward(self, idx: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.ln_f(self.h[0](self.hidden(idx))))
        return logits


class Twice(Changed):
    def forward(self, idx: Tensor) -> Tensor:
        x = self.hidden(idx)
        for block in [*self.h, self.h[0]]:
            x = block(x)
        logits: Tensor = self.lm_head(self.ln_f(x))
        return logits


class Tied(Changed):
    def forward(self, idx: Tensor) -> Tensor:
        x = self.hidden(idx)
        for block in self.h:
            x = block(x)
        return nn.functional.linear(self.ln_f(x), self.wte.weight)


class Counts(Changed):
    def forward(self, idx: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        x = self.hidden(idx) * self.calls
        for block in self.h:
            x = block(x)
        logits: Tensor = self.lm_head(self.ln_f(x))
        return logits


class MaskedBlock(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * mask


class Masked(Changed):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(MaskedBlock() for _ in range(2))

    def forward(self, idx: Tensor) -> Tensor:
        x = self.hidden(idx)
        for block in self.h:
            x = block(x, mask=torch.ones(()))
        logits: Tensor = self.lm_head(self.ln_f(x))
        return logits


REFUSED = {
    LastToken: "calls lm_head with something else than what ln_f returned",
    Sliced: "does not return what lm_head returned, but something computed of it",
    Reversed: "block 0 of Reversed: forward does not call its blocks once each and in order",
    Skips: "block 1 of Skips is not called with what the block before it returned",
    Half: "forward called 1 of the 4 blocks of Half",
    Twice: "block 4 of Twice: forward does not call its blocks once each and in order",
    Tied: "does not return what ln_f returned",
    Counts: "the sections of Counts give another output than its forward for the example",
    Masked: "block 0 of Masked is called with Tensor, mask=Tensor, and not with one tensor alone",
}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_a_forward_that_does_something_else_is_refused_by_name(kind: type[Changed]) -> None:
    with pytest.raises(ModelError) as refused:
        elasticd.from_module(kind(), blocks="h", example=EXAMPLE)
    assert REFUSED[kind] in str(refused.value)
    assert "elasticd.Model(embed=..., blocks=[...], head=...)" in str(refused.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blocks": "layers"}, "blocks='layers' is no nn.ModuleList of GPT; its lists are: h"),
        ({"blocks": "ln_f"}, "blocks='ln_f' is no nn.ModuleList of GPT; its lists are: h"),
        ({"example": {"tokens": EXAMPLE["idx"]}}, "the batch has the keys tokens; GPT.forward takes idx"),
    ],
)
def test_what_does_not_fit_the_module_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        elasticd.from_module(plain_gpt.GPT(CONFIG), **{"blocks": "h", "example": EXAMPLE, **options})


def test_a_compiled_module_is_refused_with_what_compiles_the_blocks() -> None:
    module: Any = torch.compile(plain_gpt.GPT(CONFIG))
    with pytest.raises(ModelError, match=r"compiled by torch\.compile: .*ParallelismOptions\(compile=True\)"):
        elasticd.from_module(module, blocks="h", example=EXAMPLE)


def test_a_module_on_the_meta_device_is_described_without_memory() -> None:
    with torch.device("meta"):
        module, example = plain_gpt.GPT(CONFIG), {"idx": torch.zeros(2, 5, dtype=torch.long)}
        model = elasticd.from_module(module, blocks="h", example=example, init=lambda *_: torch.zeros(()))
    assert model.layers == LAYERS


def test_looking_leaves_generators_and_modes_as_they_were() -> None:
    module = Nested(dropout=0.5)
    module.transformer["ln_f"].eval()
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    elasticd.from_module(module, blocks="transformer.h", example=EXAMPLE)
    assert torch.equal(torch.rand(1), expected)
    assert module.training
    assert not module.transformer["ln_f"].training
