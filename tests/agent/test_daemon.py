"""The agent as a whole, on a real socket and a real WebSocket, over the store in memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from elasticd_agent.daemon import AgentError
from elasticd_agent.hardware import nvml
from elasticd_planner.spec.measurement import Measurement
from elasticd_planner.spec.plan import ModulePlan, Pipeline, Plan, Stage, Strategy

from elasticd.codec import decoding
from elasticd.codec.message import encode
from elasticd.config.tree import EmulateSection
from elasticd.records import DoneRecord, Keys, MemberRecord, NodeRecord, PlanRecord, Proposal, decode
from elasticd.records import encode as encode_record
from elasticd.rendezvous.live_mode import AgentCalls
from elasticd.store.memory import MemoryStore
from elasticd.store.state_file import Mark, StateFile
from elasticd.testing.waiting import until
from elasticd.wire import unix_socket
from elasticd.wire.coordinator import AgentHello, AgentRejected, Drain, End, ToClient, WorkerLost
from elasticd.wire.node_health import Health
from elasticd.wire.rendezvous import Join, Joined, Leave
from elasticd.wire.worker import (
    EmulatedSpeed,
    Finished,
    Goodbye,
    Hello,
    Propose,
    Rejected,
    Report,
    Shutdown,
    StayedOnPlan,
    StoreAnswer,
    StoreCall,
    Welcome,
    to_worker,
)
from tests.agent.support import CLUSTER, Leader, Node, closing_all, spec

KEYS = Keys(cluster=CLUSTER)
WORKER = """
import os, select, sys
from elasticd.codec.message import encode
from elasticd.wire import unix_socket
from elasticd.wire.worker import Goodbye, from_worker
sock = unix_socket.connect(sys.argv[1], 20)
data = sys.stdin.buffer.readline()
hello = from_worker(data)
import msgspec
unix_socket.send(sock, encode(msgspec.structs.replace(hello, pid=os.getpid())))
print(unix_socket.receive(sock).decode(), flush=True)
if sys.stdin.buffer.readline().strip() == b"goodbye":
    select.select([sock], [], [], 20)  # a ping has come, and is never read
    unix_socket.send(sock, encode(Goodbye()))
