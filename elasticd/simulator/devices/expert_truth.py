"""The truth of simulated devices of a model of one module with experts (`ExpertLoads`)."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from elasticd_planner.cost.model_profile import ModelProfile
from elasticd_planner.numeric import Floats
from elasticd_planner.spec.cluster import Cluster
from elasticd_planner.spec.expert_load import ExpertLoad
from elasticd_planner.spec.measurement import Measurement
from elasticd_planner.spec.plan import Plan

from elasticd.simulator.devices.device_model import DeviceModel, StepTimes
from elasticd.simulator.devices.expert_loads import ExpertLoads


class ExpertTruth(DeviceModel):
    """The cluster, of a model with experts in all of its blocks."""

    def __init__(
        self,
        cluster: Cluster,
        of: Callable[[int], ModelProfile],
        tokens: int,
        loads: ExpertLoads,
        *,
        seed: int,
        noise: float,
        overhead: float,
    ) -> None:
        """
        Args:
            cluster: as in `DeviceModel`.
            of: likewise.
            tokens: likewise.
            loads: of its experts.
            seed: as in `DeviceModel`.
            noise: likewise.
            overhead: likewise.
        """
        self.loads, self._at = loads, 0
        super().__init__(cluster, of, tokens, seed=seed, noise=noise, overhead=overhead)

    def step(self, plan: Plan, step: int) -> StepTimes:
        self._at = step
        return self._routed(plan, self.factors * self.noise(step), self.loads.load(step))

    def typical(self, plan: Plan) -> float:
        return float(self._routed(plan, self.factors, self.loads.load(self._at)).seconds)

    def _routed(self, plan: Plan, unit: Floats, load: ExpertLoad) -> StepTimes:
        """A step under a load: of each block the experts take as long as on the busiest device."""
        shape, part, profile = self._shape(plan), self.loads.part, self.profile
        work, busiest = self.loads.work(plan, shape, unit, load)
        each = profile.tokens * profile.block.seconds * part
        block = msgspec.structs.replace(profile.block, seconds=profile.block.seconds * (1 - part))
        return self._times(
            shape,
            unit,
            profile=msgspec.structs.replace(profile, block=block),
            beside=each * shape.fraction * unit[shape.devices] * shape.layers * work,
            waited=each * busiest,
        )

    def measurements(self, plan: Plan, step: int, times: StepTimes) -> list[Measurement]:
        return self.loads.reported(plan, step, super().measurements(plan, step, times))
