"""What PyTorch users can install instead, through the same faults: torchrun, which restarts from a checkpoint,
and torchft, which goes on without the replica that is lost. Both with their defaults and tuned.

torchft is installed into an environment of its own, which borrows this one's torch. Each peer is a job of three
workers with 20 ms of compute a step. One worker at a time is killed (-9), of torchrun the last: the first one's
node hosts its rendezvous.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import shutil
import socket
import statistics
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import psutil
from _results import Row, row

from elasticd.system.parent_death_signal import ending_with_us

HERE = Path(__file__).resolve().parent
WORKERS, COMPUTE, PATIENCE = 3, 0.02, 180.0
TORCHFT = "torchft-nightly==2026.10.26"


class CannotRun(Exception):
    """A peer does not run here; the message says why."""


class Line(msgspec.Struct, frozen=True):
    step: int
    time: float


class Peer:
    """Processes by name and their ledgers, all of which end with the `with`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: Sequence[str], **environment: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                ending_with_us(list(command)),
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            )

    def ledgers(self) -> dict[int, list[Line]]:
        """By the worker's process id."""
        found = {}
        for path in self.folder.glob("ledger-*"):
            lines = path.read_bytes().split(b"\n")[:-1]
            found[int(path.name.rsplit("-", 1)[1])] = [msgspec.json.decode(line, type=Line) for line in lines]
        return found

    def pid(self, number: int) -> int:
        """Of worker `number`, the newest."""
        paths = self.folder.glob(f"ledger-{number}-*")
        return int(max(paths, key=lambda path: path.stat().st_ctime).name.rsplit("-", 1)[1])

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > deadline:
                logs = "\n".join(path.read_text()[-1000:] for path in self.folder.glob("*.log"))
                raise CannotRun(f"{what} did not happen in {PATIENCE:g} s: {logs[-1500:]}")
            time.sleep(0.02)

    def steady(self, steps: int = 20, since: float | None = None) -> None:
        """Waits until as many workers as there should be have made so many steps after a time."""
        begin = time.monotonic() if since is None else since

        def many() -> bool:
            made = [sum(line.time > begin for line in ledger) for ledger in self.ledgers().values()]
            return sum(count >= steps for count in made) >= WORKERS

        self.until(many, f"{steps} steps of {WORKERS} workers")

    def close(self) -> None:
        for process in self.processes.values():
            tree = []
            if process.poll() is None:
                tree = psutil.Process(process.pid).children(recursive=True)
            for each in tree:
                try:
                    each.kill()
                except psutil.NoSuchProcess:
                    continue
            process.kill()
            process.wait()


@contextmanager
def peer() -> Iterator[Peer]:
    with TemporaryDirectory(prefix="eb-peer-") as name:
        made = Peer(Path(name))
        try:
            yield made
        finally:
            made.close()


def torchrun_rows(injections: int) -> Iterator[Row]:
    """The job's stall, and the steps that are made again, by settings."""
    for nodes, every in ((1, 50), (1, 1), (WORKERS, 50), (WORKERS, 1)):
        where = "one node" if nodes == 1 else f"{nodes} nodes, c10d"
        how = "default" if every == 50 else "tuned"
        title = f"torchrun {how} ({where}, checkpoint every {every} steps)"
        try:
            stalls, redone = torchrun(injections, nodes, every)
        except CannotRun as error:
            yield row(f"{title}: stall, one worker lost", f"not measured: {error}", "")
            continue
        yield from _spread(f"{title}: stall, one worker lost", stalls)
        yield row(f"{title}: steps made again, mean", statistics.fmean(redone), "steps")


def torchft_rows(injections: int) -> Iterator[Row]:
    """The survivors' stall, by settings."""
    name = "survivors' stall, one replica lost"
    try:
        with environment() as python:
            for how, heartbeat, timeout in (("default", 5000, 60.0), ("tuned", 500, 1.0)):
                try:
                    stalls = torchft(injections, python, heartbeat, timeout)
                    yield from _spread(f"torchft {how}: {name}", stalls)
                except CannotRun as error:
                    yield row(f"torchft {how}: {name}", f"not measured: {error}", "")
    except CannotRun as error:
        yield row(f"torchft: {name}", f"not measured: {error}", "")


def _spread(name: str, values: Sequence[float]) -> Iterator[Row]:
    ordered = sorted(values)
    yield row(f"{name}, median", statistics.median(ordered), "s")
    yield row(f"{name}, p95 of {len(ordered)}", ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], "s")
    yield row(f"{name}, maximum", ordered[-1], "s")


