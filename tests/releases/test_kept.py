"""The wheels that are kept are the releases that they are said to be."""

from __future__ import annotations

import subprocess
import zipfile
from email import message_from_bytes
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.releases import build, kept

#: Where the packages of a wheel lie in the repository.
FOLDERS = {"elasticd_agent": "agent", "elasticd_planner": "planner", "elasticd_migration": "migration"}


def here(commit: str) -> bool:
    """Whether this is a clone that has the commit: neither an archive of files nor a shallow clone."""
    looked = subprocess.run(["git", "cat-file", "-e", commit], cwd=build.ROOT, capture_output=True)
    return looked.returncode == 0


def test_a_release_is_kept() -> None:
    assert kept.RELEASED


@pytest.mark.parametrize("version", kept.RELEASED)
def test_the_wheel_of_a_release_is_what_its_commit_holds(version: str, tmp_path: Path) -> None:
    if not here(kept.commit(version)):
        pytest.skip(f"commit {kept.commit(version)} of release {version} is not in this clone")
    build.sources(version, tmp_path)
    for name in ("golden.jsonl", "train.py"):  # they stay as they were released
        kept_file = kept.FOLDER / version / name
        assert kept_file.read_bytes() == (tmp_path / kept_file.relative_to(build.ROOT)).read_bytes(), name
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


@pytest.mark.parametrize("version", kept.RELEASED)
def test_what_a_release_needs_is_installed(version: str) -> None:
    """Beside what we need: the tests run its programs from its wheel in our environment."""
    with zipfile.ZipFile(kept.wheel(version)) as wheel:
        head = message_from_bytes(wheel.read(f"elasticd-{version}.dist-info/METADATA"))
    needed = list(map(Requirement, head.get_all("Requires-Dist", [])))
    assert needed
    for extra in ("", "train", "daemon", "embedded"):
        for one in needed:
            if one.marker is None or one.marker.evaluate({"extra": extra}):
                assert metadata.version(one.name) in one.specifier, f"{one}: see `dev` in pyproject.toml"
