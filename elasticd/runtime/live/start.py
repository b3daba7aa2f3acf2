"""`elasticd.live`: checks its arguments, tries `build` on a mesh of one device, and announces the job."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable, Sequence, Sized
from typing import Any

from elasticd_planner.spec.batch import Sampler
from elasticd_planner.spec.mesh import AllowedMesh, MeshModel, MeshPlan, MeshTensor
from elasticd_planner.spec.sample_order import order_for
from elasticd_planner.value import Invalid
from msgspec.structs import replace
from torch import distributed as dist
from torch.utils.data import DataLoader

from elasticd.records import MeshJobSpec
from elasticd.runtime.accelerator import Accelerator
from elasticd.runtime.api.connection import NAME, refuse_torch_groups
from elasticd.runtime.api.hello import check_grace, environment, hello
from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.torch_store import TorchStore
from elasticd.runtime.control import parent_death
from elasticd.runtime.control.agent_client import AgentClient, RejectedByAgent
from elasticd.runtime.control.control import Control
from elasticd.runtime.control.one_process import DEVICE, INCARNATION, OneProcess, runs_alone
from elasticd.runtime.exits import refused, stopped
from elasticd.runtime.live.device_groups import chosen
from elasticd.runtime.live.live_copy import Build, built
from elasticd.runtime.live.live_loop import LiveLoop, Samples
from elasticd.runtime.live.live_state import LiveRefusal, LiveTensors, mesh_model
from elasticd.runtime.live.moves import LiveMoves, Resume
from elasticd.runtime.live.refusals import refuse_state
from elasticd.runtime.live.world import World, register
from elasticd.runtime.snapshot.restore import Snapshots
from elasticd.system.user_line import raised_by_user
from elasticd.wire.unix_socket import default_path

log = logging.getLogger(__name__)

#: The name of a job that runs in one process.
_ALONE = "one-process"


def live(
    build: Build,
    *,
    batch: int,
    steps: int,
    meshes: Sequence[str] = ("dp",),
    data: Any = None,
    collate: Callable[[list[Any]], Any] | None = None,
    seed: int = 0,
    resume: Resume | None = None,
    snapshot_every: int | None = None,
    grace: float = 25.0,
) -> LiveLoop:
    """Keeps a script's own loop over a DDP, FSDP2 or DTensor model alive while devices die, join and slow down.

    Start the script with `elasticd run`; as `python SCRIPT` it trains in one process, without an agent.

    Args:
        build: called as build(mesh) for every plan, on every rank; makes model, optimizer and all else that the
            script trains with on that mesh. It must be a function of the mesh alone. torch's generators are
            seeded alike on all ranks before each call.
        batch: samples of a step, over all ranks.
        steps: steps of the job.
        meshes: the meshes that `build` can take, by their dimensions, preferred first: "replicate, shard",
            "replicate=*, shard=8", "dp, tp=2". Ranks that differ in tp, cp or sp alone take the same samples.
        data: a map-style dataset for `step.data`, which deals its samples without replacement. None: the
            script reads by itself, and `step.indices` count on from step to step.
        collate: makes a batch of a list of samples; None: torch's default.
        seed: of the order of samples, and of the first values that `build` draws.
        resume: called as resume(state) on all ranks together before the first step, with what `build` returned;
            loads what an earlier start of the script saved, and returns the number of steps that were made, 0
            for none. None: the job begins at step 0.
        snapshot_every: steps from one snapshot in the agents' memory to the next. None: 1 where a mesh may have
            no replicas of the state, which no survivor would have after a fault, or with several optimizers;
            else no snapshots.
        grace: seconds from a signal until this process ends; within them its state moves to the others.

    Returns:
        The steps: `for step in live: with step: ...`.

    Raises:
        SystemExit: the job cannot start, for a reason that is printed in one line.
    """
    try:
        _check(build, resume, batch, steps, data)
        check_grace(grace)
        allowed = _allowed(meshes)
        _refuse_other_groups()
        accelerator = chosen(os.environ)
        register(accelerator)
        model, optimizers = _tried(build, allowed, seed, accelerator)
        samples = _samples(data, batch, seed)
        every = snapshot_every if snapshot_every is not None else default_snapshots(model, optimizers)
        if optimizers > 1:
            log.info(
                "%d optimizers: a death between their updates has the job go back to a snapshot, made every %s "
                "steps",
                optimizers,
                every,
            )
        control, spec = _connect(model, batch, len(data) if data is not None else batch, seed, accelerator)
    except (ConnectionError, RejectedByAgent) as error:
        raise stopped(str(error)) from error
    except (ValueError, TypeError, RuntimeError) as error:
        if raised_by_user(error):
            raise
        raise refused(str(error)) from error
    snapshots = Snapshots(job=spec.job, fetch=control.fetch)
    return LiveLoop(
        control=control,
        moves=LiveMoves(
            model=model,
            build=build,
            seed=seed,
            snapshots=snapshots,
            resume=resume,
            accelerator=accelerator,
        ),
        steps=steps,
        samples=samples,
        data=data,
        collate=collate,
        job=spec.job,
        snapshot_every=every,
        grace=grace,
    )


def _check(build: object, resume: object, batch: object, steps: object, data: object) -> None:
    if not callable(build):
        raise LiveRefusal(
            f"build is a {type(build).__name__}: give a function of a mesh that returns elasticd.State"
        )
    if resume is not None and not callable(resume):
        raise LiveRefusal(
            f"resume is a {type(resume).__name__}: give a function of the state that returns the steps made"
        )
    for name, value, least in (("batch", batch, 1), ("steps", steps, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise LiveRefusal(f"{name} is {value!r}; it must be a whole number from {least} on")
    if isinstance(data, DataLoader) or hasattr(data, "load_state_dict"):
        raise LiveRefusal(
            f"data is a {type(data).__name__}, whose position belongs to one number of ranks: give its "
            "dataset, data=loader.dataset, and its collate_fn as collate=; the job deals the samples"
        )
    if data is not None and not (isinstance(data, Sized) and hasattr(data, "__getitem__")):
        raise LiveRefusal(
            f"data is a {type(data).__name__}, without a length or without [index]: give a map-style dataset, "
            "or none, and read in the loop by step.indices"
        )
    if isinstance(data, Sized) and not len(data):
        raise LiveRefusal("data is empty: it must hold at least one sample")


def _allowed(meshes: Sequence[str]) -> tuple[AllowedMesh, ...]:
    listed = (meshes,) if isinstance(meshes, str) else tuple(meshes)
    if not listed:
        raise LiveRefusal("meshes is empty: name the dimensions of a mesh that build can take, meshes=('dp',)")
    try:
        return tuple(map(AllowedMesh.from_text, listed))
    except Invalid as error:
        raise LiveRefusal(str(error)) from error


def _refuse_other_groups() -> None:
    """Refuses groups and trainers that know of one world alone."""
    if dist.is_initialized():
        raise LiveRefusal(
            "torch.distributed.init_process_group was called: leave it out, elasticd.live makes a world for "
            "every plan, and `build` and the loop make their groups in that"
        )
    accelerate = sys.modules.get("accelerate.state")
    if accelerate is not None and getattr(accelerate.PartialState, "_shared_state", None):
        raise LiveRefusal(
            "accelerate (or the Trainer of transformers) has set this process up for one number of ranks: use "
            "elasticd.Job with elasticd.from_hf (docs/huggingface.md), or restart mode (docs/restart.md)"
        )
    refuse_torch_groups()


def _tried(
    build: Build, meshes: Sequence[AllowedMesh], seed: int, accelerator: Accelerator
) -> tuple[MeshModel, int]:
    """Calls `build` on a mesh of this device alone for each allowed one. Refuses what cannot be kept alive.

    Returns:
        The tensors that it makes, and the number of its optimizers.
    """
    tensors: list[tuple[MeshTensor, ...]] = []
    trial: LiveTensors | None = None
    for index, allowed in enumerate(meshes):
        store = TorchStore(dist.HashStore())  # type: ignore[attr-defined]
        groups = PlanGroups(f"trial/{index}", DEVICE, "127.0.0.1", store)
        world = World(groups, (DEVICE,), accelerator)
        try:
            world.enter()
            mesh = world.mesh(allowed.names, (1,) * len(allowed.names))
            trial = built(build, mesh, seed, accelerator)
            refuse_state(trial.state, accelerator.device)
            tensors.append(trial.described())
            optimizers = len(trial.state.optimizers)
        finally:
            world.end()
            groups.park()
    trial = None
    gc.collect()  # modules refer to each other, and each trial has the whole model
    return mesh_model(meshes, tensors), optimizers


def _samples(data: Any, batch: int, seed: int) -> Samples:
    if data is None:
        return lambda step: range(step * batch, (step + 1) * batch)
    size = len(data)
    return Sampler(size=size, global_batch=batch, seed=seed, order=order_for(size)).samples


def default_snapshots(model: MeshModel, optimizers: int = 1) -> int | None:
    """Steps between snapshots: 1 where under some allowed mesh each device may be the only one with its part of
    the state, or where a death between the updates of several optimizers leaves no rank with any.

    A dimension that cuts nothing is one of replicas only if the mesh has a fixed size of 2 or more there:
    else the planner may make it 1.
    """
    if optimizers > 1:
        return 1
    for index, mesh in enumerate(model.meshes):
        cut = {
            dimension
            for tensor in model.tensors
            if tensor.kind == "trained"
            for dimension, placement in enumerate(tensor.placements[index])
            if placement.dim is not None
        }
        sizes = mesh.sizes or (0,) * len(mesh.names)
        replicas = [size for dimension, size in enumerate(sizes) if dimension not in cut]
        if cut and max(replicas, default=0) < 2:
            return 1
    return None


def _connect(
    model: MeshModel, batch: int, samples: int, seed: int, accelerator: Accelerator
) -> tuple[Control, MeshJobSpec]:
    alone = runs_alone(os.environ)
    name = _ALONE if alone else environment(NAME)
    spec = MeshJobSpec(job=name, model=model, global_batch=batch, samples=samples, seed=seed)
    if alone:
        names = model.meshes[0].names
        plan = MeshPlan(
            number=1,
            names=names,
            shape=(1,) * len(names),
            members=(DEVICE,),
            samples=(batch,),
            binding={DEVICE: INCARNATION},
        )
        return OneProcess(plan, (), None, accelerator.text), spec
    parent_death.end_with(os.getppid())
    if remedy := parent_death.without_restarts(os.environ):
        log.warning(remedy)
    said = replace(hello(spec, None, accelerator), probes=False, rehearses=False, closes=False)
    return AgentClient(default_path(), said), spec
