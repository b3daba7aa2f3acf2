"""Waits for the script's own collectives: how long they take, and what becomes of them once a peer is lost.

The last update of a step may be followed by a collective, as of the loss for a log. By then the vote has
decided the step: where that collective fails the body of the step must come to its end all the same, or the
scheduler would lack a step that the parameters have. So its result is NaN then, and nothing is raised.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch.distributed import Work


class CollectiveWaits:
    """Measures `Work.wait`, from `install` to `remove`.

    Args:
        decided: called with an error of a wait; returns whether the step's updates are all made, so that the
            result may be NaN.
    """

    def __init__(self, decided: Callable[[Exception], bool]) -> None:
        self.seconds = 0.0  # waited so far
        self._decided = decided
        self._before: Any = None

    def install(self) -> None:
        """Takes the place of torch's method."""
        self._before = before = Work.wait

        def wait(work: Any, *args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return before(work, *args, **options)
            except RuntimeError as error:
                if not self._decided(error):
                    raise
                with suppress(RuntimeError):  # of a work that has no result
                    for tensor in work.result():
                        tensor.fill_(float("nan"))
                return True
            finally:
                self.seconds += time.perf_counter() - began

        Work.wait = wait  # type: ignore[method-assign, assignment]

    def remove(self) -> None:
        """Puts torch's method back."""
        if self._before is not None:
            Work.wait, self._before = self._before, None  # type: ignore[method-assign]
