"""One rank of four emulated devices: sequences of unequal length, or the same tokens in equal windows.

    python benchmarks/_runtime_lengths.py FOLDER RANK ADDRESS files|windows STEPS

The sequences are files of Python's standard library, a byte a token, none cut or joined; the windows are cut
from all of them in a row, as long as a file is in the mean. A device is paced by the tokens that it gets,
padding included, and files are dealt as for a model of width 4096, whose matrix products outweigh its
attention. Prints one JSON object: seconds and tokens without padding of each step.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import time
from functools import cache
from pathlib import Path

import torch
from _trained import engine_of, plan_of, sampler, stage

from elasticd.models import DecoderConfig
from elasticd.runtime.data.prefetch import Dataset, SamplePrefetcher
from elasticd.runtime.data.step_samples import MapStyleSamples
from elasticd.runtime.telemetry.emulation import SpeedEmulator
from elasticd.wire.worker import EmulatedSpeed

CONFIG = DecoderConfig(vocabulary=256, width=16, layers=2, heads=1, kv_heads=1, hidden=24)
#: Longer files are left out: their real attention would take a part of the time that is emulated.
LONGEST = 2048
#: Seconds of one block for one token.
FORWARD, BACKWARD = 1e-4, 2e-4
#: Matrix products of a block of width 4096, in units of a token's attention to another: see
#: `sample_packing.linear_of`.
LINEAR = 12 * 4096
PLAN = plan_of(
    (16, [stage(0, 1, a0=1), stage(1, 2, a1=1)]),
    (16, [stage(0, 1, b0=1), stage(1, 2, b1=1)]),
    micro_batch=4,
)
WARM = 1


@cache
def files() -> tuple[bytes, ...]:
    """Of two bytes at least: one is an input, the next its target."""
    folder = Path(sysconfig.get_path("stdlib"))
    paths = [p for p in sorted(folder.rglob("*.py")) if not {"site-packages", "dist-packages"} & {*p.parts}]
    return tuple(p.read_bytes() for p in paths if 2 <= p.stat().st_size <= LONGEST)


def _sample(text: bytes) -> dict[str, torch.Tensor]:
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return {"inputs": ids[:-1], "targets": ids[1:]}


class Whole:
    """The files as they are."""

    def __init__(self) -> None:
        self.lengths = [len(text) - 1 for text in files()]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return _sample(files()[index])


class Windows:
    """All of them in a row, cut into equal windows: about as many as there are files."""

    def __init__(self) -> None:
        text = b"".join(files())
        size = round(len(text) / len(files()))
        self._texts = [text[at : at + size] for at in range(0, len(text) - size + 1, size)]
        self.lengths = [size - 1] * len(self._texts)

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return _sample(self._texts[index])


def main(folder: Path, rank: int, address: str, side: str, steps: int) -> dict[str, object]:
    torch.set_num_threads(1)
    data: Whole | Windows = Whole() if side == "files" else Windows()
    dataset: Dataset = data
    pacer = SpeedEmulator(EmulatedSpeed(forward=FORWARD, backward=BACKWARD))
    feed = MapStyleSamples(sampler(PLAN, dataset), SamplePrefetcher(dataset), data.lengths.__getitem__, LINEAR)
    engine = engine_of(folder, rank, address, PLAN, CONFIG, dataset, pacer, feed)
    seconds, tokens = [], []
    for index in range(WARM + steps):
        start = time.perf_counter()
        done = engine.step(index, lambda: 0)
        seconds.append(time.perf_counter() - start)
        tokens.append(sum(data.lengths[i] for i in done.samples))
        if index < WARM:
            pacer.take()
    paced, overruns = pacer.take()
    return {"seconds": seconds[WARM:], "tokens": tokens[WARM:], "paced": paced, "overruns": overruns}


if __name__ == "__main__":
    folder, rank, address, side, steps = sys.argv[1:]
    print(json.dumps(main(Path(folder), int(rank), address, side, int(steps))), flush=True)
    os._exit(0)
