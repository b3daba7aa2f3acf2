"""Messages that travel together arrive as they were sent, in order; one alone looks as it always did."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from elasticd_agent.coordinator_link import Link
from elasticd_planner.spec.measurement import Measurement

from elasticd.codec.message import encode
from elasticd.machines.agent.state import Event, LinkUp
from elasticd.wire.coordinator import (
    MOST_TOGETHER,
    AgentHello,
    FromClient,
    ToLeader,
    all_to_leader,
    to_leader,
    together,
)
from elasticd.wire.worker import Report, StoreAnswer, StoreCall
from tests.coordinator.agents import agent, coordinating, until
from tests.machines.cast import JOB, FakeWorker, node_record

WORKER = FakeWorker(device="alpha/0", incarnation="a")


def report(step: int) -> FromClient:
    measured = Measurement(device="alpha/0", plan=1, step=step, tokens=1, block_seconds=1.0, block_work=1.0)
    return WORKER.up(Report(measurement=measured, loss=float(step), tokens=1))


def call(number: int) -> FromClient:
    return WORKER.up(StoreCall(id=number, op="add", key="k", value=b"1"))


def test_what_travels_together_comes_out_in_order() -> None:
    sent: list[ToLeader] = [AgentHello(record=node_record("alpha")), report(1), call(1)]
    assert list(all_to_leader(together([encode(message) for message in sent]))) == sent


def test_one_message_alone_is_as_releases_before_read_it() -> None:
    alone = encode(report(1))
    assert together([alone]) == alone
    assert list(all_to_leader(alone)) == [to_leader(alone)]


@pytest.mark.parametrize("noise", [b'{"kind": "agent-hello"}', b'["agent-hello"]', b"7"])
def test_bytes_that_are_no_message_spoil_what_came_with_them(noise: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        all_to_leader(together([encode(report(1)), noise]))


def test_a_message_that_cannot_be_decoded_does_not_spoil_what_came_with_it() -> None:
    broken = encode(call(1)).replace(b'"op":"add"', b'"op":7')
    assert broken != encode(call(1))
    parts = [b'{"type": "agent-hello"}', encode(report(1)), broken, b'{"type": "from-client"}', encode(call(2))]
    assert list(all_to_leader(together(parts))) == [None, report(1), None, None, call(2)]
    assert list(all_to_leader(broken)) == [None]


def test_a_hello_that_cannot_be_decoded_is_refused() -> None:
    hello = b'{"type": "agent-hello"}'
    for data in (hello, together([hello, encode(report(1))])):
        with pytest.raises(msgspec.DecodeError, match="record"):
            all_to_leader(data, first=True)
    broken = b'{"type": "from-client"}'
    both = together([encode(report(1)), broken])
    assert list(all_to_leader(both, first=True)) == [report(1), None]


def test_one_message_of_a_newer_release_does_not_spoil_what_came_with_it() -> None:
    newer = b'{"type": "quota-report", "version": 2}'
    inside = encode(report(2)).replace(b'"type":"report"', b'"type":"report-two"')
    assert inside != encode(report(2))
    read = all_to_leader(together([newer, encode(report(1)), inside, encode(call(1))]))
    assert list(read) == [None, report(1), None, call(1)]
    assert list(all_to_leader(newer)) == [None]


@pytest.mark.parametrize("each", [encode(report(1)), b'{"type": "quota-report"}'])
def test_more_messages_in_one_than_an_agent_sends_are_refused(each: bytes) -> None:
    """What is skipped is slow to read: 100,000 of these hold the loop of a leader for 0.6 s."""
    assert len(all_to_leader(together([each] * MOST_TOGETHER))) == MOST_TOGETHER
    with pytest.raises(msgspec.DecodeError, match="64 are the most"):
        all_to_leader(together([each] * (MOST_TOGETHER + 1)))


def test_a_leader_does_all_that_came_as_one_message_in_order() -> None:
    async def body() -> None:
        async with coordinating() as coordinator, agent(coordinator, node_record("alpha")) as alpha:
            await alpha.takes_part(JOB)
            await alpha.socket.send(together([encode(call(number)) for number in (1, 2, 3)]))
            await until(lambda: len(alpha.heard) == 3, 60)
            answers = [StoreAnswer(id=number, number=number) for number in (1, 2, 3)]
            assert alpha.bodies("walpha/0") == answers

    asyncio.run(body())


def test_a_link_sends_all_that_waits_and_loses_nothing() -> None:
    async def body() -> None:
        async with coordinating() as coordinator:
            events: list[Event] = []
            link = Link(events.append, {})
            heard: list[ToLeader] = []
            hear = coordinator.leading.heard

            async def listening(connection, message):  # type: ignore[no-untyped-def]
                heard.append(message)
                await hear(connection, message)

            coordinator.leading.heard = listening  # type: ignore[method-assign]
            link.follow(coordinator.url)
            await until(lambda: LinkUp() in events, 60)
            sent: list[ToLeader] = [report(step) for step in range(2 * MOST_TOGETHER)]
            sent.insert(5, call(1))
            link.send(AgentHello(record=node_record("alpha")))
            for message in sent:
                link.send(message)
            await until(lambda: len(heard) == len(sent), 60)
            assert heard == sent
            await link.close()

    asyncio.run(body())


@pytest.mark.parametrize("nothing", [b"[]", b"[ ]", b"[\n\t\r]"])
def test_no_message_at_all_is_refused(nothing: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        all_to_leader(nothing)
