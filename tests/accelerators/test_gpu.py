"""On GPUs, where there are any: one that trains as the CPU does, several processes on one, and NCCL itself.

What runs in processes here takes the kind of the device as its first argument. Each is tried on vgpu, too, with
strict process groups in the place of NCCL's, so that on a GPU the hardware alone is new.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Any, cast

import pytest
import torch
from elasticd_planner.layout.channels import Channel
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.plan import Plan

from elasticd.runtime.accelerator import Accelerator
from elasticd.runtime.comm import nccl
from elasticd.runtime.comm.communicators import GlooCommunicators
from elasticd.runtime.comm.device_communicators import DeviceCommunicators
from elasticd.runtime.comm.groups import Cancelled, PeerLost, PlanGroups
from elasticd.runtime.comm.in_memory import MemoryPlanGroups, MemoryWorld
from elasticd.runtime.comm.nccl import NcclLibrary, nccl_communicators
from elasticd.runtime.engine import captured_passes, pipeline_stage
from elasticd.runtime.engine.device_rest import DRAIN_SECONDS
from elasticd.runtime.engine.engine import Engine, first_state
from elasticd.runtime.engine.parallelism import ParallelismOptions
from elasticd.runtime.engine.pass_watch import FIRST
from tests.accelerators import shared_gpu, test_nccl_drills, test_training, vgpu
from tests.accelerators.strict_process_group import StrictGroups, connected
from tests.accelerators.test_training import PLANS
from tests.runtime import gang, test_captured_passes, test_cut_sequences, test_engine_parity
from tests.runtime.test_engine_parity import SEED, make_recipe, plan_of, stage, unpaced

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
with_nccl = [
    pytest.mark.nccl,
    pytest.mark.skipif(not (torch.cuda.is_available() and nccl.available()), reason="needs a GPU and NCCL"),
]
#: Every kind of device, in the processes of a test.
KINDS = [
    pytest.param("vgpu", marks=pytest.mark.slow),
    pytest.param("cuda", marks=with_nccl),
]
#: A TP group, two stages and a pipeline beside them: every use of a communicator.
LAYOUTS = ("pipelines of 2 and 3 stages, zero 2", "tp3+tp1 beside tp2")
TWO = ("a/0", "a/1")
#: Drills of whole jobs whose tensors go over NCCL.
OVER_NCCL = [
    (moment, how)
    for moment in (*test_nccl_drills.MOMENTS, *test_nccl_drills.CUT_MOMENTS)
    for how in test_nccl_drills.HOW
]


def of_kind(kind: str, rank: int) -> Accelerator:
    """The device of one process, made its current one."""
    if kind == "vgpu":
        vgpu.load()
        made = Accelerator(f"vgpu:{rank}")
    else:
        made = shared_gpu.used(rank)
    made.use()
    return made


def library(kind: str, accelerator: Accelerator) -> NcclLibrary:
    from torch._C import _distributed_c10d as c10d

    made: Any = StrictGroups() if kind == "vgpu" else c10d.ProcessGroupNCCL
    return NcclLibrary(accelerator.device, made)


# -- one GPU -------------------------------------------------------------------------------------------------

ALONE = plan_of((8, [stage(0, 6, ("a/0", 1))]))


def over_gloo(device: str, store: Any, kind: str, plan: Plan) -> dict[str, Any]:
    """One member of a plan, all on one device of this kind."""
    accelerator = of_kind(kind, 0)
    groups = PlanGroups("plan/1", device, "127.0.0.1", store)
    return test_engine_parity.trained(device, plan, groups, accelerator, GlooCommunicators)


@pytest.mark.parametrize("kind", [KINDS[0], pytest.param("cuda", marks=gpu)])
def test_one_device_trains_as_the_cpu_does(kind: str) -> None:
    if kind == "vgpu":
        vgpu.needed()
    test_engine_parity.check(ALONE, gang.run(__file__, "over_gloo", ["a/0"], kind, ALONE))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", LAYOUTS)
def test_processes_that_share_a_gpu_train_over_gloo(name: str) -> None:
    plan = PLANS[name]
    test_engine_parity.check(plan, gang.run(__file__, "over_gloo", plan.members, "cuda", plan))


def without_waits(device: str, store: Any) -> float:
    """The loss of a step in which torch raises at every synchronization."""
    accelerator = of_kind("cuda", 0)
    recipe = make_recipe(accelerator)
    layouts = Layouts(recipe.model.spec, ALONE)
    engine = Engine(recipe, layouts, cast(PlanGroups, MemoryPlanGroups(MemoryWorld(), device)), unpaced)
    engine.adopt(first_state(recipe.model, layouts, device, SEED, accelerator=accelerator))
    for step in range(2):
        engine.step(step, lambda: 0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        return engine.step(2, lambda: 0).outcome.loss
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_step_on_a_gpu_has_no_synchronization() -> None:
    (loss,) = gang.run(__file__, "without_waits", ["a/0"]).values()
    assert loss == pytest.approx(test_engine_parity.reference(3)[0][2], rel=1e-9)


def captured(device: str, store: Any, kind: str, plan: Plan) -> dict[str, Any]:
    """Steps with captured passes of one member of a plan, after those of another engine without. Returns the
    losses of both, the largest difference of a weight, by chunk the shapes that were captured, and whether all
    passes of the last step were replays."""
    accelerator = of_kind(kind, plan.rank(device))
    connect = connected([]) if kind == "vgpu" else nccl_communicators
    with pytest.MonkeyPatch.context() as patch:
        recorder = None
        if kind == "vgpu":
            recorder, accelerator = test_captured_passes.recording(patch, str(accelerator.device))
        elif len(plan.members) > 1:
            patch.setattr(pipeline_stage, "compile_blocks", lambda modules: None)  # `ALONE` has it
        patch.setattr(captured_passes, "_AT_ONCE", 100)
        losses: list[list[float]] = []
        weights: list[dict[str, torch.Tensor]] = []
        for number, compiled in enumerate((True, "graphs")):
            options = ParallelismOptions(compile=cast(Any, compiled))
            recipe = test_captured_passes.recipe_of(accelerator, connect=connect, parallelism=options)
            layouts = Layouts(recipe.model.spec, plan)
            groups = PlanGroups(f"plan/{number}", device, "127.0.0.1", store)
            engine = Engine(recipe, layouts, groups, unpaced)
            engine.adopt(first_state(recipe.model, layouts, device, SEED, accelerator=accelerator))
            held = {name: parameter for name, (_, parameter) in engine.module.local.parameters.items()}
            if recorder is not None:
                recorder.parameters = list(held.values())
            losses.append([engine.step(step, lambda: 0).outcome.vote.loss for step in range(7)])
            engine.settle()
            weights.append({name: parameter.detach().cpu() for name, parameter in held.items()})
        runner = engine.module.runner
        assert runner is not None
        assert runner._captured is not None
        shapes = Counter(chunk for (chunk, _), shape in runner._captured._shapes.items() if shape.slots)
    apart = max(float((weights[1][name] - value).abs().max()) for name, value in weights[0].items())
    replays = None if recorder is None else recorder.replays
    return {"losses": losses, "apart": apart, "shapes": dict(shapes), "replays": replays}


#: Two stages, whose devices sum gradients with the one that has all of the model.
PIPES = plan_of(
    (5, [stage(0, 4, ("a/0", 1)), stage(4, 6, ("b/0", 1))]),
    (3, [stage(0, 6, ("c/0", 1))]),
)


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        pytest.param("vgpu", PIPES, marks=pytest.mark.slow, id="vgpu-pipelines"),
        pytest.param("cuda", ALONE, marks=gpu, id="cuda-alone"),
        pytest.param("cuda", PIPES, marks=with_nccl, id="cuda-pipelines"),
    ],
)
def test_captured_passes_train_as_compiled_ones(kind: str, plan: Plan) -> None:
    """On vgpu a recorder stands in for the graphs, and blocks are not compiled. No GPU has run it yet: there it
    proves that the kernels of a pass can be captured, that slots have memory of their own, and that sums wait
    for the events of a graph."""
    if kind == "vgpu":
        vgpu.needed()
    for device, made in gang.run(__file__, "captured", plan.members, kind, plan).items():
        compiled, mine = made["losses"]
        assert set(made["shapes"].values()) == {3}
        assert mine == (compiled if kind == "vgpu" else pytest.approx(compiled, rel=1e-9))
        assert made["apart"] <= (0.0 if kind == "vgpu" else 1e-10)
        if kind == "vgpu":
            passes = 3 if device == "c/0" else 5
            assert made["replays"] == (7 - FIRST) * 2 * passes, "all passes of later steps"


# -- NCCL ----------------------------------------------------------------------------------------------------


def over_nccl(device: str, store: Any, kind: str, plan: Plan) -> dict[str, Any]:
    """One member of a plan over NCCL."""
    accelerator = of_kind(kind, plan.rank(device))
    groups = PlanGroups("plan/1", device, "127.0.0.1", store)
    connect = connected([]) if kind == "vgpu" else nccl_communicators
    return test_engine_parity.trained(device, plan, groups, accelerator, connect)


@pytest.mark.nccl
@pytest.mark.skipif(not (torch.cuda.is_available() and nccl.available()), reason="needs a GPU and NCCL")
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_trains_over_nccl_as_in_one_process(name: str) -> None:
    """On vgpu `test_training` has it."""
    plan = PLANS[name]
    test_engine_parity.check(plan, gang.run(__file__, "over_nccl", plan.members, "cuda", plan))


def cut_over_nccl(device: str, store: Any, plan: Plan, made_by: str) -> dict[str, Any]:
    """One member of a plan whose sequences are cut."""
    accelerator = of_kind("cuda", plan.rank(device))
    return test_training.trained_on_cuts(device, store, plan, made_by, accelerator, nccl_communicators)


@pytest.mark.nccl
@pytest.mark.skipif(not (torch.cuda.is_available() and nccl.available()), reason="needs a GPU and NCCL")
@pytest.mark.parametrize(("name", "made_by"), [test_training.CUT[0], test_training.CUT[2]])
def test_cut_sequences_train_over_nccl_as_in_one_process(name: str, made_by: str) -> None:
    plan = test_cut_sequences.PLANS[name]
    test_training.check_cuts(plan, made_by, gang.run(__file__, "cut_over_nccl", plan.members, plan, made_by))


@pytest.mark.nccl
@pytest.mark.skipif(not (torch.cuda.is_available() and nccl.available()), reason="needs a GPU and NCCL")
@pytest.mark.parametrize(("moment", "how"), OVER_NCCL)
def test_survivors_of_a_step_over_nccl_go_on_exactly(moment: str, how: str) -> None:
    test_nccl_drills.survived(moment, how, "cuda")


@pytest.mark.nccl
@pytest.mark.skipif(not (torch.cuda.is_available() and nccl.available()), reason="needs a GPU and NCCL")
@pytest.mark.parametrize("zero", [0, 2])
def test_a_switch_over_nccl_is_exact(zero: int) -> None:
    test_nccl_drills.switched(zero, "cuda")


def pair(kind: str, device: str, store: Any, name: str) -> tuple[PlanGroups, DeviceCommunicators, Accelerator]:
    """Both devices' communicator, in groups of this name."""
    accelerator = of_kind(kind, TWO.index(device))
    groups = PlanGroups(name, device, "127.0.0.1", store)
    everyone = groups.group(TWO, "vote")
    made = DeviceCommunicators(groups, (Channel("reduce", TWO),), everyone, library(kind, accelerator))
    return groups, made, accelerator


