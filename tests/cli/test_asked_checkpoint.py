"""`elasticd checkpoint now` waits for the checkpoint that it asked for, and not for what cannot come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from click import ClickException

from elasticd.cli import checkpoint
from elasticd.client import CannotReach
from elasticd.wire.api_types import OVER_PHASES


class Played:
    """A coordinator's answers, one for each look: phase and step of the job, and events since."""

    def __init__(self, *looks: tuple[str, int, list[Any]]) -> None:
        self._looks, self._events = list(looks), list[Any]()

    def status(self) -> Any:
        phase, step, events = self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]
        self._events = events
        job = SimpleNamespace(phase=phase, step=step, over=phase in OVER_PHASES)
        return SimpleNamespace(job=lambda name: job)

    def events(self, after: int) -> list[Any]:
        return [event for event in self._events if event.id > after]


def made(step: int, job: str = "job", number: int = 8) -> Any:
    return SimpleNamespace(id=number, kind="checkpoint", job=job, text=f"of step {step}", data={"step": step})


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_POLL_SECONDS", 0.0)


def waited(*looks: tuple[str, int, list[Any]], seconds: float = 60.0) -> str:
    return checkpoint.waited(Played(*looks), "job", 7, 20, seconds)  # type: ignore[arg-type]


def test_the_first_checkpoint_of_the_job_since_then_is_told() -> None:
    earlier, other = made(10), made(30, job="other")
    assert (
        waited(("running", 21, [earlier, other]), ("running", 22, [earlier, other, made(22)])) == "of step 22"
    )


def test_one_of_a_job_that_rolled_back_counts_though_its_step_is_lower() -> None:
    assert waited(("recovering", 20, []), ("running", 12, [made(13)])) == "of step 13"


def test_one_that_the_job_made_before_it_ended_counts() -> None:
    assert waited(("running", 21, []), ("done", 25, [made(25)])) == "of step 25"


def test_a_job_that_ended_without_one_is_not_waited_for() -> None:
    with pytest.raises(CannotReach, match="job job has ended"):
        waited(("running", 21, []), ("stopped", 22, []))


def test_there_is_a_longest_time() -> None:
    with pytest.raises(CannotReach, match="no checkpoint within 0 s of being asked"):
        waited(("running", 21, []), seconds=0.0)


def test_one_that_could_not_be_written_ends_the_wait_and_one_that_was_skipped_does_not() -> None:
    def failed(step: int, *, skipped: bool = False) -> Any:
        data = {"step": step, "skipped": skipped}
        text = "no checkpoint of step 22: b/0 could not write: no space left in /full"
        return SimpleNamespace(id=8, kind="checkpoint_failed", job="job", text=text, data=data)

    skipped = failed(22, skipped=True)
    with pytest.raises(ClickException, match="b/0 could not write: no space left in /full"):
        waited(("running", 21, [skipped]), ("running", 22, [skipped, failed(22)]))
    assert waited(("running", 21, [skipped]), ("running", 24, [skipped, made(24)])) == "of step 24"
