"""The bootstrap store: torch's operations, waiting, and the keys of plans that are over."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticd.coordinator import bootstrap_store
from elasticd.coordinator.bootstrap_store import LARGEST_VALUE, BootstrapRoom, BootstrapStore
from elasticd.wire.worker import StoreAnswer, StoreCall


def ask(store: BootstrapStore, op: str, key: str, value: bytes = b"", seconds: float = 5.0) -> StoreAnswer:
    return asyncio.run(store.call(call(op, key, value, seconds)))


def call(op: str, key: str, value: bytes = b"", seconds: float = 5.0) -> StoreCall:
    return StoreCall(id=3, op=op, key=key, value=value, seconds=seconds)


def test_what_was_set_is_got_checked_and_deleted() -> None:
    store = BootstrapStore()
    assert ask(store, "set", "a", b"\x00\xff").error is None
    assert ask(store, "get", "a") == StoreAnswer(id=3, value=b"\x00\xff")
    assert ask(store, "check", "a").number == 1
    assert ask(store, "delete", "a").number == 1
    assert ask(store, "delete", "a").number == 0
    assert ask(store, "check", "a").number == 0


def test_a_call_that_this_release_lacks_is_answered_with_an_error() -> None:
    store = BootstrapStore()
    ask(store, "set", "a", b"x")
    assert "has no bootstrap store call 'append'" in (ask(store, "append", "a", b"y").error or "")
    assert ask(store, "get", "a").value == b"x"


def test_add_counts_in_text_as_torch_does() -> None:
    store = BootstrapStore()
    assert ask(store, "add", "n", b"2").number == 2
    assert ask(store, "add", "n", b"3").number == 5
    assert ask(store, "get", "n").value == b"5"
    ask(store, "set", "word", b"x")
    assert "whole numbers" in (ask(store, "add", "word", b"1").error or "")


@pytest.mark.parametrize("number", ["9" * 400, str(1 << 63)])
def test_no_number_is_too_long_for_the_keys_of_others(number: str) -> None:
    store = BootstrapStore()
    ask(store, "set", f"plan/{number}/x", b"")
    ask(store, "set", "plan/1/x", b"")
    store.drop_before(5)
    assert ask(store, "check", "plan/1/x").number == 0
    assert ask(store, "check", f"plan/{number}/x").number == 1
    ask(store, "set", "n", b"1")
    said = ask(store, "add", "n", number.encode()).error or ""
    assert said.startswith("add to n: ")
    assert ask(store, "get", "n").value == b"1"


def test_get_waits_for_its_key() -> None:
    async def body() -> StoreAnswer:
        store = BootstrapStore()
        waiting = asyncio.create_task(store.call(call("get", "late")))
        await asyncio.sleep(0)
        assert not waiting.done()
        await store.call(call("set", "late", b"here"))
        return await waiting

    assert asyncio.run(body()).value == b"here"


def test_get_of_a_key_that_never_comes_says_so() -> None:
    assert "no process set k within 0.01 s" in (ask(BootstrapStore(), "get", "k", seconds=0.01).error or "")


def test_keys_of_plans_before_are_dropped_and_who_waits_for_them_is_told() -> None:
    async def body() -> tuple[BootstrapStore, StoreAnswer]:
        store = BootstrapStore()
        for key in ("plan/1/a", "plan/2/a", "plan/3/a", "other"):
            await store.call(call("set", key, b"v"))
        waiting = asyncio.create_task(store.call(call("get", "plan/1/never")))
        await asyncio.sleep(0)
        store.drop_before(2)
        return store, await waiting

    store, answer = asyncio.run(body())
    assert "a plan that is over" in (answer.error or "")
    assert len(store._values) == 3
    assert ask(store, "check", "plan/1/a").number == 0
    assert ask(store, "check", "plan/2/a").number == 1
    assert ask(store, "check", "other").number == 1


def test_what_is_too_large_or_no_number_is_answered_with_an_error_and_harms_nothing() -> None:
    store = BootstrapStore()
    assert "characters: at most" in (ask(store, "set", "k" * 2000).error or "")
    assert "bytes: at most" in (ask(store, "set", "k", b"x" * (LARGEST_VALUE + 1)).error or "")
    for value in (b"9" * 5000, b"1_000", b" 1", b"+1", str(2**63).encode(), "\u0663".encode()):
        assert "whole numbers of 64 bits" in (ask(store, "add", "n", value).error or ""), value
    assert ask(store, "add", "n", str(2**63 - 1).encode()).number == 2**63 - 1
    assert "64 bits" in (ask(store, "add", "n", b"1").error or ""), "the sum"
    assert ask(store, "get", "n").value == str(2**63 - 1).encode()
    ask(store, "set", f"plan/{'7' * 5000}/x", b"")
    ask(store, "set", "plan/\u0663/x", b"")
    store.drop_before(9)


def test_a_jobs_store_is_bounded_and_what_goes_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap_store, "LARGEST_JOB", 100)
    store = BootstrapStore()
    assert ask(store, "set", "plan/1/a", b"x" * 60).error is None
    assert "there is no room for" in (ask(store, "set", "plan/1/b", b"x" * 60).error or "")
    assert ask(store, "set", "plan/1/a", b"").error is None
    assert ask(store, "set", "plan/1/b", b"x" * 60).error is None
    store.drop_before(2)
    assert ask(store, "set", "plan/2/a", b"x" * 90).error is None
    ask(store, "delete", "plan/2/a")
    assert ask(store, "set", "plan/2/a", b"x" * 90).error is None


def fill(store: BootstrapStore, node: str, plan: int = 1) -> int:
    """As many keys as one node may have in a store; how many."""
    for number in range(1000):
        set_ = call("set", f"plan/{plan}/{node}{number:03}", bytes(100))
        if asyncio.run(store.call(set_, node)).error is not None:
            return number
    raise AssertionError("without a bound")


def test_one_job_or_one_node_leaves_room_for_the_others() -> None:
    room = BootstrapRoom(10_000)
    first, second = BootstrapStore(room), BootstrapStore(room)
    assert 30 < fill(first, "alpha") < 50, "about a half"
    assert fill(second, "alpha") == 0, "its node has had its share"
    assert 10 < fill(second, "beta") < 25, "half of what was left"
    assert asyncio.run(BootstrapStore(room).call(call("set", "k", bytes(100)), "gamma")).error is None
    said = asyncio.run(first.call(call("set", "plan/1/x", bytes(100)), "alpha")).error or ""
    assert "all jobs' bootstrap stores share" in said
    assert "node alpha" in said
    again = call("set", "plan/1/alpha000", bytes(100))
    assert asyncio.run(first.call(again, "alpha")).error is None, "it needs no more room than it has"
    first.drop_before(2)
    assert fill(second, "alpha", plan=3) > 10
    second.close()
    assert 30 < fill(first, "beta", plan=5) < 50, "what goes makes room"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["set", "add", "delete", "drop"]),
            st.sampled_from(["plan/1/a", "plan/1/b", "plan/2/a", "plan/30/a", "rdzv/a"]),
            st.integers(0, 31),
        ),
        max_size=40,
    )
)
def test_it_holds_what_a_plain_table_would_and_counts_its_bytes(done: list[tuple[str, str, int]]) -> None:
    async def body() -> None:
        room = BootstrapRoom(1 << 20)
        store, plain = BootstrapStore(room), dict[str, bytes]()
        for op, key, number in done:
            if op == "drop":
                store.drop_before(number)
                over = [each for each in plain if each.startswith("plan/") and int(each.split("/")[1]) < number]
                for each in over:
                    del plain[each]
            elif op == "delete":
                assert (await store.call(call("delete", key))).number == (plain.pop(key, None) is not None)
            elif op == "set":
                plain[key] = str(number).encode()
                await store.call(call("set", key, plain[key]))
            else:
                plain[key] = str(int(plain.get(key, b"0")) + number).encode()
                assert (await store.call(call("add", key, str(number).encode()))).number == int(plain[key])
            assert len(store._values) == len(plain)
            assert room.used == store._bytes == sum(len(each) + len(value) for each, value in plain.items())

    asyncio.run(body())
