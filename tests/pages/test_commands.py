"""Every command of README and docs that can be run here is run as it is written, and ends well."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sysconfig
import venv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from elasticd.testing.waiting import until
from tests import sizes
from tests.pages.commands import ALONE, OF_A_CLUSTER, ROOT, SCREENS, SLOW, UNTIL_INTERRUPTED, without_comment
from tests.pages.play import clone, environment
from tests.pages.terminals import Terminal

#: What `train.py` of a page is: a script with a job that keeps checkpoints, and does not end by itself.
TRAIN = """
import runpy, sys
sys.path.insert(0, "examples/tutorial")
sys.argv[1:] = ["--steps", "{steps}", "--out", "run-7"]
runpy.run_path("examples/tutorial/train.py", run_name="__main__")
"""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A clone's folder, with the files that pages take for granted."""
    with clone("LICENSE", "examples") as folder:
        mixed = json.loads((ROOT / "examples/problems/mixed.json").read_text())
        (folder / "problem.json").write_text(json.dumps(_smaller(mixed)))
        (folder / "slower.json").write_text(json.dumps(_smaller(mixed, slow=True)))
        (folder / "train.py").write_text(TRAIN.format(steps=4))
        (folder / "other.toml").write_text("[detect]\nslow = 1.3\n")
        yield folder


def _smaller(problem: dict[str, Any], slow: bool = False) -> dict[str, Any]:
    """A problem of one of its nodes, with normal devices or a slow one."""
    nodes = [{**problem["cluster"]["nodes"][0], "devices": 3, "island": 3}]
    model = {**problem["model"], "layers": 6, "units": 8}
    cluster, batch = {**problem["cluster"], "nodes": nodes}, {**problem["batch"], "global_batch": 6}
    rates = {"a0/2": 2.0} if slow else {}
    return {**problem, "cluster": cluster, "model": model, "batch": batch, "rates": rates}


def given(text: str, folder: Path) -> str:
    """A command with what stands in capitals on its page: the folder of a run, and a checkpoint in it."""
    if "FOLDER" in text:
        run = folder / "run-7"
        if not run.exists():
            _ends_well(folder, "python train.py")
        (name,) = [path.name for path in run.iterdir() if path.name.startswith("step-") and path.is_dir()]
        text = text.replace("FOLDER/NAME", f"run-7/{name}").replace("FOLDER", "run-7")
    return text


def _ends_well(folder: Path, command: str, seconds: float = 900.0) -> str:
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**environment(folder)},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, f"$ {command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert "Traceback" not in done.stderr
    return done.stdout


@pytest.mark.parametrize("command", sizes.beside([c for c in ALONE if c not in SLOW], ALONE))
def test_a_command_is_run_in_a_clones_folder(command: str, folder: Path) -> None:
    for file, maker in (("old.json", "problem.json"), ("new.json", "slower.json")):
        if file in command and ">" not in command and not (folder / file).exists():
            _ends_well(folder, f"elasticd plan {maker} --json > {file}")
    _ends_well(folder, given(command, folder))


@pytest.mark.full  # tests/cli/test_up.py and test_top_and_why.py run commands of a cluster
@pytest.mark.slow
def test_commands_of_a_cluster_are_run_beside_a_job_and_after_it(folder: Path) -> None:
    (folder / "train.py").write_text(TRAIN.format(steps=100_000))
    terminals: dict[str, Terminal] = {}
    try:
        for command in OF_A_CLUSTER:
            _run_in_cluster(command, folder, terminals)
    finally:
        for terminal in reversed(terminals.values()):
            terminal.end()


