"""Detection's knowledge of each device, as values; for many devices as the columns of one array.

Theory of operation. `Devices` is a mapping by name; a device's value is a `DeviceRate`. It keeps none of these
values: it has a table of numbers with a column for each device, and by name what few devices have (single slow
steps, slow times). It makes a value of a column when that is asked for. Nothing changes its table: what follows
from a step is another one.

    row  0            rate (the slowdown)
         1            age, -1 where it is None
         2, 3         offset, and the steps that it was learned in
         4            how many residuals are kept
         5 to 7       CUSUM state for a shift up: total, clear, since
         8 to 10      CUSUM state for a shift down
         11 to last   residuals, the newest in the last row, zeros before the first

The devices of the last step come first, in the order of that step, so that the next one finds them in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from elasticd_planner.detection.cusum import NONE, CusumState
from elasticd_planner.detection.slowness_history import Episode
from elasticd_planner.numeric import Floats
from elasticd_planner.spec.cluster import NORMAL
from elasticd_planner.value import Value

T = TypeVar("T")

RATE, AGE, OFFSET, SEEN, COUNT = range(5)
UP, DOWN = slice(5, 8), slice(8, 11)
RESIDUALS = 11


class DeviceRate(Value, frozen=True, kw_only=True):
    """Detection's knowledge of one device."""

    rate: float = NORMAL  # slowdown: 1.0 is normal, 2.0 takes twice as long
    residuals: tuple[float, ...] = ()  # logarithms of cost over the fleet's cost, of the last steps
    cusum_up: CusumState = NONE  # evidence that it has become slower
    cusum_down: CusumState = NONE  # evidence that it has become faster
    age: int | None = None  # steps since the slowdown last changed; None: so many that it needs no correction
    offset: float = 0.0  # the device's own lasting residual while it is normal
    seen: int = 0  # steps that the offset was learned in
    spikes: tuple[int, ...] = ()  # single slow steps, by their numbers
    episodes: tuple[Episode, ...] = ()  # when it was slow


