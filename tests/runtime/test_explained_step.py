"""What the listing of a plan's step says is what members launch in a step, to the byte."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from elasticd_planner.batching.explained_keys import key_flows
from elasticd_planner.layout import channels
from elasticd_planner.layout.channels import Channel, Use
from elasticd_planner.layout.explained_plan import (
    BETWEEN,
    Communications,
    ModuleSizes,
    PlanOperation,
    Purpose,
    explain_modules,
    explain_step,
)
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.batch import BatchPlan
from elasticd_planner.spec.item_batch import ItemBatch
from elasticd_planner.spec.plan import Plan, StatePolicy

from elasticd.runtime.accelerator import Accelerator
from elasticd.runtime.comm.communicators import GlooCommunicators
from elasticd.runtime.comm.groups import Group, PlanGroups
from elasticd.runtime.comm.in_memory import MemoryPlanGroups, run_threads, unpaced
from elasticd.runtime.engine.engine import Engine, first_state
from elasticd.runtime.engine.mixed_precision import Precision
from elasticd.runtime.engine.recipe import Recipe
from tests import sizes
from tests.runtime import (
    image_model,
    test_cut_sequences,
    test_engine_parity,
    test_lanes,
    test_modules,
    test_pipeline_stage_interleaved,
)
from tests.runtime.test_engine import engine_on
from tests.runtime.test_engine_parity import CONFIG, plan_of, stage
from tests.runtime.test_messages import recipe_of
from tests.runtime.test_module_steps import Sized

TOKENS = 12
#: On a team: (channel, method, bytes of a tensor). Of messages: their channel is the sender and the receiver.
Sent = Counter[tuple[Channel, str, int]]


class Text:
    """Samples of one length."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, CONFIG.vocabulary, (TOKENS + 1,), generator=torch.Generator().manual_seed(index))
        return {"inputs": ids[:-1], "targets": ids[1:]}


class Counted:
    """A team or pair that counts what is launched on it."""

    def __init__(self, one: Any, channel: Channel, sent: Sent) -> None:
        self._one, self._channel, self._sent = one, channel, sent

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._one, name)
        if name not in ("all_reduce", "all_gather", "begin_all_reduce", "send"):
            return found

        def launch(tensor: torch.Tensor, *more: Any) -> Any:
            self._sent[self._channel, name.removeprefix("begin_"), tensor.nbytes] += 1
            return found(tensor, *more)

        return launch


class CountedRounds:
    """A mesh that counts what it sends."""

    def __init__(self, mesh: Any, use: Use, me: str, sent: Sent) -> None:
        self._mesh, self._use, self._me, self._sent = mesh, use, me, sent

    def begin_round(self, sends: Sequence[tuple[str, torch.Tensor]], receives: Any) -> Any:
        for to, tensor in sends:
            self._sent[Channel(self._use, (self._me, to)), "send", tensor.nbytes] += 1
        return self._mesh.begin_round(sends, receives)

    def finish(self, work: Any) -> None:
        self._mesh.finish(work)

    def arrived(self, work: Any) -> None:
        self._mesh.arrived(work)


class Counting(GlooCommunicators):
    """`Communicators` that count."""

    def __init__(
        self, sent: Sent, groups: PlanGroups, listed: Sequence[Channel], all_: Group, accelerator: Accelerator
    ) -> None:
        super().__init__(groups, tuple(listed), all_, accelerator)
        self._sent, self._me = sent, all_.me

    def mesh(self, channel: Channel) -> Any:
        return CountedRounds(super().mesh(channel), channel.use, self._me, self._sent)

    def team(self, channel: Channel) -> Any:
        return Counted(super().team(channel), channel, self._sent)

    def pair(self, channel: Channel) -> Any:
        return Counted(super().pair(channel), channel, self._sent)


