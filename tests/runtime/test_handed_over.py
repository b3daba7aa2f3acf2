"""The modules that a script gave to its job: refused where copies would lack a part, retired once it begins."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import elasticd
from elasticd.runtime.model.model import Model, ModelError
from tests.runtime.test_reference_step import WIDTH, Block, Head, Parts, Text, summed


def model_of(parts: Parts) -> Model:
    return Model(embed=parts.embed, blocks=parts.blocks, head=parts.head)


class Tied(nn.Module):
    """Keeps what it shares with the embedding in a list, so that it is not registered twice."""

    def __init__(self, shared: Any) -> None:
        super().__init__()
        self.norm, self.tied = nn.LayerNorm(WIDTH), [shared]

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.norm(x), self.tied[0].weight)


@pytest.mark.parametrize("keep", [lambda x: x, lambda x: {"of": (x.weight,)}], ids=["module", "parameter"])
def test_a_parameter_that_is_hidden_in_a_list_is_named_with_its_place(keep: Callable[[Any], Any]) -> None:
    parts = Parts()
    parts.head = Tied(keep(parts.embed.tokens)).double()
    with pytest.raises(
        ModelError, match=r"^head.tied holds embed.tokens.weight where torch does not register it"
    ):
        model_of(parts)
    parts.head = Head().double()
    parts.head.scales = [torch.ones(3, requires_grad=True)]
    with pytest.raises(ModelError, match=r"^head.scales holds a parameter of shape \(3,\).*nn.ParameterList"):
        model_of(parts)


def test_a_frozen_module_in_a_list_may_stay_there() -> None:
    parts = Parts()
    parts.head.teacher = [nn.Linear(WIDTH, WIDTH).requires_grad_(False)]
    model_of(parts)


@pytest.mark.parametrize(
    "hook",
    [
        lambda p: p.register_hook(lambda gradient: gradient * 0),
        lambda p: p.register_post_accumulate_grad_hook(lambda p: None),
    ],
)
def test_a_hook_on_a_parameter_is_named(hook: Callable[[nn.Parameter], Any]) -> None:
    parts = Parts()
    handle = hook(parts.embed.tokens.weight)
    with pytest.raises(ModelError, match=r"^embed.tokens.weight has a hook"):
        model_of(parts)
    handle.remove()
    model_of(parts)


USES: dict[str, Callable[[Parts], object]] = {
    "forward": lambda parts: parts.head(torch.zeros(1, WIDTH).double()),
    "state_dict": lambda parts: parts.blocks.state_dict(),
    "save": lambda parts: torch.save(parts.embed, io.BytesIO()),
    "freeze": lambda parts: parts.embed.requires_grad_(False),
    "read": lambda parts: parts.head.out.weight.square().sum(),
    "value": lambda parts: float(parts.head.out.bias[0]),
    "gradient": lambda parts: parts.head.out.bias.grad,
    "zero_grad": lambda parts: parts.head.zero_grad(),
    "norm": lambda parts: torch.nn.utils.get_total_norm(parts.parameters()),
    "move": lambda parts: parts.blocks.to(torch.float32),
    "copy": lambda parts: parts.head.load_state_dict({"out.bias": torch.zeros(11)}, strict=False),
    "optimizer": lambda parts: torch.optim.SGD(parts.parameters(), lr=0.1).step(),
}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that nobody launched, on a node without an agent."""
    monkeypatch.setenv("ELASTICD_SOCKET", "/nonexistent/agent.sock")
    for name in ("TORCHELASTIC_RUN_ID", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def job_of(model: Model, *, loss: Any = summed, **options: Any) -> elasticd.Job:
    return elasticd.Job(
        **options,
        model=model,
        loss=loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        dataset=Text(),
        global_batch=4,
        parallelism=elasticd.ParallelismOptions(device="cpu"),
        check=False,
    )


@pytest.fixture
def begun() -> tuple[Parts, Model]:
    """The modules of a job that made a step, and its model."""
    parts = Parts()
    model = model_of(parts)
    assert [step.index for step in job_of(model).steps(1)] == [0]
    return parts, model


@pytest.mark.parametrize("use", USES)
def test_each_later_use_of_the_modules_fails_with_what_to_do(begun: tuple[Parts, Model], use: str) -> None:
    said = r"(embed|blocks|head).* is of the module that you gave to the job.*job.state_dict\(\)"
    with pytest.raises((ModelError, RuntimeError), match=said):
        USES[use](begun[0])


def test_an_attribute_that_the_loop_sets_is_named(begun: tuple[Parts, Model]) -> None:
    block: Any = begun[0].blocks[0]
    with pytest.raises(
        ModelError, match=r"^blocks.0.temperature is set on the module that you gave to the job"
    ):
        block.temperature = 2.0
    with pytest.raises(ModelError, match=r"^blocks.0.up.bias is set on the module"):
        block.up.bias = None
    assert isinstance(block.eval(), Block)
    assert not block.up.training


def test_shapes_stay_and_the_memory_of_the_values_is_free(begun: tuple[Parts, Model]) -> None:
    parameters = begun[0].parameters()
    assert sum(p.numel() for p in parameters if p.requires_grad) > 400
    assert {(p.dtype, p.device.type) for p in parameters} == {(torch.float64, "cpu")}
    assert repr(parameters[0]) == "RetiredParameter(embed.tokens.weight, (11, 8))"
    with torch._C.DisableTorchFunctionSubclass():
        assert all(p.untyped_storage().nbytes() == p.itemsize for p in parameters)


def test_another_job_wants_new_modules_and_a_new_model(begun: tuple[Parts, Model]) -> None:
    parts, model = begun
    with pytest.raises(ModelError, match=r"embed.tokens.weight was given to a job that has begun"):
        model_of(parts)
    with pytest.raises((ModelError, SystemExit), match=r"has no first value: a job has begun with this model"):
        list(job_of(model).steps(1))


class Adapted(Block):
    """A low-rank adapter by a hook that closes over the module."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.register_forward_hook(lambda module, args, out: out + self.a(args[0]))


def test_without_the_first_check_a_closure_fails_in_the_first_pass_by_name() -> None:
    parts = Parts(Adapted)
    with pytest.raises(ModelError, match=r"^blocks.0.a.weight is of the module that you gave to the job"):
        list(job_of(model_of(parts)).steps(1))


def test_without_the_first_check_a_loss_that_reads_a_value_fails_by_name() -> None:
    parts = Parts()

    def logged(output: Tensor, batch: Any) -> tuple[Tensor, float]:
        total, count = summed(output, batch)
        return total + parts.head.out.weight.detach().norm(), count

    with pytest.raises(ModelError, match=r"^head.out.weight is of the module that you gave to the job"):
        list(job_of(model_of(parts), loss=logged).steps(1))


def test_the_first_values_are_there_until_the_job_has_them() -> None:
    parts = Parts()
    job, first = job_of(model_of(parts)), parts.embed.tokens.weight.detach().clone()
    assert torch.equal(parts.embed.tokens.weight, first)
    for _ in job.steps(1):
        weights = job.state_dict()
    assert weights is not None
    assert not torch.equal(weights["embed.tokens.weight"], first)


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        (lambda: torch.autocast("cpu", torch.bfloat16), r"^torch.autocast is on .*precision=\"bf16\""),
        (torch.no_grad, r"^gradients are off around"),
        (torch.inference_mode, r"^gradients are off around"),
    ],
    ids=["autocast", "no_grad", "inference_mode"],
)
def test_modes_around_the_loop_that_would_train_something_else_are_refused(
    mode: Callable[[], Any], said: str
) -> None:
    job = job_of(model_of(Parts()))
    with mode(), pytest.raises(ModelError, match=said):
        list(job.steps(1))


def test_autocast_inside_of_forward_stays_allowed() -> None:
    class Casting(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    assert len(list(job_of(model_of(Parts(Casting))).steps(2))) == 2


class Schedule(elasticd.Callback):
    """Freezes the embedding from step 2 on, and cools the blocks."""

    def before_step(self, job: elasticd.Job, index: int) -> None:
        job.modules()["embed"].requires_grad_(index < 2)
        job.modules()["blocks.0"].temperature = 1.0 + index  # type: ignore[assignment]


class Cooling(Block):
    temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.temperature


def test_a_callback_freezes_and_schedules_what_trains() -> None:
    changed, kept = list[bool](), list[float]()
    job = job_of(model_of(Parts(Cooling)), callbacks=[Schedule()])
    before = torch.zeros(())
    for _ in job.steps(4):
        after = job.parameters()["embed.tokens.weight"][1].clone()
        changed.append(not torch.equal(before, after))
        kept.append(float(job.modules()["blocks.0"].temperature))  # type: ignore[arg-type]
        before = after
    assert changed == [True, True, False, False]
    assert kept == [1.0, 2.0, 3.0, 4.0]


def test_what_was_given_frozen_cannot_be_unfrozen_in_the_loop() -> None:
    parts = Parts()
    parts.embed.requires_grad_(False)
    with pytest.raises(ModelError, match=r"^embed.tokens.weight was frozen when its module was given"):
        list(job_of(model_of(parts), callbacks=[Schedule()]).steps(1))


def test_values_are_handed_out_once_no_snapshot_reads_them() -> None:
    """A script may write to them by `.data`, which torch does not count."""
    job, waited = job_of(model_of(Parts(Block))), list[str]()
    for step in job.steps(2):
        engine = job._switcher.engine
        assert engine is not None
        engine.copied = lambda: waited.append("copied")
        for hand_out in (job.parameters, job.modules):
            hand_out()
        if not step.index:
            assert waited == ["copied", "copied"]
