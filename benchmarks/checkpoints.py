"""Checkpoints on disk: what a step waits for, what training feels of the writing, and torch's own beside it.

make bench NAME=checkpoints              # 370 MiB in about 2,000 tensors

One process, one rank: values and two moments of AdamW. torch.distributed.checkpoint writes and reads the same
tensors in the same folder, in turns with elasticd. The steps are matrix products that take a fifth of a second.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import hashlib
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from _frame import Part, run
from _results import Row, row
from elasticd_migration.local_state import LocalState, LocalTensor, Shard
from elasticd_planner.layout.layouts import Item, Layouts
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.model import ModelSpec, Parameter
from elasticd_planner.spec.plan import ModulePlan, Pipeline, Plan, Stage, Strategy

from elasticd.checkpoints.folder import damages, look, scan
from elasticd.codec.message import Message
from elasticd.records import JobSpec
from elasticd.runtime.checkpoint.loader import load
from elasticd.runtime.checkpoint.options import CheckpointingOptions
from elasticd.runtime.checkpoint.saver import Saver
from elasticd.wire.worker import Saved

LAYERS, ROUNDS, WIDTH = 74, 7, 208
DEVICE = "n0/0"


def model(layers: int) -> ModelSpec:
    """A decoder's shapes: four square matrices, three wide ones and two norms a layer."""
    square = [Parameter(name=name, shape=(WIDTH, WIDTH), dtype="float32") for name in "qkvo"]
    wide = [Parameter(name=name, shape=(WIDTH, 2 * WIDTH), dtype="float32") for name in ("gate", "up", "down")]
    norms = [Parameter(name=name, shape=(WIDTH,), dtype="float32") for name in ("first", "second")]
    return ModelSpec(
        name="bench", embed=(), kinds=((*square, *wide, *norms),), layers=(0,) * layers, head=(), width=WIDTH
    )


def scene(layers: int) -> tuple[JobSpec, Layouts, LocalState]:
    """A model of so many layers, all of it and its AdamW state on one device."""
    spec = JobSpec(
        job="bench", model=model(layers), global_batch=1, micro_batch=1, samples=1, sample_tokens=1.0, seed=0
    )
    pipeline = Pipeline(stages=(Stage(start=0, stop=layers, devices=(DEVICE,), shares=(1,)),), micro_batches=1)
    plan = Plan(
        number=1,
        strategies=(Strategy(modules=(ModulePlan(module="model", pipelines=(pipeline,)),)),),
        micro_batch=1,
        global_batch=1,
        binding={DEVICE: "bench"},
    )
    layouts = Layouts(spec.model, plan)
    tensors = {}
    for item in layouts.items:
        shape = layouts.layout(item).shape
        names = ("exp_avg", "exp_avg_sq") if item.role == "state" else ("value",)
        shard = Shard(box=Box.whole(shape), planes={name: torch.randn(shape) for name in names})
        scalars = {"step": torch.tensor(1.0)} if item.role == "state" else {}
        tensors[item] = LocalTensor(shards=(shard,), scalars=scalars)
    return spec, layouts, LocalState(tensors=tensors)


