"""Events as a leader keeps them, and as programs and people read them."""

from __future__ import annotations

from time import localtime, strftime
from typing import Any

from elasticd_planner.value import Value

from elasticd.codec.safe_text import in_one_line

#: Events of one leader before its ids reach those of the next one, which go on above them then.
EVENTS_OF_A_TERM = 1 << 20


class EventRecord(Value, frozen=True, kw_only=True):
    """Something that happened."""

    id: int  # grows with each event
    time: float  # unix seconds
    kind: str  # for programs
    job: str  # empty: about no job
    text: str  # one line for people
    data: dict[str, Any]  # for programs


def line(event: EventRecord) -> str:
    """An event for people: local time, kind, job, text."""
    clock = strftime("%H:%M:%S", localtime(event.time))
    about = f"{event.job}: " if event.job else ""
    return in_one_line(f"{clock}  {event.kind:<15} {about}{event.text}")


class Pacing(Value, frozen=True, kw_only=True):
    """The reports of all ranks of a job about emulated devices."""

    paced: int = 0  # sections that were slowed down to the emulated speed
    overruns: int = 0  # sections that took longer than that speed allows
