"""Real sessions of pytest: which seed their processes have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forkserver import ROOT

CONFTEST = """
from tests import seeds
def pytest_addoption(parser, pluginmanager):
    parser.addoption("--full", action="store_true")
    pluginmanager.register(seeds)
def pytest_report_header(config):
    return f"main {config.option.seed}"
"""
TEST = """
def test(request):
    print("other", request.config.option.seed, request.config.option.hypothesis_seed)
"""


def printed(folder: Path, *options: str) -> dict[str, list[str]]:
    """The seeds of the session's own process and of another one."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_one.py").write_text(TEST)
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", folder, folder, "-rP", "--full"]
    command += ["-p", "xdist", "-p", "_hypothesis_pytestplugin", "-n", "1", *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    words = [line.split() for line in ran.stdout.splitlines() if line.startswith(("main ", "other "))]
    return {name: seeds for name, *seeds in words}


def test_all_processes_of_a_session_have_the_seed_that_it_prints(tmp_path: Path) -> None:
    found = printed(tmp_path)
    assert found["other"] == found["main"] * 2


@pytest.mark.full
def test_a_seed_that_is_given_is_that_of_all(tmp_path: Path) -> None:
    assert printed(tmp_path, "--seed", "7") == {"main": ["7"], "other": ["7", "7"]}
