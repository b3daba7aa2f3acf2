"""Packets keep their borders, large ones travel by memfd, and a missing agent is named."""

import array
import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticd.wire import unix_socket
from tests.descriptors import open_descriptors
from tests.sizes import examples


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with a, b:
        yield a, b


def flood(sock: socket.socket, times: int) -> None:
    for _ in range(times):
        unix_socket.send(sock, b"x" * 1000)


@settings(max_examples=examples(30))
@given(st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=20))
def test_messages_arrive_whole_and_in_order(parts: list[bytes]) -> None:
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with a, b:
        for part in parts:
            unix_socket.send(a, part)
        assert [unix_socket.receive(b) for _ in parts] == parts


@pytest.mark.parametrize(
    "size",
    [
        1,
        unix_socket.LARGEST_PACKET_BYTES - 1,
        unix_socket.LARGEST_PACKET_BYTES,
        unix_socket.LARGEST_PACKET_BYTES + 1,
        5_000_000,
    ],
)
def test_message_of_any_size_arrives_and_leaves_no_descriptor_open(
    pair: tuple[socket.socket, socket.socket], size: int
) -> None:
    data = os.urandom(size)
    before = open_descriptors()
    unix_socket.send(pair[0], data)
    assert unix_socket.receive(pair[1]) == data
    assert open_descriptors() <= before


def test_end_of_the_connection_is_none(pair: tuple[socket.socket, socket.socket]) -> None:
    unix_socket.send(pair[0], b"last")
    pair[0].close()
    assert unix_socket.receive(pair[1]) == b"last"
    assert unix_socket.receive(pair[1]) is None


def test_end_with_unread_messages_is_none_too(pair: tuple[socket.socket, socket.socket]) -> None:
    unix_socket.send(pair[1], b"never read")
    pair[0].close()
    assert unix_socket.receive(pair[1]) is None


def test_last_words_are_heard_though_messages_to_who_said_them_are_unread(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    unix_socket.send(pair[1], b"never read")
    unix_socket.send(pair[0], b"why")
    unix_socket.send(pair[0], b"goodbye")
    pair[0].close()
    assert [unix_socket.receive(pair[1]) for _ in range(3)] == [b"why", b"goodbye", None]


def test_sending_to_one_that_is_gone_says_so(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[1].close()
    with pytest.raises(BrokenPipeError):
        unix_socket.send(pair[0], b"hello")


def test_empty_message_is_refused(pair: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(ValueError, match="end of the connection"):
        unix_socket.send(pair[0], b"")


def test_nonblocking_socket_never_waits(pair: tuple[socket.socket, socket.socket]) -> None:
    for sock in pair:
        sock.setblocking(False)
    with pytest.raises(BlockingIOError):
        unix_socket.receive(pair[1])
    with pytest.raises(BlockingIOError):
        flood(pair[0], 100_000)
    assert unix_socket.receive(pair[1]) == b"x" * 1000


def test_blocked_receiver_wakes_when_a_message_comes(pair: tuple[socket.socket, socket.socket]) -> None:
    got: list[bytes | None] = []
    reader = threading.Thread(target=lambda: got.append(unix_socket.receive(pair[1])))
    reader.start()
    unix_socket.send(pair[0], b"now")
    reader.join(5)
    assert got == [b"now"]


@pytest.mark.parametrize("sealed", [True, False])
def test_descriptor_that_is_no_message_is_refused_and_closed(
    pair: tuple[socket.socket, socket.socket], tmp_path: Path, sealed: bool
) -> None:
    before = open_descriptors()
    with (tmp_path / "file").open("wb") as file:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file.fileno()]))]
        pair[0].sendmsg([b"12345678" if sealed else b"x"], rights)
        with pytest.raises(unix_socket.PacketError, match="sealed memory file"):
            unix_socket.receive(pair[1])
    assert open_descriptors() <= before


def test_oversized_packet_is_refused(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].send(b"x" * (unix_socket.LARGEST_PACKET_BYTES + 1))
    with pytest.raises(unix_socket.PacketError, match="cut short"):
        unix_socket.receive(pair[1])


@pytest.mark.parametrize(
    "size", [1, unix_socket.LARGEST_PACKET_BYTES, unix_socket.LARGEST_PACKET_BYTES + 1, 5_000_000]
)
def test_message_of_any_size_carries_a_descriptor(pair: tuple[socket.socket, socket.socket], size: int) -> None:
    data, given = os.urandom(size), os.memfd_create("given")
    os.write(given, b"content")
    before = open_descriptors()
    unix_socket.send(pair[0], data, given)
    unix_socket.send(pair[0], b"next")
    got, fd = unix_socket.accept(pair[1])
    assert got == data
    assert fd is not None
    assert fd != given
    assert os.pread(fd, 100, 0) == b"content"
    os.close(fd)
    os.close(given)
    assert unix_socket.accept(pair[1]) == (b"next", None)
    assert open_descriptors() < before


