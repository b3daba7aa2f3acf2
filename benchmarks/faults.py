"""Faults, joins and outages: how fast they are known, what the survivors feel, what is lost; and torchrun and
torchft through the same.

make bench NAME=faults                                   # 60 injections each, within 25 minutes
make bench NAME=faults ARGS='--injections 3'             # a short look
make bench NAME=faults ARGS='--evictions 30'             # and half an hour on a machine twice oversubscribed
make bench NAME=faults ARGS='--only workers peers'       # parts; the rows are printed, the results not replaced

All is real: processes, gloo, an etcd of three members, kills by SIGKILL. Only the length of a step is emulated,
so that two cores can carry the job. Deaths of one kind fall on one job, whose workers come back each time. A
stall is the time between two steps of a survivor, less one normal step.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import gettempdir

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import _peers  # noqa: E402
from _injections import (  # noqa: E402
    Lost,
    Seen,
    Trained,
    calm_gaps,
    coordinator_outages,
    died,
    etcd_outages,
    fenced,
    last_id,
    separated,
    training,
)
from _namespaces import refusal  # noqa: E402
from _results import RESULTS, Row, finish, row  # noqa: E402

from elasticd import messages  # noqa: E402
from elasticd.offspring import ending_with_us  # noqa: E402

NODES = ("n0", "n1", "n2")
FOUR = (*NODES, "n3")
#: Bytes of an emulated device that cannot hold the whole model (1.28 MB with its optimizer's state).
SMALL = 1_000_000
#: Seconds that etcd is down, each time.
DOWN = 2.0
#: Bytes a second between two processes of this kind of machine (FACTS: 64 KiB and more).
BANDWIDTH = 1e9


def p95(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[math.ceil(0.95 * len(ordered)) - 1]


def spread(name: str, values: Sequence[float], most: float | None = None, goal: str = "") -> Iterator[Row]:
    """Median, p95 and maximum in seconds; `most` is what p95 must not exceed."""
    yield row(f"{name}, median", statistics.median(values), "s")
    high = p95(values)
    text = goal or f"<= {most} s"
    met = None if most is None else high <= most
    yield row(f"{name}, p95 of {len(values)}", high, "s", goal=text if most is not None else None, met=met)
    yield row(f"{name}, maximum", max(values), "s")


def workers(count: int) -> Iterator[Row]:
    """One of three data-parallel replicas dies, and comes back."""
    with training(NODES) as job:
        seen = job.endure(count, job.kill_worker, died)
        yield from spread("worker death to coordinator's knowledge", seen.known, 0.2)
        yield from _stall("survivors' stall, one data-parallel replica lost, default settings", seen, 0.6)
        yield from _joins(seen)
        yield from _lost("one data-parallel replica lost", job.lost())


def layouts(count: int) -> Iterator[Row]:
    """One of four devices dies that hold two replicas together: the three that are left cut the model anew."""
    with training(FOUR, memory=SMALL) as job:
        plan = job.fleet.job()["plan"]
        seen = job.endure(count, job.kill_worker, died)
        moved = statistics.fmean(seen.moved_bytes)
        name = "survivors' stall, TP/PP layout change"
        yield row(f"{name}: the plan before", plan["reason"], "")
        yield row(f"{name}: bytes moved, mean", moved, "bytes")
        yield from _stall(name, seen, 2.0 + moved / BANDWIDTH, f"<= 2 s + {moved / BANDWIDTH:.3f} s of bytes")
        yield from _lost("TP/PP layout change", job.lost())


def nodes(count: int) -> Iterator[Row]:
    """All processes of a node die at once: agent, launcher, torchrun, worker."""
    with training(NODES) as job:
        seen = job.endure(count, job.kill_node, fenced, revive=job.revive, each=2)
        yield from spread("node gone (all its processes at once) to coordinator's knowledge", seen.known, 1.5)
        yield from _stall("survivors' stall, node gone", seen, None)
        yield from _lost("node gone", job.lost())


def cuts(count: int) -> Iterator[Row]:
    """The same where no connection is reset: a node without power."""
    name = "node gone (its network cut as well) to coordinator's knowledge"
    if why := refusal():
        yield row(name, f"not measured: {why}", "")
        return
    with separated(NODES) as (job, spaces):

        def vanish(node: str) -> float:
            spaces.cut(node)
            return job.kill_node(node)

        def revive(node: str) -> None:
            spaces.heal(node)
            job.revive(node)

        seen = job.endure(count, vanish, fenced, revive=revive, each=2)
        yield from spread(name, seen.known, 1.5)
        yield from _stall("survivors' stall, node gone and its network cut", seen, None)
        yield from _lost("node gone and its network cut", job.lost())


def hangs(count: int) -> Iterator[Row]:
    """A worker is frozen, and thawed once it is fenced off."""
    name = "hang (SIGSTOP) to coordinator's knowledge"
    if not hasattr(messages, "Ping"):
        yield row(name, "not measured: agents do not ping their workers yet", "")
        return
    with training(NODES) as job:
        seen = job.endure(count, job.freeze_worker, fenced, revive=job.thaw_worker)
        step = statistics.median(seen.normal)
        yield from spread(name, seen.known, max(1.5, 5 * step), "<= max(1.5 s, 5 steps)")
        yield row(f"{name}: the right rank named", f"{seen.injected} of {seen.injected}", "")
        yield from _lost("hang", job.lost())


def outages(count: int) -> Iterator[Row]:
    """The leading coordinator, and all of etcd, die again and again."""
    with training(NODES) as job:
        calm = calm_gaps(job, max(5, count // 4))
        affected = max(calm)
        takeovers, waits = coordinator_outages(job, count)
        yield row("longest step while nothing happens, maximum", affected, "s")
        yield from spread("coordinator outage: time to a new leader", takeovers, 3.0)
        yield from _affected("coordinator outage", waits, affected)
        waits = etcd_outages(job, count, DOWN)
        yield from _affected(f"etcd outage of {DOWN:g} s", waits, affected)
        yield from _lost("outages", job.lost(), 2 * count)


def _affected(name: str, waits: Sequence[float], calm: float) -> Iterator[Row]:
    """A step counts as affected where it took half a second longer than any of the calm."""
    yield row(f"{name}: longest step, maximum of {len(waits)}", max(waits), "s")
    steps = sum(wait > calm + 0.5 for wait in waits)
    yield row(f"{name}: steps affected", steps, "steps", goal="0", met=steps == 0)


def evictions(minutes: float) -> Iterator[Row]:
    """Twice as many busy processes as cores beside a job of three workers."""
    busy = [
        subprocess.Popen(ending_with_us([sys.executable, "-c", "while True: pass"]))
        for _ in range(2 * len(os.sched_getaffinity(0)))
    ]
    try:
        with training(NODES) as job:
            yield from _evictions(job, minutes)
    finally:
        for process in busy:
            process.kill()
            process.wait()


def _evictions(job: Trained, minutes: float) -> Iterator[Row]:
    end, largest, last = time.monotonic() + 60 * minutes, 0.0, -1
    came: float | None = None
    with job.fleet.api() as api:
        mark = last_id(api)
        while time.monotonic() < end:
            time.sleep(5.0)
            for step in api.steps("job", last).steps:
                largest = max(largest, step.time - came) if came is not None else largest
                came, last = step.time, step.step
        false = [
            event.text for event in api.events(mark) if event.kind in ("fenced", "worker_lost", "node_down")
        ]
    name = f"false evictions in {minutes:g} minutes, machine twice oversubscribed"
    yield row(name, len(false), "", goal="0", met=not false)
    yield row("oversubscribed: largest gap between reports of steps at the coordinator", largest, "s")
    for text in false[:5]:
        print(f"evicted: {text}")


def _stall(name: str, seen: Seen, most: float | None, goal: str = "") -> Iterator[Row]:
    """With the step that is made again, which the goal allows."""
    step = statistics.median(seen.normal)
    allowed = None if most is None else most + step
    text = (goal or f"<= {most} s") + f" + the step repeated ({step:.3f} s)"
    yield from spread(name, seen.stalls, allowed, text)


def _joins(seen: Seen) -> Iterator[Row]:
    if not seen.joins:
        yield row("survivors' pause when a node joins", "not measured: no join was seen", "")
        return
    step, moved = statistics.median(seen.normal), statistics.fmean(seen.join_bytes)
    goal = f"<= 1 step ({step:.3f} s) + {moved / BANDWIDTH:.3f} s of bytes"
    yield from spread("survivors' pause when a node joins", seen.joins, step + moved / BANDWIDTH, goal)


def _lost(name: str, found: Lost, injections: int | None = None) -> Iterator[Row]:
    count = found.injections if injections is None else injections
    for what, number in (("steps", found.steps), ("samples", found.samples)):
        title = f"{name}: {what} lost or counted twice in {count} injections"
        yield row(title, number, what, goal="0", met=number == 0)


PARTS: dict[str, Callable[[int], Iterator[Row]]] = {
    "workers": workers,
    "layouts": layouts,
    "nodes": nodes,
    "cuts": cuts,
    "hangs": hangs,
    "outages": outages,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--injections", type=int, default=60, metavar="N", help="of each kind")
    parser.add_argument("--peer-injections", type=int, default=10, metavar="N", help="into each peer")
    parser.add_argument("--evictions", type=float, metavar="MINUTES", help="also under load, for so long")
    parser.add_argument("--only", nargs="+", choices=[*PARTS, "peers", "evictions"], metavar="PART")
    options = parser.parse_args()
    rows: list[Row] = []
    for name, part in PARTS.items():
        if options.only is None or name in options.only:
            rows += _timed(name, lambda part=part: part(options.injections))
    if options.only is None or "peers" in options.only:
        rows += _timed("peers", lambda: _peers.rows(min(options.injections, options.peer_injections)))
    if options.evictions is not None or "evictions" in (options.only or ()):
        minutes = 30.0 if options.evictions is None else options.evictions
        rows += _timed("evictions", lambda: evictions(minutes))
    elif options.only is None:
        rows.append(row("false evictions in 30 minutes", "not measured in this run: --evictions 30", ""))
    whole = options.only is None
    return finish("faults", rows, RESULTS if whole else Path(gettempdir()))


def _timed(name: str, part: Callable[[], Iterator[Row]]) -> list[Row]:
    """The rows of a part; one that breaks off is a goal missed, and the others are measured still."""
    begin, made = time.monotonic(), []
    try:
        for each in part():
            made.append(each)
    except AssertionError as error:
        print(f"{name} broke off: {error}", file=sys.stderr)
        said = str(error).splitlines()[0][:200]
        made.append(row(f"{name}: broke off", said, "", goal="to the end", met=False))
    print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)
    return made


if __name__ == "__main__":
    sys.exit(main())
