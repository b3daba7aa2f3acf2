"""The number of faults that the figures of `faults.py` rest on: those of each part, and those of the soak."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from _results import Row, row
from _soaks import RANDOM

#: Faults that all parts together inject, at least.
INJECTIONS = 1000
#: Kinds of faults in a part, each injected as often as the part says. What is no fault (a join, a pause between
#: two steps, a busy machine) is not counted, nor are the faults of the peers.
KINDS = {
    "workers": 1,
    "layouts": 1,
    "nodes": 1,
    "cuts": 1,
    "hangs": 1,
    "stuck": 2,
    "raises": 1,
    "live-ddp": 1,
    "live-hsdp": 1,
    "live-fsdp": 1,
    "outages": 2,
}
#: The row in which each of them says how many faults it injected begins so.
INJECTED = "faults injected"


def injected(rows: Iterable[Row]) -> Iterator[Row]:
    """The sum over all parts' rows. The soak's faults are those of all its runs that count."""
    faults = sum(
        each.value
        for each in rows
        if (each.name == RANDOM or each.name.startswith(f"{INJECTED}: ")) and isinstance(each.value, int)
    )
    yield row(f"{INJECTED}, of all kinds", faults, "", goal=f">= {INJECTIONS}", met=faults >= INJECTIONS)
