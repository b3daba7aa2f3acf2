"""A script that gives its job a wrong profile ends with one line that names the file."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from elasticd_planner.problem_files.times import entry_of
from elasticd_planner.profiling.sample_profile import measured_profile

import elasticd
from elasticd.models import Decoder, DecoderConfig, next_token_loss
from tests.planner.measurements import samples

CONFIG = DecoderConfig(vocabulary=16, width=16, layers=3, heads=4, kv_heads=2, hidden=12)


def job(profile: Path) -> elasticd.Job:
    with torch.device("meta"):
        model = Decoder(CONFIG).describe()
    row = torch.arange(8) % 16
    return elasticd.Job(
        model=model,
        loss=next_token_loss,
        optimizer=lambda named: torch.optim.AdamW(named),
        dataset=[{"inputs": row, "targets": row}] * 4,
        global_batch=4,
        parallelism=elasticd.ParallelismOptions(profile=profile),
    )


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As torchrun starts a worker, on a node where no agent listens."""
    for name, value in {"TORCHELASTIC_RUN_ID": "job", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("ELASTICD_SOCKET", str(tmp_path / "none.sock"))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(elasticd.JobStopped, match=r"profile .*/gone.json cannot be read: No such file"):
        job(tmp_path / "gone.json")


def test_a_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(msgspec.json.encode({"model": entry_of(measured_profile(samples()).profile)}))
    with pytest.raises(elasticd.JobStopped, match=r"profile.json: it is of small with 3 layers, and this job"):
        job(path)
