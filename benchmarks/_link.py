"""Two network namespaces with a link of a given rate between them (tbf), for a benchmark. Needs root."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

ADDRESSES = ("10.213.7.1", "10.213.7.2")


class NotPermitted(RuntimeError):
    """This machine does not let us make namespaces or shape a link."""


@contextmanager
def link(megabits: int, burst: str = "1mb") -> Iterator[list[list[str]]]:
    """Words to put before a command so that it runs at one end or the other; `burst`: what goes at once after
    a rest.

    Raises `NotPermitted` with what the system said."""
    names = [f"ebench{os.getpid()}{end}" for end in "ab"]
    wires = [f"eb{os.getpid() % 100_000}{end}" for end in "ab"]
    try:
        try:
            for name in names:
                _run("ip", "netns", "add", name)
            _run("ip", "link", "add", wires[0], "type", "veth", "peer", "name", wires[1])
            for name, wire, address in zip(names, wires, ADDRESSES, strict=True):
                _run("ip", "link", "set", wire, "netns", name)
                inside = ["ip", "netns", "exec", name]
                _run(*inside, "ip", "addr", "add", f"{address}/24", "dev", wire)
                _run(*inside, "ip", "link", "set", wire, "up")
                _run(*inside, "ip", "link", "set", "lo", "up")
                rate = ("rate", f"{megabits}mbit", "burst", burst, "latency", "50ms")
                _run(*inside, "tc", "qdisc", "add", "dev", wire, "root", "tbf", *rate)
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", "") or str(error)
            raise NotPermitted(str(said).strip().splitlines()[-1]) from error
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in names:  # takes the link along
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _run(*command: str) -> Sequence[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()
