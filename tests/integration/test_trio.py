"""The etcd of three members that tests start: its own ports, whoever takes one first."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from elasticd.store.server import free_ports
from tests.integration import trio
from tests.integration.trio import Trio


def test_port_that_another_process_takes_first_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first, second = free_ports(6), free_ports(6)
        first[3] = taken.getsockname()[1]  # the first member's for the other two
        chosen = iter([first, second])
        monkeypatch.setattr(trio, "free_ports", lambda count, host: next(chosen))
        with Trio(tmp_path) as members, members.store() as store:
            assert [int(endpoint.rpartition(":")[2]) for endpoint in members.endpoints] == second[:3]
            assert store.put("/a", b"1") > 1
