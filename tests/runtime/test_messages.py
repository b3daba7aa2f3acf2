"""Messages between the members of a plan: launched as the plan says whatever happens in a step, of the same
sizes at both ends, kept until they have been received, and few at a time."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from math import prod
from typing import Any, cast

import pytest
import torch
from elasticd_planner.cost.schedule import Pass
from elasticd_planner.layout import gradient_reduction
from elasticd_planner.layout.channels import Channel
from elasticd_planner.layout.flows import Border
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.plan import Plan, StatePolicy
from torch import Tensor

from elasticd.models import Decoder
from elasticd.runtime.accelerator import CPU, Accelerator
from elasticd.runtime.api.evaluation import HeldOut, evaluate
from elasticd.runtime.comm.communicators import GlooCommunicators
from elasticd.runtime.comm.groups import Group, PlanGroups
from elasticd.runtime.comm.in_memory import MemoryGroup, MemoryPlanGroups, run_threads
from elasticd.runtime.data.prefetch import SampleError
from elasticd.runtime.engine.mixed_precision import LossScale, Precision
from elasticd.runtime.engine.p2p import AbsentGradients, NextStage, PrevStage, gradient_messages
from elasticd.runtime.engine.parallelism import ParallelismOptions
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.model.tp_rules import Column, Row, Rule
from elasticd.runtime.parallel.gradient_reduction import gradient_dtype
from tests import sizes
from tests.models.layouts import Training
from tests.models.test_validation import Whole
from tests.models.test_validation import training as of_odd_modules
from tests.planner.launch_order import Launch
from tests.planner.launches import launches
from tests.runtime.test_engine import Torn, engine_on
from tests.runtime.test_engine_masked import Masked, mean_loss
from tests.runtime.test_engine_parity import CONFIG, make_recipe, plan_of, stage
from tests.runtime.test_evaluation import Held
from tests.runtime.test_lanes import PLANS as LANES
from tests.runtime.test_pipeline_stage_interleaved import PLANS as INTERLEAVED

STEPS = 2


@dataclass(frozen=True)
class Launched:
    """What one member did on a channel."""

    channel: Channel
    size: int
    dtype: torch.dtype


class Noted:
    """A team or pair, with a list of what is launched on it."""

    def __init__(self, one: Any, channel: Channel, log: list[Launched], me: str = "") -> None:
        self._one, self._channel, self._log, self._me = one, channel, log, me

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._one, name)
        if name == "begin_round":
            return partial(self._round, found)
        if name not in ("all_reduce", "all_gather", "begin_all_reduce", "send", "begin_receive", "receive"):
            return found

        def launch(tensor: Tensor, *more: Any) -> Any:
            self._log.append(Launched(self._channel, tensor.numel(), tensor.dtype))
            return found(tensor, *more)

        return launch

    def _round(self, launch: Any, sends: Any, receives: Any) -> Any:
        """One launch, and the messages of it."""
        ends = [((self._me, to), tensor) for to, tensor in sends]
        ends += [((source, self._me), tensor) for source, tensor in receives]
        self._log.append(Launched(self._channel, 0, torch.int8))
        for pair, tensor in ends:
            self._log.append(Launched(Channel("message", pair), tensor.numel(), tensor.dtype))  # type: ignore[arg-type]
        return launch(sends, receives)


class Notes:
    """`Communicators` that note what is launched on the plan's channels; others raise KeyError."""

    def __init__(
        self, log: list[Launched], groups: PlanGroups, listed: Sequence[Channel], all_: Group, on: Accelerator
    ) -> None:
        self._inner, self._me = GlooCommunicators(groups, tuple(listed), all_, on), groups.me
        self._log, self._listed = log, {channel: channel for channel in listed}

    def team(self, channel: Channel) -> Any:
        return Noted(self._inner.team(channel), self._listed[channel], self._log)

    def pair(self, channel: Channel) -> Any:
        return Noted(self._inner.pair(channel), self._listed[channel], self._log)

    def mesh(self, channel: Channel) -> Any:
        return Noted(self._inner.mesh(channel), self._listed[channel], self._log, self._me)

    def first_launches(self, sums: object) -> None:
        pass

    def received(self) -> None:
        self._inner.received()


