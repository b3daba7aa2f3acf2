"""What the torch of an environment computes on is asked of another process, which may say anything."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from elasticd.system import torch_build
from elasticd.system.torch_build import CannotTell, TorchBuild


def test_the_torch_of_this_environment_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTICD_DEVICE", "cpu")
    found = torch_build.torch_build()
    assert found.version.split("+")[0] == "2.13.0"
    assert found.distributed
    assert (found.computes_on, found.refusal) == ("cpu", "")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("print('a word'); print('torch-build {}'); print('bye')", "missing"),
        ("pass", "it says nothing"),
        ("import sys; sys.exit('no torch here')", "no torch here"),
        ("import sys; sys.stdout.buffer.write(bytes([255])); sys.exit(1)", "it says nothing"),
        ("import time; time.sleep(60)", "did not answer within 1 s"),
    ],
)
def test_whatever_it_says_there_is_one_kind_of_error(
    said: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!{sys.executable}\n{said}\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(torch_build, "TORCH_IMPORT_TIMEOUT_SECONDS", 1.0 if "sleep" in said else 120.0)
    with pytest.raises(CannotTell, match=expected):
        torch_build.torch_build()


def test_its_answer_is_found_among_other_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    answer = '{"version": "3", "devices": ["H100"], "distributed": true, "computes_on": "cuda"}'
    program.write_text(
        f"#!{sys.executable}\nprint('hello')\nprint('torch-build ' + {answer!r})\nprint('bye')\n"
    )
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    assert torch_build.torch_build() == TorchBuild(
        version="3", devices=("H100",), distributed=True, computes_on="cuda"
    )