class Devices(Mapping[str, DeviceRate]):
    """By name what is known of each device. A value: nothing changes it, and equal ones are equal."""

    __slots__ = ("_places", "episodes", "names", "spikes", "table")

    def __init__(
        self,
        names: tuple[str, ...],
        table: Floats,  # [11 + residuals kept, devices]
        spikes: Mapping[str, tuple[int, ...]],  # of the devices that had any
        episodes: Mapping[str, tuple[Episode, ...]],  # of the devices that had any
        places: dict[str, int] | None = None,  # the columns by name, where they are known
    ) -> None:
        table.flags.writeable = False
        self.names, self.table, self.spikes, self.episodes = names, table, spikes, episodes
        self._places = places

    @classmethod
    def of(cls, known: Mapping[str, DeviceRate]) -> Devices:
        """From one value for each device."""
        return NOBODY.replaced(known)

    def __getitem__(self, name: str) -> DeviceRate:
        return self.at(self.places[name])

    def at(self, place: int) -> DeviceRate:
        """The device of this column."""
        name, column = self.names[place], self.table[:, place].tolist()
        rate, age, offset, seen, count = column[:5]
        return DeviceRate(
            rate=rate,
            residuals=tuple(column[len(column) - int(count) :]),
            cusum_up=_evidence(column[UP]),
            cusum_down=_evidence(column[DOWN]),
            age=None if age < 0 else int(age),
            offset=offset,
            seen=int(seen),
            spikes=self.spikes.get(name, ()),
            episodes=self.episodes.get(name, ()),
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.places

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Devices) and self.names == other.names and self.table.shape == other.table.shape:
            same = self.spikes == other.spikes and self.episodes == other.episodes
            return same and np.array_equal(self.table, other.table)
        return isinstance(other, Mapping) and dict(self) == dict(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Devices({dict(self)!r})"

    @property
    def places(self) -> dict[str, int]:
        """The column of each device."""
        if self._places is None:
            self._places = {name: place for place, name in enumerate(self.names)}
        return self._places

    @property
    def slow(self) -> dict[str, float]:
        """The rates that are not normal."""
        rates = self.table[RATE]
        return {self.names[i]: float(rates[i]) for i in np.flatnonzero(rates != NORMAL).tolist()}

    def led_by(self, names: tuple[str, ...]) -> Devices:
        """The same with the columns of these devices first; new ones are normal."""
        if self.names is names or self.names[: len(names)] == names:
            return self
        places, first = self.places, {*names}
        order = [places.get(name, -1) for name in names]
        rest = [place for place, name in enumerate(self.names) if name not in first]
        new = [i for i, place in enumerate(order) if place < 0]
        table = self.table[:, order + rest] if self.names else _normal(len(names), len(self.table))
        table[:, new] = _normal(len(new), len(table))
        return Devices((*names, *(self.names[i] for i in rest)), table, self.spikes, self.episodes)

    def replaced(self, known: Mapping[str, DeviceRate]) -> Devices:
        """With other values for some devices, or with more devices."""
        if not known:
            return self
        new = [name for name in known if name not in self.places]
        most = max(len(each.residuals) for each in known.values())
        width = max(most, len(self.table) - RESIDUALS)
        table = np.concatenate((_widened(self.table, width), _normal(len(new), RESIDUALS + width)), axis=1)
        names = (*self.names, *new)
        places = {**self.places, **{name: len(self.names) + i for i, name in enumerate(new)}}
        table[:, [places[name] for name in known]] = np.array(
            [_column(each, width) for each in known.values()]
        ).T
        spikes = _replaced(self.spikes, {name: each.spikes for name, each in known.items()})
        episodes = _replaced(self.episodes, {name: each.episodes for name, each in known.items()})
        return Devices(names, table, spikes, episodes, places)

    def longer(self, residuals: Floats, kept: int) -> Floats:
        """The table with one more residual of each of the first devices, of which so many are kept."""
        table, width = self.table, len(residuals)
        others, rows = table[:, width:], len(table) - RESIDUALS
        count = np.minimum(table[COUNT, :width] + 1, kept)
        most = max(int(count.max()), int(others[COUNT].max(initial=0)))
        after = np.zeros((RESIDUALS + most, len(self.names)))
        after[:RESIDUALS] = table[:RESIDUALS]
        after[COUNT, :width], after[-1, :width] = count, residuals
        older, same = min(rows, kept - 1, most - 1), min(rows, most)
        after[-1 - older : -1, :width] = table[len(table) - older :, :width]
        after[len(after) - same :, width:] = others[len(table) - same :]
        return after

    def stepped(self, table: Floats, spikes: Mapping[str, tuple[int, ...]]) -> Devices:
        """The same devices after a step, with the single slow steps of those that had a new one."""
        return Devices(self.names, table, _replaced(self.spikes, spikes), self.episodes, self._places)

    def without(self, name: str) -> Devices:
        """Nothing is known of a device any more."""
        place = self.places.get(name)
        if place is None:
            return self
        spikes, episodes = _replaced(self.spikes, {name: ()}), _replaced(self.episodes, {name: ()})
        names = (*self.names[:place], *self.names[place + 1 :])
        return Devices(names, np.delete(self.table, place, axis=1), spikes, episodes)


def replaced(known: Mapping[str, DeviceRate], changes: Mapping[str, DeviceRate]) -> Mapping[str, DeviceRate]:
    """Returns the table with some devices' rows replaced."""
    return known.replaced(changes) if isinstance(known, Devices) else {**known, **changes}


def without(known: Mapping[str, DeviceRate], name: str) -> Mapping[str, DeviceRate]:
    """Returns the table without some devices."""
    if isinstance(known, Devices):
        return known.without(name)
    return {other: each for other, each in known.items() if other != name}


def as_mapping(value: Any) -> Any:
    """`enc_hook` of msgspec for what has a `Devices` in it: its JSON is that of a mapping."""
    if isinstance(value, Devices):
        return dict(value)
    raise NotImplementedError(f"{type(value).__name__} has no JSON")


def _normal(devices: int, rows: int) -> Floats:
    """The columns of devices of which nothing is known."""
    table = np.zeros((rows, devices))
    table[RATE], table[AGE] = NORMAL, -1
    return table


def _widened(table: Floats, width: int) -> Floats:
    """The same table with room for so many residuals of each device; no less than it has."""
    more = RESIDUALS + width - len(table)
    return (
        np.concatenate((table[:RESIDUALS], np.zeros((more, table.shape[1])), table[RESIDUALS:]))
        if more
        else table
    )


def _column(known: DeviceRate, width: int) -> list[float]:
    count = len(known.residuals)
    return [
        *(known.rate, -1 if known.age is None else known.age, known.offset, known.seen, count),
        *(known.cusum_up.total, known.cusum_up.clear, known.cusum_up.since),
        *(known.cusum_down.total, known.cusum_down.clear, known.cusum_down.since),
        *(0.0,) * (width - count),
        *known.residuals,
    ]


def _replaced(
    before: Mapping[str, tuple[T, ...]], new: Mapping[str, tuple[T, ...]]
) -> Mapping[str, tuple[T, ...]]:
    """With these in the place of what was; who has none of them is not named."""
    if all(before.get(name, ()) == given for name, given in new.items()):
        return before
    return {name: given for name, given in {**before, **new}.items() if given}


def _evidence(numbers: Sequence[float]) -> CusumState:
    total, clear, since = numbers
    return CusumState(total=total, clear=int(clear), since=int(since)) if since else NONE


#: Nothing is known of any device.
NOBODY = Devices((), np.zeros((RESIDUALS, 0)), {}, {})
