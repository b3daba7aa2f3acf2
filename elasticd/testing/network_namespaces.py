"""Nodes as network namespaces on a bridge, so that one can be cut off without a word: no socket of it is reset.

Each has an address for control and, where it is asked for, one for data. Needs root and `ip`; `refusal()` says
why it cannot be done here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

#: What names and addresses begin with. The process id keeps two benchmarks apart.
_TAG = f"eb{os.getpid() % 10000}"
_NET = f"10.{77 + os.getpid() % 100}.0"
HOST = f"{_NET}.1"
_DATA = f"10.{177 + os.getpid() % 70}.0"


def refusal() -> str:
    """Why there are no namespaces here; empty where there are."""
    if shutil.which("ip") is None:
        return "there is no `ip` command"
    if os.geteuid() != 0:
        return "namespaces need root"
    try:
        _ip("netns", "add", f"{_TAG}-try")
        _ip("link", "add", f"{_TAG}t", "type", "veth", "peer", "name", "eth0", "netns", f"{_TAG}-try")
    except subprocess.CalledProcessError as error:
        return f"the kernel refuses: {error.stderr.strip()}"
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("netns", "del", f"{_TAG}-try")
    return ""


class Namespaces:
    """One namespace for each node, with an address and a link that can be cut; data: with another address, for
    the data network, which can be cut between any two."""

    def __init__(self, nodes: Sequence[str], *, data: bool = False) -> None:
        self._nodes, self._data = tuple(nodes), data

    def address(self, node: str) -> str:
        """Its address for control."""
        return f"{_NET}.{self._nodes.index(node) + 2}"

    def data_address(self, node: str) -> str:
        """Where others send it tensors."""
        return f"{_DATA}.{self._nodes.index(node) + 2}"

    def swallow(self, node: str, peer: str) -> None:
        """What the node sends to the other one's data address is lost in silence."""
        _ip("-n", self.name(node), "route", "replace", "blackhole", self.data_address(peer))

    def deliver(self, node: str, peer: str) -> None:
        """Undoes `swallow`."""
        _ip("-n", self.name(node), "route", "del", "blackhole", self.data_address(peer))

    def within(self, node: str) -> tuple[str, ...]:
        """The command's beginning that runs the rest of it on a node."""
        found = shutil.which("ip")
        assert found is not None
        return (os.path.abspath(found), "netns", "exec", self.name(node))

    def cut(self, node: str) -> None:
        """Nothing reaches it any more."""
        _ip("link", "set", self._link(node), "down")

    def heal(self, node: str) -> None:
        """Undoes `cut`."""
        _ip("link", "set", self._link(node), "up")

    def make(self) -> None:
        """All of them. Raises CalledProcessError where the kernel refuses."""
        _ip("link", "add", _TAG, "type", "bridge")
        _ip("address", "add", f"{HOST}/24", "dev", _TAG)
        _ip("link", "set", _TAG, "up")
        for node in self._nodes:
            name, link = self.name(node), self._link(node)
            _ip("netns", "add", name)
            _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", link, "master", _TAG, "up")
            _ip("-n", name, "address", "add", f"{self.address(node)}/24", "dev", "eth0")
            if self._data:
                _ip("-n", name, "address", "add", f"{self.data_address(node)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def close(self) -> None:
        """Removes all that is there."""
        for node in self._nodes:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", self.name(node))
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "del", _TAG)

    def name(self, node: str) -> str:
        """Of the namespace, as `ip netns` has it."""
        return f"{_TAG}-{node}"

    def _link(self, node: str) -> str:
        return f"{_TAG}{node}"


@contextmanager
def namespaces(nodes: Sequence[str], *, data: bool = False) -> Iterator[Namespaces]:
    """Made on entry, removed on exit."""
    made = Namespaces(nodes, data=data)
    try:
        made.make()
        yield made
    finally:
        made.close()


def _ip(*arguments: str) -> None:
    subprocess.run(("ip", *arguments), check=True, capture_output=True, text=True)
