"""Snapshots for the agent's tests, with bytes of the test's choice."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

from elasticd_agent.snapshots.store import Snapshot
from elasticd_planner.spec.plan import ModulePlan, Pipeline, Plan, Stage, Strategy

from elasticd.records import NodeRecord
from elasticd.wire.snapshots import Held

#: A receiver in a process of its own, which dies once some of the bytes came.
DYING = """
import os, signal, sys
from elasticd_agent.snapshots import transfer
from elasticd_agent.snapshots.tls import TlsIdentity
from elasticd_agent.snapshots.store import SnapshotStore
identity = TlsIdentity.make("n1")
real = os.pwrite
def pwrite(fd, data, at):
    if at >= 4 << 20:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(fd, data, at)
os.pwrite = pwrite
trusted = sys.stdin.read()
store = SnapshotStore("n1", 1 << 30)
server = transfer.SnapshotServer("127.0.0.1", identity, store, lambda: {"n0": trusted}, lambda *_: None)
print(server.port, flush=True)
print(identity.certificate, flush=True)
print("END", flush=True)
signal.pause()
"""


def held(
    step: int = 1, device: str = "n0/0", data: bytes = b"state", node: str = "n0", plan: int = 1, of: str = "i"
) -> Held:
    return Held(job="job", device=device, incarnation=of, plan=plan, step=step, node=node, size=len(data))


def snapshot(
    step: int = 1, device: str = "n0/0", data: bytes = b"state", node: str = "n0", plan: int = 1
) -> Snapshot:
    return Snapshot(held=held(step, device, data, node, plan), fd=memory(data))


def memory(data: bytes) -> int:
    """A memory file of the caller's."""
    fd = os.memfd_create("test")
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    return fd


def read(fd: int) -> bytes:
    """All of a memory file, which is closed."""
    with open(fd, "rb") as file:
        file.seek(0)
        return file.read()


def content(found: Snapshot | None) -> bytes:
    assert found is not None
    return read(found.fd)


def plan_of(number: int, binding: dict[str, str]) -> Plan:
    """One stage over these devices."""
    stage = Stage(start=0, stop=2, devices=tuple(binding), shares=(1,) * len(binding))
    module = ModulePlan(module="m", pipelines=(Pipeline(stages=(stage,), micro_batches=2),))
    strategies = (Strategy(modules=(module,)),)
    return Plan(number=number, strategies=strategies, micro_batch=1, global_batch=2, binding=binding)


@contextlib.contextmanager
def dying_agent(trusted: str) -> Iterator[tuple[subprocess.Popen[str], NodeRecord]]:
    """The process of an agent of node n1 that is killed in the midst of the first snapshot of more than 4 MiB
    that `trusted` sends it; with its record."""
    process = subprocess.Popen(
        [sys.executable, "-c", DYING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        try:
            process.stdin.write(trusted)
            process.stdin.close()
            address = f"127.0.0.1:{process.stdout.readline().strip()}"
            certificate = "".join(iter(process.stdout.readline, "END\n"))
            yield (
                process,
                NodeRecord(
                    node="n1",
                    devices=(),
                    address="127.0.0.1",
                    agent="dying",
                    snapshots=address,
                    certificate=certificate,
                ),
            )
        finally:
            process.kill()
            process.wait()
