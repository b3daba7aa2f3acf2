"""The dashboard's history: what leaders told, in one SQLite file, over leaders and over its own restarts.

One thread writes (`HistoryWriter`), others read (`HistoryReader`), each with a connection of its own: in
SQLite's WAL mode no reader waits for the writer. What is kept: events by their ids, which grow from leader to
leader; steps of the surviving history; plans with their problems; what ranks said in switches; slowdowns of
devices and health of nodes, as they change; and the last view of the cluster, for a start while nobody leads.

A job's name may be used again once the job is forgotten: steps, plans and what ranks said belong to a run of
the job, and pages show the newest one.

The file is bounded by age and size. Each table has a share of the size: where there is too much, the oldest
rows of those that have more than theirs go. A file that is no history of this release, or is broken, is put
aside under another name: what leaders still have is fetched again.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import sqlite3
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar, cast

import msgspec

from elasticd.codec.decoding import decoded_as, shown, skip
from elasticd.config.tree import ConfigError
from elasticd.records import AnyHistoryRecord, HistoryRecord, encode
from elasticd.wire.event_record import EventRecord
from elasticd.wire.live_types import RankNews
from elasticd.wire.node_health import Health
from elasticd.wire.step_record import StepRecord

T = TypeVar("T")

#: Version of the tables; a file with another one is put aside, but for those of `_UPGRADES`.
SCHEMA_VERSION = 3
#: Rows that go at once, and plans, which are large; pages of the file that are given back at once.
BATCH, BATCH_PLANS, BATCH_PAGES = 1000, 32, 256
#: Plans that a reader remembers: one of 8,000 devices takes long to decode.
MOST_DECODED = 8
#: Plans of a run that are kept, whatever their age and size.
MOST_PLANS = 512
#: Points that a chart gets at most.
MOST_POINTS = 4000

_TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID;
CREATE TABLE runs (run INTEGER PRIMARY KEY AUTOINCREMENT, job TEXT, after INTEGER, open INTEGER);
CREATE INDEX runs_job ON runs (job, run);
CREATE TABLE events (id INTEGER PRIMARY KEY, time REAL, kind TEXT, job TEXT, node TEXT, device TEXT, body BLOB);
CREATE INDEX events_job ON events (job, id);
CREATE INDEX events_kind ON events (kind, id);
CREATE INDEX events_device ON events (device, id) WHERE device != '';
CREATE INDEX events_node ON events (node, id) WHERE node != '';
CREATE INDEX events_time ON events (time);
CREATE TABLE steps (run INTEGER, step INTEGER, plan INTEGER, time REAL, seconds REAL, tokens INTEGER, loss REAL,
    predicted REAL, bound REAL, ended_at REAL, clock TEXT, PRIMARY KEY (run, step)) WITHOUT ROWID;
CREATE INDEX steps_plan ON steps (run, plan, seconds);
CREATE INDEX steps_time ON steps (time);
CREATE TABLE plans (run INTEGER, number INTEGER, time REAL, head BLOB, body BLOB,
    PRIMARY KEY (run, number));
CREATE INDEX plans_time ON plans (time);
CREATE TABLE ranks (run INTEGER, number INTEGER, device TEXT, what TEXT, time REAL, body BLOB,
    PRIMARY KEY (run, number, device, what)) WITHOUT ROWID;
CREATE INDEX ranks_time ON ranks (time);
CREATE TABLE slowdowns (device TEXT, time REAL, step INTEGER, measured REAL, decided REAL, evidence REAL,
    PRIMARY KEY (device, time)) WITHOUT ROWID;
CREATE INDEX slowdowns_time ON slowdowns (time);
CREATE TABLE health (node TEXT, time REAL, body BLOB, PRIMARY KEY (node, time)) WITHOUT ROWID;
CREATE INDEX health_time ON health (time);
"""


#: By the version of a file: what makes the tables of the next version of it.
_UPGRADES: Mapping[int, tuple[str, ...]] = {
    2: (
        "ALTER TABLE steps ADD COLUMN ended_at REAL DEFAULT 0.0",
        "ALTER TABLE steps ADD COLUMN clock TEXT DEFAULT ''",
    ),
}


