"""The engine: events in order of time, priority and asking; time that jumps from one to the next."""

from __future__ import annotations

from elasticd.simulator.cluster.leader import Known
from elasticd.simulator.engine import FAULT, LATE, EventEngine
from elasticd.store.memory import MemoryServer, MemoryStore


def test_events_come_by_time_then_priority_then_the_order_of_asking() -> None:
    engine, seen = EventEngine(), list[str]()
    engine.call_at(2.0, lambda: seen.append("late"), LATE)
    engine.call_at(2.0, lambda: seen.append("first"))
    engine.call_at(2.0, lambda: seen.append("second"))
    engine.call_at(2.0, lambda: seen.append("fault"), FAULT)
    engine.call_at(1.0, lambda: seen.append("early"))
    engine.run(lambda: False)
    assert seen == ["early", "fault", "first", "second", "late"]
    assert engine.now() == 2.0


def test_what_is_cancelled_or_past_the_end_does_not_happen() -> None:
    engine, seen = EventEngine(), list[float]()
    engine.call_at(1.0, lambda: seen.append(1.0)).cancel()
    engine.call_at(2.0, lambda: seen.append(engine.now()))
    engine.call_at(3.0, lambda: seen.append(engine.now()))
    engine.run(lambda: engine.now() >= 2.0)
    assert seen == [2.0]


def test_a_call_for_the_past_comes_now() -> None:
    engine, seen = EventEngine(), list[float]()
    engine.call_at(5.0, lambda: engine.call_at(1.0, lambda: seen.append(engine.now())) and None)
    engine.run(lambda: False)
    assert seen == [5.0]


def test_leases_of_the_store_run_out_on_the_engines_time() -> None:
    engine = EventEngine()
    store = MemoryStore(MemoryServer(engine))
    store.put("/elasticd/x/leader", b"me", store.grant(5))
    engine.call_at(4.0, lambda: None)
    engine.run(lambda: engine.now() >= 4.0)
    assert store.get("/elasticd/x/leader") is not None
    engine.run(lambda: False)
    assert store.get("/elasticd/x/leader") is None
    assert engine.now() == 5.0


def test_what_was_found_out_is_asked_again_only_of_values_that_were_replaced() -> None:
    known, asked = Known(), list[object]()

    def empty(*values: list[int]) -> bool:
        asked.append(values)
        return not any(values)

    one, two = list[int](), [1]
    assert known.of(empty, one)
    assert known.of(empty, one)
    assert len(asked) == 1
    assert not known.of(empty, two)
    assert known.of(empty, [])
    assert known.of(empty, one), "equal is not the same"
    assert len(asked) == 4
    assert not known.of(empty, one, two)
