"""Snapshots through whole agents: on real sockets, over real TLS, two or three agents in one process."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from elasticd_agent.snapshots import transfer
from elasticd_agent.snapshots.store import Snapshot, SnapshotStore
from msgspec.structs import replace

from elasticd.config.tree import AgentSection, ClusterSection, Config
from elasticd.records import DoneRecord, Keys, NodeRecord, PlanRecord, decode, encode
from elasticd.store.memory import MemoryStore
from elasticd.testing.waiting import until
from elasticd.wire.snapshots import Fetch, Fetched, Freed, Held, Snapped, SnapshotInventory, SnapshotSetComplete
from elasticd.wire.worker import Hello, Recorded, Welcome
from tests import sizes
from tests.agent.snapshots import dying_agent, memory, plan_of, read
from tests.agent.support import CLUSTER, Leader, Node, RunningAgent, Trainer, closing_all, spec
from tests.descriptors import open_descriptors

KEYS = Keys(cluster=CLUSTER)
WAIT = 90.0
JOB = "job"


class Scene(Node):
    """Agents n0, n1, ..., each with two devices."""

    def start(self, *nodes: str, mib: int | None = None) -> list[RunningAgent]:
        running: list[RunningAgent] = []
        for node in nodes:
            section = AgentSection(node=node, socket=self.at(node), devices=2, memory=1 << 20, snapshot_mib=mib)
            config = Config(cluster=ClusterSection(name=CLUSTER), agent=section)
            running.append(self.register(RunningAgent(config, MemoryStore(self.server), 60)))
            until(lambda node=node: self.store.get(KEYS.node(node)))
        return running

    def at(self, node: str) -> str:
        return str(self.folder / f"{node}.sock")

    def worker(self, node: str, rank: int = 0) -> Worker:
        return Worker(self.trainer(self.at(node)), node, rank)


class Worker:
    """Snapshots as a worker takes them."""

    def __init__(self, trainer: Trainer, node: str, rank: int) -> None:
        self.trainer, self.node = trainer, node
        self.trainer.sock.settimeout(WAIT)
        self.welcome = trainer.welcomed(rank, JOB)

    def held(self, step: int, size: int, plan: int = 1) -> Held:
        return Held(
            job=JOB,
            device=self.welcome.device,
            incarnation=self.welcome.incarnation,
            plan=plan,
            step=step,
            node=self.node,
            size=size,
        )

    def snap(self, step: int, data: bytes = b"state", first: bool = False) -> Held:
        held = self.held(step, len(data))
        fd = memory(data)
        plan = plan_of(1, {held.device: held.incarnation}) if first else None
        self.trainer.say(Snapped(held=held, plan=plan), fd)
        os.close(fd)
        return held

    def fetch(self, held: Held) -> bytes | str:
        """Its bytes, or why there are none."""
        self.trainer.say(Fetch(held=held))
        answer, fd = self.trainer.take()
        assert isinstance(answer, Fetched), answer
        assert (fd is None) == bool(answer.error)
        return answer.error if fd is None else read(fd)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with closing_all() as register:
        yield Scene(register, tmp_path)


def told(leader: Leader, node: str) -> list[tuple[str, int]]:
    """What that node said last of the snapshots that it keeps: devices and steps."""
    last = latest(leader, node)
    return [] if last is None else [(held.device, held.step) for held in last.snapshots]


def latest(leader: Leader, node: str) -> SnapshotInventory | None:
    return next((m for who, m in reversed(list(leader.keeps)) if who == node), None)


def kept(leader: Leader, node: str, *expected: tuple[str, int]) -> None:
    until(lambda: told(leader, node) == sorted(expected))


def test_snapshot_is_kept_here_and_on_the_next_node_and_both_say_so(scene: Scene) -> None:
    leader = scene.leader()
    scene.start("n0", "n1", "n2")
    first, second = scene.worker("n0"), scene.worker("n2", 1)
    first.snap(3, first=True)
    second.snap(3)
    kept(leader, "n0", ("n0/0", 3), ("n2/1", 3))  # the ring: n0 -> n1, n2 -> n0
    kept(leader, "n1", ("n0/0", 3))
    kept(leader, "n2", ("n2/1", 3))
    (plan,) = getattr(latest(leader, "n1"), "plans", ())
    assert plan.binding == {"n0/0": first.welcome.incarnation}, "it outlives the first rank's node"
    leader.keeps.clear()
    leader.hang_up()
    kept(leader, "n1", ("n0/0", 3))  # again, on the new link


def test_leader_hears_of_snapshots_again_when_a_worker_of_their_job_says_hello(scene: Scene) -> None:
    """It hears a node only once the node has a part in the job."""
    leader = scene.leader()
    scene.start("n0")
    scene.worker("n0").snap(3, first=True)
    kept(leader, "n0", ("n0/0", 3))
    leader.keeps.clear()
    scene.worker("n0", 1)
    kept(leader, "n0", ("n0/0", 3))


def test_whole_set_frees_older_ones_on_all_nodes(scene: Scene) -> None:
    leader = scene.leader()
    scene.start("n0", "n1")
    worker = scene.worker("n0")
    for step in (1, 2):
        worker.snap(step)
    kept(leader, "n1", ("n0/0", 1), ("n0/0", 2))
    leader.send(SnapshotSetComplete(job=JOB, plan=1, step=2))
    assert worker.trainer.hear() == Freed(plan=1, step=1)
    for node in ("n0", "n1"):
        kept(leader, node, ("n0/0", 2))


def test_dead_workers_snapshot_is_fetched_on_either_node(scene: Scene) -> None:
    leader = scene.leader()
    scene.start("n0", "n1")
    worker, data = scene.worker("n0"), os.urandom(3_000_000)
    held = worker.snap(5, data)
    kept(leader, "n1", ("n0/0", 5))
    worker.trainer.close()
    for node in ("n0", "n1"):
        other = scene.worker(node, 1)
        assert other.fetch(held) == data
        assert "no snapshot of n0/0 at step 6 of plan 1" in str(other.fetch(replace(held, step=6)))


def test_what_is_fetched_is_named_by_device_plan_and_step_alone(scene: Scene) -> None:
    scene.start("n0")
    worker = scene.worker("n0")
    held = worker.snap(5, b"bytes")
    worker.trainer.say(Fetch(held=replace(held, incarnation="", node="", size=0)))
    answer, fd = worker.trainer.take()
    assert answer == Fetched(held=held)
    assert fd is not None
    assert read(fd) == b"bytes"


def test_no_worker_of_another_job_gets_it(scene: Scene) -> None:
    scene.start("n0")
    held = scene.worker("n0").snap(1)
    other = scene.trainer(scene.at("n0"))
    other.welcomed(1, "other")
    other.say(Fetch(held=held))
    answer, fd = other.take()
    assert isinstance(answer, Fetched)
    assert answer.error
    assert fd is None


def test_copies_outlive_the_agent_and_are_sent_on_when_their_keeper_goes(scene: Scene) -> None:
    leader = scene.leader()
    _, middle = scene.start("n0", "n1")
    scene.worker("n0").snap(1)
    kept(leader, "n1", ("n0/0", 1))
    scene.start("n2")
    assert told(leader, "n2") == []
    middle.stop()
    kept(leader, "n2", ("n0/0", 1))


def test_node_that_has_no_room_is_passed_over_and_one_that_comes_later_is_used(scene: Scene) -> None:
    leader = scene.leader()
    scene.start("n0")
    scene.start("n1", mib=0)
    scene.worker("n0").snap(1)
    kept(leader, "n0", ("n0/0", 1))
    assert latest(leader, "n1") is None
    scene.start("n2")
    kept(leader, "n2", ("n0/0", 1))
    assert latest(leader, "n1") is None


def test_peer_that_dies_in_the_midst_is_passed_over(scene: Scene) -> None:
    leader = scene.leader()
    scene.start("n0", "n2")
    found = scene.store.get(KEYS.node("n0"))
    assert found is not None
    with dying_agent(decode(found.value, NodeRecord).certificate) as (process, record):
        scene.store.put(KEYS.node("n1"), encode(record))
        worker, data = scene.worker("n0"), os.urandom(16 << 20)
        probe = scene.worker("n2")
        probe.snap(1)
        kept(leader, "n0", ("n2/0", 1))
        held = worker.snap(2, data)
        kept(leader, "n2", ("n0/0", 2), ("n2/0", 1))
        assert probe.fetch(held) == data
        assert process.wait(300) == -signal.SIGKILL, "it was tried first"


def test_snapshot_that_could_not_be_read_for_want_of_a_descriptor_is_sent_later(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refused = SnapshotStore.find, 0

    def find(store: SnapshotStore, wanted: Held) -> Snapshot | None:
        nonlocal refused
        refused += 1
        if refused == 1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(store, wanted)

    monkeypatch.setattr(SnapshotStore, "find", find)
    leader = scene.leader()
    scene.start("n0", "n1")
    scene.worker("n0").snap(1)
    kept(leader, "n1", ("n0/0", 1))


def test_agent_that_ends_tries_no_further_node(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of a hundred silent nodes would take its seconds, and workers wait for the next agent so long."""
    scene.leader()
    (agent,) = scene.start("n0")
    item = scene.store.get(KEYS.node("n0"))
    assert item is not None
    record = decode(item.value, NodeRecord)
    tries, ends = [], threading.Event()

    def silent(address: object, timeout: float) -> None:
        tries.append(address)
        ends.wait(WAIT)
        raise TimeoutError("timed out")

    monkeypatch.setattr(transfer.socket, "create_connection", silent)
    for number in range(1, 6):
        other = replace(record, node=f"n{number}", agent=f"agent{number}", devices=())
        scene.store.put(KEYS.node(other.node), encode(other))
    scene.worker("n0").snap(1)
    until(lambda: tries)
    stopping = threading.Thread(target=agent.stop)
    stopping.start()
    until(lambda: agent.agent._snapshot_service.sender._closed)
    ends.set()
    stopping.join(WAIT)
    assert not stopping.is_alive()
    assert len(tries) == 1


