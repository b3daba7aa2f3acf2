"""This machine's own addresses, by its routes to others; and which machines share their loopback address.

No packet is sent: a UDP socket that is connected has the kernel look the route up, and nothing more.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import platform
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

#: Where processes of one machine find each other.
LOOPBACK = "127.0.0.1"
#: Addresses that nobody has (for documentation): the way to them is the default route.
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")
_ANY_PORT = 9


@lru_cache(maxsize=4096)
def is_loopback(host: str) -> bool:
    """Returns True if this address, or name, is one that every machine has for itself."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def is_address(host: str) -> bool:
    """Returns whether this is an address, and no name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def own_names(host: str) -> frozenset[str]:
    """The names under which a server at `host` of this machine is asked, in lower case."""
    node = platform.node().lower()
    return frozenset({"localhost", host.lower(), node, node.split(".")[0]})


def local_address(host: str) -> str | None:
    """This machine's address on the route to `host`; None where there is no route, or no such name."""
    with suppress(OSError, UnicodeError):
        addresses = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)
        for family, kind, protocol, _, there in sorted(addresses, key=lambda one: one[0] != socket.AF_INET):
            with suppress(OSError), socket.socket(family, kind, protocol) as asked:
                asked.connect(there)
                return str(asked.getsockname()[0])
    return None


def outward(hosts: Iterable[str], route: Callable[[str], str | None] = local_address) -> str | None:
    """This machine's address on the first route to one of `hosts` that leaves the machine; None without any."""
    for host in hosts:
        address = route(host)
        if address is not None and not is_loopback(address):
            return address
    return None


def chosen(
    leader: str | None, stores: Iterable[str], route: Callable[[str], str | None] = local_address
) -> tuple[str, str]:
    """The address at which the workers of this node are to listen for those of others, and the reason for it.

    Args:
        leader: The host of the leader's URL, None where nobody leads.
        stores: The hosts of etcd's endpoints.
        route: This machine's address on the route to a host.
    """
    if leader is not None and is_loopback(leader):
        return LOOPBACK, f"the leader at {leader}, which no other machine reaches"
    if leader is not None and (address := outward([leader], route)) is not None:
        return address, f"the route to the leader at {leader}"
    for host in stores:
        if (address := outward([host], route)) is not None:
            return address, f"the route to etcd at {host}"
    # The leader is on this machine, by a name that means loopback here: others have another route to it.
    if leader is not None and (address := outward(_ELSEWHERE, route)) is not None:
        return address, "the default route"
    return LOOPBACK, "no route that leaves this machine"


def host() -> str:
    """A digest of this boot of the machine and of its network namespace: processes with the same one reach each
    other by loopback. Empty where the kernel does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return ""
    return hashlib.sha256(f"{boot} {network}".encode()).hexdigest()[:16]