HALF = Precision(compute=torch.bfloat16)
OVERFLOWS = Precision(compute=torch.float16, scale=LossScale(first=2.0**120))
MIXED = "three lanes of unlike width beside a deeper pipeline"
CASES: dict[str, tuple[Plan, dict[str, Any]]] = {
    "plain": (INTERLEAVED["zero 2 beside another interleaved pipeline"], {}),
    "frozen embedding and block": (LANES[MIXED], {"frozen": ("embed.", "blocks.1.")}),
    "frozen head": (
        INTERLEAVED["three stages, two chunks, unequal groups"].replace(state=StatePolicy(zero=1, replicas=3)),
        {"frozen": ("head.",)},
    ),
    "no targets": (LANES[MIXED], {"dataset": Masked(), "loss": mean_loss}),
    "bf16": (LANES[MIXED].replace(state=StatePolicy(zero=2, replicas=2)), {"precision": HALF}),
    "no update": (LANES[MIXED].replace(state=StatePolicy(zero=1, replicas=1)), {"precision": OVERFLOWS}),
    "unread sample": (INTERLEAVED["two stages, two chunks"], {"torn": True}),
}


def recipe_of(
    *,
    frozen: tuple[str, ...] = (),
    precision: Precision | None = None,
    torn: bool = False,
    **changes: Any,
) -> Recipe:
    with torch.device("meta"):
        decoder = Decoder(CONFIG)
        for name, parameter in decoder.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen) if frozen else True)
        model = decoder.describe()
    made = replace(make_recipe(), model=model, parallelism=ParallelismOptions(precision=precision), **changes)
    return replace(made, dataset=Torn(made.sampler.samples(1)[3])) if torn else made


@pytest.mark.parametrize(
    "name", sizes.beside(["frozen embedding and block", "no targets", "no update", "unread sample"], CASES)
)
def test_every_rank_launches_what_the_plan_says_with_an_evaluation_after_each_step(name: str) -> None:
    plan, changes = CASES[name]
    logs: dict[str, list[Launched]] = {device: [] for device in plan.members}

    def member(plan_groups: MemoryPlanGroups) -> tuple[list[tuple[int, int, bool]], dict[str, str]]:
        log = logs[plan_groups.me]
        made = recipe_of(**changes)
        made = replace(made, connect=lambda *given: Notes(log, *given))
        engine, steps = engine_on(plan_groups, made, plan), []
        for step in range(STEPS):
            begin, applied = len(log), False
            try:
                applied = engine.step(step, lambda: 0).outcome.vote.apply
            except SampleError:
                assert changes["torn"]
            steps.append((begin, len(log), applied))
            evaluate(engine, HeldOut(dataset=Held()), "held", step, made.loss, made.data, "value")
        engine.settle()
        named = {n: gradient_dtype(p) for n, (_, p) in engine.module.local.parameters.items()}
        return steps, {n: str(dtype).removeprefix("torch.") for n, dtype in named.items()}

    found = run_threads(plan.members, member)
    on: dict[Channel, dict[str, list[Launched]]] = defaultdict(lambda: defaultdict(list))
    for device, log in logs.items():
        for each in log:
            on[each.channel][device].append(each)
    for channel, by_device in on.items():
        if channel.use == "state":  # a round is of those that have messages in it
            continue
        assert set(by_device) == set(channel.members)
        assert len({tuple(each) for each in by_device.values()}) == 1, (
            f"{channel}: other sizes, or another order"
        )
    made, dtypes = recipe_of(**changes), {n: each for _, named in found.values() for n, each in named.items()}
    for step in range(STEPS):
        layouts, batch = Layouts(made.model.spec, plan), made.feed.dealing(plan, step)()
        predicted = launches(layouts, batch, made.schedule, dtype_of=dtypes.__getitem__)
        for device, (steps, _) in found.items():
            begin, end, applied = steps[step]
            expected = [
                entry.communicator
                for entry in predicted[device]
                if isinstance(entry, Launch)
                and not entry.communicator.startswith("tensor ")
                and (applied or not entry.operations[0].name.startswith("values "))
            ]
            launched = [each.channel for each in logs[device][begin:end]]
            here = [str(channel) for channel in launched if channel.use not in ("tensor", "message")]
            assert here == expected, device