SLICED = plan_of(
    (
        5,
        [
            stage(0, 2, ("a/0", 5), ("a/1", 3), sequence_parallel=True),
            stage(2, 6, ("b/0", 1), ("b/1", 1), sequence_parallel=True),
        ],
    ),
    (3, [stage(0, 6, ("c/0", 1))]),
)
RECOMPUTING = plan_of(
    (8, [stage(0, 4, ("a/0", 5), ("a/1", 3), recompute=True), stage(4, 6, ("b/0", 1), ("b/1", 1))])
)
MIXED = "three lanes of unlike width beside a deeper pipeline"
CASES: dict[str, tuple[Plan, dict[str, Any]]] = {
    **{name: (plan, {}) for name, plan in test_engine_parity.PLANS.items()},
    "lanes in two stages": (test_lanes.PLANS["2 + 1, uneven, in two stages"], {}),
    "interleaved lanes": (test_lanes.PLANS["interleaved, fewer rows than stages in one lane"], {}),
    "micro-batches of two": (test_lanes.PLANS["two pipelines of lanes, micro-batches of two"], {}),
    "zero 1": (test_lanes.PLANS[MIXED].replace(state=StatePolicy(zero=1, replicas=1)), {}),
    "zero 2": (test_pipeline_stage_interleaved.PLANS["zero 2 beside another interleaved pipeline"], {}),
    "bf16, zero 2": (
        test_lanes.PLANS[MIXED].replace(state=StatePolicy(zero=2, replicas=2)),
        {"precision": Precision(compute=torch.bfloat16)},
    ),
    "carriers": (
        test_lanes.PLANS["1 + 1"].replace(state=StatePolicy(zero=1, replicas=3), carriers=("c/0", "d/0")),
        {},
    ),
    "slices of tokens": (SLICED, {}),
    "recomputing": (RECOMPUTING, {}),
}


@pytest.mark.parametrize(
    "name",
    sizes.beside(
        [
            "interleaved lanes",
            "micro-batches of two",
            "bf16, zero 2",
            "carriers",
            "slices of tokens",
            "recomputing",
        ],
        CASES,
    ),
)
def test_the_listing_is_what_members_launch(name: str) -> None:
    plan, changes = CASES[name]
    launched, spec, gradients = trained(plan, changes)
    found = explain_step(Layouts(spec, plan), tokens=TOKENS * plan.micro_batch, gradients=gradients)
    gathers = {s.devices: p.micro_batches for _, p, s in plan.walk() if s.chunks[-1][1] == p.layers}
    for channel, own in launched.items():
        for method, (times, size) in own.items():
            if channel.use == "tensor" and method == "all_gather":
                listed = by_channel(found)[channel].get(method, (0, 0))[0]
                assert times == listed + gathers.get(channel.members, 0), (
                    channel
                )  # logits, which are not listed
            else:
                assert (times, size) == by_channel(found)[channel][method], (channel, method)
    assert set(by_channel(found)) == set(launched)


def test_the_listing_is_what_members_launch_where_sets_have_no_communicator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channels, "MOST", 5)
    test_the_listing_is_what_members_launch("zero 2")


@pytest.mark.parametrize("make", [test_cut_sequences.cutting, test_cut_sequences.by_heads])
def test_keys_of_cut_sequences_are_listed_as_members_send_them(make: Callable[[], Recipe]) -> None:
    plan = test_cut_sequences.PLANS["four lanes on two nodes, two stages"]
    sent: dict[str, Sent] = {device: Counter() for device in plan.members}

    def member(groups: MemoryPlanGroups) -> BatchPlan:
        recipe = replace(make(), connect=lambda *given: Counting(sent[groups.me], *given))
        engine = engine_on(groups, recipe, plan)
        engine.step(0, lambda: 0)
        engine.settle()
        return recipe.feed.dealing(plan, 0)()

    batch = run_threads(plan.members, member)[plan.members[0]]
    layouts = Layouts(make().model.spec, plan)
    found = explain_step(layouts, tokens=TOKENS, keys=key_flows(layouts, batch))
    listed = {key: own for key, own in by_channel(found).items() if key.use == "context"}
    launched: dict[Channel, dict[str, tuple[int, int]]] = defaultdict(dict)
    for own in sent.values():
        for (channel, method, size), times in own.items():
            if channel.use == "context":
                before = launched[channel].get(method, (0, 0))
                launched[channel][method] = before[0] + times, before[1] + times * size
    assert len(launched) > 8
    assert listed == launched


