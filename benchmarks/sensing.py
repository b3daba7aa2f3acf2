"""Detection's figures on generated traces of 64 devices: how soon, how exactly, and how seldom by mistake; and
an emulated job whose data shifts.

make bench NAME=sensing

The traces have 5 % noise, log-normal lengths, garbage collections, checkpoints and a slow first step
(tests/simulation/generated_traces.py). Thresholds were set on other seeds than those that are measured here.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from _frame import PRODUCT, Part, run
from _results import Row, row
from elasticd_planner.detection.data_shift import Shift, ShiftState, watch
from elasticd_planner.detection.links import LinkState, observe_links
from elasticd_planner.detection.settings import DetectSettings
from elasticd_planner.detection.stragglers import Change, RateState, observe
from elasticd_planner.spec.cluster import Link
from elasticd_planner.spec.step_measurements import Step

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from _shifting import shifting  # noqa: E402

from tests.simulation.generated_traces import Data, Grid, SlowLink, Trace, Trouble  # noqa: E402

SETTINGS = DetectSettings()
#: Seeds from here on were not used to set any threshold.
SEEDS = 110_000
BEGINS, LASTS = 40, 45
QUIET_SEEDS, QUIET_STEPS = 5, 1600
FACTORS = (1.2, 1.5, 2.0, 3.0, 6.0, 12.0)


@dataclass
class Run:
    """One trace through detection: every change, and after each step what `look` sees."""

    trace: Trace
    steps: int
    look: Callable[[int, RateState], None] = lambda step, state: None
    state: RateState = field(default_factory=RateState)
    changes: list[Change] = field(default_factory=list)
    shifts: list[Shift] = field(default_factory=list)

    def play(self) -> Run:
        """Feeds all steps of the trace to detection."""
        data = ShiftState()
        for step, measured in enumerate(self.trace.steps(0, self.steps)):
            self.state, found = observe(self.state, measured, SETTINGS)
            self.changes += found
            data, shift = watch(data, step, Step.of(measured).lengths, SETTINGS)
            self.shifts += [shift] if shift else []
            self.look(step, self.state)
        return self

    def first(self, device: str, start: int = 0) -> float:
        """Steps of trouble until a device's first change from `start` on; infinite where there is none."""
        told = (change.step - start + 1 for change in self.changes if change.device == device)
        return next((steps for steps in told if steps > 0), math.inf)


@dataclass
class Found:
    """Of devices that became slow: steps until it was told, how far the rates were off ten steps after, and the
    highest rate that any of their healthy peers was given."""

    delays: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    peers: float = 1.0

    def watching(self, trace: Trace, begins: Mapping[str, int]) -> Callable[[int, RateState], None]:
        """What is to be looked at after each step of a trace whose devices become slow at these steps."""
        peers = {peer for device in begins for peer in trace.grid.peers(device)} - {*begins}

        def look(step: int, state: RateState) -> None:
            for device, begin in begins.items():
                if step == begin + 9:
                    given = state.rates.get(device, 1.0)
                    self.errors.append(abs(given / trace.rate(device, step) - 1))
            self.peers = max(self.peers, *(rate for d, rate in state.rates.items() if d in peers), 1.0)

        return look


def slowed(factor: float, seeds: int, together: int) -> Found:
    """So many devices of each trace become slow, one after the other."""
    found = Found()
    for seed in range(seeds):
        grid = Grid()
        rng = np.random.default_rng([SEEDS, seed])
        chosen = [grid.devices[i] for i in rng.choice(len(grid.devices), together, replace=False)]
        begins = {device: BEGINS + int(rng.integers(0, 12)) for device in chosen}
        troubles = tuple(Trouble(device=d, factor=factor, start=s) for d, s in begins.items())
        trace = Trace(seed=SEEDS + 100 * int(100 * factor) + seed, troubles=troubles)
        played = Run(trace, BEGINS + LASTS, found.watching(trace, begins)).play()
        found.delays += [played.first(device, begin) for device, begin in begins.items()]
    return found