class Watching(MemoryGroup):
    """Raises where a message is dropped that was not received."""

    plan_groups: WatchedGroups

    def send(self, tensor: Tensor, to: int, tag: int, label: str = "boundary") -> int:
        number = next(self.plan_groups.numbers)
        with self.plan_groups.lock:
            self.plan_groups.mail[self.rank, to, tag].append((self.me, number))
        super().send(tensor, to, tag, label)
        self._sent[number] = None, tensor
        return number

    def take(self, work: tuple[Tensor, int, int], label: str = "boundary", source: int | None = None) -> None:
        time.sleep(self.plan_groups.slow.get(self.me, 0))
        super().take(work, label, source)
        with self.plan_groups.lock:
            self.plan_groups.came.add(self.plan_groups.mail[work[1], self.rank, work[2]].pop(0))

    def arrived(self, numbers: Iterable[int]) -> None:
        listed = list(numbers)
        lost = {(self.me, number) for number in listed if number} - self.plan_groups.came
        assert not lost, "a message was dropped before it was received"
        super().arrived(listed)

    def received(self) -> None:
        self.arrived(list(self._sent))


class WatchedGroups(MemoryPlanGroups):
    """Groups of one member; `mail` and `came` are those of all."""

    def __init__(self, memory: MemoryPlanGroups, shared: dict[str, Any], slow: dict[str, float]) -> None:
        super().__init__(memory.world, memory.me)
        self.mail, self.came, self.lock = shared["mail"], shared["came"], shared["lock"]
        self.numbers, self.slow = count(1), slow
        self._made: dict[tuple[tuple[str, ...], str], MemoryGroup] = {}

    def group(self, members: Sequence[str], label: str) -> MemoryGroup:
        return self._made.setdefault((tuple(members), label), Watching(self, tuple(members), self.me, label))


def trains(recipe: Recipe, plan: Plan, slow: dict[str, float]) -> list[Any]:
    """Losses under a plan some of whose members are `slow` to receive, by so many seconds."""
    shared: dict[str, Any] = {"mail": defaultdict(list), "came": set(), "lock": threading.RLock()}

    def member(memory: MemoryPlanGroups) -> list[Any]:
        engine = engine_on(WatchedGroups(memory, shared, slow), replace(recipe), plan)
        losses = [engine.step(step, lambda: 0).outcome.vote.loss for step in range(STEPS)]
        engine.settle()
        return losses

    return run_threads(plan.members, member)[plan.members[0]]


def test_members_that_never_wait_for_each_other_prove_nothing_for_each_other() -> None:
    """Of unlike blocks the first alone is cut: a TP group of the others computes side by side."""
    odd: Training = of_odd_modules(Whole().double())
    rules: dict[str, Rule] = {"blocks.0.up.*": Column("inner"), "blocks.0.down.weight": Row("inner")}
    sections = odd.model.sections
    model = type(odd.model)(
        embed=sections["embed"],
        blocks=[sections[f"blocks.{layer}"] for layer in range(4)],
        head=sections["head"],
        rules=rules,
    )
    assert model.spec.collectives == 1
    plan = plan_of((8, [stage(0, 2, ("a/0", 1)), stage(2, 3, ("a/1", 1), ("a/2", 1)), stage(3, 4, ("b/0", 1))]))
    made = replace(odd, model=model).recipe()
    whole = plan_of((8, [stage(0, 4, ("a/0", 1))]))
    assert trains(made, plan, {"a/2": 0.02}) == pytest.approx(trains(made, whole, {}), abs=1e-12)


def by_twos(stages: int, stage: int, micro_batches: int, chunks: int) -> Iterator[Pass]:
    """Two micro-batches forward, then backward the second one first. The first of two stages begins the next
    two before the last backward pass."""
    yield from (Pass("forward", 0), Pass("forward", 1))
    for first in range(0, micro_batches, 2):
        last = first + 2 == micro_batches
        yield Pass("backward", first + 1)
        if stage == 0 and not last:
            yield Pass("forward", first + 2)
        yield Pass("backward", first)
        if stage and not last:
            yield Pass("forward", first + 2)
        if not last:
            yield Pass("forward", first + 3)


