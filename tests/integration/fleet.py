"""A whole cluster as real processes, as a user starts it: coordinators, agents, torchruns; each can be killed,
frozen and thawed. Whatever was started is ended, by its id, when the `with` ends."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from elasticd_planner.spec.batch import Sampler

from elasticd.client import ApiClient, CannotReach
from elasticd.models import DecoderConfig
from elasticd.store.leader import ElectedLeader, read_leader
from elasticd.store.protocol import StoreError, WatchEvent
from elasticd.system.parent_death_signal import ending_with_us
from elasticd.testing.waiting import until
from elasticd.wire.event_record import EventRecord
from tests import forkserver, sizes
from tests.etcds import SharedEtcd
from tests.forkserver import Forked
from tests.integration import train, train_ledger
from tests.integration.trio import Relay, Trio

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = "test"
PATIENCE = 120.0
SCRIPT = Path(train_ledger.__file__)
#: Operations of a token in a block of the tests' models, forward.
BLOCK_FLOPS = 15e3


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A step as one worker was given it; `time` is of CLOCK_MONOTONIC, the same for all processes."""

    step: int
    plan: int
    loss: float
    samples: list[int]
    time: float


def job_by(api: ApiClient) -> dict[str, Any]:
    """The job as this coordinator shows it. Raises CannotReach."""
    jobs = json.loads(api.status_json())["jobs"]
    return next((job for job in jobs if job["job"] == "job"), {})


