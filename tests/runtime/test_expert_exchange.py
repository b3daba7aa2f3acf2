"""Rows go once to each device with experts of theirs, in few bytes beside their own; the host waits once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import pytest
import torch
from elasticd_planner.cost.expert_messages import expert_flows
from elasticd_planner.cost.model_profile import ExpertProfile
from elasticd_planner.layout.channels import Channel
from elasticd_planner.layout.explained_plan import listed
from elasticd_planner.spec.plan import HeldExperts, Pipeline, Stage, Strategy
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import elasticd
from elasticd import Experts, UnitsOf
from elasticd.runtime.comm.communicators import GlooCommunicators
from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.in_memory import MemoryPlanGroups, run_threads
from elasticd.runtime.comm.running_group import OneDevice
from elasticd.runtime.model.local_model import local_model
from elasticd.runtime.model.validation import ModelError
from elasticd.runtime.parallel.expert_exchange import ExpertExchange
from tests.models.mixture import StackedExperts
from tests.planner.models import plan as plan_of

EXPERTS, CHOSEN = 8, 3
HELD: HeldExperts = ((0, 1, 5, 7), (0, 2, 6), (3, 4, 6))
STAGE = Stage(start=0, stop=1, devices=("a", "b", "c"), shares=(1, 1, 1), lanes=(1, 1, 1), experts=(HELD,))


class Block(nn.Module):
    """Experts alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.experts = StackedExperts(EXPERTS, width, 4)


class CountedMesh:
    """A mesh that counts the bytes that are sent over it."""

    def __init__(self, mesh: Any) -> None:
        self._mesh, self.sent = mesh, list[int]()

    def begin_round(self, sends: Sequence[tuple[str, Tensor]], receives: Sequence[tuple[str, Tensor]]) -> Any:
        self.sent.append(sum(tensor.nbytes for _, tensor in sends))
        return self._mesh.begin_round(sends, receives)

    def finish(self, work: Any) -> None:
        self._mesh.finish(work)

    def arrived(self, work: Any) -> None:
        self._mesh.arrived(work)


