"""Batches of any class go where a model computes, and into its type."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from elasticd.runtime.engine.mixed_precision import converted


@dataclass(frozen=True)
class Given:
    x: torch.Tensor
    name: str


class Pair(NamedTuple):
    x: torch.Tensor
    rest: list[Any]


class Encoded(UserDict[str, Any]):
    """As Hugging Face's BatchEncoding: its keys are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        if name in self.data:
            return self.data[name]
        raise AttributeError(name)


@pytest.mark.parametrize(
    "batch",
    [
        Given(torch.ones(2), "a"),
        Pair(torch.ones(2), ["a", {"y": torch.ones(3)}]),
        Encoded(x=torch.ones(2), name="a"),
        {"x": torch.ones(2), "deep": (Given(torch.ones(1), "b"), "c")},
    ],
)
def test_each_tensor_is_converted_and_the_class_stays(batch: Any) -> None:
    found = converted(batch, lambda tensor: tensor.double())
    assert type(found) is type(batch)
    assert found is not batch
    assert repr(found) == repr(converted(batch, lambda tensor: tensor.double()))
    assert "float64" in repr(found)
    assert "float64" not in repr(batch), "the user's own batch stays as it is"
    assert (found["x"] if isinstance(found, dict) else found.x).dtype == torch.float64
    assert converted(batch, lambda tensor: tensor) is batch
