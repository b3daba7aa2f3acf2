"""A script of the corpus as a job: on a cluster through three layouts, a fault and a switch, or in one process.

On the cluster it begins in two stages over two devices. At the first gate the second device's worker is killed:
the job goes back to its newest checkpoint or snapshot, and on on one device. A new worker joins there. At the
second gate the job waits until the plan with both devices is prepared, to which it then switches in place: one
TP group of both, or two replicas with unequal batches.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch
from elasticd_planner.spec.batch import Sampler
from torch import Tensor

from elasticd.machines.job.state.job_state import JobSettings
from elasticd.testing.waiting import CONDITION_TIMEOUT_SECONDS, until
from tests import forkserver
from tests.integration.cluster import JOB, Cluster
from tests.scripts import planner_in_turn, worker
from tests.scripts.corpus import ordinary

SETTINGS = JobSettings(gather_seconds=0.05, probe_seconds=0.5, retry_seconds=0.5)
SCRIPT = Path(worker.__file__)


DOCS = Path(__file__).resolve().parents[2] / "docs/training.md"
#: What can become of a script beside plain torch; only the first two are right.
EQUAL, REFUSED, WRONG, FAILED = "equal", "refused", "wrong in silence", "failed"
#: The largest difference of losses and weights in float64.
APART = 1e-10


@dataclass
class Ran:
    """A job that ended: losses by step, as the history has them that survived, and what else it left."""

    losses: dict[int, float] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    notes: dict[str, float] = field(default_factory=dict)
    plans: list[int] = field(default_factory=list)
    codes: dict[str, int] = field(default_factory=dict)
    output: str = ""
    phase: str = ""

    @classmethod
    def left_in(cls, folder: Path) -> Ran:
        """Reads what workers wrote into a folder."""
        ran = cls(output="\n".join(path.read_text() for path in sorted(folder.glob("log-*"))))
        files = [path.read_text().splitlines() for path in folder.glob("losses-*")]
        lines = [json.loads(line) for file in files for line in file]
        for line in sorted(lines, key=lambda line: line["plan"]):
            ran.losses[line["step"]] = line["loss"]
        ran.plans = sorted({line["plan"] for line in lines})
        if (path := folder / "weights").exists():
            ran.weights = torch.load(path)
        for path in folder.glob("notes-*"):
            ran.notes |= json.loads(path.read_text())
        saved = [path.name.partition(".")[0] for path in (folder / "checkpoints").glob("step-*")]
        if saved:
            ran.notes["steps saved"] = int(max(saved).removeprefix("step-"))
        return ran

    def apart(self, plain: ordinary.Outcome) -> float:
        """The largest difference from plain torch of a loss, a weight and a note; NaN where one is missing."""
        between = [self.losses.get(step, torch.nan) - loss for step, loss in enumerate(plain.losses)]
        between += [self.notes.get(name, torch.nan) - value for name, value in plain.notes.items()]
        between += [0.0 if len(self.losses) == len(plain.losses) else torch.nan]
        if plain.weights:
            between += [0.0 if self.weights else torch.nan]
        for name in plain.weights.keys() & self.weights.keys():  # a tied weight has one of its names here
            between.append(float((self.weights[name] - plain.weights[name]).abs().max()))
        return float(torch.tensor(between).abs().max())


def script(name: str) -> ModuleType:
    return import_module(f"tests.scripts.corpus.{name}")


def order(name: str) -> ordinary.Order:
    """The indices of each step's samples: a function of the seed, as docs/training.md says."""
    size = getattr(script(name), "SIZE", 64)
    sampler = Sampler(size=size, global_batch=ordinary.BATCH, seed=ordinary.SEED)
    return [sampler.samples(step) for step in range(ordinary.STEPS)]


def run(name: str) -> Ran:
    """Runs a script on the cluster, through everything.

    Raises:
        AssertionError: it did not come through; the message has events and output.
    """
    command = (sys.executable, planner_in_turn.__file__, getattr(script(name), "LAYOUT", "dp"))
    options = {"name": name, "gates": True}
    with Cluster({"a": 1, "b": 1}, planner=command, settings=SETTINGS, forward=1e-5) as cluster:
        cluster.run(SCRIPT, **options)
        _wait(cluster, lambda: all((cluster.folder / f"fault-{node}").exists() for node in "ab"))
        _wait(cluster, lambda: _is_kept_twice(cluster))
        cluster.workers["b/0"].kill()
        cluster.workers["b/0"].wait()
        (cluster.folder / "fault").touch()
        cluster.rejoin("b")
        cluster.start_worker("b/0", SCRIPT, options)
        _wait(cluster, lambda: (cluster.folder / "switch-a").exists())
        _wait(cluster, lambda: len(cluster.events("prepared")) >= 3)
        (cluster.folder / "switch").touch()
        codes = cluster.wait()
        until(lambda: cluster.job()["phase"] in ("done", "stopped"))
        ran = Ran.left_in(cluster.folder)
        ran.codes, ran.phase = codes, cluster.job()["phase"]
        return ran


def _is_kept_twice(cluster: Cluster) -> bool:
    """Returns whether the device that is left can read the state by itself: from a checkpoint, or from the
    newest snapshots, which both nodes keep. Else the job would rightly wait for the other device."""
    if (cluster.folder / "checkpoints").exists():
        return True
    kept_twice = cluster.coordinator.leading.state.jobs[JOB].snapshots.whole
    last = worker.GATES["fault"] // worker.SNAPSHOT_EVERY * worker.SNAPSHOT_EVERY
    return kept_twice is not None and kept_twice.step == last


def _wait(cluster: Cluster, there: Callable[[], bool]) -> None:
    """Waits for a condition, or until a worker ends before it."""

    def output() -> str:
        events = [event["text"] for event in cluster.events()]
        return "\n".join([*events, Ran.left_in(cluster.folder).output])

    until(lambda: there() or any(worker.poll() is not None for worker in cluster.workers.values()), output)
    assert there(), output()


def run_alone(name: str, seconds: float = CONDITION_TIMEOUT_SECONDS) -> Ran:
    """Runs a script as `python SCRIPT`, in one process without an agent."""
    with tempfile.TemporaryDirectory(prefix="elasticd-test-") as path:
        folder = Path(path)
        launched = ("TORCHELASTIC_RUN_ID", "LOCAL_RANK", "WORLD_SIZE")
        environment = {key: value for key, value in os.environ.items() if key not in launched}
        environment |= {
            "ELASTICD_DEVICE": "cpu",
            "ELASTICD_SOCKET": str(folder / "none.sock"),
            "OPTIONS": json.dumps({"out": path, "name": name, "gates": False}),
        }
        process = forkserver.start(SCRIPT, environment=environment, output=folder / "log-alone")
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{name} did not end: {Ran.left_in(folder).output}") from None
        finally:
            process.kill()
            process.wait()
        ran = Ran.left_in(folder)
        ran.codes = {"alone": code}
        return ran


def judged(name: str) -> str:
    """Runs a script and says what became of it: EQUAL, REFUSED, WRONG or FAILED."""
    message = getattr(script(name), "REFUSED", None)
    try:
        ran = run(name) if message is None else run_alone(name)
    except AssertionError:
        return FAILED
    if any(ran.codes.values()) or (message is None and ran.phase != getattr(script(name), "PHASE", "done")):
        documented = message is not None and message in ran.output and message in DOCS.read_text()
        return REFUSED if documented else FAILED
    return EQUAL if ran.apart(script(name).plain(order(name))) < APART else WRONG
