"""Copies of the training state that a rank holds beside the plan in force.

They are of plans before it, and verified ones of plans that the rank does not know to be in force. Each may be
what a recovery goes on from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic

from elasticd.runtime.switch.plan_copy import Held
from elasticd.wire.worker import Copy, StateReport


class Copies(Generic[Held]):
    """Copies by plan number.

    Args:
        let_go: Called with the plan number and the engine of each copy that is dropped.
    """

    def __init__(self, let_go: Callable[[int, Held], None]) -> None:
        self._let_go = let_go
        self._kept: dict[int, tuple[Held, int]] = {}  # the engine of the plan, and the updates applied to it

    def __bool__(self) -> bool:
        return bool(self._kept)

    def keep(self, number: int, engine: Held, step: int) -> None:
        """Adds the copy of plan `number`, after `step` updates."""
        self._kept[number] = engine, step

    def get(self, number: int, engine: Held | None, step: int) -> tuple[Held | None, int]:
        """Returns the copy of a plan.

        Args:
            number: The plan's number.
            engine: The engine in force, if any, which counts as a copy of its plan.
            step: Updates applied to that one.

        Returns:
            Its engine and the updates applied to it; None and -1 if no copy is held.
        """
        if engine is not None and engine.plan.number == number:
            return engine, step
        return self._kept.get(number, (None, -1))

    def others(self, engine: Held, current: Held | None) -> list[Held]:
        """Returns the engines that hold whole copies beside `engine`.

        Args:
            engine: One that holds a copy.
            current: The engine in force, if any.
        """
        held = [kept for kept, _ in self._kept.values()]
        found = [*held, current] if current is not None and current not in held else held
        return [each for each in found if each is not engine and each.health.usable]

    def report(self, fence: int, engine: Held | None, step: int) -> StateReport:
        """Returns what is held here, in answer to a fence; no collective and no update may be under way.

        What an update left that did not end is no copy of any step: a recovery may have asked for that update,
        and the user's optimizer raised in it.

        Args:
            fence: The fence's number.
            engine: The engine in force, if any.
            step: Updates applied to it.
        """
        copies = [
            Copy(number=number, step=updates, stale=kept.health.stale)
            for number, (kept, updates) in list(self._kept.items())
            if kept.health.usable
        ]
        vote = None
        if engine is not None and engine.health.usable:
            behind = engine.reduced == step
            copies.append(Copy(number=engine.plan.number, step=step, behind=behind, stale=engine.health.stale))
            vote = engine.last
        return StateReport(fence=fence, copies=tuple(copies), vote=vote)

    def drop(self) -> None:
        """Drops all of them."""
        for number, (engine, _) in list(self._kept.items()):
            del self._kept[number]
            self._let_go(number, engine)

    def clear(self) -> None:
        """Forgets them, at the end of the process."""
        self._kept.clear()
