"""What a daemon remembers over its restarts: its etcd, how far that had come, and the highest epoch.

An etcd that is another, or that came back from an old copy, could hold orders that were withdrawn since; a
leader that was replaced could give new ones. A daemon that remembers refuses both. One small JSON file for
each daemon, replaced as a whole, so that a crash leaves the one before or the one after.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path

import msgspec
from elasticd_planner.value import StoredValue

from elasticd.decoding import decode_stored
from elasticd.store.protocol import Identity, StoreReplaced

#: Seconds between notes of how far the store has come.
NOTE_SECONDS = 10.0

_log = logging.getLogger(__name__)


class StateError(Exception):
    """The file cannot be used; the message names it and says what to do."""


class Remembered(StoredValue, frozen=True, kw_only=True, tag="daemon-state"):
    """The file's content. Without a `cluster_id` no etcd was met yet."""

    cluster_id: int | None = None
    revision: int = 0
    epoch: int = 0
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
        return self._value.epoch

    @property
    def identity(self) -> Identity | None:
        """What a store is to be held against."""
        value = self._value
        if value.cluster_id is None:
            return None
        return Identity(cluster_id=value.cluster_id, revision=value.revision)

    def note(self, *, identity: Identity | None = None, epoch: int = 0) -> None:
        """Remembers what is higher than before. A disk that fails is told of, once, and nothing else: the
        daemon remembers as long as it runs."""
        with self._lock:
            before = self._value
            known = identity or self.identity
            self._value = Remembered(
                cluster_id=known.cluster_id if known is not None else None,
                revision=max(before.revision, known.revision if known is not None else 0),
                epoch=max(before.epoch, epoch),
            )
            if self._value == before:
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
        """What to say of a store that is not the one remembered, or older."""
        return (
            f"{error}. What this daemon remembers is in {self.path}: if this etcd is the right one (it was set "
            "up anew, say), delete that file, or use another cluster name (--cluster, or name in section "
            "[cluster] of the configuration)"
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