class Waits(TorchFunctionMode):
    """Counts what a host waits for an accelerator in, outside of the experts' own code."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        names = {"tolist", "item", "nonzero", "__bool__", "__int__", "__float__", "masked_select", "cpu"}
        self.count += getattr(function, "__name__", "") in names
        return function(*args, **(kwargs or {}))


@dataclass
class Passed:
    """Of one device: gradients, the bytes of each round, and the waits of a forward and a backward pass."""

    output: Tensor
    rows: Tensor | None
    weights: Tensor | None
    sent: list[int]
    waits: int
    computed: int


def exchanged(rows: Mapping[str, Tensor], index: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Any:
    """A forward and a backward pass of each device's rows; of one without rows it serves."""
    torch.manual_seed(0)
    width = next(iter(rows.values())).shape[1]
    block = Block(width).to(next(iter(rows.values())).dtype)
    model = elasticd.Model(
        embed=nn.Embedding(3, width),
        blocks=[block],
        head=nn.Linear(width, 3),
        rules={"blocks.*.experts.*": Experts("experts")},
        units={"experts": UnitsOf(attribute="blocks.*.experts.count")},
    )
    whole = block.experts

    def worker(memory: MemoryPlanGroups) -> Passed:
        me = memory.me
        place = STAGE.devices.index(me)
        local = local_model(model, STAGE.by_lane[place], 0, only=("blocks.0",))
        owner = local.modules["blocks.0"].experts
        for name, held in local.parameters.items():
            held.tensor.data = whole.get_parameter(name.rpartition(".")[2]).detach()[list(HELD[place])]
        calls: list[int] = []
        own_forward = owner.forward
        waits = Waits()

        def counted(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            before = waits.count
            calls.append(len(x))
            output: Tensor = own_forward(x, index, weights)
            waits.count = before
            return output

        owner.forward = counted
        groups = cast(PlanGroups, memory)
        channel = Channel("experts", STAGE.devices)
        everyone = groups.group(STAGE.devices, "vote")
        mesh = CountedMesh(GlooCommunicators(groups, (channel,), everyone).mesh(channel))
        exchange = ExpertExchange(model.spec, STAGE, me, mesh, OneDevice(me))
        exchange.attach(model, "blocks.0", local.modules["blocks.0"])
        with waits:
            if me not in rows:
                output = exchange.serve("blocks.0")
                output.backward(torch.zeros_like(output))
                return Passed(output.detach(), None, None, mesh.sent, waits.count, sum(calls))
            x, w = rows[me].clone().requires_grad_(), weights[me].clone().requires_grad_()
            output = owner(x, index[me], w)
            output.sum().backward()
        return Passed(output.detach(), x.grad, w.grad, mesh.sent, waits.count, sum(calls))

    return whole, run_threads(STAGE.devices, worker)


def drawn(counts: Mapping[str, int], width: int, dtype: torch.dtype) -> tuple[dict[str, Tensor], ...]:
    torch.manual_seed(1)
    rows = {me: torch.randn(count, width, dtype=dtype) for me, count in counts.items()}
    index = {me: torch.rand(count, EXPERTS).topk(CHOSEN).indices for me, count in counts.items()}
    weights = {me: torch.rand(count, CHOSEN, dtype=dtype) for me, count in counts.items()}
    return rows, index, weights


@pytest.mark.parametrize("counts", [{"a": 9, "b": 4, "c": 1}, {"b": 7}, {"a": 3, "c": 0}])
def test_outputs_and_gradients_are_those_of_all_experts_in_one_place(counts: dict[str, int]) -> None:
    rows, index, weights = drawn(counts, 6, torch.float64)
    whole, passed = exchanged(rows, index, weights)
    for me in counts:
        x, w = rows[me].clone().requires_grad_(), weights[me].clone().requires_grad_()
        output = whole(x, index[me], w)
        (output.sum() + 0.0 * (x.sum() + w.sum())).backward()
        found = passed[me]
        for one, other in ((found.output, output), (found.rows, x.grad), (found.weights, w.grad)):
            assert one.shape == other.shape
            assert torch.allclose(one, other, atol=1e-14, rtol=0)
    assert sum(each.computed for each in passed.values()) == CHOSEN * sum(counts.values())


def least_bytes(index: Mapping[str, Tensor], width: int) -> int:
    """Each row once to each other device that has one of its experts, and back."""
    distinct = 0
    for me, chosen in index.items():
        for number, experts in enumerate(chosen.tolist()):
            holders = [[device for device in range(3) if expert in HELD[device]] for expert in experts]
            spread = number * 40503 % 65536
            to = {places[spread * len(places) // 65536] for places in holders}
            distinct += len(to - {STAGE.devices.index(me)})
    return 2 * distinct * width * 4


def sent_and_least(width: int) -> tuple[int, int]:
    """Bytes of a forward pass of two devices' rows, and the least of them."""
    rows, index, weights = drawn({"a": 50, "b": 20}, width, torch.float32)
    _, passed = exchanged(rows, index, weights)
    return sum(sum(each.sent[:3]) for each in passed.values()), least_bytes(index, width)


def test_a_row_goes_once_to_a_device_and_the_host_waits_once() -> None:
    rows, index, weights = drawn({"a": 50, "b": 20}, 1024, torch.float32)
    _, passed = exchanged(rows, index, weights)
    forward = sum(sum(each.sent[:3]) for each in passed.values())
    backward = sum(sum(each.sent[3:]) for each in passed.values())
    assert (least := least_bytes(index, 1024)) <= backward <= forward <= 1.02 * least
    assert {(len(each.sent), each.waits) for each in passed.values()} == {(5, 1)}


def test_the_planner_counts_what_is_sent() -> None:
    """Rows of which each has another set of three experts; those of experts on two devices are divided."""
    sets = torch.combinations(torch.arange(EXPERTS), CHOSEN)
    rows, index, weights = drawn(dict.fromkeys(STAGE.devices, len(sets)), 64, torch.float32)
    _, passed = exchanged(rows, dict.fromkeys(index, sets), weights)
    given = plan_of((3, [(1, ["a"], [1])]))
    pipeline = Pipeline(stages=(STAGE,), micro_batches=3, rows=(1, 1, 1))
    module = msgspec.structs.replace(given.module, pipelines=(pipeline,))
    plan = given.replace(strategies=(Strategy(modules=(module,)),))
    profile = ExpertProfile(part=0.5, chosen=CHOSEN, count=EXPERTS)
    found = listed(expert_flows(plan, profile, len(sets), 64 * 4, 4), None)
    for purpose, part in (("expert rows", slice(0, 3)), ("expert gradients", slice(3, None))):
        sent = sum(sum(each.sent[part]) for each in passed.values())
        assert sum(found.bytes(purpose).values()) == pytest.approx(sent, rel=0.03)


def test_a_block_whose_experts_draw_or_are_in_two_modules_is_refused() -> None:
    class Dropping(Block):
        def __init__(self) -> None:
            super().__init__(4)
            self.experts.drop = nn.Dropout(0.1)

    class Two(Block):
        def __init__(self) -> None:
            super().__init__(4)
            self.more = StackedExperts(EXPERTS, 4, 4)

    for block, said in (
        (Dropping(), "blocks.0.experts has a dropout: other lanes' rows have no keys"),
        (Two(), "blocks.0 has experts in experts and more: lanes share those of one module alone"),
    ):
        model = elasticd.Model(
            embed=nn.Embedding(3, 4),
            blocks=[block],
            head=nn.Linear(4, 3),
            rules={"blocks.*.experts.*": Experts("experts"), "blocks.*.more.*": Experts("experts")}
            if isinstance(block, Two)
            else {"blocks.*.experts.*": Experts("experts")},
        )
        local = local_model(model, STAGE.by_lane[0], 0, only=("blocks.0",))
        exchange = ExpertExchange(model.spec, STAGE, "a", cast(Any, None), OneDevice("a"))
        with pytest.raises(ModelError, match=said):
            exchange.attach(model, "blocks.0", local.modules["blocks.0"])
