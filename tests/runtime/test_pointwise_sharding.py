"""Sharding propagation of pointwise operations: answers are torch's, which is not asked on a new mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from elasticd.runtime.live import world
from elasticd.runtime.live.pointwise_sharding import PointwiseSharding

PROPAGATOR: Any = DTensor._op_dispatcher.sharding_propagator
aten = torch.ops.aten


def mesh_of(*shape: int) -> DeviceMesh:
    """A mesh whose other ranks are not there."""
    if dist.is_initialized():
        dist.destroy_process_group()
        world.clear_caches()
    size = 1
    for each in shape:
        size *= each
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple("ab"[: len(shape)]))


@pytest.fixture(autouse=True)
def _world() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    world.clear_caches()


def answers(call: Callable[[], object]) -> list[tuple[OpSchema, OutputSharding | None, OutputSharding]]:
    """Of each operation of a call that is new to DTensor: what we answer, and what torch does."""
    pointwise, asked = PointwiseSharding(), []
    of_torch = PROPAGATOR.propagate_op_sharding_non_cached

    def both(schema: OpSchema) -> OutputSharding:
        theirs: OutputSharding = of_torch(schema)
        asked.append((schema, pointwise.answer(schema), theirs))
        return theirs

    PROPAGATOR.propagate_op_sharding_non_cached = both
    try:
        call()
    finally:
        del PROPAGATOR.propagate_op_sharding_non_cached
    return asked


PLACED = {
    "fsdp": ((4,), (Shard(0),)),
    "columns": ((4,), (Shard(1),)),
    "replicas": ((4,), (Replicate(),)),
    "hsdp": ((2, 2), (Replicate(), Shard(0))),
    "both": ((2, 2), (Shard(1), Shard(0))),
}


@pytest.mark.parametrize("placed", PLACED)
def test_answers_are_those_of_torch(placed: str) -> None:
    shape, placements = PLACED[placed]
    mesh = mesh_of(*shape)

    def sharded(*sizes: int, dtype: torch.dtype = torch.float32) -> DTensor:
        return distribute_tensor(torch.ones(*sizes, dtype=dtype), mesh, placements)

    number = distribute_tensor(torch.tensor(2.0), mesh, [Replicate()] * len(shape))
    one, two, three = (sharded(8, 4) for _ in range(3))
    lists: list[list[DTensor]] = [[sharded(8, 4), sharded(12, 4)] for _ in range(4)]
    half = sharded(8, 4, dtype=torch.bfloat16)

    def operations() -> None:
        one.mul_(0.9).lerp_(two, 0.1).addcmul_(two, three, value=0.5).addcdiv_(two, three, value=-0.1)
        (two.sqrt() / 0.3).add_(1e-8)
        one + two, one * number, number * one, one - half, half * 2.0, one > two, one == 1.0, half.float() / 3
        torch.maximum(one, two), torch.where(one > two, one, two), one.neg(), one.sign(), one.clamp(min=0.0)
        one.add_(half), one.mul_(number), one.detach(), half.detach()
        torch._foreach_mul_(lists[0], 0.9)
        torch._foreach_mul_(lists[0], number)
        torch._foreach_lerp_(lists[0], lists[1], 0.1)
        torch._foreach_addcmul_(lists[0], lists[1], lists[2], 0.5)
        torch._foreach_div_(torch._foreach_sqrt(lists[1]), [1.0, 2.0])
        torch._foreach_addcdiv_(lists[0], lists[1], lists[2], [1.0, 2.0])
        torch._foreach_maximum_(lists[0], lists[1])
        torch._foreach_add(lists[0], 1.0), torch._foreach_pow(lists[0], [1.0, 2.0])

    asked = answers(operations)
    assert any(own is not None and schema.op is aten.detach.default for schema, own, _ in asked)
    known = [str(schema.op) for schema, mine, _ in asked if mine is not None]
    assert len(known) >= 30, known
    for schema, own, theirs in asked:
        if own is not None:
            assert own == theirs, schema


def test_answers_are_those_of_torch_for_updates_under_fsdp_over_tensor_parallelism() -> None:
    mesh = mesh_of(2, 2)
    model = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 3)).double()
    parallelize_module(model, mesh["b"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["a"])
    optimizer = torch.optim.AdamW(model.parameters())

    def update() -> None:
        model(torch.ones(4, 6, dtype=torch.float64)).square().sum().backward()
        optimizer.step()

    asked = [(schema, own, theirs) for schema, own, theirs in answers(update) if own is not None]
    assert len(asked) > 20
    for schema, own, theirs in asked:
        assert own == theirs, schema


def test_torch_answers_for_sums_for_unlike_shardings_for_reductions_and_for_draws() -> None:
    mesh = mesh_of(4)

    def placed(placement: Placement) -> DTensor:
        local = torch.ones(*(4 if placement.is_shard(dim) else 16 for dim in range(2)))
        return DTensor.from_local(local, mesh, [placement], run_check=False)

    sharded, columns, total = placed(Shard(0)), placed(Shard(1)), placed(Partial())
    row = distribute_tensor(torch.ones(16), mesh, [Replicate()])

    def operations() -> None:
        sharded + placed(Replicate())
        total.sqrt(), total + total, total.relu()
        sharded.sum(), torch._foreach_norm([sharded, columns]), sharded.add(row)
        sharded.t(), sharded.view(16, 4, 4), torch.zeros_like(sharded), sharded.to(torch.float64)
        torch._foreach_add([sharded], [placed(Replicate())])
        torch.rand_like(sharded), torch.bernoulli(placed(Replicate()))

    asked = answers(operations)
    assert len(asked) >= 10
    assert not [schema for schema, own, _ in asked if own is not None]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, amsgrad=True, weight_decay=0.1, maximize=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, centered=True, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
}


def updated(optimizer: str, *shape: int) -> tuple[list[torch.Tensor], Callable[[], None]]:
    """The local parts of a small sharded model, and a function that makes an update of it."""
    mesh = mesh_of(*shape)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 3)).double()
    fully_shard(model, mesh=mesh)
    makes = OPTIMIZERS[optimizer](model.parameters())
    data = torch.randn(4, 6, dtype=torch.float64)

    def update() -> None:
        model(data).square().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        makes.step()
        makes.zero_grad()

    return [parameter.to_local().detach() for parameter in model.parameters()], update  # type: ignore[attr-defined]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_updates_have_the_values_of_torchs_own_answers(optimizer: str, shape: tuple[int, ...]) -> None:
    """Shards may be empty here, and an average of one process's fake sums is as good as any."""
    expected, update = updated(optimizer, *shape)
    for _ in range(3):
        update()
    pointwise = PointwiseSharding()
    pointwise.install()
    try:
        own, update = updated(optimizer, *shape)
        for _ in range(3):
            update()
    finally:
        pointwise.remove()
    assert pointwise.answered > 0
    for one, other in zip(own, expected, strict=True):
        assert torch.equal(one, other)


def test_a_torch_that_lacks_a_name_answers_all(monkeypatch: pytest.MonkeyPatch) -> None:
    pointwise = PointwiseSharding()
    assert pointwise.lacking() == []
    monkeypatch.delattr(PROPAGATOR, "op_single_dim_strategy_funcs")
    assert pointwise.lacking() == ["op_single_dim_strategy_funcs"]
    pointwise.install()
    assert "propagate_op_sharding_non_cached" not in vars(PROPAGATOR)
    pointwise.remove()


def test_an_update_on_a_new_mesh_asks_torch_for_nothing_pointwise() -> None:
    """Nor is the shape of a result worked out again."""
    pointwise = PointwiseSharding()
    pointwise.install()
    try:
        _, update = updated("adamw", 4)
        update()
        known = len(pointwise._metas)
        _, update = updated("adamw", 3)
        pointwise.answered = pointwise.left = 0
        update()
        assert pointwise.answered > 20
        assert len(pointwise._metas) == known
    finally:
        pointwise.remove()
    assert "propagate_op_sharding_non_cached" not in vars(PROPAGATOR)