def test_copies_stay_within_the_jobs_nodes(scene: Scene) -> None:
    leader = scene.leader()
    scene.start("n0", "n1", "n2")
    first, last = scene.worker("n0"), scene.worker("n2")
    binding = {w.welcome.device: w.welcome.incarnation for w in (first, last)}
    record = PlanRecord(plan=plan_of(1, binding), epoch=leader.epoch, step=0)
    scene.store.put(KEYS.job(JOB, "plan"), encode(record))
    for worker in (first, last):
        assert worker.trainer.hear() == Recorded(number=1)
    first.snap(2)
    last.snap(2)
    kept(leader, "n2", ("n0/0", 2), ("n2/0", 2))
    kept(leader, "n0", ("n0/0", 2), ("n2/0", 2))
    assert latest(leader, "n1") is None


def test_end_of_the_job_frees_everything(scene: Scene) -> None:
    leader = scene.leader()
    scene.start("n0", "n1")
    worker = scene.worker("n0")
    worker.snap(1)
    kept(leader, "n1", ("n0/0", 1))
    scene.store.put(KEYS.job(JOB, "done"), encode(DoneRecord(step=9, epoch=leader.epoch)))
    for node in ("n0", "n1"):
        until(lambda node=node: getattr(latest(leader, node), "snapshots", None) == ())
    worker.snap(2)
    heard = [worker.trainer.hear() for _ in range(3)]
    assert Freed(plan=1, step=1) in heard
    assert Freed(plan=1, step=2) in heard, "what comes after the end is not kept"


