"""The job without any fault, in one process of plain torch: what each step trains on, and its loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from elasticd_planner.batch import Sampler
from elasticd_planner.boxes import Box

from elasticd.chaos.ledger import Line
from elasticd.models import Decoder, next_token_loss
from elasticd.runtime.data import pad
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
        model, text, step = Decoder(train.CONFIG), train.Text(), 0
        first = model.describe().first_value
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(first(name, Box.whole(parameter.shape), train.SEED))
        update = train.optimizer(model.named_parameters())
        rates = train.scheduler(update)
        while True:
            batch = pad([text[index] for index in self.sampler.samples(step)])
            total, count = next_token_loss(model(batch), batch)
            update.zero_grad()
            (total / count).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), train.CLIP)
            update.step()
            rates.step()
            yield Line(step=step, loss=float(total.detach()) / count, samples=self.samples(step))
            step += 1


#: One for all parts: their jobs are alike.
UNDISTURBED = Undisturbed()