def torchrun(injections: int, nodes: int, every: int) -> tuple[list[float], list[int]]:
    """A worker dies, all start again from the checkpoint: seconds without a new step, less one normal step, and
    the steps that were made before and had to be made again."""
    stalls, redone = [], []
    with peer() as job:
        port, script = free_port(), str(HERE / "_peer_torchrun.py")
        for node in range(nodes):
            rendezvous = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=peer")
            shape = (f"--nnodes={nodes}", f"--nproc-per-node={WORKERS // nodes}", "--max-restarts=1000")
            options = (str(job.folder), str(every), str(COMPUTE))
            command = (sys.executable, "-m", "torch.distributed.run", *shape, *rendezvous, script, *options)
            # As of torch 2.13 workers that are started again would read what the ones before them left in the
            # store that torchrun shares with them (https://github.com/pytorch/pytorch/issues/135712).
            job.start(f"torchrun{node}", command, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        job.steady()
        for _ in range(injections):
            before = job.ledgers()
            killed = time.monotonic()
            psutil.Process(job.pid(WORKERS - 1)).kill()
            job.steady(10)
            after = job.ledgers()
            reached = max(ledger[-1].step for ledger in after.values() if ledger and ledger[0].time < killed)
            last = max(line.time for pid in before for line in after[pid] if line.step <= reached)
            fresh = [ledger for pid, ledger in after.items() if pid not in before and ledger]
            first = min(line for ledger in fresh for line in [(ledger[0].time, ledger[0].step)])
            again = [line.time for ledger in fresh for line in ledger if line.step > reached] or [first[0]]
            stalls.append(min(again) - last - normal(fresh[0]))
            redone.append(reached + 1 - first[1])
    return stalls, redone


def normal(ledger: Sequence[Line]) -> float:
    """Seconds of a step, the median."""
    times = [line.time for line in ledger]
    return statistics.median(b - a for a, b in itertools.pairwise(times))


@contextmanager
def environment() -> Iterator[str]:
    """A Python with torchft, beside this environment's packages. Raises CannotRun."""
    with TemporaryDirectory(prefix="eb-torchft-") as name:
        venv.create(name, with_pip=True)
        python = str(Path(name) / "bin" / "python")
        inside = Path(sysconfig.get_path("purelib", vars={"base": name}))
        (inside / "zz_borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
        kept = Path(name) / "constraints.txt"  # not another torch, beside the one that is borrowed
        kept.write_text(f"torch=={importlib.metadata.version('torch')}\n")
        install = [python, "-m", "pip", "install", "--quiet", "--constraint", str(kept), TORCHFT]
        done = subprocess.run(install, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode == 0:
            imports = [python, "-c", "import torchft"]
            done = subprocess.run(imports, capture_output=True, text=True, timeout=120, check=False, cwd=name)
        if done.returncode:
            raise CannotRun(f"{TORCHFT}: {(done.stderr.strip().splitlines() or ['no word'])[-1]}")
        yield python


def torchft(injections: int, python: str, heartbeat_ms: int, timeout: float) -> list[float]:
    """A replica dies and comes back: the survivors' longest gap between committed steps, less one step."""
    stalls: list[float] = []
    with peer() as job:
        port = free_port()
        lighthouse = shutil.which("torchft_lighthouse", path=str(Path(python).parent))
        if lighthouse is None:
            raise CannotRun("its lighthouse is not installed")
        options = (
            "--min_replicas",
            "1",
            "--quorum_tick_ms",
            "100",
            "--heartbeat_timeout_ms",
            str(heartbeat_ms),
        )
        joining = ("--join_timeout_ms", "60000" if heartbeat_ms > 1000 else "1000")
        job.start("lighthouse", (lighthouse, "--bind", f"127.0.0.1:{port}", *options, *joining))
        named = {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}

        def start(number: int) -> None:
            script = (str(HERE / "_peer_torchft.py"), str(job.folder), str(number), str(timeout), str(COMPUTE))
            job.start(f"replica{number}", (python, *script), **named)

        for number in range(WORKERS):
            start(number)
        job.steady()
        for turn in range(injections):
            number, killed = turn % WORKERS, time.monotonic()
            victim = job.processes[f"replica{number}"]
            pid = job.pid(number)
            psutil.Process(pid).kill()
            victim.wait()
            job.until(lambda: _went_on(job.ledgers(), pid, killed), "a step of the survivors")  # noqa: B023
            stalls += _stalls(job.ledgers(), pid, killed)
            start(number)
            job.steady(10)
    return stalls


def _went_on(ledgers: Mapping[int, list[Line]], gone: int, killed: float) -> bool:
    return len(_stalls(ledgers, gone, killed)) >= WORKERS - 1


def _stalls(ledgers: Mapping[int, list[Line]], gone: int, killed: float) -> list[float]:
    """Of each survivor with ten steps after the death: the longest gap since shortly before it."""
    found = []
    for pid, ledger in ledgers.items():
        times = [line.time for line in ledger]
        if pid == gone or not times or times[0] > killed or sum(time > killed for time in times) < 10:
            continue
        around = [time for time in times if time > killed - 0.2]
        if len(around) > 10:
            found.append(max(b - a for a, b in itertools.pairwise(around)) - normal(ledger))
    return found


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
