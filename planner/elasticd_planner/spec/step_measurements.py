"""A step as all of its members measured it, in columns: what detection and the fit of a profile read of it.

Reports of a step come one by one, and each is packed into a `Row` when it comes. When the last of ten thousand
comes, all that is left to do is to join the rows.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

import msgspec
import numpy as np

from elasticd_planner.numeric import Floats
from elasticd_planner.spec.measurement import Measurement, ModuleMeasurement
from elasticd_planner.spec.sequence_lengths import Lengths, lengths_of, packed
from elasticd_planner.value import Value, refuse

#: The fields of a measurement that are kept: those that detection reads come first.
STARTS = ("block_seconds", "block_work", "tokens", "squares")
COLUMNS = (
    *STARTS,
    "micro_batches",
    "embed_seconds",
    "head_seconds",
    "again_seconds",
    "tensor_seconds",
    "reduce_seconds",
    "step_seconds",
    "slowdown",
)
_numbers = attrgetter(*COLUMNS)
_START = struct.Struct(f"<{len(STARTS)}d")
_ROW = struct.Struct(f"<{len(COLUMNS)}d")


class Row(NamedTuple):
    """One measurement as kept: the numbers of `COLUMNS`, and its sequences (`sequence_lengths.packed`)."""

    numbers: bytes
    sequences: bytes


def row_of(measurement: Measurement) -> Row:
    """Raises OverflowError for a number that no float is as large as."""
    return Row(_ROW.pack(*_numbers(measurement)), packed(measurement))


#: The columns of a module's row under other names there, and those that it has not.
_ITEM_COLUMNS = tuple({"micro_batches": "items", "step_seconds": ""}.get(c, c) for c in COLUMNS)


def module_row(measurement: ModuleMeasurement) -> Row:
    """The row of a module of items: a micro-batch is an item. Raises as `row_of`."""
    return Row(_ROW.pack(*(getattr(measurement, name) if name else 0.0 for name in _ITEM_COLUMNS)), b"")


class Step(Value, frozen=True, kw_only=True):
    """The measurements of one step under one plan. numbers: those of `columns`, device by device, as
    little-endian floats. lengths: of its sequences (None: not measured). Of a plan of several modules it is the
    step of the module with the loss, and `modules` has those of the others, of their devices."""

    plan: int
    step: int
    devices: tuple[str, ...]
    numbers: bytes
    lengths: Lengths | None = None
    columns: tuple[str, ...] = COLUMNS
    modules: dict[str, Step] = msgspec.field(default_factory=dict)

    @classmethod
    def gathered(cls, plan: int, step: int, devices: tuple[str, ...], rows: Sequence[Row]) -> Step:
        """From a row of each device, in their order."""
        return cls(
            plan=plan,
            step=step,
            devices=devices,
            numbers=b"".join([row.numbers for row in rows]),
            lengths=lengths_of([row.sequences for row in rows]),
        )

    @classmethod
    def of(cls, measurements: Iterable[Measurement]) -> Step:
        """From measurements; of several of one device the last one counts. Raises Invalid unless they are of
        one step."""
        found = {each.device: each for each in measurements}
        numbers = sorted({(each.plan, each.step) for each in found.values()})
        if len(numbers) != 1:
            refuse(f"rates: measurements of one step at a time, not of (plan, step) {numbers}")
        ((plan, step),) = numbers
        gathered = cls.gathered(plan, step, tuple(found), [row_of(each) for each in found.values()])
        rows: dict[str, dict[str, Row]] = {}
        for each in found.values():
            for name, module in each.modules.items():
                rows.setdefault(name, {})[each.device] = module_row(module)
        modules = {name: cls.gathered(plan, step, tuple(of), [*of.values()]) for name, of in rows.items()}
        return msgspec.structs.replace(gathered, modules=modules) if modules else gathered

    @classmethod
    def timed(
        cls, plan: int, step: int, devices: tuple[str, ...], seconds: Sequence[float], work: Sequence[float]
    ) -> Step:
        """A step of which only the seconds and the work of each device were measured."""
        nothing = [0.0] * len(devices)
        numbers = np.array((seconds, work, nothing, nothing), "<f8").T.tobytes()
        return cls(plan=plan, step=step, devices=devices, numbers=numbers, columns=STARTS)

    @property
    def table(self) -> Floats:
        """All numbers [devices, `COLUMNS`]; zeros where another release has not kept them."""
        table: Floats = np.frombuffer(self.numbers, "<f8").reshape(len(self.devices), len(self.columns))
        if self.columns == COLUMNS:
            return table
        found = np.zeros((len(self.devices), len(COLUMNS)))
        for place, name in enumerate(COLUMNS):
            if name in self.columns:
                found[:, place] = table[:, self.columns.index(name)]
        return found

    def column(self, name: str) -> Floats:
        """One of `COLUMNS` [devices]."""
        found: Floats = self.table[:, COLUMNS.index(name)]
        return found

    @property
    def rows(self) -> list[tuple[float, float, float, float]]:
        """The values that detection reads, device by device: the numbers of `STARTS`."""
        if self.columns[: len(STARTS)] != STARTS:  # of another release
            return [tuple(row) for row in self.table[:, : len(STARTS)].tolist()]
        size = 8 * len(self.columns)
        return [_START.unpack_from(self.numbers, at) for at in range(0, len(self.numbers), size)]


#: Of the reports of a step: of 8,000 devices a hundred are in each.
BUCKETS = 79


class Reported(Value, frozen=True, kw_only=True):
    """The reports of some members about a step, by bucket and device.

    In buckets, since a report makes another of these values, and is not to copy what thousands of others said.
    Each report is packed at once, so that the last one finds little left to do.
    """

    #: packed reports, by a hash of the device and by device
    buckets: dict[int, dict[str, Row]] = msgspec.field(default_factory=dict)
    columns: tuple[str, ...] = COLUMNS  # names of the values of a row
    modules: dict[str, Reported] = msgspec.field(default_factory=dict)  # of items: of their devices alone

    def after(self, measurement: Measurement) -> Reported:
        """With one more; a later word of a device takes the place of its earlier one."""
        if self.columns != COLUMNS:  # a recording of another release has these
            return NONE_REPORTED.after(measurement)
        after = self._with(measurement.device, row_of(measurement))
        if not measurement.modules:
            return after
        modules = dict(self.modules)
        for name, module in measurement.modules.items():
            modules[name] = modules.get(name, NONE_REPORTED)._with(measurement.device, module_row(module))
        return msgspec.structs.replace(after, modules=modules)

    def _with(self, device: str, row: Row) -> Reported:
        bucket = zlib.crc32(device.encode()) % BUCKETS
        held = {**self.buckets.get(bucket, {}), device: row}
        return Reported(buckets={**self.buckets, bucket: held}, modules=self.modules)

    @property
    def count(self) -> int:
        """The devices that have reported. Not a field: a recording of another release would bring one that its
        other fields do not bear out here."""
        return sum(map(len, self.buckets.values()))

    def whole(self, plan: int, step: int, devices: tuple[str, ...]) -> Step:
        """The step, once all of these devices have reported it."""
        rows = self._rows
        whole = Step.gathered(plan, step, devices, [*map(rows.__getitem__, devices)])
        if not self.modules:
            return whole
        modules = {}
        for name, reported in self.modules.items():
            known = reported._rows
            there = tuple(device for device in devices if device in known)
            modules[name] = Step.gathered(plan, step, there, [*map(known.__getitem__, there)])
        return msgspec.structs.replace(whole, modules=modules)

    @property
    def _rows(self) -> dict[str, Row]:
        rows: dict[str, Row] = {}
        for held in self.buckets.values():
            rows |= held
        return rows


NONE_REPORTED = Reported()
