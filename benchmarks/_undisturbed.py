"""The job without any fault, in one process of plain torch: what each step trains on, and its loss."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from elasticd_planner.batch import Sampler

from elasticd.chaos.ledger import Line
from tests.integration import train


class Undisturbed:
    """Trains as far as it is asked for, and remembers."""

    def __init__(self) -> None:
        self.sampler = Sampler(size=len(train.Text()), global_batch=train.BATCH, seed=train.SEED)
        self._lines: list[Line] = []
        self._training = self._train()

    def lines(self, steps: int) -> Sequence[Line]:
        """The first steps, by index."""
        while len(self._lines) < steps:
            self._lines.append(next(self._training))
        return self._lines[:steps]

    def samples(self, step: int) -> tuple[int, ...]:
        return tuple(self.sampler.samples(step))

    def _train(self) -> Iterator[Line]:
        torch.set_num_threads(1)
        batches = map(self.sampler.samples, itertools.count())
        for step, (_, loss) in enumerate(train.plain(batches)):
            yield Line(step=step, loss=loss, samples=self.samples(step))


#: One for all parts: their jobs are alike.
UNDISTURBED = Undisturbed()
