"""What a newer release sends is skipped with one log line, by every receiver, and what follows it is heard."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from elasticd_agent import coordinator_link
from elasticd_agent.coordinator_link import Link
from elasticd_agent.restart_rendezvous import _Job
from elasticd_agent.snapshots import transfer
from elasticd_agent.store_watch import StoreWatch
from elasticd_planner.spec.measurement import Measurement
from elasticd_planner.spec.plan import PLAN_VERSION, Plan
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticd import records
from elasticd.codec import decoding
from elasticd.codec.decoding import decode_stored
from elasticd.codec.message import Message, encode
from elasticd.coordinator.events.event_log import Lines
from elasticd.machines.agent.state import Event, Heard, LinkUp
from elasticd.records import Keys
from elasticd.rendezvous.agent_requests import AgentRequests
from elasticd.rendezvous.live_mode import AgentCalls, RendezvousRefusal
from elasticd.runtime.control.agent_client import AgentClient, RejectedByAgent
from elasticd.store.memory import MemoryServer, MemoryStore
from elasticd.store.protocol import KeyValue
from elasticd.testing.waiting import until
from elasticd.version import __version__
from elasticd.wire import unix_socket
from elasticd.wire.coordinator import (
    AgentHello,
    AgentRejected,
    FromClient,
    Unread,
    all_to_leader,
    to_agent,
    to_leader,
)
from elasticd.wire.rendezvous import Attend, Attending, Join, Joined, Leave, RoundAnswer, Torchrun, Watching
from elasticd.wire.snapshots import Snapped
from elasticd.wire.worker import (
    Closed,
    FromWorker,
    Goodbye,
    Hello,
    Recorded,
    Rejected,
    Report,
    Shutdown,
    StayedOnPlan,
    StoreAnswer,
    ToAgentAlone,
    Welcome,
    from_worker,
    to_worker,
)
from tests.agent.support import CLUSTER, Node, closing_all, spec
from tests.coordinator.agents import coordinating
from tests.coordinator.agents import until as eventually
from tests.releases.samples import MODULES, sample

KEYS = Keys(cluster=CLUSTER)
NEWER = b'{"type": "quota-report", "version": 2, "share": 0.5}'
MALFORMED = b'{"type": "store-answer"}'
NOISE = b'{"kind": "store-answer"}'


@pytest.fixture(autouse=True)
def _nothing_logged_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "_logged", set())
    monkeypatch.setattr(decoding, "_next_look", {})


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with closing_all() as register:
        yield Node(register, tmp_path)


class Peer:
    """Plays an agent: accepts one client and sends what it is given, whatever the client says."""

    def __init__(self, path: str, *sent: bytes) -> None:
        self._listener = unix_socket.listen(path)
        self._listener.setblocking(True)
        self._sent = sent
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        self.socket, _ = self._listener.accept()
        for data in self._sent:
            unix_socket.send(self.socket, data)

    def ready(self) -> socket.socket:
        self._thread.join(60)
        return self.socket

    def close(self) -> None:
        self._listener.close()
        self.ready().close()


def said(caplog: pytest.LogCaptureFixture, text: str) -> int:
    return sum(text in record.getMessage() for record in caplog.records)


def join() -> Join:
    return Join(job="j", min_nodes=1, max_nodes=2, pid=os.getpid())


def own_hello() -> Hello:
    return Hello(job="j", local_rank=0, world_size=1, pid=os.getpid(), spec=spec("j"))


WELCOME = encode(Welcome(device="a/0", incarnation="1f", address="127.0.0.1"))


# -- a worker --------------------------------------------------------------------------------------------------


def test_a_worker_skips_what_it_does_not_know_and_hears_what_follows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also before it is welcomed, and with a descriptor; what cannot be read at all is skipped as well."""
    path = str(tmp_path / "s")
    peer = Peer(path, NEWER, WELCOME, NEWER, MALFORMED, NOISE, NOISE, encode(Recorded(number=3)))
    control = AgentClient(path, Hello(job="j", local_rank=0, world_size=1, pid=1, spec=spec("j")))
    heard: list[object] = []
    came = threading.Event()
    control.start(lambda message: (heard.append(message), came.set()))
    assert came.wait(60)
    assert heard == [Recorded(number=3)]
    control.close(Goodbye())
    peer.close()
    assert said(caplog, "'quota-report', which elasticd") == 1
    assert said(caplog, "'store-answer' whose content elasticd") == 1
    assert said(caplog, "cannot be read and is skipped") == 1


