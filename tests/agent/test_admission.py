"""The agent's socket is for its user and one group: the file's mode says so, and the kernel is asked."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import grp
import os
import select
import socket
import stat
import tempfile
from pathlib import Path

import pytest
from elasticd_agent import worker_socket
from elasticd_agent.worker_socket import Admission, Workers

from elasticd.machines.agent.state import Event
from elasticd.testing.waiting import until
from elasticd.wire import unix_socket
from elasticd.wire.unix_socket import NoAgent, SocketTaken
from elasticd.wire.worker import Rejected, to_worker
from tests.agent.support import handlers

STRANGER = 4_000_000
GROUP = 4_000_001


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_socket_is_for_its_owner_and_with_a_group_for_its_members(tmp_path: Path) -> None:
    own = tmp_path / "own" / "agent.sock"
    with unix_socket.listen(str(own)):
        assert (mode(own), mode(own.parent)) == (0o600, 0o700)
    shared = tmp_path / "shared" / "agent.sock"
    group = os.getgroups()[-1] if os.getgroups() else os.getgid()
    with unix_socket.listen(str(shared), group):
        assert (mode(shared), mode(shared.parent)) == (0o660, 0o750)
        assert (shared.stat().st_gid, shared.parent.stat().st_gid) == (group, group)


def test_own_user_is_let_in_and_another_is_told_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        heard: list[Event] = []
        workers = Workers(str(tmp_path / "agent.sock"), "alpha")
        try:
            workers.start(handlers(heard))
            with unix_socket.connect(str(tmp_path / "agent.sock")) as own:
                await asyncio.to_thread(until, lambda: len(workers._connections) == 1)
                assert own.fileno() >= 0
            monkeypatch.setattr(worker_socket, "peer", lambda _: (7, STRANGER, STRANGER))
            with unix_socket.connect(str(tmp_path / "agent.sock")) as other:
                said = await asyncio.to_thread(unix_socket.receive, other)
                assert said is not None
                refused = to_worker(said)
                assert isinstance(refused, Rejected)
                assert "of user 4000000 may not speak to this agent" in refused.reason
                assert await asyncio.to_thread(unix_socket.receive, other) is None
            assert [text for text in caplog.messages if "may not speak to this agent" in text] == [
                refused.reason
            ]
            assert heard == []
        finally:
            workers.close()

    asyncio.run(body())


@pytest.mark.parametrize(
    ("group", "peer", "further", "in_"),
    [
        (None, (1, os.geteuid(), STRANGER), [], True),
        (None, (1, 0, 0), [], True),
        (None, (1, STRANGER, os.getgid()), [], False),
        (str(GROUP), (1, STRANGER, GROUP), [], True),
        (str(GROUP), (1, STRANGER, STRANGER), [5, GROUP], True),
        (str(GROUP), (1, STRANGER, STRANGER), [5], False),
    ],
)
def test_owner_root_and_members_are_let_in(
    monkeypatch: pytest.MonkeyPatch,
    group: str | None,
    peer: tuple[int, int, int],
    further: list[int],
    in_: bool,
) -> None:
    monkeypatch.setattr(worker_socket, "peer", lambda _: peer)
    monkeypatch.setattr(worker_socket, "_groups", lambda _: further)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        assert (Admission(group).refusal(sock) == "") is in_


def test_kernel_tells_process_user_and_groups() -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        assert worker_socket.peer(other) == (os.getpid(), os.geteuid(), os.getegid())
        assert set(worker_socket._groups(other)) == set(os.getgroups())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_true_stranger_is_turned_away_by_the_kernels_word(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> int:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory()))
        folder.chmod(0o755)  # pytest's own are closed to other users
        path = folder / "agent.sock"
        workers = Workers(str(path), "alpha")
        workers.start(handlers([]))
        path.chmod(0o666)  # the careless chmod
        try:
            child = os.fork()
            if child == 0:
                os._exit(_as_stranger(str(path)))
            _, status = await asyncio.to_thread(os.waitpid, child, 0)
            assert sum("may not speak to this agent" in text for text in caplog.messages) == 1
            return os.waitstatus_to_exitcode(status)
        finally:
            workers.close()

    with contextlib.ExitStack() as exits:
        assert asyncio.run(body()) == 0


def _as_stranger(path: str) -> int:
    """0 where it is refused in words."""
    try:
        os.setgroups([])
        os.setgid(STRANGER)
        os.setuid(STRANGER)
        with unix_socket.connect(path) as sock:
            said = unix_socket.receive(sock)
        return 0 if said is not None and b"may not speak to this agent" in said else 1
    except BaseException:
        return 2


def ended_process(path: str) -> int:
    """Connects and ends, before the agent takes the connection; its number."""
    child = os.fork()
    if child == 0:
        unix_socket.connect(path)
        os._exit(0)
    os.waitpid(child, 0)
    return child


@pytest.mark.parametrize("old_kernel", [False, True])
def test_process_that_got_the_number_of_one_that_ended_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old_kernel: bool
) -> None:
    path = str(tmp_path / "agent.sock")
    if old_kernel:
        monkeypatch.setattr(worker_socket, "_SO_PEERPIDFD", 9999)
        monkeypatch.setattr(worker_socket.time, "clock_gettime", lambda clock: 0.0)  # all started later
    with unix_socket.listen(path) as listener:
        ended_process(path)
        sock, _ = listener.accept()
        with sock:
            monkeypatch.setattr(worker_socket, "peer", lambda _: (os.getpid(), 0, 0))
            pidfd = worker_socket.peer_pidfd(sock)
            if pidfd is not None:  # a kernel since 6.16 gives one of the process that has ended
                assert not old_kernel
                assert select.select([pidfd], [], [], 0)[0], "its end is seen at once"
                os.close(pidfd)


@pytest.mark.parametrize("old_kernel", [False, True])
def test_process_that_lives_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old_kernel: bool
) -> None:
    if old_kernel:
        monkeypatch.setattr(worker_socket, "_SO_PEERPIDFD", 9999)
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        pidfd = worker_socket.peer_pidfd(other)
        assert pidfd is not None
        said = Path(f"/proc/self/fdinfo/{pidfd}").read_text()
        assert f"Pid:\t{os.getpid()}\n" in said
        assert not os.get_inheritable(pidfd)
        os.close(pidfd)


def test_socket_rests_where_no_descriptor_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It does not wake the loop again and again meanwhile, and goes on afterwards."""
    tries = 0

    def full(sock: socket.socket) -> int | None:
        nonlocal tries
        tries += 1
        raise OSError(errno.EMFILE, "Too many open files")

    async def body() -> None:
        nonlocal tries
        path = str(tmp_path / "agent.sock")
        workers = Workers(path, "alpha")
        try:
            workers.start(handlers([]))
            with monkeypatch.context() as patch:
                patch.setattr("elasticd_agent.worker_socket.peer_pidfd", full)
                with contextlib.ExitStack() as stack:
                    for _ in range(20):
                        stack.enter_context(unix_socket.connect(path))
                    await asyncio.to_thread(until, lambda: tries >= 3)
                    began = asyncio.get_running_loop().time()
                    await asyncio.to_thread(until, lambda: tries >= 5)
                    assert asyncio.get_running_loop().time() - began > 0.2
            with unix_socket.connect(path):
                await asyncio.to_thread(until, lambda: len(workers._connections) >= 1)
        finally:
            workers.close()

    asyncio.run(body())
    assert caplog.text.count("took no connection") == 1


