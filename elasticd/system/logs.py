"""Logs by the standard library's logging: lines for people, or one JSON object in each for programs.

A JSON line has `time` (UTC), `level`, `logger` and `message`; what it is about where that is known (`ABOUT`);
and `exception` where there was one.
"""

from __future__ import annotations

import datetime
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec
from elasticd_planner.value import Value

from elasticd.codec.safe_text import for_terminal, in_one_line

#: Says how the daemons and workers that a shell starts log, where [log] does not; `json` or `text`.
FORMAT_VARIABLE = "ELASTICD_LOG_FORMAT"
#: What a line may be about, in the order in which it says so.
ABOUT = ("cluster", "coordinator", "node", "job", "plan", "step", "device", "kind")

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["text", "json"]
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class LogSection(Value, frozen=True, kw_only=True):
    """The settings of a daemon's log on its standard error."""

    # Lines for people, or one JSON object a line for programs. Default: `$ELASTICD_LOG_FORMAT`, else text.
    format: Format | None = None
    # The lowest level that is logged.
    level: Level = "info"


class Seldom:
    """Warnings about what others can bring about again and again: the first one at once, then one in so many
    seconds at most, with the number of those that it stands for. Thread-safe."""

    def __init__(
        self, log: logging.Logger, seconds: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log, self._seconds, self._clock = log, seconds, clock
        self._lock = threading.Lock()
        self._next, self._unsaid = float("-inf"), 0

    def warn(self, text: str) -> None:
        """Logs `text`, or only counts it where a warning was logged less than `seconds` ago. The count is for
        all texts together."""
        with self._lock:
            now = self._clock()
            if now < self._next:
                self._unsaid += 1
                return
            more, self._unsaid, self._next = self._unsaid, 0, now + self._seconds
        self._log.warning("%s%s", text, f" (and {more} more like this one before it)" if more else "")


class TextLines(logging.Formatter):
    """A line for people. Control characters of a message are written out: part of it may be of another process,
    and could end the line or move the cursor of whoever reads it. A traceback keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """As the base class's, in one line: line ends are written out too."""
        return in_one_line(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        """As the base class's; of control characters only line ends and tabs are kept."""
        return for_terminal(super().formatException(ei))


class JsonLines(logging.Formatter):
    """One JSON object a line. `always` is what every line is about, `now` what it is about at the moment; what
    a record was given itself (by `extra`) goes before either."""

    def __init__(self, always: Mapping[str, Any], now: Callable[[], Mapping[str, Any]] = dict) -> None:
        super().__init__()
        self._always, self._now = dict(always), now

    def format(self, record: logging.LogRecord) -> str:
        """A JSON object without a newline. Values that JSON has no type for become text."""
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        known = {**self._always, **self._now()}
        own = {name: getattr(record, name, None) for name in ABOUT}
        known |= {name: value for name, value in own.items() if value is not None}
        line: dict[str, Any] = {
            "time": at.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in ABOUT:
            if known.get(name) is not None:
                line[name] = known[name]
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def set_up(section: LogSection, always: Mapping[str, Any]) -> None:
    """All that this process logs goes to its standard error as `section` says. Once, at its start."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines(always) if is_json(section.format) else TextLines(_TEXT))
    logging.basicConfig(level=section.level.upper(), handlers=[handler])
    logging.getLogger("websockets").setLevel(logging.WARNING)
    if section.level != "debug":  # a line for each request, at info
        logging.getLogger("httpx2").setLevel(logging.WARNING)


class _Unhandled(logging.Handler):
    """Prints warnings, with elasticd's name before them, where the script has set no logging up: else Python's
    own last resort would print them among the script's lines without a name."""

    def emit(self, record: logging.LogRecord) -> None:
        """Nothing where a handler of the script's gets the record."""
        if not logging.getLogger().handlers:
            print(self.format(record), file=sys.stderr, flush=True)


def for_worker(now: Callable[[], Mapping[str, Any]]) -> None:
    """Sets up the log of elasticd itself in a training script, as JSON lines where `$ELASTICD_LOG_FORMAT` asks
    for them; else it goes wherever the script's own logging sends it, and warnings to stderr where there is
    none. The script's logging is left alone."""
    ours = logging.getLogger("elasticd")
    kind = JsonLines if is_json() else TextLines
    if any(isinstance(known.formatter, kind) for known in ours.handlers):
        return
    if not is_json():
        unhandled = _Unhandled(logging.WARNING)
        unhandled.setFormatter(TextLines("elasticd: %(message)s"))
        ours.addHandler(unhandled)
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines({}, now))
    ours.addHandler(handler)
    ours.propagate = False
    if ours.level == logging.NOTSET:
        ours.setLevel(logging.INFO)


def is_first_worker() -> bool:
    """Returns True if this is the first of a job's workers, or no worker: what all would say alike, one
    says."""
    return os.environ.get("RANK", "0") == "0"


def say(text: str) -> None:
    """Prints one line for people, with elasticd's name, or logs it where the log is for programs."""
    if is_json():
        logging.getLogger("elasticd").info("%s", text)
    else:
        print(f"elasticd: {text}", file=sys.stderr, flush=True)


def is_json(chosen: Format | None = None) -> bool:
    """Returns True if log lines are JSON objects: `chosen`, else as `$ELASTICD_LOG_FORMAT` says."""
    return (chosen or os.environ.get(FORMAT_VARIABLE, "")) == "json"
