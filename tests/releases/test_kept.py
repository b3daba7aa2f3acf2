"""The wheels that are kept are the releases that they are said to be."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.releases import build, kept

#: Where the packages of a wheel lie in the repository.
FOLDERS = {"elasticd_agent": "agent", "elasticd_planner": "planner", "elasticd_migration": "migration"}


def test_a_release_is_kept() -> None:
    assert kept.RELEASED


@pytest.mark.parametrize("version", kept.RELEASED)
def test_the_wheel_of_a_release_is_what_its_commit_holds(version: str, tmp_path: Path) -> None:
    try:
        build.sources(version, tmp_path)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(f"commit {kept.commit(version)} of release {version} is not in this clone")
    with zipfile.ZipFile(kept.wheel(version)) as wheel:
        modules = [name for name in wheel.namelist() if name.endswith(".py") and "/examples/" not in name]
        for name in modules:
            source = tmp_path / FOLDERS.get(name.split("/")[0], "") / name
            assert wheel.read(name) == source.read_bytes(), name
    assert {name.split("/")[0] for name in modules} == {"elasticd", *FOLDERS}
    present = [
        path
        for folder in ("elasticd", *(f"{v}/{k}" for k, v in FOLDERS.items()))
        for path in (tmp_path / folder).rglob("*.py")
    ]
    assert len(present) == len(modules), "no module of the commit is lacking"
