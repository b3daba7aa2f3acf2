"""A daemon's memory over its restarts: its etcd, how far that had come, and the highest epoch.

An etcd that is another, or that came back from an old copy, could hold orders that were withdrawn since; a
leader that was replaced could give new ones. A daemon that remembers refuses both. One small JSON file for
each daemon, replaced as a whole, so that a crash leaves the one before or the one after.

An old copy is told from the etcd by its revision, while that is below the one remembered. Where others write a
lot, it passes that in seconds. So the daemon also remembers the plan and the fence of each job by their keys'
counters. A key's revision and version only grow as long as it lives, and one that is made anew has a later
create revision: whatever goes back proves an old copy, however much was written to it since.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
from elasticd_planner.value import StoredValue

from elasticd.codec.decoding import decode_stored
from elasticd.store.protocol import Identity, KeyValue, StoreReplaced

#: Keys that are remembered: the plans and fences of some hundred jobs.
MOST_MARKS = 512
#: Seconds between notes of how far the store has come.
NOTE_SECONDS = 10.0

_log = logging.getLogger(__name__)


class StateError(Exception):
    """The file cannot be used; the message names it and says what to do."""


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """A key of the store as it was seen last: the revisions of its creation and of its last change, and how
    many changes there were."""

    created: int
    modified: int
    changes: int

    @classmethod
    def of(cls, item: KeyValue) -> Mark:
        """The mark of a key as it was read."""
        return cls(created=item.create_revision, modified=item.mod_revision, changes=item.version)

    def precedes(self, later: Mark) -> bool:
        """Returns True if a store that went on from here may hold `later`."""
        if later.created != self.created:
            return later.created > self.modified
        same = (later.modified, later.changes) == (self.modified, self.changes)
        return same or (later.modified > self.modified and later.changes > self.changes)


class Remembered(StoredValue, frozen=True, kw_only=True, tag="daemon-state"):
    """The file's content. Without a `cluster_id` no etcd was met yet. `marks`: by key the plans and fences that
    changed last."""

    cluster_id: int | None = None
    revision: int = 0
    epoch: int = 0
    marks: dict[str, Mark] = msgspec.field(default_factory=dict)
    version: int = 1


def default_folder() -> Path:
    """`$XDG_STATE_HOME/elasticd`, else `~/.local/state/elasticd`. Raises StateError where there is no home, as
    for a user of a container that /etc/passwd does not know."""
    if home := os.environ.get("XDG_STATE_HOME"):
        return Path(home) / "elasticd"
    try:
        return Path.home() / ".local" / "state" / "elasticd"
    except RuntimeError:
        raise StateError(
            "this user has no home folder: set XDG_STATE_HOME to a folder that outlives a restart, or name one "
            "as state in the daemon's section of the configuration"
        ) from None


class StateFile:
    """One daemon's memory. `note` may be called from any thread.

    Raises StateError when it is made: where the file is there and cannot be read, or could not be written.
    """

    def __init__(self, folder: str | None, cluster: str, role: str, name: str) -> None:
        self.path = (Path(folder) if folder else default_folder()) / f"{cluster}-{role}-{name}.json"
        self._lock = threading.Lock()
        self._failed = False
        self._value = self._read()

    @property
    def epoch(self) -> int:
        """The highest epoch noted so far, over all restarts of the daemon; 0 where none was."""
        return self._value.epoch

    @property
    def identity(self) -> Identity | None:
        """The identity that a store is compared with."""
        value = self._value
        if value.cluster_id is None:
            return None
        return Identity(cluster_id=value.cluster_id, revision=value.revision)

    def check(self, items: Iterable[KeyValue]) -> None:
        """Remembers these keys, as they were just read. Raises StoreReplaced where one was seen as it can only
        be later: nothing is remembered then."""
        marks = {item.key: Mark.of(item) for item in items}
        for key, mark in marks.items():
            seen = self._value.marks.get(key)
            if seen is not None and not seen.precedes(mark):
                raise StoreReplaced(
                    f"the key {key} was seen at revision {seen.modified}, after {seen.changes} changes; etcd "
                    f"has it at {mark.modified}, after {mark.changes}, and so was restored from an old copy"
                )
        if marks:
            self.note(marks=marks)

    def note(
        self, *, identity: Identity | None = None, epoch: int = 0, marks: Mapping[str, Mark] | None = None
    ) -> None:
        """Remembers what is higher than before. A disk that fails is told of, once, and tried again with the
        next note: the daemon itself remembers as long as it runs."""
        with self._lock:
            before = self._value
            known = identity or self.identity
            seen = {**before.marks, **(marks or {})}
            newest = sorted(seen, key=lambda key: seen[key].modified)[-MOST_MARKS:]
            self._value = Remembered(
                cluster_id=known.cluster_id if known is not None else None,
                revision=max(before.revision, known.revision if known is not None else 0),
                epoch=max(before.epoch, epoch),
                marks={key: seen[key] for key in newest},
            )
            if self._value == before and not self._failed:
                return
            try:
                self._write(self._value)
            except OSError as error:
                if not self._failed:
                    _log.warning("%s cannot be written, and would be out of date: %s", self.path, error)
                self._failed = True
            else:
                self._failed = False

    def refusal(self, error: StoreReplaced) -> str:
        """The refusal of a store that is not the remembered one, or is older."""
        return (
            f"{error}. What this daemon remembers is in {self.path}: if this etcd is the right one (it was set "
            "up anew, say), delete that file, or use another cluster name (--cluster, or name in section "
            "[cluster] of the configuration). Jobs that run are left alone then, until 'elasticd adopt JOB'"
        )

    def _read(self) -> Remembered:
        folder = self.path.parent
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return decode_stored(self.path.read_bytes(), Remembered)
        except FileNotFoundError:
            return Remembered()
        except msgspec.MsgspecError as error:
            raise StateError(
                f"{self.path} cannot be read ({error}): delete it, if the configured etcd is the right one"
            ) from error
        except OSError as error:
            raise StateError(
                f"cannot keep what this daemon must remember in {self.path} ({error.strerror}): make {folder} "
                "a writable folder, or name another as state in this daemon's section of the configuration"
            ) from error

    def _write(self, value: Remembered) -> None:
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            with beside.open("wb") as file:
                file.write(msgspec.json.encode(value))
                file.flush()
                os.fsync(file.fileno())
            beside.replace(self.path)
        finally:
            beside.unlink(missing_ok=True)
