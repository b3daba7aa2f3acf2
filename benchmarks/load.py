"""One coordinator under the load of a large cluster: 1,000 agents of 8 devices, each reports a step a second.
And one job of all these devices, or of 16,384, on a real etcd (`_stored.py`).

    make bench NAME=load
    make bench NAME=load ARGS='--only etcd large'                      # the jobs on etcd alone, minutes
    make bench NAME=load ARGS='--only hour'                            # the results keep the others as they are

Of the load: real connections on this machine. The coordinator, its gate and server are the real ones in a
process of their own, over the memory store with planning paused, or (part "stored") over a real etcd with its
planner at work; the agents are another: connections that greet, answer pings and
report, a node's devices in one message, as an agent sends them. *spread*: the agents' steps end all over the
second; *together*: all at one moment, as in one synchronous job, and the agents spread their reports as the
leader asks; *at once*: the same with agents of release 0.1, which do not, so that the last report is
handled only after all others. Processor time is the coordinator's own, for a second's reports, and may be
measured on a busy machine; delays may not.
"""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
import psutil
from _frame import PLANNER, Part, run
from _load_job import MODEL, TOKENS, Job, write
from _load_leader import Figures
from _results import Row, row
from elasticd_planner.cost.model_profile import derive
from elasticd_planner.policy.policy import PolicySettings
from elasticd_planner.profiling.fit import STEPS, fit
from elasticd_planner.spec.cluster import Cluster
from elasticd_planner.spec.step_measurements import NONE_REPORTED

from elasticd.coordinator.leader import Leader
from elasticd.coordinator.store_writer import stored
from elasticd.machines.coordinator.machine import takeover
from elasticd.machines.job.state.events import CoordinatorTick
from elasticd.machines.job.state.job_state import JobSettings
from elasticd.records import Keys
from elasticd.store.memory import MemoryStore
from elasticd.store.server import EtcdServer
from elasticd.wire.coordinator import AgentHello, FromClient, to_leader
from elasticd.wire.worker import Report

HERE = Path(__file__).resolve().parent
MIB = 1 << 20
#: What is asked for: agents, devices of each, seconds of load; agents and minutes on a virtual clock.
AGENTS, DEVICES, SECONDS, HOUR_AGENTS, HOUR = 1000, 8, 30, 100, 60
#: Milliseconds that the loop may be held up, and that a report may take from its sending until it is handled.
MOST_HELD_UP, MOST_DELAYED = 50, 100
#: Nodes of the part "large": of 16,384 devices.
LARGE_NODES = 2048
#: Minutes of such a clock that say something of how memory grows.
LONG = 20
#: Seconds until all connections must stand.
PATIENCE = 300
#: Seconds of reports before those that are measured.
WARM = 5