def test_eight_bytes_with_a_descriptor_are_a_message(pair: tuple[socket.socket, socket.socket]) -> None:
    with os.fdopen(os.memfd_create("given")) as given:
        unix_socket.send(pair[0], struct.pack("=Q", 5), given.fileno())
        got, fd = unix_socket.accept(pair[1])
    assert got == struct.pack("=Q", 5)
    assert fd is not None
    os.close(fd)


@pytest.mark.parametrize("size", [100, 100_000])
def test_descriptor_for_one_that_takes_none_is_refused_and_closed(
    pair: tuple[socket.socket, socket.socket], size: int
) -> None:
    before = open_descriptors()
    with os.fdopen(os.memfd_create("given")) as given:
        unix_socket.send(pair[0], b"x" * size, given.fileno())
        with pytest.raises(unix_socket.PacketError, match="a message that has none"):
            unix_socket.receive(pair[1])
    assert open_descriptors() <= before


@pytest.mark.parametrize("count", [2, 3, 10])
def test_descriptors_beyond_what_a_message_has_are_closed(
    pair: tuple[socket.socket, socket.socket], count: int
) -> None:
    before = open_descriptors()
    with os.fdopen(os.memfd_create("given")) as given:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [given.fileno()] * count))]
        pair[0].sendmsg([bytes(8) + b"message"], rights)
        with pytest.raises(unix_socket.PacketError):
            unix_socket.accept(pair[1])
    assert open_descriptors() <= before


def test_end_of_the_connection_has_no_descriptor(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].close()
    assert unix_socket.accept(pair[1]) == (None, None)


# -- finding each other --------------------------------------------------------------------------------------


def test_listener_is_found_and_private(tmp_path: Path) -> None:
    path = str(tmp_path / "deep" / "agent.sock")
    with unix_socket.listen(path) as listener:
        assert os.stat(path).st_mode & 0o777 == 0o600
        assert os.stat(tmp_path / "deep").st_mode & 0o777 == 0o700
        with unix_socket.connect(path) as client:
            server, _ = listener.accept()
            with server:
                unix_socket.send(client, b"hello")
                assert unix_socket.receive(server) == b"hello"


def test_agent_that_is_not_running_is_named_with_the_remedy(tmp_path: Path) -> None:
    path = str(tmp_path / "agent.sock")
    with pytest.raises(unix_socket.NoAgent, match=f"no agent listens at {path}: start one"):
        unix_socket.connect(path)


def test_dead_agents_socket_counts_as_no_agent_and_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "agent.sock")
    unix_socket.listen(path).close()
    with pytest.raises(unix_socket.NoAgent, match="ELASTICD_SOCKET"):
        unix_socket.connect(path)
    with unix_socket.listen(path), unix_socket.connect(path):
        pass


def test_living_agents_socket_is_not_taken(tmp_path: Path) -> None:
    path = str(tmp_path / "agent.sock")
    with unix_socket.listen(path):
        with pytest.raises(unix_socket.SocketTaken, match="another agent listens at"):
            unix_socket.listen(path)
        unix_socket.connect(path).close()


def test_of_two_agents_that_start_at_once_one_listens_and_the_other_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "agent.sock")
    unix_socket.listen(path).close()  # a dead agent's: both find it
    removing, listening, failed = threading.Event(), list[socket.socket](), list[str]()
    real, first = os.unlink, threading.Event()

    def unlink(name: str) -> None:
        if not first.is_set():
            first.set()
            removing.set()
            other.join(0.5)  # it comes to the same point, if it may
        real(name)

    def listen() -> None:
        try:
            listening.append(unix_socket.listen(path))
        except unix_socket.SocketTaken as error:
            failed.append(str(error))

    def second() -> None:
        removing.wait(60)
        listen()

    monkeypatch.setattr(unix_socket.os, "unlink", unlink)
    other = threading.Thread(target=second)
    other.start()
    listen()
    other.join(60)
    assert [error.split(":")[0] for error in failed] == [f"another agent listens at {path}"]
    (listener,) = listening
    with listener, unix_socket.connect(path):
        assert listener.accept()[0].close() is None


def test_end_of_an_agent_leaves_its_followers_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "agent.sock")
    unix_socket.listen(path).close()
    with unix_socket.listen(path):  # its file may well have the inode of the one before it
        unix_socket.remove(path)
        unix_socket.connect(path).close()
    unix_socket.remove(path)
    assert not os.path.exists(path)
    unix_socket.remove(path)


