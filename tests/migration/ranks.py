"""Ranks of a migration as threads, their real AdamW state, and the reference that their result must equal."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from elasticd_migration.execute import Corrupt, Incomplete
from elasticd_migration.state import LocalState, collect
from elasticd_migration.transport import MemoryTransport
from elasticd_planner.boxes import Box
from elasticd_planner.layouts import Layouts
from elasticd_planner.plan import Plan

T = TypeVar("T")
Parameters = dict[str, tuple[Box, torch.nn.Parameter]]


def full_model(layouts: Layouts, *, seed: int = 0) -> Parameters:
    """Every parameter of the model as a whole, random."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (
            Box.whole(layouts.parameter(name).shape),
            torch.nn.Parameter(
                torch.randn(layouts.parameter(name).shape, generator=generator).to(
                    getattr(torch, layouts.parameter(name).dtype)
                )
            ),
        )
        for name in layouts.names
    }


def trained(layouts: Layouts, steps: int = 3) -> tuple[Parameters, torch.optim.AdamW]:
    """The whole model after some steps of a real AdamW on random gradients."""
    parameters = full_model(layouts)
    optimizer = adamw(parameters)
    for step in range(steps):
        give_gradients(layouts, parameters, step)
        optimizer.step()
    return parameters, optimizer


def adamw(parameters: Parameters) -> torch.optim.AdamW:
    return torch.optim.AdamW([parameter for _, parameter in parameters.values()], lr=0.01)


def give_gradients(layouts: Layouts, parameters: Parameters, step: int) -> None:
    """To each parameter its box of a gradient that depends on the step and the name alone."""
    for name, (box, parameter) in parameters.items():
        generator = torch.Generator().manual_seed(1000 * step + sum(name.encode()))
        whole = torch.randn(layouts.parameter(name).shape, generator=generator)
        parameter.grad = whole[box.slices(Box.whole(whole.shape))].to(parameter.dtype).contiguous()


def empty_model(layouts: Layouts, device: str) -> tuple[Parameters, torch.optim.AdamW]:
    """A device's new local parameters, filled with what must not stay, and an optimizer without state."""
    parameters = {
        name: (
            box,
            torch.nn.Parameter(
                torch.full(box.shape, -7.0, dtype=getattr(torch, layouts.parameter(name).dtype))
            ),
        )
        for name, box in layouts.of(device).items()
    }
    # A leaver has no parameters, which torch's optimizers refuse.
    held = parameters or {"none": (Box(start=(), stop=()), torch.nn.Parameter(torch.zeros(())))}
    return parameters, adamw(held)


def local(whole: Parameters, optimizer: torch.optim.Optimizer, layouts: Layouts, device: str) -> LocalState:
    """The reference reshard: a device's state cut out of the whole model's, one by one."""
    parameters, mine = empty_model(layouts, device)
    for name, (box, parameter) in parameters.items():
        everything, source = whole[name]
        where = box.slices(everything)
        parameter.data = source.detach()[where].clone()
        for key, value in optimizer.state.get(source, {}).items():
            mine.state[parameter][key] = value[where].clone() if value.dim() else value.clone()
    return collect(parameters, mine)


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
    for name, tensor in expected.tensors.items():
        other = found.tensors[name]
        assert (other.box, set(other.planes), set(other.scalars)) == (
            tensor.box,
            set(tensor.planes),
            set(tensor.scalars),
        ), name
        for key in tensor.planes:
            assert same_bits(other.planes[key], tensor.planes[key]), (name, key)
        for key in tensor.scalars:
            a, b = other.scalars[key], tensor.scalars[key]
            assert isinstance(a, torch.Tensor), (name, key)
            assert isinstance(b, torch.Tensor), (name, key)
            assert same_bits(a, b), (name, key)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    raw = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b))
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*raw)


def copy_of(state: LocalState) -> LocalState:
    """The same state in memory of its own, to compare with later."""
    return LocalState(
        tensors={
            name: type(tensor)(
                box=tensor.box,
                planes={key: plane.clone() for key, plane in tensor.planes.items()},
                scalars={
                    key: value.clone() if isinstance(value, torch.Tensor) else value
                    for key, value in tensor.scalars.items()
                },
            )
            for name, tensor in state.tensors.items()
        }
    )
