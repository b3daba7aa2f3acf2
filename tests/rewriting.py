"""Test files compiled once for all processes of pytest, before they start.

pytest rewrites the asserts of a test file when it first imports it, and keeps the result beside the file. Its
processes import all files at the same moment: in a fresh clone each would rewrite all of them.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from _pytest.assertion import rewrite
from _pytest.assertion.rewrite import assertstate_key

ROOT = Path(__file__).resolve().parent


def rewrite_all(config: pytest.Config, files: list[Path]) -> None:
    """Rewrites what was not rewritten since it changed, by as many processes as there are cores."""
    stale = [file for file in files if rewrite._read_pyc(file, _kept(file)) is None]
    cores = len(os.sched_getaffinity(0))
    children = []
    for core in range(cores if stale else 0):
        child = os.fork()
        if not child:
            try:
                for file in stale[core::cores]:
                    _rewrite(config, file)
            finally:
                os._exit(0)  # what was not rewritten is when it is imported
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def _rewrite(config: pytest.Config, file: Path) -> None:
    digest, code = rewrite._rewrite_test(file, config)
    kept = _kept(file)
    kept.parent.mkdir(exist_ok=True)
    rewrite._write_pyc(config.stash[assertstate_key], code, digest, kept)


def _kept(file: Path) -> Path:
    return rewrite.get_cache_dir(file) / f"{file.stem}{rewrite.PYC_TAIL}"
