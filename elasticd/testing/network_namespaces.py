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

#: Sets of namespaces that can be there at once. The n-th has the bridge "eb<n>", the addresses 10.<77 + n>.0.*
#: for control and 10.<177 + n>.0.* for data.
_SETS = 70


def refusal() -> str:
    """Why there are no namespaces here; empty where there are."""
    if shutil.which("ip") is None:
        return "there is no `ip` command"
    if os.geteuid() != 0:
        return "namespaces need root"
    tag = f"ebt{os.getpid()}"
    try:
        _ip("netns", "add", tag)
        _ip("link", "add", tag, "type", "veth", "peer", "name", "eth0", "netns", tag)
    except subprocess.CalledProcessError as error:
        return f"the kernel refuses: {error.stderr.strip()}"
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("netns", "del", tag)
    return ""


class Namespaces:
    """One namespace for each node, with an address and a link that can be cut; data: with another address, for
    the data network, which can be cut between any two."""

    def __init__(self, nodes: Sequence[str], *, data: bool = False) -> None:
        self._nodes, self._data = tuple(nodes), data
        self._set = -1  # which of the machine's sets this is; -1: not made

    @property
    def host(self) -> str:
        """The machine's own address, for control; every namespace reaches it."""
        return f"10.{77 + self._set}.0.1"

    def address(self, node: str) -> str:
        """Its address for control."""
        return f"10.{77 + self._set}.0.{self._nodes.index(node) + 2}"

    def data_address(self, node: str) -> str:
        """The address to which others send it tensors."""
        return f"10.{177 + self._set}.0.{self._nodes.index(node) + 2}"

    def swallow(self, node: str, peer: str) -> None:
        """Drops the packets of the node to the other one's data address in silence."""
        _ip("-n", self.name(node), "route", "replace", "blackhole", self.data_address(peer))

    def deliver(self, node: str, peer: str) -> None:
        """Undoes `swallow`."""
        _ip("-n", self.name(node), "route", "del", "blackhole", self.data_address(peer))

    def within(self, node: str) -> tuple[str, ...]:
        """The command's beginning that runs the rest of it on a node."""
        program = shutil.which("ip")
        assert program is not None
        return (os.path.abspath(program), "netns", "exec", self.name(node))

    def cut(self, node: str) -> None:
        """Nothing reaches it any more."""
        _ip("link", "set", self._link(node), "down")

    def heal(self, node: str) -> None:
        """Undoes `cut`."""
        _ip("link", "set", self._link(node), "up")

    def make(self) -> None:
        """All of them. Raises CalledProcessError where the kernel refuses."""
        self._claim()
        _ip("address", "add", f"{self.host}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for node in self._nodes:
            name, link = self.name(node), self._link(node)
            _ip("netns", "add", name)
            _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", link, "master", self._bridge, "up")
            _ip("-n", name, "address", "add", f"{self.address(node)}/24", "dev", "eth0")
            if self._data:
                _ip("-n", name, "address", "add", f"{self.data_address(node)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def close(self) -> None:
        """Removes all that is there."""
        if self._set < 0:
            return
        for node in self._nodes:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", self.name(node))
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "del", self._bridge)

    def name(self, node: str) -> str:
        """Of the namespace, as `ip netns` has it."""
        return f"{self._bridge}-{node}"

    @property
    def _bridge(self) -> str:
        return f"eb{self._set}"

    def _claim(self) -> None:
        """Takes the first set that no other process has: the kernel makes a bridge of a name once."""
        for number in range(_SETS):
            try:
                _ip("link", "add", f"eb{number}", "type", "bridge")
            except subprocess.CalledProcessError:
                if number == _SETS - 1:
                    raise
            else:
                self._set = number
                return

    def _link(self, node: str) -> str:
        return f"{self._bridge}{node}"


@contextmanager
def namespaces(nodes: Sequence[str], *, data: bool = False) -> Iterator[Namespaces]:
    """Made on entry, removed on exit."""
    spaces = Namespaces(nodes, data=data)
    try:
        spaces.make()
        yield spaces
    finally:
        spaces.close()


def _ip(*arguments: str) -> None:
    subprocess.run(("ip", *arguments), check=True, capture_output=True, text=True)
