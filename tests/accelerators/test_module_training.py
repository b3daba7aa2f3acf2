"""Models of several modules on a device that is not the CPU, under the rules of NCCL: they train as one process
on the CPU, and no order of launches lets ranks wait for each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
from elasticd_planner.spec.plan import Plan

from elasticd.runtime.accelerator import Accelerator
from elasticd.runtime.comm.groups import PlanGroups
from tests import sizes
from tests.accelerators import vgpu
from tests.accelerators.strict_process_group import StrictGroups, connected
from tests.planner.launch_order import deadlock, in_one_queue
from tests.runtime import drawn_placements, gang, test_modules, test_packed_modules

PLANS = test_modules.PLACEMENTS
#: Modules that share some devices, TP groups that overlap; and pipelines in both, one of them interleaved.
HERE = ("partly shared, unequal", "encoder pp 2, language interleaved")


def worker(device: str, store: Any, plan: Plan) -> dict[str, Any]:
    """One member of the plan, on a vgpu of its own."""
    vgpu.load()
    return one_plan(device, store, plan, plan.rank(device), "plan/1")


def in_turn(
    device: str, store: Any, plans: Sequence[Plan], seconds: float, packs: bool = False
) -> list[dict[str, Any]]:
    """One member of some plans, which are trained one after the other, each from the first state; without what
    a plan of others has.

    Args:
        device: this one, of `drawn_placements.DEVICES`.
        store: of the processes.
        plans: in their sequence.
        seconds: that the members of a plan wait for one another at most.
        packs: they train on packed rows, whose sequences are cut over lanes.
    """
    vgpu.load()
    index = drawn_placements.DEVICES.index(device)
    results = []
    for number, plan in enumerate(plans):
        here = device in plan.members
        results.append(one_plan(device, store, plan, index, f"plan/{number}", packs=packs) if here else {})
        if here:
            store.set(f"over/{number}/{device}", b"")
            for other in plan.members:  # which may still read what this one sent
                store.get(f"over/{number}/{other}", seconds)
    return results


def one_plan(
    device: str, store: Any, plan: Plan, index: int, name: str, *, packs: bool = False
) -> dict[str, Any]:
    """What a member has after the steps of a plan on its vgpu of this index, with all that it launched."""
    accelerator = Accelerator(f"vgpu:{index}")
    accelerator.use()
    groups = PlanGroups(name, device, "127.0.0.1", store)
    made: list[StrictGroups] = []
    recipe = test_modules.make_recipe(micro_batch=plan.micro_batch, connect=connected(made))
    if packs:
        recipe = test_packed_modules.packed(recipe)
    with vgpu.counting(index) as spent:
        found = test_modules.trained(device, plan, groups, accelerator=accelerator, recipe=recipe)
    del found["state"], found["encoder"]
    found["weights"] = {name: (box, value.cpu()) for name, (box, value) in found["weights"].items()}
    return found | {"launches": spent.launches, "noted": vgpu.settled_errors(), "log": made[0].log.entries}


@pytest.mark.slow
@pytest.mark.parametrize("name", sizes.beside(HERE[:1], PLANS))
def test_two_modules_on_the_device_train_like_one_process_on_the_cpu(name: str) -> None:
    vgpu.needed()
    plan = PLANS[name]
    launches_are_right(plan, gang.run(__file__, "worker", plan.members, plan))


@pytest.mark.full
@pytest.mark.slow
def test_drawn_plans_on_the_device_train_like_one_process_on_the_cpu() -> None:
    vgpu.needed()
    for plan, results in trained_in_turn(range(8)):
        launches_are_right(plan, results)


@pytest.mark.full
@pytest.mark.slow
def test_so_do_those_on_packed_rows_cut_over_lanes() -> None:
    vgpu.needed()
    for plan, results in trained_in_turn(range(8), lanes=3):
        launches_are_right(plan, results)


def trained_in_turn(seeds: Iterable[int], lanes: int = 1) -> Iterator[tuple[Plan, dict[str, dict[str, Any]]]]:
    """The drawn plans of these seeds, and what their members have after training.

    Args:
        seeds: of the plans.
        lanes: of a pipeline of the language model; of several the sequences are packed, and cut.
    """
    plans = [drawn_placements.drawn_placement(seed, lanes=lanes) for seed in seeds]
    seconds = 120.0 + 60.0 * len(plans)
    arguments = plans, seconds, lanes > 1
    results = gang.run(__file__, "in_turn", drawn_placements.DEVICES, *arguments, seconds=seconds)
    for number, plan in enumerate(plans):
        yield plan, {device: results[device][number] for device in plan.members}


def launches_are_right(plan: Plan, results: dict[str, dict[str, Any]]) -> None:
    """Members trained as one process does, on their devices, and no order of launches can hang."""
    test_modules.check(plan, results)
    for device, result in results.items():
        assert result["launches"] > 100, f"{device} computed on the CPU"
        assert not result["noted"], device
        assert not result["kept"], f"{device} keeps messages of steps that are over"
    logs = {device: result["log"] for device, result in results.items()}
    assert deadlock(logs) is None
    assert deadlock(in_one_queue(logs)) is None
