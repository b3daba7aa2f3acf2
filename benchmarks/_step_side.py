"""One side of a pair: steps of one device on the CPU, by the elasticd of the tree that is named.

    python benchmarks/_step_side.py TREE

Each line on standard input asks for as many steps as it says; the answer is the seconds of one of them.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

TREE = Path(sys.argv[1]).resolve()
sys.path[:0] = [str(TREE / part) for part in ("benchmarks", "", "agent", "planner", "migration")]

import torch  # noqa: E402
from _trained import Text, engine_of, plan_of, stage  # noqa: E402

import elasticd  # noqa: E402
from elasticd.models import DecoderConfig  # noqa: E402

#: Small enough that what the engine itself does shows in a step.
CONFIG = DecoderConfig(vocabulary=256, width=128, layers=4, heads=8, kv_heads=4, hidden=352)
PLAN = plan_of((4, [stage(0, 4, a0=1)]), micro_batch=1)
TOKENS = 64


def main() -> None:
    """Answers until its standard input ends."""
    assert Path(elasticd.__file__).is_relative_to(TREE), elasticd.__file__
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        data = Text.of(CONFIG.vocabulary, TOKENS)
        engine = engine_of(Path(folder), 0, "127.0.0.1", PLAN, CONFIG, data)
        index = 0
        for line in sys.stdin:
            count = int(line)
            start = time.perf_counter()
            for _ in range(count):
                engine.step(index, lambda: 0)
                index += 1
            print(json.dumps((time.perf_counter() - start) / count), flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)
