"""Where a process sits in the plan in force: what a script asks its job about itself."""

from __future__ import annotations

from elasticd_planner.spec.box import Box
from elasticd_planner.spec.plan import Place, Plan
from torch import Tensor

from elasticd.runtime.control.agent_client import Control
from elasticd.runtime.engine.engine import Engine
from elasticd.runtime.switch.switcher import Switcher


class RankInfo:
    """Each answer is of the plan in force, and may be another after any step. A device that stands by has no
    rank, stage or pipeline (None), one that only carries replicas of state has a rank alone."""

    _control: Control
    _switcher: Switcher

    @property
    def device(self) -> str:
        """This worker's device, "node/index"."""
        return self._control.welcome.device

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None while this device stands by."""
        return self._engine.plan if self._engine else None

    @property
    def rank(self) -> int | None:
        """The rank under the plan in force (torchrun's RANK is stale after the first switch)."""
        return self._engine.rank if self._engine else None

    @property
    def world_size(self) -> int | None:
        """How many members the plan has, devices that stand by not counted."""
        return len(self.plan.members) if self.plan else None

    @property
    def pipeline(self) -> int | None:
        """Which of the plan's pipelines, its replicas of the model, this device is in."""
        return self._place.pipeline if self._place else None

    @property
    def stage(self) -> int | None:
        """Which stage of its pipeline."""
        return self._place.stage if self._place else None

    @property
    def stages(self) -> int | None:
        """How many stages its pipeline has; others may have another number."""
        if self.plan is None or self._place is None:
            return None
        return len(self.plan.modules[self._place.module].pipelines[self._place.pipeline].stages)

    @property
    def is_first_stage(self) -> bool:
        """Whether it computes the embedding, and reads inputs."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether it computes the head and the loss."""
        return self.stage is not None and self.stages is not None and self.stage + 1 == self.stages

    @property
    def tp_rank(self) -> int | None:
        """Its place in its stage's tensor-parallel group."""
        return self._place.position if self._place else None

    @property
    def tp_size(self) -> int | None:
        """How many members that group has."""
        return len(self.plan.stage(self._place).devices) if self.plan and self._place else None

    @property
    def updates(self) -> int:
        """How many updates were applied to the state that is held here."""
        return self._switcher.step

    @property
    def learning_rate(self) -> float | None:
        """Of the optimizer's first parameter group."""
        if self._engine is None or not self._engine.optimizer.param_groups:
            return None
        return float(self._engine.optimizer.param_groups[0]["lr"])

    def parameters(self) -> dict[str, tuple[Box, Tensor]]:
        """The parameters held here under the plan in force, by full name: the box of the global tensor that
        this device holds, and its values (not a copy). Empty while this device stands by."""
        held = self._engine.local.parameters if self._engine is not None else {}
        return {name: (box, parameter.detach()) for name, (box, parameter) in held.items()}

    @property
    def _engine(self) -> Engine | None:
        return self._switcher.engine

    @property
    def _place(self) -> Place | None:
        return self.plan.places.get(self.device) if self.plan else None
