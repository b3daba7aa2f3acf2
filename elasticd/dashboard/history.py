"""The dashboard's history: what leaders told, in one SQLite file, over leaders and over its own restarts.

One thread writes (`HistoryWriter`), others read (`HistoryReader`), each with a connection of its own: in
SQLite's WAL mode no reader waits for the writer. What is kept: events by their ids, which grow from leader to
leader; steps of the surviving history; plans with their problems; what ranks said in switches; slowdowns of
devices and health of nodes, as they change; and the last view of the cluster, for a start while nobody leads.

The file is bounded by age and size. The oldest rows go first, those of measurements before those of events. A
file that is no history of this release, or is broken, is put aside under another name: what leaders still have
is fetched again.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from elasticd.config.tree import ConfigError
from elasticd.coordinator.events.event_log import EventRecord
from elasticd.coordinator.events.switch_gain import StepRecord
from elasticd.coordinator.live_types import RankNews
from elasticd.records import HistoryRecord, encode
from elasticd.wire.node_health import Health

#: Version of the tables; a file with another one is put aside.
SCHEMA_VERSION = 1
#: The part of the rows that goes at once where the file is too large, and rows of a table that are never left
#: out.
GOES, LEAST = 0.1, 100
#: Points that a chart gets at most.
MOST_POINTS = 4000

_TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID;
CREATE TABLE events (id INTEGER PRIMARY KEY, time REAL, kind TEXT, job TEXT, node TEXT, device TEXT, body BLOB);
CREATE INDEX events_job ON events (job, id);
CREATE INDEX events_kind ON events (kind, id);
CREATE INDEX events_device ON events (device, id) WHERE device != '';
CREATE INDEX events_node ON events (node, id) WHERE node != '';
CREATE TABLE steps (job TEXT, step INTEGER, plan INTEGER, time REAL, seconds REAL, tokens INTEGER, loss REAL,
    predicted REAL, bound REAL, PRIMARY KEY (job, step)) WITHOUT ROWID;
CREATE TABLE plans (job TEXT, number INTEGER, time REAL, head BLOB, body BLOB,
    PRIMARY KEY (job, number)) WITHOUT ROWID;
CREATE TABLE ranks (job TEXT, number INTEGER, device TEXT, what TEXT, time REAL, body BLOB,
    PRIMARY KEY (job, number, device, what)) WITHOUT ROWID;
CREATE TABLE slowdowns (device TEXT, time REAL, step INTEGER, measured REAL, decided REAL, evidence REAL,
    PRIMARY KEY (device, time)) WITHOUT ROWID;
CREATE TABLE health (node TEXT, time REAL, body BLOB, PRIMARY KEY (node, time)) WITHOUT ROWID;
"""
#: What goes first where there is too much, and the column that says how old a row is.
_BOUNDED = ("health", "slowdowns", "ranks", "steps", "events", "plans")

_log = logging.getLogger(__name__)


class StepRow(NamedTuple):
    """A step of a job. predicted, bound: seconds."""

    step: int
    plan: int
    time: float
    seconds: float
    tokens: int | None
    loss: float | None
    predicted: float | None
    bound: float | None


class Sample(NamedTuple):
    """A device's slowdown at a time: measured in a step, and decided; evidence of a change."""

    device: str
    time: float
    step: int
    measured: float | None
    decided: float
    evidence: float | None


class PlanInBrief(msgspec.Struct, frozen=True):
    """A plan in brief."""

    number: int
    reason: str  # why it was proposed
    predicted: float | None  # seconds of a step


def in_brief(record: HistoryRecord) -> PlanInBrief:
    """A plan in brief."""
    predicted = record.plan.prediction
    return PlanInBrief(record.number, record.reason, predicted.step_seconds if predicted is not None else None)


class EventQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which events are asked for; what is empty or None does not matter."""

    job: str = ""
    kinds: tuple[str, ...] = ()
    node: str = ""
    device: str = ""
    since: float | None = None
    until: float | None = None
    before: int | None = None  # ids below this
    id: int | None = None
    limit: int = 100


def _connected(path: str) -> sqlite3.Connection:
    found = sqlite3.connect(path, timeout=10.0, isolation_level=None, check_same_thread=False)
    found.execute("PRAGMA journal_mode = WAL")
    found.execute("PRAGMA synchronous = NORMAL")
    found.execute("PRAGMA busy_timeout = 10000")
    return found


def opened(path: Path) -> HistoryWriter:
    """The history in this file, which is made where it is not there. Raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        lock = path.with_name(f"{path.name}.lock").open("wb")
    except OSError as error:
        raise ConfigError(
            f"the history {path} cannot be written ({error.strerror or error}): set history in section "
            "[dashboard] to a file that this user may write"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise ConfigError(
            f"another dashboard keeps its history in {path}: set history in section [dashboard] to a file of "
            "its own"
        ) from None
    try:
        return HistoryWriter(str(path), lock)
    except _Other as error:
        why = str(error)
    except sqlite3.OperationalError as error:
        lock.close()
        raise ConfigError(
            f"the history {path} cannot be used ({error}): set history in section [dashboard] to another file"
        ) from error
    except sqlite3.DatabaseError as error:
        why = str(error)
    aside = path.with_name(f"{path.name}.{time.strftime('%Y%m%d-%H%M%S')}")
    _log.warning("the history %s is put aside as %s: %s", path, aside.name, why)
    for end in ("", "-wal", "-shm"):
        with_end = Path(f"{path}{end}")
        if with_end.exists():
            os.replace(with_end, f"{aside}{end}")
    path.touch(mode=0o600)
    return HistoryWriter(str(path), lock)


class _Other(Exception):
    """A file with other tables."""


class HistoryWriter:
    """The one writer. Not for several threads at once. What is put between `begin` and `commit` is written
    together."""

    def __init__(self, path: str, lock: IO[bytes] | None = None) -> None:
        """lock: held until the file is closed."""
        self.path, self._lock = path, lock
        self._db = _connected(path)
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        (tables,) = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if not tables:
            self._db.execute("PRAGMA auto_vacuum = INCREMENTAL")
            self._db.execute("VACUUM")
            with self.together():
                for statement in _TABLES.split(";"):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        elif version != SCHEMA_VERSION:
            self._db.close()
            raise _Other(f"its tables are of version {version}, and this elasticd has version {SCHEMA_VERSION}")
        else:
            self._look_through()

    def _look_through(self) -> None:
        """Raises DatabaseError where a page is damaged, so that none is found in the midst of work."""
        try:
            (found,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
            if found != "ok":
                raise sqlite3.DatabaseError(f"it is damaged: {found}")
        except sqlite3.DatabaseError:
            self._db.close()
            raise

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is put inside is written at once, or not at all. May be nested."""
        if self._db.in_transaction:
            yield
            return
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def close(self) -> None:
        """Closes the file."""
        self._db.close()
        if self._lock is not None:
            self._lock.close()

    # -- what is put in ------------------------------------------------------------------------------------

    def put_meta(self, key: str, value: bytes) -> None:
        """A value by its key."""
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def put_event(self, event: EventRecord) -> bool:
        """Whether it is new: an event that comes twice is kept once."""
        node, device = about(event)
        body = msgspec.json.encode((event.text, event.data))
        found = self._db.execute(
            "INSERT OR IGNORE INTO events VALUES (?, ?, ?, ?, ?, ?, ?)",
            (event.id, event.time, event.kind, event.job, node, device, body),
        )
        return found.rowcount == 1

    def put_step(
        self, job: str, step: StepRecord, predicted: float | None = None, bound: float | None = None
    ) -> bool:
        """Whether it is new. It takes the place of a step of this index and of all after it that were reported
        earlier: those were rolled back."""
        row = self._db.execute("SELECT time FROM steps WHERE job = ? AND step = ?", (job, step.step)).fetchone()
        if row is not None and row[0] >= step.time:
            return False
        self._db.execute(
            "DELETE FROM steps WHERE job = ? AND step >= ? AND time < ?", (job, step.step, step.time)
        )
        loss = step.loss if step.loss is None or step.loss == step.loss else None
        values = (job, step.step, step.plan, step.time, step.seconds, step.tokens, loss, predicted, bound)
        self._db.execute("INSERT OR REPLACE INTO steps VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
        return True

    def put_plan(self, job: str, record: HistoryRecord, at: float) -> None:
        """A plan with the problem that it answers."""
        values = (
            job,
            record.number,
            at,
            msgspec.json.encode(in_brief(record)),
            zlib.compress(encode(record), 1),
        )
        self._db.execute("INSERT OR IGNORE INTO plans VALUES (?, ?, ?, ?, ?)", values)

    def put_rank(self, job: str, number: int, rank: RankNews) -> None:
        """What a rank said in a switch."""
        self._db.execute(
            "INSERT OR IGNORE INTO ranks VALUES (?, ?, ?, ?, ?, ?)",
            (job, number, rank.device, rank.what, rank.at, msgspec.json.encode(rank)),
        )

    def put_samples(self, samples: Iterable[Sample]) -> None:
        """Slowdowns of devices."""
        self._db.executemany("INSERT OR REPLACE INTO slowdowns VALUES (?, ?, ?, ?, ?, ?)", samples)

    def put_health(self, node: str, at: float, health: Health) -> None:
        """What a node's agent saw."""
        body = msgspec.json.encode(health)
        self._db.execute("INSERT OR REPLACE INTO health VALUES (?, ?, ?)", (node, at, body))

    # -- what the writer needs to know ---------------------------------------------------------------------

    def meta(self, key: str) -> bytes | None:
        """The value of a key."""
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return row[0] if row is not None else None

    def newest_event(self) -> int:
        """The largest id; 0 where there is none."""
        return int(self._db.execute("SELECT coalesce(max(id), 0) FROM events").fetchone()[0])

    def newest_step(self, job: str) -> int:
        """The largest index; -1 where there is none."""
        return int(
            self._db.execute("SELECT coalesce(max(step), -1) FROM steps WHERE job = ?", (job,)).fetchone()[0]
        )

    def newest_plan(self, job: str) -> int:
        """The largest number; -1 where there is none."""
        found = self._db.execute("SELECT coalesce(max(number), -1) FROM plans WHERE job = ?", (job,))
        return int(found.fetchone()[0])

    # -- bounds --------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Bytes of the pages in use."""
        (pages,) = self._db.execute("PRAGMA page_count").fetchone()
        (free,) = self._db.execute("PRAGMA freelist_count").fetchone()
        (each,) = self._db.execute("PRAGMA page_size").fetchone()
        return int((pages - free) * each)

    def bound(self, oldest: float, most_bytes: int) -> None:
        """Deletes what is older than this time, and then the oldest rows while there are too many bytes."""
        with self.together():
            for table in _BOUNDED:
                if table != "plans":
                    self._db.execute(f"DELETE FROM {table} WHERE time < ?", (oldest,))
        for _ in range(100):
            if self.size <= most_bytes or not any(self._thinned(table) for table in _BOUNDED):
                break
        self._db.execute("PRAGMA incremental_vacuum")
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _thinned(self, table: str) -> bool:
        """Deletes the oldest tenth of a table, if it has more than a few rows."""
        (count,) = self._db.execute(f"SELECT count(*) FROM {table}").fetchone()
        if count <= LEAST:
            return False
        row = self._db.execute(
            f"SELECT time FROM {table} ORDER BY time LIMIT 1 OFFSET ?", (int(count * GOES),)
        ).fetchone()
        with self.together():
            self._db.execute(f"DELETE FROM {table} WHERE time <= ?", row)
        return True


class HistoryReader:
    """Reads the history; not for several threads at once."""

    def __init__(self, path: str) -> None:
        self._db = _connected(path)
        self._db.execute("PRAGMA query_only = ON")

    def close(self) -> None:
        """Closes the file."""
        self._db.close()

    def events(self, asked: EventQuery) -> list[EventRecord]:
        """Events that match, the newest first."""
        where, values = _where(asked)
        rows = self._db.execute(
            f"SELECT id, time, kind, job, body FROM events {where} ORDER BY id DESC LIMIT ?",
            (*values, asked.limit),
        )
        return [_event(row) for row in rows]

    def facets(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], float | None]:
        """Kinds, jobs and nodes of events, and the time of the oldest."""
        kinds, jobs, nodes = (self._values(column) for column in ("kind", "job", "node"))
        (oldest,) = self._db.execute("SELECT min(time) FROM events").fetchone()
        return kinds, jobs, nodes, oldest

    def _values(self, column: str) -> tuple[str, ...]:
        # Skips from value to value by the index: there are few of them, and many rows.
        found: list[str] = []
        last = ""
        where = f"{column} > ? AND {column} != ''"
        while True:
            row = self._db.execute(
                f"SELECT {column} FROM events WHERE {where} ORDER BY {column} LIMIT 1", (last,)
            ).fetchone()
            if row is None or len(found) >= 2000:
                return tuple(found)
            found.append(last := row[0])

    def steps(self, job: str, since: int = -1, most: int = MOST_POINTS) -> tuple[list[StepRow], int]:
        """Steps above an index, oldest first, and n where only every n-th is there."""
        (count,) = self._db.execute(
            "SELECT count(*) FROM steps WHERE job = ? AND step > ?", (job, since)
        ).fetchone()
        every = max(1, -(-count // most))
        rows = self._db.execute(
            "SELECT step, plan, time, seconds, tokens, loss, predicted, bound FROM steps "
            "WHERE job = ? AND step > ? AND step % ? = 0 ORDER BY step",
            (job, since, every),
        )
        return [StepRow(*row) for row in rows], every

    def newest_step(self, job: str) -> StepRow | None:
        """The newest step of a job."""
        row = self._db.execute(
            "SELECT step, plan, time, seconds, tokens, loss, predicted, bound FROM steps "
            "WHERE job = ? ORDER BY step DESC LIMIT 1",
            (job,),
        ).fetchone()
        return StepRow(*row) if row is not None else None

    def steps_of_plan(self, job: str, plan: int, most: int = 2000) -> list[StepRow]:
        """The first steps under a plan."""
        rows = self._db.execute(
            "SELECT step, plan, time, seconds, tokens, loss, predicted, bound FROM steps "
            "WHERE job = ? AND plan = ? ORDER BY step LIMIT ?",
            (job, plan, most),
        )
        return [StepRow(*row) for row in rows]

    def seconds_by_plan(self, job: str) -> dict[int, tuple[int, float]]:
        """By plan: how many steps there are, and the seconds of the median one."""
        found = {}
        counts = self._db.execute("SELECT plan, count(*) FROM steps WHERE job = ? GROUP BY plan", (job,))
        for plan, count in counts.fetchall():
            (middle,) = self._db.execute(
                "SELECT seconds FROM steps WHERE job = ? AND plan = ? ORDER BY seconds LIMIT 1 OFFSET ?",
                (job, plan, count // 2),
            ).fetchone()
            found[plan] = (count, middle)
        return found

    def plan(self, job: str, number: int) -> tuple[HistoryRecord, float] | None:
        """A plan, and when it was heard of."""
        row = self._db.execute(
            "SELECT body, time FROM plans WHERE job = ? AND number = ?", (job, number)
        ).fetchone()
        return (_plan(row[0]), row[1]) if row is not None else None

    def heads(self, job: str) -> list[tuple[PlanInBrief, float]]:
        """All plans of a job in brief, oldest first, and when they were heard of."""
        rows = self._db.execute("SELECT head, time FROM plans WHERE job = ? ORDER BY number", (job,))
        return [(msgspec.json.decode(head, type=PlanInBrief), at) for head, at in rows]

    def plans(self, job: str, most: int) -> list[HistoryRecord]:
        """The last plans of a job, oldest first."""
        rows = self._db.execute(
            "SELECT body FROM plans WHERE job = ? ORDER BY number DESC LIMIT ?", (job, most)
        ).fetchall()
        return [_plan(body) for (body,) in reversed(rows)]

    def numbers(self, job: str) -> tuple[int, ...]:
        """The numbers of the plans that are kept."""
        rows = self._db.execute("SELECT number FROM plans WHERE job = ? ORDER BY number", (job,))
        return tuple(number for (number,) in rows)

    def ranks(self, job: str, number: int) -> list[RankNews]:
        """What ranks said in a switch, in the order of time."""
        rows = self._db.execute(
            "SELECT body FROM ranks WHERE job = ? AND number = ? ORDER BY time", (job, number)
        )
        return [msgspec.json.decode(body, type=RankNews) for (body,) in rows]

    def newest_switch(self, job: str) -> int:
        """The number of the newest switch that a rank said something of; 0: there is none."""
        found = self._db.execute("SELECT coalesce(max(number), 0) FROM ranks WHERE job = ?", (job,))
        return int(found.fetchone()[0])

    def samples(self, device: str, most: int = MOST_POINTS) -> list[Sample]:
        """A device's slowdowns, oldest first."""
        rows = self._db.execute(
            "SELECT * FROM slowdowns WHERE device = ? ORDER BY time DESC LIMIT ?", (device, most)
        ).fetchall()
        return [Sample(*row) for row in reversed(rows)]

    def health(self, node: str, most: int = 500) -> list[tuple[float, Health]]:
        """What a node's agent saw, oldest first."""
        rows = self._db.execute(
            "SELECT time, body FROM health WHERE node = ? ORDER BY time DESC LIMIT ?", (node, most)
        ).fetchall()
        return [(at, msgspec.json.decode(body, type=Health)) for at, body in reversed(rows)]


def about(event: EventRecord) -> tuple[str, str]:
    """The node and the device that an event is about; empty: about none."""
    device, node = event.data.get("device"), event.data.get("node")
    device = device if isinstance(device, str) else ""
    if not isinstance(node, str) or not node:
        node = device.rpartition("/")[0]
    return node, device


def _where(asked: EventQuery) -> tuple[str, Sequence[Any]]:
    given: Mapping[str, Any] = {
        "job = ?": asked.job or None,
        "node = ?": asked.node or None,
        "device = ?": asked.device or None,
        "time >= ?": asked.since,
        "time <= ?": asked.until,
        "id < ?": asked.before,
        "id = ?": asked.id,
    }
    parts = [part for part, value in given.items() if value is not None]
    values = [value for value in given.values() if value is not None]
    if asked.kinds:
        parts.append(f"kind IN ({', '.join('?' * len(asked.kinds))})")
        values += asked.kinds
    return ("WHERE " + " AND ".join(parts) if parts else ""), values


def _event(row: tuple[Any, ...]) -> EventRecord:
    number, at, kind, job, body = row
    text, data = msgspec.json.decode(body)
    return EventRecord(id=number, time=at, kind=kind, job=job, text=text, data=data)


def _plan(body: bytes) -> HistoryRecord:
    return msgspec.json.decode(zlib.decompress(body), type=HistoryRecord)
