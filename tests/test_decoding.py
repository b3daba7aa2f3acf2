"""Whatever bytes come: each decoder gives a value or `msgspec.DecodeError`, and a packet `PacketError`."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from elasticd_planner.problem import Problem
from elasticd_planner.spec.measurement import Measurement
from elasticd_planner.spec.plan import Plan
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticd import records
from elasticd.codec.decoding import decoded, decoded_as
from elasticd.codec.message import encode
from elasticd.coordinator.http.api import ConfigRequest, DrainRequest
from elasticd.coordinator.http.chaos import ChaosRequest
from elasticd.store.leader import ElectedLeader
from elasticd.store.protocol import KeyValue
from elasticd.wire import unix_socket
from elasticd.wire.coordinator import (
    AgentHello,
    FromClient,
    PassedReport,
    ToClient,
    all_to_leader,
    to_agent,
    to_leader,
    together,
)
from elasticd.wire.worker import (
    EmulatedSpeed,
    Rejected,
    Report,
    StoreAnswer,
    StoreCall,
    from_worker,
    passed_report,
    to_worker,
)
from tests.descriptors import open_descriptors
from tests.machines.cast import node_record, spec
from tests.sizes import examples

VALID: tuple[msgspec.Struct, ...] = (
    AgentHello(record=node_record("alpha")),
    FromClient(
        job="j",
        client="c",
        device="alpha/0",
        incarnation="i",
        body=StoreCall(id=1, op="set", key="k", value=b"v"),
    ),
    ToClient(client="c", body=StoreAnswer(id=1, value=b"v")),
    ToClient(client="c", body=EmulatedSpeed(factor=2.0)),
    Rejected(reason="no"),
    spec(),
    node_record("beta"),
)


def leader(data: bytes) -> ElectedLeader:
    try:
        return ElectedLeader.of(
            KeyValue(key="k", value=data, create_revision=1, mod_revision=1, version=1, lease=0)
        )
    except ValueError as error:
        raise msgspec.DecodeError(str(error)) from error


DECODERS: tuple[Callable[[bytes], Any], ...] = (
    from_worker,
    to_worker,
    to_leader,
    all_to_leader,
    lambda data: all_to_leader(b"[" + data + b"]"),
    to_agent,
    leader,
    *(
        lambda data, kind=kind: records.decode(data, kind)  # type: ignore[misc]
        for kind in (
            records.NodeRecord,
            records.MemberRecord,
            records.PlanRecord,
            records.Proposal,
            records.Fence,
            records.DoneRecord,
            records.HistoryRecord,
            records.CheckpointsRecord,
            records.ProfileRecord,
            records.ConfigRecord,
            records.JobSpec,
        )
    ),
    *(
        lambda data, kind=kind: decoded_as(kind, data)  # type: ignore[misc]
        for kind in (DrainRequest, ConfigRequest, ChaosRequest, Plan, Problem)
    ),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
SCALARS = st.sampled_from([0, -1, 1 << 63, 1 << 200, 0.0, -1.5, 1e308, "", "a/b", "\x00", [], {}, None, True])


MEASURED = Measurement(device="alpha/0", plan=1, step=1, tokens=1, block_seconds=1.0, block_work=1.0)
OF = {"client": "c", "job": "j", "device": "alpha/0", "incarnation": "i"}
#: What numbers and texts of a report may become.
ODD = [b"1e400", b"-", b'"\xff"', b'"\\ud800"', b'"type":"prepared",', b"[" * 80, b"null", b"1" * 50, b"\\"]


def passed(report: bytes) -> bytes | None:
    """What an agent sends of a worker's report; None where it has to decode it first."""
    raw = passed_report(report)
    return None if raw is None else encode(PassedReport(**OF, body=raw))


def tried(data: bytes) -> None:
    for decode in DECODERS:
        with contextlib.suppress(msgspec.DecodeError):
            decode(data)


def test_a_report_with_a_second_tag_is_no_opening() -> None:
    for second in (b'"type":"hello"', b'"type":"join","slot":3', b'"\\u0074ype":"hello"'):
        sent = passed(b'{"type":"report",' + second + b"}")
        assert sent is not None
        assert to_leader(sent) is None


@pytest.mark.parametrize("number", [b"1e400", b"-1E+0400", b"9" * 400])
def test_a_number_that_an_older_leader_refuses_is_decoded_by_the_agent(number: bytes) -> None:
    assert passed_report(b'{"type":"report","loss":' + number + b"}") is None


@settings(max_examples=examples(300))
@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_a_refusal(data: bytes) -> None:
    tried(data)


