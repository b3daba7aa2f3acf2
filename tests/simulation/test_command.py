"""`elasticd simulate`: what it prints, writes, and says of a scenario that is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from elasticd.cli.app import elasticd
from tests.simulation.scenes import SLOW, SMALL


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("scenario") / "small.toml"
    path.write_text(SMALL + SLOW)
    return str(path)


def call(*options: str) -> Result:
    return CliRunner().invoke(elasticd, ["simulate", *options], catch_exceptions=False)


def test_it_prints_timeline_stretches_and_totals_and_says_that_they_are_simulated(small: str) -> None:
    done = call(small)
    assert done.exit_code == 0
    for words in ("(simulated)", "n0/1 runs 3x slower", "recorded", "seconds a step", "no reaction", "bound"):
        assert words in done.output


def test_for_programs_it_is_one_json_object_and_the_seed_can_be_chosen(small: str) -> None:
    first = json.loads(call(small, "--json").stdout)
    assert first["seed"] == 3
    assert [run["name"] for run in first["totals"]] == [
        "elasticd",
        "no reaction",
        "restart without the slow nodes",
        "bound",
    ]
    assert json.loads(call(small, "--json", "--seed", "9").stdout)["seed"] == 9


@pytest.mark.parametrize(("suffix", "begins"), [("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_it_plots_throughput_over_time(small: str, tmp_path: Path, suffix: str, begins: bytes) -> None:
    path = tmp_path / f"plot.{suffix}"
    assert call(small, "--plot", str(path)).exit_code == 0
    assert path.read_bytes().startswith(begins)
    if suffix == "svg":
        again = tmp_path / "again.svg"
        call(small, "--plot", str(again))
        assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        (["nowhere.toml"], "cannot read the scenario nowhere.toml"),
        (["SMALL", "--plot", "plot.pdf"], "name a file that ends in .svg or .png"),
        (["SMALL", "--plot", "/nowhere/plot.svg"], "cannot plot to /nowhere/plot.svg"),
    ],
)
def test_what_is_wrong_is_one_message(small: str, options: list[str], wrong: str) -> None:
    done = call(*(small if option == "SMALL" else option for option in options))
    assert done.exit_code == 1
    assert wrong in done.output
    assert "Traceback" not in done.output


def test_a_job_that_stopped_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "tight.toml"
    path.write_text(SMALL.replace("736 MiB", "40 MiB"))
    done = call(str(path))
    assert done.exit_code == 1
    assert "the simulated job stopped: there is no plan for this job" in done.output