def aborted(device: str, store: Any, kind: str) -> tuple[float, float, float]:
    """Sums, hangs because the other does not come, is aborted, and sums anew: the seconds of a connection and
    of the abort, and the last sum."""
    groups, made, accelerator = pair(kind, device, store, "first")
    team = made.team(Channel("reduce", TWO))
    total = team.all_reduce(torch.full((1 << 16,), 2.0, device=accelerator.device))
    assert accelerator.read(total[0]) == [4.0]
    if device == TWO[0]:
        hangs = team.begin_all_reduce(torch.ones(1 << 16, device=accelerator.device))
        time.sleep(0.2)
        assert not hangs.over()
    began = time.perf_counter()
    groups.shut()
    assert made.rest(DRAIN_SECONDS)
    assert accelerator.drained(DRAIN_SECONDS)
    freed = time.perf_counter() - began
    with pytest.raises(Cancelled):
        team.all_reduce(torch.ones(1, device=accelerator.device))
    began = time.perf_counter()
    _, again, _ = pair(kind, device, store, "second")
    connection = time.perf_counter() - began
    total = again.team(Channel("reduce", TWO)).all_reduce(torch.ones(8, device=accelerator.device))
    return connection, freed, accelerator.read(total[0])[0]


@pytest.mark.parametrize("kind", KINDS)
def test_an_abort_frees_the_device_and_another_communicator_works(kind: str) -> None:
    if kind == "vgpu":
        vgpu.needed()
    for connection, freed, total in gang.run(__file__, "aborted", TWO, kind).values():
        assert total == 2.0
        assert freed < DRAIN_SECONDS, f"{freed} s; a new communicator took {connection} s"


