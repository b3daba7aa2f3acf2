"""One process without agent and launcher, beside a loop of plain torch: the same model, samples and losses.

Both sides live in one process and make steps in turns. What is compared is processor time, of all threads: on a
machine that others use, seconds by the clock are theirs as well. The process keeps the memory that it frees
(`_movers.WARM`): else what one side frees decides how many pages the other one touches anew.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import torch
from _movers import environment
from _pairs import ratio, ratio_rows
from _results import Row, row
from _trained import CONFIG, SEED, TOKENS, Text, adamw, described, filled
from elasticd_planner.spec.batch import Sampler

import elasticd
from elasticd.models import next_token_loss
from elasticd.runtime.data.collate import pad

#: Samples of a step, in one micro-batch and in four.
BATCH, MICRO_BATCHES = 8, (1, 4)
PAIRS, WARM, MOST = 60, 5, 1.03
#: The largest relative difference of two losses that sums in another order explain, in float32.
CLOSE = 1e-4
#: What a launcher sets.
_LAUNCHED = ("TORCHELASTIC_RUN_ID", "WORLD_SIZE")


def rows(smallest: bool) -> Iterator[Row]:
    """The ratio of a step's processor time for each number of micro-batches."""
    for count in MICRO_BATCHES:
        yield from _compared(count, 6 if smallest else PAIRS)


def _compared(micro_batches: int, pairs: int) -> Iterator[Row]:
    command = [sys.executable, __file__, str(micro_batches), str(pairs)]
    alone = {name: value for name, value in environment().items() if name not in _LAUNCHED}
    alone["ELASTICD_DEVICE"] = "cpu"
    done = subprocess.run(command, env=alone, check=True, stdout=subprocess.PIPE)
    ours, theirs, apart = json.loads(done.stdout)
    name = f"one process over plain torch: step, 4 blocks of width 256, {micro_batches} micro-batches of "
    name += f"{BATCH // micro_batches} x {TOKENS} tokens"
    yield from ratio_rows(name, ratio(ours, theirs), MOST)
    title = f"{name}: largest relative difference of a loss"
    yield row(title, apart, "", goal=f"<= {CLOSE:g}", met=apart <= CLOSE)


def main(micro_batches: int, pairs: int) -> tuple[list[float], list[float], float]:
    """Processor seconds of our steps and of plain torch's, in turns, and how far their losses are apart."""
    torch.set_num_threads(1)
    ours, theirs = _ours(micro_batches, WARM + pairs), _theirs(micro_batches)
    spent: dict[Callable[[int], float], list[float]] = {ours: [], theirs: []}
    apart = 0.0
    for step in range(WARM + pairs):
        losses = []
        for side in (ours, theirs) if step % 2 else (theirs, ours):
            begin = time.process_time()
            losses.append(side(step))
            spent[side].append(time.process_time() - begin)
        apart = max(apart, abs(losses[0] / losses[1] - 1))
    return spent[ours][WARM:], spent[theirs][WARM:], apart


def _ours(micro_batches: int, steps: int) -> Callable[[int], float]:
    job = elasticd.Job(
        model=described(CONFIG),
        loss=next_token_loss,
        optimizer=adamw,
        dataset=Text.of(CONFIG.vocabulary, TOKENS),
        global_batch=BATCH,
        micro_batch=BATCH // micro_batches,
        seed=SEED,
    )
    running = iter(job.steps(steps))
    return lambda step: next(running).loss


def _theirs(micro_batches: int) -> Callable[[int], float]:
    model, data = filled(CONFIG), Text.of(CONFIG.vocabulary, TOKENS)
    optimizer = adamw(model.named_parameters())
    sampler, size = Sampler(size=len(data), global_batch=BATCH, seed=SEED), BATCH // micro_batches

    def step(number: int) -> float:
        ids, total = sampler.samples(number), 0.0
        optimizer.zero_grad()
        for first in range(0, BATCH, size):
            batch = pad([data[index] for index in ids[first : first + size]])
            loss, _ = next_token_loss(model(batch), batch)
            loss = loss / (BATCH * TOKENS)
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        optimizer.step()
        return total

    return step


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]))))
