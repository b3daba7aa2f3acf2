"""What a daemon remembers: higher each time, whole at every moment, and of use to people when it is wrong."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticd.store.protocol import Identity, KeyValue, StoreReplaced
from elasticd.store.state_file import MOST_MARKS, Mark, Remembered, StateError, StateFile


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
    memory.note(epoch=6)
    assert file(tmp_path / "gone").epoch == 6, "it is written though nothing is new since it failed"
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


def item(key: str, *, created: int, modified: int, changes: int) -> KeyValue:
    return KeyValue(key=key, value=b"", create_revision=created, mod_revision=modified, version=changes)


@given(st.lists(st.sampled_from(["put", "delete", "other"]), min_size=1, max_size=30), st.data())
def test_a_store_that_goes_on_is_never_taken_for_an_old_copy_and_one_that_went_back_is(
    writes: list[str], data: st.DataObject
) -> None:
    """A key is written and deleted, beside others. The daemon saw it at one time. Whatever is written to an old
    copy is refused until it has had as many changes as the daemon saw; a copy in which the key was changed as
    often, and at the very revision that was seen, cannot be told from what was seen."""
    history = [past(writes[:count]) for count in range(len(writes) + 1)]
    seen = data.draw(st.integers(0, len(writes)), "seen at")
    mark = Mark.of(history[seen]) if history[seen] is not None else None
    for later in history[seen:]:
        assert mark is None or later is None or mark.precedes(Mark.of(later))
    copied = data.draw(st.integers(0, seen), "copied at")
    since = data.draw(st.lists(st.sampled_from(["put", "other"]), max_size=30), "written to the copy")
    copy = past([*writes[:copied], *since])
    before = history[copied]
    if mark is None or copy is None or before is None or "delete" in writes[copied:seen]:
        return
    if copied < seen and mark not in (Mark.of(before), Mark.of(copy)) and copy.version <= mark.changes:
        assert not mark.precedes(Mark.of(copy))


def past(writes: list[str]) -> KeyValue | None:
    """The key after these, None where it is not there."""
    found: KeyValue | None = None
    for revision, write in enumerate(writes, start=1):
        if write == "delete":
            found = None
        elif write == "put":
            created = found.create_revision if found is not None else revision
            changes = found.version + 1 if found is not None else 1
            found = item("k", created=created, modified=revision, changes=changes)
    return found


def test_an_old_copy_is_refused_although_its_revision_has_passed_the_one_remembered(tmp_path: Path) -> None:
    memory = file(tmp_path)
    memory.check([item("plan", created=5, modified=40, changes=9)])
    memory.check([item("plan", created=5, modified=40, changes=9)])
    again = file(tmp_path)
    for copy in (
        item("plan", created=5, modified=20, changes=4),  # as it was in the backup
        item("plan", created=5, modified=900, changes=5),  # the leader of the copy wrote since
        item("plan", created=30, modified=900, changes=1),  # or made it, where the backup has none
    ):
        with pytest.raises(StoreReplaced, match="was restored from an old copy"):
            again.check([copy])
    again.check([item("plan", created=5, modified=41, changes=10)])
    again.check([item("plan", created=60, modified=60, changes=1)])  # another job of that name


def test_keys_that_are_remembered_are_bounded(tmp_path: Path) -> None:
    memory = file(tmp_path)
    memory.check(item(f"k{at}", created=at, modified=at, changes=1) for at in range(1, MOST_MARKS + 9))
    kept = msgspec.json.decode(memory.path.read_bytes(), type=Remembered).marks
    assert len(kept) == MOST_MARKS
    assert "k1" not in kept
