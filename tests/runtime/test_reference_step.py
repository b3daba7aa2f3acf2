"""A step of the user's own modules beside one of the copies that train: what differs is named, and why."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from elasticd.runtime.data.options import DataOptions
from elasticd.runtime.data.packing import Packing
from elasticd.runtime.engine.parallelism import ParallelismOptions
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.model.model import Model, ModelError
from elasticd.runtime.model.tp_rules import Column, Rule
from elasticd.runtime.model.validation import sum_and_count
from elasticd.runtime.reference.comparison import NotCompared, refuse_differences

WIDTH, VOCABULARY = 8, 11


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.drop = nn.Embedding(VOCABULARY, WIDTH), nn.Dropout(0.1)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x: Tensor = self.drop(self.tokens(batch["inputs"]))
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.tanh(self.up(x)))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Any) -> Any:
        return self.out(x)


class Text:
    lengths = (7,) * 32

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, VOCABULARY, (8,), generator=torch.Generator().manual_seed(index))
        return {"inputs": ids[:-1], "targets": ids[1:]}


class Parts:
    """The modules of a script, and its loss."""

    def __init__(self, block: Callable[[], nn.Module] = Block, *, meta: bool = False) -> None:
        torch.manual_seed(0)
        with torch.device("meta" if meta else "cpu"):
            self.embed, self.blocks, self.head = Embed(), nn.ModuleList(block() for _ in range(2)), Head()
        for each in (self.embed, self.blocks, self.head):
            each.double()

    def parameters(self) -> list[nn.Parameter]:
        return [p for each in (self.embed, self.blocks, self.head) for p in each.parameters()]

    def recipe(self, *, loss: Any = None, rules: dict[str, Rule] | None = None, **options: Any) -> Recipe:
        return Recipe(
            model=Model(embed=self.embed, blocks=self.blocks, head=self.head, rules=rules),
            loss=loss or summed,
            optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
            dataset=Text(),
            global_batch=4,
            **options,
        )


def summed(output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, float]:
    targets = batch["targets"]
    return F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


class Dropping(Block):
    """Drops by a module, and by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.drop(super().forward(x)), 0.2)


class Named(Block):
    """Gives named tensors, one of which it changes in place."""

    def forward(self, x: Any) -> Any:
        bundle = (
            {"hidden": x, "positions": torch.arange(7), "passed": torch.zeros(1)}
            if isinstance(x, Tensor)
            else x
        )
        bundle["passed"] += 1
        return {**bundle, "hidden": super().forward(bundle["hidden"])}


class NamedHead(Head):
    def forward(self, x: Any) -> Any:
        return super().forward(x["hidden"])


class Attending(nn.Module):
    """q, k and v are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.attention(x, x, x, need_weights=False)[0]
        return out


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.out = nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.out(self.rnn(x)[0])
        return out


class Normed(Block):
    """Weights that a hook computes before each pass, as torch did before parametrisations."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.utils.weight_norm(self.up)
        prune.random_unstructured(self.down, "weight", 0.3)


@pytest.mark.parametrize("block", [Block, Dropping, Attending, Recurrent, Normed])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_ordinary_modules_agree(block: Callable[[], nn.Module]) -> None:
    refuse_differences(Parts(block).recipe(), 3)


def test_named_tensors_agree_though_a_block_changes_one_in_place() -> None:
    parts = Parts(Named)
    parts.head = NamedHead().double()
    refuse_differences(parts.recipe(), 3)


@pytest.mark.parametrize(
    "options",
    [
        {"parallelism": ParallelismOptions(precision="bf16")},
        {"parallelism": ParallelismOptions(precision="fp16")},
        {"parallelism": ParallelismOptions(zero=2, recompute=True)},
        {"clip": 1e-3},
        {"data": DataOptions(packing=Packing())},
        {"data": DataOptions(global_tokens=21, packing=Packing())},
        {"rules": {"blocks.*.attention.in_proj_*": Column("heads")}},
    ],
    ids=["bf16", "fp16", "ZeRO", "clip", "packed", "by tokens", "fused"],
)
def test_whatever_a_job_asks_for_they_agree(options: dict[str, Any]) -> None:
    parts = Parts(Attending if "rules" in options else Dropping)
    assert len(refuse_differences(parts.recipe(**options), 2).gradients) == len(parts.parameters())


