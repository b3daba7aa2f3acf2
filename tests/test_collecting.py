"""Processes of pytest-xdist are forked from one that has imported the test files, each once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import schedule

#: Deals tests as `make test` does, from processes that have no fork server in reserve.
CONFTEST = """
from tests import collected, schedule

def pytest_sessionstart(session):
    if session.config.getoption("numprocesses", None) and not hasattr(session.config, "workerinput"):
        arguments = [str(argument) for argument in session.config.invocation_params.args]
        session.config.add_cleanup(collected.Collected(arguments, 0).close)

def pytest_xdist_make_scheduler(config, log): return schedule.LongestFirst(config, log)
"""
IMPORTED = "import os\nopen({file!r}, 'a').write('imported ')\n{more}\n"


def ran(folder: Path, more: str) -> tuple[str, int]:
    """The last line of two processes that run tests, one of which ends its process; and how often the first
    file was imported. `more`: in the second file."""
    file = str(folder / "imported")
    passes = "def test_passes(): import sys; assert 'tests.collecting' in sys.modules"
    dies = "def test_dies(): os._exit(3)"
    (folder / "test_one.py").write_text(IMPORTED.format(file=file, more=f"{dies}\n{passes}"))
    (folder / "test_two.py").write_text(IMPORTED.format(file=os.devnull, more=f"{more}\n{passes}"))
    (folder / "conftest.py").write_text(CONFTEST)
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", folder, folder]
    command += ["-p", "xdist", "-n", "2", "--dist", "loadscope", "--no-loadscope-reorder"]
    command += ["--import-mode", "importlib", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": str(schedule.ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.stdout, done.stderr
    return done.stdout.splitlines()[-1], Path(file).read_text().count("imported")


def test_files_are_imported_once_for_all_processes_and_for_that_which_takes_a_dead_ones_place(
    tmp_path: Path,
) -> None:
    last, imports = ran(tmp_path, "")
    assert ("1 failed, 2 passed" in last, imports) == (True, 1), last


def test_a_file_that_cannot_be_imported_is_an_error_of_processes_that_are_started_as_ever(
    tmp_path: Path,
) -> None:
    last, imports = ran(tmp_path, "raise ValueError('half a file')")
    assert " errors in " in last
    assert imports > 1


def test_process_of_this_session_was_forked() -> None:
    """Started as ever, it would be slower, and nobody would see it."""
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) < 2 or os.environ.get("OMP_NUM_THREADS") != "1":
        pytest.skip("processes are forked where there are several, and torch has one thread")
    assert "tests.collecting" in sys.modules
