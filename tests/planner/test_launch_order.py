"""The checker of launch orders against a simulator that tries every interleaving of all ranks and streams."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests import sizes
from tests.planner.launch_order import Join, Launch, Log, Operation, deadlock, in_one_queue

RANKS = ("a", "b", "c")


def single(communicator: str, members: str, name: str = "") -> Launch:
    """A launch of one operation among the ranks that `members` lists."""
    return Launch(communicator, (Operation(name or members, tuple(members)),))


def test_sets_that_overlap_wait_for_each_other_in_one_communicator_and_not_in_several() -> None:
    own_order = {"a": ["ab", "ac"], "b": ["bc", "ab"], "c": ["ac", "bc"]}
    logs = {rank: [single("all", members) for members in order] for rank, order in own_order.items()}
    found = deadlock(logs)
    assert found is not None
    assert sorted(found.operations) == ["ab", "ac", "bc"]
    several = {rank: [single(members, members) for members in order] for rank, order in own_order.items()}
    assert deadlock(several) is None
    assert deadlock(in_one_queue(several)) == found


def test_two_ranks_that_both_receive_first_wait_for_each_other_unless_it_is_a_batch() -> None:
    there, back = Operation("a to b", ("a", "b")), Operation("b to a", ("a", "b"))
    receive_first = {
        "a": [Launch("pair", (back,)), Launch("pair", (there,))],
        "b": [Launch("pair", (there,)), Launch("pair", (back,))],
    }
    found = deadlock(receive_first)
    assert found is not None
    assert set(found.operations) == {"a to b", "b to a"}
    assert deadlock({rank: [Launch("pair", (there, back))] for rank in ("a", "b")}) is None
    directions = {
        "a": [Launch("back", (back,)), Launch("there", (there,))],
        "b": [Launch("there", (there,)), Launch("back", (back,))],
    }
    assert deadlock(directions) is None


def test_a_stream_that_joins_before_it_launches_waits_across_communicators() -> None:
    logs: dict[str, list[Launch | Join]] = {
        "a": [single("1", "ab", "x"), Join("x"), single("2", "ab", "y")],
        "b": [single("2", "ab", "y"), Join("y"), single("1", "ab", "x")],
    }
    found = deadlock(logs)
    assert found is not None
    assert set(found.operations) == {"x", "y"}
    joined_later = {rank: [entry for entry in log if isinstance(entry, Launch)] for rank, log in logs.items()}
    assert deadlock(joined_later) is None


def test_an_operation_that_a_member_never_launches_is_named_with_the_member() -> None:
    found = deadlock({"a": [single("all", "abc")], "b": [], "c": [single("all", "abc")]})
    assert found is not None
    assert found.reason == "abc is never launched by b"


def test_logs_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="a launches ab twice"):
        deadlock({"a": [single("1", "ab"), single("1", "ab")], "b": [single("1", "ab")]})
    with pytest.raises(ValueError, match="a joins ab, which it has not launched"):
        deadlock({"a": [Join("ab"), single("1", "ab")], "b": [single("1", "ab")]})


def test_a_receipt_that_is_launched_too_early_hangs_in_one_queue_alone() -> None:
    """Of two stages, the second one receives two activations before it sends the first gradient."""
    first, second, back = "activation 0", "activation 1", "gradient 0"

    def logs(of_a: list[str]) -> dict[str, list[Launch | Join]]:
        on = {first: "forth", second: "forth", back: "back"}
        return {
            "a": [single(on[name], "ab", name) for name in of_a],
            "b": [
                single("forth", "ab", first),
                Join(first),
                single("forth", "ab", second),
                Join(second),
                single("back", "ab", back),
            ],
        }

    early, later = logs([first, back, second]), logs([first, second, back])
    assert deadlock(early) is None
    assert deadlock(later) is None
    found = deadlock(in_one_queue(early))
    assert found is not None
    assert set(found.operations) == {second, back}
    assert deadlock(in_one_queue(later)) is None


# -- against all interleavings -------------------------------------------------------------------------------


@st.composite
def drawn(draw: st.DrawFn) -> dict[str, list[Launch | Join]]:
    """Logs of two or three ranks that launch all their operations, each in an order of its own."""
    ranks = RANKS[: draw(st.integers(2, 3))]
    operations = []
    for number in range(draw(st.integers(2, 3))):
        members = draw(st.sets(st.sampled_from(ranks), min_size=2).map(sorted))
        operations.append((draw(st.sampled_from("1112")), Operation(str(number), tuple(members))))
    logs: dict[str, list[Launch | Join]] = {}
    for rank in ranks:
        order = draw(st.permutations([each for each in operations if rank in each[1].members]))
        log: list[Launch | Join] = []
        for communicator, operation in order:
            last = log[-1] if log else None
            if isinstance(last, Launch) and last.communicator == communicator and draw(st.integers(0, 3)) == 0:
                log[-1] = Launch(communicator, (*last.operations, operation))
            else:
                log.append(Launch(communicator, (operation,)))
            if draw(st.integers(0, 3)) == 0:
                log.append(Join(operation.name))
        logs[rank] = log
    return logs


def ends(logs: Mapping[str, Log]) -> set[bool]:
    """Whether everything has run at the end, for each possible run: one step at a time, by any part.

    Each rank has a compute stream, which passes the entries of its log in order, and launches, which begin. (A
    late host is a late stream.) A state is a set of steps, as bits.
    """
    steps: dict[tuple[object, ...], int] = {}

    def bit(*step: object) -> int:
        return 1 << steps.setdefault(step, len(steps))

    needs: dict[int, int] = {}
    everything = 0
    for rank, log in logs.items():
        over: dict[str, int] = {}  # of each operation that was launched: all of its launch has run
        busy: dict[str, int] = {}  # of each communicator: all of its launches so far have run
        passed = 0
        for number, entry in enumerate(log):
            if isinstance(entry, Launch):
                run = sum(bit("runs", operation.name) for operation in entry.operations)
                begins = bit("begins", rank, number)
                needs[begins] = passed | busy.get(entry.communicator, 0)
                busy[entry.communicator] = busy.get(entry.communicator, 0) | run
                for operation in entry.operations:
                    over[operation.name] = run
                    one = bit("runs", operation.name)
                    needs[one] = needs.get(one, 0) | begins
                    everything |= one
            now = bit("passes", rank, number)
            needs[now] = passed | (over[entry.operation] if isinstance(entry, Join) else 0)
            passed = now
    results, seen, todo = set[bool](), {0}, [0]
    while todo:
        state = todo.pop()
        following = [state | step for step, need in needs.items() if not state & step and state & need == need]
        if not following:
            results.add(state & everything == everything)
        for each in following:
            if each not in seen:
                seen.add(each)
                todo.append(each)
    return results


@settings(max_examples=sizes.examples(200))
@given(drawn())
def test_the_checker_says_what_all_interleavings_end_in(logs: dict[str, list[Launch | Join]]) -> None:
    found = deadlock(logs)
    event("deadlock" if found else "runs")
    assert ends(logs) == {found is None}, "no timing changes the end"


@settings(max_examples=sizes.examples(200))
@given(drawn())
def test_what_never_runs_is_named(logs: dict[str, list[Launch | Join]]) -> None:
    """Without the operations that the checker names the others, or some of them, run."""
    found = deadlock(logs)
    if found is None:
        return
    assert found.operations
    for rank, log in logs.items():
        kept: list[Launch | Join] = []
        for entry in log:
            if isinstance(entry, Launch):
                left = tuple(each for each in entry.operations if each.name not in found.operations)
                if left:
                    kept.append(Launch(entry.communicator, left))
            elif entry.operation not in found.operations:
                kept.append(entry)
        logs[rank] = kept
    after = deadlock(logs)
    assert after is None or not set(after.operations) & set(found.operations)
    assert ends(logs) == {after is None}


def one_by_one(logs: Mapping[str, Log]) -> bool:
    """Whether everything has run at the end if each rank is in one launch at a time, until that is over."""
    left = {rank: [entry for entry in log if isinstance(entry, Launch)] for rank, log in logs.items()}
    ran = set[str]()
    while True:
        here = {rank: log[0].operations for rank, log in left.items() if log}
        runs = {
            operation.name
            for operation in (each for operations in here.values() for each in operations)
            if operation.name not in ran and all(operation in here.get(rank, ()) for rank in operation.members)
        }
        ran |= runs
        over = [rank for rank, operations in here.items() if all(each.name in ran for each in operations)]
        for rank in over:
            left[rank] = left[rank][1:]
        if not runs and not over:
            return not here


@settings(max_examples=sizes.examples(400))
@given(drawn())
def test_in_one_queue_the_checker_says_what_comes_of_one_launch_after_the_other(
    logs: dict[str, list[Launch | Join]],
) -> None:
    found = deadlock(in_one_queue(logs))
    event("deadlock" if found else "runs")
    assert one_by_one(logs) == (found is None)
    if found is None:
        assert deadlock(logs) is None, "streams that run side by side wait for less"
