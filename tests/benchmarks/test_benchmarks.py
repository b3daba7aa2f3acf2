"""Every benchmark lists its parts, and every part runs at its smallest size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import forkserver

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks"
BENCHMARKS = sorted(path.stem for path in FOLDER.glob("[!_]*.py"))
#: In so many shares the parts of a benchmark run side by side; and the seconds that a part may take.
SHARES, SECONDS = 3, 240
#: Parts that compare with an earlier commit: not in a tree without its history.
OF_HISTORY = {"lines", "step"}


def parts(text: str) -> list[str]:
    """Those that `--help` lists."""
    (line,) = (line for line in text.splitlines() if line.startswith("parts:"))
    return line.removeprefix("parts:").replace(",", " ").split()


def test_every_benchmark_says_what_it_measures_and_lists_its_parts(tmp_path: Path) -> None:
    running = {
        name: forkserver.start(FOLDER / f"{name}.py", "--help", environment=os.environ, output=tmp_path / name)
        for name in BENCHMARKS
    }
    for name, process in running.items():
        assert process.wait(120) == 0, (tmp_path / name).read_text()[-2000:]
        said = (tmp_path / name).read_text()
        assert said.startswith("usage: "), said
        for option in ("--only PART", "--smallest", "--out FILE", "--stale", f"make bench NAME={name}"):
            assert option in said, f"{name}: {option}"
        assert parts(said), name


def test_what_is_no_part_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    script, log = FOLDER / "demo.py", tmp_path / "log"
    process = forkserver.start(script, "--only", "dmeo", environment=os.environ, output=log)
    assert process.wait(120) == 2
    assert "invalid choice: 'dmeo' (choose from 'demo')" in log.read_text().replace("from demo", "from 'demo'")


@pytest.mark.parametrize("path", sorted((FOLDER / "results").glob("*.json")), ids=lambda path: path.stem)
def test_every_part_of_the_results_says_what_it_measures(path: Path) -> None:
    file = json.loads(path.read_text())
    assert sum(part["rows"] for part in file["parts"]) == len(file["rows"]), "each row is of a part"
    for part in file["parts"]:
        assert part["measures"], part["part"]
        missing = [measured for measured in part["measures"] if not (ROOT / measured).exists()]
        assert not missing, f"{part['part']} measures what is no more: {missing}"


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path leaves room for sockets in it, which have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        yield Path(folder)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_part_runs_at_its_smallest_size(name: str, share: int, tmp_path: Path, short: Path) -> None:
    command = [sys.executable, str(FOLDER / f"{name}.py")]
    environment = dict(os.environ, OMP_NUM_THREADS="1", TMPDIR=str(short))
    said = subprocess.run([*command, "--help"], env=environment, capture_output=True, text=True, check=True)
    chosen = parts(said.stdout)[share::SHARES]
    if not (ROOT / ".git").exists():
        chosen = [part for part in chosen if part not in OF_HISTORY]
    if not chosen:
        return
    out = tmp_path / f"{name}.json"
    with (tmp_path / "log").open("w+") as log:
        done = subprocess.run(
            [*command, "--smallest", "--out", str(out), "--only", *chosen],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=SECONDS * len(chosen),
            check=False,
        )
        log.seek(0)
        text = log.read()
    assert done.returncode == 0, text[-4000:]
    file = json.loads(out.read_text())
    assert {part["part"]: part["rows"] > 0 for part in file["parts"]} == dict.fromkeys(chosen, True), text[
        -4000:
    ]
