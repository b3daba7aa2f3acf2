"""Holdings: the device that holds each box of everything that a job keeps, however its plan is made.

State moves, is kept and is looked for by holdings alone. A plan of pipelines has them (`Layouts`), and the plan
of a mesh (`MeshLayouts`); so has what a fault left of either (`SurvivingLayouts`), and what was read from
snapshots (`SnapshotLayouts`).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from elasticd_planner.layout.layouts import Item, Layouts
from elasticd_planner.layout.mesh_layouts import MeshLayouts
from elasticd_planner.spec.box import Box, TensorLayout
from elasticd_planner.spec.mesh import JobPlan, MeshModel, MeshPlan
from elasticd_planner.spec.model import Specs
from elasticd_planner.value import refuse

#: The tensors of a job: of a model that elasticd cuts, or of one that trains on a mesh.
JobTensors = Specs | MeshModel


class Holdings(Protocol):
    """All that a job keeps, and the boxes of it that each device holds."""

    @property
    def plan(self) -> JobPlan:
        """The plan that state is held under: its number, its members in rank order, their incarnations."""
        ...

    @property
    def items(self) -> tuple[Item, ...]:
        """All that is held, in the model's order."""
        ...

    @property
    def trained(self) -> tuple[str, ...]:
        """Full names of the parameters that have a gradient."""
        ...

    def family(self, item: Item) -> Hashable:
        """Items with equal keys have equal holdings, shapes and dtypes."""
        ...

    def layout(self, item: Item) -> TensorLayout:
        """The holdings of an item."""
        ...

    def boxes(self, item: Item, device: str) -> tuple[Box, ...]:
        """The boxes that one device holds of an item."""
        ...

    def own(self, item: Item, device: str) -> tuple[Box, ...]:
        """The boxes of an item that a device has without what others send it at the end of a step."""
        ...

    def held(self, device: str) -> dict[Item, tuple[Box, ...]]:
        """All that one device holds: the boxes of each item, in order."""
        ...


def holdings_of(tensors: JobTensors, plan: JobPlan) -> Holdings:
    """The holdings of a job's tensors under one of its plans. Raises Invalid for a plan of the other kind."""
    if isinstance(tensors, MeshModel):
        if isinstance(plan, MeshPlan):
            return MeshLayouts(tensors, plan)
        refuse(f"plan {plan.number} has pipelines, and the job trains on a mesh")
    if isinstance(plan, MeshPlan):
        refuse(f"plan {plan.number} has a mesh, and the job trains in pipelines")
    return Layouts(tensors, plan)
