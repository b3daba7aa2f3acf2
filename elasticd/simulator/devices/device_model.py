"""The modelled devices as they really are: the slowdown of each, the seconds of a step, the measurements of a
worker.

The coordinator sees none of it but the measurements. A step is the 1F1B schedule of each pipeline (exact, by
`elasticd_planner.cost.schedule_timeline`), then the gradients' reduction, each device's computation multiplied
by its factor and by noise that is a function of (seed, step, device). Forward is a third of computation,
backward the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from elasticd_planner.cost.memory import memory_by_device
from elasticd_planner.cost.model_profile import ModelProfile
from elasticd_planner.cost.profile_cost import ProfileCost
from elasticd_planner.cost.schedule_timeline import one_f_one_b_seconds
from elasticd_planner.problem import ModuleProblem
from elasticd_planner.spec.cluster import Cluster
from elasticd_planner.spec.measurement import Measurement
from elasticd_planner.spec.plan import Plan

from elasticd.chaos.faults import Fault
from elasticd.simulator.devices.plan_arrays import Compiled, compiled

Floats = npt.NDArray[np.float64]

#: The part of a section's computation that is its forward pass.
FORWARD = 1 / 3

#: Steps whose noise a typical step is the mean of.
TYPICAL = 8


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """One step, or several beside each other: its seconds, and by member in rank order what it spent on blocks,
    embed, head, in the TP group's collectives (waiting for slower members included) and in the reduction
    (waiting included)."""

    seconds: Floats
    block: Floats
    embed: Floats
    head: Floats
    tensor: Floats
    reduce: Floats


#: Means and shapes that are kept; a run goes back and forth between few plans and speeds.
MOST_KEPT = 64


class DeviceModel:
    """The cluster as it is. `factors` are how many times slower each living device runs now, in cluster order;
    `dead` devices do nothing. `of` gives what a normal device takes for samples of so many tokens. `modules`:
    those of items, of a model of several."""

    modules: tuple[ModuleProblem, ...] = ()

    def __init__(
        self,
        cluster: Cluster,
        of: Callable[[int], ModelProfile],
        tokens: int,
        *,
        seed: int,
        noise: float,
        overhead: float,
    ):
        self.cluster = cluster
        self.names = tuple(device.name for device in cluster.devices)
        self._index = {name: i for i, name in enumerate(self.names)}
        self._seed, self._noise, self._overhead = seed, noise, overhead
        self.factors = np.ones(len(self.names))
        self.dead: frozenset[str] = frozenset()
        self._of = of
        self._shapes: dict[tuple[str, int], Compiled] = {}
        self._means: dict[tuple[object, ...], float] = {}
        self._planned = tokens
        self.shift(tokens)

    @property
    def sizes(self) -> tuple[float, ...]:
        """The tokens of a sample in the mean, which shifts change."""
        return (self.tokens,)

    def profile_of(self, module: str) -> ModelProfile:
        """The profile of a normal device for a module of a plan. A model of one has one profile."""
        return self.profile

    @property
    def rates(self) -> dict[str, float]:
        """The living devices that are slow now."""
        return {
            name: float(f)
            for name, f in zip(self.names, self.factors, strict=True)
            if f != 1.0 and name not in self.dead
        }

    @property
    def speeds(self) -> dict[str, float]:
        """The rates, dead devices among them as infinitely slow."""
        return {**self.rates, **dict.fromkeys(sorted(self.dead), math.inf)}

    def slow(self, names: Sequence[str], factor: float) -> None:
        """These devices have this factor from now on, whatever it was before; 1.0 is normal. Raises KeyError
        for a name that is not in the cluster."""
        for name in names:
            self.factors[self._index[name]] = factor

    def kill(self, names: Sequence[str]) -> None:
        """These devices do nothing until `join`. Names that are not in the cluster are not refused."""
        self.dead |= {*names}

    def join(self, names: Sequence[str]) -> None:
        """Devices that were dead are there again, as fast as any."""
        self.dead -= {*names}
        self.slow(names, 1.0)

    def shift(self, tokens: int) -> None:
        """A sample has so many tokens from now on, in the mean."""
        self.tokens = tokens
        self.profile = self._of(tokens)

    def strike(self, fault: Fault) -> None:
        """Applies a fault to the devices themselves, or to the samples; other kinds do nothing here."""
        names = fault.devices(self.names)
        match fault.kind:
            case "slow" | "recover":
                self.slow(names, fault.factor)  # 1.0 of a device that recovers
            case "kill":
                self.kill(names)
            case "join":
                self.join(names)
            case "shift":
                self.shift(fault.tokens)

    def overfull(self, plan: Plan) -> str:
        """A member that needs more memory than it has, or the empty string. It can only be one once samples
        are longer than the planner was told."""
        if self.tokens <= self._planned:
            return ""
        room = self.cluster.memory
        needed = memory_by_device(plan, ProfileCost(self.profile))
        return next((name for name, size in needed.items() if size > room[name]), "")

    def noise(self, step: int) -> Floats:
        """By device; the same for a step whatever ran before it, so that runs compare."""
        if not self._noise:
            return np.ones(len(self.names))
        rng = np.random.Generator(np.random.Philox(key=[self._seed, step]))
        return np.exp(rng.normal(0.0, self._noise, len(self.names)))

    def step(self, plan: Plan, step: int) -> StepTimes:
        """The seconds of step number `step` under a plan at the present factors."""
        return self._times(self._shape(plan), self.factors * self.noise(step))

    def typical(self, plan: Plan) -> float:
        """Seconds of a step in the mean over noise."""
        key = (plan.digest, self.tokens, self.factors.tobytes())
        if key not in self._means:
            if len(self._means) > MOST_KEPT:
                self._means.clear()
            count = TYPICAL if self._noise else 1
            units = self.factors * np.stack([self.noise(step) for step in range(count)])
            self._means[key] = float(self._times(self._shape(plan), units).seconds.mean())
        return self._means[key]

    def _times(
        self,
        shape: Compiled,
        unit: Floats,
        profile: ModelProfile | None = None,
        beside: Floats | float = 0.0,
        waited: Floats | float = 0.0,
    ) -> StepTimes:
        """`unit`: how slow each device is, [..., device]; leading dimensions are steps beside each other.
        profile: what sections take, that of the model by default; beside: seconds that each member spends in
        blocks besides that, and waited: those of each stage until all of its members have."""
        model, tokens = profile or self.profile, self.profile.tokens
        speed = tokens * shape.fraction * unit[..., shape.devices]
        block = speed * model.block.seconds * shape.layers
        embed = np.where(shape.first, speed * model.embed.seconds, 0.0)
        head = np.where(shape.last, speed * model.head.seconds, 0.0)
        own = block + embed + head
        slowest = np.maximum.reduceat(own, shape.stage_start, axis=-1) + waited
        block, own = block + beside, own + beside
        forward = slowest * FORWARD + shape.waits / 2
        backward = slowest * (1 - FORWARD) + shape.waits / 2
        ends = np.zeros((*unit.shape[:-1], shape.count))
        for micro_batches, which, rows in shape.alike:
            ends[..., which] = one_f_one_b_seconds(
                forward[..., rows], backward[..., rows], shape.boundary[rows][:, :-1], micro_batches
            )
        total = ends.max(-1) + shape.reduction
        return StepTimes(
            seconds=total + self._overhead,
            block=block * shape.micro_batches,
            embed=embed * shape.micro_batches,
            head=head * shape.micro_batches,
            tensor=((slowest + shape.waits)[..., shape.stage_of] - own) * shape.micro_batches,
            reduce=total[..., None] - ends[..., shape.pipeline],
        )

    def measurements(self, plan: Plan, step: int, times: StepTimes) -> list[Measurement]:
        """The reports of the members about it, in rank order."""
        shape, seconds = self._shape(plan), float(times.seconds)
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
                boundary_seconds=max(0.0, seconds - block - embed - head - tensor - reduce),
                reduce_seconds=reduce,
                step_seconds=seconds,
                micro_batches=count,
            )
            for device, count, work, block, embed, head, tensor, reduce in rows
        ]

    def _shape(self, plan: Plan) -> Compiled:
        key = (plan.digest, self.tokens)
        known = self._shapes.get(key)
        if known is None:
            if len(self._shapes) > MOST_KEPT:
                self._shapes.clear()
            known = self._shapes[key] = compiled(plan, self.profile, self.cluster, self._index)
        return known
