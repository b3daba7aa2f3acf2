"""`elasticd stop` says what it waits for, asks a new leader again, and ends with the job's reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elasticd.cli import jobs
from elasticd.client import CannotReach
from elasticd.wire.api_types import OVER_PHASES


class Played:
    """A coordinator's answers, one for each look: phase and reason of the job, and whether it is stopped."""

    def __init__(self, *looks: tuple[str, str, bool | None]) -> None:
        self._looks, self.asked = list(looks), list[float]()

    def status(self) -> Any:
        phase, reason, stopping = self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]
        job = SimpleNamespace(phase=phase, reason=reason, stopping=stopping, over=phase in OVER_PHASES, step=7)
        return SimpleNamespace(job=lambda name: job)

    def stop(self, job: str, seconds: float, by: str) -> dict[str, str]:
        self.asked.append(seconds)
        return {}


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_POLL_SECONDS", 0.0)


def ended(api: Played, seconds: float = 60.0) -> Any:
    return jobs._ended(api, "job", seconds)  # type: ignore[arg-type]


def test_what_it_waits_for_is_said_once_each_time_that_it_changes(capsys: pytest.CaptureFixture[str]) -> None:
    api = Played(
        ("running", "stopping: waits for a/0 to hear of it", True),
        ("running", "stopping: waits for a/0 to hear of it", True),
        ("running", "stopping: waits for the last checkpoint of a/0", True),
        ("stopped", "stopped by alice", None),
    )
    assert ended(api).reason == "stopped by alice"
    assert capsys.readouterr().err.splitlines() == [
        "job job: stopping: waits for a/0 to hear of it",
        "job job: stopping: waits for the last checkpoint of a/0",
    ]
    assert not api.asked


def test_a_leader_that_just_came_is_asked_again_within_the_same_time_and_an_older_one_is_not() -> None:
    api = Played(("running", "", False), ("stopped", "", None))
    ended(api)
    assert len(api.asked) == 1
    assert 0 < api.asked[0] <= 60
    older = Played(("running", "", None), ("stopped", "", None))
    ended(older)
    assert not older.asked


def test_there_is_a_longest_time() -> None:
    with pytest.raises(CannotReach, match="is running still"):
        ended(Played(("running", "", True)), -60.0)
