"""A job that is started again with another optimizer or scheduler is refused, or goes on with the state and the
settings of the checkpoint, and says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.optim import lr_scheduler as schedules

import elasticd
from elasticd.checkpoints import folder as folders
from elasticd.checkpoints.manifest import Manifest
from elasticd.runtime.api.hello import check_optimizer
from elasticd.runtime.api.resumed_optimizer import other_optimizer
from elasticd.runtime.comm.in_memory import MemoryPlanGroups, run_threads
from elasticd.runtime.model.optimizer_check import ScriptOptimizer
from tests.runtime import test_one_process
from tests.runtime.test_engine import engine_on
from tests.runtime.test_one_process import job
from tests.runtime.test_optimizer_groups import PLANS, recipe

BEFORE, AFTER = 1, 2

alone = test_one_process.alone


def adamw(named: Any, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, **{"lr": 1e-3, "weight_decay": 0.1, **settings})


def sgd(named: Any, momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1, momentum=momentum)


def averaging(named: Any) -> torch.optim.Optimizer:
    return elasticd.average(adamw(named), 0.5)


def cosine(made: torch.optim.Optimizer, steps: int = 100) -> schedules.LRScheduler:
    return schedules.CosineAnnealingLR(made, T_max=steps)


def train(folder: Path, steps: int, **changes: Any) -> elasticd.Job:
    trained = job(folder, **{"layers": 1, "optimizer": adamw, "scheduler": None, **changes})
    for _ in trained.steps(steps):
        pass
    return trained


@pytest.fixture
def begun(tmp_path: Path) -> Callable[..., Path]:
    def begin(**changes: Any) -> Path:
        train(tmp_path, BEFORE, **changes)
        return tmp_path

    return begin


def refusal(folder: Path, **changes: Any) -> str:
    with pytest.raises(SystemExit) as end:
        train(folder, AFTER, **changes)
    return str(end.value)


@pytest.mark.parametrize(
    ("first", "then", "why"),
    [
        (sgd, adamw, "its optimizer is SGD, not AdamW"),
        (adamw, sgd, "its optimizer is AdamW, not SGD"),
        (adamw, lambda named: torch.optim.Adam(named), "its optimizer is AdamW, not Adam"),
    ],
)
def test_another_optimizer_is_refused(begun: Callable[..., Path], first: Any, then: Any, why: str) -> None:
    said = refusal(begun(optimizer=first), optimizer=then)
    assert f"is of another training: {why}; name another folder, or train as before" in said


def test_another_scheduler_is_refused(begun: Callable[..., Path]) -> None:
    said = refusal(begun(scheduler=cosine), scheduler=lambda made: schedules.LambdaLR(made, lambda step: 1.0))
    assert "its scheduler is CosineAnnealingLR, not LambdaLR" in said


@pytest.mark.parametrize(
    "scheduler", [None, cosine, lambda made: schedules.OneCycleLR(made, 0.1, total_steps=9)]
)
@pytest.mark.parametrize("optimizer", [adamw, averaging, sgd, partial(sgd, momentum=0.0)])
def test_the_same_script_is_told_nothing(
    begun: Callable[..., Path], capfd: pytest.CaptureFixture[str], optimizer: Any, scheduler: Any
) -> None:
    folder = begun(optimizer=optimizer, scheduler=scheduler)
    capfd.readouterr()
    train(folder, AFTER, optimizer=optimizer, scheduler=scheduler)
    assert "checkpoint" not in capfd.readouterr().err.replace("from checkpoint", "")


def test_changed_settings_are_named_and_those_of_the_checkpoint_go_on(
    begun: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    trained = train(begun(), AFTER, optimizer=partial(adamw, lr=0.5, amsgrad=True))
    assert trained.learning_rate == 1e-3
    assert (
        "settings of the optimizer are those of the checkpoint, as in torch's load_state_dict: "
        "amsgrad False (the script has True), lr 0.001 (the script has 0.5)"
    ) in caplog.text


def test_with_a_scheduler_the_rate_that_it_began_with_is_compared(
    begun: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    train(begun(scheduler=cosine), AFTER, optimizer=partial(adamw, lr=0.5), scheduler=partial(cosine, steps=50))
    assert "lr 0.001 (the script has 0.5)" in caplog.text
    assert "CosineAnnealingLR goes on with the checkpoint's state" in caplog.text
    assert "T_max 100 (the script has 50)" in caplog.text


def test_a_scheduler_that_comes_begins_and_of_one_that_goes_the_rate_stays(
    begun: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = begun()
    train(folder, AFTER, scheduler=cosine)
    assert "has no scheduler's state: CosineAnnealingLR begins at its first step" in caplog.text
    caplog.clear()
    trained = train(folder, AFTER + 1)
    assert "the job no scheduler: the learning rate stays" in caplog.text
    assert 0.9e-3 < trained.learning_rate < 1e-3


def test_a_moving_average_can_come_and_go(begun: Callable[..., Path]) -> None:
    folder = begun()
    planes = []
    for steps, optimizer in ((AFTER, averaging), (AFTER + 1, adamw)):
        train(folder, steps, optimizer=optimizer)
        entries = newest(folder).tensors["state"].values()
        planes.append({plane.name for entry in entries for plane in entry.planes})
    assert planes == [{"average", "exp_avg", "exp_avg_sq"}, {"exp_avg", "exp_avg_sq"}]


def newest(folder: Path) -> Manifest:
    manifest = folders.sound(folders.scan(folder))[0].manifest
    assert manifest is not None
    return manifest


def own(optimizer: Any, scheduler: Any = None) -> ScriptOptimizer:
    job = test_one_process.job(layers=1, optimizer=optimizer, scheduler=scheduler)
    tried = check_optimizer(job._recipe)
    assert tried is not None
    return tried


@pytest.mark.parametrize(
    ("first", "then", "why"),
    [
        (sgd, adamw, "its optimizer keeps momentum_buffer, not exp_avg, exp_avg_sq, step"),
        (adamw, sgd, "its optimizer keeps exp_avg, exp_avg_sq, step, not momentum_buffer"),
        (adamw, adamw, ""),
        (adamw, averaging, ""),
    ],
)
def test_checkpoints_without_the_names_of_classes_are_compared_by_what_they_have(
    begun: Callable[..., Path], first: Any, then: Any, why: str
) -> None:
    manifest = newest(begun(optimizer=first))
    old = msgspec.structs.replace(
        manifest, extras={name: text for name, text in manifest.extras.items() if name != "kinds"}
    )
    assert other_optimizer(own(then), old) == why


class Changed(torch.optim.SGD):
    """One of the script's own, of which a later version keeps something else."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (each for group in self.param_groups for each in group["params"]):
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-0.1)
                self.state[parameter][self.keeps] = torch.zeros_like(parameter)

    keeps = "one"


def test_an_optimizer_that_keeps_something_else_now_is_refused(
    begun: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = begun(optimizer=Changed)
    monkeypatch.setattr(Changed, "keeps", "two")
    assert "it lacks 'two', which the script's Changed keeps" in refusal(folder, optimizer=Changed)


def test_state_of_another_optimizer_is_never_adopted() -> None:
    """Whatever it comes from: a snapshot, say, of a script that was edited."""

    def worker(plan_groups: MemoryPlanGroups) -> Iterator[None]:
        plan = PLANS["one device"]
        engine = engine_on(plan_groups, recipe(adamw), plan)
        engine.step(0, lambda: 0)
        with pytest.raises(ValueError, match="its optimizer is AdamW, not SGD"):
            engine_on(plan_groups, recipe(sgd), plan, engine.state())
        return iter(())

    run_threads(("a/0",), worker)
