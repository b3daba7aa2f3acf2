"""Network namespaces of several clusters at once on one machine."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from elasticd.testing.network_namespaces import namespaces, refusal

_CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 10)"


@pytest.mark.skipif(bool(refusal()), reason=f"no network namespaces here: {refusal()}")
def test_each_of_two_sets_reaches_the_machine_while_both_are_there() -> None:
    nodes = ("a", "b")
    with namespaces(nodes, data=True) as first, namespaces(nodes, data=True) as second:
        for spaces in (first, second):
            with socket.create_server((spaces.host, 0)) as server:
                port = str(server.getsockname()[1])
                command = [*spaces.within("a"), sys.executable, "-S", "-c", _CONNECT, spaces.host, port]
                done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            assert done.returncode == 0, done.stderr
        addresses = [
            where(node) for s in (first, second) for where in (s.address, s.data_address) for node in nodes
        ]
        assert len(set(addresses)) == len(addresses)
