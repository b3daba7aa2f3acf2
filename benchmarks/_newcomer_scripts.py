"""How many kinds of unmodified scripts run under `elasticd run`, survive a kill -9 of a worker, and go on.

DDP and FSDP2 (`examples/`), transformers' Trainer, accelerate and Lightning (`tests/scripts/`), each on two
workers of one node, in the default mode. A script counts where its first worker is killed after a checkpoint,
all its steps are made to the end, steps that are made again have the loss that they had, and it ends with 0.
"""

from __future__ import annotations

import re
import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import psutil
from _results import Row, row

from elasticd.testing.waiting import until
from tests.integration.launches import Launched, Launches, torchrun_workers

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = {
    "DDP": ROOT / "examples" / "ddp.py",
    "FSDP2": ROOT / "examples" / "fsdp2.py",
    "HF Trainer": ROOT / "tests" / "scripts" / "trainer.py",
    "accelerate": ROOT / "tests" / "scripts" / "accelerated.py",
    "Lightning": ROOT / "tests" / "scripts" / "lightning_module.py",
}
#: Steps of each script; the step after which a worker is killed; steps between checkpoints.
STEPS, KILLED_AT, SAVE_EVERY = 60, 25, 10


def rows(smallest: bool) -> Iterator[Row]:
    """The scripts that went through all of it; the smallest size tries one of them."""
    tried = dict(list(SCRIPTS.items())[:1]) if smallest else SCRIPTS
    passed = 0
    with Launches({"a": 2}) as launches:
        for name, script in tried.items():
            if why := _failure(launches, name, script):
                print(f"{name}: {why}")
            else:
                passed += 1
    goal = f"{len(SCRIPTS)} of {len(SCRIPTS)}"
    name = "scripts unmodified under elasticd run: run, survive a kill -9, go on"
    yield row(
        name, f"{passed} of {len(tried)}", "scripts", kind="measured", goal=goal, met=passed == len(SCRIPTS)
    )


def _failure(launches: Launches, name: str, script: Path) -> str:
    """What went wrong with a script, or nothing."""
    job = re.sub(r"\W", "-", name)
    folder = launches.cluster.folder / job
    folder.mkdir()
    options = (f"--steps={STEPS}", f"--save-every={SAVE_EVERY}", "--pause=0.1", f"--folder={folder}")
    run = launches.run("a", "--job", job, script, *options)
    try:
        until(lambda: KILLED_AT in losses(run) or run.process.poll() is not None, seconds=300)
        if run.process.poll() is not None:
            return f"it ended before step {KILLED_AT}: {run.said[-2000:]}"
        _kill_one(run)
        code = run.wait()
    finally:
        run.stop()
    found = losses(run)
    if code:
        return f"exit code {code}: {run.said[-2000:]}"
    if sorted(found) != list(range(STEPS)):
        return f"steps are missing: {sorted({*range(STEPS)} - found.keys())}"
    different = {step: values for step, values in found.items() if len(values) > 1}
    return f"losses differ: {different}" if different else ""


def _kill_one(run: Launched) -> None:
    torchrun_workers(psutil.Process(run.process.pid))[0].send_signal(signal.SIGKILL)


def losses(run: Launched) -> dict[int, set[float]]:
    """Each step's losses, to five digits; a step that was made again has several if they differ."""
    found: dict[int, set[float]] = defaultdict(set)
    for step, loss in re.findall(r"step (\d+) world 2 loss ([\d.]+)", run.said):
        found[int(step)].add(float(f"{float(loss):.5g}"))
    return found
