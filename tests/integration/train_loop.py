"""The worker of tests of a script's own loop: evaluates, asks for state dicts, gives its own batches."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from elasticd_planner.spec.batch import Sampler
from elasticd_planner.spec.plan import Plan

import elasticd
from elasticd.models import Decoder, next_token_loss
from elasticd.runtime.data.collate import pad
from tests.integration import train

DECAY, EVERY = 0.75, 5


class Text(train.Text):
    """One sample cannot be read, if `torn` names one; and none after the first `left`, if that is given."""

    def __init__(self, torn: int = -1, left: float = math.inf) -> None:
        self.torn, self.left = torn, left

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.left -= 1
        if index == self.torn or self.left < 0:
            raise OSError("the disk is gone")
        return super().__getitem__(index)


class Held(train.Text):
    """A held-out set; this process is killed when it reads `deadly` for the `times`-th time."""

    def __init__(self, deadly: int = -1, times: int = 0) -> None:
        self.deadly, self.left = deadly, times

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == self.deadly:
            self.left -= 1
            if not self.left:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(5000 + index)


class Line:
    """The samples of `train.Text` one after the other, in passes of 50; it writes down what it gives. That of
    the number `torn` cannot be read."""

    def __init__(self, out: Path, torn: int = -1) -> None:
        self._out, self._torn, self.at = out, torn, 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        last = (self.at // 50 + 1) * 50
        while self.at < last:
            number, self.at = self.at, self.at + 1
            if number == self._torn:
                raise OSError("the disk is gone")
            with self._out.open("a") as file:
                file.write(f"{number}\n")
            yield train.Text()[number]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def optimizer(named: Any) -> torch.optim.Optimizer:
    return elasticd.average(train.optimizer(named), DECAY)


def samples(step: int) -> tuple[int, ...]:
    """What a script that draws its own batches takes."""
    return tuple((7 * (step * train.BATCH + i)) % 1000 for i in range(train.BATCH))


class Noted(elasticd.Callback):
    def __init__(self, path: Path) -> None:
        self._path = path

    def _note(self, *what: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(what) + "\n")

    def on_plan(self, job: elasticd.Job, plan: Plan) -> None:
        self._note("plan", plan.number, job.rank, job.pipeline, job.stage, job.is_last_stage)

    def on_step(self, job: elasticd.Job, step: elasticd.Step) -> None:
        self._note("step", step.index)

    def on_evaluation(self, job: elasticd.Job, evaluation: elasticd.Evaluation) -> None:
        self._note("evaluation", evaluation.step, evaluation.weights, evaluation.loss)

    def on_end(self, job: elasticd.Job) -> None:
        self._note("end")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._note("metrics", step, sorted(values))


def taken(job: elasticd.Job, total: int, own: bool) -> Iterator[elasticd.Step]:
    if not own:
        yield from job.steps(total)
        return
    while (index := job.next(total)) is not None:
        step = job.step(samples(index))
        if step is not None:
            yield step


def main() -> None:
    options = json.loads(os.environ["OPTIONS"])
    out = Path(options["out"])
    with torch.device("meta"):
        model = Decoder(train.CONFIG).describe()
    noted = Noted(out / f"noted-{os.getpid()}")
    dataset: Any = Text(options.get("torn", -1), options.get("left", math.inf))
    if options.get("stream"):
        line = Line(out / f"read-{os.getpid()}", options.get("torn", -1))
        dataset = elasticd.Stream(dataset=line, tokens=10)
    job = elasticd.Job(
        model=model,
        loss=next_token_loss,
        optimizer=optimizer,
        dataset=dataset,
        evaluation=elasticd.EvaluationOptions(held_out=Held(*options.get("deadly", ()))),
        global_batch=train.BATCH,
        micro_batch=train.MICRO,
        seed=train.SEED,
        clip=train.CLIP,
        scheduler=train.scheduler,
        callbacks=[noted, elasticd.Metrics(noted.write, every=EVERY)],
        **train.arguments(options.get("job", {})),
    )
    name = job.device.replace("/", ":")
    with (out / f"ledger-{name}").open("w") as ledger:
        for step in taken(job, options["steps"], options.get("own", False)):
            if job.rank == 0 or options.get("stream"):  # there rank 0 is killed
                line = {"step": step.index, "loss": step.loss, "samples": step.samples, "plan": step.plan}
                ledger.write(json.dumps(line) + "\n")
                ledger.flush()
            if (step.index + 1) % EVERY == 0 and not options.get("own"):
                between(job, out, step.index + 1)
    weights = {name: (box.start, box.stop, value) for name, (box, value) in job.parameters().items()}
    if weights:
        torch.save(weights, out / f"weights-{name}")


def between(job: elasticd.Job, out: Path, step: int) -> None:
    for weights in ("average", "value"):
        job.evaluate(weights=weights)
    for contents in ("average", "all"):
        whole = job.state_dict(contents)
        if whole:
            torch.save(whole, out / f"{contents}-{step}")


def in_order(steps: int) -> list[float]:
    """The losses of one process of plain torch on the samples one after the other."""
    plain = train.Plain()
    return [plain.step(range(step * train.BATCH, (step + 1) * train.BATCH)) for step in range(steps)]


def reference(steps: int) -> dict[tuple[int, str], float]:
    """The evaluations of one process of plain torch, by step and weights."""
    sampler = Sampler(size=len(Text()), global_batch=train.BATCH, seed=train.SEED)
    held = pad([Held()[i] for i in range(len(Held()))])
    plain, mean, found = train.Plain(), Decoder(train.CONFIG), {}
    for step in range(steps):
        plain.step(sampler.samples(step))
        with torch.no_grad():
            for kept, parameter in zip(mean.parameters(), plain.model.parameters(), strict=True):
                kept.copy_(parameter if step == 0 else DECAY * kept + (1 - DECAY) * parameter)
            if (step + 1) % EVERY == 0:
                for weights, each in (("value", plain.model), ("average", mean)):
                    loss, targets = next_token_loss(each(held), held)
                    found[step + 1, weights] = float(loss) / targets
    return found


if __name__ == "__main__":
    main()
