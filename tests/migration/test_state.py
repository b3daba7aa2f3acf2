"""Model and optimizer state as named boxes: collected by reference, described for others, installed anew."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from elasticd_migration.schema import Disagreement, Schema, check_covers, merge
from elasticd_migration.state import LocalState, LocalTensor, NotElementWise, collect, install, restore
from elasticd_planner.boxes import Box

BOX = Box(start=(2, 0), stop=(5, 4))
Parameters = dict[str, tuple[Box, torch.nn.Parameter]]


def parameters(value: float = 1.0) -> Parameters:
    return {"w": (BOX, torch.nn.Parameter(torch.full((3, 4), value)))}


def stepped(
    kind: Callable[..., torch.optim.Optimizer], **options: Any
) -> tuple[Parameters, torch.optim.Optimizer]:
    held = parameters()
    optimizer = kind([held["w"][1]], lr=0.1, **options)
    held["w"][1].grad = torch.arange(12.0).reshape(3, 4)
    optimizer.step()
    return held, optimizer


def test_state_is_collected_by_reference() -> None:
    held, optimizer = stepped(torch.optim.AdamW)
    tensor = collect(held, optimizer).tensors["w"]
    assert tensor.planes["value"].data_ptr() == held["w"][1].data_ptr()
    assert tensor.planes["exp_avg"] is optimizer.state[held["w"][1]]["exp_avg"]
    assert set(tensor.planes) == {"value", "exp_avg", "exp_avg_sq"}
    assert set(tensor.scalars) == {"step"}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.Adam, {"fused": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adagrad, {}),
        (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
        (torch.optim.NAdam, {}),
        (torch.optim.Rprop, {}),
    ],
)
def test_element_wise_optimizers_go_on_as_if_nothing_happened(
    kind: Callable[..., torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    held, optimizer = stepped(kind, **options)
    state = collect(held, optimizer)
    described = Schema.from_json(state.schema().to_json())
    moved = LocalState(
        tensors={
            "w": LocalTensor(
                box=BOX,
                planes={key: plane.clone() for key, plane in state.tensors["w"].planes.items()},
                scalars={s.name: restore(s, torch.device("cpu")) for s in described.tensors["w"].scalars},
            )
        }
    )
    new = parameters(-1.0)
    other = kind([new["w"][1]], lr=0.1, **options)
    install(moved, new, other)
    for everything, takes in ((held, optimizer), (new, other)):
        everything["w"][1].grad = torch.ones(3, 4)
        takes.step()
    assert torch.equal(held["w"][1], new["w"][1])


def test_an_optimizer_that_is_not_element_wise_is_refused_by_name() -> None:
    held, optimizer = stepped(torch.optim.Adafactor)
    with pytest.raises(NotElementWise, match=r"Adafactor keeps 'row_var' \(shape \(3, 1\)\) for w"):
        collect(held, optimizer)


def test_before_the_first_step_there_is_only_the_value_and_collecting_makes_no_state() -> None:
    held = parameters()
    optimizer = torch.optim.AdamW([held["w"][1]])
    state = collect(held, optimizer)
    assert set(state.tensors["w"].planes) == {"value"}
    assert not optimizer.state
    assert state.bytes == 48
    new = parameters(-1.0)
    other = torch.optim.AdamW([new["w"][1]])
    install(state, new, other)
    assert torch.equal(new["w"][1], held["w"][1])
    assert not other.state


def test_a_frozen_module_moves_without_an_optimizer() -> None:
    new = parameters(-1.0)
    install(collect(parameters(3.0), None), new, None)
    assert float(new["w"][1].detach().sum()) == 36


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        7,
        0.1,
        math.inf,
        torch.tensor(0.1, dtype=torch.bfloat16),
        torch.tensor(3.0),
        torch.tensor(-5, dtype=torch.int64),
        torch.tensor(math.nan, dtype=torch.float64),
    ],
    ids=str,
)
def test_scalars_survive_json_bit_by_bit(value: object) -> None:
    planes = {"value": torch.zeros(3, 4)}
    state = LocalState(tensors={"w": LocalTensor(box=BOX, planes=planes, scalars={"s": value})})  # type: ignore[dict-item]
    (scalar,) = Schema.from_json(state.schema().to_json()).tensors["w"].scalars
    back = restore(scalar, torch.device("cpu"))
    if isinstance(value, torch.Tensor):
        assert isinstance(back, torch.Tensor)
        assert back.dtype == value.dtype
        assert torch.equal(back.reshape(1).view(torch.uint8), value.reshape(1).view(torch.uint8))
        assert back is not value
    else:
        assert back == value
        assert type(back) is type(value)


def test_what_does_not_fit_is_refused_before_anything_changes() -> None:
    state = collect(parameters(2.0), None)
    elsewhere = {"w": (Box(start=(0, 0), stop=(3, 4)), torch.nn.Parameter(torch.zeros(3, 4)))}
    half = {"w": (BOX, torch.nn.Parameter(torch.zeros(3, 4, dtype=torch.bfloat16)))}
    extra = {**parameters(0.0), "v": (BOX, torch.nn.Parameter(torch.zeros(3, 4)))}
    for wrong, why in (
        (elsewhere, "w: a parameter for"),
        (half, "dtype and device"),
        (extra, "v: is not in"),
    ):
        with pytest.raises(ValueError, match=why):
            install(state, wrong, None)
        assert float(wrong["w"][1].detach().sum()) == 0
    with pytest.raises(ValueError, match="cannot be box"):
        LocalTensor(box=BOX, planes={"value": torch.zeros(4, 3)})


def test_merged_schema_does_not_depend_on_who_has_what_and_names_what_nobody_has() -> None:
    full, blank = collect(*stepped(torch.optim.AdamW)).schema(), Schema()
    assert merge([full, blank], ["a/0", "b/0"]) == merge([blank, full], ["a/0", "b/0"]) == full
    assert full.sizes == {"w": 12}
    with pytest.raises(Disagreement, match="no rank holds any part of v"):
        check_covers(full, ["w", "v"])


def test_merging_unlike_states_names_both_holders() -> None:
    stepped_once, blank = collect(*stepped(torch.optim.AdamW)).schema(), collect(parameters(), None).schema()
    with pytest.raises(Disagreement, match=r"w: a/0 holds value float32, exp_avg.*b/0 holds value float32;"):
        merge([stepped_once, blank], ["a/0", "b/0"])