def disk_rows(layers: int = LAYERS, rounds: int = ROUNDS) -> Iterator[Row]:
    """Writes and reads the checkpoints that are measured; each layer has about 5 MiB of state."""
    torch.set_num_threads(1)
    spec, layouts, state = scene(layers)
    folder = Path(tempfile.mkdtemp(prefix="elasticd-bench-", dir=os.environ.get("BENCH_FOLDER", ".")))
    try:
        yield from measured(folder, spec, layouts, state, rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Gang:
    """One rank's saver, and a leader that publishes at once."""

    def __init__(self, folder: Path, spec: JobSpec, layouts: Layouts, state: LocalState) -> None:
        self.layouts, self.state, self.step = layouts, state, 0
        self.saver = Saver(CheckpointingOptions(folder=folder, every=2, keep=1), spec, DEVICE, self._publish)

    def _publish(self, message: Message) -> None:
        assert isinstance(message, Saved)
        threading.Thread(target=self.saver.published, args=(message.name,)).start()

    def begin(self) -> float:
        """Starts a checkpoint; the seconds for which it held the caller up."""
        self.step += 2
        start = time.perf_counter()
        self.saver.voted(self.step, [0], self.layouts, lambda: self.state)
        return time.perf_counter() - start

    def settle(self) -> None:
        """Until it has its name; between, what the votes of further steps would do."""
        while word := self.saver.word:
            self.saver.voted(self.step + 1, [word], self.layouts, lambda: self.state)
            time.sleep(0.002)


def measured(folder: Path, spec: JobSpec, layouts: Layouts, state: LocalState, rounds: int) -> list[Row]:
    """Rows of saving and loading `state` by elasticd and by DCP, in turns."""
    ours, theirs = folder / "ours", folder / "theirs"
    gang = Gang(ours, spec, layouts, state)
    tensors = {
        f"{item.role}.{item.name}.{name}": plane
        for item, tensor in state.tensors.items()
        for name, plane in tensor.shards[0].planes.items()
    }
    size = sum(tensor.nbytes for tensor in tensors.values())
    flat, to = torch.empty(size, dtype=torch.uint8).random_(), torch.zeros(size, dtype=torch.uint8)
    first = gang.begin()
    gang.settle()
    copies, memcpys, writes, reads, saves, loads = [], [], [], [], [], []
    for _ in range(rounds):
        memcpys.append(seconds(lambda: to.copy_(flat)))
        os.sync()
        start = time.perf_counter()
        copies.append(gang.begin())
        gang.settle()
        writes.append(time.perf_counter() - start)
        shutil.rmtree(theirs, ignore_errors=True)
        os.sync()
        saves.append(seconds(lambda: dcp.save(dict(tensors), checkpoint_id=theirs, no_dist=True)))
        (found,) = scan(ours)
        reads.append(seconds(lambda path=found.path: read(path, layouts, state)))
        empty = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
        loads.append(seconds(lambda empty=empty: dcp.load(empty, checkpoint_id=theirs, no_dist=True)))
    (found,) = scan(ours)
    assert not damages(found.path)
    on_disk = sum(path.stat().st_size for path in found.path.iterdir())
    mib = size / 2**20
    copy, write = statistics.median(copies), statistics.median(writes)
    times = [mine / whole for mine, whole in zip(copies, memcpys, strict=True)]
    to_save = [torchs / mine for mine, torchs in zip(writes, saves, strict=True)]
    shorter = [torchs / mine for mine, torchs in zip(copies, saves, strict=True)]
    to_load = [torchs / mine for mine, torchs in zip(reads, loads, strict=True)]
    held_up = statistics.median(times)
    return [
        row("state of a rank", mib, "MiB"),
        row("tensors", len(tensors), ""),
        row("a step is held up by", copy * 1e3, "ms", noise=spread(copies)),
        row(
            "the same, in copies of as many bytes at once",
            held_up,
            "x",
            goal="<= 1.5",
            met=held_up <= 1.5,
            noise=spread(times),
        ),
        row("the first, which allocates the buffer", first / statistics.median(memcpys), "x"),
        *steps(gang, rounds),
        row("to disk, synced and published", mib / write, "MiB/s", noise=spread(writes)),
        row("the same, to torch's save", statistics.median(to_save), "x as fast", noise=spread(to_save)),
        row("held up, to torch's save", statistics.median(shorter), "x shorter", noise=spread(shorter)),
        row("read, all checksums tested", mib / statistics.median(reads), "MiB/s", noise=spread(reads)),
        row("the same, to torch's load", statistics.median(to_load), "x as fast", noise=spread(to_load)),
        row("bytes on disk, to the state's", on_disk / size, "x"),
    ]


def steps(gang: Gang, rounds: int) -> list[Row]:
    """A training thread's steps while the writing goes on, beside a thread that only hashes (what the processor
    cannot do at once, no Python), and alone, in turns."""
    matrix, block = torch.randn(512, 512), bytes(1 << 20)

    def step() -> float:
        return seconds(lambda: [matrix @ matrix for _ in range(40)])

    def hashing() -> None:
        while not stop.is_set():
            hashlib.sha256(block).digest()

    alone, hashed, busy = [], [], []
    for _ in range(rounds):
        alone.append(statistics.median(step() for _ in range(6)))
        stop = threading.Event()
        thread = threading.Thread(target=hashing)
        thread.start()
        hashed.append(statistics.median(step() for _ in range(6)))
        stop.set()
        thread.join()
        gang.begin()
        during = []
        while word := gang.saver.word:
            during.append(step())
            gang.saver.voted(gang.step + 1, [word], gang.layouts, lambda: gang.state)
        busy.append(statistics.median(during))
    to_alone = [b / a for b, a in zip(busy, alone, strict=True)]
    to_hashed = [b / h for b, h in zip(busy, hashed, strict=True)]
    return [
        row(
            "a step while it is written, to one alone", statistics.median(to_alone), "x", noise=spread(to_alone)
        ),
        row(
            "the same, to one beside a thread that only hashes",
            statistics.median(to_hashed),
            "x",
            goal="<= 1.1",
            met=statistics.median(to_hashed) <= 1.1,
            noise=spread(to_hashed),
        ),
    ]


def read(path: Path, layouts: Layouts, state: LocalState) -> None:
    """Loads a checkpoint and compares the first tensor with what was saved."""
    manifest = look(path).manifest
    assert manifest is not None
    held = layouts.held(DEVICE)
    found = load(path, manifest, held)
    name = Item(layouts.names[0], "value")
    assert torch.equal(
        found.tensors[name].shards[0].planes["value"], state.tensors[name].shards[0].planes["value"]
    )


def seconds(work: Callable[[], object]) -> float:
    """Seconds that `work` takes by the clock."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def spread(values: Sequence[float]) -> float:
    """Half of the distance between the quartiles, as a part of the median."""
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / 2 / middle


PARTS = {
    "disk": Part(disk_rows, ("elasticd/checkpoints", "elasticd/runtime/checkpoint"), {"layers": 4, "rounds": 2})
}

if __name__ == "__main__":
    sys.exit(run("checkpoints", __doc__, PARTS))
