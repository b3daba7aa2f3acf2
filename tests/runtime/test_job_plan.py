"""A plan that a script gives its job: what is refused, with one line that says what to change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from elasticd_planner.spec.plan import Plan, StatePolicy

import elasticd
from elasticd.annotations import Annotation, plan_of
from elasticd.models import Decoder, DecoderConfig, next_token_loss
from elasticd.runtime.api.hello import job_spec
from elasticd.runtime.api.script import CannotRun, recipe_of
from elasticd.runtime.checking.__main__ import compared
from elasticd.runtime.engine.recipe import Recipe

CONFIG = DecoderConfig(vocabulary=16, width=16, layers=3, heads=4, kv_heads=2, hidden=12)


def given(layers: int = 3, micro_batches: int = 4, **options: Any) -> Plan:
    config = DecoderConfig(vocabulary=16, width=16, layers=layers, heads=4, kv_heads=2, hidden=12)
    with torch.device("meta"):
        model = Decoder(config).describe()
    two = Annotation(groups=[("n0/0", "n0/1")], states=[{"tp": 2}])
    return plan_of(model, {"*": two}, micro_batches=[micro_batches], **options)


def arguments(**options: Any) -> dict[str, Any]:
    with torch.device("meta"):
        model = Decoder(CONFIG).describe()
    row = torch.arange(8) % 16
    return {
        "model": model,
        "loss": next_token_loss,
        "optimizer": torch.optim.AdamW,
        "dataset": [{"inputs": row, "targets": row}] * 4,
        "global_batch": 4,
        "parallelism": elasticd.ParallelismOptions(**options),
    }


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As torchrun starts a worker, on a node where no agent listens."""
    for name, value in {"TORCHELASTIC_RUN_ID": "job", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("ELASTICD_SOCKET", str(tmp_path / "none.sock"))


def test_the_record_of_the_job_has_it() -> None:
    plan = given()
    made = job_spec(Recipe(**arguments(plan=plan, keep_plan=True)), "job")
    assert (made.plan, made.keep_plan) == (plan, True)
    plain = job_spec(Recipe(**arguments()), "job")
    assert (plain.plan, plain.keep_plan) == (None, False)


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layers": 2}, "the plan has 2 blocks in each pipeline, and the model has 3"),
        ({"micro_batches": 2}, "the plan takes 2 samples a step in micro-batches of 1, and the job takes 4"),
        ({"micro_batches": 2, "micro_batch": 2}, "the plan takes 4 samples a step in micro-batches of 2"),
    ],
)
def test_a_plan_of_another_model_or_batch_ends_the_script(options: dict[str, Any], words: str) -> None:
    with pytest.raises(elasticd.JobStopped, match=words):
        elasticd.Job(**arguments(plan=given(**options)))


def test_check_says_what_is_wrong_with_it_and_checks_a_job_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = given()
    stage = msgspec.structs.replace(plan.pipelines[0].stages[0], recompute=True)
    pipeline = msgspec.structs.replace(plan.pipelines[0], stages=(stage,))
    module = msgspec.structs.replace(plan.modules[0], pipelines=(pipeline,))
    again = plan.replace(strategies=(msgspec.structs.replace(plan.strategies[0], modules=(module,)),))
    job = arguments(plan=again, recompute="plan")
    lines: list[str] = []
    with torch.device("cpu"):
        job["model"] = Decoder(CONFIG).describe()
    assert compared(Recipe(**{**job, "global_batch": 1}), lines.append), lines
    script = tmp_path / "script.py"
    made = "elasticd.Job(**arguments(plan=given(layers=2)))"
    script.write_text(f"from tests.runtime.test_job_plan import *\n{made}\n")
    with pytest.raises(CannotRun, match="the plan has 2 blocks in each pipeline"):
        recipe_of(str(script), [])


def test_options_that_contradict_the_plan_are_refused() -> None:
    replicated = given(state=StatePolicy(zero=1, replicas=2))
    with pytest.raises(ValueError, match=r"zero and replicas say .*zero=0.*: give both the same"):
        elasticd.ParallelismOptions(plan=replicated)
    elasticd.ParallelismOptions(plan=replicated, zero=1, replicas=2)
    elasticd.ParallelismOptions(plan=given(), zero=1)
    with pytest.raises(ValueError, match=r"plan is a dict: make it with elasticd.annotations.plan_of"):
        elasticd.ParallelismOptions(plan={"*": "n0/0"})  # type: ignore[arg-type]


@pytest.mark.parametrize("flag", ["recompute", "sequence_parallel"])
def test_a_plan_asks_for_no_more_than_the_job_allows(flag: str) -> None:
    plan = given()
    stage = msgspec.structs.replace(plan.pipelines[0].stages[0], **{flag: True})
    pipeline = msgspec.structs.replace(plan.pipelines[0], stages=(stage,))
    module = msgspec.structs.replace(plan.modules[0], pipelines=(pipeline,))
    flagged = plan.replace(strategies=(msgspec.structs.replace(plan.strategies[0], modules=(module,)),))
    with pytest.raises(ValueError, match=f'give {flag}="plan", too'):
        elasticd.ParallelismOptions(plan=flagged)
    elasticd.ParallelismOptions(plan=flagged, **{flag: "plan"})
