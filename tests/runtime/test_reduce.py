"""Gradients are reduced beside the backward pass, in one order on all ranks, and each is counted once."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from elasticd_planner.layout.channels import Channel
from elasticd_planner.layout.gradient_buckets import Bucket
from elasticd_planner.layout.gradient_reduction import Piece
from elasticd_planner.spec.box import Box
from torch import nn

from elasticd.runtime.comm.communicators import GlooMesh, Mesh, Pair, Peers, Team
from elasticd.runtime.comm.groups import Group
from elasticd.runtime.comm.in_memory import MemoryPlanGroups, run_threads
from elasticd.runtime.model.local_model import LocalParameter
from elasticd.runtime.parallel.gradient_reduction import GradientReducer, Parameters, sum_of_squares
from elasticd.runtime.reference.live_bytes import LiveBytes

BOTH = ("a/0", "b/0")
SECTIONS = ("embed", "blocks.0", "head")


def made(tied: bool = False) -> tuple[Parameters, dict[str, nn.Module]]:
    modules: dict[str, nn.Module] = {section: nn.Linear(3, 2, bias=False) for section in SECTIONS}
    if tied:
        modules["head"].weight = modules["embed"].weight  # type: ignore[assignment]
    box = Box(start=(0, 0), stop=(2, 3))
    names = SECTIONS[:-1] if tied else SECTIONS
    return {f"{name}.weight": LocalParameter((box,), modules[name].weight) for name in names}, modules  # type: ignore[arg-type]


def queue(parameters: Parameters, counting: tuple[str, ...] = BOTH) -> tuple[Bucket, ...]:
    """A bucket for each parameter, the last one first."""
    return tuple(
        Bucket(
            devices=BOTH,
            pieces=(Piece(name=name, box=box, counting=counting),),
            dtype="float32",
            counter=BOTH[number % 2],
        )
        for number, (name, ((box,), _)) in enumerate(reversed(parameters.items()))
    )


class Reducing:
    """Communicators of which the reducer uses one."""

    def __init__(self, team: Group) -> None:
        self._team = team

    def team(self, channel: Channel) -> Team:
        assert channel == Channel("reduce", BOTH)
        return self._team

    def pair(self, channel: Channel) -> Pair:
        raise AssertionError(channel)

    def mesh(self, channel: Channel) -> Mesh:
        assert channel == Channel("state", BOTH)
        return GlooMesh(self._team, "state")

    def first_launches(self, sums: object) -> None:
        pass

    def received(self) -> None:
        raise AssertionError


def train(
    plan_groups: MemoryPlanGroups, *, tied: bool = False, counting: tuple[str, ...] = BOTH, own: bool = True
) -> dict[str, Any]:
    """What was sent after each section of the backward pass, and the sums."""
    parameters, modules = made(tied)
    group = plan_groups.group(BOTH, "reduce")
    begin, sent = group.begin_all_reduce, list[int]()

    def count(tensor: torch.Tensor) -> Any:
        sent.append(tensor.numel())
        return begin(tensor)

    group.begin_all_reduce = count  # type: ignore[method-assign]
    reducer = GradientReducer(
        plan_groups.me,
        (),
        queue(parameters, counting) if own else (),
        () if own else (queue(parameters, counting),),
        Peers(everyone=group, communicators=Reducing(group), channels=()),
        parameters,
        modules,
    )
    after = []
    for number, section in enumerate(reversed(SECTIONS)):
        name = f"{section}.weight" if f"{section}.weight" in parameters else "embed.weight"
        weight = parameters[name].tensor
        grad = torch.full((2, 3), float(10**number * (1 + BOTH.index(plan_groups.me))))
        weight.grad = grad if weight.grad is None else weight.grad + grad
        reducer.section_done(section)
        after.append(len(sent))
    reducer()
    grads = {name: float(p.grad[0, 0]) for name, (_, p) in parameters.items() if p.grad is not None}
    return {"after": after, "grads": grads, "squares": reducer.squares}


def test_each_bucket_is_sent_as_soon_as_its_section_is_done() -> None:
    found = run_threads(BOTH, train)
    for result in found.values():
        assert result["after"] == [1, 2, 3]
        assert result["grads"] == {"embed.weight": 300.0, "blocks.0.weight": 30.0, "head.weight": 3.0}
    assert sum(each["squares"] for each in found.values()) == 6 * (300.0**2 + 30.0**2 + 3.0**2)
    assert all(each["squares"] > 0 for each in found.values()), "devices take turns"


def test_buckets_of_a_set_without_a_communicator_are_passed_on_after_all_passes() -> None:
    found = run_threads(BOTH, lambda plan_groups: train(plan_groups, own=False))
    for result in found.values():
        assert result["after"] == [0, 0, 0]
        assert result["grads"] == {"embed.weight": 300.0, "blocks.0.weight": 30.0, "head.weight": 3.0}
    assert sum(each["squares"] for each in found.values()) == 6 * (300.0**2 + 30.0**2 + 3.0**2)


def test_a_tied_parameter_waits_for_all_its_sections() -> None:
    found = run_threads(BOTH, lambda plan_groups: train(plan_groups, tied=True))
    for result in found.values():
        assert result["after"] == [0, 1, 2]
        assert result["grads"] == {"embed.weight": 303.0, "blocks.0.weight": 30.0}


def test_a_replica_of_the_same_term_is_not_counted_twice() -> None:
    found = run_threads(BOTH, lambda plan_groups: train(plan_groups, counting=("b/0",)))
    for result in found.values():
        assert result["grads"] == {"embed.weight": 200.0, "blocks.0.weight": 20.0, "head.weight": 2.0}


def test_gradients_of_several_boxes_lie_in_their_bucket_alone() -> None:
    """What the backward pass made of all boxes is let go once all of them are in buckets."""
    boxes = tuple(Box(start=(row, 0), stop=(row + 1, 3)) for row in (0, 2))

    def worker(plan_groups: MemoryPlanGroups) -> tuple[bool, list[list[list[float]]]]:
        module = nn.Linear(3, 2, bias=False)
        parameters = {"embed.weight": LocalParameter(boxes, module.weight)}
        group = plan_groups.group(BOTH, "reduce")
        pieces = tuple(Piece(name="embed.weight", box=box, counting=BOTH) for box in boxes)
        bucket = Bucket(devices=BOTH, pieces=pieces, dtype="float32", counter=BOTH[0])
        peers = Peers(everyone=group, communicators=Reducing(group), channels=())
        reducer = GradientReducer(plan_groups.me, (), (bucket,), (), peers, parameters, {"embed": module})
        module.weight.grad = torch.arange(6.0).view(2, 3)
        reducer.section_done("embed")
        reducer()
        return module.weight.grad is None, [reducer.box_sums["embed.weight"][box].tolist() for box in boxes]

    expected = [[[0.0, 2.0, 4.0]], [[6.0, 8.0, 10.0]]]
    assert run_threads(BOTH, worker) == dict.fromkeys(BOTH, (True, expected))


class Unsummed:
    """A team whose sums are there at once, and are this device's terms."""

    def begin_all_reduce(self, tensor: torch.Tensor) -> None:
        pass

    def finish(self, work: None) -> None:
        pass

    def team(self, channel: Channel) -> Any:
        return self