def test_folder_that_another_process_keeps_locked_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unix_socket, "_TURN_SECONDS", 0.1)
    path = str(tmp_path / "agent.sock")
    with (
        unix_socket._turn(path),
        pytest.raises(unix_socket.SocketTaken, match="Choose another --socket"),
    ):
        unix_socket.listen(path)
    unix_socket.listen(path).close()


@pytest.mark.parametrize(
    ("mode", "owner", "trusted"),
    [(0o777, "mine", False), (0o1777, "mine", False), (0o777, "theirs", False), (0o755, "theirs", True)],
)
def test_worker_says_nothing_to_an_agent_of_whoever_came_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, owner: str, trusted: bool
) -> None:
    """In a folder that all may write to, another user can listen where this user's agent is looked for."""
    path = str(tmp_path / "agent.sock")
    with unix_socket.listen(path):
        unix_socket.connect(path).close()
        tmp_path.chmod(mode)
        stranger = os.geteuid() + 1000
        monkeypatch.setattr(unix_socket, "peer", lambda sock: (1, stranger, stranger))
        if owner == "theirs":
            stranger = tmp_path.stat().st_uid or 1
            monkeypatch.setattr(unix_socket.os, "geteuid", lambda: stranger + 1)
        if trusted:
            unix_socket.connect(path).close()
            return
        with pytest.raises(unix_socket.NoAgent, match=f"user {stranger} listens at"):
            unix_socket.connect(path)


def test_ordinary_file_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(unix_socket.SocketTaken, match="is a file and no socket"):
        unix_socket.listen(str(path))
    assert path.read_text() == "data"


def test_path_beyond_the_kernels_limit_is_named(tmp_path: Path) -> None:
    with pytest.raises(unix_socket.SocketTaken, match="choose a shorter one"):
        unix_socket.listen(str(tmp_path / ("x" * 120)))


def test_connect_waits_for_an_agent_that_is_starting(tmp_path: Path) -> None:
    path = str(tmp_path / "agent.sock")
    connected: list[socket.socket] = []
    trainer = threading.Thread(target=lambda: connected.append(unix_socket.connect(path, timeout=10)))
    trainer.start()
    with unix_socket.listen(path):
        trainer.join(10)
        assert len(connected) == 1
        connected[0].close()


def test_whoever_waits_for_an_agent_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unix_socket, "_SAID_SECONDS", 0.1)
    path = str(tmp_path / "agent.sock")
    with pytest.raises(unix_socket.NoAgent, match="no agent listens"):
        unix_socket.connect(path, timeout=0.5)
    assert [record.getMessage() for record in caplog.records] == [
        f"no agent listens at {path} yet; it is waited for up to 0 s"
    ]


def test_default_path_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTICD_SOCKET", "/somewhere/a.sock")
    assert unix_socket.default_path() == "/somewhere/a.sock"
    monkeypatch.delenv("ELASTICD_SOCKET")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert unix_socket.default_path() == "/run/user/7/elasticd/agent.sock"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert str(os.getuid()) in unix_socket.default_path()


def test_socket_of_the_nodes_service_is_found_where_the_user_has_no_agent_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, own = tmp_path / "service.sock", tmp_path / "elasticd" / "agent.sock"
    monkeypatch.delenv(unix_socket.SOCKET_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(unix_socket, "SERVICE_PATH", str(service))
    assert unix_socket.default_path() == str(own)
    with unix_socket.listen(str(service)):
        assert unix_socket.default_path() == str(service)
        assert unix_socket.own_path() == str(own), "an agent of the user's own listens where it always did"
        with unix_socket.listen(str(own)):
            assert unix_socket.default_path() == str(own)
        monkeypatch.setenv(unix_socket.SOCKET_VARIABLE, "/named")
        assert unix_socket.default_path() == "/named"


def test_agent_that_was_waited_for_is_said_to_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(unix_socket, "_SAID_SECONDS", 0.0)
    path = str(tmp_path / "a.sock")
    opened: list[socket.socket] = []
    real = unix_socket.log.warning

    def starts_once_it_is_missed(text: str, *about: object) -> None:
        real(text, *about)
        if not opened:
            opened.append(unix_socket.listen(path))

    monkeypatch.setattr(unix_socket.log, "warning", starts_once_it_is_missed)
    unix_socket.connect(path, 60.0).close()
    opened[0].close()
    assert [record.getMessage() for record in caplog.records] == [
        f"no agent listens at {path} yet; it is waited for up to 60 s",
        f"the agent at {path} is there",
    ]
