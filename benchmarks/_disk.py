"""The way by disk that a move is compared with: save and load through torch.distributed.checkpoint.

    python benchmarks/_disk.py save FOLDER | load FOLDER | worker FOLDER

`save` and `load` print their seconds, imports left out; `worker` is what torchrun restarts: it loads and ends.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from _mover import PLANES, element
from _scenes import SCENES, SPEC
from elasticd_planner.layout.layouts import Layouts


def tensors(*, empty: bool) -> dict[str, torch.Tensor]:
    """The whole state, as a rank holds it that has all of the model."""
    layouts = Layouts(SPEC, SCENES["join"][0])
    return {
        f"{item.role}/{item.name}/{plane}": torch.empty(box.shape) if empty else element(item, plane, box)
        for item, boxes in layouts.held("n0/0").items()
        for box in boxes
        for plane in PLANES[item.role]
    }


def main(what: str, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # that no process group is there is meant so
    state = tensors(empty=what != "save")
    start = time.perf_counter()
    if what == "save":
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    else:
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)
    if what == "worker":
        (Path(folder).parent / f"loaded-{os.environ['RANK']}").write_text("")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
