"""Runs `elasticd` in a network namespace: `within.py NAMESPACE ARGUMENTS`. Tests fork it."""

from __future__ import annotations

import ctypes
import sys

from tests import nursery

_CLONE_NEWNET = 0x40000000


def main() -> None:
    """An empty namespace's name: this process's own."""
    name, *arguments = sys.argv[1:]
    if name:
        with open(f"/var/run/netns/{name}", "rb") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
    nursery.run_module("elasticd.__main__", arguments)


if __name__ == "__main__":
    main()
