"""What members do together between steps, and how they find together again after a fault in the midst of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from elasticd.runtime.api.between_steps import BetweenSteps
from elasticd.runtime.comm.groups import PeerLost
from elasticd.runtime.comm.in_memory import MemoryGroup, MemoryPlanGroups, run_threads
from elasticd.runtime.exits import JobOver
from elasticd.runtime.switch.switcher import Switcher

MEMBERS = ("a/0", "a/1", "a/2")
EVALUATE, GATHER = 0, 1


@dataclass
class Plain:
    """As much of an engine as between_steps use."""

    everyone: MemoryGroup
    after_recovery: bool = False
    interrupted: bool = False


@dataclass
class Held:
    """As much of a switcher: `recover` is what a fault leads to."""

    engine: Plain | None
    recover: Callable[[], Plain | None] = lambda: None
    step: int = 7
    at_work: bool = True
    lost: list[str] = field(default_factory=list)

    def peers_lost(self, error: Exception) -> None:
        self.lost.append(str(error))
        self.engine = self.recover()


class Member:
    """One member's script: which kinds it runs is written down; members must be in the same at once."""

    def __init__(self, plan_groups: MemoryPlanGroups, *, after_recovery: bool) -> None:
        self.plan_groups, self.ran = plan_groups, list[int]()
        self.held = Held(Plain(plan_groups.group(MEMBERS, "vote"), after_recovery=after_recovery))
        self.between_steps = BetweenSteps(cast(Switcher, self.held), [self._kind(EVALUATE), self._kind(GATHER)])

    def _kind(self, kind: int) -> Callable[[Any, int], int]:
        def run(engine: Plain, step: int) -> int:
            self.ran.append(kind)
            together = [int(each) for each in engine.everyone.all_gather(torch.tensor([kind]))]
            assert together == [kind] * len(MEMBERS), "members are at different things"
            return 10 * step + kind

        return run

    def train(self) -> None:
        engine = self.held.engine
        assert engine is not None
        self.between_steps.begin_step(cast(Any, engine))
        assert not engine.after_recovery
        self.ran.append(-1)
        engine.everyone.all_gather(torch.tensor([-1]))


def run(
    scripts: dict[str, Callable[[Member], Any]], *, after_recovery: bool
) -> dict[str, tuple[Any, list[int]]]:
    def worker(plan_groups: MemoryPlanGroups) -> tuple[Any, list[int]]:
        member = Member(plan_groups, after_recovery=after_recovery)
        return scripts[plan_groups.me](member), member.ran

    return run_threads(MEMBERS, worker)


def asks(*kinds: int) -> Callable[[Member], list[Any]]:
    def script(member: Member) -> list[Any]:
        found = [member.between_steps.run(kind) for kind in kinds]
        member.train()
        return found

    return script


def test_members_that_ask_for_the_same_do_it_in_the_order_of_the_script() -> None:
    found = run(dict.fromkeys(MEMBERS, asks(GATHER, EVALUATE)), after_recovery=False)
    assert found == dict.fromkeys(MEMBERS, ([71, 70], [GATHER, EVALUATE, -1]))


def test_who_comes_in_by_a_recovery_takes_part_until_all_train() -> None:
    """One is still in the first interlude, one is past both, one knows of nothing."""
    found = run({"a/0": asks(EVALUATE, GATHER), "a/1": asks(), "a/2": asks()}, after_recovery=True)
    assert found["a/0"] == ([70, 71], [EVALUATE, GATHER, -1])
    assert found["a/1"] == found["a/2"] == ([], [EVALUATE, GATHER, -1])


def test_who_is_past_the_first_interlude_takes_part_in_it_again() -> None:
    def second(member: Member) -> list[Any]:
        member.between_steps._asked = 1  # the first one came out here before the fault
        return asks(GATHER)(member)

    scripts: dict[str, Callable[[Member], Any]] = {
        "a/0": asks(EVALUATE, GATHER),
        "a/1": second,
        "a/2": asks(),
    }
    found = run(scripts, after_recovery=True)
    assert found["a/1"] == ([71], [EVALUATE, GATHER, -1])
    assert {name: ran for name, (_, ran) in found.items()} == {name: [EVALUATE, GATHER, -1] for name in MEMBERS}


