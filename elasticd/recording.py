"""A recording: what a leader knew, all that it heard from then on, and what it decided. JSON lines:

    began   the leader's whole state, before what follows; again when another leader took over
    heard   an event of the machine, its kind beside it; ticks that changed nothing are left out
    told    what the machine noted because of the event before it

The machine is a function of state, event and time, so that this is enough to decide all of it again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar

import msgspec
from elasticd_planner.detection.device_rates import as_mapping
from elasticd_planner.problem import Answer, Problem
from elasticd_planner.value import Invalid, StoredValue

from elasticd.codec.decoding import decoded, decoded_as, stored_refusal, tag_of
from elasticd.machines.coordinator.machine import CoordinatorState
from elasticd.machines.job.state.events import (
    AgentDown,
    AgentUp,
    CheckpointAsked,
    Configured,
    CoordinatorNote,
    CoordinatorTick,
    Effect,
    Event,
    ForgetAsked,
    ForgetNodeAsked,
    Harmed,
    NodeDrained,
    Paced,
    Planned,
    Received,
    StopAsked,
    Unwritten,
    Write,
)
from elasticd.machines.job.state.job_state import PARTS

VERSION = 1
#: The events of the machine by what recordings call them.
EVENTS: dict[str, type] = {
    "agent-up": AgentUp,
    "agent-down": AgentDown,
    "message": Received,
    "planned": Planned,
    "unwritten": Unwritten,
    "device-speed": Paced,
    "fault-injected": Harmed,
    "configured": Configured,
    "drain": NodeDrained,
    "stop-job": StopAsked,
    "checkpoint-job": CheckpointAsked,
    "forget-job": ForgetAsked,
    "forget-node": ForgetNodeAsked,
    "tick": CoordinatorTick,
}
#: Events of older releases that the machine does not have any more: reading a recording leaves them out.
GONE = frozenset({"samples-reread"})
T = TypeVar("T")

_KINDS = {event: kind for kind, event in EVENTS.items()}


class RecordingError(Invalid):
    """A recording that cannot be read: why, and which line."""


class Line(StoredValue, frozen=True, kw_only=True, tag="recording-line"):
    """`at`: seconds of the leader's clock; `time`: unix seconds. kind: the event's, of a line of one."""

    what: Literal["began", "heard", "told"]
    at: float
    time: float
    body: msgspec.Raw
    kind: str = ""
    version: int = VERSION

    def state(self) -> CoordinatorState:
        """The leader's state in a `began` line. Raises `msgspec.DecodeError` where the body is no state."""
        # Not strict: what JSON has no number for is text.
        body = _map_jobs(msgspec.json.decode(self.body), _in_parts)
        return _decoded(CoordinatorState, msgspec.json.encode(body), strict=False)

    def event(self) -> Event:
        """The event in a `heard` line. Raises `msgspec.DecodeError` for a kind or a body that this release does
        not know."""
        kind = EVENTS.get(self.kind)
        if kind is None:
            raise msgspec.ValidationError(f"there is no event {self.kind!r}")
        event: Event = _decoded(kind, bytes(self.body))
        return event

    def note(self) -> CoordinatorNote:
        """The note in a `told` line. Raises `msgspec.DecodeError` where the body is no note."""
        return decoded_as(CoordinatorNote, bytes(self.body))


def _decoded(kind: type[T], body: bytes, *, strict: bool = True) -> T:
    """The value of a line. Release 0.1 wrote no tags of problems and answers, which were all of pipelines."""
    try:
        return decoded_as(kind, body, strict=strict)
    except msgspec.ValidationError:
        if (tagged := _tagged(value := msgspec.json.decode(body))) == value:
            raise
    return decoded_as(kind, msgspec.json.encode(tagged), strict=strict)


def _tagged(value: Any, name: str = "") -> Any:
    """JSON with the tags of problems and answers."""
    if isinstance(value, list):
        return [_tagged(each) for each in value]
    if not isinstance(value, dict):
        return value
    tags = {"problem": tag_of(Problem), "answer": tag_of(Answer)}
    tag = {"type": tags[name]} if name in tags else {}
    return {**tag, **{key: _tagged(each, key) for key, each in value.items()}}


def _map_jobs(body: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """The body of a leader's state, with each of its jobs changed."""
    if not isinstance(body, dict) or not isinstance(jobs := body.get("jobs", {}), dict):
        return body
    return body | {"jobs": {name: change(job) if isinstance(job, dict) else job for name, job in jobs.items()}}


def _in_parts(flat: dict[str, Any]) -> dict[str, Any]:
    """A job as `JobState` has it, from one whose parts' fields are beside its own."""
    job = dict(flat)
    for part, kind in PARTS.items():
        job[part] = {key: job.pop(key) for key in kind.__struct_encode_fields__ if key in job}
    return job


def _flat(job: dict[str, Any]) -> dict[str, Any]:
    """A job with the fields of its parts beside its own: recordings have had no parts since release 0.1."""
    own = {key: value for key, value in job.items() if key not in PARTS}
    return {**own, **{key: value for part in PARTS for key, value in job[part].items()}}


def began(state: CoordinatorState, at: float, time: float) -> bytes:
    """A line with the leader's whole state: JSON with its newline. `at` and `time` are those of `Line`.
    Infinite numbers become text."""
    body = _map_jobs(msgspec.to_builtins(state, enc_hook=as_mapping), _flat)
    return _line("began", at, time, _finite(body))


def heard(event: Event, at: float, time: float) -> bytes:
    """A line with an event that the machine has taken in, as `began`. Raises KeyError for a type that
    `EVENTS` lacks."""
    return _line("heard", at, time, event, _KINDS[type(event)])


def told(note: CoordinatorNote, at: float, time: float) -> bytes:
    """A line with one note, as `began`. It belongs to the last event before it."""
    return _line("told", at, time, note)


def notes(effects: Iterable[Effect]) -> list[CoordinatorNote]:
    """The notes that effects bring, those that wait for a write among them."""
    notes_of_effects: list[CoordinatorNote] = []
    for effect in effects:
        if isinstance(effect, CoordinatorNote):
            notes_of_effects.append(effect)
        elif isinstance(effect, Write):
            notes_of_effects += effect.notes
    return notes_of_effects


def read(text: Iterable[bytes], source: str) -> list[Line]:
    """All lines but those of events that are gone, and a last one that was cut off. Raises RecordingError."""
    decoder = msgspec.json.Decoder(Line)
    lines: list[Line] = []
    broken = ""
    for number, raw in enumerate(text, start=1):
        if broken:
            raise RecordingError(broken)
        if not raw.strip():
            continue
        try:
            line = decoded(decoder.decode, raw)
        except msgspec.DecodeError as error:
            broken = f"{source}:{number} is no line of a recording: {error}"
            continue
        if refusal := stored_refusal(f"the recording {source}", line.version, VERSION):
            raise RecordingError(refusal)
        if line.kind not in GONE:
            lines.append(line)
    if not lines or lines[0].what != "began":
        raise RecordingError(broken or f"{source} is no recording: make one with 'elasticd record FILE'")
    return lines


def _line(what: str, at: float, time: float, body: Any, kind: str = "") -> bytes:
    line = {"type": tag_of(Line), "version": VERSION, "what": what, "at": at, "time": time, "kind": kind}
    return msgspec.json.encode(line | {"body": body}) + b"\n"


def _finite(value: Any) -> Any:
    """JSON has no infinity: such numbers become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(held) for key, held in value.items()}
    return [_finite(held) for held in value] if isinstance(value, list | tuple) else value
