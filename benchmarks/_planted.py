"""Faults of the user's own code, on the job of `_injections`: hangs, pauses between steps, exceptions."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import _train_planted
from _injections import Trained, training
from _results import Row, row

from elasticd.testing.waiting import until
from elasticd.wire.event_record import EventRecord
from tests.soak.script_faults import Place, Planted, plant, taken, withdraw

#: Seconds of a hang: several times what may pass until it is known.
HANG = 8.0
#: Seconds that the script's own code takes between two steps.
LONG = 60.0
#: Steps between two evaluations.
EVERY = 20
SCRIPT = Path(_train_planted.__file__)


def planted(nodes: Sequence[str], **options: int) -> AbstractContextManager[Trained]:
    """A job in whose workers' own code faults can be planted."""
    return training(nodes, script=SCRIPT, **options)


class Planting:
    """Plants the same fault on one worker after the other."""

    def __init__(self, job: Trained, place: Place, how: str, seconds: float = 0.0) -> None:
        self._job, self._place, self._how, self._seconds = job, place, how, seconds
        self._numbers = itertools.count(1)

    def __call__(self, node: str) -> float:
        """The unix time at which the worker found it."""
        number, folder, device = next(self._numbers), self._job.fleet.folder, f"{node}/0"
        words = "".join("abcdefghij"[int(digit)] for digit in str(number))
        fault = Planted(
            number=number,
            place=self._place,
            how=self._how,  # type: ignore[arg-type]
            seconds=self._seconds,
            text=f"planted: {words}",
        )
        plant(folder, device, fault)
        until(lambda: taken(folder, number), self._job.fleet.said, pause=0.01)
        withdraw(folder, device)
        found = folder / f"taken-{number}"
        when = found.stat().st_ctime
        found.unlink()
        return when


def raised(event: EventRecord, device: str) -> bool:
    """The coordinator knows what a device's code raised."""
    return event.kind == "raised" and event.data.get("device") == device


def pauses(nodes: Sequence[str], times: int) -> Iterator[tuple[str, int, float]]:
    """Of each place between two steps: its name, the fences that a minute there made, and the longest time that
    nobody made a step."""
    places: list[tuple[str, Place, str]] = [
        ("an evaluation", "evaluation", "sleep"),
        ("a save in the loop's body (which keeps the interpreter's lock)", "script", "lock"),
        ("a loader that stalls", "loader", "sleep"),
    ]
    with planted(nodes, evaluate=EVERY) as job:
        for name, place, how in places:
            fault, fences, longest = Planting(job, place, how, LONG), 0, 0.0
            for node in (nodes * times)[:times]:
                with job.fleet.api() as api:
                    events = api.events()
                    mark = events[-1].id if events else 0
                    since = time.monotonic()
                    fault(node)
                    until(lambda: time.monotonic() > since + LONG, job.fleet.said, seconds=2 * LONG, pause=1.0)  # noqa: B023
                    job.fleet.advanced(10)
                    longest = max(longest, job.fleet.largest_gap(since))
                    fences += sum(event.kind == "fenced" for event in api.events(mark))
            yield name, fences, longest


def false_rows(nodes: Sequence[str], times: int) -> Iterator[Row]:
    """Nobody is to be taken for lost for what it does between two steps."""
    for name, fences, longest in pauses(nodes, times):
        text = f"{name} of {LONG:g} s on one of {len(nodes)} devices: fences"
        yield row(text, fences, "", goal="0", met=not fences)
        yield row(f"{name} of {LONG:g} s: longest time without a step", longest, "s")
