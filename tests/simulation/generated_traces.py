"""What the workers of a job would measure, made from a seed: noise, lengths, pauses, and known troubles.

A trace is a function of (seed, step), so any part of it can be made alone. 64 devices by default: 4 pipelines
of 4 stages of TP groups of 4, on 8 nodes. Every pipeline draws its own sequences. Computation costs a token
and, with attention, its sequence's length; communication waits for whoever is slowest, as it does in training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from elasticd_planner.detection.links import Transfer
from elasticd_planner.spec.measurement import Measurement
from elasticd_planner.spec.sequence_lengths import histogram
from elasticd_planner.value import Value, refuse

Floats = npt.NDArray[np.float64]

#: Seconds of one token in one whole block, without attention; of a collective; of a step besides.
TOKEN_SECONDS = 2e-6
COLLECTIVE_SECONDS = 2e-4
REST_SECONDS = 0.01


class Grid(Value, frozen=True, kw_only=True):
    """Who does what: `pipelines` of `stages` of TP groups of `width` devices, `layers` in each stage, a step of
    `sequences` for each pipeline, each a micro-batch of its own; `node` devices share a node."""

    pipelines: int = 4
    stages: int = 4
    width: int = 4
    layers: int = 8
    sequences: int = 16
    node: int = 8

    @property
    def devices(self) -> tuple[str, ...]:
        """In rank order: by pipeline, stage, position."""
        count = self.pipelines * self.stages * self.width
        return tuple(f"n{i // self.node}/{i % self.node}" for i in range(count))

    def peers(self, device: str) -> frozenset[str]:
        """Those that share a TP group, a pipeline or a reduction with a device."""
        names = self.devices
        per = self.stages * self.width
        index = names.index(device)
        pipeline, within = divmod(index, per)
        same = {names[pipeline * per + i] for i in range(per)}
        return frozenset(same | {names[p * per + within] for p in range(self.pipelines)}) - {device}


class Trouble(Value, frozen=True, kw_only=True):
    """A device is `factor` times slower in steps [start, stop); drifting there evenly over `drift` steps; or,
    with `period`, in the first `on` of each `period` steps alone."""

    device: str
    factor: float
    start: int = 0
    stop: int | None = None
    drift: int = 0
    period: int = 0
    on: int = 1

    def at(self, step: int) -> float:
        if step < self.start or (self.stop is not None and step >= self.stop):
            return 1.0
        if self.period and (step - self.start) % self.period >= self.on:
            return 1.0
        if self.drift:
            return 1.0 + (self.factor - 1.0) * min(1.0, (step - self.start + 1) / self.drift)
        return self.factor


class SlowLink(Value, frozen=True, kw_only=True):
    """The link between two nodes is `factor` times slower in steps [start, stop)."""

    source: str
    target: str
    factor: float
    start: int = 0
    stop: int | None = None


class Rough(Value, frozen=True, kw_only=True):
    """What is normal and must not alarm. noise: spread of a device's computation from step to step, and of the
    devices among each other for good (`differing`). pauses: how often a device's step takes a garbage
    collection, by up to `longest_pause` times as long as the step. checkpoint: every so many steps the first
    device of each group writes, for half a step. first: times as long as others the first step takes."""

    noise: float = 0.05
    differing: float = 0.01
    pauses: float = 0.004
    longest_pause: float = 3.0
    checkpoint: int = 100
    first: float = 8.0


class Data(Value, frozen=True, kw_only=True):
    """Sequences' lengths: log-normal with this median and spread, cut at `longest`. From step `shifted` on they
    are `times` as long. attention: by what a token costs more for each token of its sequence's length."""

    median: float = 512.0
    spread: float = 0.6
    longest: int = 32768
    shifted: int | None = None
    back: int | None = None
    times: float = 2.0
    attention: float = 1 / 4096

    def scale(self, step: int) -> float:
        on = self.shifted is not None and step >= self.shifted and (self.back is None or step < self.back)
        return self.times if on else 1.0