def part(values: Sequence[float], share: float) -> float:
    """The least value that `share` of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def at_most(name: str, value: float, most: float, unit: str) -> Row:
    """A row with the most that its value may be."""
    return row(name, value, unit, kind="simulated", goal=f"<= {most:g}", met=value <= most)


def slow_devices(seeds: int = 24, factors: Sequence[float] = FACTORS) -> Iterator[Row]:
    """How soon devices of several slowdowns are found, and how exactly."""
    tenth = slowed(1.1, seeds, 2)
    yield at_most("1.10x slow: found, median", part(tenth.delays, 0.5), 10, "steps")
    yield at_most("1.10x slow: found, p95", part(tenth.delays, 0.95), 20, "steps")
    peers = tenth.peers
    for factor in factors:
        found = slowed(factor, max(1, seeds // 3), 6)
        peers = max(peers, found.peers)
        if factor >= 1.5:
            yield at_most(f"{factor:g}x slow: found, p95", part(found.delays, 0.95), 3, "steps")
        else:
            yield row(f"{factor:g}x slow: found, p95", part(found.delays, 0.95), "steps", kind="simulated")
        yield at_most(f"{factor:g}x slow: rate after 10 steps off, p95", part(found.errors, 0.95), 0.05, "")
        yield row(f"{factor:g}x slow: rate after 10 steps off, worst", max(found.errors), "", kind="simulated")
    yield at_most("highest rate of a peer of a slow device", peers, 1.05, "x")


def quiet(seeds: int = QUIET_SEEDS) -> Iterator[Row]:
    """Alarms in traces in which nothing happens."""
    runs = [Run(Trace(seed=SEEDS + seed), QUIET_STEPS) for seed in range(seeds)]
    began = time.process_time()
    alarms = [change for run in runs for change in run.play().changes if change.kind == "slow"]
    spent = time.process_time() - began
    count = seeds * QUIET_STEPS * len(Grid().devices)
    for alarm in alarms:
        print(f"false alarm in step {alarm.step}: {alarm.reason}")
    yield at_most(f"false alarms in {count:,} device-steps, of each 100,000", len(alarms) / count * 1e5, 1, "")
    shifts = sum(len(run.shifts) for run in runs)
    yield at_most("data shifts told where there was none", shifts, 0, "")
    yield row("detection and trace, of each device and step", spent / count * 1e6, "µs of processor")


def shifted(seeds: int = 8) -> Iterator[Row]:
    """Traces whose lengths double: how soon that is found, and whether a device is blamed for it."""
    delays, slow = [], 0
    for seed in range(seeds):
        run = Run(Trace(seed=SEEDS + seed, data=Data(shifted=60)), 110).play()
        delays.append(run.shifts[0].step - 59 if run.shifts else math.inf)
        slow += len(run.changes)
    yield at_most(f"lengths double in a step: told, worst of {seeds}", max(delays), 20, "steps")
    yield at_most("lengths double in a step: devices called slow", slow, 0, "")


def other_troubles() -> Iterator[Row]:
    """A recovery, a device slow from the start, a slow drift, a flapping device."""
    device = "n3/5"
    recovering = Run(
        Trace(seed=SEEDS, troubles=(Trouble(device=device, factor=3, start=20, stop=50),)), 80
    ).play()
    yield row("3x slow, recovered: told", recovering.first(device, 50), "steps", kind="simulated")
    always = Run(Trace(seed=SEEDS, troubles=(Trouble(device=device, factor=1.5),)), 40).play()
    yield row("1.5x slow from the very start: told", always.first(device), "steps", kind="simulated")
    drifting = Run(Trace(seed=SEEDS, troubles=(Trouble(device=device, factor=1.6, start=50, drift=300),)), 420)
    off: list[float] = []
    drifting.look = lambda step, state: off.append(
        abs(state.rates.get(device, 1.0) / drifting.trace.rate(device, step) - 1)
    )
    drifting.play()
    yield row("drifting to 1.6x over 300 steps: rate off, worst", max(off), "", kind="simulated")
    yield row("drifting to 1.6x over 300 steps: changes told", len(drifting.changes), "", kind="simulated")
    on_and_off = Trouble(device=device, factor=2, start=20, period=30, on=12)
    flapping = Run(Trace(seed=SEEDS, troubles=(on_and_off,)), 260).play()
    kind = flapping.state.slowness(device).kind
    yield row(
        "flapping, 12 of 30 steps: called", kind, "", kind="simulated", goal="periodic", met=kind == "periodic"
    )


def links() -> Iterator[Row]:
    """A slow link between two nodes."""
    slow = SlowLink(source="n2", target="n3", factor=3, start=30)
    trace = Trace(seed=SEEDS, links=(slow,))
    state, told = LinkState(), []
    for step in range(80):
        state, found = observe_links(state, trace.transfers(step), step, Link(), SETTINGS)
        told += [change for change in found if change.kind == "slow"]
    steps = told[0].step - 29 if told and told[0].device == "n2 - n3" else math.inf
    yield at_most("a link 3x slow: told, and no other", steps if len(told) == 1 else math.inf, 20, "steps")
    devices = Run(trace, 80).play().changes
    yield at_most("a link 3x slow: devices called slow", len(devices), 0, "")


_DETECTION = ("planner/elasticd_planner/detection",)
PARTS = {
    "slow": Part(slow_devices, _DETECTION, {"seeds": 1, "factors": (2.0,)}),
    "quiet": Part(quiet, _DETECTION, {"seeds": 1}),
    "shifted": Part(shifted, _DETECTION, {"seeds": 1}),
    "troubles": Part(other_troubles, _DETECTION),
    "links": Part(links, _DETECTION),
    "shifting": Part(shifting, PRODUCT, {"back": False}),
}

if __name__ == "__main__":
    sys.exit(run("sensing", __doc__, PARTS))