@settings(max_examples=examples(100))
@given(st.data())
def test_any_change_to_a_true_message_is_a_value_or_a_refusal(data: st.DataObject) -> None:
    message = data.draw(st.sampled_from(VALID))
    tree = msgspec.json.decode(msgspec.json.encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        _change(tree, data)
    tried(msgspec.json.encode(tree))


@settings(max_examples=examples(100))
@given(st.sampled_from(VALID), st.data())
def test_any_damage_to_the_bytes_of_a_true_message_is_a_value_or_a_refusal(
    message: msgspec.Struct, data: st.DataObject
) -> None:
    raw = bytearray(msgspec.json.encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
        if not raw:
            break
    tried(bytes(raw))


@settings(max_examples=examples(200))
@given(st.data())
def test_whatever_report_an_agent_passes_on_costs_its_leader_that_report_alone(data: st.DataObject) -> None:
    report = encode(Report(measurement=MEASURED, loss=2.5))
    assert passed(report) == encode(FromClient(**OF, body=Report(measurement=MEASURED, loss=2.5)))
    raw = bytearray(report)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(len('{"type":"report",'), len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4) | st.sampled_from(ODD))
    if (up := passed(bytes(raw))) is not None:
        others = [encode(FromClient(**OF, body=StoreCall(id=n, op="get", key="k"))) for n in range(2)]
        heard = all_to_leader(together([others[0], up, others[1]]))
        assert [m.body.id for m in heard if isinstance(m, FromClient) and isinstance(m.body, StoreCall)] == [
            0,
            1,
        ]


@pytest.mark.parametrize(
    "data",
    [
        b'{"type":"agent-rejected","reason":"\xff"}',
        b'{"type":"agent-rejected","reason":"x","more":' + b"[" * 100_000,
        b'{"type":"agent-rejected","reason":"x","more":' + b'{"a":' * 50_000,
        b'{"type":"agent-rejected","reason":"\\ud800"}',
    ],
)
def test_what_msgspec_lets_through_is_a_refusal_too(data: bytes) -> None:
    tried(data)
    with pytest.raises(msgspec.DecodeError):
        to_agent(data)


def test_errors_of_a_program_are_not_swallowed() -> None:
    def broken(data: bytes) -> None:
        raise NotImplementedError

    with pytest.raises(NotImplementedError):
        decoded(broken, b"")


@settings(max_examples=examples(200))
@given(st.binary(min_size=1, max_size=64), st.lists(st.sampled_from(["sealed", "open", "pipe"]), max_size=3))
def test_any_packet_is_a_message_or_a_refusal_and_leaves_no_descriptor_open(
    data: bytes, kinds: list[str]
) -> None:
    before = open_descriptors()
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        sent = [_descriptor(kind, len(data)) for kind in kinds]
        socket.send_fds(one, [data], sent) if sent else one.send(data)
        for fd in sent:
            os.close(fd)
        try:
            _, given_fd = unix_socket.accept(other)
        except unix_socket.PacketError:
            given_fd = None
        if given_fd is not None:
            os.close(given_fd)
    assert open_descriptors() <= before


@settings(max_examples=examples(100))
@given(st.integers(0, 2**64 - 1), st.binary(max_size=8), st.integers(0, 40))
def test_any_announced_size_is_believed_only_where_it_is_true(size: int, rest: bytes, real: int) -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        fd = _descriptor("sealed", real)
        socket.send_fds(one, [struct.pack("=Q", size) + rest], [fd])
        os.close(fd)
        try:
            message, given_fd = unix_socket.accept(other)
        except unix_socket.PacketError:
            return
        if given_fd is not None:
            os.close(given_fd)
        assert message == (rest if size == 0 else b"\0" * real)
        assert size in (0, real)


def _descriptor(kind: str, size: int) -> int:
    if kind == "pipe":
        read, write = os.pipe()
        os.close(write)
        return read
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if kind == "sealed":
        seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def _change(tree: Any, data: st.DataObject) -> None:
    """Replaces one value somewhere inside, or drops it."""
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
    if not keys:
        return
    key = data.draw(st.sampled_from(keys))
    if isinstance(tree[key], dict | list) and data.draw(st.booleans()):
        _change(tree[key], data)
    elif data.draw(st.integers(0, 4)) == 0:
        del tree[key]
    else:
        tree[key] = data.draw(SCALARS | JSON)


RACE = """
import sys, threading
from typing import Any
import msgspec
from elasticd.codec.decoding import decoder_of

sys.setswitchinterval(1e-6)
for number in range(60):
    inner = msgspec.defstruct(f"Inner{number}", [("name", str), ("numbers", tuple[int, ...], ())])
    fields = [("parts", dict[str, dict[str, inner]]), ("more", list[inner], [])]
    outer = msgspec.defstruct(f"Outer{number}", fields)
    barrier = threading.Barrier(8)

    def decode(kind: Any = outer, barrier: Any = barrier) -> None:
        barrier.wait()
        decoder_of(kind).decode(b'{"parts": {"a": {"b": {"name": "x"}}}}')

    threads = [threading.Thread(target=decode) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print("decoded")
"""


def test_threads_that_decode_a_class_for_the_first_time_at_one_moment_live() -> None:
    """With msgspec's own decode a process of these ends by a segmentation fault."""
    done = subprocess.run(
        [sys.executable, "-c", RACE], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "decoded\n"), done.stderr
