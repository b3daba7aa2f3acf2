"""On what the demo's workers compute."""

from __future__ import annotations

import pytest

from elasticd.demo import cluster
from elasticd.demo.cluster import gpus_of
from elasticd.demo.scenario import DemoError
from elasticd.system.torch_build import TorchBuild

NODES = ("alpha", "beta")


def build(*devices: str, on: str, refusal: str = "") -> TorchBuild:
    return TorchBuild(version="3", devices=devices, distributed=True, computes_on=on, refusal=refusal)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (build("H100", on="cuda"), {"alpha": "cuda:0", "beta": "cuda:0"}),
        (build("H100", "H100", "H100", on="cuda"), {"alpha": "cuda:0", "beta": "cuda:1"}),
        (build(on="cpu"), {}),
    ],
)
def test_each_node_has_a_gpu_if_there_are_as_many(
    found: TorchBuild, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "driver_is_there", lambda: True)
    monkeypatch.setattr(cluster, "torch_build", lambda: found)
    assert gpus_of(NODES) == expected


def test_a_torch_that_would_leave_gpus_out_is_refused_and_without_a_driver_nobody_asks_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster, "torch_build", lambda: build(on="", refusal="install a build for the GPU"))
    monkeypatch.setattr(cluster, "driver_is_there", lambda: True)
    with pytest.raises(DemoError, match="install a build for the GPU"):
        gpus_of(NODES)
    monkeypatch.setattr(cluster, "driver_is_there", lambda: False)
    assert gpus_of(NODES) == {}
