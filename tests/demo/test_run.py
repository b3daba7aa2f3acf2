"""On what the demo sees of its job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from elasticd.client import ApiClient, CannotReach
from elasticd.demo import run
from elasticd.demo.cluster import DemoCluster
from elasticd.demo.scenario import DemoScenario
from elasticd.system.child_processes import ProcessError, Processes
from elasticd.testing import cluster
from elasticd.wire.event_record import EventRecord


def event(number: int) -> EventRecord:
    return EventRecord(id=number, time=0.0, kind="planning", job="demo", text="", data={})


class Leader:
    """A leader with some events and no job; `gone` no longer answers."""

    def __init__(self, *events: EventRecord) -> None:
        self.kept, self.gone = events, False

    def status(self) -> Any:
        if self.gone:
            raise CannotReach("no coordinator answers")
        return self

    def job(self, name: str) -> None:
        return None

    def events(self, after: int) -> tuple[EventRecord, ...]:
        return tuple(event for event in self.kept if event.id > after)


class Elections(DemoCluster):
    """A cluster that has not been started, whose leaders are given: None while nobody leads."""

    def __init__(self, folder: Path, *leaders: Leader | None) -> None:
        super().__init__(DemoScenario(), Processes(folder), folder, folder, {})
        self.leaders: Iterator[Leader | None] = iter(leaders)
        self.last: Leader | None = None

    def api(self) -> ApiClient:
        self.last = next(self.leaders, self.last)
        if self.last is None:
            raise CannotReach("nobody leads")
        return cast(ApiClient, self.last)


def test_another_leader_is_asked_when_the_first_one_no_longer_answers(tmp_path: Path) -> None:
    first, second = Leader(event(1), event(2)), Leader(event(1), event(2), event(9))
    seen = run._Seen(Elections(tmp_path, first, first, None, second))
    assert [event.id for event in seen.look().events] == [1, 2]
    first.gone = True
    assert [event.id for event in seen.look().events] == [1, 2, 9], "each of them once"


def test_a_cluster_without_a_leader_is_waited_for_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster.Cluster.until, "__defaults__", (0.3,))
    with pytest.raises(ProcessError, match=r"an answer of the coordinator did not happen .*: nobody leads"):
        run._Seen(Elections(tmp_path, None)).look()
