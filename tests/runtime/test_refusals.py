"""Refusals: what a script describes and elasticd cannot train ends it with one line, under any launcher."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import nn

import elasticd
from elasticd.runtime.api import watch as watching
from elasticd.runtime.api.connection import refuse_torch_groups
from elasticd.runtime.api.script import CannotRun, recipe_of
from elasticd.runtime.model import module_sections
from elasticd.runtime.model.model import ModelError
from elasticd.system.torchrun_outcome import OUTCOME_VARIABLE, REFUSAL
from elasticd.wire.unix_socket import ROUND_VARIABLE


@pytest.fixture(autouse=True)
def hook() -> Iterator[None]:
    before = sys.excepthook
    yield
    sys.excepthook = before


def refused() -> ModelError:
    """As a script meets it that describes a model with a batch norm."""
    with pytest.raises(ModelError) as caught:
        elasticd.Model(embed=nn.Embedding(4, 4), blocks=[nn.BatchNorm1d(4)], head=nn.Linear(4, 4))
    return caught.value


def test_refusal_that_nobody_catches_is_one_line_with_the_scripts_place(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = refused()
    sys.excepthook(type(error), error, error.__traceback__)
    said = capsys.readouterr().err
    assert re.fullmatch(r"elasticd: .*BatchNorm1d.*\(.*test_refusals.py, line \d+\)\n", said), said
    sys.excepthook(KeyError, KeyError("inputs"), None)
    assert "KeyError: 'inputs'" in capsys.readouterr().err, "any other exception is shown as ever"


def test_refusal_under_elasticd_run_is_left_to_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv(OUTCOME_VARIABLE, str(tmp_path / "outcome.json"))
    error = refused()
    sys.excepthook(type(error), error, error.__traceback__)
    assert capsys.readouterr().err == ""
    assert json.loads((tmp_path / "error.json").read_text())[REFUSAL].startswith(str(error))


@pytest.fixture
def unlaunched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that nobody launched."""
    for name in ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", ROUND_VARIABLE):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("begin", [refuse_torch_groups, elasticd.watch])
def test_torchs_groups_in_a_plain_process_are_refused_with_what_to_leave_out_or_to_start(
    begin: Callable[[], object],
    unlaunched: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After an elasticd.Job, an elasticd.live or an elasticd.watch()."""
    monkeypatch.setattr(watching, "_watch", None)
    begin()
    capsys.readouterr()
    with pytest.raises(ValueError, match="env://") as caught:
        torch.distributed.init_process_group("gloo")
    sys.excepthook(type(caught.value), caught.value, caught.value.__traceback__)
    said = capsys.readouterr().err
    line = r"elasticd: torch.distributed.init_process_group .*test_refusals.py, line \d+\)\n"
    assert re.fullmatch(line, said), said
    assert "leaves that call out" in said
    assert "'elasticd run SCRIPT'" in said


def test_check_of_a_script_that_makes_torchs_group_names_the_remedy(unlaunched: None, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch.distributed as dist\n\ndist.init_process_group('gloo')\n")
    with pytest.raises(CannotRun, match=rf"leaves that call out.*\({script}, line 3\)"):
        recipe_of(str(script), ())


class Whole(nn.Module):
    """One forward, whose ids have a name of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.h, self.lm_head = nn.Embedding(8, 4), nn.ModuleList([nn.Linear(4, 4)]), nn.Linear(4, 8)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.wte(idx)
        for block in self.h:
            hidden = block(hidden)
        out: torch.Tensor = self.lm_head(hidden)
        return out


def test_batch_without_a_key_that_forward_needs_is_refused_by_the_keys_of_both() -> None:
    ids = torch.zeros(2, 3, dtype=torch.long)
    module = Whole()
    called = module_sections._Call(module, None)  # as the embedding's section calls forward for a batch
    assert called(module, {"idx": ids, "targets": ids}).shape == (2, 3, 8)
    for batch in ({"ids": ids, "targets": ids}, {"ids": ids}):
        with pytest.raises(ModelError, match=f"the keys {', '.join(batch)}; Whole.forward takes idx: give"):
            called(module, batch)


def test_every_attribute_of_a_step_has_a_word_in_help_and_in_the_guide() -> None:
    guide = Path(__file__).parents[2].joinpath("docs/training.md").read_text()
    for field in fields(elasticd.Step):
        assert f"    {field.name}: " in (elasticd.Step.__doc__ or "")
        assert f"`step.{field.name}`" in guide
