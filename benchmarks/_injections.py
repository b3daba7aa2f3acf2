"""One job on real processes that lives through many faults, and what its workers' ledgers and the coordinator's
journal say of each: when it was known, how long the survivors stood still, what was lost.

Times of the ledgers are of CLOCK_MONOTONIC, those of the journal unix seconds; there is one machine.
"""

from __future__ import annotations

import itertools
import signal
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from _undisturbed import UNDISTURBED

from elasticd.client import ApiClient
from elasticd.records import Keys
from elasticd.testing.network_namespaces import Namespaces, namespaces
from elasticd.testing.waiting import until
from elasticd.wire.event_record import EventRecord
from tests.integration.fleet import CLUSTER, Fleet, Step, job_by
from tests.integration.trio import NAMES, Trio
from tests.soak import ledger
from tests.soak.history import History

FOREVER = 10_000_000
#: Steps that run between two faults.
CALM = 10
#: Seconds between two looks at the job, which take their time from those that are looked at: each time that is
#: measured is of a ledger or of the journal, none of them is of a look.
SELDOM = 0.25


@dataclass
class Seen:
    """Of every injection, in seconds: until the coordinator knew; the stall of each survivor, the gap between
    its steps less one normal step; the same from the fault on, without the part of a step before it that is
    lost; the stall at the rejoin, with the bytes that moved then; the normal step."""

    known: list[float] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    stalls_since_fault: list[float] = field(default_factory=list)
    joins: list[float] = field(default_factory=list)
    join_bytes: list[int] = field(default_factory=list)
    moved_bytes: list[int] = field(default_factory=list)
    #: Why each of the plans is as it is that the survivors went on under.
    reasons: list[str] = field(default_factory=list)
    normal: list[float] = field(default_factory=list)
    injected: int = 0
    #: Of these, how often the coordinator took just those for gone who were.
    right: int = 0


@dataclass(frozen=True)
class Lost:
    """What is wrong after `made` steps: those that were given twice, not at all, or with another outcome, and
    those with other samples. apart: the largest relative difference of a loss from the undisturbed run's."""

    injections: int
    made: int
    steps: int
    samples: int
    apart: float


