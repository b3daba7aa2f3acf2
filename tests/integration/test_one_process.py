"""A run that `python train.py` began goes on in a cluster from its checkpoints, and the other way round."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from elasticd.checkpoints.folder import scan
from tests import forkserver
from tests.integration import train
from tests.integration.cluster import Cluster
from tests.integration.test_checkpoints import SCRIPT, TWO_PIPELINES, ledger, options


def alone(folder: Path, job: dict[str, Any], steps: int) -> list[float]:
    """The losses of the steps that one process makes until there are so many in all."""
    folder.mkdir()
    launched = ("TORCHELASTIC_RUN_ID", "LOCAL_RANK", "WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in launched}
    environment |= {
        "ELASTICD_DEVICE": "cpu",
        "OPTIONS": json.dumps({"out": str(folder), "steps": steps, "job": job}),
    }
    process = forkserver.start(SCRIPT, environment=environment, output=folder / "log")
    try:
        assert process.wait(180) == 0, (folder / "log").read_text()
    finally:
        process.kill()
    lines = [json.loads(line) for path in folder.glob("ledger-*") for line in path.read_text().splitlines()]
    return [line["loss"] for line in lines]


@pytest.mark.slow
def test_alone_then_on_three_devices_then_alone_is_one_run(tmp_path: Path) -> None:
    losses, _ = train.reference(15)
    job = options(tmp_path / "checkpoints")
    found = alone(tmp_path / "before", job, 5)
    with Cluster({"a": 2, "b": 1}, plans=TWO_PIPELINES) as cluster:
        cluster.run(SCRIPT, steps=10, job=job)
        codes = cluster.wait()
        assert set(codes.values()) == {0}, {device: cluster.log(device)[-2000:] for device in codes}
        found += [line["loss"] for line in ledger(cluster)]
    found += alone(tmp_path / "after", job, 15)
    assert found == pytest.approx(losses, abs=1e-10)
    assert scan(tmp_path / "checkpoints")[0].step == 15
