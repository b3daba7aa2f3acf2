"""A coordinator's answers over real HTTP, from values that a test makes; commands ask it by --coordinator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import parse_qs, urlsplit

import msgspec

from elasticd.records import HistoryRecord
from elasticd.wire.api_types import ClusterStatus, Events, History, Settings, Steps, unknown
from elasticd.wire.event_record import EventRecord, Pacing
from elasticd.wire.step_record import StepRecord


@dataclass
class Answers:
    """What a coordinator answers to GET, each by its path."""

    status: ClusterStatus
    events: Sequence[EventRecord] = ()
    histories: Mapping[str, tuple[HistoryRecord, ...]] = field(default_factory=dict)  # by job
    steps: Mapping[str, tuple[StepRecord, ...]] = field(default_factory=dict)  # by job
    settings: Settings = field(default_factory=lambda: Settings(values={}, changed={}, history=()))

    def answer(self, target: str) -> object:
        """The value at a path with its query. Raises ApiError where there is none."""
        url = urlsplit(target)
        after = int(parse_qs(url.query).get("after", ["-1"])[0])
        match url.path.split("/")[2:]:
            case ["status"]:
                return self.status
            case ["config"]:
                return self.settings
            case ["events"]:
                return Events(events=tuple(event for event in self.events if event.id > after))
            case ["jobs", job, "history"] if job in self.histories:
                records = self.histories[job]
                return History(history=tuple(record for record in records if record.number > after))
            case ["jobs", job, "steps"]:
                return Steps(steps=tuple(self.steps.get(job, ())), pacing=Pacing())
            case found:
                raise unknown("path", "/".join(found), ())


@contextmanager
def serving(answers: Answers) -> Iterator[str]:
    """Serves them until the end; gives the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = msgspec.json.encode(answers.answer(self.path))
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def long_text(begins: str) -> str:
    """A text of 1,500 characters that no other text begins as, with a path that is easily broken."""
    words = " ".join(f"{begins}{number}" for number in range(1500 // (len(begins) + 4)))
    return f"{begins}! /srv/venv/lib/python3.11/site-packages/a_package/{begins}/a_module.py {words} {begins}."
