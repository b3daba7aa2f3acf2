"""A live feed that one thread reads is ended by another, however long its coordinator is silent."""

from __future__ import annotations

import socket
import threading

import pytest

from elasticd.client import FEED_TIMEOUT_SECONDS, ApiClient, CannotReach
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
