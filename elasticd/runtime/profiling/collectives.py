"""One all-reduce of an activation, by width, among gloo processes of this machine.

Each process makes its group as a job's worker does, so that what is timed is what a stage waits for. They are
ended by their id on every path; one whose standard input is closed ends itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec
import torch
from elasticd_planner.profiling.samples import Collective
from elasticd_planner.value import Value
from torch import distributed

from elasticd.codec.decoding import decoder_of
from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.torch_store import TorchStore
from elasticd.runtime.model.model import Model
from elasticd.runtime.profiling.parent_pipe import end_at_eof
from elasticd.wire.profiler import Request

#: Seconds that the processes of one width may take in all.
COLLECTIVES_TIMEOUT_SECONDS = 300.0

_WARM_UP = 5


class CannotMeasure(RuntimeError):
    """A process of the group failed; its last words are in the message."""


class Errand(Value, frozen=True, kw_only=True):
    """The order for one process of a group: all-reduce `counts` elements of `dtype`, `repeats` times each."""

    folder: str
    rank: int
    width: int
    counts: tuple[int, ...]
    dtype: str
    repeats: int


def measure(model: Model, request: Request) -> tuple[Collective, ...]:
    """All-reduces of activations of the request's tokens, for each width of two or more."""
    return tuple(
        collective
        for width in sorted(set(request.widths) - {1})
        for collective in _measure(model, width, request)
    )


def _measure(model: Model, width: int, request: Request) -> list[Collective]:
    counts = tuple(tokens * model.width for tokens in sorted(set(request.tokens)))
    environment = dict(os.environ, OMP_NUM_THREADS=str(request.threads))
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="elasticd-profile-") as folder:
        try:
            for rank in range(width):
                errand = Errand(
                    folder=folder,
                    rank=rank,
                    width=width,
                    counts=counts,
                    dtype=str(model.dtype).removeprefix("torch."),
                    repeats=max(request.repeats, 10),
                )
                with (Path(folder) / f"log-{rank}").open("wb") as log:
                    process = subprocess.Popen(
                        [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stderr=log, env=environment
                    )
                processes.append(process)
                assert process.stdin is not None
                process.stdin.write(msgspec.json.encode(errand) + b"\n")
                process.stdin.flush()
            _until_done(processes, Path(folder))
            times = [msgspec.json.decode((Path(folder) / f"times-{r}").read_bytes()) for r in range(width)]
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
                if process.stdin is not None:
                    process.stdin.close()
    size = model.dtype.itemsize
    # Of the members the one that waited least came last: its time is the collective's own.
    least = [median(map(min, zip(*(member[i] for member in times), strict=True))) for i in range(len(counts))]
    return [
        Collective(width=width, size=count * size, seconds=seconds)
        for count, seconds in zip(counts, least, strict=True)
    ]


def _until_done(processes: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    deadline = time.monotonic() + COLLECTIVES_TIMEOUT_SECONDS
    for rank, process in enumerate(processes):
        try:
            code = process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise CannotMeasure(f"all-reduces took longer than {COLLECTIVES_TIMEOUT_SECONDS:.0f} s") from None
        if code:
            said = (folder / f"log-{rank}").read_text(errors="replace").strip().splitlines()[-1:]
            raise CannotMeasure(f"a process of the all-reduces ended with {code}: {''.join(said)}")


def perform(errand: Errand) -> list[list[float]]:
    """The seconds of each all-reduce as this member saw it, by size."""
    names = [f"n/{rank}" for rank in range(errand.width)]
    files = distributed.FileStore(str(Path(errand.folder) / "store"), errand.width)  # type: ignore[attr-defined]
    store = TorchStore(files)
    plan_groups = PlanGroups("profile", names[errand.rank], "127.0.0.1", store)
    group = plan_groups.group(names, "tensor")
    times = []
    for count in errand.counts:
        tensor = torch.zeros(count, dtype=getattr(torch, errand.dtype))
        seconds = []
        for _ in range(_WARM_UP + errand.repeats):
            start = time.perf_counter()
            group.all_reduce(tensor)
            seconds.append(time.perf_counter() - start)
        times.append(seconds[_WARM_UP:])
    return times


def main() -> None:
    """Performs the errand on standard input, and writes its times into a file of the errand's folder."""
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        errand = decoder_of(Errand).decode(stdin.readline())
    end_at_eof(0)
    times = perform(errand)
    (Path(errand.folder) / f"times-{errand.rank}").write_bytes(msgspec.json.encode(times))
    os._exit(0)  # groups that still stand must not hold it up


if __name__ == "__main__":
    main()
