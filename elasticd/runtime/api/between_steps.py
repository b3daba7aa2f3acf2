"""What members do together between two steps because the script asks for it: an evaluation, a whole state dict.

All members of the plan are at the same place of the script, so that nothing need be said; devices that stand by
take no part. It is different after a fault in the midst of an interlude: some members still wait for its end,
others have gone on to the next step, others come in by the recovery and know of nothing. So the members of a
plan that came by a recovery *meet* before each thing that they do, until all of them train: each tells what it
is about to do, the least goes first, and who is at something else takes part in it without keeping what comes
out. Hence an interlude is known by a number that every process has: see `BetweenSteps.known`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from elasticd.runtime.comm.groups import Cancelled, PeerLost
from elasticd.runtime.engine.engine import Engine
from elasticd.runtime.exits import JobOver
from elasticd.runtime.switch.switcher import Switcher

log = logging.getLogger(__name__)

#: What all members do after all between_steps.
_TRAIN = 1 << 62
#: An interlude's place among those since the last step comes before what it is.
_KINDS = 1 << 20

Run = Callable[[Engine, int], Any]


class BetweenSteps:
    """known: all that can be asked for, in an order that is the same in every process. Each is called with the
    engine and the number of updates made. closing: what `close` asks for, before all else."""

    def __init__(self, switcher: Switcher, known: Sequence[Run], closing: Run | None = None) -> None:
        self._switcher, self._known = switcher, (*known, *((closing,) if closing is not None else ()))
        if len(self._known) > _KINDS:
            raise ValueError(f"more than {_KINDS} things to do between steps")
        self._asked = 0

    def begin_step(self, engine: Engine) -> None:
        """Before a step's training: what members of a recovered plan still are at comes first. Raises PeerLost
        or Cancelled."""
        if engine.after_recovery:
            while (first := self._agree_on_next(engine, _TRAIN)) != _TRAIN:
                self._known[first % _KINDS](engine, self._switcher.step)
            engine.after_recovery = False
        self._asked = 0

    def run(self, kind: int) -> Any:
        """What comes out of the interlude `kind`, which all members ask for; None where this device stands by,
        was left out meanwhile, or the job is over. A fault in the midst of it is recovered from here."""
        self._asked += 1
        mine = self._asked * _KINDS + kind
        while (engine := self._switcher.engine) is not None:
            try:
                if not self._switcher.at_work:
                    raise Cancelled("a fault came before it began")
                while engine.after_recovery and (first := self._agree_on_next(engine, mine)) != mine:
                    self._known[first % _KINDS](engine, self._switcher.step)
                return self._known[kind](engine, self._switcher.step)
            except (PeerLost, Cancelled) as error:
                try:
                    self._switcher.bereaved(error)
                except JobOver:
                    log.warning("the others ended before what was asked for after the last step was done")
                    return None
        return None

    def close(self, engine: Engine) -> None:
        """Has all members of a recovered plan do `closing`: for one of them whose script's code raised, and who
        makes no step any more."""
        last = len(self._known) - 1  # with no place among those since the last step, it is the least
        while (first := self._agree_on_next(engine, last)) != last:
            self._known[first % _KINDS](engine, self._switcher.step)
        self._known[last](engine, self._switcher.step)

    @staticmethod
    def _agree_on_next(engine: Engine, mine: int) -> int:
        """What is to be done next by all."""
        return min(int(each) for each in engine.everyone.all_gather(torch.tensor([mine])))
