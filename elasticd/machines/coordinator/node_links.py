"""The links between nodes, as the leader sees them: what agents probed, and what moves of state took.

Transfers are gathered for a while and judged together, so that links are compared with each other. Probes and
moves are judged apart: they go over other connections, and a byte does not cost the same in both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Literal

import msgspec
from elasticd_planner.detection.links import LinkState, Transfer, observe_links
from elasticd_planner.detection.settings import DetectSettings
from elasticd_planner.detection.stragglers import Change, forget
from elasticd_planner.spec.cluster import Link, node_of
from elasticd_planner.value import Value

from elasticd.wire.coordinator import Crossed, FromClient
from elasticd.wire.worker import Switched

Kind = Literal["probe", "move"]

#: Seconds for which transfers are gathered.
GATHER_SECONDS = 45.0
#: Bytes from one node to another in a move below which their seconds say nothing of the link.
MEASURED_BYTES = 1 << 20
#: What a transfer can have: bytes, and seconds from the least to the most.
MOST_BYTES, LEAST_SECONDS, MOST_SECONDS = 1 << 50, 1e-7, 1e6
#: Transfers that may wait; more are not heard.
MOST = 65_536


class Measured(Value, frozen=True, kw_only=True):
    """The last probe of a link."""

    bandwidth: float  # bytes a second
    latency: float  # seconds one way, of the shortest message


class Links(Value, frozen=True, kw_only=True):
    """All that is known of links between nodes."""

    #: detection's state, by what was measured: probes, or moves of state
    judged: dict[Kind, LinkState] = msgspec.field(default_factory=dict)
    gathered: tuple[tuple[Kind, Transfer], ...] = ()  # transfers since the last judgement
    since: float | None = None  # when the first of them was heard
    probes: dict[str, Measured] = msgspec.field(default_factory=dict)  # the last probe, by the link's name

    def rate(self, name: str) -> float:
        """The slowdown of a link, by the larger of its two readings."""
        return max([state.rates.rates.get(name, 1.0) for state in self.judged.values()], default=1.0)


def without(links: Links, nodes: Collection[str]) -> Links:
    """Without what is known of links to these nodes, which have left."""
    away = frozenset(nodes)

    def stays(link: str) -> bool:
        return away.isdisjoint(link.split(" - "))

    probes = {name: probe for name, probe in links.probes.items() if stays(name)}
    gathered = tuple((kind, one) for kind, one in links.gathered if stays(one.name))
    judged = {kind: _of_links(state, stays) for kind, state in links.judged.items()}
    return msgspec.structs.replace(links, probes=probes, gathered=gathered, judged=judged)


def _of_links(state: LinkState, stays: Callable[[str], bool]) -> LinkState:
    """Detection's state without the links that do not stay."""
    rates = state.rates
    for name in (name for name in [*rates.devices] if not stays(name)):
        rates = forget(rates, name)
    first = {name: seconds for name, seconds in state.first.items() if stays(name)}
    return msgspec.structs.replace(state, rates=rates, first=first)


def crossed(links: Links, source: str, probe: Crossed, nodes: Collection[str], now: float) -> Links:
    """An agent of node `source` probed a link to another of `nodes`. What makes no sense is not heard."""
    times = probe.seconds, probe.latency
    if not all(_possible(probe.size, each) for each in times):
        return links
    if probe.target == source or probe.target not in nodes:
        return links
    transfer = Transfer(source=source, target=probe.target, size=probe.size, seconds=sum(times))
    known = Measured(bandwidth=probe.size / probe.seconds, latency=probe.latency)
    links = msgspec.structs.replace(links, probes={**links.probes, transfer.name: known})
    return _gather(links, "probe", [transfer], now)


def moved(links: Links, up: FromClient, nodes: Collection[str], now: float) -> Links:
    """A worker tells of a switch: what came to it from others of these nodes."""
    if not isinstance(up.body, Switched) or not up.body.flows:
        return links
    target, bytes_moved = node_of(up.device), dict[str, tuple[int, float]]()
    for device, (size, seconds) in up.body.flows.items():
        source = node_of(device)
        if source != target and source in nodes and _possible(size, seconds):
            before = bytes_moved.get(source, (0, 0.0))
            bytes_moved[source] = before[0] + size, max(before[1], seconds)  # a node's devices send at once
    transfers = [
        Transfer(source=source, target=target, size=size, seconds=seconds)
        for source, (size, seconds) in bytes_moved.items()
        if size >= MEASURED_BYTES
    ]
    return _gather(links, "move", transfers, now)


def _possible(size: int, seconds: float) -> bool:
    return 0 < size <= MOST_BYTES and LEAST_SECONDS <= seconds <= MOST_SECONDS


def _gather(links: Links, kind: Kind, transfers: Iterable[Transfer], now: float) -> Links:
    gathered = (*links.gathered, *((kind, transfer) for transfer in transfers))[:MOST]
    since = links.since if links.since is not None or not gathered else now
    return msgspec.structs.replace(links, gathered=gathered, since=since)


def judge(
    links: Links, between: Link, settings: DetectSettings, now: float
) -> tuple[Links, tuple[tuple[Kind, Change], ...]]:
    """Once enough time has passed: which links became slow, or recovered. `between`: as configured."""
    if links.since is None or now - links.since < GATHER_SECONDS:
        return links, ()
    judged, changed = dict(links.judged), list[tuple[Kind, Change]]()
    for kind in dict.fromkeys(kind for kind, _ in links.gathered):
        transfers = [transfer for other, transfer in links.gathered if other == kind]
        state = judged.get(kind, LinkState())
        judged[kind], changes = observe_links(state, transfers, state.rates.step + 1, between, settings)
        changed += [(kind, change) for change in changes]
    return msgspec.structs.replace(links, judged=judged, gathered=(), since=None), tuple(changed)
