"""A world whose job trains a loop of its own on a mesh: the same machine, agents and workers as any other."""

from __future__ import annotations

import random

import msgspec
from elasticd_planner.spec.measurement import Measurement
from elasticd_planner.spec.mesh import AllowedMesh, MeshModel, MeshPlan, MeshTensor, Placement

from elasticd.machines.job.state.job_state import JobSettings
from elasticd.records import MeshJobSpec
from elasticd.wire.worker import Hello, Report
from tests.machines.cast import JOB, FakeWorker
from tests.machines.vaulted import Vaulted
from tests.machines.walk import Walk
from tests.machines.world import World

#: Seconds of a sample on a normal device.
SAMPLE = 0.1
#: Meshes of the jobs of random walks.
WALKED = (("ddp",), ("replicate, shard", "shard"), ("shard",), ("ddp, tp=2", "tp=2"), ("dp, tp=2", "dp"))
ALL, FIRST, SECOND = Placement(), Placement(dim=0), Placement(dim=1)


def mesh_model(*meshes: str) -> MeshModel:
    """A layer whose parameters FSDP cuts, over any tensor parallelism, and a buffer that all have."""
    allowed = tuple(map(AllowedMesh.from_text, meshes))

    def cut(names: tuple[str, ...], tp: Placement) -> tuple[Placement, ...]:
        sharded = {"replicate": ALL, "ddp": ALL, "tp": tp}
        return tuple(sharded.get(name, FIRST) for name in names)

    tensors = (
        MeshTensor(
            name="weight",
            shape=(8, 6),
            dtype="float32",
            placements=tuple(cut(mesh.names, SECOND) for mesh in allowed),
        ),
        MeshTensor(
            name="steps",
            shape=(),
            dtype="int64",
            kind="buffer",
            placements=tuple((ALL,) * len(mesh.names) for mesh in allowed),
        ),
    )
    return MeshModel(meshes=allowed, tensors=tensors)


def mesh_spec(*meshes: str, batch: int = 24, keep_plan: bool = False) -> MeshJobSpec:
    return MeshJobSpec(
        job=JOB, model=mesh_model(*meshes), global_batch=batch, samples=1000, seed=0, keep_plan=keep_plan
    )


class OnMesh(World):
    """`noise`: standard deviation of the logarithm of a device's seconds."""

    mesh_spec: MeshJobSpec
    noise = 0.0
    random = random.Random(7)

    def hello(self, worker: FakeWorker, **changes: object) -> Hello:
        return msgspec.structs.replace(super().hello(worker, **changes), spec=self.mesh_spec)

    def report(self, plan: MeshPlan, device: str) -> Report:
        lane = plan.lane_of[device]
        work = plan.samples[lane] / len(plan.lanes[lane])
        noise = self.random.lognormvariate(0.0, self.noise) if self.noise else 1.0
        slowest = max(
            samples / len(lane) * max(self.rates.get(device, 1.0) for device in lane)
            for samples, lane in zip(plan.samples, plan.lanes, strict=True)
        )
        measured = Measurement(
            device=device,
            plan=plan.number,
            step=self.steps - 1,
            tokens=0,
            block_seconds=work * SAMPLE * self.rates.get(device, 1.0) * noise,
            block_work=work,
            step_seconds=slowest * SAMPLE + 0.01,
        )
        first = plan.members[0] == device
        return Report(measurement=measured, loss=2.0 if first else None, tokens=None)

    @property
    def mesh(self) -> MeshPlan:
        plan = self.plan()
        assert isinstance(plan, MeshPlan)
        return plan


class Meshed(OnMesh, Vaulted):
    """Without `every` there are no snapshots."""

    def __init__(
        self,
        *meshes: str,
        nodes: tuple[str, ...] = ("alpha", "beta"),
        every: int = 0,
        batch: int = 24,
        keep_plan: bool = False,
    ) -> None:
        self.mesh_spec = mesh_spec(*meshes, batch=batch, keep_plan=keep_plan)
        settings = JobSettings(prepare_seconds=10.0, retry_seconds=5.0)
        super().__init__(nodes, settings, every=every or 1 << 30)


class MeshWalk(OnMesh, Walk):
    """A random walk of a job with replicas or without, with tensor parallelism or without."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.mesh_spec = mesh_spec(*self.random.choice(WALKED))
        super().__init__(seed)
