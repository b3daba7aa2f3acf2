"""The product on a device that is not the CPU, under the rules of NCCL: what trains there trains as one process
on the CPU, and launches what the plan says."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import pytest
import torch
from elasticd_planner.layout import channels
from elasticd_planner.layout.gradient_reduction import reductions
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.batch import SequencePiece
from elasticd_planner.spec.plan import Plan, StatePolicy
from torch.utils.checkpoint import checkpoint

import elasticd
from elasticd.runtime.accelerator import Accelerator
from elasticd.runtime.comm.communicators import Connect
from elasticd.runtime.comm.groups import Cancelled, PeerLost, PlanGroups
from elasticd.runtime.comm.in_memory import unpaced
from elasticd.runtime.engine.engine import Engine, first_state
from elasticd.runtime.parallel.packed_row import PackedRow, passing
from tests import sizes
from tests.accelerators import vgpu
from tests.accelerators.strict_process_group import StrictGroups, connected, struck, told
from tests.planner.launch_order import Join, Launch, deadlock, in_one_queue
from tests.planner.launches import launches
from tests.runtime import (
    gang,
    test_context_parallel,
    test_cut_sequences,
    test_engine_parity,
    test_lanes,
    test_packed,
)

#: A pipeline of interleaved chunks with unequal tensor parallelism; and pipelines of unlike depth.
HERE = ("interleaved and uneven beside a plain pipeline", "pipelines of 2 and 3 stages")
#: State apart from values, so that gradients and values go between processes, too.
SHARDED = {
    f"{name}, zero {zero}": test_engine_parity.PLANS[name].replace(state=StatePolicy(zero=zero, replicas=2))
    for zero, name in zip((1, 2), HERE, strict=True)
}
#: Lanes of unlike width, and lanes beside other pipelines with their state apart.
LANES = {
    f"{name}, zero {zero}": test_lanes.PLANS[name].replace(state=test_lanes.POLICIES[f"zero {zero}"])
    for zero, name in (
        (0, "2 + 1, uneven, in two stages"),
        (1, "two pipelines of lanes, micro-batches of two"),
        (2, "three lanes of unlike width beside a deeper pipeline"),
    )
}
PLANS = test_engine_parity.PLANS | SHARDED | LANES
#: Communicators of a device, where sets of holders are to have none.
FEW = 5


def worker(device: str, store: Any, plan: Plan) -> dict[str, Any]:
    """One member of the plan, on a vgpu of its own."""
    vgpu.load()
    accelerator = Accelerator(f"vgpu:{plan.rank(device)}")
    accelerator.use()
    groups = PlanGroups("plan/1", device, "127.0.0.1", store)
    made: list[StrictGroups] = []
    connect = connected(made)
    with vgpu.counting(plan.rank(device)) as spent:
        found = test_engine_parity.trained(device, plan, groups, accelerator, connect)
    log = made[0].log.entries
    counts = {"launches": spent.launches, "waits": spent.synchronizations, "communicators": made[0].made}
    return found | counts | {"noted": vgpu.settled_errors(), "log": log}


def worker_with_few(device: str, store: Any, plan: Plan) -> dict[str, Any]:
    """The same, of which gradients of most sets of holders have no communicator."""
    channels.MOST = FEW
    return worker(device, store, plan)


@pytest.mark.slow
def test_gradients_of_sets_without_a_communicator_go_as_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    vgpu.needed()
    monkeypatch.setattr(channels, "MOST", FEW)
    plan = PLANS["three lanes of unlike width beside a deeper pipeline, zero 2"]
    layouts = Layouts(test_engine_parity.make_recipe().model.spec, plan)
    own, sets = channels.own_sets(layouts), {each.devices for each in reductions(layouts)}
    assert own < {devices for devices in sets if len(devices) > 1}
    check(plan, "worker_with_few")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", sizes.beside((*list(SHARDED)[:1], "2 + 1, uneven, in two stages, zero 0"), PLANS)
)
def test_a_layout_on_the_device_trains_like_one_process_on_the_cpu(name: str) -> None:
    vgpu.needed()
    check(PLANS[name])


def check(plan: Plan, member: str = "worker") -> None:
    """Trains under a plan, in a process for each device, and looks at all that is promised."""
    results = gang.run(__file__, member, plan.members, plan)
    test_engine_parity.check(plan, results)
    for device, result in results.items():
        assert result["launches"] > 100, f"{device} computed on the CPU"
        assert not result["noted"], device
    logs = {device: result["log"] for device, result in results.items()}
    assert deadlock(logs) is None
    assert deadlock(in_one_queue(logs)) is None
    recipe = test_engine_parity.make_recipe()
    predicted = [
        launches(Layouts(recipe.model.spec, plan), recipe.feed.dealing(plan, step)(), recipe.schedule)
        for step in range(test_engine_parity.STEPS)
    ]
    listed = channels.channels_by_device(Layouts(recipe.model.spec, plan))
    for device, result in results.items():
        assert result["communicators"] == len(listed[device])
        assert told(result["log"]) == [at for step in predicted for at in told(step[device])], device


#: Lanes of one device beside such of three and one, in two stages; lanes that are interleaved, and that divide
#: heads; and lanes that pass on what comes from another node.
CUT = (
    ("TP 1 beside 3 + 1, two stages", "cutting"),
    ("interleaved, fewer rows than stages in one lane", "cutting"),
    ("1 + 1", "by_heads"),
    ("four lanes on two nodes, two stages", "cutting"),
    ("four lanes on two nodes, two stages", "by_heads"),
)


def cutting_worker(device: str, store: Any, plan: Plan, made_by: str) -> dict[str, Any]:
    """The same, of sequences that are cut over lanes."""
    vgpu.load()
    accelerator = Accelerator(f"vgpu:{plan.rank(device)}")
    accelerator.use()
    made: list[StrictGroups] = []
    found = trained_on_cuts(device, store, plan, made_by, accelerator, connected(made))
    log = made[0].log.entries
    return found | {"communicators": made[0].made, "noted": vgpu.settled_errors(), "log": log}


def trained_on_cuts(
    device: str, store: Any, plan: Plan, made_by: str, accelerator: Accelerator, connect: Connect
) -> dict[str, Any]:
    """What a member of the plan finds on its device."""
    groups = PlanGroups("plan/1", device, "127.0.0.1", store)
    recipe = getattr(test_cut_sequences, made_by)(accelerator=accelerator, connect=connect)
    layouts = Layouts(recipe.model.spec, plan)
    engine = Engine(recipe, layouts, groups, unpaced)
    engine.adopt(first_state(recipe.model, layouts, device, test_engine_parity.SEED, accelerator=accelerator))
    done = [engine.step(step, lambda: 0) for step in range(test_engine_parity.STEPS)]
    engine.settle()
    return {
        "losses": [each.outcome.vote.loss for each in done],
        "tokens": [each.outcome.vote.tokens for each in done],
        "samples": [each.samples for each in done],
        "weights": {
            name: (box.start, box.stop, parameter.detach().cpu().numpy())
            for name, ((box,), parameter) in engine.module.local.parameters.items()
        },
    }


@pytest.mark.slow
@pytest.mark.parametrize(("name", "made_by"), sizes.beside(CUT[:1], CUT))
def test_cut_sequences_on_the_device_train_like_one_process_on_the_cpu(name: str, made_by: str) -> None:
    vgpu.needed()
    plan = test_cut_sequences.PLANS[name]
    results = gang.run(__file__, "cutting_worker", plan.members, plan, made_by)
    check_cuts(plan, made_by, results)
    assert not any(result["noted"] for result in results.values())
    logs = {device: result["log"] for device, result in results.items()}
    assert deadlock(logs) is None
    assert deadlock(in_one_queue(logs)) is None
    recipe = getattr(test_cut_sequences, made_by)()
    layouts = Layouts(recipe.model.spec, plan)
    predicted = [
        launches(layouts, recipe.feed.dealing(plan, step)(), recipe.schedule)
        for step in range(test_engine_parity.STEPS)
    ]
    listed = channels.channels_by_device(layouts, cuts=True)
    for device, result in results.items():
        assert result["communicators"] == len(listed[device])
        expected = _told([entry for step in predicted for entry in step[device]])
        assert _told(result["log"]) == expected, device
        assert any(each.startswith("context") for each in expected)


def check_cuts(plan: Plan, made_by: str, results: dict[str, dict[str, Any]]) -> None:
    """Members' results are those of one process on the CPU."""
    if made_by == "cutting":
        test_packed.check(plan, results)
    else:
        make = getattr(test_cut_sequences, made_by)
        assert test_cut_sequences.apart_from_one_device(make, results) < 1e-10