"""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with closing_all() as register:
        yield Node(register, tmp_path)


@pytest.fixture
def worker_process(node: Node) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, node.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    hello = Hello(job="job", local_rank=1, world_size=1, pid=0, spec=spec("job"))
    process.stdin.write(encode(hello) + b"\n")
    process.stdin.flush()
    yield process
    process.kill()
    process.communicate()


def lost(leader: Leader) -> list[WorkerLost]:
    return [message for message in list(leader.heard) if isinstance(message, WorkerLost)]


def plan(number: int, binding: dict[str, str]) -> Plan:
    stage = Stage(start=0, stop=2, devices=tuple(binding), shares=(1,) * len(binding))
    module = ModulePlan(module="m", pipelines=(Pipeline(stages=(stage,), micro_batches=2),))
    strategies = (Strategy(modules=(module,)),)
    return Plan(number=number, strategies=strategies, micro_batch=1, global_batch=2, binding=binding)


def test_worker_is_welcomed_and_written_to_the_store(node: Node) -> None:
    leader = node.leader()
    node.agent()
    welcome = node.trainer().welcomed(1)
    assert (welcome.device, welcome.address, welcome.pace) == ("n0/1", "127.0.0.1", None)
    item = until(lambda: node.store.get(KEYS.member("job", "n0/1")))
    member = decode(item.value, MemberRecord)
    assert member == MemberRecord(device="n0/1", incarnation=welcome.incarnation, pid=os.getpid())
    found = node.store.get(KEYS.node("n0"))
    assert found is not None
    assert found.lease == item.lease != 0
    assert [device.name for device in decode(found.value, NodeRecord).devices] == ["n0/0", "n0/1"]
    until(lambda: leader.bodies(Hello))
    assert isinstance(leader.heard[0], AgentHello)


def test_workers_of_a_job_that_a_user_stops_get_one_sigterm(node: Node) -> None:
    """This process is the worker: a second one would end a real worker at once."""
    leader = node.leader()
    node.agent()
    node.trainer().welcomed(1)
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        until(lambda: leader.bodies(Hello))
        leader.send(End(job="another", devices=("n0/1",)))
        leader.send(End(job="job", devices=("n0/0",)))
        leader.send(Drain(on=True))
        until(lambda: [said for said in leader.heard if isinstance(said, AgentHello) and said.record.draining])
        assert heard == []
        leader.send(End(job="job", devices=("n0/1",)))
        leader.send(End(job="job", devices=("n0/1",)))
        leader.send(Drain(on=False))
        until(lambda: [s for s in leader.heard if isinstance(s, AgentHello)][-1].record.draining is False)
        until(lambda: heard)
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_every_hello_is_another_incarnation(node: Node) -> None:
    node.agent()
    first = node.trainer()
    one = first.welcomed(0).incarnation
    first.close()
    trainer = node.trainer()
    while isinstance(answer := trainer.hello(0), Rejected):  # its process lives, so it may linger a little
        assert "one job at a time" in answer.reason
        trainer = node.trainer()
    assert isinstance(answer, Welcome)
    assert answer.incarnation != one
    assert len(one) == 8


def test_rank_without_a_device_is_told_how_many_there_are(node: Node) -> None:
    node.agent()
    trainer = node.trainer()
    answer = trainer.hello(2)
    assert isinstance(answer, Rejected)
    assert "--nproc-per-node=2 at most" in answer.reason
    assert trainer.hear() is None


def test_words_that_are_none_end_the_connection_with_the_reason(node: Node) -> None:
    node.agent()
    for words, reason in ((b"{}", "does not understand"), (encode(Goodbye()), "Hello or Join")):
        trainer = node.trainer()
        unix_socket.send(trainer.sock, words)
        answer = trainer.hear()
        assert isinstance(answer, Rejected)
        assert reason in answer.reason
        assert trainer.hear() is None
    assert node.trainer().welcomed(0)


def test_report_reaches_the_leader_as_it_came_and_a_wrong_one_costs_itself_alone(
    node: Node, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "_logged", set())
    monkeypatch.setattr(decoding, "_next_look", {})
    leader = node.leader()
    running = node.agent()
    trainer = node.trainer()
    trainer.welcomed(0)
    until(lambda: leader.bodies(Hello))
    measured = Measurement(device="n0/0", plan=1, step=1, tokens=1, block_seconds=1.0, block_work=1.0)
    good = encode(Report(measurement=measured, loss=2.5))
    for wrong in (b'"one"', b"1e400", b"[" * 100 + b"]" * 100):
        unix_socket.send(trainer.sock, good.replace(b'"step":1', b'"step":' + wrong))
    unix_socket.send(trainer.sock, good.replace(b'"loss":2.5', b'"colour":"red","loss":2.5'))
    trainer.say(Finished(step=1))
    until(lambda: leader.bodies(Finished))
    assert leader.bodies(Report) == [Report(measurement=measured, loss=2.5)]
    assert len(leader.connections) == 1
    text = caplog.text
    assert "'from-client' has a field 'body.colour'" in text, "an agent does not look into a report"
    assert text.count("sent a message 'report' in a message 'from-client' whose content") == 1
    assert running.error is None
    trainer.close()


def test_killed_worker_is_lost_at_once_and_its_key_goes(
    node: Node, worker_process: subprocess.Popen[bytes]
) -> None:
    leader = node.leader()
    node.agent()
    assert worker_process.stdout is not None
    welcome = to_worker(worker_process.stdout.readline())
    assert isinstance(welcome, Welcome)
    until(lambda: node.store.get(KEYS.member("job", "n0/1")))
    until(lambda: leader.bodies(Hello))
    worker_process.send_signal(signal.SIGKILL)
    (gone,) = until(lambda: lost(leader))
    assert (gone.device, gone.incarnation, gone.clean) == ("n0/1", welcome.incarnation, False)
    assert gone.how == "its process ended"
    until(lambda: node.store.get(KEYS.member("job", "n0/1")) is None)


def test_worker_that_says_goodbye_ended_cleanly(node: Node, worker_process: subprocess.Popen[bytes]) -> None:
    leader = node.leader()
    node.agent()
    assert worker_process.stdin is not None
    worker_process.stdin.write(b"goodbye\n")
    worker_process.stdin.close()
    worker_process.stdin = None
    (gone,) = until(lambda: lost(leader))
    assert gone.clean


def test_outcome_said_while_the_leader_is_away_reaches_its_successor(node: Node) -> None:
    leader = node.leader()
    node.agent()
    trainer = node.trainer()
    trainer.welcomed(0)
    until(lambda: leader.bodies(Hello))
    leader.close()
    trainer.say(StayedOnPlan(number=3, step=7))
    trainer.say(Finished(step=8))
    successor = node.leader()
    until(lambda: successor.bodies(Finished))
    assert successor.bodies(StayedOnPlan) == [StayedOnPlan(number=3, step=7)]
    kinds = [type(getattr(message, "body", message)) for message in successor.heard]
    assert [kind for kind in kinds if kind is not Health] == [AgentHello, Hello, StayedOnPlan, Finished]


def test_an_agent_whose_driver_hangs_tells_of_its_machine_and_ends(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(nvml, "opened", lambda names: answers.wait(600))
    monkeypatch.setattr(nvml, "PATIENCE_SECONDS", 0.01)
    leader, running = node.leader(), node.agent()
    (health, *_) = until(lambda: [message for message in leader.heard if isinstance(message, Health)])
    assert health.memory_available
    assert health.devices == ()
    running.stop()
    assert running.error is None
    answers.set()


def test_broken_link_comes_back_and_says_everything_again(node: Node) -> None:
    leader = node.leader()
    node.agent()
    trainer = node.trainer()
    trainer.welcomed(0)
    until(lambda: leader.bodies(Hello))
    leader.hang_up()
    until(lambda: len(leader.bodies(Hello)) == 2)


def test_proposal_in_the_store_reaches_the_worker_and_a_stale_one_does_not(node: Node) -> None:
    leader = node.leader()
    node.agent()
    trainer = node.trainer()
    binding = {"n0/0": trainer.welcomed(0).incarnation}
    until(lambda: leader.bodies(Hello))
    for number, epoch in ((1, leader.epoch - 1), (2, leader.epoch)):
        record = Proposal(number=number, epoch=epoch, plan=plan(number, binding), old=None)
        node.store.put(KEYS.job("job", "proposal"), encode_record(record))
    answer = trainer.hear()
    assert isinstance(answer, Propose)
    assert answer.proposal == record


def test_highest_epoch_outlasts_the_agent_and_orders_below_it_are_refused(node: Node) -> None:
    def memory() -> StateFile:
        return StateFile(str(node.folder), CLUSTER, "agent", "n0")

    leader = node.leader()
    running = node.agent(memory=memory())
    until(lambda: memory().epoch == leader.epoch)
    until(lambda: memory().identity == MemoryStore(node.server).known())
    running.stop()
    later = node.store.put(KEYS.root + "another", b"")  # as if a later leader had been seen, of this revision
    memory().note(epoch=later)
    node.agent(memory=memory())
    trainer = node.trainer()
    binding = {"n0/0": trainer.welcomed(0).incarnation}
    for number, epoch in ((1, leader.epoch), (2, later)):
        record = Proposal(number=number, epoch=epoch, plan=plan(number, binding), old=None)
        node.store.put(KEYS.job("job", "proposal"), encode_record(record))
    answer = trainer.hear()
    assert isinstance(answer, Propose)
    assert answer.proposal == record


def test_an_agent_obeys_no_plan_of_an_old_copy_however_far_that_has_come(node: Node) -> None:
    """The copy was written to since, far beyond the revision that the agent remembers."""

    def memory() -> StateFile:
        return StateFile(str(node.folder), CLUSTER, "agent", "n0")

    leader = node.leader()
    key = KEYS.job("job", "plan")
    for number in (1, 2):
        record = PlanRecord(plan=plan(number, {"n0/0": "i"}), epoch=leader.epoch, step=0)
        node.store.put(key, encode_record(record))
    found = node.store.get(key)
    assert found is not None
    seen = Mark(created=found.create_revision, modified=found.mod_revision - 1, changes=9)
    memory().note(marks={key: seen})
    running = node.agent(memory=memory())
    running.join()
    assert isinstance(running.error, AgentError)
    assert "restored from an old copy" in str(running.error)
    assert str(memory().path) in str(running.error)


def test_end_of_a_job_reaches_the_worker_from_the_store(node: Node) -> None:
    leader = node.leader()
    node.agent()
    trainer = node.trainer()
    trainer.welcomed(0)
    until(lambda: leader.bodies(Hello))
    client = leader.client("n0/0")
    leader.send(ToClient(client=client, body=Shutdown(reason="the leader says so by itself")))
    done = DoneRecord(step=3, epoch=leader.epoch, reason="n1/0 died")
    node.store.put(KEYS.job("job", "done"), encode_record(done))
    assert trainer.hear() == Shutdown(reason="n1/0 died")


def test_call_on_the_bootstrap_store_and_its_answer_pass_through(node: Node) -> None:
    leader = node.leader()
    node.agent()
    trainer = node.trainer()
    trainer.welcomed(0)
    trainer.say(StoreCall(id=1, op="set", key="k", value=b"\x00\xff" * 100_000))
    assert trainer.hear() == StoreAnswer(id=1)
    trainer.say(StoreCall(id=2, op="get", key="k"))
    assert trainer.hear() == StoreAnswer(id=2, value=b"\x00\xff" * 100_000)
    assert leader.bodies(StoreCall)


def test_call_without_a_leader_fails_at_its_deadline(node: Node) -> None:
    node.agent()
    trainer = node.trainer()
    trainer.welcomed(0)
    trainer.say(StoreCall(id=1, op="get", key="k", seconds=0.1))
    answer = trainer.hear()
    assert isinstance(answer, StoreAnswer)
    assert answer.error == "no leader can be reached"


def test_chaos_reaches_the_device_with_the_emulated_times(node: Node) -> None:
    leader = node.leader()
    node.agent(emulate=EmulateSection(enabled=True, forward=1e-4, backward=2e-4, memory=1 << 20))
    trainer = node.trainer()
    assert trainer.welcomed(0).pace == EmulatedSpeed(forward=1e-4, backward=2e-4)
    until(lambda: leader.bodies(Hello))
    leader.send(ToClient(client="device:n0/0", body=EmulatedSpeed(factor=3.0)))
    assert trainer.hear() == EmulatedSpeed(forward=1e-4, backward=2e-4, factor=3.0)


def test_torchrun_joins_and_a_leader_that_comes_later_hears_of_it(node: Node) -> None:
    node.agent()
    torchrun = node.trainer()
    torchrun.say(Join(job="job", min_nodes=1, max_nodes=1, pid=os.getpid()))
    leader = node.leader()
    assert torchrun.hear() == Joined(node_rank=0, nodes=1)
    assert leader.bodies(Join)


def test_torchrun_whose_agent_was_started_again_takes_its_leave_of_the_new_one(node: Node) -> None:
    """Which watches it, and would take its end for a bad one."""
    leader = node.leader()
    running = node.agent()
    calls = AgentCalls(node.path, 60.0)
    assert isinstance(calls.join(Join(job="job", pid=os.getpid(), min_nodes=1, max_nodes=1)), Joined)
    running.stop()

    def hellos() -> int:
        return sum(isinstance(said, AgentHello) for said in leader.heard)

    before, linked = len(leader.bodies(Join)), hellos()
    node.agent()
    node.trainer()  # it listens: a torchrun that ends waits for no agent
    until(lambda: hellos() > linked)  # before that a leader learns of it by its absence
    calls.leave(Leave(job="job", how="finished", signal="SIGTERM"))
    until(lambda: leader.bodies(Leave))
    assert leader.bodies(Leave)[-1].signal == "SIGTERM"
    assert len(leader.bodies(Join)) > before


def test_agent_that_the_leader_rejects_ends_with_its_reason(node: Node) -> None:
    leader = node.leader()
    running = node.agent()
    until(lambda: leader.connections)
    leader.connections[0].send(encode(AgentRejected(reason="wrong release")))
    running.join()
    assert isinstance(running.error, AgentError)
    assert str(running.error) == "wrong release"


def test_outage_of_the_store_leaves_the_workers_alone_and_the_keys_catch_up(node: Node) -> None:
    leader = node.leader()
    node.agent()
    until(lambda: leader.connections)
    node.server.outage(True)
    trainer = node.trainer()
    trainer.welcomed(0)
    trainer.say(StayedOnPlan(number=1, step=1))
    until(lambda: leader.bodies(StayedOnPlan))
    node.server.outage(False)
    until(lambda: node.store.get(KEYS.member("job", "n0/0")))


def test_lost_lease_is_replaced_and_all_keys_written_again(node: Node) -> None:
    node.agent(ttl=3)
    node.trainer().welcomed(0)
    item = until(lambda: node.store.get(KEYS.member("job", "n0/0")))
    node.store.revoke(item.lease)
    again = until(lambda: node.store.get(KEYS.member("job", "n0/0")))
    assert again.lease != item.lease
    assert until(lambda: node.store.get(KEYS.node("n0"))).lease == again.lease


def test_stopped_agent_leaves_no_key_and_no_socket_behind(node: Node) -> None:
    running = node.agent()
    trainer = node.trainer()
    trainer.welcomed(0)
    until(lambda: node.store.get(KEYS.member("job", "n0/0")))
    running.stop()
    assert running.error is None
    assert node.store.snapshot(KEYS.root).items == ()
    assert not Path(node.path).exists()
    assert trainer.hear() is None


def test_messages_wait_for_a_worker_that_reads_late(node: Node) -> None:
    leader = node.leader()
    node.agent()
    trainer = node.trainer()
    trainer.welcomed(0)
    until(lambda: leader.bodies(Hello))
    for _ in range(400):  # more than the socket takes without a reader
        leader.send(ToClient(client="device:n0/0", body=Rejected(reason="x" * 3000)))
    assert all(isinstance(trainer.hear(), Rejected) for _ in range(400))