@contextmanager
def running(program: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A program of this folder with its pipes, ended by the end of the `with`."""
    command = [sys.executable, str(HERE / program), *map(str, arguments)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(60)


def said(process: subprocess.Popen[str], tell: str = "") -> str:
    """The next line of a process, after `tell` was told to it."""
    assert process.stdin is not None
    assert process.stdout is not None
    if tell:
        process.stdin.write(tell + "\n")
        process.stdin.flush()
    line = process.stdout.readline().strip()
    if not line:
        raise SystemExit(f"{process.args} ended without a word")
    return line


def loaded(
    agents: int, devices: int, seconds: int, how: str, folder: Path | None, etcd: str | None
) -> tuple[Figures, str]:
    """What the coordinator used and did in `seconds` of load, and the last line of the agents' process."""
    secured = ("--folder", folder) if folder is not None else ()
    stored = ("--etcd", etcd) if etcd is not None else ()
    with running("_load_leader.py", agents, devices, *secured, *stored) as leader:
        url = said(leader)
        shown = ("secret-0123456789abcdef", folder / "ca.pem") if folder is not None else ()
        with running("_load_agents.py", url, agents, devices, seconds + WARM, how, *shown) as fleet:
            if said(fleet) != "connected":
                raise SystemExit("the agents did not connect")
            assert fleet.stdin is not None
            fleet.stdin.write("report\n")
            fleet.stdin.flush()
            time.sleep(WARM)
            said(leader, "since now")
            late = said(fleet)
            found = msgspec.json.decode(said(leader, "figures"), type=Figures)
            fleet.stdin.write("end\n")
            fleet.stdin.flush()
    print(f"{how}{', secured' if folder else ''}: {found}; agents: {late}", flush=True)
    if found.connected != agents:
        raise SystemExit(f"{agents - found.connected} of {agents} agents lost their connection")
    return found, late


def rows_of(name: str, found: Figures, rate: int, fleet: str) -> Iterator[Row]:
    """`rate`: reports that are sent in a second; `fleet`: the line of the agents' process."""
    each = found.processor / max(1, found.reports)
    # Where other programs kept it from keeping up it is less than this, since it ticks and pings meanwhile.
    share = each * rate
    yield row(
        f"{name}: processor of the coordinator",
        round(share, 3),
        "cores",
        kind="measured",
        goal="< 1",
        met=share < 1,
    )
    p99 = found.handled["p99"] * 1e3
    yield row(
        f"{name}: handling of a report, p99",
        round(p99, 3),
        "ms",
        kind="measured",
        goal="< 100",
        met=p99 < 100,
    )
    yield row(f"{name}: processor for a report", round(each * 1e6, 1), "µs", kind="measured")
    kept = found.reports / found.seconds / rate
    yield row(f"{name}: reports handled, of those sent meanwhile", round(kept, 3), "", kind="measured")
    waited = float(fleet.split()[1])
    yield row(f"{name}: reports wait in their agents, longest", waited, "s", kind="measured")
    yield at_most(f"{name}: from sending to handled, p99", found.delayed["p99"] * 1e3, MOST_DELAYED)
    yield at_most(f"{name}: the loop held up, longest", found.held_up * 1e3, MOST_HELD_UP)


def at_most(name: str, milliseconds: float, most: float) -> Row:
    """A row of milliseconds with the most that they may be."""
    met = milliseconds <= most
    return row(name, round(milliseconds, 1), "ms", kind="measured", goal=f"<= {most:g}", met=met)


def secured(folder: Path) -> Path:
    """A token for agents, and certificates of an authority of our own."""
    from _load_certificates import write

    (folder / "agents").touch(mode=0o600)
    (folder / "agents").write_text("secret-0123456789abcdef\n")
    write(folder)
    return folder


def one_fit(agents: int = AGENTS, devices: int = DEVICES) -> Iterator[Row]:
    """What the leader's loop does at once when a job has its first ten steps: the profile's fit."""
    job, steps = Job(agents, devices), range(1, STEPS + 1)
    profile = derive(MODEL, float(TOKENS), 1)
    measured = []
    for step in steps:
        reports = [to_leader(one.at(step, 0.0)) for node in job.nodes for one in job.reports(node)]
        bodies = [up.body for up in reports if isinstance(up, FromClient)]
        found = NONE_REPORTED
        for body in bodies:
            if isinstance(body, Report):
                found = found.after(body.measurement)
        measured.append(found.whole(job.plan.number, step, job.plan.members))
    began = time.process_time()
    fit(profile, job.plan, measured, Cluster(nodes=job.nodes), {})
    spent = time.process_time() - began
    yield at_most(f"{agents * devices} devices: the profile's fit, once", spent * 1e3, MOST_HELD_UP)


def an_hour(agents: int = HOUR_AGENTS, devices: int = DEVICES, minutes: int = HOUR) -> Iterator[Row]:
    """Every device's report of each second of so many minutes, on a clock of its own: its memory."""
    job, keys, store, virtual = Job(agents, devices), Keys(cluster="load"), MemoryStore(), [0.0]
    write(store, keys, job.records())
    settings = JobSettings(policy=PolicySettings(paused=True))
    state = takeover(1, stored(keys, store.snapshot(keys.jobs).items), settings, 0.0)
    failed: list[Exception] = []
    leading = Leader(state, chaos=False, failed=failed.append, clock=lambda: virtual[0])
    asyncio.run(_reported(leading, job, minutes * 60, virtual, taken := []))
    if failed:
        raise SystemExit(f"the machine failed: {failed[0]!r}")
    print("MiB after each minute:", [round(size / MIB) for size in taken], flush=True)
    after_ten, last = taken[min(10, len(taken) - 1)], taken[-1]
    name = f"{minutes} minutes of {agents * devices} reports a second, virtual: memory"
    yield row(f"{name} at the end", round(last / MIB), "MiB", kind="simulated")
    if minutes < LONG:
        return  # says nothing of what it grows to
    grown = (last - after_ten) / MIB
    most = max(8.0, 0.02 * after_ten / MIB)
    yield row(
        f"{name} grown since the tenth minute",
        round(grown, 1),
        "MiB",
        kind="simulated",
        goal=f"<= {most:.0f}",
        met=grown <= most,
    )


async def _reported(leading: Leader, job: Job, seconds: int, virtual: list[float], taken: list[int]) -> None:
    connections, reports = [], []
    for node in job.nodes:
        hello, *greetings = map(to_leader, job.greetings(node))
        assert isinstance(hello, AgentHello)
        connection = leading.agent_up(hello)
        for greeting in greetings:
            await leading.heard(connection, greeting)
        connections.append(connection)
        reports.append(job.reports(node))
    for second in range(1, seconds + 1):
        for connection, told in zip(connections, reports, strict=True):
            for report in told:
                await leading.heard(connection, to_leader(report.at(second, virtual[0])))
        virtual[0] += 1.0
        leading.apply(CoordinatorTick())
        if second % 60 == 0 or second == 1:
            gc.collect()
            taken.append(psutil.Process().memory_info().rss)


def on_etcd(agents: int = AGENTS, devices: int = DEVICES) -> list[Row]:
    """A job of all devices is started, planned anew, taken over and ended on a real etcd."""
    with running("_stored.py", agents, devices) as process:
        assert process.stdout is not None
        *before, last = process.stdout.read().splitlines() or [""]
        print("\n".join(before), flush=True)
        if process.wait(60) or not last:
            raise SystemExit(f"{agents * devices} devices on etcd: it ended with {process.returncode}")
    return msgspec.json.decode(last, type=list[Row])


def connected_rows(
    part: str, agents: int = AGENTS, devices: int = DEVICES, seconds: int = SECONDS
) -> Iterator[Row]:
    """The load of so many agents: over the memory store ("open"), with token and TLS, or over a real etcd."""
    with tempfile.TemporaryDirectory() as place:
        folder = secured(Path(place)) if part == "secured" else None
        for how in ("spread", "together", "at-once"):
            words = f"{agents} agents x {devices}, {how.replace('-', ' ')}{', token and TLS' if folder else ''}"
            if part != "stored":
                found, fleet = loaded(agents, devices, seconds, how, folder, None)
                yield from rows_of(words, found, agents * devices, fleet)
                continue
            with EtcdServer() as etcd:
                found, fleet = loaded(agents, devices, seconds, how, folder, etcd.endpoint)
            words = f"{words}, etcd and planner"
            yield from rows_of(words, found, agents * devices, fleet)
            yield row(f"{words}: plans asked for", found.planned, "", goal=">= 1", met=found.planned >= 1)


_LEADER = ("elasticd/codec", "elasticd/coordinator", "elasticd/machines", "elasticd/store", "elasticd/wire")
_FEW = {"agents": 10, "seconds": 3}
PARTS = {
    **{part: Part(partial(connected_rows, part), _LEADER, _FEW) for part in ("open", "secured", "stored")},
    "fit": Part(one_fit, PLANNER, {"agents": 10}),
    "hour": Part(an_hour, _LEADER, {"agents": 10, "minutes": 1}),
    "etcd": Part(on_etcd, (*_LEADER, *PLANNER), {"agents": 10}),
    "large": Part(partial(on_etcd, agents=LARGE_NODES), (*_LEADER, *PLANNER), {"agents": 20}),
}

if __name__ == "__main__":
    sys.exit(run("load", __doc__, PARTS))
