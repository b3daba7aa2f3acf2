"""The local disk: what it promises where several ranks are at the same folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from elasticd.checkpoints.disk import LocalDisk


def test_a_folder_that_others_remove_at_the_same_time_is_gone_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "step"
    folder.mkdir()
    for name in "abcd":
        (folder / name).touch()
    unlink, before = os.unlink, ["a", "c", "d"]

    def raced(path: Any, **options: Any) -> None:
        """Another rank is faster with three of the four files."""
        while before:
            unlink(folder / before.pop())
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", raced)
    LocalDisk().remove_folder(folder)
    assert not folder.exists()
    LocalDisk().remove_folder(folder)
