"""The communication of a switch between two plans, by the migration's own choice of senders (`reshard`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from elasticd_planner.layout.explained_plan import Communications, Purpose, listed, message
from elasticd_planner.layout.holdings import Holdings
from elasticd_planner.layout.layouts import Item, Role
from elasticd_planner.layout.link_traffic import Flow
from elasticd_planner.layout.lowering import seconds
from elasticd_planner.layout.resolve import Communication
from elasticd_planner.spec.cluster import Cluster
from elasticd_planner.value import Value

from elasticd_migration.reshard import bytes_lacking, reshard, whole_bytes

#: What an item's bytes are, by its role.
_PURPOSES: dict[Role, Purpose] = {"value": "parameters", "state": "optimizer state", "buffer": "buffers"}


class ExplainedSwitch(Value, frozen=True, kw_only=True):
    """The traffic of a switch."""

    communications: Communications
    moved: int  #: bytes that are sent
    least: int  #: bytes that devices need and do not hold: no algorithm sends fewer
    whole: int  #: bytes of the whole state, each element once
    seconds: float | None = None  #: that the busiest link takes; None: the cluster's links are not known


def explain_switch(
    old: Holdings, new: Holdings, sizes: Mapping[Item, int], cluster: Cluster | None = None
) -> ExplainedSwitch:
    """The communication of a switch.

    Args:
        old: without what is gone (`SurvivingLayouts`).
        new: of the plan to come.
        sizes: bytes of one element by item, as `reshard` takes them.
        cluster: its links; with it there are seconds.

    Raises:
        Lost: no device holds a part of the state.
    """
    alike: Counter[tuple[Purpose, str, str, int, int]] = Counter()  # most layers move as others do
    for transfer in reshard(old, new, sizes):
        source, to, count = transfer.source, transfer.destination, transfer.box.size
        for item in transfer.items:
            alike[_PURPOSES[item.role], source, to, count, sizes[item]] += 1
    sent: Counter[tuple[str, str]] = Counter()
    flows: list[tuple[Purpose, Flow]] = []
    for (purpose, source, to, count, itemsize), times in alike.items():
        flows.append((purpose, Flow(message((source, to), count), itemsize, times)))
        sent[source, to] += count * itemsize * times
    steps = list(_messages(sent))
    return ExplainedSwitch(
        communications=listed(flows, cluster),
        moved=sent.total(),
        least=sum(bytes_lacking(old, new, sizes).values()),
        whole=whole_bytes(new, sizes),
        seconds=seconds(steps, cluster, 1) if cluster is not None else None,
    )


def _messages(sent: Mapping[tuple[str, str], int]) -> Iterator[Communication]:
    """All that goes from one device to another as one message, in bytes: they share the latency."""
    for pair, size in sent.items():
        if size:
            yield message(pair, size)
