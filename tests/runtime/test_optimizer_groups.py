"""Parameter groups are those that the user's function forms of the modules' own parameters, in every layout."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from elasticd_planner.spec.plan import Plan, StatePolicy
from torch import Tensor, nn

from elasticd.runtime.api.hello import check_optimizer
from elasticd.runtime.comm.communicators import GlooCommunicators
from elasticd.runtime.comm.in_memory import MemoryPlanGroups, run_threads
from elasticd.runtime.data.collate import pad
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.model.model import Model
from elasticd.runtime.model.optimizer_check import NotCarried
from elasticd.runtime.model.parameter_groups import OptimizerError, ParameterGroups
from elasticd.runtime.model.tp_rules import Column, Row, UnitsOf
from tests.runtime.test_engine import engine_on
from tests.runtime.test_engine_parity import plan_of, stage

Named = Iterable[tuple[str, nn.Parameter]]
WIDTH, VOCABULARY, BATCH, STEPS = 8, 11, 8, 4


class Block(nn.Module):
    """Attention with one projection to queries, keys and values, and a scale without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 2
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.scale * self.out(y.transpose(1, 2).flatten(2))


class Embed(nn.Module):
    """Looks up tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, batch: Any) -> Any:
        return self.tokens(batch["inputs"])


class Text:
    """Samples that are functions of their index."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, VOCABULARY, (6,), generator=torch.Generator().manual_seed(index))
        return {"inputs": ids[:-1], "targets": ids[1:]}


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    targets = batch["targets"].flatten()
    return nn.functional.cross_entropy(output.flatten(0, 1), targets, reduction="sum"), targets.numel()


def sections() -> tuple[nn.Module, nn.ModuleList, nn.Module]:
    torch.manual_seed(0)
    return (
        Embed().double(),
        nn.ModuleList(Block() for _ in range(2)).double(),
        nn.Linear(WIDTH, VOCABULARY).double(),
    )


def recipe(optimizer: Callable[[Named], torch.optim.Optimizer], **options: Any) -> Recipe:
    embed, blocks, head = sections()
    model = Model(
        embed=embed,
        blocks=list(blocks),
        head=head,
        rules={"blocks.*.qkv.*": Column("heads", parts=3), "blocks.*.out.*": Row("heads")},
        units={"heads": UnitsOf(attribute="blocks.*.heads")},
    )
    return Recipe(
        model=model,
        loss=loss,
        optimizer=optimizer,
        dataset=Text(),
        global_batch=BATCH,
        connect=GlooCommunicators,
        **options,
    )


def plain(job: Recipe) -> dict[str, Tensor]:
    """The weights after some steps of torch in one process."""
    embed, blocks, head = (copy.deepcopy(section) for section in sections())
    parts = {"embed": embed, "blocks": blocks, "head": head}
    named = [(f"{s}.{name}", p) for s, module in parts.items() for name, p in module.named_parameters()]
    optimizer = job.optimizer(named)
    for step in range(STEPS):
        batch = pad([job.dataset[i] for i in job.sampler.samples(step)])  # type: ignore[index]
        x = embed(batch)
        for block in blocks:
            x = block(x)
        total, count = loss(head(x), batch)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in named}


def by_dimensions(named: Named) -> torch.optim.Optimizer:
    """nanoGPT's: matrices decay, vectors do not; the pairs are looked through twice."""
    decayed = [parameter for _, parameter in named if parameter.dim() >= 2]
    rest = [parameter for _, parameter in named if parameter.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.5}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.SGD(groups, lr=0.5, momentum=0.9)


def by_width(named: Named) -> torch.optim.Optimizer:
    """muP's: the rate of a matrix goes by its width. One group for each parameter."""
    groups = [{"params": [(name, p)], "lr": 0.5 / p.shape[1] if p.dim() == 2 else 0.2} for name, p in named]
    return torch.optim.SGD(groups, momentum=0.9)


