"""The worker of the integration tests of models of two modules: leaves a ledger and weights, as `train.py`.

`model` of its options: "by hand" or "vlm", which is examples/train_vlm.py.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import elasticd
from elasticd.models.decoder import next_token_loss
from elasticd.runtime.engine.engine import Engine
from elasticd.runtime.engine.item_border import ItemBorder
from elasticd.runtime.engine.module_engine import ModuleEngine
from elasticd.runtime.engine.pipeline_stage import StageRunner
from elasticd.runtime.engine.vote import StepVote
from tests.integration.train import Steps, arguments, die_at, optimizer
from tests.runtime.image_model import BATCH, SEED, Captions, language_sections, model_of, vision_sections


def by_hand(options: dict[str, Any]) -> elasticd.Job:
    torch.manual_seed(0)
    return elasticd.Job(
        model=model_of(vision_sections(), language_sections()),
        loss=next_token_loss,
        optimizer=optimizer,
        dataset=Captions(),
        global_batch=BATCH,
        seed=SEED,
        **arguments(options.get("job", {})),
    )


def of_the_example() -> elasticd.Job:
    """Of examples/train_vlm.py, in double precision."""
    from examples import train_vlm

    return train_vlm.make_job(
        train_vlm.parser().parse_args(["--dtype=float64", f"--batch={BATCH}", "--snapshot-every=2"])
    )


def die_in(phase: str, order: Path) -> None:
    """Lets this process, which encodes, be killed in a phase of a step, once the file `order` is there."""

    def deadly(owner: type, name: str, when: Callable[..., bool] = lambda *_: True) -> None:
        method = getattr(owner, name)

        def dies(self: Any, *args: Any, **named: Any) -> Any:
            if when(*args) and order.exists():
                os.kill(os.getpid(), signal.SIGKILL)
            return method(self, *args, **named)

        setattr(owner, name, dies)

    def passes(kind: str) -> Callable[..., bool]:
        return lambda act, *_: act.what == "pass" and act.kind == kind

    match phase:
        case "forward" | "backward":
            deadly(StageRunner, "carry_out", passes(phase))
        case "border":  # the language model waits for its rows
            deadly(ItemBorder, "send")
        case "language":  # which has the rows, and whose gradients are waited for
            deadly(ItemBorder, "gradient")
        case "sums":
            deadly(ModuleEngine, "reduce")
        case "vote":
            deadly(StepVote, "vote")
        case "update":  # the vote is over, and others may have made the update
            deadly(Engine, "apply")
        case _:
            die_at(phase)


def main() -> None:
    options = json.loads(os.environ["OPTIONS"])
    out = Path(options["out"])
    if "die_in" in options:
        die_in(options["die_in"], out / "die")
    job = of_the_example() if options.get("model") == "vlm" else by_hand(options)
    with (out / f"ledger-{job.device.replace('/', ':')}").open("w") as ledger:
        for step in job.steps(Steps(options["steps"], out)):
            line = {"step": step.index, "loss": step.loss, "plan": step.plan, "time": time.monotonic()}
            ledger.write(json.dumps(line) + "\n")
            ledger.flush()
    weights = {name: (box.start, box.stop, value) for name, (box, value) in job.parameters().items()}
    if weights:
        torch.save(weights, out / f"weights-{job.device.replace('/', ':')}")


if __name__ == "__main__":
    main()