class _Share(NamedTuple):
    """A table's share of the file, as a fraction, and the bytes of a row, as an expression."""

    part: float
    row: str


#: By table; what goes first comes first. A row's bytes are of a row with its places in the indexes.
_BOUNDED: Mapping[str, _Share] = {
    "health": _Share(0.05, "60 + length(body)"),
    "slowdowns": _Share(0.15, "90"),
    "ranks": _Share(0.05, "90 + length(body)"),
    "steps": _Share(0.25, "130"),
    "events": _Share(0.3, "110 + length(body)"),
    "plans": _Share(0.2, "60 + length(head) + length(body)"),
}
#: Rows by which the bytes of a table's rows are estimated.
_SAMPLED = 500

#: The columns of a `StepRow`.
_STEP = "step, plan, time, seconds, tokens, loss, predicted, bound, ended_at, clock"

_log = logging.getLogger(__name__)


class StepRow(NamedTuple):
    """A step of a job. predicted, bound: seconds. ended_at, clock: as in `StepRecord`."""

    step: int
    plan: int
    time: float
    seconds: float
    tokens: int | None
    loss: float | None
    predicted: float | None
    bound: float | None
    ended_at: float = 0.0
    clock: str = ""


class Sample(NamedTuple):
    """A device's slowdown at a time: measured in a step, and decided; evidence of a change. Without any of
    them: nothing is measured from that time on."""

    device: str
    time: float
    step: int
    measured: float | None
    decided: float | None
    evidence: float | None


class PlanInBrief(msgspec.Struct, frozen=True):
    """A plan in brief."""

    number: int
    reason: str  # why it was proposed
    predicted: float | None  # seconds of a step
    rates: dict[str, float] = {}  # slowdowns that it counts with, of devices that are slow
    guessed: bool = False  # `predicted` is by the model's shapes: no step had been measured


def in_brief(record: AnyHistoryRecord) -> PlanInBrief:
    """A plan in brief."""
    predicted = record.plan.prediction
    return PlanInBrief(
        record.number,
        record.reason,
        predicted.step_seconds if predicted is not None else None,
        {device: rate for device, rate in record.problem.rates.items() if rate != 1.0},
        isinstance(record, HistoryRecord) and not record.problem.profile.fitted,
    )


class EventQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which events are asked for; what is empty or None does not matter."""

    job: str = ""
    kinds: tuple[str, ...] = ()
    node: str = ""
    device: str = ""
    after: int | None = None  # ids above this
    since: float | None = None
    until: float | None = None
    before: int | None = None  # ids below this
    id: int | None = None
    limit: int = 100


def _connected(path: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=10.0, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA busy_timeout = 10000")
    connection.execute(f"PRAGMA journal_size_limit = {16 << 20}")
    return connection


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
        elif version not in (*_UPGRADES, SCHEMA_VERSION):
            self._db.close()
            raise _Other(f"its tables are of version {version}, and this elasticd has version {SCHEMA_VERSION}")
        else:
            self._look_through()
            self._upgrade(version)

    def _look_through(self) -> None:
        """Raises DatabaseError where a page is damaged, so that none is found in the midst of work."""
        try:
            (verdict,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise sqlite3.DatabaseError(f"it is damaged: {verdict}")
        except sqlite3.DatabaseError:
            self._db.close()
            raise

    def _upgrade(self, version: int) -> None:
        """Makes the tables of an older release those of this one."""
        with self.together():
            for before in range(version, SCHEMA_VERSION):
                for statement in _UPGRADES[before]:
                    self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    @contextmanager
    def together(self) -> Iterator[None]:
        """Writes all rows that are put inside at once, or none of them. May be nested."""
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
        """Returns True if it is new: an event that comes twice is kept once."""
        node, device = about(event)
        body = msgspec.json.encode((event.text, event.data))
        cursor = self._db.execute(
            "INSERT OR IGNORE INTO events VALUES (?, ?, ?, ?, ?, ?, ?)",
            (event.id, event.time, event.kind, event.job, node, device, body),
        )
        new = cursor.rowcount == 1
        if new and event.kind == "forgotten" and event.job:
            self.end_run(event.job)
        return new

    def run(self, job: str) -> int:
        """The number of the run of this job that goes on; it begins where there is none."""
        row = self._db.execute(
            "SELECT run FROM runs WHERE job = ? AND open ORDER BY run DESC LIMIT 1", (job,)
        ).fetchone()
        if row is not None:
            return int(row[0])
        (after,) = self._db.execute(
            "SELECT coalesce(max(id), 0) FROM events WHERE kind = 'forgotten' AND +job = ?", (job,)
        ).fetchone()
        cursor = self._db.execute("INSERT INTO runs (job, after, open) VALUES (?, ?, 1)", (job, after))
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def end_run(self, job: str) -> None:
        """The job is forgotten: what comes under its name from here on is another run. One of which nothing was
        kept leaves nothing."""
        with self.together():
            self._db.execute(
                "DELETE FROM runs WHERE job = ? AND open "
                "AND NOT EXISTS (SELECT 1 FROM steps WHERE steps.run = runs.run) "
                "AND NOT EXISTS (SELECT 1 FROM plans WHERE plans.run = runs.run)",
                (job,),
            )
            self._db.execute("UPDATE runs SET open = 0 WHERE job = ? AND open", (job,))

    def going_on(self) -> set[str]:
        """The jobs that have a run which goes on."""
        return {job for (job,) in self._db.execute("SELECT job FROM runs WHERE open")}

    def put_step(
        self, job: str, step: StepRecord, predicted: float | None = None, bound: float | None = None
    ) -> bool:
        """Returns True if it is new. It takes the place of the steps from this index on that were made before
        it: those were rolled back. Before it is what has a plan of a lower number: clocks of leaders differ.
        Steps under one plan are in the order of time."""
        run = self.run(job)
        before = self._db.execute(
            "SELECT step, plan, time FROM steps WHERE run = ? AND step <= ? ORDER BY step DESC LIMIT 1",
            (run, step.step),
        ).fetchone()
        if before is not None and before[1] > step.plan:
            return False
        if before is not None and before[:2] == (step.step, step.plan) and before[2] >= step.time:
            return False
        self._db.execute(
            "DELETE FROM steps WHERE run = ? AND step >= ? AND (plan < ? OR (plan = ? AND time < ?))",
            (run, step.step, step.plan, step.plan, step.time),
        )
        loss = step.loss if step.loss is None or step.loss == step.loss else None
        row = StepRow(
            step=step.step,
            plan=step.plan,
            time=step.time,
            seconds=step.seconds,
            tokens=step.tokens,
            loss=loss,
            predicted=predicted,
            bound=bound,
            ended_at=step.ended_at,
            clock=step.clock,
        )
        marks = ", ".join("?" * (len(row) + 1))
        self._db.execute(f"INSERT OR REPLACE INTO steps (run, {_STEP}) VALUES ({marks})", (run, *row))
        return True

    def put_plan(self, job: str, record: AnyHistoryRecord, at: float, run: int | None = None) -> None:
        """A plan with the problem that it answers. run: None: the one that goes on."""
        values = (
            self.run(job) if run is None else run,
            record.number,
            at,
            msgspec.json.encode(in_brief(record)),
            zlib.compress(encode(record), 1),
        )
        self._db.execute("INSERT OR IGNORE INTO plans VALUES (?, ?, ?, ?, ?)", values)

    def put_rank(self, job: str, number: int, rank: RankNews) -> None:
        """Keeps a rank's report in a switch."""
        self._db.execute(
            "INSERT OR IGNORE INTO ranks VALUES (?, ?, ?, ?, ?, ?)",
            (self.run(job), number, rank.device, rank.what, rank.at, msgspec.json.encode(rank)),
        )

    def put_samples(self, samples: Iterable[Sample]) -> None:
        """Slowdowns of devices."""
        self._db.executemany("INSERT OR REPLACE INTO slowdowns VALUES (?, ?, ?, ?, ?, ?)", samples)

    def put_health(self, node: str, at: float, health: Health) -> None:
        """Keeps the readings of a node's agent."""
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

    def newest_time(self) -> float:
        """The newest time (unix seconds) of an event or a step; 0 where there is none."""
        both = "SELECT time FROM events UNION ALL SELECT time FROM steps"
        return float(self._db.execute(f"SELECT coalesce(max(time), 0) FROM ({both})").fetchone()[0])

    def newest_step(self, job: str) -> int:
        """The largest index of the run that goes on; -1 where there is none."""
        cursor = self._db.execute(
            "SELECT coalesce(max(step), -1) FROM steps WHERE run = (SELECT max(run) FROM runs "
            "WHERE job = ? AND open)",
            (job,),
        )
        return int(cursor.fetchone()[0])

    def newest_plan(self, job: str) -> int:
        """The largest number of a plan of the run that goes on; -1 where there is none."""
        cursor = self._db.execute(
            "SELECT coalesce(max(number), -1) FROM plans WHERE run = (SELECT max(run) FROM runs "
            "WHERE job = ? AND open)",
            (job,),
        )
        return int(cursor.fetchone()[0])

    def trained_plan(self, job: str) -> int:
        """The number of the plan of the newest step of the run that goes on; 0 where there is none."""
        row = self._db.execute(
            "SELECT plan FROM steps WHERE run = (SELECT max(run) FROM runs WHERE job = ? AND open) "
            "ORDER BY step DESC LIMIT 1",
            (job,),
        ).fetchone()
        return int(row[0]) if row is not None else 0

    # -- bounds --------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Bytes of the pages in use."""
        (pages,) = self._db.execute("PRAGMA page_count").fetchone()
        (free,) = self._db.execute("PRAGMA freelist_count").fetchone()
        (each,) = self._db.execute("PRAGMA page_size").fetchone()
        return int((pages - free) * each)

    def bound(self, oldest: float, most_bytes: int) -> None:
        """All of `bounding` at once."""
        for _ in self.bounding(oldest, most_bytes):
            pass

    def bounding(self, oldest: float, most_bytes: int) -> Iterator[None]:
        """Deletes what is older than this time; plans of a run beyond the newest ones; and where there are too
        many bytes, the oldest rows of tables that have more than their share. A few rows at once: between them
        others may write."""
        for table in _BOUNDED:
            if table == "plans":
                many = "SELECT run FROM plans GROUP BY run HAVING count(*) > ?"
                for (run,) in self._db.execute(many, (MOST_PLANS,)).fetchall():
                    old = (
                        "SELECT rowid FROM plans WHERE run = ? AND number <= (SELECT number FROM plans "
                        "WHERE run = ? ORDER BY number DESC LIMIT 1 OFFSET ?) LIMIT ?"
                    )
                    yield from self._deleted("plans", old, (run, run, MOST_PLANS, BATCH_PLANS), BATCH_PLANS)
                old = (
                    "SELECT rowid FROM plans WHERE time < ? AND (run NOT IN (SELECT run FROM runs WHERE open) "
                    "OR number < (SELECT max(number) FROM plans AS other WHERE other.run = plans.run)) LIMIT ?"
                )
                yield from self._deleted("plans", old, (oldest, BATCH_PLANS), BATCH_PLANS)
            else:
                yield from self._thinned(table, None, oldest)
        if self.size > most_bytes:
            yield
            for table, rows in self._too_many(most_bytes).items():
                if self.size > most_bytes:
                    yield from self._thinned(table, rows, None)
        with self.together():
            self._db.execute(
                "DELETE FROM runs WHERE NOT open "
                "AND NOT EXISTS (SELECT 1 FROM steps WHERE steps.run = runs.run) "
                "AND NOT EXISTS (SELECT 1 FROM plans WHERE plans.run = runs.run)"
            )
        yield
        while self._free() > 0:
            # It gives back one page with each row that it yields, none of which `execute` would fetch.
            self._db.executescript(f"PRAGMA incremental_vacuum({BATCH_PAGES})")
            yield
        self._db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def _free(self) -> int:
        return int(self._db.execute("PRAGMA freelist_count").fetchone()[0])

    def _too_many(self, most_bytes: int) -> dict[str, int]:
        """By table: the rows that it has beyond its share."""
        excess: dict[str, tuple[int, float]] = {}
        for table, share in _BOUNDED.items():
            (count,) = self._db.execute(f"SELECT count(*) FROM {table}").fetchone()
            (each,) = self._db.execute(
                f"SELECT avg({share.row}) FROM (SELECT * FROM {table} ORDER BY time DESC LIMIT {_SAMPLED})"
            ).fetchone()
            excess[table] = count, each or 0.0
        estimated = sum(count * each for count, each in excess.values())
        scale = self.size / estimated if estimated else 0.0
        beyond = {
            table: count - int(most_bytes * _BOUNDED[table].part / (each * scale))
            for table, (count, each) in excess.items()
            if count
        }
        return {table: rows for table, rows in beyond.items() if rows > 0}

    def _thinned(self, table: str, rows: int | None, before: float | None) -> Iterator[None]:
        """Deletes this many of the oldest rows, or those before a time."""
        most = BATCH_PLANS if table == "plans" else BATCH
        left = rows if rows is not None else 1 << 62
        while left > 0:
            cursor = self._db.execute(
                f"SELECT time FROM {table} WHERE time < ? ORDER BY time LIMIT 1 OFFSET ?",
                (before if before is not None else math.inf, min(most, left) - 1),
            ).fetchone()
            where, last = ("time <= ?", cursor[0]) if cursor is not None else ("time < ?", before)
            if last is None:
                return
            with self.together():
                gone = self._db.execute(f"DELETE FROM {table} WHERE {where}", (last,)).rowcount
            left -= gone
            if cursor is None or not gone:
                return
            yield

    def _deleted(self, table: str, which: str, values: tuple[Any, ...], most: int) -> Iterator[None]:
        while True:
            with self.together():
                gone = self._db.execute(f"DELETE FROM {table} WHERE rowid IN ({which})", values).rowcount
            if gone < most:
                return
            yield

    def put_aside(self) -> None:
        """Begins anew: what there is goes to another file, as far as the disk has place for it."""
        aside = f"{self.path}.{time.strftime('%Y%m%d-%H%M%S')}"
        try:
            Path(aside).touch(mode=0o600)
            self._db.execute("VACUUM INTO ?", (aside,))
        except (sqlite3.Error, OSError) as error:
            _log.error("what the history %s has cannot be kept in %s: %s", self.path, aside, error)
        with self.together():
            for table in (*_BOUNDED, "runs"):
                self._db.execute(f"DELETE FROM {table}")


