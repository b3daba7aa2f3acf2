"""The twenty findings of the review of what runs inside training processes: which of them still reproduce.

A finding is one or several programs: scripts of `tests/scripts/corpus`, or functions of this file. It
reproduces where one of them trains wrongly, stands still, or ends without the message that the docs have.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _results import Row, row
from elasticd_planner.spec.batch import Sampler
from elasticd_planner.spec.sample_order import order_for
from torch import nn

import elasticd
from tests.scripts import disturbed
from tests.scripts.corpus import ordinary

PACKAGE = "tests.scripts.corpus"
ROOT = Path(__file__).resolve().parent.parent
#: The programs are run by `python THIS_FILE FUNCTION FOLDER`; seconds for one.
PATIENCE_SECONDS = 300


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(ordinary.parameters(named), lr=0.1)


def full_disk(folder: Path) -> bool:
    """9: no checkpoint can be written, and the job ends well all the same."""
    checkpoints = elasticd.CheckpointingOptions(folder=folder, every=100)
    job = elasticd.Job(**ordinary.arguments(ordinary.made(), checkpointing=checkpoints), optimizer=sgd)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 11, resource.RLIM_INFINITY))
    try:
        for _step in job.steps(4):
            pass
    except SystemExit:
        return False
    return not list(folder.glob("step-*"))


class Scaled(ordinary.Block):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(self.norm(x))))


def scalar_master(folder: Path) -> bool:
    """11: the master weight of a parameter without dimensions is rounded on resume, or stops the job."""
    name, before, after = "optimizer.state.blocks.0.scale.master", None, None
    for steps in (4, 5):
        torch.manual_seed(0)
        gpt = ordinary.Network(Scaled)
        job = elasticd.Job(
            **ordinary.arguments(gpt, checkpointing=elasticd.CheckpointingOptions(folder=folder, every=4)),
            optimizer=lambda named: torch.optim.SGD(named, lr=1e-5),
            parallelism=elasticd.ParallelismOptions(precision="bf16"),
        )
        for step in job.steps(steps):
            state = job.state_dict("all") if step.index == steps - 1 else {}
            before, after = (state.get(name), None) if steps == 4 else (before, state.get(name))
    return before is None or after is None or abs(float(before - after)) > 1e-4


def hash_of_samples(folder: Path) -> bool:
    """13: batches that differ have one hash, or equal ones have two."""
    from elasticd.runtime.data.step_samples import _Given

    sampler = Sampler(size=8, global_batch=1, seed=0)

    def same(one: Any, other: Any) -> bool:
        return _Given([one], sampler).hash == _Given([other], sampler).hash

    array, tensor = np.zeros(4096), torch.zeros(4096)
    other, changed = array.copy(), tensor.clone()
    other[2000] = changed[2000] = 7
    pairs = [
        ({"inputs": array}, {"inputs": other}),
        ({"text": {"ids": tensor}}, {"text": {"ids": changed}}),
        ({"t": (torch.tensor([1.00001]),)}, {"t": (torch.tensor([1.00002]),)}),
    ]
    return any(same(one, two) for one, two in pairs) or not same({"i": [array]}, {"i": [array.copy()]})


def check_says_ok(folder: Path) -> bool:
    """15: `elasticd check` finds nothing in scripts that train wrongly."""
    for name in ("lora_by_a_hook", "rows_of_new_tokens", "decay_in_the_loss", "tied_in_a_list"):
        script = folder / f"{name}.py"
        script.write_text(f"from pathlib import Path\nfrom {PACKAGE} import {name}\n{name}.train(Path('/'))\n")
        command = [sys.executable, "-W", "ignore", "-m", "elasticd.runtime.checking", str(script)]
        done = subprocess.run(command, capture_output=True, timeout=PATIENCE_SECONDS, cwd=ROOT, check=False)
        if done.returncode == 0:
            return True
    return False


def sparse_gradients(folder: Path) -> bool:
    """16: sparse gradients are let in, or refused in torch's words."""

    def sparse() -> Any:
        gpt = ordinary.Network()
        gpt.embed.tokens = nn.Embedding(ordinary.VOCABULARY, ordinary.WIDTH, sparse=True)
        return gpt

    try:
        ordinary.trained(**ordinary.arguments(ordinary.made(sparse)), optimizer=sgd)
    except (SystemExit, ValueError) as error:
        return "sparse" not in f"{error} {error.__cause__}"
    return True


def large_dataset(folder: Path) -> bool:
    """17: the order of many samples takes memory or time by their number."""
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    size = 20_000_000
    Sampler(size=size, global_batch=8, seed=0, order=order_for(size)).samples(0)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # KiB
    return grown > 32 << 10 or time.process_time() - began > 0.5


Program = str | Callable[[Path], bool]
#: Scripts of the corpus, and functions of this file.
FINDINGS: dict[int, Sequence[Program]] = {
    1: (
        "lora_by_a_hook",
        "patched_forward",
        "tied_in_a_list",
        "decay_in_the_loss",
        "auxiliary_attribute",
        "freezing_in_the_loop",
        "saving_the_modules",
    ),
    2: ("optimizer_of_the_model", "loss_with_parameters"),
    3: ("bert_mlm",),
    4: ("milestones_of_numpy", "cosine_of_numpy", "schedule_of_an_object"),
    5: ("nanogpt",),
    6: ("checkpointed_dropout",),
    7: ("augmented_images",),
    8: ("rows_of_new_tokens",),
    9: (full_disk,),
    10: ("resumed_with_another_optimizer",),
    11: ("moving_average", scalar_master),
    12: ("collate_that_changes",),
    13: ("own_batches", hash_of_samples),
    14: ("layer_drop",),
    15: (check_says_ok,),
    16: ("embedding_by_frequency", "plateau", "old_weight_norm", sparse_gradients),
    17: (large_dataset,),
    18: ("saving_on_rank_0",),
    19: ("autocast_around_the_loop",),
    20: ("early_stopping",),
}
SMALLEST = (2, 16)


def rows(smallest: bool) -> Iterator[Row]:
    numbers = SMALLEST if smallest else tuple(FINDINGS)
    left: list[str] = []
    for number in numbers:
        programs = [
            each if isinstance(each, str) else each.__name__ for each in FINDINGS[number] if _reproduces(each)
        ]
        print(f"finding {number}: {', '.join(programs) or 'does not reproduce'}", flush=True)
        if programs:
            left.append(f"{number} ({', '.join(programs)})")
    yield row("findings 1 to 20 that still reproduce", len(left), "findings", goal="<= 0", met=not left)
    yield row("findings that still reproduce, with their programs", ", ".join(left) or "none", "")


def _reproduces(program: Program) -> bool:
    if isinstance(program, str):
        return disturbed.judged(program) in (disturbed.WRONG, disturbed.FAILED)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", __file__, program.__name__, folder]
        done = subprocess.run(command, capture_output=True, timeout=PATIENCE_SECONDS, text=True, check=False)
    return not done.stdout.strip().endswith("does not reproduce")


if __name__ == "__main__":
    torch.set_num_threads(1)
    answer = globals()[sys.argv[1]](Path(sys.argv[2]))
    print("reproduces" if answer else "does not reproduce", flush=True)