@pytest.mark.parametrize("several", [False, True])
def test_gradients_that_are_cut_to_pieces_lie_in_memory_once(several: bool) -> None:
    """Of one box, or of several, each in pieces of several sets of devices."""
    width, count = 64, 16
    runs = ((0, 4), (6, 8)) if several else ((0, 6),)
    boxes = tuple(Box(start=(start, 0), stop=(stop, width)) for start, stop in runs)
    cells = [(row, row + 2) for start, stop in runs for row in range(start, stop, 2)]
    module = nn.ModuleList(nn.Linear(width, 6, bias=False) for _ in range(count))
    parameters = {f"{at}.weight": LocalParameter(boxes, layer.weight) for at, layer in enumerate(module)}
    listed = [
        Bucket(
            devices=BOTH,
            pieces=(Piece(name=name, box=Box(start=(start, 0), stop=(stop, width)), counting=BOTH),),
            dtype="float32",
            counter=BOTH[0],
        )
        for name in reversed(parameters)
        for start, stop in cells
    ]
    everyone = cast(Any, SimpleNamespace(me=BOTH[0], members=BOTH))
    peers = Peers(everyone=everyone, communicators=cast(Any, Unsummed()), channels=())
    reducer = GradientReducer(BOTH[0], (), listed, (), peers, parameters, {"head": module})
    with LiveBytes(module.parameters()) as live:
        for _, parameter in parameters.values():
            parameter.grad = torch.arange(6.0 * width).view(6, width)
        terms = live.now
        reducer.section_done("head")
        reducer()
    most, one = live.most, 6 * width * 4
    live.begin()
    assert live.now == terms == count * one
    assert most <= terms + 2 * one
    for _, parameter in parameters.values():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, torch.arange(6.0 * width).view(6, width))


def test_squares_are_exact_to_the_gradients_precision_and_do_not_overflow() -> None:
    drawn = torch.randn(300_000, generator=torch.Generator().manual_seed(1))
    gradients = [drawn, torch.full((2, 3), 2.0, dtype=torch.bfloat16)]
    exact = float(drawn.double().square().sum()) + 24.0
    assert sum_of_squares(gradients) == pytest.approx(exact, rel=1e-6)
    assert sum_of_squares([each.double() for each in gradients]) == pytest.approx(exact, rel=1e-12)
    assert sum_of_squares([torch.full((4,), 1e30)]) == pytest.approx(4e60)
    assert sum_of_squares([torch.full((4,), math.inf)]) == math.inf
    assert sum_of_squares([]) == 0.0


def test_squares_of_small_gradients_are_added_in_their_order() -> None:
    """To the bit, whatever comes to the host together."""
    generator = torch.Generator().manual_seed(2)
    gradients = [torch.randn(size, generator=generator) for size in (1, 17, 300, 5, 64)]
    assert sum_of_squares(gradients) == sum(torch.dot(each, each).item() for each in gradients)
    mixed = [*gradients, gradients[2].double(), torch.randn(40_000, generator=generator)]
    chunks = torch.stack([torch.dot(part, part) for part in mixed[-1].split(1 << 15)]).double().sum().item()
    assert sum_of_squares(mixed) == sum([*(torch.dot(each, each).item() for each in mixed[:-1]), chunks])
