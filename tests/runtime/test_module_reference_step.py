"""A step of the user's own modules beside one of the copies that train, where a model has several modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elasticd.runtime.model.model import ModelError
from elasticd.runtime.reference.comparison import refuse_differences
from tests.runtime.image_model import (
    IMAGE,
    Merge,
    Projector,
    language_sections,
    model_of,
    vision_sections,
)
from tests.runtime.test_modules import make_recipe


def tried(vision: list[nn.Module], language: list[nn.Module], *, samples: int = 2, frozen: bool = False) -> Any:
    recipe = replace(make_recipe(), model=model_of(vision, language, frozen=frozen))
    return refuse_differences(recipe, samples)


@pytest.mark.parametrize("frozen", [False, True])
def test_all_modules_agree_with_the_copies_that_train(frozen: bool) -> None:
    """The samples that are tried have images."""
    step = tried(vision_sections(), language_sections(), frozen=frozen)
    assert any(name.startswith("language.") for name in step.gradients)
    assert any(name.startswith("vision.") for name in step.gradients) is not frozen
    assert step.gradients["language.embed.tokens.weight"].abs().sum() > 0
    if not frozen:
        assert step.gradients["vision.head.out.weight"].abs().sum() > 0
    assert {"vision.embed", "vision.head", "language.embed"} <= step.outputs.keys()


class Dropping(Projector):
    """With a dropout, whose draws are keyed by the item."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.drop(x))


def test_draws_of_items_are_those_of_the_job() -> None:
    vision = [*vision_sections()[:-1], Dropping()]
    assert "vision.head.out.weight" in tried(vision, language_sections(), samples=3).gradients


CALLS = [0]


class Counting(Projector):
    """Depends on how often it was called."""

    def forward(self, x: Tensor) -> Tensor:
        CALLS[0] += 1
        return super().forward(x) * CALLS[0]


class Noisy(Projector):
    """Draws random numbers that no sample keys."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        generator = torch.Generator().manual_seed(torch.seed() % 2**31)
        return out + torch.rand(out.shape, generator=generator, dtype=out.dtype)


class Reaching(Projector):
    """Calls another module of the script's through a closure, of which the copies know nothing."""

    def __init__(self, patches: nn.Module) -> None:
        super().__init__()
        self.reach = lambda x: x + patches.project.bias

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.reach(x))


class Flat(Projector):
    """Without the dimension of items."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0, :, 0]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda patches: Counting(), "vision.head"),
        (lambda patches: Noisy(), "vision.head"),
        (Reaching, "vision.embed.project.bias of your own modules got a gradient from the copies that train"),
        (lambda patches: Flat(), "each tensor must begin with the items"),
    ],
)
def test_a_module_of_items_that_is_wrong_is_told_before_the_job(wrong: Any, said: str) -> None:
    patches, *blocks, _ = vision_sections()
    with pytest.raises(ModelError) as refused:
        tried([patches, *blocks, wrong(patches)], language_sections())
    assert said in str(refused.value)


class TooMany(Projector):
    """A row more than the sample has places for."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.cat([x, x[:, :1]], dim=1))


def test_an_embed_that_fails_on_what_modules_give_it_says_so() -> None:
    class Strict(Merge):
        def forward(self, batch: Mapping[str, Any]) -> Tensor:
            if len(batch["images"]) != int((batch["inputs"] == IMAGE).sum()):
                raise ModelError(f"{len(batch['images'])} rows for other places")
            return super().forward(batch)

    _, *rest = language_sections()
    with pytest.raises(ModelError, match="rows for other places"):
        tried([*vision_sections()[:-1], TooMany()], [Strict(), *rest])
