"""Settings and small states survive as text bit by bit, or are refused by name."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from elasticd_migration.text_codec import NotPlain, from_text, to_text
from hypothesis import given
from hypothesis import strategies as st

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(PLAIN)
def test_plain_values_come_back_as_they_were(value: object) -> None:
    back = from_text(to_text(value))
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn, torch.bool])
@pytest.mark.parametrize("shape", [(), (3,), (2, 2), (0,)])
def test_small_tensors_come_back_bit_by_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(1, math.prod(shape) + 1).reshape(shape).to(dtype)
    back = from_text(to_text({"lr": tensor}))["lr"]
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(back.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize(
    ("number", "expected"),
    [(np.int64(7), 7), (np.uint8(255), 255), (np.float32(0.5), 0.5), (np.float64(0.1), 0.1), (np.True_, True)],
)
def test_numbers_of_numpy_are_numbers(number: object, expected: object) -> None:
    back = from_text(to_text({"every": number, 1: Counter([number])}))
    assert back == {"every": expected, 1: Counter([expected])}
    assert type(back["every"]) is type(expected)
    assert to_text(number) == to_text(expected), "ranks compare texts"


@pytest.mark.parametrize(
    "array", [np.linspace(0, 1, 5), np.arange(6).reshape(2, 3).T, np.zeros(0), np.array(3)]
)
def test_small_arrays_come_back_bit_by_bit(array: np.ndarray[Any, Any]) -> None:
    back = from_text(to_text([array]))[0]
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert np.array_equal(back, array)
    back += 1  # as the state that it came from, it can be changed


def schedulers(optimizer: torch.optim.Optimizer) -> list[torch.optim.lr_scheduler.LRScheduler]:
    kinds = torch.optim.lr_scheduler
    return [
        kinds.MultiStepLR(optimizer, [2, 5]),
        kinds.LambdaLR(optimizer, lambda step: 0.9**step),
        kinds.OneCycleLR(optimizer, 0.1, total_steps=20),
        kinds.CosineAnnealingWarmRestarts(optimizer, 5),
        kinds.SequentialLR(
            optimizer, [kinds.LinearLR(optimizer), kinds.CosineAnnealingLR(optimizer, 10)], milestones=[3]
        ),
    ]


@pytest.mark.parametrize("which", range(5))
def test_schedulers_go_on_from_their_text(which: int) -> None:
    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5, momentum=0.9) for _ in range(2)]
    first, second = (schedulers(optimizer)[which] for optimizer in optimizers)
    for _ in range(4):
        optimizers[0].step()
        first.step()
    second.load_state_dict(from_text(to_text(first.state_dict())))
    groups = to_text({k: v for k, v in optimizers[0].param_groups[0].items() if k != "params"})
    optimizers[1].param_groups[0].update(from_text(groups))
    rates: list[list[Any]] = [[], []]
    for scheduler, optimizer, seen in zip((first, second), optimizers, rates, strict=True):
        for _ in range(6):
            optimizer.step()
            scheduler.step()
            seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
    assert rates[0] == rates[1]


def test_a_counter_stays_one_and_nan_stays_nan() -> None:
    back = from_text(to_text({"milestones": Counter([3, 3, 5]), "loss": math.nan}))
    assert type(back["milestones"]) is Counter
    assert back["milestones"] == Counter([3, 3, 5])
    assert math.isnan(back["loss"])


def test_what_no_text_stands_for_is_named() -> None:
    with pytest.raises(NotPlain, match=r"scheduler\['anneal'\]\[1\]: a builtin_function_or_method cannot"):
        to_text({"anneal": [1, print]}, "scheduler")
    with pytest.raises(NotPlain, match="5000 elements is no setting"):
        to_text(torch.zeros(5000))
    assert torch.equal(from_text(to_text(torch.ones(5000), most=5000)), torch.ones(5000))
