"""The one grammar for names of clusters, jobs, nodes and devices, and whose word a message is.

Names become parts of keys in etcd, of paths in URLs and of lines in logs, so that every door asks here: the
configuration, the agent's socket, torchrun's rendezvous, the leader and the command line.
"""

from __future__ import annotations

import re

#: Characters of a name.
LONGEST = 128
#: Devices of a node.
MOST_DEVICES = 1024

_NAME = re.compile(r"(?=.*[A-Za-z0-9])[A-Za-z0-9._-]+", re.ASCII)
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)


def name_refusal(what: str, name: str) -> str:
    """Why a name cannot be used, or nothing. what: the sentence's subject, as "--rdzv-id" or "node"."""
    if len(name) > LONGEST:
        return f"{what} {name[:40]!r}... has {len(name)} characters: choose a name of {LONGEST} at most"
    if not _NAME.fullmatch(name):
        return (
            f"{what} {name!r} cannot be used: a name is made of letters, digits, '.', '_' and '-', and has at "
            "least one letter or digit"
        )
    return ""


def harmless(name: str) -> bool:
    """Returns True if a name outside the grammar can be a key and a word in a log. Release 0.1 took such names,
    and a job that runs under one is not to end with its agent's upgrade."""
    return 0 < len(name) <= LONGEST and "/" not in name and name.isprintable() and name not in (".", "..")


def device_of(node: str, device: str) -> bool:
    """Returns True if this is the name of a device of the node: "alpha/0" of "alpha"."""
    of, _, index = device.rpartition("/")
    return of == node and _INDEX.fullmatch(index) is not None
