"""A torchrun in restart mode asks its agent, and takes no refusal of the store for done."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from elasticd.rendezvous.agent_requests import AgentRequests
from elasticd.store.memory import MemoryStore
from elasticd.store.protocol import Op, Put, StoreRefused, TransactResult
from tests.agent.support import Node, closing_all


def test_a_torchrun_whose_presence_the_store_refuses_hears_why_and_asks_nothing_else_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = MemoryStore.transact

    def transact(store: MemoryStore, compares: Any, then: Sequence[Op]) -> TransactResult:
        if any(isinstance(op, Put) and "/torchruns/" in op.key for op in then):
            raise StoreRefused("etcd denies access; check user, password and role")
        return real(store, compares, then)

    monkeypatch.setattr(MemoryStore, "transact", transact)
    with closing_all() as register:
        node = Node(register, tmp_path)
        node.agent()
        asking = register(AgentRequests(node.path, "job", 10.0))
        with pytest.raises(RendezvousConnectionError, match="torchruns/t0: etcd denies access"):
            asking.present("t0", "")
        asking.close()  # as where the agent is started again
        with pytest.raises(RendezvousConnectionError, match=r"not know of this torchrun: .* denies access"):
            asking.read()
        monkeypatch.setattr(MemoryStore, "transact", real)
        asking.patience = 60.0
        assert "t0" in asking.read().torchruns