class Trace(Value, frozen=True, kw_only=True):
    """One job's measurements. Raises Invalid for a trouble of an unknown device."""

    seed: int
    grid: Grid = Grid()
    rough: Rough = Rough()
    data: Data = Data()
    troubles: tuple[Trouble, ...] = ()
    links: tuple[SlowLink, ...] = ()
    plan: int = 1

    def __post_init__(self) -> None:
        known = self.grid.devices
        for trouble in self.troubles:
            if trouble.device not in known:
                refuse(f"trace: {trouble.device} is not one of {known[0]} to {known[-1]}")

    def steps(self, start: int, stop: int) -> Iterator[list[Measurement]]:
        for step in range(start, stop):
            yield self.step(step)

    def rate(self, device: str, step: int) -> float:
        """How many times slower a device really is in a step, its lasting difference included."""
        own = math.exp(float(self._lasting()[self.grid.devices.index(device)]))
        return own * math.prod(trouble.at(step) for trouble in self.troubles if trouble.device == device)

    def lengths(self, step: int) -> npt.NDArray[np.int64]:
        """The sequences of a step, [pipeline, sequence]."""
        rng, grid, data = self._rng(step, 1), self.grid, self.data
        drawn = rng.lognormal(math.log(data.median), data.spread, (grid.pipelines, grid.sequences))
        return np.clip(np.round(drawn * data.scale(step)), 1, data.longest).astype(np.int64)

    def step(self, step: int) -> list[Measurement]:
        """What all devices report of a step, in rank order."""
        grid = self.grid
        lengths = self.lengths(step)
        tokens, squares = lengths.sum(1), (lengths.astype(np.float64) ** 2).sum(1)
        per = grid.stages * grid.width
        work = np.repeat(tokens + self.data.attention * squares, per) * grid.layers / grid.width
        own = work * TOKEN_SECONDS * self._slowness(step)
        stages = own.reshape(grid.pipelines, grid.stages, grid.width)
        slowest = stages.max(2, keepdims=True)
        collectives = 4 * grid.layers * grid.sequences * COLLECTIVE_SECONDS
        tensor = (slowest - stages + collectives).ravel()
        busy = (slowest + collectives)[:, :, 0]
        ends = busy.max(1) + busy.sum(1) / grid.sequences
        boundary = np.repeat(np.repeat(ends, grid.stages) - busy.ravel(), grid.width)
        reduce = np.repeat(ends.max() - ends + REST_SECONDS, per)
        seconds = float(ends.max()) + 2 * REST_SECONDS
        counts = [histogram(row.tolist()) for row in lengths]
        made = []
        for index, device in enumerate(grid.devices):
            pipeline = index // per
            made.append(
                Measurement(
                    device=device,
                    plan=self.plan,
                    step=step,
                    tokens=int(tokens[pipeline]),
                    block_seconds=float(own[index]),
                    block_work=float(tokens[pipeline]) * grid.layers / grid.width,
                    forward_seconds=float(own[index]) / 3,
                    backward_seconds=float(own[index]) * 2 / 3,
                    tensor_seconds=float(tensor[index]),
                    boundary_seconds=float(boundary[index]),
                    reduce_seconds=float(reduce[index]),
                    vote_seconds=REST_SECONDS,
                    step_seconds=seconds,
                    micro_batches=grid.sequences,
                    squares=float(squares[pipeline]),
                    longest=int(lengths[pipeline].max()),
                    lengths=counts[pipeline],
                )
            )
        return made

    def transfers(self, step: int) -> list[Transfer]:
        """What each node took to send to the next one, of the bytes that a stage's boundaries have."""
        rng = self._rng(step, 3)
        count = len(self.grid.devices) // self.grid.node
        made = []
        for source in range(count):
            names = f"n{source}", f"n{(source + 1) % count}"
            slow = math.prod(
                link.factor
                for link in self.links
                if {*names} == {link.source, link.target}
                and step >= link.start
                and (link.stop is None or step < link.stop)
            )
            size = int(rng.integers(1 << 20, 1 << 24))
            seconds = (2e-5 + size / 2.5e10) * slow * math.exp(2 * self.rough.noise * rng.standard_normal())
            made.append(Transfer(source=names[0], target=names[1], size=size, seconds=seconds))
        return made

    def _slowness(self, step: int) -> Floats:
        """By device, of its computation in a step: its rate, its noise and its pauses."""
        rng, rough, grid = self._rng(step, 2), self.rough, self.grid
        names = grid.devices
        logs: Floats = self._lasting() + rng.normal(0.0, rough.noise, len(names))
        made: Floats = np.exp(logs)
        paused = rng.random(len(names)) < rough.pauses
        made += paused * rng.uniform(0.1, rough.longest_pause, len(names))
        if rough.checkpoint and step and step % rough.checkpoint == 0:
            made[:: grid.width] += 0.5
        if step == 0:
            made *= rough.first * rng.uniform(0.5, 1.5, len(names))
        for trouble in self.troubles:
            made[names.index(trouble.device)] *= trouble.at(step)
        return made

    def _lasting(self) -> Floats:
        """The logarithm of how many times slower each device is for good."""
        return self._rng(0, 4).normal(0.0, self.rough.differing, len(self.grid.devices))

    def _rng(self, step: int, what: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=[self.seed, step * 8 + what]))
