"""What a daemon remembers: higher each time, whole at every moment, and of use to people when it is wrong."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from elasticd.remembered import Remembered, StateError, StateFile
from elasticd.store.protocol import Identity, StoreReplaced


def file(folder: Path) -> StateFile:
    return StateFile(str(folder), "c", "agent", "n0")


def test_daemon_that_was_started_again_knows_what_it_knew(tmp_path: Path) -> None:
    first = file(tmp_path / "new" / "folder")
    assert (first.identity, first.epoch) == (None, 0)
    first.note(identity=Identity(cluster_id=2**64 - 1, revision=7))
    first.note(epoch=5)
    again = file(tmp_path / "new" / "folder")
    assert (again.identity, again.epoch) == (Identity(cluster_id=2**64 - 1, revision=7), 5)
    assert again.path.name == "c-agent-n0.json"
    beside = [path.name for path in again.path.parent.iterdir()]
    assert beside == ["c-agent-n0.json"], "nothing is left behind"


def test_what_is_lower_is_not_noted(tmp_path: Path) -> None:
    memory = file(tmp_path)
    memory.note(identity=Identity(cluster_id=1, revision=7), epoch=5)
    memory.note(identity=Identity(cluster_id=1, revision=6), epoch=4)
    assert msgspec.json.decode(memory.path.read_bytes(), type=Remembered) == Remembered(
        cluster_id=1, revision=7, epoch=5
    )


def test_other_clusters_roles_and_names_have_files_of_their_own(tmp_path: Path) -> None:
    file(tmp_path).note(epoch=5)
    for other in (("d", "agent", "n0"), ("c", "coordinator", "n0"), ("c", "agent", "n1")):
        assert StateFile(str(tmp_path), *other).epoch == 0


def test_default_folder_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "x"))
    assert StateFile(None, "c", "agent", "n").path == tmp_path / "x" / "elasticd" / "c-agent-n.json"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert StateFile(None, "c", "agent", "n").path.parent == tmp_path / "home/.local/state/elasticd"


def test_disk_that_fails_is_told_of_once_and_the_daemon_remembers_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory = file(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    memory.note(epoch=5)
    memory.note(epoch=6)
    assert memory.epoch == 6
    assert len(caplog.records) == 1
    assert str(memory.path) in caplog.text
    (tmp_path / "gone").mkdir()
    memory.note(epoch=7)
    assert file(tmp_path / "gone").epoch == 7


def test_file_that_cannot_be_used_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "c-agent-n0.json").write_text("{]")
    with pytest.raises(StateError, match=r"c-agent-n0\.json cannot be read .*: delete it"):
        file(tmp_path)
    (tmp_path / "taken").write_text("")
    with pytest.raises(StateError, match="name another as state"):
        file(tmp_path / "taken")


def test_refusal_names_the_file_and_both_remedies(tmp_path: Path) -> None:
    said = file(tmp_path).refusal(StoreReplaced("it is older"))
    assert said.startswith(f"it is older. What this daemon remembers is in {tmp_path}/c-agent-n0.json")
    assert "delete that file, or use another cluster name" in said
