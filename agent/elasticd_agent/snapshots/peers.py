"""The other nodes' agents as the store names them: who may send snapshots here, and who is sent ours."""

from __future__ import annotations

import threading
from collections.abc import Collection

from elasticd.records import NodeRecord


class Peers:
    """The records of the other nodes. Thread-safe."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._lock = threading.Lock()
        self._records: dict[str, NodeRecord] = {}

    def read(self, node: str, record: NodeRecord | None) -> str:
        """The node's record is this now (None: it is gone). Returns the agent that is there no more, if so."""
        if node == self._node:
            return ""
        with self._lock:
            before = self._records.pop(node, None)
            if record is not None:
                self._records[node] = record
        return before.agent if before is not None and (record is None or record.agent != before.agent) else ""

    def certificates(self) -> dict[str, str]:
        """By node, of those that have one."""
        with self._lock:
            return {node: record.certificate for node, record in self._records.items() if record.certificate}

    def there(self, agent: str) -> bool:
        """Returns True if the store names this agent as that of another node."""
        with self._lock:
            return any(record.agent == agent for record in self._records.values())

    def ring(self, nodes: Collection[str] | None) -> list[NodeRecord]:
        """Those of `nodes` (None: of all) that take snapshots, in the order of their names, from the one behind
        this node on: so each node keeps those of one other, where all can."""
        with self._lock:
            able = [
                record
                for node, record in sorted(self._records.items())
                if record.snapshots and record.certificate and (nodes is None or node in nodes)
            ]
        return [r for r in able if r.node > self._node] + [r for r in able if r.node < self._node]