class Trained:
    """A job on `nodes` nodes of one device each, started by `elasticd run`; two coordinators."""

    def __init__(self, fleet: Fleet, nodes: Sequence[str], options: Mapping[str, Any]) -> None:
        self.fleet, self.nodes, self._options = fleet, tuple(nodes), dict(options)
        self.injections = 0
        self._frozen: dict[str, psutil.Process] = {}

    def start(self, coordinators: int = 2) -> None:
        for index in range(coordinators):
            self.fleet.coordinator(f"c{index}")
        for node in self.nodes:
            self.fleet.agent(node, 1)
        for node in self.nodes:
            self.launch(node)
        with self.fleet.api() as api:
            self.whole(api)
        self.fleet.advanced(3 * CALM)

    def launch(self, node: str) -> None:
        self.fleet.run(node, 1, str(len(self.nodes)), FOREVER, **self._options)

    def binding(self, api: ApiClient) -> dict[str, str]:
        job = job_by(api)
        plan = job.get("plan")
        return dict(plan["binding"]) if plan and job["phase"] == "running" and not job["proposal"] else {}

    def whole(self, api: ApiClient, before: Mapping[str, str] | None = None, came: Iterable[str] = ()) -> None:
        """Waits until every device is in the plan, those that `came` as other incarnations than before."""

        others = {device: (before or {}).get(device) for device in came}

        def there() -> bool:
            now = self.binding(api)
            return len(now) == len(self.nodes) and all(now[device] != others[device] for device in others)

        until(there, self.fleet.said, seconds=240, pause=SELDOM)

    def pid(self, device: str) -> int:
        members = self.fleet.shown()["members"]
        return int(next(member["pid"] for member in members if member["device"] == device))

    def kill_worker(self, node: str) -> float:
        """The unix time of its death."""
        victim = psutil.Process(self.pid(f"{node}/0"))
        now = time.time()
        victim.kill()
        return now

    def kill_worker_and_launcher(self, node: str) -> float:
        """No other worker starts there until `launch`; the unix time."""
        doomed = self.fleet.tree(f"run-{node}")
        now = time.time()
        for process in reversed(doomed):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.fleet.processes.pop(f"run-{node}").wait()
        return now

    def freeze_worker(self, node: str) -> float:
        """The unix time at which it stopped."""
        self._frozen[node] = psutil.Process(self.pid(f"{node}/0"))
        now = time.time()
        self._frozen[node].send_signal(signal.SIGSTOP)
        return now

    def thaw_worker(self, node: str) -> None:
        self._frozen.pop(node).send_signal(signal.SIGCONT)

    def kill_node(self, node: str) -> float:
        """All processes of a node at once; the unix time."""
        doomed = [process for name in (f"run-{node}", node) for process in self.fleet.tree(name)]
        now = time.time()
        for process in doomed:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for name in (f"run-{node}", node):
            self.fleet.processes.pop(name).wait()
        return now

    def revive(self, node: str) -> None:
        self.fleet.agent(node, 1)
        self.launch(node)

    def lost(self) -> Lost:
        """Of the whole job so far: every rule of the soak's checkers, over the workers' ledgers and all that
        was ever written to etcd, beside the undisturbed run."""
        ledgers, history = _ledgers(self.fleet.ledgers()), History(Keys(cluster=CLUSTER))
        history.read(self.fleet.history(0))
        job = history.jobs["job"]
        steps = 1 + max(line.step for ledger in ledgers for line in ledger.lines)
        plain = UNDISTURBED.lines(steps)
        found = ledger.check(ledgers, job.plans, job.fenced_off, steps, UNDISTURBED.samples, plain, over=False)
        samples = sum(" trained on " in one for one in found)
        for one in (wrong := [*history.wrong, *found])[:20]:
            print(f"WRONG: {one}")
        return Lost(
            injections=self.injections,
            made=steps,
            steps=len(wrong) - samples,
            samples=samples,
            apart=ledger.furthest(ledgers, plain),
        )

    # -- one fault after the other ---------------------------------------------------------------------------

    def endure(
        self,
        count: int,
        kill: Callable[[str], float],
        knows: Callable[[EventRecord, str], bool],
        *,
        revive: Callable[[str], None] | None = None,
        each: int = 1,
        moving: bool = False,
    ) -> Seen:
        """`count` faults, `each` of them one after the other before those that are gone come back. `moving`:
        those at which the survivors' plan moved nothing are left out, and up to as many more injected."""
        seen = Seen()
        turn = itertools.cycle(self.nodes)
        most = self.injections + (2 * count if moving else count)
        with self.fleet.api() as api:
            while seen.injected < count and self.injections < most:
                gone, before = [], self.binding(api)
                for _ in range(min(each, count - seen.injected)):
                    gone.append(node := next(turn))
                    mark, since = self._one(api, node, kill, knows, seen, moving)
                for node in gone if revive is not None else ():
                    assert revive is not None
                    revive(node)
                self.whole(api, before, (f"{node}/0" for node in gone))
                self.fleet.advanced(CALM, pause=SELDOM)
                self._rejoined(api, mark, since, seen)
        return seen

    def _one(
        self,
        api: ApiClient,
        node: str,
        kill: Callable[[str], float],
        knows: Callable[[EventRecord, str], bool],
        seen: Seen,
        moving: bool,
    ) -> tuple[int, float]:
        """The id of the event by which the survivors' plan was recorded, and when that was: what is recorded
        later is a device that comes back, perhaps before the survivors' steps have been looked at."""
        mark, since = last_id(api), time.monotonic()
        killed = kill(node)
        known = wait_event(api, mark, lambda event: knows(event, f"{node}/0"), self.fleet)
        recorded = wait_event(api, known.id, lambda event: event.kind == "recorded", self.fleet)
        left = recorded.id, time.monotonic()
        self.fleet.advanced(CALM, pause=SELDOM)
        self.injections += 1
        number, events = recorded.data["number"], api.events(mark)
        moved = bytes_moved(events, number)
        if moving and not moved:
            return left
        seen.injected += 1
        fences = [event.data["gone"] for event in events if event.kind == "fenced"]
        seen.right += all(gone == [f"{node}/0"] for gone in fences)
        seen.known.append(known.time - killed)
        fault = killed - time.time() + time.monotonic()
        for last, first, normal in gaps(self.fleet.ledgers(), number, since):
            seen.stalls.append(first - last - normal)
            seen.stalls_since_fault.append(first - max(last, fault) - normal)
            seen.normal.append(normal)
        seen.moved_bytes.append(moved)
        seen.reasons.append(str((job_by(api).get("plan") or {}).get("reason", "")))
        return left

    def _rejoined(self, api: ApiClient, mark: int, since: float, seen: Seen) -> None:
        """The last plan recorded since: some may have come before it, where two came back one by one."""
        events = api.events(mark)
        for event in events:
            if event.kind == "recorded":
                number = event.data["number"]
                steps = gaps(self.fleet.ledgers(), number, since)
                seen.joins += [first - last - normal for last, first, normal in steps]
                seen.join_bytes.append(bytes_moved(events, number))


def gaps(ledgers: Mapping[str, list[Step]], number: int, since: float) -> Iterator[tuple[float, float, float]]:
    """Of each worker that ran under the plan before `number` and under it: the time of its last step before and
    that of its first under it, and the seconds of a normal step: the lesser of the medians under both plans,
    since a process that comes back loads its libraries beside steps. `since`: when the fault came."""
    before = max((step.plan for own in ledgers.values() for step in own if step.plan < number), default=0)
    for own in ledgers.values():
        first = next((i for i, step in enumerate(own) if step.plan == number), None)
        if not first or own[0].time > since or own[first - 1].plan != before:
            continue
        under = [[step.time for step in own if step.plan == plan] for plan in (before, number)]
        if len(under[1]) > 2:
            normal = [
                statistics.median(b - a for a, b in itertools.pairwise(times)) for times in under if times[2:]
            ]
            yield own[first - 1].time, under[1][0], min(normal)


