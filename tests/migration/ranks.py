"""Ranks of a migration as threads, their real AdamW state, and the reference that their result must equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from elasticd_migration.local_state import LocalState, LocalTensor, Owned, Shard, collect, own
from elasticd_migration.migrate import Corrupt, Incomplete
from elasticd_migration.transport import MemoryTransport
from elasticd_planner.layout.layouts import Item, Layouts
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.plan import Plan

from tests.migration.plans import SPEC, alone

T = TypeVar("T")

#: What the job has once, beside the optimizer.
SCALER = {"scale": 65536.0, "growth_tracker": 3}


@dataclass(kw_only=True)
class Training:
    """The part of a training that one device holds: values, what its optimizer steps on, and buffers."""

    values: dict[str, list[tuple[Box, torch.nn.Parameter]]]
    owned: list[Owned]
    optimizer: torch.optim.AdamW
    scheduler: torch.optim.lr_scheduler.StepLR
    buffers: dict[str, list[tuple[Box, torch.Tensor]]]

    def state(self) -> LocalState:
        extras = {"scheduler": self.scheduler.state_dict(), "scaler": SCALER}
        return collect(self.values, self.owned, self.optimizer, buffers=self.buffers, extras=extras)

    def step(self, number: int) -> None:
        """A step on gradients that depend on it and on the name alone."""
        for name, box, parameter in self.owned:
            if box.empty:
                continue
            generator = torch.Generator().manual_seed(1000 * number + sum(name.encode()))
            whole = torch.randn(shape_of(name), generator=generator)
            parameter.grad = whole[box.slices(Box.whole(whole.shape))].to(parameter.dtype).contiguous()
        self.optimizer.step()
        self.scheduler.step()


_ALONE = Layouts(SPEC, alone())


def shape_of(name: str) -> tuple[int, ...]:
    return _ALONE.parameter(name).shape


def adamw(named: Sequence[tuple[str, torch.nn.Parameter]]) -> torch.optim.AdamW:
    """Two groups by name, as one trains a transformer."""
    norms = [(name, p) for name, p in named if "norm" in name or "scale" in name]
    others = [(name, p) for name, p in named if "norm" not in name and "scale" not in name]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0, "lr": 0.02}]
    return torch.optim.AdamW(groups, lr=0.01)


def training(layouts: Layouts, device: str) -> Training:
    """A device's new parameters, filled with what must not stay, and an optimizer made anew."""
    held = layouts.held(device)
    dtypes = {name: getattr(torch, _ALONE.parameter(name).dtype) for name, _ in _ALONE.items}
    values = {
        name: [
            (box, torch.nn.Parameter(torch.full(box.shape, -7.0).to(dtypes[name]), requires_grad=False))
            for box in boxes
        ]
        for (name, role), boxes in held.items()
        if role == "value"
    }
    owned = own(layouts, device, values)
    buffers = {
        name: [(box, torch.full(box.shape, -7.0)) for box in boxes]
        for (name, role), boxes in held.items()
        if role == "buffer"
    }
    optimizer = adamw([(name, parameter) for name, _, parameter in owned])
    return Training(
        values=values,
        owned=owned,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5),
        buffers=buffers,
    )


def trained(steps: int = 3) -> Training:
    """The whole model after some steps of a real AdamW on random gradients."""
    whole = training(_ALONE, "n0/0")
    generator = torch.Generator().manual_seed(0)
    for parts in whole.values.values():
        for _, parameter in parts:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    for ((_, buffer),) in whole.buffers.values():
        buffer.copy_(torch.randn(buffer.shape, generator=generator))
    for number in range(steps):
        whole.step(number)
    return whole


def local(whole: Training, layouts: Layouts, device: str) -> LocalState:
    """The reference reshard: a device's state cut out of the whole model's, box by box."""
    if device not in layouts.plan.members:
        return LocalState()
    everything = whole.state()
    tensors: dict[Item, LocalTensor] = {}
    for item, boxes in layouts.held(device).items():
        (source,) = everything.tensors[item].shards
        shards = tuple(
            Shard(box=box, planes={key: source.part(key, box).clone() for key in source.planes})
            for box in boxes
        )
        scalars = {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in everything.tensors[item].scalars.items()
        }
        tensors[item] = LocalTensor(shards=shards, scalars=scalars)
    return LocalState(tensors=tensors, groups=everything.groups, extras=everything.extras)


def members(old: Plan, new: Plan) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*old.members, *new.members)))


def together(
    transports: Sequence[MemoryTransport], work: Callable[[MemoryTransport], T]
) -> list[T | Exception]:
    """Run `work` as every rank at once; what each returned or raised, by rank."""

    def attempt(transport: MemoryTransport) -> T | Exception:
        try:
            return work(transport)
        except Exception as error:
            if not isinstance(error, Corrupt | Incomplete):  # those leave nobody waiting
                transport.close(f"{transport.members[transport.rank]} failed: {error}")
            return error

    with ThreadPoolExecutor(len(transports)) as pool:
        return list(pool.map(attempt, transports))


def assert_same_bits(found: LocalState, expected: LocalState) -> None:
    """Every plane and scalar equal bit by bit, with the same dtypes and boxes."""
    assert set(found.tensors) == set(expected.tensors)
    for item, tensor in expected.tensors.items():
        other = found.tensors[item]
        assert [s.box for s in other.shards] == [s.box for s in tensor.shards], item
        for mine, theirs in zip(other.shards, tensor.shards, strict=True):
            assert set(mine.planes) == set(theirs.planes), item
            for key, plane in theirs.planes.items():
                assert same_bits(mine.planes[key], plane), (item, key, theirs.box)
        assert set(other.scalars) == set(tensor.scalars), item
        for key in tensor.scalars:
            a, b = other.scalars[key], tensor.scalars[key]
            assert isinstance(a, torch.Tensor), (item, key)
            assert isinstance(b, torch.Tensor), (item, key)
            assert same_bits(a, b), (item, key)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    raw = (tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b))
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*raw)


def mapped(state: LocalState, change: Callable[[torch.Tensor], torch.Tensor]) -> LocalState:
    """The same state with every plane changed."""
    tensors: dict[Item, LocalTensor] = {}
    for item, tensor in state.tensors.items():
        shards = tuple(
            Shard(box=shard.box, planes={key: change(plane) for key, plane in shard.planes.items()})
            for shard in tensor.shards
        )
        scalars = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in tensor.scalars.items()}
        tensors[item] = LocalTensor(shards=shards, scalars=scalars)
    return LocalState(tensors=tensors, groups=state.groups, extras=state.extras)


def copy_of(state: LocalState) -> LocalState:
    """The same state in memory of its own, to compare with later."""
    return mapped(state, torch.Tensor.clone)
