"""The truth of simulated devices with experts: loads drift, and devices wait for a block's busiest one.

The chances of a block's experts are Zipf's in an order of their own; their logarithms walk at random about
these. They are functions of (seed, step). A device's experts take the part of a block's computation that they
have by shapes, times the part of the rows that goes to them under the plan.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import numpy.typing as npt
from elasticd_planner.cost.model_profile import ModelProfile
from elasticd_planner.spec.cluster import Cluster
from elasticd_planner.spec.expert_load import ExpertLoad, blocks_of, fractions_in
from elasticd_planner.spec.measurement import Measurement
from elasticd_planner.spec.plan import Plan

from elasticd.simulator.devices.device_model import DeviceModel, StepTimes
from elasticd.simulator.devices.plan_arrays import Compiled

Floats = npt.NDArray[np.float64]

#: Steps between two reports of the rows of each expert, as of a worker.
REPORTED = 10
#: The part of its way back that a logarithm goes in a step.
RETURNS = 0.02
#: Of so many steps the walk of one is kept; those between are walked anew where a job goes back to them.
KEPT = 64


class ExpertTruth(DeviceModel):
    """The cluster, of a model with experts in all of its blocks."""

    def __init__(
        self,
        cluster: Cluster,
        of: Callable[[int], ModelProfile],
        tokens: int,
        load: ExpertLoad,
        *,
        zipf: float,
        drift: float,
        seed: int,
        noise: float,
        overhead: float,
    ) -> None:
        """
        Args:
            cluster: as in `DeviceModel`.
            of: likewise.
            tokens: likewise.
            load: rows of experts of a step in which all are alike, and what experts cost.
            zipf: the chance of the n-th expert falls as n to the power of -zipf.
            drift: how much the logarithm of each changes from step to step.
            seed: as in `DeviceModel`.
            noise: likewise.
            overhead: likewise.
        """
        self._drift, self._even, self._at = drift, load, 0
        count = len(next(iter(load.rows.values())))
        random = np.random.Generator(np.random.Philox(key=[seed, 1 << 40]))
        chances = -zipf * np.log(np.arange(1, count + 1))
        first = np.stack([chances[random.permutation(count)] for _ in load.rows])
        self._kept, self._last = [first], (0, first)
        super().__init__(cluster, of, tokens, seed=seed, noise=noise, overhead=overhead)

    def load(self, step: int) -> ExpertLoad:
        """The rows of the experts of each block in a step, in the mean over what samples there may be."""
        chances = np.exp(self._logs(step))
        chances /= chances.sum(1, keepdims=True)
        rows = {
            block: tuple((sum(own) * part).tolist())
            for (block, own), part in zip(self._even.rows.items(), chances, strict=True)
        }
        return msgspec.structs.replace(self._even, rows=rows)

    def _logs(self, step: int) -> Floats:
        """The logarithms of the chances in a step [blocks, experts]: walked from the nearest known one."""
        kept = min(step // KEPT, len(self._kept) - 1)
        at, logs = self._last if kept * KEPT <= self._last[0] <= step else (kept * KEPT, self._kept[kept])
        while at < step:
            at += 1
            random = np.random.Generator(np.random.Philox(key=[self._seed, (1 << 42) + at]))
            walk = random.normal(0.0, self._drift, logs.shape) if self._drift else 0.0
            logs = logs + walk - RETURNS * (logs - self._kept[0])
            if at == KEPT * len(self._kept):
                self._kept.append(logs)
        self._last = at, logs
        return logs

    def step(self, plan: Plan, step: int) -> StepTimes:
        self._at = step
        return self._routed(plan, self.factors * self.noise(step), self.load(step))

    def typical(self, plan: Plan) -> float:
        return float(self._routed(plan, self.factors, self.load(self._at)).seconds)

    def _routed(self, plan: Plan, unit: Floats, load: ExpertLoad) -> StepTimes:
        """A step under a load: of each block the experts take as long as on the busiest device."""
        shape = self._shape(plan)
        slow = unit[shape.devices]
        work, busiest = np.ones(len(slow)), np.zeros(len(shape.stage_start))
        for number, (_, _, lane) in enumerate(plan.walk()):
            start = int(shape.stage_start[number])
            own = slice(start, start + len(lane.devices))
            fractions = np.array(fractions_in(lane, load))
            work[own] = fractions.mean(0) / shape.fraction[own]
            busiest[number] = (fractions * slow[own]).max(1).sum()
        return self._times_of(shape, unit, work, busiest * load.part)

    def _times_of(self, shape: Compiled, unit: Floats, work: Floats, busiest: Floats) -> StepTimes:
        part = self._even.part
        each = self.profile.tokens * self.profile.block.seconds
        dense = msgspec.structs.replace(
            self.profile,
            block=msgspec.structs.replace(self.profile.block, seconds=self.profile.block.seconds * (1 - part)),
        )
        mine = each * part * shape.fraction * unit[shape.devices] * shape.layers * work
        return self._times(shape, unit, profile=dense, beside=mine, waited=each * busiest)

    def measurements(self, plan: Plan, step: int, times: StepTimes) -> list[Measurement]:
        listed = super().measurements(plan, step, times)
        if step % REPORTED:
            return listed
        load = self.load(step)
        rng = np.random.Generator(np.random.Philox(key=[self._seed, (1 << 41) + step]))
        heads = {lane.devices[0]: lane for _, _, lane in plan.walk()}
        micro_batches = sum(pipeline.micro_batches for pipeline in plan.pipelines)
        found = []
        for each in listed:
            if (lane := heads.get(each.device)) is not None:
                share = each.micro_batches / micro_batches
                rows = {}
                for block in blocks_of(lane):
                    total = round(sum(load.rows[block]) * share)
                    drawn = rng.multinomial(total, np.array(load.weights(block)))
                    rows[block] = tuple(map(int, drawn.tolist()))
                each = msgspec.structs.replace(each, expert_rows=rows)
            found.append(each)
        return found
