"""One rank of one side of a pair: steps on the CPU, by the elasticd of the tree that is named.

    python benchmarks/_step_side.py TREE PLAN RANK FOLDER

The ranks of a side share the folder. Each line on standard input asks for as many steps as it says; the answer
is the seconds of one of them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

TREE = Path(sys.argv[1]).resolve()
sys.path[:0] = [str(TREE / part) for part in ("benchmarks", "", "agent", "planner", "migration")]

import torch  # noqa: E402
from _trained import Text, engine_of, plan_of, stage  # noqa: E402
from elasticd_planner.spec.plan import StatePolicy  # noqa: E402

import elasticd  # noqa: E402
from elasticd.models import DecoderConfig  # noqa: E402

#: Small enough that what the engine itself does shows in a step.
CONFIG = DecoderConfig(vocabulary=256, width=128, layers=4, heads=8, kv_heads=4, hidden=352)
PLANS = {
    "alone": plan_of((4, [stage(0, 4, a0=1)]), micro_batch=1),
    # TP, a border of stages of unlike TP width, gradients of unlike slices, and ZeRO.
    "cut": plan_of(
        (2, [stage(0, 2, a0=1, a1=1), stage(2, 4, a2=1)]), (2, [stage(0, 4, a3=1)]), micro_batch=1
    ).replace(state=StatePolicy(zero=1, replicas=1)),
}
TOKENS = 64


def main(name: str, rank: int, folder: Path) -> None:
    """Answers until its standard input ends."""
    assert Path(elasticd.__file__).is_relative_to(TREE), elasticd.__file__
    torch.set_num_threads(1)
    data = Text.of(CONFIG.vocabulary, TOKENS)
    engine = engine_of(folder, rank, "127.0.0.1", PLANS[name], CONFIG, data)
    index = 0
    for line in sys.stdin:
        count = int(line)
        start = time.perf_counter()
        for _ in range(count):
            engine.step(index, lambda: 0)
            index += 1
        print(json.dumps((time.perf_counter() - start) / count), flush=True)


if __name__ == "__main__":
    main(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
    os._exit(0)
