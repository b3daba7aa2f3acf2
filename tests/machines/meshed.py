"""A world whose job trains a loop of its own on a mesh: the same machine, agents and workers as any other."""

from __future__ import annotations

import random

from elasticd_planner.spec.measurement import Measurement
from elasticd_planner.spec.mesh import AllowedMesh, MeshModel, MeshPlan, MeshTensor, Placement

from elasticd.machines.job.state.job_state import JobSettings
from elasticd.records import MeshJobSpec
from elasticd.wire.worker import Hello, Report
from tests.machines.cast import JOB, FakeWorker
from tests.machines.vaulted import Vaulted

#: Seconds of a sample on a normal device.
SAMPLE = 0.1
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


class Meshed(Vaulted):
    """`noise`: standard deviation of the logarithm of a device's seconds. Without `every` there are no
    snapshots."""

    def __init__(
        self,
        *meshes: str,
        nodes: tuple[str, ...] = ("alpha", "beta"),
        every: int = 0,
        batch: int = 24,
        keep_plan: bool = False,
    ) -> None:
        self.noise, self._random = 0.0, random.Random(7)
        self.mesh_spec = MeshJobSpec(
            job=JOB,
            model=mesh_model(*meshes),
            global_batch=batch,
            samples=1000,
            seed=0,
            keep_plan=keep_plan,
        )
        settings = JobSettings(prepare_seconds=10.0, retry_seconds=5.0)
        super().__init__(nodes, settings, every=every or 1 << 30)

    def hello(self, worker: FakeWorker, **changes: object) -> Hello:
        world_size = sum(len(record.devices) for record in self.records.values())
        return Hello(job=JOB, local_rank=0, world_size=world_size, pid=100, spec=self.mesh_spec)

    def report(self, plan: MeshPlan, device: str) -> Report:
        lane = plan.lane_of[device]
        work = plan.samples[lane] / len(plan.lanes[lane])
        noise = self._random.lognormvariate(0.0, self.noise) if self.noise else 1.0
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
