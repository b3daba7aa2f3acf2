"""The agent's keys in the store: one that the store does not take keeps no other waiting."""

from __future__ import annotations

import pytest
from elasticd_agent.registrar import Registrar

from elasticd.records import Keys, NodeRecord
from elasticd.store.memory import MemoryServer, MemoryStore
from tests.agent.support import until

KEYS = Keys(cluster="test")


def test_a_key_that_is_too_large_for_the_store_is_named_and_the_others_are_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = MemoryStore(MemoryServer())
    record = NodeRecord(node="n0", devices=(), address="127.0.0.1", agent="a")
    registrar = Registrar(store, KEYS, record, 30, failed=lambda why: None)
    registrar.claim()
    told: list[str] = []
    registrar.hold(KEYS.root + "large", b"x" * 2_000_000, lambda: told.append("large"))
    registrar.hold(KEYS.root + "small", b"x", lambda: told.append("small"))
    registrar.start()
    try:
        until(lambda: store.get(KEYS.root + "small") is not None)
        until(lambda: sorted(told) == ["large", "small"])
    finally:
        registrar.close()
    assert "large is not written: a request of 2,000" in caplog.text
