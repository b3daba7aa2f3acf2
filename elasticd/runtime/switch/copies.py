"""The copies of state that a rank holds beside the plan in force: of plans before it, and verified ones of
plans that it does not know to be in force. Each may be what a recovery goes on from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from elasticd.runtime.engine.engine import Engine
from elasticd.wire.messages import Copy, Standing


@dataclass(frozen=True, kw_only=True)
class Kept:
    """An engine and the updates that its state has seen."""

    engine: Engine
    step: int


class Copies:
    """By plan number. `let_go` is called with each engine that is dropped."""

    def __init__(self, let_go: Callable[[int, Engine], None]) -> None:
        self._let_go = let_go
        self._kept: dict[int, Kept] = {}

    def __bool__(self) -> bool:
        return bool(self._kept)

    def keep(self, number: int, engine: Engine, step: int) -> None:
        self._kept[number] = Kept(engine=engine, step=step)

    def get(self, number: int, engine: Engine | None, step: int) -> tuple[Engine | None, int]:
        """The copy of that plan: `engine`, which is in force after `step` updates, or one that is kept;
        None and -1 where there is none."""
        if engine is not None and engine.plan.number == number:
            return engine, step
        kept = self._kept.get(number)
        return (kept.engine, kept.step) if kept is not None else (None, -1)

    def standing(self, fence: int, engine: Engine | None, step: int) -> Standing:
        """What is held here, for the leader; nothing must be under way. What an update left that did not end is
        of no step: a recovery may have asked for it, in which the user's optimizer raised."""
        copies = [
            Copy(number=number, step=kept.step, stale=kept.engine.stale)
            for number, kept in list(self._kept.items())
            if not (kept.engine.spent or kept.engine.torn)
        ]
        vote = None
        if engine is not None and not (engine.spent or engine.torn):
            behind = engine.reduced == step
            copies.append(Copy(number=engine.plan.number, step=step, behind=behind, stale=engine.stale))
            vote = engine.last
        return Standing(fence=fence, copies=tuple(copies), vote=vote)

    def drop(self) -> None:
        """All of them go."""
        for number, kept in list(self._kept.items()):
            del self._kept[number]
            self._let_go(number, kept.engine)

    def clear(self) -> None:
        """Forgets them, at the end of the process."""
        self._kept.clear()
