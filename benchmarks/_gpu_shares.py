"""A heterogeneous cluster inside one GPU: a job whose ranks have shares of its multiprocessors.

    python benchmarks/_gpu_shares.py cuda 60    # the kind of the device, and the seconds that there are
    python benchmarks/_gpu_shares.py cpu 120    # tries it: the emulation paces devices to their shares

Coordinator, planner, agents and workers are real, each rank is a node of its own, and tensors go over NCCL on a
GPU. A rank's share is cut to a third: the slowdown is found from its step times, and the planner's new plan is
switched to. Then a rank is killed, and joins again. The bound of the throughput follows from the shares: the
ranks' sum now over their sum at first. Prints [name, value] for each figure.

Never run on a GPU. There ranks are processes, which a driver runs in turns unless its service for several
processes (MPS) is there: `service for several processes` says whether it could be started.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import torch  # noqa: E402
from _gpu_share_worker import BATCH, TOKENS, multiprocessors  # noqa: E402

from elasticd.machines.job.state.job_state import JobSettings  # noqa: E402
from elasticd.testing.waiting import until  # noqa: E402
from tests.integration.cluster import Cluster  # noqa: E402

NODES = {"a": 1, "b": 1, "c": 1}
SLOW, KILLED = "c/0", "b/0"
SHARE = 1 / 3  # of what the slow rank had
#: Steps that a throughput is taken from.
STEPS = 8
#: Seconds of the emulation for a token and block: a step's computation is long beside what the host does.
FORWARD_SECONDS = 3e-4
#: Operations a second that the planner guesses of a normal device until steps were measured: those of a GPU's
#: third, and what the emulated seconds come to.
FLOPS = {"cuda": 1e14, "cpu": 2e7}


class Shares(Protocol):
    """Gives ranks their share of a device."""

    def give(self, device: str, share: float) -> None:
        """`share`: of what the rank had at first."""

    def whole(self, share: float) -> float:
        """What all ranks have, one of them with this share, over what they had at first."""


class EmulatedShares:
    """Devices that the emulation paces."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def give(self, device: str, share: float) -> None:
        self._cluster.pace(device, 1 / share)

    def whole(self, share: float) -> float:
        return (len(NODES) - 1 + share) / len(NODES)