class HistoryReader:
    """Reads the history; not for several threads at once."""

    def __init__(self, path: str) -> None:
        self._db = _connected(path)
        self._db.execute("PRAGMA query_only = ON")
        self._plans: dict[tuple[int, int], AnyHistoryRecord] = {}  # decoded of late, by run and number

    def close(self) -> None:
        """Closes the file."""
        self._db.close()

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """All that is read within it is of one moment, whatever is written meanwhile."""
        self._db.execute("BEGIN")
        try:
            yield
        finally:
            self._db.execute("ROLLBACK")

    def events(self, asked: EventQuery) -> list[EventRecord]:
        """Events that match, the newest first."""
        where, values = _where(asked)
        rows = self._db.execute(
            f"SELECT id, time, kind, job, body FROM events {where} ORDER BY id DESC LIMIT ?",
            (*values, asked.limit),
        )
        return [event for row in rows if (event := _event(row)) is not None]

    def facets(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], float | None]:
        """Kinds, jobs and nodes of events, and the time of the oldest."""
        kinds, jobs, nodes = (self._values(column) for column in ("kind", "job", "node"))
        (oldest,) = self._db.execute("SELECT min(time) FROM events").fetchone()
        return kinds, jobs, nodes, oldest

    def _values(self, column: str) -> tuple[str, ...]:
        # Skips from value to value by the index: there are few of them, and many rows.
        values: list[str] = []
        last = ""
        where = f"{column} > ? AND {column} != ''"
        while True:
            row = self._db.execute(
                f"SELECT {column} FROM events WHERE {where} ORDER BY {column} LIMIT 1", (last,)
            ).fetchone()
            if row is None or len(values) >= 2000:
                return tuple(values)
            values.append(last := row[0])

    def _run(self, job: str) -> int:
        """The newest run of a job; -1: none is known."""
        cursor = self._db.execute("SELECT coalesce(max(run), -1) FROM runs WHERE job = ?", (job,))
        return int(cursor.fetchone()[0])

    def after(self, job: str) -> int:
        """The id of the last event that is of an earlier run of the job."""
        row = self._db.execute("SELECT after FROM runs WHERE run = ?", (self._run(job),)).fetchone()
        return int(row[0]) if row is not None else 0

    def steps(self, job: str, since: int = -1, most: int = MOST_POINTS) -> tuple[list[StepRow], int]:
        """Steps above an index, oldest first, and n where only every n-th is there."""
        run = self._run(job)
        (count,) = self._db.execute(
            "SELECT count(*) FROM steps WHERE run = ? AND step > ?", (run, since)
        ).fetchone()
        every = max(1, -(-count // most))
        rows = self._db.execute(
            f"SELECT {_STEP} FROM steps WHERE run = ? AND step > ? AND step % ? = 0 ORDER BY step",
            (run, since, every),
        )
        return [StepRow(*row) for row in rows], every

    def newest_step(self, job: str) -> StepRow | None:
        """The newest step of a job."""
        row = self._db.execute(
            f"SELECT {_STEP} FROM steps WHERE run = ? ORDER BY step DESC LIMIT 1", (self._run(job),)
        ).fetchone()
        return StepRow(*row) if row is not None else None

    def newest_steps(self, job: str, count: int) -> list[StepRow]:
        """The newest steps of a job, oldest first."""
        rows = self._db.execute(
            f"SELECT {_STEP} FROM steps WHERE run = ? ORDER BY step DESC LIMIT ?", (self._run(job), count)
        ).fetchall()
        return [StepRow(*row) for row in reversed(rows)]

    def step_before(self, job: str, step: int) -> StepRow | None:
        """The last step of a job below this index."""
        row = self._db.execute(
            f"SELECT {_STEP} FROM steps WHERE run = ? AND step < ? ORDER BY step DESC LIMIT 1",
            (self._run(job), step),
        ).fetchone()
        return StepRow(*row) if row is not None else None

    def steps_of_plan(self, job: str, plan: int, most: int = 2000) -> list[StepRow]:
        """The first steps under a plan."""
        run = self._run(job)
        (first,) = self._db.execute(
            "SELECT min(step) FROM steps WHERE run = ? AND plan = ?", (run, plan)
        ).fetchone()
        rows = self._db.execute(
            f"SELECT {_STEP} FROM steps WHERE run = ? AND step >= ? AND +plan = ? ORDER BY step LIMIT ?",
            (run, first if first is not None else 1 << 62, plan, most),
        )
        return [StepRow(*row) for row in rows]

    def seconds_by_plan(self, job: str) -> dict[int, tuple[int, float]]:
        """By plan: how many steps there are, and the seconds of the median one."""
        run, seconds = self._run(job), {}
        counts = self._db.execute(
            "SELECT plan, count(*) FROM steps WHERE run = ? AND seconds > 0 GROUP BY plan", (run,)
        )
        for plan, count in counts.fetchall():
            (middle,) = self._db.execute(
                "SELECT seconds FROM steps WHERE run = ? AND plan = ? AND seconds > 0 "
                "ORDER BY seconds LIMIT 1 OFFSET ?",
                (run, plan, count // 2),
            ).fetchone()
            seconds[plan] = (count, middle)
        return seconds

    def plan(self, job: str, number: int) -> tuple[AnyHistoryRecord, float] | None:
        """A plan, and when it was heard of."""
        run = self._run(job)
        row = self._db.execute("SELECT time FROM plans WHERE run = ? AND number = ?", (run, number)).fetchone()
        if row is None:
            return None
        if (run, number) not in self._plans:
            while len(self._plans) >= MOST_DECODED:
                del self._plans[next(iter(self._plans))]
            (body,) = self._db.execute(
                "SELECT body FROM plans WHERE run = ? AND number = ?", (run, number)
            ).fetchone()
            plan = _kept(cast("type[AnyHistoryRecord]", AnyHistoryRecord), body, packed=True)
            if plan is None:
                return None
            self._plans[run, number] = plan
        return self._plans[run, number], row[0]

    def heads(self, job: str) -> list[tuple[PlanInBrief, float]]:
        """All plans of a job in brief, oldest first, and when they were heard of."""
        rows = self._db.execute("SELECT head, time FROM plans WHERE run = ? ORDER BY number", (self._run(job),))
        return [(plan, at) for head, at in rows if (plan := _kept(PlanInBrief, head)) is not None]

    def counted(self, job: str, device: str, most: int) -> list[tuple[AnyHistoryRecord, float]]:
        """The last plans of a job that count with another slowdown of a device than the one before, oldest
        first, with that slowdown."""
        counts: list[tuple[int, float]] = []
        before = None
        for head, _ in self.heads(job):
            rate = head.rates.get(device, 1.0)
            if rate != before:
                counts.append((head.number, rate))
            before = rate
        plans = ((self.plan(job, number), rate) for number, rate in counts[-most:])
        return [(plan[0], rate) for plan, rate in plans if plan is not None]

    def numbers(self, job: str) -> tuple[int, ...]:
        """The numbers of the plans that are kept."""
        rows = self._db.execute("SELECT number FROM plans WHERE run = ? ORDER BY number", (self._run(job),))
        return tuple(number for (number,) in rows)

    def ranks(self, job: str, number: int) -> list[RankNews]:
        """The reports of ranks in a switch, in the order of time."""
        rows = self._db.execute(
            "SELECT body FROM ranks WHERE run = ? AND number = ? ORDER BY time", (self._run(job), number)
        )
        return [news for (body,) in rows if (news := _kept(RankNews, body)) is not None]

    def newest_switch(self, job: str) -> int:
        """The number of the newest switch that a rank said something of; 0: there is none."""
        cursor = self._db.execute("SELECT coalesce(max(number), 0) FROM ranks WHERE run = ?", (self._run(job),))
        return int(cursor.fetchone()[0])

    def samples(self, device: str, most: int = MOST_POINTS) -> list[Sample]:
        """A device's slowdowns, oldest first."""
        rows = self._db.execute(
            "SELECT * FROM slowdowns WHERE device = ? ORDER BY time DESC LIMIT ?", (device, most)
        ).fetchall()
        return [Sample(*row) for row in reversed(rows)]

    def health(self, node: str, most: int = 500) -> list[tuple[float, Health]]:
        """The readings of a node's agent, oldest first."""
        rows = self._db.execute(
            "SELECT time, body FROM health WHERE node = ? ORDER BY time DESC LIMIT ?", (node, most)
        ).fetchall()
        return [(at, seen) for at, body in reversed(rows) if (seen := _kept(Health, body)) is not None]


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
        "id > ?": asked.after,
        "id < ?": asked.before,
        "id = ?": asked.id,
    }
    parts = [part for part, value in given.items() if value is not None]
    values = [value for value in given.values() if value is not None]
    if asked.kinds:
        parts.append(f"kind IN ({', '.join('?' * len(asked.kinds))})")
        values += asked.kinds
    return ("WHERE " + " AND ".join(parts) if parts else ""), values


def _kept(kind: type[T], body: bytes, *, packed: bool = False) -> T | None:
    """The value of a row; None, with one log line, where it cannot be read: the disk has damaged it, or a newer
    release wrote it."""
    try:
        return decoded_as(kind, zlib.decompress(body) if packed else body)
    except (msgspec.DecodeError, zlib.error) as error:
        what = getattr(kind, "__name__", str(kind))
        text = f"a row of the dashboard's history is no {what}, and is skipped: {shown(str(error))}"
        skip("record", ("history", what), text)
        return None


def _event(row: tuple[Any, ...]) -> EventRecord | None:
    number, at, kind, job, body = row
    kept = _kept(tuple[str, dict[str, Any]], body)
    if kept is None:
        return None
    text, data = kept
    return EventRecord(id=number, time=at, kind=kind, job=job, text=text, data=data)