def _run_in_cluster(command: str, folder: Path, terminals: dict[str, Terminal]) -> None:
    """Runs a command as written; one that runs on stays in a terminal of its own."""
    own = environment(folder)
    if command in UNTIL_INTERRUPTED or command.startswith("elasticd run"):
        name = command.split()[1]
        if name == "run" and name in terminals:  # its last job ends first
            until(terminals[name].ended, lambda: terminals[name].lines()[-30:], seconds=600)
            _ends_well(folder, "elasticd forget my-job")  # each page begins with a job of this name
        terminal = terminals.setdefault(name, Terminal(name, folder, own))
        terminal.start(command)
        _wait_until_it_works(name, terminal, folder)
    elif command in SCREENS:
        screen = Terminal("screen", folder, own)
        screen.start(f"script -qec '{command}' /dev/null")
        try:
            until(lambda: "step" in "\n".join(screen.lines()), lambda: screen.lines()[-30:], seconds=120)
            screen.interrupt()
            until(screen.ended, seconds=60)
        finally:
            screen.end()
    else:
        _before(command, folder, terminals)
        _ends_well(folder, command)


def _before(command: str, folder: Path, terminals: Mapping[str, Terminal]) -> None:
    """Brings the cluster into the state of which the page speaks."""
    if command.startswith("elasticd simulate --recorded run.jsonl.gz") and not terminals["record"].ended():
        terminals["record"].interrupt()
        until(terminals["record"].ended, seconds=60)
    if command == "elasticd forget my-job":
        until(terminals["run"].ended, lambda: terminals["run"].lines()[-30:], seconds=300)
    if command == "elasticd stop my-job --now":
        terminals["run"].start("elasticd run --job my-job --devices 2 train.py")  # it was forgotten
        _wait_until_it_works("run", terminals["run"], folder)


def _wait_until_it_works(name: str, terminal: Terminal, folder: Path) -> None:
    """Of a command that runs on: until it does what it is for."""
    lines: Mapping[str, str] = {"up": "Ctrl-C ends all of these", "run": "step 5|loss", "record": ""}

    def works() -> bool:
        assert not terminal.ended(), "\n".join(terminal.lines()[-40:])
        if name == "record":
            return (folder / "run.jsonl.gz").exists()
        return re.search(lines[name], "\n".join(terminal.lines())) is not None

    until(works, lambda: (name, terminal.lines()[-30:]), seconds=300)


@pytest.mark.full
@pytest.mark.slow
def test_a_clone_is_installed_as_readme_says(tmp_path: Path) -> None:
    """In a new environment, which sees the packages of this one: pip builds elasticd there."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("this is no clone")
    readme = (ROOT / "README.md").read_text()
    (cloned,) = re.findall(r"^    (git clone <this repository>.*)$", readme, re.MULTILINE)
    (installed,) = [without_comment(c) for c in re.findall(r"^    (pip install .*)$", readme, re.MULTILINE)]
    place = tmp_path / "venv"
    venv.create(place, with_pip=True)
    ours = Path(sysconfig.get_paths()["purelib"])
    theirs = next(place.glob("lib/python*/site-packages"))
    (theirs / "ours.pth").write_text(f"{ours}\n")
    own = environment(tmp_path, place / "bin")
    (tmp_path / ".user").mkdir()

    def run(command: str, at: Path) -> str:
        done = subprocess.run(
            ["bash", "-c", command], cwd=at, env=own, capture_output=True, text=True, timeout=900, check=False
        )
        if "No matching distribution found for hatchling" in done.stderr:
            pytest.skip("no package index can be reached, from which pip takes what builds elasticd")
        assert done.returncode == 0, f"$ {command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    run(cloned.replace("<this repository>", f"file://{ROOT}"), tmp_path)
    clone_folder = tmp_path / "elasticd"
    run(installed, clone_folder)
    where = "import elasticd, elasticd_agent; print(elasticd.__file__); print(elasticd_agent.__file__)"
    assert all(
        line.startswith(str(clone_folder)) for line in run(f"python -c '{where}'", tmp_path).splitlines()
    )
    assert run("elasticd --version", tmp_path)
    named = run("python -c 'from elasticd.extras import install; print(install(\"daemon\"))'", tmp_path).strip()
    assert f"-e {clone_folder}" in named or f"-e '{clone_folder}" in named
    run(named, tmp_path)
    run("pip install '.[daemon]'", clone_folder)
    assert "site-packages" in run("python -c 'import elasticd; print(elasticd.__file__)'", tmp_path)
