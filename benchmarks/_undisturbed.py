"""The job without any fault, in one process of plain torch: what each step trains on, and its loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from elasticd_planner.spec.batch import Sampler

from tests.integration import train
from tests.soak.ledger import Line


class Undisturbed:
    """Trains as far as it is asked for, and remembers."""

    def __init__(self) -> None:
        self.sampler = Sampler(size=len(train.Text()), global_batch=train.BATCH, seed=train.SEED)
        self._lines: list[Line] = []
        self._plain: train.Plain | None = None

    def lines(self, steps: int) -> Sequence[Line]:
        """The first steps, by index."""
        if self._plain is None:
            torch.set_num_threads(1)
            self._plain = train.Plain()
        for step in range(len(self._lines), steps):
            samples = self.samples(step)
            self._lines.append(Line(step=step, loss=self._plain.step(samples), samples=samples))
        return self._lines[:steps]

    def samples(self, step: int) -> tuple[int, ...]:
        return tuple(self.sampler.samples(step))


#: One for all parts: their jobs are alike.
UNDISTURBED = Undisturbed()
