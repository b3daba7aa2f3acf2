"""The record of one run of the demo: everything that the report is made from, and nothing else."""

from __future__ import annotations

from pathlib import Path

import msgspec
from elasticd_planner.value import StoredValue, Value

from elasticd.codec.decoding import decoder_of
from elasticd.demo.scenario import DemoError, DemoScenario
from elasticd.records import HistoryRecord
from elasticd.wire.event_record import EventRecord, Pacing
from elasticd.wire.step_record import StepRecord


class DemoLine(Value, frozen=True, kw_only=True):
    """A line of a ledger: one step, its loss and the samples that it was trained on. Scripts write it and the
    same run reads it: it has no tag and no version."""

    step: int
    loss: float
    samples: tuple[int, ...]


class DemoRecord(StoredValue, frozen=True, kw_only=True, tag="demo-record"):
    """One run. `before` and `after`: the workers' pids by device, at the first step and at the end; `ledger`:
    written by whoever had rank 0; `plain`: the ledger of plain torch in one process."""

    scenario: DemoScenario
    events: tuple[EventRecord, ...]
    steps: tuple[StepRecord, ...]
    history: tuple[HistoryRecord, ...]
    pacing: Pacing
    before: dict[str, int]
    after: dict[str, int]
    ledger: tuple[DemoLine, ...]
    plain: tuple[DemoLine, ...]


def read_ledger(path: Path) -> tuple[DemoLine, ...]:
    """The lines of a ledger, in the order in which they were written. Raises DemoError."""
    try:
        return tuple(decoder_of(DemoLine).decode(line) for line in path.read_bytes().splitlines())
    except (OSError, msgspec.DecodeError) as error:
        raise DemoError(f"the ledger {path} cannot be read: {error}") from error