class MultiprocessorShares:
    """Shares of a GPU's multiprocessors, in files that workers read between their steps."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._all = torch.cuda.get_device_properties(0).multi_processor_count

    def give(self, device: str, share: float) -> None:
        path = self._cluster.folder / f"share-{device.replace('/', ':')}"
        path.with_suffix(".new").write_text(str(share))
        path.with_suffix(".new").rename(path)

    def whole(self, share: float) -> float:
        mine, first = (multiprocessors(self._all, len(NODES), each) for each in (share, 1.0))
        return ((len(NODES) - 1) * first + mine) / (len(NODES) * first)


class Ledger:
    """The steps that the ranks 0 wrote down, each of so many tokens."""

    def __init__(self, folder: Path, tokens: int) -> None:
        self._folder, self._tokens = folder, tokens

    def steps(self, plan: int = 0, after: float = 0.0) -> list[dict[str, Any]]:
        """Those under this plan or a later one that ended after a time, in their order."""
        lines = [
            json.loads(line)
            for path in self._folder.glob("ledger-*")
            for line in path.read_text().splitlines(keepends=True)
            if line.endswith("\n")
        ]
        chosen = [line for line in lines if line["plan"] >= plan and line["at"] > after]
        return sorted(chosen, key=lambda line: float(line["at"]))

    def tokens_per_second(self, plan: int = 0, after: float = 0.0) -> float:
        """Over the last steps."""
        times = [line["at"] for line in self.steps(plan, after)][-STEPS:]
        return (len(times) - 1) * self._tokens / (times[-1] - times[0])


class Story:
    """The cluster, and the figures in the order in which they come."""

    def __init__(self, cluster: Cluster, shares: Shares, seconds: float) -> None:
        self._cluster, self._shares = cluster, shares
        tokens = BATCH * TOKENS["cuda" if options(shares)["cuda"] else "cpu"]
        self._ledger, self._ends = Ledger(cluster.folder, tokens), time.monotonic() + seconds

    def figures(self) -> Iterator[tuple[str, Any]]:
        """All of them."""
        self._enough()
        first = self._ledger.tokens_per_second()
        yield "ranks at first", sorted(self._cluster.job()["plan"]["binding"])
        yield "tokens/s, equal shares", first
        yield from self._slowed(first)
        yield from self._killed()
        yield from self._joined()
        last = self._cluster.finish()
        self._cluster.wait(max(10.0, self._ends - time.monotonic()))
        yield "steps", last
        losses = [line["loss"] for line in self._ledger.steps()]
        yield "losses, the first and the last", [losses[0], losses[-1]]

    def _slowed(self, first: float) -> Iterator[tuple[str, Any]]:
        """One share is cut."""
        cut = time.time()
        self._shares.give(SLOW, SHARE)
        self._until(lambda: self._events("slow", cut))
        yield "seconds until the slowdown is found", self._events("slow", cut)[0]["time"] - cut
        yield "slowdown found", self._events("slow", cut)[0]["text"]
        self._until(lambda: self._events("recorded", cut))
        recorded = self._events("recorded", cut)[0]
        yield "seconds until the new plan runs", recorded["time"] - cut
        yield "tokens/s, cut share, old plan", self._ledger.tokens_per_second(after=cut)
        self._enough(recorded["data"]["number"])
        rate = self._ledger.tokens_per_second(recorded["data"]["number"])
        yield "tokens/s, cut share, new plan", rate
        yield "over the bound", rate / (first * self._shares.whole(SHARE))

    def _killed(self) -> Iterator[tuple[str, Any]]:
        """One rank is killed."""
        killed = time.time()
        self._cluster.workers[KILLED].kill()
        self._cluster.workers.pop(KILLED).wait()
        self._until(lambda: self._events("recorded", killed))
        number = self._events("recorded", killed)[0]["data"]["number"]
        self._until(lambda: self._ledger.steps(number, killed))
        yield "seconds from a kill to the next step", self._ledger.steps(number, killed)[0]["at"] - killed

    def _joined(self) -> Iterator[tuple[str, Any]]:
        """The rank joins again."""
        joined = time.time()
        self._cluster.rejoin(KILLED.partition("/")[0])
        self._cluster.start_worker(KILLED, HERE / "_gpu_share_worker.py", options(self._shares))
        self._until(lambda: KILLED in (self._cluster.job().get("plan") or {}).get("binding", ()))
        number = self._cluster.job()["plan"]["number"]
        self._enough(number)
        yield "seconds until the rank that joined trains", self._ledger.steps(number)[0]["at"] - joined
        yield "tokens/s, joined", self._ledger.tokens_per_second(number)

    def _events(self, kind: str, after: float) -> list[dict[str, Any]]:
        return [event for event in self._cluster.events(kind) if event["time"] >= after]

    def _enough(self, plan: int = 0) -> None:
        """Waits until there are steps enough for a throughput, two more than are counted."""
        self._until(lambda: len(self._ledger.steps(plan)) >= STEPS + 2)

    def _until(self, condition: Callable[[], object]) -> None:
        def holds() -> bool:
            for device, worker in self._cluster.workers.items():
                if worker.poll() not in (None, 0):
                    raise RuntimeError(f"{device} ended:\n{self._cluster.log(device)[-1500:]}")
            return bool(condition())

        until(holds, self._told, seconds=max(10.0, self._ends - time.monotonic()))

    def _told(self) -> str:
        return "\n".join(str(event["text"]) for event in self._cluster.events())


def options(shares: Shares) -> dict[str, Any]:
    """Those of each worker."""
    return {"cuda": isinstance(shares, MultiprocessorShares), "ranks": len(NODES)}


@contextmanager
def several_processes(kind: str, folder: str) -> Iterator[bool]:
    """Has the driver run kernels of several processes beside each other, where it can."""
    control = shutil.which("nvidia-cuda-mps-control") if kind == "cuda" else None
    if control is None:
        yield False
        return
    places = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
    for place in places.values():
        Path(place).mkdir()
    os.environ |= places
    runs = subprocess.run([control, "-d"], check=False, stdout=subprocess.DEVNULL).returncode == 0
    if not runs:
        for name in places:
            del os.environ[name]
    try:
        yield runs
    finally:
        if runs:
            quits = {"input": "quit\n", "text": True, "timeout": 20, "stdout": subprocess.DEVNULL}
            subprocess.run([control], check=False, **quits)


def main(kind: str, seconds: float) -> None:
    """Prints the figures."""
    settings = JobSettings(retry_seconds=0.5, flops=FLOPS[kind])
    with (
        tempfile.TemporaryDirectory(prefix="elasticd-gpu-") as folder,
        several_processes(kind, folder) as together,
        Cluster(NODES, settings=settings, forward=FORWARD_SECONDS, emulated=kind != "cuda") as cluster,
    ):
        shares = MultiprocessorShares(cluster) if kind == "cuda" else EmulatedShares(cluster)
        print(json.dumps(["service for several processes", together]), flush=True)
        cluster.run(HERE / "_gpu_share_worker.py", **options(shares))
        for figure in Story(cluster, shares, seconds).figures():
            print(json.dumps(figure), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
