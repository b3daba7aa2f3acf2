"""The bytes of live tensors of one thread, and what a member of a plan has alive at most while it trains.

A storage counts from the operation that makes it until it is freed, once, whatever views there are of it.
Memory that a kernel needs inside one operation does not count.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.plan import Plan
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.in_memory import run_threads, unpaced
from elasticd.runtime.comm.torch_store import TorchStore
from elasticd.runtime.engine.engine import Engine, first_state
from elasticd.runtime.engine.recipe import Recipe


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations of this thread make while it is entered."""

    now: int  #: [bytes] alive
    most: int  #: [bytes] alive at once at most

    def __init__(self, others: Iterable[Tensor] = ()) -> None:
        """
        Args:
            others: tensors that were there before, whose storages do not count.
        """
        super().__init__()
        self.now = self.most = 0
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in others}
        self._freed = deque[int]()  # sizes; other threads free storages, too, and this one alone changes `now`

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._sizes:
            return
        self._sizes[storage._cdata] = size = storage.nbytes()
        weakref.finalize(storage, self._free, storage._cdata)
        while self._freed:
            self.now -= self._freed.popleft()
        self.now += size
        self.most = max(self.most, self.now)

    def _free(self, address: int) -> None:
        self._freed.append(self._sizes.pop(address))

    def begin(self) -> None:
        """The most from now on."""
        while self._freed:
            self.now -= self._freed.popleft()
        self.most = self.now


def most_live(recipe: Recipe, plan: Plan, device: str, others: Iterable[Tensor] = (), steps: int = 2) -> int:
    """The most bytes that one member of a plan has alive, state included, while all train over gloo as threads.

    The first step does not count: the optimizer's state is there after it. A bucket of gradients may be alive
    for longer than it is needed, until gloo's thread has let go of it.

    Args:
        recipe: of the job; all members share it.
        plan: the plan.
        device: the member.
        others: tensors that the job has besides, as those of the user's own model.
        steps: that are trained.
    """
    layouts, store = Layouts(recipe.model.spec, plan), TorchStore(torch.distributed.HashStore())  # type: ignore[attr-defined]
    ended, live = threading.Barrier(len(plan.members)), LiveBytes(others)

    def train(me: str) -> None:
        plan_groups = PlanGroups("live", me, "127.0.0.1", store)
        try:
            engine = Engine(recipe, layouts, plan_groups, unpaced)
            engine.adopt(first_state(recipe.model, layouts, me, recipe.seed, recipe.master))
            for step in range(steps):
                engine.step(step, lambda: 0, lambda: 0)
                if step == 0 and me == device:
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
    return live.most
