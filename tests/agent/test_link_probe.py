"""Links between idle nodes are probed over the agents' own streams; one that has work is left alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from elasticd_agent.link_probe import PROBE_BYTES, LinkProbe, next_idle
from elasticd_agent.snapshots.port import StreamFailed

from elasticd.machines.agent.state import AgentState, DoneRead, PlanRead
from elasticd.records import DoneRecord, NodeRecord, PlanRecord
from elasticd.wire.coordinator import Crossed
from tests.agent.test_snapshot_transfer import Pair, known
from tests.machines.agent_scene import JOB, RECORD, aborted, plan, proposal, read_proposal, run


def node(name: str) -> NodeRecord:
    return NodeRecord(node=name, devices=(), address="x", agent=name, snapshots=f"{name}:1", certificate=name)


RING = [node("n1"), node("n2")]


def planned(*devices: str) -> PlanRead:
    record = PlanRecord(plan=plan(1, dict.fromkeys(devices, "i")), epoch=5, step=0)
    return PlanRead(job=JOB, record=record)


def target(*events: object) -> str | None:
    found = next_idle(run(*events)[0], RING)  # type: ignore[arg-type]
    return found.node if found is not None else None


def test_the_next_node_without_work_is_probed_by_one_that_has_none_either() -> None:
    assert next_idle(AgentState(record=RECORD), []) is None
    assert next_idle(AgentState(record=RECORD), RING) == RING[0]
    assert target(planned("n1/0")) == "n2"
    assert target(planned("n1/0", "n2/0")) is None
    assert target(planned("n0/0")) is None, "this one has work"
    open_ = proposal(1, {"n1/0": "i"})
    assert target(read_proposal(open_)) == "n2"
    assert target(read_proposal(aborted(open_))) == "n1"
    assert target(planned("n0/0", "n1/0"), DoneRead(job=JOB, record=DoneRecord(step=1, epoch=5))) == "n1"


class Sender:
    """`during` happens while the probe is under way."""

    def __init__(self, during: Callable[[], None] = lambda: None) -> None:
        self.during, self.asked = during, []

    def cross(self, address: str, certificate: str, size: int) -> tuple[float, float]:
        self.asked.append((address, certificate, size))
        self.during()
        return 0.5, 0.001


def test_a_probe_is_told_unless_the_link_had_work_meanwhile() -> None:
    state, told = [AgentState(record=RECORD)], list[Crossed]()
    sender = Sender()
    probe = LinkProbe(1.0, sender.cross, lambda: RING, lambda: state[0], told.append)
    asyncio.run(probe.probe())
    assert sender.asked == [("n1:1", "n1", PROBE_BYTES)]
    assert told == [Crossed(target="n1", size=PROBE_BYTES, seconds=0.5, latency=0.001)]

    def work() -> None:
        state[0] = run(planned("n0/0"))[0]

    probe = LinkProbe(1.0, Sender(work).cross, lambda: RING, lambda: state[0], told.append)
    asyncio.run(probe.probe())
    assert len(told) == 1


def test_an_agent_that_does_not_answer_is_no_measurement() -> None:
    def fails() -> None:
        raise StreamFailed("gone")

    told, state = list[Crossed](), AgentState(record=RECORD)
    asyncio.run(LinkProbe(1.0, Sender(fails).cross, lambda: RING, lambda: state, told.append).probe())
    assert told == []


def test_bytes_and_messages_cross_a_real_stream() -> None:
    pair = Pair(known)
    try:
        seconds, latency = pair.sender.cross(pair.address, pair.theirs.certificate, 3_000_001)
        assert seconds > 0
        assert 0 < latency < 60
        with pytest.raises(StreamFailed, match="is none"):
            pair.sender.cross(pair.address, pair.theirs.certificate, 1 << 40)
        assert not pair.arrived, "nothing is kept"
    finally:
        pair.close()
