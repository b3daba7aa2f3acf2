"""Faults, joins and outages: how fast they are known, what the survivors feel, what is lost; and torchrun and
torchft through the same.

make bench NAME=faults                                   # all but the evictions, 60 injections each
make bench NAME=faults ARGS='--only evictions'           # half an hour on a machine twice oversubscribed
make bench NAME=faults ARGS='--only workers torchrun'    # some parts; the results keep the others as they are

All is real: processes, gloo, an etcd of three members, kills by SIGKILL. Only the length of a step is emulated,
so that two cores can carry the job. Deaths of one kind fall on one job, whose workers come back each time. A
stall is the time between two steps of a survivor, less one normal step.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import _live_faults  # noqa: E402
import _loaded  # noqa: E402
import _peers  # noqa: E402
import _planted  # noqa: E402
import _soaks  # noqa: E402
from _frame import PRODUCT, Part, Results, run  # noqa: E402
from _injected import INJECTED, KINDS, injected  # noqa: E402
from _injections import (  # noqa: E402
    Lost,
    Seen,
    calm_gaps,
    coordinator_outages,
    died,
    etcd_outages,
    fenced,
    separated,
    training,
)
from _results import RESULTS, Row, row  # noqa: E402
from _spread import spread  # noqa: E402

from elasticd.testing.network_namespaces import refusal  # noqa: E402
from tests.runtime import gang, test_groups_leaks  # noqa: E402

NODES = ("n0", "n1", "n2")
FOUR = (*NODES, "n3")
#: Bytes of an emulated device that cannot hold the whole model (1.28 MB with its optimizer's state), but its
#: share of it twice; seconds from node to node, said to be so many that tensor parallelism does not pay.
SMALL, FAR = 1_200_000, 0.01
#: Seconds that etcd is down, each time.
DOWN = 2.0
#: Bytes a second between two processes of this kind of machine (FACTS: 64 KiB and more).
BANDWIDTH = 1e9


def workers(count: int) -> Iterator[Row]:
    """One of three data-parallel replicas dies, and comes back."""
    with training(NODES) as job:
        seen = job.endure(count, job.kill_worker, died)
        yield from spread("worker death to coordinator's knowledge", seen.known, 0.2)
        yield from _stall("survivors' stall, one data-parallel replica lost, default settings", seen, 0.6)
        yield from _joins(seen)
        yield from _lost("one data-parallel replica lost", job.lost())


def layouts(count: int) -> Iterator[Row]:
    """One of four devices dies that are two pipelines of two: those that are left become one pipeline. Where
    that is the other pipeline as it was, no layout changes, and the death is left out."""
    with training(FOUR, memory=SMALL, latency=FAR) as job:
        plan = job.fleet.shown()["plan"]
        seen = job.endure(count, job.kill_worker, died, moving=True)
        name = "survivors' stall, TP/PP layout change"
        yield row(f"{name}: the plan before", plan["reason"], "")
        enough = seen.injected >= count
        yield row(f"{name}: deaths with one", seen.injected, "", goal=f">= {count}", met=enough)
        yield row(f"{name}: deaths without one, left out", job.injections - seen.injected, "")
        yield from _lost("TP/PP layout change", job.lost())
        if not seen.injected:
            return
        moved = statistics.fmean(seen.moved_bytes)
        yield row(f"{name}: the plan after", seen.reasons[-1], "")
        yield row(f"{name}: bytes moved, least", min(seen.moved_bytes), "bytes")
        yield row(f"{name}: bytes moved, mean", moved, "bytes")
        yield from _stall(name, seen, 2.0 + moved / BANDWIDTH, f"<= 2 s + {moved / BANDWIDTH:.3f} s of bytes")


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
    with training(NODES) as job:
        seen = job.endure(count, job.freeze_worker, fenced, revive=job.thaw_worker)
        step = statistics.median(seen.normal)
        yield from spread(name, seen.known, max(1.2, 5 * step), f"<= max(1.2 s, 5 steps of {step:.3f} s)")
        title = f"{name}: the right rank named and no other, of {seen.injected}"
        yield row(title, seen.right, "", goal=f"{seen.injected}", met=seen.right == seen.injected)
        yield from _stall("survivors' stall, hang", seen, None)
        yield from _lost("hang", job.lost())


def stuck(count: int) -> Iterator[Row]:
    """A worker's main thread hangs in its loss, for a while; it comes again when that is over."""
    for how, words in (("sleep", "a sleep"), ("lock", "C code that keeps the interpreter's lock")):
        name = f"hang in the loss ({words}) to coordinator's knowledge"
        with _planted.planted(NODES) as job:
            seen = job.endure(count, _planted.Planting(job, "loss", how, _planted.HANG), fenced)
            step = statistics.median(seen.normal)
            yield from spread(name, seen.known, 2 * step + 2, f"<= 2 steps of {step:.3f} s + 2 s")
            title = f"{name}: the right rank named and no other, of {seen.injected}"
            yield row(title, seen.right, "", goal=f"{seen.injected}", met=seen.right == seen.injected)
            yield from _stall(f"survivors' stall, hang in the loss ({words})", seen, None)
            yield from _lost(f"hang in the loss ({words})", job.lost())


