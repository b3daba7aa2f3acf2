"""Model and optimizer state as named boxes: collected by reference, described for others, installed anew."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from elasticd_migration.local_state import (
    LocalState,
    LocalTensor,
    NotElementWise,
    Owned,
    Shard,
    _master,
    collect,
    install,
    own,
    restore,
    restore_optimizer,
)
from elasticd_migration.schema import Disagreement, Schema, check_covers, merge
from elasticd_planner.layout.layouts import Item, Layouts
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.plan import StatePolicy

from tests.migration.plans import LAYERS, SPEC, plan

BOX = Box(start=(2, 0), stop=(5, 4))
W, STATE = Item("w", "value"), Item("w", "state")
Values = dict[str, list[tuple[Box, torch.nn.Parameter]]]


def parameters(value: float = 1.0) -> Values:
    return {"w": [(BOX, torch.nn.Parameter(torch.full((3, 4), value)))]}


def owned(values: Values) -> list[Owned]:
    return [Owned(name, box, parameter) for name, parts in values.items() for box, parameter in parts]


def only(values: Values) -> torch.nn.Parameter:
    return values["w"][0][1]


def stepped(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> tuple[Values, torch.optim.Optimizer]:
    held = parameters()
    optimizer = kind([only(held)], lr=0.1, **options)
    only(held).grad = torch.arange(12.0).reshape(3, 4)
    optimizer.step()
    return held, optimizer


def state_of(held: Values, optimizer: torch.optim.Optimizer | None) -> LocalState:
    return collect(held, owned(held), optimizer)


def test_state_is_collected_by_reference() -> None:
    held, optimizer = stepped(torch.optim.AdamW)
    state = state_of(held, optimizer)
    assert state.tensors[W].shards[0].planes["value"].data_ptr() == only(held).data_ptr()
    (shard,) = state.tensors[STATE].shards
    assert shard.planes["exp_avg"] is optimizer.state[only(held)]["exp_avg"]
    assert set(shard.planes) == {"exp_avg", "exp_avg_sq"}
    assert set(state.tensors[STATE].scalars) == {"step"}


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
    optimizer.param_groups[0]["lr"] = 0.3  # changed since the function made it
    state = state_of(held, optimizer)
    described = Schema.from_json(state.schema().to_json()).of(STATE)
    assert described is not None
    tensors = {
        item: LocalTensor(
            shards=tuple(
                Shard(box=shard.box, planes={key: plane.clone() for key, plane in shard.planes.items()})
                for shard in tensor.shards
            ),
            scalars={s.name: restore(s, torch.device("cpu")) for s in described.scalars},
        )
        for item, tensor in state.tensors.items()
    }
    new = parameters(-1.0)
    other = kind([only(new)], lr=0.1, **options)
    moved = LocalState(tensors=tensors, groups=state.groups)
    install(moved, new)
    restore_optimizer(moved, owned(new), other)
    for everything, takes in ((held, optimizer), (new, other)):
        only(everything).grad = torch.ones(3, 4)
        takes.step()
    assert torch.equal(only(held), only(new))


@pytest.mark.parametrize(
    "kind", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.ASGD, torch.optim.RMSprop, torch.optim.Rprop]
)
def test_of_a_parameter_without_dimensions_moments_are_planes(
    kind: Callable[..., torch.optim.Optimizer],
) -> None:
    """They are moved, averaged and saved as those of any parameter."""
    box = Box.whole(())
    state = {}
    for shape in ((), (1,)):
        parameter = torch.nn.Parameter(torch.ones(shape))
        parameter.grad = torch.full(shape, 0.5)
        optimizer = kind([parameter], lr=0.1)
        optimizer.step()
        held = [Owned("w", Box.whole(shape), parameter)]
        state[shape] = collect({"w": [(held[0].box, parameter)]}, held, optimizer, masters=True)
    scalar, vector = (state[shape].tensors[STATE] for shape in ((), (1,)))
    assert set(vector.shards[0].planes) <= set(scalar.shards[0].planes)
    assert scalar.shards[0].box == box
    assert "step" in scalar.scalars
    assert "master" in scalar.shards[0].planes
    again = kind([parameter := torch.nn.Parameter(torch.ones(()))], lr=0.1)
    restore_optimizer(state[()], [Owned("w", box, parameter)], again, masters=True)
    assert set(again.state[parameter]) == set(optimizer.state[optimizer.param_groups[0]["params"][0]])


def test_an_optimizer_may_name_a_plane_of_its_own_as_master_weights_are_named_unless_there_are_any() -> None:
    held, optimizer = stepped(torch.optim.AdamW)
    optimizer.state[only(held)]["master"] = torch.full_like(only(held), 7.0)
    new = parameters(-1.0)
    other = torch.optim.AdamW([only(new)])
    restore_optimizer(state_of(held, optimizer), owned(new), other)
    assert (other.state[only(new)]["master"] == 7.0).all()
    with pytest.raises(NotElementWise, match="AdamW keeps 'master', the name of master weights"):
        collect(held, owned(held), optimizer, masters=True)


def test_a_master_weight_that_was_saved_as_a_number_is_adopted() -> None:
    """As checkpoints have it in which moments of parameters without dimensions were scalars."""
    box, weight = Box.whole(()), torch.tensor(0.9993796)
    tensor = LocalTensor(
        shards=(Shard(box=box, planes={}),), scalars={"master": weight, "step": torch.tensor(1.0)}
    )
    kept = LocalState(tensors={STATE: tensor})
    assert _master(kept, "w", box, torch.tensor(1.0, dtype=torch.bfloat16), torch.float32) is weight


def test_an_optimizer_that_is_not_element_wise_is_refused_by_name() -> None:
    held, optimizer = stepped(torch.optim.Adafactor)
    with pytest.raises(NotElementWise, match=r"Adafactor keeps 'row_var' \(shape \(3, 1\)\) for w"):
        state_of(held, optimizer)


def test_settings_that_no_text_stands_for_are_refused_by_name() -> None:
    held, optimizer = stepped(torch.optim.AdamW)
    optimizer.param_groups[0]["schedule"] = print
    with pytest.raises(NotElementWise, match=r"parameter group 0\['schedule'\]: a builtin_function"):
        state_of(held, optimizer)


def test_before_the_first_step_there_is_only_the_value_and_collecting_makes_no_state() -> None:
    held = parameters()
    optimizer = torch.optim.AdamW([only(held)])
    state = state_of(held, optimizer)
    assert state.tensors[STATE].shards[0].planes == {}
    assert not optimizer.state
    assert state.bytes == 48
    new = parameters(-1.0)
    other = torch.optim.AdamW([only(new)])
    install(state, new)
    restore_optimizer(state, owned(new), other)
    assert torch.equal(only(new), only(held))
    assert not other.state


def test_a_frozen_module_moves_without_an_optimizer() -> None:
    new = parameters(-1.0)
    install(collect(parameters(3.0), [], None), new)
    assert float(only(new).detach().sum()) == 36


def test_what_is_owned_shares_memory_with_the_values_and_names_every_parameter() -> None:
    """Owning a part, carrying one for another stage, and an empty stand-in for what others own."""
    made = plan(1, [(1, [("n0/0", 1)]), (LAYERS - 1, [("n1/0", 1)])], zero=1, replicas=2)
    layouts = Layouts(SPEC, made)
    device = "n0/0"
    values = {
        name: [(box, torch.nn.Parameter(torch.zeros(box.shape), requires_grad=False)) for box in boxes]
        for (name, role), boxes in layouts.held(device).items()
        if role == "value"
    }
    parts = own(layouts, device, values)
    assert {part.name for part in parts} == set(layouts.trained)
    assert all(part.box in layouts.boxes(Item(part.name, "state"), device) for part in parts), "r = 2 of two"
    for part in parts:
        part.parameter.data.fill_(1.0)
    assert all(float(value.sum()) == value.numel() for n in layouts.trained for _, value in values[n])
    split = Layouts(SPEC, made.replace(state=StatePolicy(zero=1, replicas=1)))
    parts = own(split, device, {n: v for n, v in values.items() if split.boxes(Item(n, "value"), device)})
    assert {part.name for part in parts} == set(layouts.trained)
    none = [part for part in parts if part.box.empty]
    assert any(part.name.startswith("blocks.2.") for part in none)
    assert all(part.parameter.dim() == max(1, len(layouts.state(part.name).shape)) for part in none)


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
    tensor = LocalTensor(shards=(), scalars={"s": value})  # type: ignore[dict-item]
    (scalar,) = (
        Schema.from_json(LocalState(tensors={W: tensor}).schema().to_json()).tensors["value"]["w"].scalars
    )
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
    state = collect(parameters(2.0), [], None)
    elsewhere: Values = {"w": [(Box(start=(0, 0), stop=(3, 4)), torch.nn.Parameter(torch.zeros(3, 4)))]}
    half: Values = {"w": [(BOX, torch.nn.Parameter(torch.zeros(3, 4, dtype=torch.bfloat16)))]}
    extra: Values = {**parameters(0.0), "v": [(BOX, torch.nn.Parameter(torch.zeros(3, 4)))]}
    for wrong, why in (
        (elsewhere, "w: a tensor for"),
        (half, "dtype and device"),
        (extra, "v: is not in"),
    ):
        with pytest.raises(ValueError, match=why):
            install(state, wrong)
        assert float(only(wrong).detach().sum()) == 0
    with pytest.raises(ValueError, match="cannot be box"):
        Shard(box=BOX, planes={"value": torch.zeros(4, 3)})


def test_groups_that_the_new_function_mixes_are_refused() -> None:
    names = ("a", "b")
    values = {n: [(Box.whole((2,)), torch.nn.Parameter(torch.zeros(2)))] for n in names}
    apart = torch.optim.SGD(
        [{"params": [values["a"][0][1]]}, {"params": [values["b"][0][1]], "lr": 1.0}], lr=0.1
    )
    state = collect(values, owned(values), apart)
    together = torch.optim.SGD([values["a"][0][1], values["b"][0][1]], lr=0.1)
    with pytest.raises(ValueError, match=r"parameter group 0: the parameters \['a', 'b'\] were in groups"):
        restore_optimizer(state, owned(values), together)


def test_merged_schema_does_not_depend_on_who_has_what_and_names_what_nobody_has() -> None:
    full, blank = state_of(*stepped(torch.optim.AdamW)).schema(), Schema()
    assert merge([full, blank], ["a/0", "b/0"]) == merge([blank, full], ["a/0", "b/0"]) == full
    assert full.sizes == {W: 4, STATE: 8}
    with pytest.raises(Disagreement, match="no rank holds any part of v"):
        check_covers(full, [W, Item("v", "value"), Item("v", "state")])


def test_merging_unlike_states_names_both_holders() -> None:
    stepped_once, blank = state_of(*stepped(torch.optim.AdamW)).schema(), state_of(parameters(), None).schema()
    with pytest.raises(Disagreement, match=r"state of w: a/0 holds exp_avg.*b/0 holds nothing yet;"):
        merge([stepped_once, blank], ["a/0", "b/0"])
    other = state_of(*stepped(torch.optim.AdamW, betas=(0.8, 0.9))).schema()
    with pytest.raises(Disagreement, match="parameter groups: b/0 has"):
        merge([stepped_once, other], ["a/0", "b/0"])
    with pytest.raises(Disagreement, match="scheduler: a/0 has 1, b/0 has 2"):
        merge([Schema(extras={"scheduler": "1"}), Schema(extras={"scheduler": "2"})], ["a/0", "b/0"])


def test_a_state_is_collected_while_the_optimizer_puts_other_numbers_there() -> None:
    """The preparing thread collects beside training."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    class Stepping(dict[str, object]):
        """Another number at each look."""

        def values(self) -> Any:
            self["step"] = torch.tensor(float(len(self)))
            return super().values()

        def items(self) -> Any:
            self["step"] = torch.tensor(float(len(self)))
            return super().items()

    optimizer.state[parameter] = Stepping(step=torch.tensor(1.0), moment=torch.zeros(3))
    box = Box.whole((3,))
    state = collect({"w": [(box, parameter)]}, [Owned("w", box, parameter)], optimizer)
    assert state.schema().tensors["state"]["w"].scalars[0].name == "step"
