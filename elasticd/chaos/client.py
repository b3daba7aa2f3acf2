"""`elasticd chaos` for programs: harm a running cluster through its coordinator.

with chaos("cluster.toml") as cluster:
    cluster.slow("alpha/1", 2.5)
    cluster.kill("beta/0")
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from elasticd_planner.value import refuse

from elasticd.client import ApiClient, reach


class Chaos:
    """Each verb returns when the agent has heard of it, which carries it out at once. All raise `CannotReach`
    where the configuration does not allow chaos, the place is not there, or the agent did not confirm."""

    def __init__(self, api: ApiClient) -> None:
        self._api = api

    def slow(self, device: str, factor: float) -> tuple[str, ...]:
        """It takes `factor` times as long for the same work. Returns the nodes whose agents have not heard of
        it: they are told once they are back, while this coordinator leads. Raises `Invalid` for one below 1."""
        slowdown(factor)
        return self._api.chaos("slow", _device(device), factor).pending

    def recover(self, device: str) -> tuple[str, ...]:
        """It runs at its normal speed again. Returns as `slow`."""
        return self._api.chaos("recover", _device(device)).pending

    def kill(self, device: str) -> None:
        """Its worker's process gets SIGKILL."""
        self._api.chaos("kill", _device(device))

    def freeze(self, device: str) -> None:
        """Its worker's process gets SIGSTOP."""
        self._api.chaos("freeze", _device(device))

    def thaw(self, device: str) -> None:
        """Its worker's process, and whoever was frozen on it before, gets SIGCONT."""
        self._api.chaos("thaw", _device(device))

    def cut(self, node: str, seconds: float = 0.0) -> None:
        """Its agent loses leader and store, for `seconds` or (0) until it is healed."""
        self._api.chaos("cut", _node(node), seconds=seconds)

    def heal(self, node: str) -> None:
        """Its agent finds them again."""
        self._api.chaos("heal", _node(node))

    def cut_data(self, node: str, other: str, seconds: float = 0.0, *, one_way: bool = False) -> None:
        """Cuts the data network between two nodes: what both send to each other's data address is lost
        (one_way: what `node` sends), for `seconds` or (0) until it is healed. An agent that may not set routes
        shuts its workers' connections once."""
        self._api.cut_data("cut", (_node(node), _node(other)), seconds=seconds, one_way=one_way)

    def heal_data(self, node: str, other: str) -> None:
        """They reach each other's data addresses again."""
        self._api.cut_data("heal", (_node(node), _node(other)))


@contextmanager
def chaos(config: str | None = None, coordinator: str | None = None) -> Iterator[Chaos]:
    """Chaos at the coordinator of this URL, else at the one that leads by the configuration (a file, default
    `$ELASTICD_CONFIG`). Raises `CannotReach`."""
    with reach(config, coordinator) as api:
        yield Chaos(api)


def slowdown(factor: float) -> float:
    """`factor`. Raises `Invalid` where nothing could be as much slower."""
    if not math.isfinite(factor) or factor < 1:
        refuse(f"factor {factor:g} must be a number of at least 1 (1 is normal speed), as 3")
    return factor


def _device(name: str) -> str:
    node, slash, index = name.rpartition("/")
    if not (node and slash and index):
        refuse(f"{name!r} must be a device: its node, a slash and its index there, as alpha/1")
    return name


def _node(name: str) -> str:
    if not name or "/" in name:
        refuse(f"{name!r} must be a node, as alpha")
    return name
