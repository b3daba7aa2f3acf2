"""Python's garbage collector in a process that trains: no full collection falls into a step.

A full collection looks at every container object, which takes 0.2 s in a process that has imported torch. It
comes once there are enough new ones, on each rank at another step, and all other ranks wait for it. So the
objects of a plan are put aside after its second step (`gc.freeze`), automatic collections leave the oldest
generation out, and all ranks collect it at the same steps, see `EVERY`.

Collections leave out what is put aside. A new plan takes it back, so that the objects of the plan before are
found.
"""

from __future__ import annotations

import gc

#: Steps of the job between two full collections.
EVERY = 1_000
#: The step of a plan after which its objects are there.
_SETTLED = 2
#: A threshold of the oldest generation that is never reached.
_NEVER = 1 << 30


class GarbageCollector:
    """Python's, as a training loop uses it. A script that has switched it off collects by itself: it is left
    alone then."""

    def __init__(self) -> None:
        self._plan: int | None = None
        self._steps = 0  # of the plan
        self._again = False  # a plan was in force before this one
        self._threshold: int | None = None  # of the oldest generation, as the script has it; None: as it is

    def stepped(self, plan: int, step: int) -> None:
        """A step of a plan ended, by its index: the same ones on all ranks."""
        if plan != self._plan:
            self._again = self._plan is not None
            self.release()
            self._plan, self._steps = plan, 0
        self._steps += 1
        if not gc.isenabled():
            return
        if self._steps == _SETTLED:
            if self._again:
                gc.collect()  # modules of the plan before, which refer to each other
            youngest, middle, self._threshold = gc.get_threshold()
            gc.set_threshold(youngest, middle, _NEVER)
            gc.freeze()
        elif self._steps > _SETTLED and step % EVERY == 0:
            gc.collect()

    def release(self) -> None:
        """The collector is as the script left it: the job is over, or a plan is."""
        if self._threshold is not None:
            youngest, middle, _ = gc.get_threshold()
            gc.set_threshold(youngest, middle, self._threshold)
            self._threshold = None
            gc.unfreeze()