#: Cases of an exchange of keys.
EXCHANGES = (
    "one device beside three heads and one",
    "by heads that cut groups, beside others",
    "keys that are passed on in groups of unlike width",
)


def exchanging(device: str, store: Any, name: str, kill: bool) -> Any:
    """The exchange of keys alone; with `kill` the last device dies as it launches a round."""
    vgpu.load()
    case = test_context_parallel.CASES[name]
    accelerator = Accelerator(f"vgpu:{case.stage.devices.index(device)}")
    accelerator.use()
    groups = PlanGroups("plan/1", device, "127.0.0.1", store)
    dies = kill and device == case.stage.devices[-1]
    connect = connected([], struck("context", 15, signal.SIGKILL) if dies else lambda what: None)
    mine = test_context_parallel.at_work(case, device, groups, connect, accelerator)
    if not kill:
        return [[tuple(each) for each in layer] for layer in mine.step()], vgpu.settled_errors()
    threading.Timer(3.0, groups.shut).start()  # as the agent's word does
    try:
        for _ in range(9):
            mine.step()
    except (Cancelled, PeerLost) as error:
        return type(error).__name__
    return "finished"


@pytest.mark.slow
@pytest.mark.parametrize("name", sizes.beside(EXCHANGES[:2], EXCHANGES))
def test_keys_are_exchanged_on_the_device_as_on_the_cpu(name: str) -> None:
    vgpu.needed()
    case = test_context_parallel.CASES[name]
    results = gang.run(__file__, "exchanging", case.stage.devices, name, False)
    assert not any(noted for _, noted in results.values())
    found = test_context_parallel.Found
    test_context_parallel.check(
        case,
        {device: [[found(*each) for each in layer] for layer in made] for device, (made, _) in results.items()},
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", sizes.beside(EXCHANGES[:1], EXCHANGES))
def test_a_death_in_the_middle_of_a_round_frees_the_devices_of_others(name: str) -> None:
    vgpu.needed()
    *others, last = test_context_parallel.CASES[name].stage.devices
    found = gang.run(__file__, "exchanging", [*others, last], name, True, dying=[last], seconds=90)
    assert found.keys() == set(others)
    assert set(found.values()) == {"Cancelled"}


def checkpointed(device: str, store: Any) -> float:
    """How far the gradients of a forward pass that is made again are from those of one that is not."""
    vgpu.load()
    on = Accelerator("vgpu:0")
    on.use()
    row = PackedRow([SequencePiece.whole(0, 5), SequencePiece.whole(1, 4)], on.device)
    drawn = [torch.randn(1, 2, 9, 4, dtype=torch.float64) for _ in range(3)]

    def gradients(run: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        given = [x.to(on.device).requires_grad_() for x in drawn]
        with passing(row):
            run(*given).square().sum().backward()
        return [x.grad.cpu() for x in given if x.grad is not None]

    again = partial(checkpoint, elasticd.attention, use_reentrant=False, preserve_rng_state=False)
    both = zip(gradients(elasticd.attention), gradients(again), strict=True)
    return max(float((one - other).abs().max()) for one, other in both)


@pytest.mark.slow
def test_what_autograd_runs_again_in_its_own_thread_knows_its_row() -> None:
    vgpu.needed()
    assert gang.run(__file__, "checkpointed", ("a/0",)) == {"a/0": 0.0}


def _told(log: Sequence[Launch | Join]) -> list[str]:
    """Where a rank launched, all rounds of the blocks of a pass as one."""
    return [
        name
        for name, together in groupby(told(log))
        for _ in (range(1) if name.startswith("context") else together)
    ]
