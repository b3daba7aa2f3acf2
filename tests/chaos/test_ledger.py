"""The checker of steps: it finds nothing wrong with what is right, and each thing that can be wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.soak.ledger import EARLY, Ledger, Line, check, furthest, read

STEPS = 6
#: Plan 1 from the start, plan 3 from step 4 on: its fence is 2.
PLANS = [(1, 0), (3, 4)]


def samples(step: int) -> tuple[int, ...]:
    return (2 * step, 2 * step + 1)


def line(step: int, plan: int) -> Line:
    return Line(step=step, loss=1 / (step + 1), samples=samples(step), plan=plan)


def right() -> list[Ledger]:
    """Two processes make all steps; a third dies after it was given step 4 under plan 1, which nobody heard."""
    both = [*(line(step, 1) for step in range(4)), *(line(step, 3) for step in range(4, STEPS))]
    dead = [line(step, 1) for step in range(5)]
    return [
        Ledger(device="a/0", pid=10, lines=tuple(both), ended=True),
        Ledger(device="a/1", pid=11, lines=tuple(both), ended=True),
        Ledger(device="b/0", pid=12, lines=tuple(dead)),
    ]


PLAIN = [line(step, 0) for step in range(STEPS)]


def found(ledgers: list[Ledger], **changes: object) -> list[str]:
    given: dict[str, object] = {"fenced_off": {12: 2}, "plans": PLANS, **changes}
    return check(ledgers, given["plans"], given["fenced_off"], STEPS, samples, PLAIN)  # type: ignore[arg-type]


def test_a_run_with_a_death_in_it_is_right() -> None:
    assert found(right()) == []
    assert furthest(right(), PLAIN) == 0


def test_a_step_under_another_plan_of_one_that_was_not_fenced_off_is_found() -> None:
    assert any("b/0 (pid 12) was given step 4 under plan 1" in one for one in found(right(), fenced_off={}))
    assert found(right(), fenced_off={12: 1}), "a fence before that plan does not count"


def without(ledger: Ledger, step: int) -> Ledger:
    return _with(ledger, tuple(one for one in ledger.lines if one.step != step))


def _with(ledger: Ledger, lines: tuple[Line, ...]) -> Ledger:
    return Ledger(device=ledger.device, pid=ledger.pid, lines=lines, ended=ledger.ended)


def changed(ledger: Ledger, step: int, **fields: object) -> Ledger:
    return _with(
        ledger,
        tuple(msgspec.structs.replace(one, **fields) if one.step == step else one for one in ledger.lines),
    )


WRONG: list[tuple[Callable[[Ledger], Ledger], str]] = [
    (lambda one: without(one, 5), "step 5 was given to nobody"),
    (lambda one: without(one, 2), "was not given what lies between step 1 and 3"),
    (lambda one: _with(one, (*one.lines, one.lines[-1])), "was given step 5 after step 5"),
    (lambda one: changed(one, 3, samples=(6, 6)), "step 3 trained on (6, 6)"),
    (lambda one: changed(one, 3, loss=0.2501), "step 3 has loss 0.2501"),
    (lambda one: changed(one, 5, plan=1), "plan 1 after plan 3"),
    (lambda one: Ledger(device="a/0", pid=10, lines=one.lines), "nobody saw the end"),
]


@pytest.mark.parametrize(("break_it", "said"), WRONG)
def test_what_all_got_wrong_alike_is_found(break_it: Callable[[Ledger], Ledger], said: str) -> None:
    ledgers = right()
    broken = [break_it(ledgers[0]), ledgers[2]]
    assert any(said in one for one in found(broken)), found(broken)


def test_ranks_that_do_not_agree_to_the_bit_are_found() -> None:
    ledgers = right()
    ledgers[1] = changed(ledgers[1], 2, loss=1 / 3 + 1e-16 * 2)
    assert any("step 2 has 2 losses" in one for one in found(ledgers))


def test_a_line_that_a_killed_process_did_not_end_is_left_out(tmp_path: Path) -> None:
    whole = b"".join(msgspec.json.encode(line(step, 1)) + b"\n" for step in range(2))
    (tmp_path / "ledger-a:0-77.jsonl").write_bytes(whole + b'{"step": 2, "lo')
    (tmp_path / "ledger-b:1-78.jsonl").write_bytes(whole + b'{"end": 2}\n')
    dead, ended = read(tmp_path)
    assert (dead.device, dead.pid, len(dead.lines), dead.ended) == ("a/0", 77, 2, False)
    assert (ended.device, len(ended.lines), ended.ended) == ("b/1", 2, True)


@pytest.mark.parametrize(("step", "most"), [(0, 1e-9), (EARLY - 1, 1e-9), (EARLY, 1e-6)])
def test_a_loss_is_that_of_the_undisturbed_run_but_for_as_much_as_rounding_explains(
    step: int, most: float
) -> None:
    def wrong(apart: float) -> list[str]:
        lines = tuple(Line(step=at, loss=2.0, samples=(), plan=1) for at in range(step))
        last = Line(step=step, loss=2.0 * (1 + apart), samples=(), plan=1)
        ledger = Ledger(device="a/0", pid=1, lines=(*lines, last), ended=True)
        plain = [Line(step=at, loss=2.0, samples=()) for at in range(step + 1)]
        return check([ledger], [(1, 0)], {}, step + 1, lambda _: (), plain)

    assert wrong(0.9 * most) == []
    (said,) = wrong(1.1 * most)
    assert said.startswith(f"step {step} has loss")