def test_client_that_says_nothing_makes_room_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elasticd_agent.worker_socket.HELLO_SECONDS", 0.2)

    async def body() -> None:
        path = str(tmp_path / "agent.sock")
        workers = Workers(path, "alpha")
        try:
            workers.start(handlers([]))
            with unix_socket.connect(path) as silent:
                data, _ = await asyncio.to_thread(unix_socket.accept, silent, 1 << 16)
                assert data is not None
                refusal = to_worker(data)
                assert isinstance(refusal, Rejected)
                assert "no first message came within 0.2 s" in refusal.reason
                await asyncio.to_thread(until, lambda: not workers._connections)
        finally:
            workers.close()

    asyncio.run(body())


def test_group_that_does_not_exist_is_named() -> None:
    with pytest.raises(SocketTaken, match=r"group = 'no-such-group' is no group of this machine"):
        Admission("no-such-group")
    name = grp.getgrgid(os.getgid()).gr_name
    assert Admission(name).group == os.getgid()


def test_default_folder_that_another_user_made_is_trusted_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unix_socket.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.delenv("ELASTICD_SOCKET", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / f"elasticd-{os.getuid()}").symlink_to(elsewhere)
    with pytest.raises(NoAgent, match="another one made it"):
        unix_socket.connect(unix_socket.default_path())
    with pytest.raises(SocketTaken, match="another one made it"):
        unix_socket.listen(unix_socket.own_path())
