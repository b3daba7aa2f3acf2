"""A rank of the cluster inside one GPU: trains a decoder on the multiprocessors that it is given."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, Protocol

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import torch  # noqa: E402
from _gpu_sides import BF16, quick  # noqa: E402
from _trained import Text, described  # noqa: E402

import elasticd  # noqa: E402
from elasticd.models import DecoderConfig, next_token_loss  # noqa: E402
from tests.accelerators import shared_gpu  # noqa: E402
from tests.integration.train import Steps  # noqa: E402

#: On the GPU: long enough that a rank's multiprocessors limit it.
ON_A_GPU = DecoderConfig(vocabulary=4096, width=1024, layers=7, heads=16, kv_heads=16, hidden=2816, dtype=BF16)
EMULATED = DecoderConfig(vocabulary=64, width=16, layers=7, heads=2, kv_heads=2, hidden=44)
#: Samples of a step. Ranks with equal shares get equal parts, and those with 1, 1 and 1/3 too.
BATCH = 21
#: Of a sample, by the kind of the device.
TOKENS = {"cuda": 1024, "cpu": 16}
#: Multiprocessors come in groups of so many.
GROUP = 8


def multiprocessors(total: int, ranks: int, share: float) -> int:
    """The multiprocessors of a rank: a share of its equal part, in whole groups."""
    return max(1, round(total / ranks * share / GROUP)) * GROUP


class Share(Protocol):
    """The part of the device that this process computes on."""

    def look(self) -> None:
        """Takes the share that the process was last given. Called between steps, by the thread that trains."""


class EmulatedShare:
    """The emulation paces this process."""

    def look(self) -> None:
        return


class MultiprocessorShare:
    """A share of the GPU's multiprocessors, by a green context. Where torch or the driver has none, kernels run
    beside the training's while the share is less than all."""

    def __init__(self, path: Path, ranks: int) -> None:
        self._path, self._ranks, self._share = path, ranks, 0.0
        self._context: Any = None
        self._beside: KernelsBeside | None = None

    def look(self) -> None:
        share = float(self._path.read_text()) if self._path.exists() else 1.0
        if share == self._share:
            return
        self._share = share
        torch.cuda.synchronize()
        total = torch.cuda.get_device_properties(0).multi_processor_count
        try:
            context = torch.cuda.GreenContext.create(num_sms=multiprocessors(total, self._ranks, share))
            if self._context is not None:
                self._context.pop_context()
            context.set_context()
            self._context = context
        except RuntimeError as error:
            print(f"no green context ({error}): kernels run beside", file=sys.stderr, flush=True)
            if share < 1 and self._beside is None:
                self._beside = KernelsBeside()


class KernelsBeside:
    """Matrix products on a stream of their own, two of them waiting at any time."""

    def __init__(self) -> None:
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        stream = torch.cuda.Stream()
        x = torch.randn(4096, 4096, device="cuda", dtype=BF16)
        events: list[torch.cuda.Event] = []
        with torch.cuda.stream(stream):
            while True:
                torch.mm(x, x)
                event = torch.cuda.Event()
                event.record(stream)
                events.append(event)
                if len(events) > 2:
                    events.pop(0).synchronize()


def main() -> None:
    """Trains until its test says that it is enough, and writes down when each step ended."""
    options = json.loads(os.environ["OPTIONS"])
    out, place = Path(options["out"]), os.environ["LOCAL_RANK"]
    node = Path(os.environ["ELASTICD_SOCKET"]).stem
    share: Share = EmulatedShare()
    if options["cuda"]:
        shared_gpu.take_place(f"{node} {place}")
        share = MultiprocessorShare(out / f"share-{node}:{place}", options["ranks"])
    config = ON_A_GPU if options["cuda"] else EMULATED
    job = elasticd.Job(
        model=described(config, quick),
        loss=next_token_loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
        dataset=Text.of(config.vocabulary, TOKENS["cuda" if options["cuda"] else "cpu"]),
        global_batch=BATCH,
        micro_batch=1,
        clip=1.0,
        checkpointing=elasticd.CheckpointingOptions(snapshot_every=2),
        parallelism=elasticd.ParallelismOptions(device="cuda" if options["cuda"] else "cpu"),
    )
    with (out / f"ledger-{job.device.replace('/', ':')}").open("a") as ledger:
        for step in job.steps(Steps(options["steps"], out)):
            share.look()
            if job.rank == 0:
                line = {"step": step.index, "plan": step.plan, "at": time.time(), "loss": step.loss}
                ledger.write(json.dumps(line) + "\n")
                ledger.flush()


if __name__ == "__main__":
    main()
