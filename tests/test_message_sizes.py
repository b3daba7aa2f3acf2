"""Each message has a largest size, which is counted before anything is decoded; what is larger costs that
message alone, and no memory."""

from __future__ import annotations

import asyncio
import socket
import threading
import tracemalloc
from typing import get_args

import msgspec
import pytest
from elasticd_agent.coordinator_link import Link
from elasticd_planner.spec.measurement import Measurement

from elasticd.codec import decoding
from elasticd.codec.decoding import LARGE, MOST_COMMAS, SMALL, tag_of
from elasticd.codec.message import Message, encode, largest_of
from elasticd.codec.record_parts import MOST_BYTES
from elasticd.coordinator.http import agent_socket
from elasticd.machines.agent.state import Event, LinkUp
from elasticd.wire import unix_socket
from elasticd.wire.coordinator import (
    BYTES_TOGETHER,
    MOST_TOGETHER,
    AgentHello,
    FromClient,
    ToLeader,
    Unread,
    all_to_leader,
    frames,
    to_leader,
    together,
)
from elasticd.wire.node_health import Health
from elasticd.wire.worker import (
    FromWorker,
    Hello,
    PeersLost,
    Propose,
    Report,
    StoreCall,
    ToAgentAlone,
    from_worker,
)
from tests.coordinator.agents import agent, coordinating, until
from tests.machines.cast import FakeWorker, node_record, spec
from tests.machines.hostile import plain

WORKER = FakeWorker(device="alpha/0", incarnation="a")
#: Classes whose messages may be larger than others.
LARGE_ONES = {
    "hello",
    "store-call",
    "rendezvous-write",
    "snapshot-taken",
    "snapshot-inventory",
    "unreached-nodes",
}
TO_LEADER = [kind for kind in get_args(ToLeader) if kind is not FromClient]
TO_AGENT = [*get_args(FromWorker), *get_args(ToAgentAlone)]


def report(step: int) -> FromClient:
    measured = Measurement(device="alpha/0", plan=1, step=step, tokens=1, block_seconds=1.0, block_work=1.0)
    return WORKER.up(Report(measurement=measured))


def padded(kind: type[msgspec.Struct], size: int) -> bytes:
    """A legal message of so many bytes, most of them in a field that this release lacks."""
    data = msgspec.json.encode(plain(kind))
    return data[:-1] + b',"newer":"' + b"x" * (size - len(data) - 11) + b'"}'


@pytest.mark.parametrize("kind", TO_LEADER, ids=tag_of)
def test_what_an_agent_says_is_decoded_up_to_its_largest_size(kind: type[Message]) -> None:
    assert kind.largest == (LARGE if tag_of(kind) in LARGE_ONES else SMALL)
    assert isinstance(to_leader(padded(kind, kind.largest)), kind)
    assert to_leader(padded(kind, kind.largest + 1)) is None


@pytest.mark.parametrize("kind", TO_AGENT, ids=tag_of)
def test_what_a_worker_says_is_decoded_up_to_its_largest_size(kind: type[Message]) -> None:
    assert kind.largest == (LARGE if tag_of(kind) in LARGE_ONES else SMALL)
    assert isinstance(from_worker(padded(kind, kind.largest)), kind)
    assert from_worker(padded(kind, kind.largest + 1)) is None


def test_a_proposal_may_have_what_the_store_takes() -> None:
    assert Propose.largest == MOST_BYTES


@pytest.mark.parametrize("kind", get_args(FromWorker), ids=tag_of)
def test_a_message_around_another_has_the_size_of_both(kind: type[Message]) -> None:
    up = WORKER.up(from_worker(msgspec.json.encode(plain(kind))))  # type: ignore[arg-type]
    data = encode(up)
    largest = int(largest_of(up))
    assert largest == FromClient.largest + kind.largest
    body = data[:-2] + b',"newer":"' + b"x" * (largest - len(data) - 11) + b'"}}'
    assert len(body) == largest
    assert isinstance(to_leader(body), FromClient)
    assert isinstance(to_leader(body[:-3] + b'x"}}'), Unread | None)


