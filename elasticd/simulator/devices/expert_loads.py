"""Loads of experts that drift, and the time that devices take for them.

The chances of a block's experts are Zipf's in an order of their own; their logarithms walk at random about
these. They are functions of (seed, step). A device's experts take the part of a block's computation that they
have by shapes, times the part of the rows that goes to them under the plan. Devices wait for a block's busiest
one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
from elasticd_planner.numeric import Floats
from elasticd_planner.spec.expert_load import ExpertLoad, blocks_of, fractions_in
from elasticd_planner.spec.measurement import Measurement
from elasticd_planner.spec.plan import Plan

from elasticd.simulator.devices.plan_arrays import Compiled

#: Steps between two reports of the rows of each expert, as of a worker.
REPORTED = 10
#: The part of its way back that a logarithm goes in a step.
RETURNS = 0.02
#: Of so many steps the walk of one is kept; those between are walked anew where a job goes back to them.
KEPT = 64


class ExpertLoads:
    """The rows of the experts of a model with some in all of its blocks, step by step."""

    def __init__(self, even: ExpertLoad, *, zipf: float, drift: float, seed: int) -> None:
        """
        Args:
            even: rows of a step in which all experts are alike, and what experts cost.
            zipf: the chance of the n-th expert falls as n to the power of -zipf.
            drift: how much the logarithm of each changes from step to step.
            seed: of the walk.
        """
        self._drift, self._even, self._seed = drift, even, seed
        self.part = even.part  #: the computation of a block's experts over that of the block
        count = len(next(iter(even.rows.values())))
        random = np.random.Generator(np.random.Philox(key=[seed, 1 << 40]))
        chances = -zipf * np.log(np.arange(1, count + 1))
        first = np.stack([chances[random.permutation(count)] for _ in even.rows])
        self._kept, self._last = [first], (0, first)

    def load(self, step: int) -> ExpertLoad:
        """The rows of the experts of each block in a step, in the mean over what samples there may be."""
        chances = np.exp(self._logs(step))
        chances /= chances.sum(1, keepdims=True)
        rows = {
            block: tuple((sum(own) * part).tolist())
            for (block, own), part in zip(self._even.rows.items(), chances, strict=True)
        }
        return msgspec.structs.replace(self._even, rows=rows)

    def _logs(self, step: int) -> Floats:
        """The logarithms of the chances in a step [blocks, experts]: walked from the nearest known one."""
        kept = min(step // KEPT, len(self._kept) - 1)
        at, logs = self._last if kept * KEPT <= self._last[0] <= step else (kept * KEPT, self._kept[kept])
        while at < step:
            at += 1
            random = np.random.Generator(np.random.Philox(key=[self._seed, (1 << 42) + at]))
            walk = random.normal(0.0, self._drift, logs.shape) if self._drift else 0.0
            logs = logs + walk - RETURNS * (logs - self._kept[0])
            if at == KEPT * len(self._kept):
                self._kept.append(logs)
        self._last = at, logs
        return logs

    def work(self, plan: Plan, shape: Compiled, unit: Floats, load: ExpertLoad) -> tuple[Floats, Floats]:
        """The experts' work of a plan of one module under a load.

        Args:
            plan: of one module.
            shape: the same as arrays.
            unit: how slow each device of the cluster is.
            load: of a step.

        Returns:
            Of each member its rows over those by its share, in the mean over its blocks; and of each stage the
            sum over its blocks of what the busiest device takes, in units of a block's experts on one normal
            device.
        """
        slow = unit[shape.devices]
        work, busiest = np.ones(len(slow)), np.zeros(len(shape.stage_start))
        for number, (_, _, lane) in enumerate(plan.walk()):
            start = int(shape.stage_start[number])
            own = slice(start, start + len(lane.devices))
            fractions = np.array(fractions_in(lane, load))
            work[own] = fractions.mean(0) / shape.fraction[own]
            busiest[number] = (fractions * slow[own]).max(1).sum()
        return work, busiest

    def reported(self, plan: Plan, step: int, measurements: Sequence[Measurement]) -> list[Measurement]:
        """The measurements of a step, with the rows of experts where it is one of those that workers report.

        Args:
            plan: of the module with the experts.
            step: its number.
            measurements: of all members of the job.
        """
        if step % REPORTED:
            return list(measurements)
        load = self.load(step)
        rng = np.random.Generator(np.random.Philox(key=[self._seed, (1 << 41) + step]))
        heads = {lane.devices[0]: blocks_of(lane) for _, _, lane in plan.walk()}
        tokens: Counter[int] = Counter()
        for each in measurements:
            tokens.update(dict.fromkeys(heads.get(each.device, ()), each.tokens))
        found = []
        for each in measurements:
            if each.device in heads:
                rows = {}
                for block in heads[each.device]:
                    total = round(sum(load.rows[block]) * each.tokens / max(1, tokens[block]))
                    drawn = rng.multinomial(total, np.array(load.weights(block)))
                    rows[block] = tuple(map(int, drawn.tolist()))
                each = msgspec.structs.replace(each, expert_rows=rows)
            found.append(each)
        return found
