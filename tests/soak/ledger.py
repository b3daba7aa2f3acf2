"""What must hold of the steps that the workers' scripts were given, whatever happened meanwhile.

1. Every step from the first to the last was given to somebody who has a part in the job's history.
2. A process is given steps in order, each once, and none is skipped while its plan stays.
3. Every step trained on its own samples: none is lost, none counts twice.
4. All who were given a step under the plan in force then have the same loss, to the bit, and it is that of an
   undisturbed run, but for rounding (`tolerance`).
5. Who was given a step under another plan was fenced off: what it did is no part of history. Or its job goes
   back where state is lost: the steps from there on are made again, under the next plan.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elasticd_planner.value import Value

from elasticd.codec.decoding import decoder_of

#: Steps in which rounding stays small; how much of a loss it explains in those, and later.
EARLY, EARLY_APART, LATE_APART = 2000, 1e-9, 1e-6


def tolerance(step: int) -> float:
    """How far from that of the undisturbed run a loss may be, relatively, in float64. Sums in another order are
    1e-16 apart in the first step, and training carries that on: 1e-12 in 500 steps, 2e-10 in 2,000, 2e-9
    in 3,000 and 5e-8 in 4,700, as was measured. A sample that is lost or counted twice changes far more."""
    return EARLY_APART if step < EARLY else LATE_APART


class Line(Value, frozen=True, kw_only=True):
    """A step as a script was given it. Scripts write it and the same run reads it: no tag, no version."""

    step: int
    loss: float | None  # None: the process did not hear it
    samples: tuple[int, ...]
    plan: int = 0


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """One process's: `ended` where it saw the end of the job."""

    device: str
    pid: int
    lines: tuple[Line, ...]
    ended: bool = False


def read(folder: Path) -> list[Ledger]:
    """All ledger-DEVICE-PID.jsonl of a folder. A last line that its process did not live to end is left out."""
    found = []
    for path in sorted(folder.glob("ledger-*.jsonl")):
        device, _, pid = path.stem.removeprefix("ledger-").rpartition("-")
        whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        ended = bool(whole) and "end" in json.loads(whole[-1])
        lines = tuple(decoder_of(Line).decode(line) for line in whole[: -1 if ended else None])
        found.append(Ledger(device=device.replace(":", "/"), pid=int(pid), lines=lines, ended=ended))
    return found


def read_plain(path: Path) -> list[Line]:
    """The undisturbed run."""
    return [decoder_of(Line).decode(line) for line in path.read_text().splitlines()]


def check(
    ledgers: Sequence[Ledger],
    plans: Sequence[tuple[int, int]],
    fenced_off: Mapping[int, int],
    steps: int,
    samples: Callable[[int], Sequence[int]],
    plain: Sequence[Line],
    *,
    over: bool = True,
    goes_back: bool = False,
) -> list[str]:
    """What is wrong.

    Args:
        ledgers: of all processes.
        plans: number and first step of each recorded plan, in order.
        fenced_off: the highest number of a fence that named a process, by its pid.
        steps: of the job.
        samples: those of a step.
        plain: the undisturbed run.
        over: the job came to its end.
        goes_back: a plan may begin before steps that were made under the plan before.
    """
    wrong: list[str] = []
    history: dict[int, list[tuple[Ledger, Line]]] = {}
    again = _made_again(ledgers, plans) if goes_back else set()
    for ledger in ledgers:
        wrong += _in_order(ledger, goes_back=goes_back)
        for line in ledger.lines:
            which = next((i for i in reversed(range(len(plans))) if plans[i][1] <= line.step), -1)
            if which >= 0 and plans[which][0] == line.plan:
                history.setdefault(line.step, []).append((ledger, line))
            elif (line.plan, line.step) in again:
                wrong += _one(line.step, [(ledger, line)], samples, plain)
            elif fenced_off.get(ledger.pid, 0) <= line.plan:
                under = plans[which][0] if which >= 0 else "none"
                wrong.append(
                    f"{_name(ledger)} was given step {line.step} under plan {line.plan}; in force was {under}, "
                    "and it was not fenced off"
                )
    for step in range(steps):
        given = history.get(step)
        wrong += [f"step {step} was given to nobody"] if not given else _one(step, given, samples, plain)
    beyond = [step for step in history if step >= steps]
    wrong += [f"step {step} is beyond the last" for step in beyond]
    if over and not any(ledger.ended for ledger in ledgers):
        wrong.append("nobody saw the end of the job")
    return wrong


def made_again(ledgers: Sequence[Ledger], plans: Sequence[tuple[int, int]]) -> int:
    """Number of the steps that were made, and made again under a later plan."""
    return len(_made_again(ledgers, plans))


def _made_again(ledgers: Sequence[Ledger], plans: Sequence[tuple[int, int]]) -> set[tuple[int, int]]:
    """Plan and step of all that a later plan went back before."""
    least: dict[int, int] = {}  # the earliest step at which any later plan began
    first = math.inf
    for number, begin in reversed(plans):
        least[number] = int(first) if first < math.inf else -1
        first = min(first, begin)
    made = {(line.plan, line.step) for ledger in ledgers for line in ledger.lines if line.plan in least}
    return {(plan, step) for plan, step in made if 0 <= least[plan] <= step}


def _in_order(ledger: Ledger, *, goes_back: bool = False) -> list[str]:
    wrong = []
    for before, line in zip(ledger.lines, ledger.lines[1:], strict=False):
        if goes_back and line.step <= before.step and line.plan > before.plan:
            continue
        if line.step <= before.step:
            wrong.append(f"{_name(ledger)} was given step {line.step} after step {before.step}")
        elif line.plan < before.plan:
            wrong.append(f"{_name(ledger)}: plan {line.plan} after plan {before.plan} at step {line.step}")
        elif line.plan == before.plan and line.step != before.step + 1:
            wrong.append(f"{_name(ledger)} was not given what lies between step {before.step} and {line.step}")
    return wrong


def _one(
    step: int,
    given: Sequence[tuple[Ledger, Line]],
    samples: Callable[[int], Sequence[int]],
    plain: Sequence[Line],
) -> list[str]:
    wrong = []
    right = tuple(samples(step))
    for ledger, line in given:
        if line.samples != right:
            wrong.append(f"step {step} trained on {line.samples} at {_name(ledger)}, not on {right}")
    losses = {line.loss for _, line in given if line.loss is not None}
    if len(losses) > 1:
        wrong.append(f"step {step} has {len(losses)} losses: {sorted(losses)}")
    expected = plain[step].loss if step < len(plain) else math.nan
    for loss in losses:
        if not abs(loss - expected) <= tolerance(step) * abs(expected):
            wrong.append(f"step {step} has loss {loss!r}; undisturbed it is {expected!r}")
    return wrong


def furthest(ledgers: Sequence[Ledger], plain: Sequence[Line]) -> float:
    """The largest relative difference of a loss from that of the undisturbed run."""
    apart = [
        abs(line.loss - plain[line.step].loss) / abs(plain[line.step].loss)
        for ledger in ledgers
        for line in ledger.lines
        if line.step < len(plain) and line.loss is not None
    ]
    return max(apart, default=math.nan)


def _name(ledger: Ledger) -> str:
    return f"{ledger.device} (pid {ledger.pid})"