def between(count: int) -> Iterator[Row]:
    """The script's own code takes a minute between two steps."""
    yield from _planted.false_rows(NODES, max(1, count // 10))


def raises(count: int) -> Iterator[Row]:
    """The user's code raises in the loss of one device, once; its torchrun starts another worker."""
    with _planted.planted(NODES) as job:
        seen = job.endure(count, _planted.Planting(job, "loss", "raise"), _planted.raised)
        yield from spread("exception in the user's code to coordinator's knowledge", seen.known, None)
        yield from _stall("survivors' stall, exception in the user's code on one device", seen, None)
        yield from _lost("exception in the user's code on one device", job.lost())


def soaks(count: int, path: Path = _soaks.RUNS) -> Iterator[Row]:
    """Faults of all kinds at random (`make soak`); those of earlier runs count while the code is the same."""
    yield from _soaks.rows(count, path)


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
        title = f"{name}: {what} lost or counted twice in {count} injections, {found.made} steps"
        yield row(title, number, what, goal="0", met=number == 0)
    yield row(f"{name}: largest relative difference of a loss from the undisturbed run", found.apart, "")


def regroups(count: int) -> Iterator[Row]:
    """What a process holds after many regroups, every second of which breaks collectives of megabytes off, in
    units of what it held after a tenth of them: the least of three looks, for a look may find tensors of 8 MiB
    that are being freed. The test that many regroups leak nothing does the same."""
    many = 500 * count // COUNT
    early, late = max(4, many // 10), max(8, many)
    around, after = range(early - 2, early + 1), range(late - 2, late + 1)
    given = gang.run(
        test_groups_leaks.__file__, "regroup", test_groups_leaks.NAMES, (late, (*around, *after)), seconds=3600
    )
    looks = [
        {
            last: _least([found["looks"][at] for at in listed])
            for last, listed in ((early, around), (late, after))
        }
        for found in given.values()
    ]
    for what, name, goal in (
        ("descriptors", "descriptors", True),
        ("resident", "memory", True),
        ("held", "memory, without what malloc keeps for later", False),
    ):
        ratio = max(look[late][what] / look[early][what] for look in looks)
        title = f"{name} after {late} regroups, over those after {early}, the worst of {len(looks)} ranks"
        goals: dict[str, Any] = {"goal": "<= 1.1", "met": ratio <= 1.1} if goal else {}
        yield row(title, ratio, "", **goals)
        yield row(f"{name} after {late} regroups, most", max(look[late][what] for look in looks), _unit(what))


def _least(looks: Sequence[dict[str, int]]) -> dict[str, int]:
    return {what: min(look[what] for look in looks) for what in looks[0]}


def _unit(what: str) -> str:
    return "" if what == "descriptors" else "MiB"


def evictions(minutes: float = 30.0) -> Iterator[Row]:
    """Rows of a machine under load on which nobody may be fenced off."""
    yield from _loaded.rows(minutes, NODES)


def injected_rows() -> Iterator[Row]:
    """The faults of all parts together, as the results have them."""
    yield from injected(Results(RESULTS / "faults.json", PARTS).all_rows)


#: The parts, by the faults of each kind that they inject.
_INJECTING: dict[str, Callable[[int], Iterator[Row]]] = {
    "workers": workers,
    "layouts": layouts,
    "nodes": nodes,
    "cuts": cuts,
    "hangs": hangs,
    "stuck": stuck,
    "between": between,
    "raises": raises,
    **{f"live-{kind}": partial(_live_faults.stall_rows, kind) for kind in _live_faults.TITLES},
    "outages": outages,
    "regroups": regroups,
    "torchrun": _peers.torchrun_rows,
    "torchft": _peers.torchft_rows,
}
COUNT, COUNT_OF_PEERS = 60, 20


def _noting(name: str, count: int) -> Iterator[Row]:
    """The rows of a part, and the number of its faults."""
    yield from _INJECTING[name](count)
    if name in KINDS:
        yield row(f"{INJECTED}: {name}", KINDS[name] * count, "")


def _part(name: str) -> Part:
    peer = name in ("torchrun", "torchft")
    rows = partial(_noting, name, count=COUNT_OF_PEERS if peer else COUNT)
    return Part(rows, ("benchmarks/_peers.py",) if peer else (*PRODUCT, "tests/soak"), {"count": 1})


PARTS = {
    **{name: _part(name) for name in _INJECTING},
    "soaks": Part(
        partial(soaks, count=COUNT),
        _soaks.MEASURED,
        {"count": 1, "path": Path(gettempdir()) / "elasticd-benchmarks" / "soaks.jsonl"},
    ),
    "evictions": Part(evictions, PRODUCT, {"minutes": 0.2}),
    "all": Part(injected_rows, PRODUCT),
}

if __name__ == "__main__":
    sys.exit(run("faults", __doc__, PARTS))
