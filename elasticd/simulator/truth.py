"""What the modelled devices really do: how slow each is, what a step takes, what a worker would measure.

The coordinator sees none of it but the measurements. A step is the 1F1B schedule of each pipeline (exact, by
`elasticd_planner.timeline`), then the gradients' reduction, each device's computation multiplied by its factor
and by noise that is a function of (seed, step, device). Forward is a third of computation, backward the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from elasticd_planner.cluster import Cluster
from elasticd_planner.measurement import Measurement
from elasticd_planner.plan import Plan
from elasticd_planner.profiles import ModelProfile
from elasticd_planner.timeline import one_f_one_b_seconds

from elasticd.simulator.compiled import Compiled, compiled

Floats = npt.NDArray[np.float64]

#: The part of a section's computation that is its forward pass.
FORWARD = 1 / 3

#: Steps whose noise a typical step is the mean of.
TYPICAL = 8


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """One step: its seconds, and by member in rank order what it spent on blocks, embed, head, in the TP
    group's collectives (waiting for slower members included) and in the reduction (waiting included)."""

    seconds: float
    block: Floats
    embed: Floats
    head: Floats
    tensor: Floats
    reduce: Floats


class Truth:
    """The cluster as it is. `factors` are how many times slower each device runs now, in cluster order."""

    def __init__(self, cluster: Cluster, profile: ModelProfile, *, seed: int, noise: float, overhead: float):
        self.cluster, self.profile = cluster, profile
        self.names = tuple(device.name for device in cluster.devices)
        self._index = {name: i for i, name in enumerate(self.names)}
        self._seed, self._noise, self._overhead = seed, noise, overhead
        self.factors = np.ones(len(self.names))
        self._shapes: dict[str, Compiled] = {}

    @property
    def rates(self) -> dict[str, float]:
        """The devices that are slow now."""
        return {name: float(f) for name, f in zip(self.names, self.factors, strict=True) if f != 1.0}

    def slow(self, names: Sequence[str], factor: float) -> None:
        for name in names:
            self.factors[self._index[name]] = factor

    def noise(self, step: int) -> Floats:
        """By device; the same for a step whatever ran before it, so that runs compare."""
        if not self._noise:
            return np.ones(len(self.names))
        rng = np.random.Generator(np.random.Philox(key=[self._seed, step]))
        return np.exp(rng.normal(0.0, self._noise, len(self.names)))

    def step(self, plan: Plan, step: int) -> StepTimes:
        """What step number `step` takes under a plan at the present factors."""
        return self._times(self._shape(plan), self.factors * self.noise(step))

    def typical(self, plan: Plan) -> float:
        """Seconds of a step in the mean over noise."""
        shape = self._shape(plan)
        count = TYPICAL if self._noise else 1
        return sum(self._times(shape, self.factors * self.noise(s)).seconds for s in range(count)) / count

    def _times(self, shape: Compiled, unit: Floats) -> StepTimes:
        model, tokens = self.profile, self.profile.tokens
        speed = tokens * shape.fraction * unit[shape.devices]
        block = speed * model.block.seconds * shape.layers
        embed = np.where(shape.first, speed * model.embed.seconds, 0.0)
        head = np.where(shape.last, speed * model.head.seconds, 0.0)
        own = block + embed + head
        slowest = np.maximum.reduceat(own, shape.stage_start)
        forward = slowest * FORWARD + shape.waits / 2
        backward = slowest * (1 - FORWARD) + shape.waits / 2
        ends = np.zeros(shape.count)
        for micro_batches, which, rows in shape.alike:
            ends[which] = one_f_one_b_seconds(
                forward[rows], backward[rows], shape.boundary[rows][:, :-1], micro_batches
            )
        total = float(ends.max()) + shape.reduction
        return StepTimes(
            seconds=total + self._overhead,
            block=block * shape.micro_batches,
            embed=embed * shape.micro_batches,
            head=head * shape.micro_batches,
            tensor=((slowest + shape.waits)[shape.stage_of] - own) * shape.micro_batches,
            reduce=total - ends[shape.pipeline],
        )

    def measurements(self, plan: Plan, step: int, times: StepTimes) -> list[Measurement]:
        """What the members would report of it, in rank order."""
        shape = self._shape(plan)
        rows = zip(
            plan.members,
            shape.micro_batches.tolist(),
            (shape.layers * shape.fraction).tolist(),
            times.block.tolist(),
            times.embed.tolist(),
            times.head.tolist(),
            times.tensor.tolist(),
            times.reduce.tolist(),
            strict=True,
        )
        per_micro = round(self.profile.tokens)
        return [
            Measurement(
                device=device,
                plan=plan.number,
                step=step,
                tokens=per_micro * count,
                block_seconds=block,
                block_work=per_micro * count * work,
                embed_seconds=embed,
                head_seconds=head,
                tensor_seconds=tensor if tensor > 1e-12 else 0.0,
                boundary_seconds=max(0.0, times.seconds - block - embed - head - tensor - reduce),
                reduce_seconds=reduce,
                step_seconds=times.seconds,
                micro_batches=count,
            )
            for device, count, work, block, embed, head, tensor, reduce in rows
        ]

    def _shape(self, plan: Plan) -> Compiled:
        known = self._shapes.get(plan.digest)
        if known is None:
            if len(self._shapes) > 16:
                self._shapes.clear()
            known = self._shapes[plan.digest] = compiled(plan, self.profile, self.cluster, self._index)
        return known