def by_size(named: Named) -> torch.optim.Optimizer:
    """A group for each shape that there is: other ones, and more or fewer, of the parts of parameters."""
    groups: dict[tuple[int, ...], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named:
        groups.setdefault(tuple(parameter.shape), []).append((name, parameter))
    return torch.optim.SGD(
        [{"params": group, "lr": 0.5 / (1 + len(shape))} for shape, group in groups.items()], momentum=0.9
    )


def some(named: Named) -> torch.optim.Optimizer:
    """Freezes the rest by leaving it out."""
    return torch.optim.SGD([(name, p) for name, p in named if p.numel() > WIDTH], lr=0.5, momentum=0.9)


PLANS: dict[str, Plan] = {
    "one device": plan_of((BATCH, [stage(0, 2, ("a/0", 1))])),
    "TP 2 beside two stages": plan_of(
        (4, [stage(0, 2, ("a/0", 1), ("a/1", 1))]),
        (4, [stage(0, 1, ("b/0", 1)), stage(1, 2, ("b/1", 1))]),
    ),
    "ZeRO 2": plan_of((4, [stage(0, 2, ("a/0", 1))]), (4, [stage(0, 2, ("b/0", 1))])).replace(
        state=StatePolicy(zero=2, replicas=1)
    ),
}


@pytest.mark.parametrize("layout", PLANS)
@pytest.mark.parametrize("optimizer", [by_dimensions, by_width, by_size, some])
def test_groups_by_shape_mean_what_they_mean_in_torch(
    optimizer: Callable[[Named], torch.optim.Optimizer], layout: str
) -> None:
    job = recipe(optimizer)
    expected = plain(job)

    def worker(plan_groups: MemoryPlanGroups) -> dict[str, Tensor]:
        engine = engine_on(plan_groups, job, PLANS[layout])
        for step in range(STEPS):
            engine.step(step, lambda: 0)
        engine.settle()
        return {
            f"{name} {box}": parameter.detach().double()
            - (
                expected[name].unflatten(job.model.fused[name], (3, -1))
                if name in job.model.fused
                else expected[name]
            )[box.slices(type(box).whole(job.model.parameter(name).shape))]
            for name, ((box,), parameter) in engine.module.local.parameters.items()
        }

    for device, gaps in run_threads(PLANS[layout].members, worker).items():
        for name, gap in gaps.items():
            assert float(gap.abs().max()) < 1e-12, f"{device} {name}"


def test_an_optimizer_of_the_users_own_parameters_is_refused() -> None:
    """Nothing that it steps on would be trained."""
    embed, blocks, head = sections()
    own = [*embed.parameters(), *blocks.parameters(), *head.parameters()]
    with pytest.raises(OptimizerError, match=r"its AdamW holds \d+ tensors that its function was not called"):
        check_optimizer(recipe(lambda named: torch.optim.AdamW(own, lr=1e-2)))


def test_parameters_of_the_loss_beside_the_models_are_refused() -> None:
    margin = nn.Parameter(torch.zeros(3))

    def both(named: Named) -> torch.optim.Optimizer:
        return torch.optim.SGD([*(parameter for _, parameter in named), margin], lr=0.1)

    with pytest.raises(OptimizerError, match=r"a tensor .* of shape \(3,\).*put parameters of the loss into"):
        check_optimizer(recipe(both))


def test_a_function_that_returns_no_optimizer_is_refused() -> None:
    with pytest.raises(OptimizerError, match="its function returned a value of type NoneType: return the"):
        check_optimizer(recipe(lambda named: None))  # type: ignore[arg-type, return-value]


def test_parameters_that_the_optimizer_leaves_out_are_named(caplog: pytest.LogCaptureFixture) -> None:
    check_optimizer(recipe(some))
    assert "leaves out 4 of 13 parameters, which keep their first values: blocks.0.scale" in caplog.text


def test_a_function_that_looks_at_values_or_devices_forms_its_groups_too() -> None:
    def looks(named: Named) -> torch.optim.Optimizer:
        named = list(named)
        assert all(parameter.device.type == "cpu" for _, parameter in named)
        return torch.optim.SGD([p for _, p in named if not float(p.detach().sum())], lr=0.1)

    groups = ParameterGroups.of(looks, {"w": torch.empty(4, 4, device="meta")})
    assert groups.names == (("w",),)


def test_a_function_that_raises_is_not_tried_before_the_job_starts() -> None:
    """It may ask for what the script makes later."""
    check_optimizer(recipe(lambda named: torch.optim.SGD(named, lr=job.rate)))  # type: ignore[name-defined]  # noqa: F821


def test_settings_that_are_tensors_or_choose_kernels_stay_with_the_slices() -> None:
    rates: list[Tensor] = []

    def of_tensor(named: Named) -> torch.optim.Optimizer:
        rates.append(torch.tensor(0.1))
        return torch.optim.AdamW(named, lr=rates[-1], foreach=False)

    groups = ParameterGroups.of(of_tensor, {"w": torch.empty(4, 4)})
    part = nn.Parameter(torch.ones(2, 4))
    optimizer = groups.optimizer(of_tensor, [("w", part)])
    assert optimizer.param_groups[0]["lr"] is rates[-1]
    assert optimizer.param_groups[0]["params"] == [part]


@pytest.mark.parametrize("slices", [1, 2, 5])
def test_every_slice_of_a_parameter_is_in_its_group(slices: int) -> None:
    groups = ParameterGroups.of(by_dimensions, {"w": torch.empty(6, 4), "b": torch.empty(6)})
    parts = [("w", nn.Parameter(torch.ones(1, 4))) for _ in range(slices)]
    none = ("b", nn.Parameter(torch.empty(0)))
    optimizer = groups.optimizer(by_dimensions, [*parts, none])
    assert [len(group["params"]) for group in optimizer.param_groups] == [slices, 1]


class Masters(torch.optim.SGD):
    """Keeps a plane of the name that master weights have."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["master"] = parameter.detach().clone()


def test_an_optimizer_with_a_plane_of_the_name_of_master_weights_is_refused() -> None:
    with pytest.raises(NotCarried, match=r"Masters keeps 'master' for its parameters.*another name"):
        check_optimizer(recipe(lambda named: Masters(named, lr=1e-2)))
