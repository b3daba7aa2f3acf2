"""Kills of the workers of an `elasticd.live` job on four devices: the survivors' stall, and whether a step or a
sample is lost."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import _live_worker
import msgspec
from _injections import Seen, died, training
from _results import Row, row
from _spread import spread
from elasticd_planner.spec.batch import Sampler

NODES = ("n0", "n1", "n2", "n3")
#: Seconds of compute that are slept in each step, as those of the peers.
COMPUTE = 0.02
#: Seconds of a stall, at most: where every rank has the whole state, and where shards are made anew.
MOST_STALL = {"ddp": 0.25, "hsdp": 0.4, "fsdp": 0.4}
#: Seconds that the others stand at a join, at most.
MOST_JOIN = 0.5
TITLES = {"ddp": "DDP", "hsdp": "HSDP 2 x 2", "fsdp": "FSDP"}


class Line(msgspec.Struct, frozen=True):
    """A step that a worker made: seconds of CLOCK_MONOTONIC."""

    step: int
    plan: int
    samples: list[int]
    began: float
    time: float


def stall_rows(kind: str, count: int) -> Iterator[Row]:
    """One of four dies: the stall alone, as beside the peers'. First its launcher dies with it, and is started
    again when steps have been made. Then the launcher starts another worker at once, whose import takes
    one of the cores from the survivors."""
    yield from _stalls(kind, "", *_endured(kind, count, alone=True))
    beside = max(1, count // 4)
    yield from _stalls(kind, ", beside a worker that starts", *_endured(kind, beside, alone=False))


def all_rows(kind: str, count: int) -> Iterator[Row]:
    """The stall, the devices that stay, steps and samples, and the pause of a join."""
    seen, ledgers = _endured(kind, count, alone=False)
    title = f"elasticd.live, {TITLES[kind]}, 4 ranks"
    yield from _stalls(kind, ", beside a worker that starts", seen, ledgers)
    if smaller := _smaller_plans(ledgers):
        kept = min(_members(ledgers, number) for number in smaller)
        yield row(f"{title}: devices kept after one death, least", kept, "", goal=">= 3", met=kept >= 3)
    steps, samples, made = _lost(ledgers)
    for what, number in (("steps", steps), ("samples", samples)):
        name = f"{title}: {what} lost or counted twice in {seen.injected} deaths, {made} steps"
        yield row(name, number, what, goal="0", met=number == 0)
    if seen.joins:
        yield from spread(f"{title}: seconds that the others stand when a device joins", seen.joins, MOST_JOIN)


def _endured(kind: str, count: int, *, alone: bool) -> tuple[Seen, Mapping[str, list[Line]]]:
    """`alone`: nothing starts beside the survivors."""
    script = Path(_live_worker.__file__)
    with training(NODES, script=script, kind=kind, seconds=COMPUTE) as job:
        if alone:
            seen = job.endure(count, job.kill_worker_and_launcher, died, revive=job.launch)
        else:
            seen = job.endure(count, job.kill_worker, died)
        paths = job.fleet.folder.glob("ledger-*")
        return seen, {path.name: _lines(path) for path in paths}


def _lines(path: Path) -> list[Line]:
    """Without one that is half written."""
    whole = path.read_bytes().split(b"\n")[:-1]
    return [msgspec.json.decode(line, type=Line) for line in whole]


def _stalls(kind: str, beside: str, seen: Seen, ledgers: Mapping[str, Sequence[Line]]) -> Iterator[Row]:
    """The goal holds where nothing starts `beside` the survivors."""
    name = f"elasticd.live, {TITLES[kind]}, 4 ranks{beside}: kill to the next step that counts, less one step"
    most = None if beside else MOST_STALL[kind]
    if not seen.stalls_since_fault:
        text = "not measured: devices came back within three steps of each death"
        yield row(name, text, "", goal=None if beside else f"<= {most} s", met=None if beside else False)
        return
    yield from spread(name, seen.stalls_since_fault, most)
    if parts := [*_parts(ledgers)]:
        idle, first = (statistics.median(part) for part in zip(*parts, strict=True))
        yield row(f"{name}: from the last step that counts to the next one's first line, median", idle, "s")
        yield row(f"{name}: the first step under the new plan less a usual one, median", first, "s")
        yield row(f"{name}: a usual step, median", statistics.median(seen.normal), "s")


def _parts(ledgers: Mapping[str, Sequence[Line]]) -> Iterator[tuple[float, float]]:
    """Of each plan of fewer devices and each of its workers: seconds between the last step before and the first
    line of the first one under it, and those that this one took longer than a usual step."""
    smaller = _smaller_plans(ledgers)
    for lines in ledgers.values():
        seconds = defaultdict[int, list[float]](list)
        for line in lines:
            seconds[line.plan].append(line.time - line.began)
        for last, first in itertools.pairwise(lines):
            if first.plan != last.plan and first.plan in smaller and len(seconds[first.plan]) > 2:
                usual = min(statistics.median(seconds[plan]) for plan in (last.plan, first.plan))
                yield first.began - last.time, first.time - first.began - usual


def _smaller_plans(ledgers: Mapping[str, Sequence[Line]]) -> set[int]:
    """The numbers of plans of fewer devices than there are."""
    numbers = {line.plan for lines in ledgers.values() for line in lines}
    return {number for number in numbers if _members(ledgers, number) < len(NODES)}


def _members(ledgers: Mapping[str, Sequence[Line]], number: int) -> int:
    return sum(any(line.plan == number for line in lines) for lines in ledgers.values())


def _lost(ledgers: Mapping[str, Sequence[Line]]) -> tuple[int, int, int]:
    """Steps that nobody made in the history that survives, samples of it that are not those due, and its steps.
    A step that was made again counts as its newest plan made it."""
    newest: dict[int, int] = {}
    for lines in ledgers.values():
        for line in lines:
            newest[line.step] = max(newest.get(line.step, 0), line.plan)
    # Of the last step some ranks may not have written their line yet.
    made = max(newest)
    taken = defaultdict[int, dict[tuple[int, ...], None]](dict)
    for lines in ledgers.values():
        for line in lines:
            if line.plan == newest[line.step]:
                taken[line.step][tuple(line.samples)] = None
    sampler = Sampler(size=_live_worker.SIZE, global_batch=_live_worker.BATCH, seed=_live_worker.SEED)
    wrong = 0
    for step in range(made):
        given = sorted(index for share in taken[step] for index in share)
        wrong += len(set(sampler.samples(step)).symmetric_difference(given)) + len(given) - len({*given})
    return sum(step not in newest for step in range(made)), wrong, made