def alone(known: Sequence[Callable[[Any, int], Any]], recover: Callable[[], Plain | None]) -> tuple[Any, Held]:
    def worker(plan_groups: MemoryPlanGroups) -> tuple[Any, Held]:
        held = Held(Plain(plan_groups.group(("a/0",), "vote")), recover)
        return BetweenSteps(cast(Switcher, held), known).run(0), held

    return run_threads(("a/0",), worker)["a/0"]


def test_a_fault_in_the_midst_of_it_is_recovered_from_and_it_is_done_anew() -> None:
    recovered = Plain(MemoryPlanGroups(cast(Any, None), "a/0").group(("a/0",), "vote"))
    tries: list[Any] = []

    def once(engine: Plain, step: int) -> str:
        tries.append(engine)
        if len(tries) == 1:
            raise PeerLost("connection closed")
        return "done"

    found, held = alone([once], lambda: recovered)
    assert (found, held.lost) == ("done", ["connection closed"])
    assert tries[1] is recovered


@pytest.mark.parametrize("interrupted", [True, False])
def test_a_fault_that_the_scripts_own_code_turns_into_its_own_exception_is_recovered_from(
    interrupted: bool,
) -> None:
    """It wraps the loss of a peer, or trips over what an aborted collective left."""
    recovered = Plain(MemoryPlanGroups(cast(Any, None), "a/0").group(("a/0",), "vote"))
    tries: list[Any] = []

    def once(engine: Plain, step: int) -> str:
        tries.append(engine)
        if engine is recovered:
            return "done"
        engine.interrupted = interrupted
        if interrupted:
            raise AssertionError("not finite")
        try:
            raise PeerLost("connection closed")
        except PeerLost as error:
            raise ValueError("the measure failed") from error

    done, held = alone([once], lambda: recovered)
    assert done == "done"
    assert len(held.lost) == 1
    assert ("AssertionError" in held.lost[0]) == interrupted


def test_an_exception_of_the_scripts_own_in_a_task_is_its_own() -> None:
    def fails(engine: Plain, step: int) -> str:
        raise ValueError("the measure failed")

    with pytest.raises(ValueError, match="the measure failed"):
        alone([fails], lambda: pytest.fail("it was taken for a fault"))


def test_who_is_left_out_by_the_recovery_gets_nothing() -> None:
    def fails(engine: Plain, step: int) -> str:
        raise PeerLost("connection closed")

    found, held = alone([fails], lambda: None)
    assert found is None
    assert held.engine is None


def test_after_the_last_step_the_others_may_be_gone() -> None:
    def fails(engine: Plain, step: int) -> str:
        raise PeerLost("connection closed")

    def over() -> Plain | None:
        raise JobOver("the job finished after 7 steps")

    found, _ = alone([fails], over)
    assert found is None


def test_a_device_that_stands_by_takes_no_part() -> None:
    held = Held(None)
    assert BetweenSteps(cast(Switcher, held), [lambda engine, step: pytest.fail("it took part")]).run(0) is None


def test_a_fault_just_before_it_is_recovered_from_too() -> None:
    """Others may have asked already, and make it anew together with this rank."""
    recovered = Plain(MemoryPlanGroups(cast(Any, None), "a/0").group(("a/0",), "vote"))

    def worker(plan_groups: MemoryPlanGroups) -> tuple[Any, Held]:
        held = Held(Plain(plan_groups.group(("a/0",), "vote")))

        def recover() -> Plain:
            held.at_work = True
            return recovered

        held.recover, held.at_work = recover, False
        return BetweenSteps(cast(Switcher, held), [lambda engine, step: (engine, step)]).run(0), held

    found, held = run_threads(("a/0",), worker)["a/0"]
    assert found == (recovered, 7)
    assert held.lost == ["a fault came before it began"]
