"""The dashboard at 8,000 devices: what it costs the leader, and how soon people see what is not normal.

    make bench NAME=dashboard
    make bench NAME=dashboard ARGS='--only leader'

*leader*: the coordinator of benchmarks/load.py, in a process of its own, with 1,000 agents of 8 devices that
report a step a second, all over the second (`spread`). A real `elasticd dashboard` listens to it, and 50
browsers' streams to that. Windows without and with the dashboard take turns under the same load; figures are of
processor time, which other work on the machine changes little, and medians over the windows. *status*:
`elasticd status` of the same cluster. *pages*: what a browser makes of it (`_dashboard_pages`). *seen*: how
soon a slow device of a real job is shown (`_dashboard_seen`).
"""

from __future__ import annotations

import asyncio
import io
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import msgspec
from _frame import Part, run
from _load_job import JOB, Job
from _load_leader import Figures
from _results import Row, row
from load import AGENTS, DEVICES, running, said
from rich.console import Console

from elasticd.cli.status import screen
from elasticd.codec.safe_text import json_for_terminal
from elasticd.config.credentials import Credentials
from elasticd.coordinator.live_feed import LiveFeed
from elasticd.wire.api_types import (
    ClusterStatus,
    DeviceStatus,
    JobStatus,
    LeaderStatus,
    MemberStatus,
    NodeStatus,
)
from elasticd.wire.coordinator import FromClient, to_leader
from elasticd.wire.worker import Report

#: Streams of browsers, windows of each kind, and seconds of one and before it.
READERS, WINDOWS, SECONDS, SETTLE = 50, 4, 15, 5
#: Minutes of news for a page's heap.
MINUTES = 10.0
#: What the dashboard may add to the leader's processor, and what the status may take.
MOST_ADDED, MOST_LINES, MOST_SECONDS = 0.02, 60, 1.0


class Readers:
    """Browsers' streams, and bytes that they were sent."""

    def __init__(self, url: str, count: int) -> None:
        self.bytes = 0
        self._url, self._count = url, count
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._loop.run_until_complete(self._all())

    async def _all(self) -> None:
        self._tasks = [asyncio.ensure_future(self._one()) for _ in range(self._count)]
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _one(self) -> None:
        async with (
            httpx2.AsyncClient(
                base_url=self._url, trust_env=False, timeout=60, verify=Credentials().verifying()
            ) as client,
            client.stream("GET", "/api/live") as answer,
        ):
            async for piece in answer.aiter_bytes():
                self.bytes += len(piece)

    def close(self) -> None:
        """Ends the streams."""

        def cancel() -> None:
            for task in self._tasks:
                task.cancel()

        self._loop.call_soon_threadsafe(cancel)
        self._thread.join(30)