@pytest.mark.parametrize("meta", [False, True], ids=["values", "meta"])
def test_shared_parameters_and_modules_agree(meta: bool) -> None:
    parts = Parts(Dropping, meta=meta)
    parts.head.out.weight = parts.embed.tokens.weight
    parts.blocks = nn.ModuleList([parts.blocks[0], parts.blocks[0], parts.blocks[1]])
    refuse_differences(parts.recipe(), 3)


def test_frozen_and_unused_parameters_have_no_gradient_in_either() -> None:
    parts = Parts()
    parts.blocks[0].up.requires_grad_(False)
    parts.head.unused = nn.Parameter(torch.zeros(3))
    names = refuse_differences(parts.recipe(), 2).gradients.keys()
    assert "blocks.1.up.weight" in names
    assert not names & {"blocks.0.up.weight", "blocks.0.up.bias", "head.unused"}


def test_the_modules_are_as_they_were_afterwards() -> None:
    class Counting(Dropping):
        seen: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.register_buffer("table", torch.ones(2), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            self.calls, self.last = self.calls + 1, x
            return super().forward(x)

    parts = Parts(Counting)
    modules = [module for each in (parts.embed, parts.blocks, parts.head) for module in each.modules()]
    parts.embed.tokens.weight.grad = torch.ones(VOCABULARY, WIDTH, dtype=torch.float64)
    values, attributes = (
        [p.detach().clone() for p in parts.parameters()],
        [dict(vars(each)) for each in modules],
    )
    tables = [dict(module._modules) | dict(module._buffers) for module in modules]
    drawn = torch.random.get_rng_state()
    refuse_differences(parts.recipe(), 3)
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert [dict(vars(each)) for each in modules] == attributes
    assert [dict(module._modules) | dict(module._buffers) for module in modules] == tables
    assert all(map(torch.equal, values, parts.parameters()))
    assert torch.equal(parts.embed.tokens.weight.grad, torch.ones(VOCABULARY, WIDTH))
    assert sum(p.grad is not None for p in parts.parameters()) == 1


class Adapted(Block):
    """A low-rank adapter by a hook that closes over the module."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)
        self.register_forward_hook(lambda module, args, out: out + self.b(self.a(args[0])))


class Patched(Block):
    def __init__(self) -> None:
        super().__init__()
        inner = self.down.forward
        self.down.forward = lambda x: inner(x) * 1.0  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("block", "named"), [(Adapted, "blocks.0.a.weight"), (Patched, "blocks.0.down.weight")]
)
def test_a_function_that_closes_over_a_module_is_named_by_what_it_reaches(
    block: Callable[[], nn.Module], named: str
) -> None:
    with pytest.raises(ModelError, match=f"^{named}.*closes over your module"):
        refuse_differences(Parts(block).recipe(), 2)


def test_a_sum_that_is_no_tensor_is_refused_with_its_remedy() -> None:
    with pytest.raises(ModelError, match=r"returned \(float, int\): leave out \.item\(\) or float\(\)"):
        sum_and_count((1.5, 3))


@pytest.mark.parametrize("samples", [1, 3])
def test_a_mean_beside_a_count_is_named(samples: int) -> None:
    def mean(output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        targets = batch["targets"]
        return F.cross_entropy(output.flatten(0, 1), targets.flatten()), targets.numel()

    with pytest.raises(ModelError, match=r"returns a mean and its count.*reduction='sum'"):
        refuse_differences(Parts().recipe(loss=mean), samples)
    # The mean over micro-batches of equal weight is a loss of its own.
    refuse_differences(Parts().recipe(loss=lambda output, batch: (mean(output, batch)[0], 1)), samples)


def test_a_loss_that_reads_parameters_is_named() -> None:
    parts = Parts()

    def penalised(output: Tensor, batch: Any) -> tuple[Tensor, float]:
        total, count = summed(output, batch)
        return total + count * 0.1 * sum(p.square().sum() for p in parts.parameters()), count

    with pytest.raises(ModelError, match=r"^embed.tokens.weight, .* and 8 more of your own modules"):
        refuse_differences(parts.recipe(loss=penalised), 2)


class Routing(Block):
    """Keeps its balance for the loss, as routers do."""

    def __init__(self) -> None:
        super().__init__()
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.balance = self.up(x).square().mean()
        return super().forward(x)


def test_a_loss_that_reads_what_forward_keeps_is_named() -> None:
    parts = Parts(Routing)

    def balanced(output: Tensor, batch: Any) -> tuple[Tensor, float]:
        total, count = summed(output, batch)
        return total + count * sum(block.balance for block in parts.blocks), count

    with pytest.raises(ModelError, match=r"the loss is .*forward sets blocks.0.balance, blocks.1.balance"):
        refuse_differences(parts.recipe(loss=balanced), 2)
    refuse_differences(Parts(Routing).recipe(), 2)  # whoever keeps it for himself alone may


def test_a_loss_that_fails_without_what_forward_keeps_is_named() -> None:
    class Late(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.balance = self.up(x).square().mean()
            return super().forward(x)

    parts = Parts(Late)

    def balanced(output: Tensor, batch: Any) -> tuple[Tensor, float]:
        total, count = summed(output, batch)
        return total + count * sum(block.balance for block in parts.blocks), count

    with pytest.raises(
        ModelError, match=r"fail in the loss with AttributeError.*forward sets blocks.0.balance"
    ):
        refuse_differences(parts.recipe(loss=balanced), 2)


def test_a_step_that_memory_does_not_hold_is_not_compared() -> None:
    calls = list[int]()

    def large(output: Tensor, batch: Any) -> tuple[Tensor, float]:
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("for this one")
        return summed(output, batch)

    with pytest.raises(NotCompared, match="OutOfMemoryError: for this one"):
        refuse_differences(Parts().recipe(loss=large), 2)


def test_an_optimizer_that_fails_is_no_difference() -> None:
    class Bad(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise ValueError("bad update")

    recipe = replace(Parts().recipe(), optimizer=lambda named: Bad([p for _, p in named], lr=0.1))
    with pytest.raises(NotCompared, match="ValueError: bad update"):
        refuse_differences(recipe, 2)


def test_what_reads_a_counter_of_the_script_differs() -> None:
    calls = list[int]()

    class Scheduled(Block):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(1)
            return super().forward(x) * len(calls)

    with pytest.raises(ModelError, match=r"the output of blocks.0 by .*a counter"):
        refuse_differences(Parts(Scheduled).recipe(), 2)


def test_a_backward_hook_of_a_module_is_not_refused_and_a_module_that_fails_alone_is_not_compared() -> None:
    parts = Parts()
    parts.blocks[0].register_full_backward_hook(lambda module, given, out: (given[0] * 2,))
    refuse_differences(parts.recipe(), 2)

    class Fails(Block):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("wants a row")

    with pytest.raises(NotCompared, match=r"ValueError: wants a row"):
        refuse_differences(Parts(Fails).recipe(), 2)


def test_a_backward_pass_that_draws_is_not_compared() -> None:
    class Noise(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * torch.rand_like(gradient)

    class Noisy(Block):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = Noise.apply(super().forward(x))
            return out

    with pytest.raises(NotCompared, match="its backward pass draws"):
        refuse_differences(Parts(Noisy).recipe(), 2)


class Checkpointed(nn.Module):
    """Repeats what drops elements, by torch's own checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.drop = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + checkpoint(lambda y: self.drop(self.one(y)), x, use_reentrant=False)
        return x + checkpoint(lambda y: self.drop(self.two(y)), x, use_reentrant=False)


class Skipping(Block):
    """Drops layers by Python's generator."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if random.random() < 0.5 else x


@pytest.mark.parametrize("block", [Checkpointed, Skipping])
def test_repeated_and_pythons_draws_agree(block: Callable[[], nn.Module]) -> None:
    for seed in range(3):
        refuse_differences(Parts(block).recipe(seed=seed), 3)


def test_a_batch_that_a_section_empties_is_whole_for_the_next_one() -> None:
    class Popping(Embed):
        def forward(self, batch: Any) -> Tensor:
            return super().forward({"inputs": batch.pop("inputs")})

    parts = Parts()
    parts.embed = Popping().double()
    refuse_differences(parts.recipe(), 2)


def test_a_copy_of_the_modules_is_no_part_of_the_model() -> None:
    parts = Parts()
    teacher = copy.deepcopy(parts.head).requires_grad_(False)

    def distilled(output: Tensor, batch: Any) -> tuple[Tensor, float]:
        total, count = summed(output, batch)
        return total + teacher(torch.ones(1, WIDTH, dtype=torch.float64)).sum(), count

    refuse_differences(parts.recipe(loss=distilled), 2)
