"""`RankInfo`: the place of this process in the plan in force."""

from __future__ import annotations

from elasticd_planner.spec.box import Box
from elasticd_planner.spec.plan import Place, Plan
from torch import Tensor, nn

from elasticd.runtime.control.control import Control
from elasticd.runtime.engine.engine import Engine
from elasticd.runtime.switch.switcher import Switcher


class RankInfo:
    """Ranks, stages and degrees of this process under the plan in force; any of them may change after any step.

    On standby a device has no rank, stage or pipeline (None). A device that only carries replicas of state has
    a rank, and no stage or pipeline. Of a model of several modules these are of the module that computes the
    loss; `place` gives those of any module.
    """

    _control: Control
    _switcher: Switcher[Engine]

    @property
    def device(self) -> str:
        """The device of this worker, "node/index"."""
        return self._control.welcome.device

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None on standby."""
        return self._engine.plan if self._engine else None

    @property
    def rank(self) -> int | None:
        """The rank among the members of the plan. (torchrun's RANK is stale after the first switch.)"""
        return self._engine.rank if self._engine else None

    @property
    def world_size(self) -> int | None:
        """Members of the plan, without devices on standby."""
        return len(self.plan.members) if self.plan else None

    @property
    def pipeline(self) -> int | None:
        """The index of this device's pipeline, that is its data-parallel rank where pipelines have one lane."""
        return self._place.pipeline if self._place else None

    @property
    def lane(self) -> int | None:
        """The index of this device's lane in its pipeline: 0 where the pipeline has one lane."""
        return self._place.lane if self._place else None

    @property
    def stage(self) -> int | None:
        """The index of this device's stage in its pipeline."""
        return self._place.stage if self._place else None

    @property
    def stages(self) -> int | None:
        """Stages of this device's pipeline. Other pipelines may have more or fewer."""
        if self._loss_plan is None or self._place is None:
            return None
        return len(self._loss_plan.pipeline(self._place).stages)

    @property
    def is_first_stage(self) -> bool:
        """True if this device computes the embedding, and reads inputs."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """True if this device computes the head and the loss."""
        return self.stage is not None and self.stages is not None and self.stage + 1 == self.stages

    @property
    def tp_rank(self) -> int | None:
        """The rank of this device in its TP group."""
        return self._place.position if self._place else None

    @property
    def tp_size(self) -> int | None:
        """Members of this device's TP group."""
        if self._loss_plan is None or self._place is None:
            return None
        return len(self._loss_plan.stage(self._place).devices)

    @property
    def updates(self) -> int:
        """Steps that the state on this device has made."""
        return self._switcher.step

    @property
    def learning_rate(self) -> float | None:
        """The learning rate of the optimizer's first parameter group."""
        if self._engine is None or not self._engine.optimizer.param_groups:
            return None
        return float(self._engine.optimizer.param_groups[0]["lr"])

    def parameters(self) -> dict[str, tuple[Box, Tensor]]:
        """The parameters on this device, by full name. Empty on standby.

        Returns:
            The box of the global tensor that this device holds, and its values (not a copy). A parameter of
            experts that the plan places has an entry for each run of them: "blocks.3.experts.up[2:4]".
        """
        engine = self._copied_engine
        modules = engine.modules.values() if engine is not None else ()
        return {
            module.prefix + name + (f"[{box.start[0]}:{box.stop[0]}]" if len(held.boxes) > 1 else ""): (
                box,
                held.part(box),
            )
            for module in modules
            for name, held in module.local.parameters.items()
            for box in held.boxes
        }

    def modules(self) -> dict[str, nn.Module]:
        """The sections that this device trains, by name: "embed", "blocks.3", "head"; of a model of several
        modules "vision.blocks.3". Empty on standby.

        They are made anew under each plan: set attributes, and freeze parameters, in `Callback.before_step`.
        """
        engine = self._copied_engine
        modules = engine.modules.values() if engine is not None else ()
        return {
            module.prefix + name: section
            for module in modules
            for name, section in module.local.modules.items()
        }

    def place(self, module: str) -> Place | None:
        """The place of this device in a module of the model; None: in none of its pipelines.

        Raises:
            Invalid: the plan has no such module.
        """
        return self.plan.view(module).places.get(self.device) if self.plan else None

    @property
    def _copied_engine(self) -> Engine | None:
        """The engine once no snapshot reads its state: the caller may write to it, also by `.data`, which torch
        does not count."""
        if self._engine is not None:
            self._engine.copied()
        return self._engine

    @property
    def _engine(self) -> Engine | None:
        return self._switcher.engine

    @property
    def _place(self) -> Place | None:
        return self._loss_plan.places.get(self.device) if self._loss_plan else None

    @property
    def _loss_plan(self) -> Plan | None:
        """The plan of the module that computes the loss."""
        return self._engine.loss_plan if self._engine else None