def bereft(device: str, store: Any, kind: str, first: bool) -> float:
    """The seconds until the device of a rank whose peer was killed in a sum comes to rest; `first`: in the
    first one, in which hosts wait for each other."""
    groups, made, accelerator = pair(kind, device, store, "first")
    team = made.team(Channel("reduce", TWO))
    if not first:
        made.first_launches([(Channel("reduce", TWO), 1 << 20, torch.float32)])
        accelerator.passed()
    groups.group(TWO, "vote").all_gather(torch.zeros(1))
    if device == TWO[1]:
        os.kill(os.getpid(), signal.SIGKILL)
    shut = threading.Event()

    def shuts() -> None:  # as the agent of the dead one has it done
        time.sleep(1)
        groups.shut()
        shut.set()

    threading.Thread(target=shuts).start()
    lost = torch.ones(1 << 20, device=accelerator.device)
    with suppress(PeerLost, Cancelled):  # it may notice at once
        team.begin_all_reduce(lost)
    assert shut.wait(60)
    began = time.perf_counter()
    assert made.rest(DRAIN_SECONDS)
    assert accelerator.drained(DRAIN_SECONDS)
    assert accelerator.read(torch.ones(3, device=accelerator.device).sum()) == [3.0], "the device works on"
    return time.perf_counter() - began


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", [True, False], ids=["the first sum", "a later sum"])
def test_the_device_of_a_survivor_comes_to_rest(kind: str, first: bool) -> None:
    if kind == "vgpu":
        vgpu.needed()
    results = gang.run(__file__, "bereft", TWO, kind, first, dying=(TWO[1],))
    assert set(results) == {TWO[0]}
    assert results[TWO[0]] < DRAIN_SECONDS
