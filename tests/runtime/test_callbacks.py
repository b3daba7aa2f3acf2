"""Callbacks and metrics: what is told, on whom, how often; and that TensorBoard reads what the example
writes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elasticd.runtime.api.evaluation import Evaluation
from elasticd.runtime.api.job import Callback, Job
from elasticd.runtime.api.metrics import Metrics
from elasticd.runtime.api.step import Step
from elasticd.runtime.api.train_loop import Next
from elasticd.runtime.telemetry.main_thread import shared
from tests.runtime.test_engine import TWO_STAGES

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def step(index: int) -> Step:
    return Step(index=index, loss=1.0 / (index + 1), norm=2.0, tokens=100, samples=(1,), plan=3, applied=True)


def evaluation(weights: str = "value") -> Evaluation:
    means = {"loss": 0.5, "right": 0.75}
    counts = dict.fromkeys(means, 8.0)
    return Evaluation(name="held", step=4, weights=weights, means=means, counts=counts, samples=8, plan=3)


def job(rank: int | None = 0, rate: float | None = 0.1) -> Any:
    return SimpleNamespace(rank=rank, learning_rate=rate)


def test_each_plan_is_told_once_and_every_callback_hears_in_order() -> None:
    heard: list[tuple[str, str, Any]] = []

    class Noted(Callback):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_plan(self, job: Any, plan: Any) -> None:
            heard.append((self.name, "plan", plan.number))

        def on_step(self, job: Any, step: Step) -> None:
            heard.append((self.name, "step", step.index))

    training: Any = SimpleNamespace(
        _loop=SimpleNamespace(index=0, garbage=SimpleNamespace(release=lambda: None)),
        _callbacks=(Noted("a"), Noted("b"), Callback()),
        _where=shared(),
        _announced=None,
        _recipe=SimpleNamespace(model=SimpleNamespace(retire=lambda: None)),
    )
    training._notify = partial(Job._notify, training)
    training._announce = partial(Job._announce, training)

    def running() -> Iterator[Next | Step]:
        for number in (1, 1, 2):
            training.plan = TWO_STAGES.replace(number=number)
            yield Next(0)
        yield step(0)

    assert len(list(Job._with_callbacks(training, running()))) == 4
    assert heard == [(n, "plan", p) for p in (1, 2) for n in "ab"] + [(n, "step", 0) for n in "ab"]


def test_metrics_come_from_the_first_rank_alone_every_so_many_steps() -> None:
    written: list[tuple[int, dict[str, float]]] = []
    metrics = Metrics(lambda at, values: written.append((at, dict(values))), every=2)
    for index in range(4):
        metrics.on_step(job(rank=0 if index < 2 else 1), step(index))
    metrics.on_evaluation(job(rank=1), evaluation())
    ((at, values),) = written
    assert at == 1
    assert {key: values[key] for key in ("loss", "norm", "tokens", "plan", "lr")} == {
        "loss": 0.5,
        "norm": 2.0,
        "tokens": 100.0,
        "plan": 3.0,
        "lr": 0.1,
    }
    assert values["tokens/s"] > 0
    metrics.on_evaluation(job(), evaluation())
    metrics.on_evaluation(job(), evaluation("average"))
    assert written[1:] == [
        (3, {"held/loss": 0.5, "held/right": 0.75}),
        (3, {"held-average/loss": 0.5, "held-average/right": 0.75}),
    ]
    with pytest.raises(ValueError, match="every must be at least 1"):
        Metrics(print, every=0)  # type: ignore[arg-type]


def test_tensorboard_reads_what_the_example_wrote_also_when_the_first_rank_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module("own_loop")
    for name in ("own_loop", "train_gpt2"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    for first in (0, 3):  # each as a process of its own would
        board = example.TensorBoard(tmp_path)
        for index in range(first, first + 3):
            board.on_step(job(), step(index))
        board.on_end(job())
    found: dict[int, float] = {}
    for path in sorted(tmp_path.iterdir()):
        events = accumulator.EventAccumulator(str(path)).Reload()
        found |= {event.step: event.value for event in events.Scalars("loss")}
    assert found == pytest.approx({index: 1.0 / (index + 1) for index in range(6)})