def test_a_worker_whose_agent_answers_with_what_is_no_message_is_told_the_remedy(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    peer = Peer(path, MALFORMED)
    with pytest.raises(RejectedByAgent, match="install the same release"):
        AgentClient(path, Hello(job="j", local_rank=0, world_size=1, pid=1, spec=spec("j")))
    peer.close()


def test_the_first_message_of_a_connection_is_refused_where_its_content_cannot_be_decoded(node: Node) -> None:
    node.agent()
    stranger = node.trainer()
    unix_socket.send(stranger.sock, b'{"type": "hello", "job": "j"}')
    refusal = stranger.hear()
    assert isinstance(refusal, Rejected)
    assert "does not understand this message" in refusal.reason


@pytest.mark.parametrize(
    "ask", [AgentRequests, lambda path, job, seconds: AgentCalls(path, seconds).join(join())]
)
def test_a_torchrun_does_not_wait_on_an_answer_to_its_hello_that_it_cannot_decode(
    tmp_path: Path, ask: Callable[[str, str, float], object]
) -> None:
    path = str(tmp_path / "s")
    peer = Peer(path, b'{"type": "joined"}')
    with pytest.raises(RendezvousRefusal, match="install the same release"):
        ask(path, "j", 10.0)
    peer.close()


# -- a torchrun ------------------------------------------------------------------------------------------------


def test_a_torchrun_in_live_mode_skips_what_it_does_not_know(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    joined = Joined(node_rank=1, nodes=2)
    peer = Peer(path, NEWER, encode(joined), NEWER, encode(StoreAnswer(id=1, value=b"v")))
    calls = AgentCalls(path, 10.0)
    assert calls.join(Join(job="j", min_nodes=1, max_nodes=2, pid=1)) == joined
    assert calls.call("get", "k").value == b"v"
    for data in (MALFORMED, encode(StoreAnswer(id=2, value=b"w"))):
        unix_socket.send(peer.ready(), data)
    assert calls.call("get", "k").value == b"w"
    unix_socket.send(peer.ready(), NOISE)
    with pytest.raises(RendezvousRefusal, match="install the same release"):
        calls.call("get", "k")
    peer.close()


def test_a_torchrun_in_restart_mode_skips_what_it_does_not_know(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    answer = RoundAnswer(id=1, value=b"state", token=4)
    attending = encode(Attending(address="10.0.0.1"))
    peer = Peer(path, NEWER, attending, NEWER, encode(answer))
    asking = AgentRequests(path, "j", 10.0)
    assert asking.address == "10.0.0.1"
    assert asking.read() == answer
    later = msgspec.structs.replace(answer, id=2, token=5)
    for data in (MALFORMED, encode(later)):
        unix_socket.send(peer.ready(), data)
    assert asking.read() == later
    unix_socket.send(peer.ready(), NOISE)
    with pytest.raises(RendezvousRefusal, match="install the same release"):
        asking.read()
    asking.close()
    peer.close()


# -- an agent --------------------------------------------------------------------------------------------------


def test_an_agent_skips_what_an_admitted_client_says_and_refuses_strangers_and_noise(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    leader = node.leader()
    node.agent()
    worker = node.trainer()
    worker.welcomed(0)
    for _ in range(3):
        unix_socket.send(worker.sock, NEWER)
        unix_socket.send(worker.sock, b'{"type": "refused"}')
    worker.say(StayedOnPlan(number=1, step=2))
    until(lambda: leader.bodies(StayedOnPlan))
    assert said(caplog, "'quota-report', which elasticd") == 1
    assert said(caplog, "'refused' whose content elasticd") == 1
    stranger = node.trainer()
    unix_socket.send(stranger.sock, NEWER)
    refusal = stranger.hear()
    assert isinstance(refusal, Rejected)
    assert "does not know its first message" in refusal.reason
    unix_socket.send(worker.sock, b'{"kind": "refused"}')
    noise = worker.hear()
    assert isinstance(noise, Rejected)
    assert "does not understand this message" in noise.reason


def test_an_agent_skips_what_its_leader_says(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with coordinating() as coordinator:
            events: list[Event] = []
            coordinator_link = Link(events.append, {})
            coordinator_link.follow(coordinator.url)
            await eventually(lambda: LinkUp() in events)
            coordinator_link.send(AgentHello(record=node_record()))
            await eventually(lambda: "n0" in coordinator.leading.state.nodes)
            connection = coordinator.leading.connections._live["n0"]
            inside = b'{"type": "to-client", "client": "c", "body": ' + NEWER + b"}"
            for data in (NEWER, inside, b'{"type": "drain"}', NOISE, NOISE):
                connection._waiting.put_nowait(data)
            connection.send(AgentRejected(reason="r"))
            await eventually(lambda: Heard(message=AgentRejected(reason="r")) in events)
            assert [event for event in events if isinstance(event, Heard)] == [events[-1]]
            await coordinator_link.close()

    asyncio.run(body())
    assert said(caplog, "'quota-report', which elasticd") == 1
    assert said(caplog, "'quota-report' in a message 'to-client', which elasticd") == 1
    assert said(caplog, "a message of the leader cannot be read and is skipped") == 1


@pytest.mark.parametrize("kind", [Hello, Join])
def test_whose_opening_the_leader_cannot_decode_is_told_so_through_an_agent_that_can(
    kind: type[Message], node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The agent is of the worker's release, the leader is not."""
    newer, frames = f'"type":"{decoding.tag_of(kind)}"'.encode(), coordinator_link.frames

    def changed(text: bytes) -> bytes:
        return text.replace(b'"pid":', b'"pid":"of a container",  "p":') if newer in text else text

    monkeypatch.setattr(coordinator_link, "frames", lambda texts: frames([changed(text) for text in texts]))

    def said_to(client: Any) -> str:
        client.say(join() if kind is Join else own_hello())
        answers = [client.hear()] if kind is Join else [client.hear(), client.hear()]
        assert isinstance(answers[-1], Rejected), answers
        return answers[-1].reason

    async def body() -> None:
        async with coordinating(node.server) as coordinator:
            node.agent()
            for times in (1, 2):
                why = await asyncio.to_thread(said_to, node.trainer())
                assert f"the coordinator, of elasticd {__version__}, cannot decode the hello of" in why
                assert "install the same release of elasticd everywhere" in why
                refused = 'reason="unreadable"} ' + f"{times}.0"
                assert refused in coordinator.leading.exposition().decode()

    asyncio.run(body())
    assert said(caplog, "in a message 'from-client' whose content elasticd") == 1


def test_an_agent_answers_a_request_of_another_agent_that_it_does_not_know() -> None:
    frames: list[Message] = []

    class Stream:
        """One frame from a newer agent."""

        data = b""

        def recv(self, size: int) -> bytes:
            found, self.data = self.data[:size], self.data[size:]
            return found

        def sendall(self, data: bytes) -> None:
            frames.append(msgspec.json.decode(data[4:], type=transfer.Answer))

    stream: Any = Stream()
    stream.data = len(NEWER).to_bytes(4, "big") + NEWER
    server: Any = object.__new__(transfer.SnapshotServer)
    server._take(stream, "n0")
    assert frames == [transfer.Answer(error=f"elasticd {__version__} does not know this request")]
    with pytest.raises(transfer.StreamFailed, match="does not know its answer"):
        transfer._check(NEWER)


def test_agents_two_versions_apart_keep_nothing_for_each_other() -> None:
    frames: list[Message] = []
    far = transfer.Request(echoes=1, bytes=1, version=3)
    with patch.multiple(
        transfer,
        _read_frame=lambda stream: encode(far),
        _send_frame=lambda stream, body: frames.append(body),
    ):
        server: Any = object.__new__(transfer.SnapshotServer)
        server._take(None, "n0")
    (answer,) = frames
    assert isinstance(answer, transfer.Answer)
    assert "request has version 3, and elasticd" in answer.error
    with pytest.raises(transfer.StreamFailed, match="answer has version 3, and elasticd"):
        transfer._check(encode(transfer.Answer(version=3)))
    transfer._check(encode(transfer.Answer(version=2)))


def test_a_hello_of_another_release_is_logged_in_each_mode(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    node.agent()
    for number, kind in enumerate((Attend, Watching)):
        torchrun = node.trainer()
        place = {"torchrun": "t", "local_rank": 0, "round": 1, "world": 1, "nodes": 1, "least": 1}
        given = place if kind is Watching else {}
        torchrun.say(kind(job="r", pid=os.getpid(), release=f"9.8.{number}", **given))
        until(lambda number=number: said(caplog, f"is of elasticd 9.8.{number}, this agent of") == 1)


# -- etcd ------------------------------------------------------------------------------------------------------


def test_keys_that_are_not_known_are_skipped_with_one_line_for_all_like_them(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    leader = node.leader()
    for key in ("quotas/a", "jobs/job/quota", "jobs/other/quota", "leader-notes/1", "leader-notes/2"):
        node.store.put(KEYS.root + key, b"\xff")
    node.agent()
    worker = node.trainer()
    worker.welcomed(0)
    node.store.put(KEYS.jobs + "job/quota", b"{}")
    node.store.put(KEYS.job("job", "done"), records.encode(records.DoneRecord(step=1, epoch=leader.epoch)))
    assert isinstance(worker.hear(), Shutdown | Closed)
    assert said(caplog, "keys under 'jobs/JOB/quota' are skipped") == 1
    assert said(caplog, "keys under 'leader-notes' are skipped") == 1
    assert said(caplog, "keys under 'quotas' are skipped") == 0, "which an agent does not read at all"


def test_a_torchrun_whose_record_cannot_be_read_counts_as_here(caplog: pytest.LogCaptureFixture) -> None:
    job = _Job(prefix="/r/")
    left = msgspec.json.encode(Torchrun(node="n1", store="", status="left"))
    values = {"torchruns/a": b'{"type": "torchrun", "version": 9}', "torchruns/b": left, "out/b": b"\xff"}
    values["torchruns/c"] = msgspec.json.encode(Torchrun(node="n2", store=""))
    values["out/c"] = b"\xff"
    for name, value in values.items():
        key = job.prefix + name
        job.take(KeyValue(key=key, value=value, create_revision=1, mod_revision=1, version=1, lease=0))
    for _ in range(3):
        found = {name: torchrun.status for name, torchrun in job.torchruns().items()}
        assert found == {"a": "here", "b": "left", "c": "out"}
    assert said(caplog, "'/r/torchruns/a' in the store cannot be read: the value 'torchrun' has version 9") == 1
    assert said(caplog, "in the store cannot be read") == 3


def test_a_record_that_an_agent_cannot_read_is_said_once_however_often_it_is_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    read = StoreWatch(MemoryStore(MemoryServer()), KEYS, *[lambda *told: None] * 4)._read
    long = b'{"type": "node", "version": "%s"}' % (b"x" * 100_000)
    for revision in range(1, 101):
        for key, value in (
            (KEYS.job("j", "checkpoints"), b'{"type": "checkpoints", "version": 3}'),
            (KEYS.nodes + "n0", long),
        ):
            read(
                key,
                KeyValue(
                    key=key, value=value, create_revision=1, mod_revision=revision, version=revision, lease=0
                ),
            )
    assert said(caplog, "'checkpoints' has version 3, and elasticd") == 1
    assert said(caplog, "'node' has version x") == 1
    assert said(caplog, "upgrade over the releases in between one by one") == 2
    assert max(len(record.getMessage()) for record in caplog.records) < 1000


def test_a_key_that_somebody_invents_is_logged_quoted_and_shortened(caplog: pytest.LogCaptureFixture) -> None:
    assert KEYS.note_unknown(KEYS.root + "x\n" + "y" * 500)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "\n" not in line
    assert len(line) < 400


@pytest.mark.parametrize(
    "key", ["schema", "leader", "config", "config-history/00000001", "nodes/n0", "members/j/n0:0"]
)
def test_keys_of_this_release_are_known(key: str) -> None:
    assert KEYS.unknown_part(KEYS.root + key) == ""


@pytest.mark.parametrize("part", ["spec", "plan", "done", "members/n0:0", "history/00000001", "ranks/a:b"])
def test_keys_of_a_job_are_known(part: str) -> None:
    assert KEYS.unknown_part(f"{KEYS.jobs}j/{part}") == ""


# -- what is decoded -------------------------------------------------------------------------------------------


def test_fields_that_are_not_known_are_skipped_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    measured = Measurement(device="a/0", plan=1, step=1, tokens=1, block_seconds=1.0, block_work=1.0)
    report = Report(measurement=measured)
    tree = msgspec.to_builtins(report) | {"colour": "red"}
    tree["measurement"]["watts"] = 300
    data = msgspec.json.encode(tree)
    for _ in range(3):
        assert from_worker(data) == report
        decoding._next_look.clear()
    assert said(caplog, "'report' has a field 'colour'") == 1
    assert said(caplog, "'report' has a field 'measurement.watts'") == 1


def test_fields_are_looked_for_in_one_message_of_a_kind_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[object] = []
    search = decoding._unknown_fields

    def searched(value: object, raw: object, path: str) -> Iterator[str]:
        looked.append(value)
        return search(value, raw, path)

    monkeypatch.setattr(decoding, "_unknown_fields", searched)
    leave, kept = encode(Leave(job="j")), encode(StayedOnPlan(number=1, step=1))
    for _ in range(100):
        from_worker(leave)
        from_worker(kept)
    assert [type(value) for value in looked if isinstance(value, Leave | StayedOnPlan)].count(Leave) <= 2
    assert {Leave, StayedOnPlan} <= {type(value) for value in looked}


def test_names_that_somebody_invents_without_end_are_not_logged_without_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for number in range(1000):
        assert to_worker(b'{"type": "%d%s"}' % (number, b"x" * 500)) is None
    found = [record.getMessage() for record in caplog.records if record.name == "elasticd.codec.decoding"]
    assert 0 < len(found) <= 256
    assert max(map(len, found)) < 400
    assert "logs no further ones" in found[-1]


def test_a_stored_value_of_a_far_version_is_refused_naming_both(caplog: pytest.LogCaptureFixture) -> None:
    fence = records.Fence(number=1, epoch=2, gone={}, reason="r")
    for version in (1, 2):
        text = records.encode(msgspec.structs.replace(fence, version=version))
        assert decode_stored(text, records.Fence).reason == "r"
    for odd in (3, 0, -1, "one"):
        text = msgspec.json.encode(msgspec.to_builtins(fence) | {"version": odd})
        with pytest.raises(msgspec.DecodeError, match=rf"'fence' has version {odd}.*elasticd .* version 1"):
            decode_stored(text, records.Fence)
    with pytest.raises(msgspec.DecodeError, match="type"):
        decode_stored(records.encode(fence), records.DoneRecord)


def test_a_stored_value_of_every_older_version_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    fence = records.Fence(number=1, epoch=2, gone={}, reason="r")
    monkeypatch.setattr(decoding, "_known_version", lambda kind: 7)
    for version in range(1, 9):
        text = records.encode(msgspec.structs.replace(fence, version=version))
        assert decode_stored(text, records.Fence).version == version
    with pytest.raises(msgspec.DecodeError, match=r"'fence' has version 9.*elasticd .* version 7"):
        decode_stored(records.encode(msgspec.structs.replace(fence, version=9)), records.Fence)


def test_a_far_version_within_a_message_is_refused_as_in_the_store(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """A leader that took it would write what no leader of its release can read."""

    def hello(version: int) -> Hello:
        newer = msgspec.structs.replace(own_hello().spec, version=version)
        return msgspec.structs.replace(own_hello(), release="0.9.0", spec=newer)

    both = rf"'job-spec' has version 3 \(elasticd 0.9.0\), and elasticd {__version__} here knows version 1"
    assert from_worker(encode(hello(2)), first=True) == hello(2)
    with pytest.raises(msgspec.DecodeError, match=both):
        from_worker(encode(hello(3)), first=True)

    far, near = (
        FromClient(client="c", job="j", device="n0/0", incarnation="1", body=hello(version))
        for version in (3, 2)
    )
    unread, heard = all_to_leader(b"[" + encode(far) + b"," + encode(near) + b"]")
    assert isinstance(unread, Unread)
    assert re.search(both, unread.reason)
    assert heard == near
    record = msgspec.structs.replace(node_record(), version=3)
    with pytest.raises(msgspec.DecodeError, match="'node' has version 3"):
        to_leader(encode(AgentHello(record=record)), first=True)

    node.agent()
    stranger = node.trainer()
    stranger.say(hello(3))
    refusal = stranger.hear()
    assert isinstance(refusal, Rejected)
    assert re.search(both, refusal.reason)


def test_a_plan_of_the_newest_version_is_taken_from_a_message_and_from_the_store() -> None:
    """Most plans are written with an older one."""
    told = sample(Snapped)
    assert told.plan is not None
    told = msgspec.structs.replace(told, plan=MODULES)
    assert MODULES.version == PLAN_VERSION == 4
    assert from_worker(encode(told)) == told
    assert decode_stored(records.encode(MODULES), Plan) == MODULES


def test_values_too_deep_for_the_look_for_unknown_fields_are_decoded_or_refused() -> None:
    """msgspec takes a few levels more than the look can walk, or a few fewer."""
    for depth in range(900, 1010):
        nested = b'{"a":' * depth + b"1" + b"}" * depth
        one = b'{"id":1,"time":1.0,"kind":"k","job":"","text":"t","data":' + nested + b"}"
        decoding._next_look.clear()
        with suppress(msgspec.DecodeError):
            lines = decode_stored(b'{"type":"journal-lines","events":[' + one + b'],"steps":{}}', Lines)
            assert lines.events[0].id == 1


def test_two_processes_that_talk_may_be_one_version_apart_on_either_side() -> None:
    assert [version for version in range(10) if not decoding.version_refusal("it", version, 7)] == [6, 7, 8]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
TAGS = st.sampled_from(["report", "from-client", "to-client", "hello", "quota-report", "", "Report"])
READERS: tuple[Callable[[bytes], Any], ...] = (
    from_worker,
    to_worker,
    to_leader,
    to_agent,
    all_to_leader,
    lambda data: all_to_leader(b"[" + data + b"]"),
)


@settings(max_examples=100, deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "type": TAGS | JSON,
            "version": st.integers(),
            "client": st.text(max_size=3),
            "body": st.fixed_dictionaries({"type": TAGS | JSON}) | JSON,
        },
    )
)
def test_any_object_is_a_message_or_skipped_or_refused(tree: dict[str, Any]) -> None:
    data = msgspec.json.encode(tree)
    for read in READERS:
        try:
            read(data)
        except msgspec.DecodeError:
            continue


def test_looking_for_unknown_fields_costs_a_report_next_to_nothing() -> None:
    measured = Measurement(device="a/0", plan=1, step=1, tokens=1, block_seconds=1.0, block_work=1.0)
    data = encode(Report(measurement=measured))
    plain = msgspec.json.Decoder(FromWorker | ToAgentAlone).decode

    def best(read: Callable[[bytes], object]) -> float:
        times = []
        for _ in range(20):
            began = time.perf_counter()
            for _ in range(500):
                read(data)
            times.append((time.perf_counter() - began) / 500)
        return min(times)

    assert best(from_worker) - best(plain) < 20e-6  # 8,000 a second: a sixth of one core at worst


def node_record() -> records.NodeRecord:
    return records.NodeRecord(node="n0", devices=(), address="127.0.0.1", agent="x")


def test_the_log_of_what_is_skipped_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    to_worker(NEWER)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
