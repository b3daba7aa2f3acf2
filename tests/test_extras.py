"""The command that installs an extra names the folder that this elasticd was installed from."""

from __future__ import annotations

import json
import shlex
from importlib import metadata
from pathlib import Path

import pytest

from elasticd.extras import install

ROOT = Path(__file__).resolve().parents[1]


class Distribution:
    """The record that pip leaves of an installation."""

    def __init__(self, record: str | None) -> None:
        self.record = record

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self.record


def installed(monkeypatch: pytest.MonkeyPatch, record: object) -> None:
    text = None if record is None else json.dumps(record)
    monkeypatch.setattr(metadata, "distribution", lambda name: Distribution(text))


def test_the_clone_of_this_environment_is_named() -> None:
    command = shlex.split(install("daemon"))
    assert command[:2] == ["pip", "install"]
    folder = Path(command[-1].removesuffix("[daemon]"))
    assert (folder / "pyproject.toml").samefile(ROOT / "pyproject.toml")


@pytest.mark.parametrize(("editable", "options"), [(True, ["-e"]), (False, [])])
def test_a_folder_with_a_blank_is_one_word_and_stays_as_it_was_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, editable: bool, options: list[str]
) -> None:
    clone = tmp_path / "my clone"
    clone.mkdir()
    (clone / "pyproject.toml").touch()
    installed(monkeypatch, {"url": clone.as_uri(), "dir_info": {"editable": editable} if editable else {}})
    assert shlex.split(install("train")) == ["pip", "install", *options, f"{clone}[train]"]


@pytest.mark.parametrize(
    "record",
    [
        None,  # from an index
        {"url": "file:///nowhere/at/all", "dir_info": {"editable": True}},  # the clone is gone
        {"url": "file:///tmp/elasticd-1.whl", "archive_info": {}},
        {"url": "https://example.org/elasticd.git", "vcs_info": {"vcs": "git"}},
    ],
)
def test_without_a_clone_the_command_says_where_to_give_it(
    monkeypatch: pytest.MonkeyPatch, record: object
) -> None:
    installed(monkeypatch, record)
    assert install("daemon") == "pip install '.[daemon]' in your clone of elasticd"
