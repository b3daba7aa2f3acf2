"""What a member of a plan has alive at most while it trains."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.plan import Plan
from torch import Tensor

from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.in_memory import run_threads, unpaced
from elasticd.runtime.comm.torch_store import TorchStore
from elasticd.runtime.engine.engine import Engine, first_state
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.reference.live_bytes import LiveBytes


def most_live(recipe: Recipe, plan: Plan, device: str, others: Iterable[Tensor] = (), steps: int = 2) -> int:
    """The most bytes that one member of a plan has alive in a step, state included, while all train over gloo
    as threads: in the step that has least.

    The first step does not count: the optimizer's state is there after it. A bucket of gradients may be alive
    for longer than it is needed, until gloo's thread has let go of it: into the next step, on a machine that
    has other work.

    Args:
        recipe: of the job; all members share it.
        plan: the plan.
        device: the member.
        others: tensors that the job has besides, as those of the user's own model.
        steps: that are trained.
    """
    layouts, store = Layouts(recipe.model.spec, plan), TorchStore(torch.distributed.HashStore())  # type: ignore[attr-defined]
    ended, live = threading.Barrier(len(plan.members)), LiveBytes(others)
    most = list[int]()  # [bytes] of each step but the first

    def train(me: str) -> None:
        plan_groups = PlanGroups("live", me, "127.0.0.1", store)
        try:
            engine = Engine(recipe, layouts, plan_groups, unpaced)
            engine.adopt(first_state(recipe.model, layouts, me, recipe.seed, recipe.master))
            for step in range(steps):
                engine.step(step, lambda: 0, lambda: 0)
                if me == device:
                    if step:
                        most.append(live.most)
                    gc.collect()
                    live.begin()
            engine.settle()
        except BaseException:
            ended.abort()
            raise
        finally:
            with suppress(threading.BrokenBarrierError):
                ended.wait()  # nobody shuts what another one still reads
            plan_groups.shut()
            plan_groups.park().join()

    def worker(memory: Any) -> None:
        if memory.me != device:
            return train(memory.me)
        with live:
            return train(memory.me)

    run_threads(plan.members, worker)
    return min(most)