@pytest.mark.parametrize(
    "name", sizes.beside(["partly shared, unequal"], ["partly shared, unequal", "fan-in: dp 4 to tp 2, pp 2"])
)
def test_what_modules_send_each_other_is_listed_as_members_send_it(name: str) -> None:
    """And a module's own sums in its TP groups are those of the items that its lanes were dealt."""
    plan, data = test_modules.PLACEMENTS[name], Sized()
    sent: dict[str, Sent] = {device: Counter() for device in plan.members}

    def member(groups: MemoryPlanGroups) -> ItemBatch:
        made = test_modules.make_recipe(connect=lambda *given: Counting(sent[groups.me], *given))
        layouts = Layouts(made.model.specs, plan)
        engine = Engine(replace(made, dataset=data), layouts, groups, unpaced)
        engine.adopt(first_state(made.model, layouts, groups.me, image_model.SEED))
        engine.step(0, lambda: 0, lambda: 0)
        several = engine._several
        assert several is not None
        assert several._now is not None
        batch = several._now[1].batches["vision"]
        assert isinstance(batch, ItemBatch)
        engine.settle()
        return batch

    batch = run_threads(plan.members, member)[plan.members[0]]
    item = torch.empty(0, dtype=image_model.F64).itemsize
    found = explain_modules(
        Layouts(test_modules.described().specs, plan),
        None,
        {"vision": ModuleSizes(output=image_model.TEXT.width * item), "language": ModuleSizes(tokens=1)},
        {"vision": batch},
    )
    launched = Counter[Channel]()
    for device, own in sent.items():
        for (channel, _, size), times in own.items():
            if channel.use == "items" or device == channel.members[0]:
                launched[channel] += times * size
    listed = Counter[Channel]()
    for operation in found[BETWEEN].operations:
        for device in operation.devices[1:]:
            listed[Channel("items", (operation.devices[0], device))] += operation.size
    assert listed == {channel: size for channel, size in launched.items() if channel.use == "items"}
    assert len(listed) > 2
    for channel, ways in by_channel(found["vision"]).items():
        assert launched[channel] == sum(size for _, size in ways.values()), channel


def trained(
    plan: Plan, changes: dict[str, Any]
) -> tuple[dict[Channel, dict[str, tuple[int, int]]], Any, str | None]:
    """What the first member of each channel launched in a step; the model; the dtype of its gradients."""
    sent: dict[str, Sent] = {device: Counter() for device in plan.members}

    def member(groups: MemoryPlanGroups) -> Any:
        made = replace(recipe_of(**changes), dataset=Text())
        made = replace(made, connect=lambda *given: Counting(sent[groups.me], *given))
        engine = engine_on(groups, made, plan)
        engine.step(0, lambda: 0)
        engine.settle()
        return engine.layouts.spec

    spec = run_threads(plan.members, member)[plan.members[0]]
    found: dict[Channel, dict[str, tuple[int, int]]] = defaultdict(dict)
    for device, own in sent.items():
        for (channel, method, size), times in own.items():
            if device == channel.members[0]:
                before = found[channel].get(method, (0, 0))
                found[channel][method] = before[0] + times, before[1] + times * size
    return found, spec, "float32" if "precision" in changes else None


USES: dict[Purpose, Use] = {
    "activations": "activation",
    "activation gradients": "gradient",
    "tensor parallelism": "tensor",
    "keys of cut sequences": "context",
    "gradients": "reduce",
    "gradients to keepers": "state",
    "updated parameters": "state",
    "buffers": "state",
}


def by_channel(found: Communications) -> dict[Channel, dict[str, tuple[int, int]]]:
    """The same of a listing. Gloo sums where NCCL would reduce-scatter."""
    made: dict[Channel, dict[str, tuple[int, int]]] = defaultdict(dict)
    for operation in found.operations:
        for channel, method in on(operation):
            before = made[channel].get(method, (0, 0))
            made[channel][method] = before[0] + operation.times, before[1] + operation.size
    return made


def on(operation: PlanOperation) -> Iterator[tuple[Channel, str]]:
    use, devices = USES[operation.purpose], operation.devices
    if operation.operation == "send":
        use = "state" if use == "reduce" else use  # of a set that has no communicator
        for device in devices[1:]:
            yield Channel(use, (devices[0], device)), "send"
    else:
        method = "all_reduce" if operation.operation == "reduce_scatter" else operation.operation
        yield Channel(use, devices), method