def test_failed_job_is_kept_until_it_is_forgotten(scene: Scene) -> None:
    leader = scene.leader()
    scene.start("n0")
    worker = scene.worker("n0")
    held = worker.snap(1)
    done = DoneRecord(step=9, epoch=leader.epoch, reason="it failed")
    scene.store.put(KEYS.job(JOB, "done"), encode(done))
    worker.trainer.hear()  # so the agent has read it
    assert worker.fetch(held) == b"state"
    scene.store.delete(KEYS.job(JOB, "done"))
    assert worker.trainer.hear() == Freed(plan=1, step=1)
    assert "no snapshot of n0/0" in str(worker.fetch(held))


def test_snapshots_outlive_the_connection_of_a_worker_that_comes_back(scene: Scene) -> None:
    leader = scene.leader()
    scene.start("n0")
    worker = scene.worker("n0")
    held = worker.snap(1)
    kept(leader, "n0", ("n0/0", 1))
    worker.trainer.close()
    again = scene.trainer(scene.at("n0"))
    again.sock.settimeout(WAIT)
    hello = Hello(
        job=JOB,
        local_rank=0,
        world_size=2,
        pid=os.getpid(),
        spec=spec(JOB),
        incarnation=worker.welcome.incarnation,
    )
    again.say(hello)
    answer = again.hear()
    assert isinstance(answer, Welcome), answer
    again.say(Fetch(held=held))
    answer, fd = again.take()
    assert answer == Fetched(held=held)
    assert fd is not None
    assert read(fd) == b"state"


