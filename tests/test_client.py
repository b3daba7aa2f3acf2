"""Commands find the next leader where one is gone; a live feed is ended by another thread than its reader's."""

from __future__ import annotations

import socket
import threading

import msgspec
import pytest

from elasticd.client import FEED_TIMEOUT_SECONDS, ApiClient, CannotReach, _elected
from elasticd.records import Keys
from elasticd.store.leader import LeaderRecord, campaign
from elasticd.store.memory import MemoryServer, MemoryStore
from elasticd.store.protocol import Put
from elasticd.testing.waiting import until

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_a_feed_whose_coordinator_says_nothing_is_ended_by_another_thread() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with ApiClient(url) as api:
            ended: list[str] = []

            def read() -> None:
                with pytest.raises(CannotReach, match="is gone") as raised:
                    list(api.live())
                ended.append(str(raised.value))

            thread = threading.Thread(target=read)
            thread.start()
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(HEAD)

                def over() -> bool:
                    api.end_live()  # the thread may still be on its way to reading
                    return not thread.is_alive()

                until(over, seconds=FEED_TIMEOUT_SECONDS / 2)
                assert connection.recv(1) == b"", "the connection is closed, not left"
            assert ended
            api.end_live()


KEYS = Keys(cluster="c")


def elect(store: MemoryStore, listener: socket.socket) -> None:
    """Has a leader elected that is reached at this socket."""
    campaign(store, KEYS.leader, "two", f"http://127.0.0.1:{listener.getsockname()[1]}", 60)


def led_before(server: MemoryServer) -> MemoryStore:
    store = MemoryStore(server)
    store.transact((), (Put(KEYS.schema, b"{}"),))
    return store


@pytest.mark.parametrize("dead", [True, False])
def test_commands_wait_for_the_next_leader_where_one_is_gone(
    dead: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its key is there until its lease ends, and then none is until the election."""
    store = led_before(MemoryServer())
    with socket.create_server(("127.0.0.1", 0)) as gone:
        closed = f"http://127.0.0.1:{gone.getsockname()[1]}"
    if dead:
        store.transact((), (Put(KEYS.leader, msgspec.json.encode(LeaderRecord(name="one", value=closed))),))
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def take_over() -> None:
            store.delete(KEYS.leader)
            elect(store, listener)

        timer = threading.Timer(0.3, take_over)
        timer.start()
        found = _elected(store, KEYS, 30.0)
        timer.join()
    assert found is not None
    assert found.name == "two"
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "waits up to 30 s for an election" in said
    assert (closed in said) is dead


def test_commands_wait_for_nobody_in_a_cluster_that_none_led_and_no_longer_than_they_say(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _elected(MemoryStore(MemoryServer()), KEYS, 30.0) is None
    assert not capsys.readouterr().err
    assert _elected(led_before(MemoryServer()), KEYS, 0.2) is None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        store = led_before(MemoryServer())
        elect(store, listener)
        assert _elected(store, KEYS, 30.0) is not None, "who leads is asked at once"
    assert capsys.readouterr().err.count("\n") == 1
