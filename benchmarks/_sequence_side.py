"""Bytes that blocks keep for the backward pass, on a TP group with sequence parallelism and in one process.

Counted are the storages that the forward pass of the blocks makes and that live on after it, whoever keeps
them: what autograd saved, the inputs of the blocks, and the output of the last one. Embedding, head and loss,
which are on all tokens, are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from _results import Row, row
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.plan import ModulePlan, Pipeline, Plan, Stage, Strategy
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from elasticd.models import Decoder, DecoderConfig, next_token_loss
from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.in_memory import MemoryPlanGroups, MemoryWorld, run_threads, unpaced
from elasticd.runtime.engine.engine import Engine, first_state
from elasticd.runtime.engine.recipe import Recipe

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.models import test_sequence_parallel
from tests.models.layouts import alone, furthest, under

CONFIG = DecoderConfig(vocabulary=64, width=128, layers=4, heads=16, kv_heads=8, hidden=344)
#: Samples of the one micro-batch, and tokens of each.
SAMPLES, TOKENS = 4, 96


class Text:
    """Samples of one length."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, CONFIG.vocabulary, (TOKENS + 1,), generator=generator)
        return {"inputs": ids[:-1], "targets": ids[1:]}


class _Made(TorchDispatchMode):
    """Notes each storage that operations give, and its bytes; not those of `parameters`."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__()
        self.paused = False
        self._parameters = [StorageWeakRef(parameter.untyped_storage()) for parameter in parameters]
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = func(*args, **(kwargs or {}))
        for tensor in tree_iter(given):
            if isinstance(tensor, Tensor) and not self.paused:
                self.note(tensor)
        return given

    def note(self, tensor: Tensor) -> None:
        """Counts a tensor's storage."""
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        if all(reference.cdata != own.cdata for own in self._parameters):
            self._made[reference.cdata] = reference, storage.nbytes()

    def alive(self) -> int:
        """Bytes of those that still live."""
        return sum(size for reference, size in self._made.values() if not reference.expired())


class _Wire:
    """The memory through which members talk: its copies are nobody's activations."""

    def __init__(self, world: MemoryWorld, made: _Made) -> None:
        self._world, self._made = world, made

    def give(self, *args: Any) -> None:
        """Hands in a copy that is not counted."""
        self._made.paused = True
        self._world.give(*args)
        self._made.paused = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)


def kept_by_member(plan: Plan) -> dict[str, int]:
    """Bytes that the blocks of each member of a plan of one stage and one micro-batch keep."""

    def worker(groups: MemoryPlanGroups) -> int:
        with torch.device("meta"):
            model = Decoder(CONFIG).describe()
        recipe = Recipe(
            model=model,
            loss=next_token_loss,
            optimizer=lambda named: torch.optim.SGD(named, lr=0.0),
            dataset=Text(),
            global_batch=SAMPLES,
            micro_batch=SAMPLES,
        )
        layouts = Layouts(model.spec, plan)
        engine = Engine(recipe, layouts, cast(PlanGroups, groups), unpaced)
        engine.adopt(first_state(model, layouts, groups.me, 0))
        made, found = _Made(parameter for _, parameter in engine.module.local.parameters.values()), list[int]()
        groups.world = cast(MemoryWorld, _Wire(groups.world, made))

        def begin(module: object, args: tuple[Tensor, ...]) -> None:
            made.__enter__()
            made.note(args[0])

        def end(*_: object) -> None:
            made.__exit__(None, None, None)
            found.append(made.alive())

        engine.module.local.modules["blocks.0"].register_forward_pre_hook(begin)
        engine.module.local.modules["head"].register_forward_pre_hook(end, prepend=True)
        engine.step(0, lambda: 0)
        return found[0]

    return run_threads(plan.members, worker)


def plan_of(shares: Sequence[int], *, sequence_parallel: bool) -> Plan:
    """One stage on a TP group with these shares."""
    devices = tuple(f"a/{i}" for i in range(len(shares)))
    stage = Stage(
        start=0,
        stop=CONFIG.layers,
        devices=devices,
        shares=tuple(shares),
        sequence_parallel=sequence_parallel,
    )
    module = ModulePlan(module="model", pipelines=(Pipeline(stages=(stage,), micro_batches=1),))
    return Plan(number=1, strategies=(Strategy(modules=(module,)),), micro_batch=SAMPLES, global_batch=SAMPLES)


def kept() -> dict[str, float]:
    """Kept bytes of the fullest member times the width of its TP group, over those of one process, by width;
    the same without sequence parallelism beside it; and the sum over the members of an uneven group."""
    (one,) = kept_by_member(plan_of((1,), sequence_parallel=False)).values()
    found: dict[str, float] = {}
    for width in (2, 4):
        for sequence_parallel in (True, False):
            members = kept_by_member(plan_of((1,) * width, sequence_parallel=sequence_parallel))
            said = "sequence parallel" if sequence_parallel else "without"
            found[f"tp {width}, {said}"] = max(members.values()) * width / one
    uneven = kept_by_member(plan_of((2, 1, 1), sequence_parallel=True))
    return found | {"tp 3 with shares 2:1:1, sequence parallel, all members": sum(uneven.values()) / one}


def parity() -> float:
    """The largest difference of a weight from one process of plain torch: GPT-2 with dropout under uneven and
    wide TP groups, pipelines, recomputation, ZeRO 1 and 2, in float64."""
    training, whole = test_sequence_parallel.gpt()
    expected, names = alone(training, whole), {name: name for name, _ in whole.named_parameters()}
    plans = test_sequence_parallel.PLANS.values()
    return max(furthest(under(training, plan), expected, names)[0] for plan in plans)


def sequence_rows() -> Iterator[Row]:
    """Parity, and kept bytes x TP over those of one process."""
    apart = parity()
    yield row("sequence parallelism: largest difference", apart, "", goal="<= 1e-10", met=apart <= 1e-10)
    for name, ratio in kept().items():
        title = f"bytes that blocks keep x TP over one process's: {name}"
        if "sequence parallel" in name:
            yield row(title, ratio, "", goal="<= 1.05", met=ratio <= 1.05)
        else:
            yield row(title, ratio, "")


if __name__ == "__main__":
    for each in sequence_rows():
        print(f"{each.name:100} {each.value:.3g} {each.goal or ''}")