def test_nothing_of_what_is_too_large_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a tag in its place, as no release writes it, a message is taken for a small one."""
    decoded: list[int] = []
    monkeypatch.setattr(decoding, "decoded", lambda decode, data: decoded.append(len(data)) or decode(data))
    large = msgspec.json.encode(plain(Hello) | {"newer": "x" * SMALL})
    assert isinstance(from_worker(large), Hello)
    decoded.clear()
    moved = b'{"newer":"' + b"x" * SMALL + b'",' + msgspec.json.encode(plain(Hello))[1:]
    assert from_worker(moved) is None
    assert from_worker(b'{"type":"goodbye","reason":"' + b"x" * SMALL + b'"}') is None
    assert decoded == []
    with pytest.raises(msgspec.DecodeError, match=r"too large.*bytes, where 4194304 are the most"):
        from_worker(padded(Hello, LARGE + 1), first=True)


@pytest.mark.parametrize("element", [b"1", b"[]", b'"a"', b"{}"])
def test_an_array_without_end_is_refused_at_its_first_elements(element: bytes) -> None:
    data = b"[" + (element + b",") * (8 << 20) + element + b"]"
    tracemalloc.start()
    try:
        with pytest.raises(msgspec.DecodeError):
            all_to_leader(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_large_message_has_so_many_values_at_most() -> None:
    """Else one of 4 MiB would hold the loop up: a value costs as much as hundreds of bytes of text."""
    hello = Hello(job="j", local_rank=0, world_size=1, pid=1, spec=spec())
    layers = (0,) * (MOST_COMMAS - 2000)
    model = msgspec.structs.replace(spec().model, layers=layers)
    few = msgspec.structs.replace(hello, spec=msgspec.structs.replace(spec(), model=model))
    assert isinstance(to_leader(encode(WORKER.up(few))), FromClient)
    many = encode(WORKER.up(few)).replace(b'"layers":[', b'"layers":[' + b"0," * 3000)
    unread = to_leader(many)
    assert isinstance(unread, Unread)
    assert f"commas, where {MOST_COMMAS} are the most" in unread.reason
    assert from_worker(encode(few).replace(b'"layers":[', b'"layers":[' + b"0," * 3000)) is None


def test_large_frame_is_decoded_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[str] = set()

    def decode(data: bytes, **options: bool) -> object:
        threads.add(threading.current_thread().name.partition("_")[0])
        return all_to_leader(data, **options)

    monkeypatch.setattr(agent_socket, "all_to_leader", decode)

    async def body() -> None:
        async with coordinating() as coordinator, agent(coordinator, node_record("alpha")) as alpha:
            await until(lambda: "alpha" in coordinator.leading.state.nodes)
            assert threads == {threading.current_thread().name}
            threads.clear()
            await alpha.socket.send(padded(Health, agent_socket.DECODED_BESIDE_BYTES + 1))
            await alpha.tell(AgentHello(record=node_record("alpha", memory=7)))
            await until(lambda: coordinator.leading.state.nodes["alpha"].record.devices[0].memory == 7)
            assert threads == {"decode", threading.current_thread().name}

    asyncio.run(body())


def test_one_that_is_too_large_does_not_spoil_what_came_with_it() -> None:
    texts = [encode(report(1)), padded(PeersLost, SMALL + 1), encode(report(2))]
    texts[1] = encode(WORKER.up(PeersLost(step=1, reason="x" * 2 * SMALL)))
    assert all_to_leader(together(texts)) == [report(1), None, report(2)]


def test_a_spec_that_is_too_large_is_told_to_its_worker() -> None:
    hello = Hello(job="j", local_rank=0, world_size=1, pid=1, spec=spec(), checkpoints=("x" * (LARGE + SMALL),))
    unread = to_leader(encode(WORKER.up(hello)))
    assert isinstance(unread, Unread)
    assert "bytes, where 4456448 are the most" in unread.reason


def test_frames_have_so_many_messages_and_bytes_at_most_and_lose_none() -> None:
    few = [encode(report(step)) for step in range(3 * MOST_TOGETHER)]
    value = encode(WORKER.up(StoreCall(id=1, op="set", key="k", value=b"x" * (BYTES_TOGETHER // 2))))
    texts = [*few[:70], value, value, *few[70:], value * 1]
    made = list(frames(texts))
    assert [message for frame in made for message in all_to_leader(frame)] == [*map(to_leader, texts)]
    several = [frame for frame in made if frame.startswith(b"[")]
    assert all(len(frame) <= BYTES_TOGETHER for frame in several)
    assert all(len(all_to_leader(frame)) <= MOST_TOGETHER for frame in several)
    assert list(frames([])) == []


def test_an_agent_sends_nothing_that_its_leader_would_skip(caplog: pytest.LogCaptureFixture) -> None:
    """Else the leader would hang up, and hear the same on the next connection."""

    async def body() -> None:
        async with coordinating() as coordinator:
            events: list[Event] = []
            link = Link(events.append, {})
            link.follow(coordinator.url)
            await until(lambda: LinkUp() in events, 60)
            link.send(WORKER.up(PeersLost(step=1, reason="x" * 3 * SMALL)))
            await until(lambda: "are the most" in caplog.text, 60)
            await link.close()

    asyncio.run(body())


def test_a_packet_that_is_too_large_is_not_read() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        unix_socket.send(ours, b"x" * (1 << 20))
        with pytest.raises(unix_socket.PacketError, match="of 1048576 bytes came, where 1000 are the most"):
            unix_socket.accept(theirs, 1000)
        unix_socket.send(ours, b"next")
        assert unix_socket.accept(theirs, 1000) == (b"next", None)