def test_what_was_sent_backward_is_dropped_in_the_order_of_the_schedule() -> None:
    plan = plan_of((8, [stage(0, 3, ("a/0", 1)), stage(3, 6, ("a/1", 1))]))
    recipe = replace(make_recipe(), schedule=by_twos)
    assert trains(recipe, plan, {"a/0": 0.01}) == pytest.approx(trains(make_recipe(), plan, {}), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_gradient_of_negative_zeros_is_none_that_is_absent(dtype: torch.dtype) -> None:
    x = {name: torch.ones(2, 3, dtype=dtype, requires_grad=True) for name in ("zeros", "absent", "wide")}
    given = {"zeros": torch.full((2, 3), -0.0, dtype=dtype), "absent": None}
    given["wide"] = torch.full((1, 3), -0.0, dtype=dtype).expand(2, 3)
    messages = dict(zip(x, gradient_messages(x, given), strict=True))
    came = AbsentGradients().without(dict(messages))
    assert came["absent"] is None
    assert torch.equal(came["zeros"], torch.zeros(2, 3, dtype=dtype))
    assert torch.equal(came["wide"], torch.zeros(2, 3, dtype=dtype))


def test_an_empty_gradient_proves_nothing() -> None:
    """Nothing is sent of it: it may be there before the header that it answers has been received."""
    shared: dict[str, Any] = {"mail": defaultdict(list), "came": set(), "lock": threading.RLock()}

    def member(memory: MemoryPlanGroups) -> None:
        groups = WatchedGroups(memory, shared, {})
        forth, back = Channel("activation", ("a/0", "a/1")), Channel("gradient", ("a/1", "a/0"))
        everyone = groups.group(("a/0", "a/1"), "vote")
        border = Border("a/1", ("a/1",)) if memory.me == "a/0" else Border("a/0", ("a/0",))
        kind = NextStage if memory.me == "a/0" else PrevStage
        other = kind(
            everyone,
            GlooCommunicators(cast(PlanGroups, groups), (forth, back), everyone),
            border,
            torch.float32,
            CPU,
            implies_all_received=True,
            chunk=0,
            chunks=1,
        )
        empty = torch.zeros(1, 0, 4)
        if isinstance(other, NextStage):
            other.begin_step()
            other.announce(0, empty, (7,))
            other.send(0, [empty])
            other.post(0, empty)
            assert other.gradient(0).shape == empty.shape
        else:
            time.sleep(0.05)
            other.begin_step([Pass("forward", 0)])
            other.receive(0, 1)
            came, ids = other.activation(0)
            assert (came.shape, ids) == (empty.shape, (7,))

    run_threads(("a/0", "a/1"), member)


def test_deliveries_are_received_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under ZeRO with many members most of the parameters come: never all of them at once."""
    pipelines = [(1, [stage(0, 6, (f"n/{index}", 1))]) for index in range(8)]
    plan = plan_of(*pipelines).replace(state=StatePolicy(zero=1, replicas=1))
    spec = make_recipe().model.spec
    whole = sum(8 * prod(Layouts(spec, plan).parameter(name).shape) for name in Layouts(spec, plan).names)
    monkeypatch.setattr(gradient_reduction, "ROUND_BYTES", whole // 4)
    most: dict[str, int] = {}

    class Counted(GlooCommunicators):
        def __init__(
            self, groups: PlanGroups, listed: tuple[Channel, ...], everyone: Group, on: Accelerator
        ) -> None:
            super().__init__(groups, listed, everyone, on)
            self.now, self.me = 0, groups.me

        def mesh(self, channel: Channel) -> Any:
            inner, all_ = super().mesh(channel), self

            class Mesh(type(inner)):  # type: ignore[misc]
                def begin_round(self, sends: Any, receives: Any) -> Any:
                    more = sum(tensor.nbytes for _, tensor in receives)
                    all_.now += more
                    most[all_.me] = max(most.get(all_.me, 0), all_.now)
                    return more, super().begin_round(sends, receives)

                def finish(self, work: Any) -> None:
                    all_.now -= work[0]
                    super().finish(work[1])

            inner.__class__ = Mesh
            return inner

    def member(plan_groups: MemoryPlanGroups) -> float | None:
        engine = engine_on(plan_groups, replace(make_recipe(), connect=Counted), plan)
        loss = engine.step(0, lambda: 0).outcome.vote.loss
        engine.settle()
        return loss

    run_threads(plan.members, member)
    assert whole // 8 < max(most.values()) <= whole // 4