def test_new_incarnation_on_the_device_is_told_when_the_old_ones_memory_is_free(scene: Scene) -> None:
    """A worker that was fenced off says hello anew, from the same process."""
    leader = scene.leader()
    scene.start("n0")
    old = scene.worker("n0")
    old.snap(1)
    kept(leader, "n0", ("n0/0", 1))
    old.trainer.close()
    until(lambda: scene.store.get(KEYS.member(JOB, "n0/0")) is None)
    new = scene.worker("n0")
    new.snap(2)
    leader.send(SnapshotSetComplete(job=JOB, plan=1, step=2))
    assert new.trainer.hear() == Freed(plan=1, step=1)


@pytest.mark.parametrize("change", [{"device": "n0/1"}, {"incarnation": "x"}, {"job": "x"}, {"size": 99}])
def test_snapshot_of_a_worker_that_it_is_not_is_given_back(scene: Scene, change: dict[str, Any]) -> None:
    scene.start("n0")
    worker = scene.worker("n0")
    held = worker.held(1, 5)
    fd = memory(b"state")
    worker.trainer.say(Snapped(held=replace(held, **change)), fd)
    os.close(fd)
    assert worker.trainer.hear() == Freed(plan=1, step=1)
    assert "no snapshot" in str(worker.fetch(held))


def test_snapshot_without_its_memory_is_given_back(scene: Scene) -> None:
    scene.start("n0")
    worker = scene.worker("n0")
    worker.trainer.say(Snapped(held=worker.held(1, 5)))
    assert worker.trainer.hear() == Freed(plan=1, step=1)


def test_records_of_the_nodes_say_where_and_by_what_they_are_known(scene: Scene) -> None:
    leader = scene.leader()
    scene.start("n0")
    until(lambda: leader.heard)
    found = scene.store.get(KEYS.node("n0"))
    assert found is not None
    record = decode(found.value, NodeRecord)
    assert record.snapshots.startswith("127.0.0.1:")
    assert record.certificate.startswith("-----BEGIN CERTIFICATE-----")


def test_descriptors_do_not_grow_over_many_snapshots(scene: Scene) -> None:
    leader = scene.leader()
    scene.start("n0", "n1")
    worker = scene.worker("n0")

    def both(step: int) -> bool:
        """The newest set and the one before are there. A node that still has an older one was not told, for its
        link broke: it is told again, as the real leader does."""
        steps = [one for _, one in told(leader, "n1")]
        if any(one < step - 1 for one in steps):
            leader.send(SnapshotSetComplete(job=JOB, plan=1, step=step - 1))
        return steps == [*range(max(step - 1, 1), step + 1)]

    def take(step: int) -> None:
        worker.snap(step, os.urandom(50_000))
        try:
            until(lambda: both(step))
        except AssertionError as error:
            raise AssertionError(f"step {step}: {[told(leader, node) for node in ('n0', 'n1')]}") from error
        leader.send(SnapshotSetComplete(job=JOB, plan=1, step=step))
        if step > 1:
            assert worker.trainer.hear() == Freed(plan=1, step=step - 1)

    for step in range(1, 11):
        take(step)
    settled = len(open_descriptors())
    for step in range(11, sizes.number(full=211, quick=31)):
        take(step)
    until(lambda: len(open_descriptors()) <= settled + sizes.number(full=4, quick=2))