@contextmanager
def dashboard(coordinator: str, folder: Path) -> Iterator[str]:
    """A real dashboard before this coordinator; its URL."""
    history = folder / f"history-{time.monotonic_ns()}.db"
    command = [sys.executable, "-m", "elasticd", "dashboard", "--coordinator", coordinator]
    process = subprocess.Popen(
        [*command, "--port", "0", "--history", str(history)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if " at " not in line:
            raise SystemExit(f"the dashboard did not start: {line!r}")
        yield line.rpartition(" ")[2].strip()
    finally:
        process.terminate()
        process.wait(60)


def of_leader(agents: int = AGENTS, windows: int = WINDOWS, seconds: int = SECONDS) -> Iterator[Row]:
    """What one dashboard with 50 browsers adds to the leader's processor."""
    without: list[float] = []
    within: list[float] = []
    fed: list[float] = []
    sent = 0
    lasts = 2 * windows * (seconds + SETTLE) + 60
    with tempfile.TemporaryDirectory() as place, running("_load_leader.py", agents, DEVICES) as leader:
        url = said(leader)
        with running("_load_agents.py", url, agents, DEVICES, lasts, "spread") as fleet:
            if said(fleet) != "connected":
                raise SystemExit("the agents did not connect")
            assert fleet.stdin is not None
            fleet.stdin.write("report\n")
            fleet.stdin.flush()
            time.sleep(SETTLE)
            for _ in range(windows):
                found = _window(leader, seconds)
                without.append(found.processor / found.reports)
                with dashboard(url, Path(place)) as pages:
                    readers = Readers(pages, READERS)
                    time.sleep(SETTLE)
                    found = _window(leader, seconds)
                    within.append(found.processor / found.reports)
                    fed.append(found.beside / found.seconds)
                    sent += readers.bytes
                    readers.close()
                time.sleep(1)
    if not sent:
        raise SystemExit("no browser was told anything")
    print("µs a report without:", [round(each * 1e6, 1) for each in without], flush=True)
    print("µs a report with:   ", [round(each * 1e6, 1) for each in within], flush=True)
    print("cores of the feed:  ", [round(each, 4) for each in fed], flush=True)
    count, before = agents * DEVICES, statistics.median(without)
    noise = (max(without) - min(without)) / before
    noted = _noting()
    added = (statistics.median(fed) + noted * count) / (before * count)
    name = f"{count} devices, one dashboard, {READERS} browsers: leader's processor"
    yield row(
        f"{name}, the feed's over all without it",
        round(added, 4),
        "",
        goal=f"<= {MOST_ADDED:g}",
        met=added <= MOST_ADDED,
        noise=round((max(fed) - min(fed)) / statistics.median(fed), 3),
    )
    yield row(f"{name}, the feed's", round(statistics.median(fed) + noted * count, 4), "cores")
    yield row(
        f"{name} for a report, with over without",
        round(statistics.median(within) / before, 3),
        "",
        noise=round(noise, 3),
    )
    yield row(f"{count} devices: leader's processor for a report, without", round(before * 1e6, 1), "µs")


def _noting() -> float:
    """Seconds that the leader's loop takes to note a report for those who listen."""
    job = Job(10, DEVICES)
    up = to_leader(job.reports(job.nodes[0])[0].at(1, 0.0))
    assert isinstance(up, FromClient)
    assert isinstance(up.body, Report)
    feed, measurement, count = LiveFeed(1), up.body.measurement, 100_000
    began = time.process_time()
    for _ in range(count):
        feed.measured(JOB, measurement)
    return (time.process_time() - began) / count


def _window(leader: subprocess.Popen[str], seconds: int) -> Figures:
    said(leader, "since now")
    time.sleep(seconds)
    found = msgspec.json.decode(said(leader, "figures"), type=Figures)
    if not found.reports:
        raise SystemExit("the agents did not report")
    return found


def of_status() -> Iterator[Row]:
    """What `elasticd status` draws of 1,000 nodes, and the processor's seconds from the answer to the
    screen."""
    text = msgspec.json.encode(_status())
    spent = []
    for _ in range(5):
        began = time.process_time()
        found = msgspec.json.decode(json_for_terminal(text), type=ClusterStatus)
        output = io.StringIO()
        Console(file=output, width=120).print(screen(found, {JOB: "why it was made"}))
        spent.append(time.process_time() - began)
    lines = output.getvalue().count("\n")
    yield row(
        f"elasticd status of {AGENTS} nodes: lines", lines, "", goal=f"<= {MOST_LINES}", met=lines <= MOST_LINES
    )
    median = statistics.median(spent)
    yield row(
        f"elasticd status of {AGENTS} nodes: from the answer to the screen",
        round(median, 3),
        "s of processor",
        goal=f"<= {MOST_SECONDS:g}",
        met=median <= MOST_SECONDS,
        noise=round((max(spent) - min(spent)) / median, 3),
    )
    yield row(f"elasticd status --json of {AGENTS} nodes", round(len(text) / 1024), "KiB")


def _status() -> ClusterStatus:
    """The load's cluster: every 97th device is slow, a node is away."""
    job = Job(AGENTS, DEVICES)
    names = [device.name for node in job.nodes for device in node.devices]
    slow = dict.fromkeys(names[::97], 1.5)
    nodes = tuple(
        NodeStatus(
            node=node.name,
            connected=node.name != "n7",
            address="10.0.0.1",
            emulated=False,
            members=DEVICES,
            devices=tuple(
                DeviceStatus(name=device.name, memory=device.memory, rate=slow.get(device.name, 1.0), pace=1.0)
                for device in node.devices
            ),
        )
        for node in job.nodes
    )
    members = tuple(MemberStatus(device=name, incarnation=f"i-{name}", pid=1) for name in names)
    shown = JobStatus(
        job=JOB,
        phase="running",
        reason="",
        plan=job.plan,
        proposal=None,
        step=7,
        loss=2.5,
        tokens_per_second=1e6,
        members=members,
    )
    leader = LeaderStatus(name="c0", url="http://127.0.0.1:7471", epoch=1)
    return ClusterStatus(cluster="load", leader=leader, nodes=nodes, jobs=(shown,))


def of_changes(agents: int = AGENTS) -> Iterator[Row]:
    """What a program is sent each second that follows the cluster, beside the whole status."""
    with running("_load_leader.py", agents, DEVICES) as leader:
        url = said(leader)
        with running("_load_agents.py", url, agents, DEVICES, 40, "spread") as fleet:
            if said(fleet) != "connected":
                raise SystemExit("the agents did not connect")
            assert fleet.stdin is not None
            fleet.stdin.write("report\n")
            fleet.stdin.flush()
            with httpx2.Client(base_url=url, trust_env=False, timeout=60) as client:
                whole = len(client.get("/v1/status").content)
                found = {
                    path: statistics.median(_a_second(client, path))
                    for path in ("/v1/live", "/v1/live?measured=false")
                }
    for path, size in found.items():
        yield row(f"GET {path} of {agents * DEVICES} devices, a second", round(size / 1024, 1), "KiB")
    brief = found["/v1/live?measured=false"]
    yield row(
        "elasticd status --json -f, a second of changes over the whole status", round(brief / whole, 5), ""
    )


def _a_second(client: httpx2.Client, path: str) -> list[int]:
    """Bytes of each second of a feed, once it has said all that is known."""
    sizes: list[int] = []
    with client.stream("GET", path) as answer:
        began, size = time.monotonic(), 0
        for piece in answer.iter_bytes():
            size += len(piece)
            if time.monotonic() - began >= 1:
                sizes.append(size)
                began, size = time.monotonic(), 0
            if len(sizes) > 12:
                break
    return sizes[5:]


def of_pages(minutes: float = MINUTES, draws: int = 5) -> Iterable[Row]:
    """What a browser makes of the pages."""
    from _dashboard_pages import rows  # where no browser is, the other parts are measured all the same

    if _has_browser():
        return rows(minutes, draws)
    return [row("8,000 devices: first draw", _NO_BROWSER, "", goal="<= 500", met=False)]


def of_seen(rounds: int = 5) -> Iterable[Row]:
    """How soon a browser shows a slow device of a real job."""
    from _dashboard_seen import rows

    if _has_browser():
        return rows(rounds)
    name = "a slow device is shown in the browser, after the event"
    return [row(name, _NO_BROWSER, "", goal="<= 1", met=False)]


_NO_BROWSER = "not run: there is no Chromium on PATH: apt-get install chromium"


def _has_browser() -> bool:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from tests.dashboard.browser.conftest import chromium

    return chromium() is not None


_FED = ("elasticd/coordinator", "elasticd/dashboard")
PARTS = {
    "pages": Part(of_pages, ("elasticd/dashboard",), {"minutes": 0.0, "draws": 2}),
    "seen": Part(of_seen, ("elasticd", "agent"), {"rounds": 2}),
    "leader": Part(of_leader, _FED, {"agents": 20, "windows": 2, "seconds": 2}),
    "status": Part(of_status, ("elasticd/cli", "elasticd/coordinator")),
    "changes": Part(of_changes, _FED, {"agents": 20}),
}

if __name__ == "__main__":
    sys.exit(run("dashboard", __doc__, PARTS))