class Fleet:
    """`etcd`: a `Trio` where the test disturbs etcd, else the one that all tests of this process share.
    `folder` must be short: sockets live in it. `forward`: seconds a token takes in a block, emulated; the
    planner knows of it before it has measured, so that the first plan is of all devices. `host`: where
    coordinators serve; `places`: what a node's commands begin with, and its address, where it has another than
    this machine's."""

    def __init__(
        self,
        etcd: Trio | SharedEtcd,
        folder: Path,
        *,
        forward: float = 1e-4,
        memory: int = 1 << 30,
        host: str = "127.0.0.1",
        places: Mapping[str, tuple[Sequence[str], str]] | None = None,
    ) -> None:
        self.etcd, self.folder = etcd, folder
        self.cluster = etcd.cluster() if isinstance(etcd, SharedEtcd) else CLUSTER
        self._places = dict(places or {})
        self.processes: dict[str, subprocess.Popen[bytes] | Forked] = {}
        #: Where the process of a name imports elasticd from; from this checkout if it is not here.
        self.imports_from: dict[str, Path] = {}
        self.relays: list[Relay] = []
        self._ledgers: dict[str, list[Step]] = {}
        self._read: dict[str, int] = {}  # bytes of each
        self.configuration = folder / "config.toml"
        self.configuration.write_text(
            "\n".join(
                [
                    f'[cluster]\nname = "{self.cluster}"',
                    f'[coordinator]\nhost = "{host}"\nport = 0\nstate = "{folder}"',
                    f'[agent]\nstate = "{folder}"',
                    f"[emulate]\nenabled = true\nforward = {forward!r}\nbackward = {2 * forward!r}",
                    f"memory = {memory}",
                    f"[planner]\nflops = {BLOCK_FLOPS / forward!r}",
                    # Not for a release that does not know the key.
                    "[security]\ninsecure = true" if host != "127.0.0.1" else "",
                    "[chaos]\nenabled = true\n",
                ]
            )
        )

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- processes -----------------------------------------------------------------------------------------

    def coordinator(self, name: str, endpoints: Sequence[str] = ()) -> None:
        """Starts one, and waits until it leads or stands by."""
        before = len(self.log(name))  # of one of that name that was there before
        self._start(name, "-m", "elasticd", "coordinator", "--name", name, *self._named(endpoints))

        def there() -> bool:
            said = self.log(name)[before:]
            return "standing by" in said or "leading" in said

        until(there, lambda: self.log(name))

    def agent(self, node: str, devices: int, endpoints: Sequence[str] = ()) -> None:
        options = ["--node", node, "--socket", self.socket(node), "--devices", str(devices)]
        within, address = self._places.get(node, ((), ""))
        options += ["--address", address or "127.0.0.1"]  # not waiting for a leader whose route would say so
        self._start(node, "-m", "elasticd_agent", *options, *self._named(endpoints), within=within)

    def run(
        self, node: str, devices: int, nodes: str, steps: int, script: Path = SCRIPT, **options: Any
    ) -> None:
        """`elasticd run` on a node: a torchrun for each device. Options go to the job."""
        job = ("--job", "job", "--nnodes", nodes, "--devices", str(devices), "--max-restarts", "1000")
        command = (*job, "--socket", self.socket(node), str(script), str(self.folder), str(steps))
        within, _ = self._places.get(node, ((), ""))
        self._start(f"run-{node}", "-m", "elasticd", "run", *command, json.dumps(options), within=within)

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes.pop(name).wait()

    def freeze(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGCONT)

    def socket(self, node: str) -> str:
        return str(self.folder / f"{node}.sock")

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def tree(self, name: str) -> list[psutil.Process]:
        """A process that we started and all below it."""
        try:
            process = psutil.Process(self.processes[name].pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def close(self) -> None:
        """Ends all: whoever was started by those that we started, too."""
        trees = [process for name in self.processes for process in self.tree(name)]
        for process in trees:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for child in self.processes.values():
            child.wait()

    def _named(self, endpoints: Sequence[str]) -> tuple[str, ...]:
        return ("--config", str(self.configuration), "--etcd", ",".join(endpoints or self.etcd.endpoints))

    def _start(self, name: str, *arguments: str, within: Sequence[str] = ()) -> None:
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("ELASTICD_")},
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(self.imports_from.get(name, ROOT)),
            "PYTHONUNBUFFERED": "1",
        }
        path = self.folder / f"{name}.log"
        if not within and name not in self.imports_from:
            # With all that it starts: importing again and again would be most of what a test does.
            module = f"{arguments[1]}.__main__"
            self.processes[name] = forkserver.start(
                module, *arguments[2:], environment=environment, output=path
            )
            return
        with path.open("ab") as log:
            self.processes[name] = subprocess.Popen(
                ending_with_us([*within, sys.executable, *arguments]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                cwd=self.folder,  # "python -m" looks for modules in it first
                start_new_session=True,
            )

    # -- what the cluster says -----------------------------------------------------------------------------

    def leader(self) -> ElectedLeader | None:
        """By etcd; None as well where that cannot be asked."""
        with self.etcd.store() as store:
            try:
                return read_leader(store, f"/elasticd/{self.cluster}/leader")
            except StoreError:
                return None

    def leads(self, but: ElectedLeader | None = None) -> ElectedLeader:
        """The leader, once there is one (another than `but`), which answers and has met all agents."""

        def found() -> ElectedLeader | None:
            leader = self.leader()
            return leader if leader is not None and (but is None or leader.term > but.term) else None

        return until(lambda: found(), self.said)

    @contextlib.contextmanager
    def api(self) -> Iterable[ApiClient]:  # type: ignore[misc]
        with ApiClient(self.leads().value) as api:
            yield api

    def job(self) -> dict[str, Any]:
        """The job as the leader shows it; empty where nobody answers."""
        leader = self.leader()
        if leader is None:
            return {}
        return self.job_at(leader.value)

    def shown(self) -> dict[str, Any]:
        """The job as the leader shows it, as soon as one does."""
        return until(self.job, self.said)

    def job_at(self, url: str) -> dict[str, Any]:
        """The job as the coordinator at `url` shows it: etcd is not asked."""
        try:
            with ApiClient(url) as api:
                return job_by(api)
        except CannotReach:
            return {}

    def events(self) -> tuple[EventRecord, ...]:
        """Of the present leader's time."""
        with self.api() as api:
            return api.events()

    def revision(self) -> int:
        """How far etcd has come."""
        with self.etcd.store() as store:
            return int(store.identity().revision)

    def history(self, since: int) -> list[WatchEvent]:
        """Every change of the cluster's keys after a revision, and one of our own."""
        root = f"/elasticd/{self.cluster}/"
        with self.etcd.store() as store:
            last = store.put(f"{root}mark", os.urandom(8))
            events: list[WatchEvent] = []
            watch = store.watch(root, since + 1)
            while not events or events[-1].mod_revision < last:
                item = watch.get(timeout=PATIENCE)
                assert isinstance(item, WatchEvent), item
                events.append(item)
            return events

    def epoch(self, node: str) -> int:
        """The highest that a node's agent ever obeyed, as it remembers it."""
        return int(json.loads((self.folder / f"{self.cluster}-agent-{node}.json").read_text())["epoch"])

    def said(self) -> str:
        return "\n".join(f"-- {path.name}:\n{path.read_text()[-1500:]}" for path in self.folder.glob("*.log"))

    # -- what the workers were given -----------------------------------------------------------------------

    def ledgers(self) -> Mapping[str, list[Step]]:
        """The steps by "DEVICE-PID"."""
        for path in sorted(self.folder.glob("ledger-*")):
            name = path.name.removeprefix("ledger-")
            if path.stat().st_size == self._read.get(name, 0):
                continue
            with path.open("rb") as file:
                file.seek(self._read.get(name, 0))
                whole, _, _ = file.read().rpartition(b"\n")  # without one that is half written
            if whole:
                self._read[name] = self._read.get(name, 0) + len(whole) + 1
                ledger = self._ledgers.setdefault(name, [])
                ledger += [msgspec.json.decode(line, type=Step) for line in whole.split(b"\n")]
        return self._ledgers

    def steps(self) -> int:
        """Steps that somebody was given: the highest, and one."""
        return max((ledger[-1].step + 1 for ledger in self.ledgers().values() if ledger), default=0)

    def advanced(self, steps: int, seconds: float = PATIENCE, pause: float = 0.05) -> None:
        """Waits until so many more steps were made."""
        goal = self.steps() + steps

        def missing() -> str:
            return f"step {goal}, at {self.steps()}\n{self.said()}"

        until(lambda: self.steps() >= goal, missing, seconds=seconds, pause=pause)

    def largest_gap(self, since: float) -> float:
        """The longest that any worker that lived all the time until now waited for its next step."""
        to = time.monotonic()
        before = {name for name, ledger in self.ledgers().items() if ledger and ledger[-1].time > since}

        def caught_up() -> bool:
            ledgers = self.ledgers()
            return all(ledgers[name][-1].time >= to for name in before)

        until(caught_up, lambda: f"{self.job()}\n{self.said()}")
        gaps = []
        for ledger in self.ledgers().values():
            times = [step.time for step in ledger]
            inside = [time for time in times if since <= time <= to]
            if inside and times[0] < since and times[-1] >= to:
                before = max(time for time in times if time < since)
                after = min(time for time in times if time >= to)
                inside = [before, *inside, after]
                gaps.append(max(b - a for a, b in itertools.pairwise(inside)))
        assert gaps, f"no worker trained from {since} to {to}"
        return max(gaps)


def exact(fleet: Fleet, plans: int, config: DecoderConfig = train.CONFIG) -> None:
    """Every step was made once, by the samples that are due; the first ones with the loss of one process.
    `config` is the model's."""
    steps: dict[int, Step] = {}
    for name, ledger in fleet.ledgers().items():
        numbers = [step.step for step in ledger]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), f"{name}: a step is lost or twice"
        for step in ledger:
            other = steps.setdefault(step.step, step)
            # Not bit by bit: who died may have been given a step that the others made again under another plan.
            assert step.loss == pytest.approx(other.loss, rel=1e-9), name
            assert step.samples == other.samples, name
    assert sorted(steps) == list(range(len(steps)))
    sampler = Sampler(size=len(train.Text()), global_batch=train.BATCH, seed=train.SEED)
    for number, step in steps.items():
        assert sorted(step.samples) == sorted(sampler.samples(number)), f"step {number}"
    first = min(sizes.number(full=500, quick=25), len(steps))
    torch.set_num_threads(1)  # two that spin for each other take minutes where others use the cores
    losses, _ = train.reference(first, config)
    assert [steps[number].loss for number in range(first)] == pytest.approx(losses, rel=1e-6)
    assert len(made := {step.plan for step in steps.values()}) >= plans, made