def _ledgers(found: Mapping[str, list[Step]]) -> list[ledger.Ledger]:
    """As the soak's checker takes them."""
    made = []
    for name, steps in found.items():
        device, _, pid = name.rpartition("-")
        lines = tuple(
            ledger.Line(step=step.step, loss=step.loss, samples=tuple(step.samples), plan=step.plan)
            for step in steps
        )
        made.append(ledger.Ledger(device=device.replace(":", "/"), pid=int(pid), lines=lines))
    return made


def bytes_moved(events: Iterable[EventRecord], number: int) -> int:
    """What the members of a plan lacked, and got."""
    swaps = [event.data for event in events if event.kind == "swapped" and event.data.get("number") == number]
    return sum(int(data.get("bytes_lacking", 0)) for data in swaps)


def last_id(api: ApiClient) -> int:
    events = api.events()
    return events[-1].id if events else 0


def wait_event(api: ApiClient, after: int, wanted: Callable[[EventRecord], bool], fleet: Fleet) -> EventRecord:
    """The first such event behind one."""
    return until(  # type: ignore[return-value]
        lambda: next((e for e in api.events(after) if wanted(e)), None), fleet.said, pause=SELDOM
    )


def died(event: EventRecord, device: str) -> bool:
    """The coordinator knows of a worker's death."""
    return event.kind == "worker_lost" and event.data.get("device") == device


def fenced(event: EventRecord, device: str) -> bool:
    """The coordinator takes a device for gone."""
    return event.kind == "fenced" and device in event.data.get("gone", ())


@contextmanager
def separated(nodes: Sequence[str]) -> Iterator[tuple[Trained, Namespaces]]:
    """The same with every node in a network namespace of its own."""
    with namespaces(nodes) as spaces, TemporaryDirectory(prefix="eb-") as name:
        places = {node: (spaces.within(node), spaces.address(node)) for node in nodes}
        with (
            Trio(Path(name), spaces.host) as trio,
            Fleet(trio, Path(name), host=spaces.host, places=places) as fleet,
        ):
            trained = Trained(fleet, nodes, {})
            trained.start()
            yield trained, spaces


@contextmanager
def training(
    nodes: Sequence[str], *, memory: int = 1 << 30, latency: float | None = None, **options: Any
) -> Iterator[Trained]:
    """A cluster with a job that runs. `latency`: seconds that the planner is told a message takes from node to
    node."""
    with (
        TemporaryDirectory(prefix="eb-") as name,
        Trio(Path(name)) as trio,
        Fleet(trio, Path(name), memory=memory) as fleet,
    ):
        if latency is not None:
            with fleet.configuration.open("a") as file:
                file.write(f"[planner.between]\nlatency = {latency!r}\n")
        trained = Trained(fleet, nodes, options)
        trained.start()
        yield trained


# -- outages, which cost the job nothing ---------------------------------------------------------------------


def coordinator_outages(trained: Trained, count: int) -> tuple[list[float], list[float]]:
    """Kills the leader, again and again: seconds to the next one's key, and the longest gap between steps."""
    fleet, takeovers, longest = trained.fleet, [], []
    for _ in range(count):
        old, since = fleet.leads(), time.monotonic()
        with fleet.etcd.store() as store:
            watch = store.watch("/elasticd/test/leader", store.identity().revision + 1)
            fleet.kill(old.name)
            since = time.monotonic()
            while (item := watch.get(timeout=60)) is not None:
                if getattr(item, "kind", "") == "put":
                    break
            assert item is not None, fleet.said()
            takeovers.append(time.monotonic() - since)
        fleet.coordinator(old.name)
        longest.append(fleet.largest_gap(since))
    return takeovers, longest


def etcd_outages(trained: Trained, count: int, seconds: float) -> list[float]:
    """Kills all of etcd, for a while, again and again: the longest gap between steps each time."""
    fleet, longest = trained.fleet, []
    for _ in range(count):
        since = time.monotonic()
        fleet.etcd.kill(*NAMES)
        until(lambda: time.monotonic() > since + seconds, fleet.said)  # noqa: B023
        fleet.etcd.start(*NAMES)
        fleet.leads()
        longest.append(fleet.largest_gap(since))
    return longest


def calm_gaps(trained: Trained, count: int) -> list[float]:
    """The longest gap in each of `count` windows of about as long, in which nothing happens."""
    fleet, longest = trained.fleet, []
    for _ in range(count):
        since = time.monotonic()
        until(lambda: time.monotonic() > since + 2, fleet.said)  # noqa: B023
        longest.append(fleet.largest_gap(since))
    return longest
