"""A real etcd, coordinator and agent for the command line's tests, and a way to call its commands."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from click.testing import CliRunner, Result

from elasticd.cli.app import elasticd
from tests import forkserver
from tests.forkserver import Forked

DEADLINE = 120.0


def call(*arguments: str) -> Result:
    """One command in this process, with nothing of the caller's environment."""
    runner = CliRunner(env={"ELASTICD_CONFIG": None, "ELASTICD_SOCKET": None})
    return runner.invoke(elasticd, arguments, prog_name="elasticd")


def refused(*arguments: str) -> str:
    """What a command says that ends with one message and no traceback."""
    done = call(*arguments)
    assert done.exit_code in (1, 2), done.output
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.output.count("Error: ") == 1
    assert "Traceback" not in done.output
    return done.output


class Ended(NamedTuple):
    """The exit code of a command, and what it said on both its outputs."""

    exit_code: int
    output: str


def forked(log: Path, *arguments: str) -> Ended:
    """One command in a process of its own, which forks those that carry torch."""
    log.unlink(missing_ok=True)
    process = forkserver.start("elasticd.__main__", *arguments, environment=_environment(), output=log)
    try:
        return Ended(process.wait(DEADLINE * 3), log.read_text())
    finally:
        process.kill()
        process.wait()


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ELASTICD_")}
    return {**kept, "PYTHONPATH": str(forkserver.ROOT)}


@contextmanager
def daemon(module: str, *arguments: str, log: Path) -> Iterator[Forked]:
    """A process of ours, ended on the way out."""
    process = forkserver.start(f"{module}.__main__", *arguments, environment=_environment(), output=log)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def until_answered(*arguments: str, wanted: str) -> Result:
    """The first call whose output has `wanted`; fails when none comes in time."""
    deadline = time.monotonic() + DEADLINE
    while wanted not in (done := call(*arguments)).output:
        assert time.monotonic() < deadline, done.output
        time.sleep(0.1)
    return done
