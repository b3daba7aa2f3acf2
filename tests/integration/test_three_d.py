"""The example of 3D parallelism: trains like one process of plain torch, and prints the layout of a mesh."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests import sizes
from tests.integration.cluster import ROOT, Cluster

EXAMPLE = ROOT / "examples" / "three_d.py"
SMALL = [
    "--steps",
    "2",
    "--tokens",
    "8",
    "--dropout",
    "0",
    "--width",
    "32",
    "--hidden",
    "32",
    "--global-batch",
    "8",
]
#: By layers the mesh (pp, dp, tp): TP inside a node, a pipeline's stages on two nodes; with eight layers the
#: tutorial's 2 x 2 x 2.
MESHES = {2: (2, 1, 2), 8: (2, 2, 2)}


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    for name in ("three_d", "train_gpt2"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("three_d")


def losses(printed: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", printed)}


@pytest.mark.slow
@pytest.mark.parametrize("layers", sizes.beside([2], MESHES))
def test_it_trains_like_one_process(
    layers: int,
    example: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pp, dp, tp = MESHES[layers]
    given = [str(EXAMPLE), *SMALL, "--layers", str(layers)]
    monkeypatch.setattr(sys, "argv", [*given, "--plain"])
    example.main()
    alone = losses(capsys.readouterr().out)
    given += ["--mesh", str(pp), str(dp), str(tp), "--nodes", "a", "b", "--per-node", str(dp * tp)]
    script = tmp_path / "script.py"
    script.write_text(
        f"import runpy, sys\nsys.path.insert(0, {str(EXAMPLE.parent)!r})\n"
        f"sys.argv = {given!r}\nrunpy.run_path({str(EXAMPLE)!r}, run_name='__main__')\n"
    )
    with Cluster({"a": dp * tp, "b": dp * tp}, forward=1e-5) as cluster:
        cluster.run(script)
        codes = cluster.wait(240)
        assert set(codes.values()) == {0}, {device: cluster.log(device)[-3000:] for device in codes}
        together = losses("".join(cluster.log(device) for device in codes))
        (proposed,) = cluster.events("proposed")
        assert f"given by the job: {dp} pipeline" in proposed["text"]
    assert set(alone) == {0, 1}
    assert together == pytest.approx(alone, abs=2e-4)


def test_a_mesh_is_a_plan_whose_tp_groups_are_rows_of_it(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--mesh", "8", "8", "--layers", "2"])
    example.main()
    printed = capsys.readouterr().out
    assert "n3/5: dp 3, pp 0, tp 5" in printed
    assert printed.count(": dp") == 64
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--mesh", "4", "2", "2", "--layers", "8"])
    example.main()
    assert "n1/3: dp 1, pp 2, tp 1" in capsys.readouterr().out
