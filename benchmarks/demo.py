"""Runs `elasticd demo` and turns its report into rows: every figure that the demo prints.

make bench NAME=demo
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
from _frame import PRODUCT, Part, run
from _results import Row, row

from elasticd.demo.report import (
    LEAST_OF_PREDICTED,
    LOSS_TOLERANCE,
    MOST_ON_THE_WIRE,
    MOST_OVERRUNS,
    DemoReport,
    Speed,
    Switch,
)

#: After the replan, over what all devices' speed used perfectly would give.
LEAST_OF_YARDSTICK = 0.95


def played() -> DemoReport:
    """One demo in a process of its own. Raises RuntimeError where it made no report."""
    with tempfile.TemporaryDirectory(prefix="elasticd-bench-") as out:
        done = subprocess.run([sys.executable, "-m", "elasticd", "demo", "--out", out], check=False)
        path = Path(out) / "report.json"
        if not path.exists():
            raise RuntimeError(f"elasticd demo ended with {done.returncode} and made no report")
        return msgspec.json.decode(path.read_bytes(), type=DemoReport)


def rows(made: DemoReport) -> Iterator[Row]:
    """The figures in the order in which the demo tells them."""
    met = {check.name: check.met for check in made.checks}
    for speed in made.speeds:
        yield from _speed(speed)
    yield from _over_prediction(made, met)
    yield _over_best_without(made, met)
    yield from _over_ideal(made)
    for switch in made.switches:
        yield from _switch(switch)
    yield from _promises(made, met)


def _over_prediction(made: DemoReport, met: Mapping[str, bool]) -> Iterator[Row]:
    """Throughput over what the planner predicted, while all devices are healthy and after the replan."""
    healthy, after = made.speeds[0], made.speeds[2]
    if healthy.predicted is not None:
        ratio = healthy.measured / healthy.predicted
        yield _ratio(
            "healthy, measured over predicted",
            ratio,
            goal=f">= {LEAST_OF_PREDICTED}",
            met=ratio >= LEAST_OF_PREDICTED,
            noise=healthy.noise,
        )
    if after.predicted is not None:
        yield _ratio(
            "after the replan, measured over predicted",
            after.measured / after.predicted,
            goal=f">= {LEAST_OF_PREDICTED}",
            met=met["as predicted"],
            noise=after.noise,
        )


def _over_best_without(made: DemoReport, met: Mapping[str, bool]) -> Row:
    """Throughput after the replan over what is best where the slow device is left out."""
    if made.without_slow is None:
        return row("best plan without the slow device", "does not fit", "", kind="emulated")
    after = made.speeds[2]
    return _ratio(
        "after the replan, measured over the best plan without the slow device",
        after.measured / made.without_slow,
        goal="> 1",
        met=met["better than without"],
        noise=after.noise,
    )


def _over_ideal(made: DemoReport) -> Iterator[Row]:
    """Throughput after the replan over what all devices' speed used perfectly would give."""
    after = made.speeds[2]
    used = after.measured / made.ideal
    yield row("healthy / (N/sum(1/x))", made.ideal, "tokens/s", kind="emulated")
    yield _ratio(
        "after the replan, measured over healthy / (N/sum(1/x))",
        used,
        goal=f">= {LEAST_OF_YARDSTICK}",
        met=used >= LEAST_OF_YARDSTICK,
        noise=after.noise,
    )


def _promises(made: DemoReport, met: Mapping[str, bool]) -> Iterator[Row]:
    """What must hold whatever the speed: bytes, processes, samples, loss, and an emulation that was in time."""
    yield row(
        "bytes on the wire over those lacking",
        sum(switch.bytes_wire for switch in made.switches)
        / sum(switch.bytes_lacking for switch in made.switches),
        "",
        goal=f"<= {MOST_ON_THE_WIRE}",
        met=met["nothing moved twice"],
    )
    yield _yes("workers' pids the same", met["same processes"])
    yield _yes("each sample exactly once", met["samples once"])
    yield _yes("the slow device has less work than the others", met["unequal work"])
    yield _yes("work given back", met["work given back"])
    yield _yes("a device too small for a replica", met["no whole replica fits"])
    yield row(
        "final loss, relative to plain torch",
        made.loss_error,
        "",
        goal=f"<= {LOSS_TOLERANCE:g}",
        met=met["same loss"],
    )
    yield row(
        "overruns of the emulation", made.overruns, "", goal=f"<= {MOST_OVERRUNS}", met=met["emulation in time"]
    )


def _speed(speed: Speed) -> Iterator[Row]:
    yield row(f"throughput {speed.phase}", speed.measured, "tokens/s", noise=speed.noise, kind="emulated")
    if speed.predicted is not None:
        yield row(f"throughput {speed.phase}, predicted", speed.predicted, "tokens/s", kind="emulated")


def _switch(switch: Switch) -> Iterator[Row]:
    """Detection waits for steps of emulated length; the pause and the bytes are the machine's own."""
    name = "slowdown" if switch.cause == "slow" else "recovery"
    yield row(f"{name} to detection", switch.detected_seconds, "s", kind="emulated")
    yield row(f"{name} to switch", switch.switched_seconds, "s", kind="emulated")
    yield row(f"{name}: pause of the switch", switch.pause_seconds, "s")
    yield row(f"{name}: pause of the switch in steps", switch.pause_steps, "steps", kind="emulated")
    yield row(f"{name}: bytes on the wire", switch.bytes_wire, "bytes")
    yield row(f"{name}: bytes that the new holders lacked", switch.bytes_lacking, "bytes")
    yield row(f"{name}: bytes of the whole state", switch.bytes_state, "bytes")


def _ratio(name: str, value: float, *, goal: str, met: bool, noise: float) -> Row:
    """A ratio of speeds, which are emulated."""
    return row(name, value, "", goal=goal, met=met, noise=noise, kind="emulated")


def _yes(name: str, met: bool) -> Row:
    return row(name, "yes" if met else "no", "", goal="yes", met=met)


PARTS = {"demo": Part(lambda: rows(played()), PRODUCT)}

if __name__ == "__main__":
    sys.exit(run("demo", __doc__, PARTS))
