"""Balance losses and biases of routers are under any layout those of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from elasticd_planner.spec.model import BALANCE_COUNTS
from elasticd_planner.spec.plan import Plan, StatePolicy
from torch import Tensor, nn

import elasticd
from elasticd import Balance
from elasticd.models import next_token_loss
from elasticd.records import Vote
from elasticd.runtime.data.packing import Packing
from elasticd.runtime.engine.engine import Engine, StepDone
from elasticd.runtime.model.validation import ModelError
from elasticd.runtime.reference.comparison import refuse_differences
from tests import sizes
from tests.models import mixture
from tests.models.double import DoubleThroughout
from tests.models.families import Whole
from tests.models.layouts import Run, Training, furthest, optimizer, plan_of, stage, under
from tests.models.mixture import EXPERTS, LAYERS, VOCABULARY, Biased, Margins, Mixture, MixtureBlock
from tests.models.test_experts import (
    MARGIN,
    NEAR,
    PLACED,
    PLANS,
    SHARED,
    THREE,
    fitting,
    placed,
    with_experts,
)
from tests.models.test_huggingface import theirs
from tests.models.test_huggingface_cut import Cut
from tests.models.test_recompute import again_in
from tests.models.texts import Text
from tests.runtime import test_engine_parity

LAYOUTS = PLANS | PLACED
BOTH = Balance(loss=0.05, bias=0.01, router="blocks.*.router", parameter="blocks.*.shift")
OF_STEP = replace(BOTH, over="step")
STEPS = 3


class Known(Text):
    """Texts whose lengths are known beforehand."""

    @property
    def lengths(self) -> list[int]:
        return [len(self[index]["inputs"]) for index in range(len(self))]


Block = tuple[nn.Module, nn.Module, Tensor | None]  #: a router, experts, and a bias


@contextmanager
def choices_of(blocks: list[Block]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Logits and choices of each block's router in the passes inside."""
    found: list[tuple[Tensor, Tensor]] = []
    logits: list[Tensor] = []

    def noted(_: nn.Module, args: Any, output: Any) -> None:
        logits.append(output if isinstance(output, Tensor) else output[0])

    def chosen(_: nn.Module, args: Any, kwargs: Any) -> None:
        found.append((logits.pop(), args[1]))

    hooks = [router.register_forward_hook(noted) for router, _, _ in blocks]
    hooks += [experts.register_forward_pre_hook(chosen, with_kwargs=True) for _, experts, _ in blocks]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def one_process(
    training: Training,
    whole: nn.Module,
    balance: Balance,
    blocks: list[Block],
    make: Callable[[Any], torch.optim.Optimizer] = optimizer,
) -> tuple[Run, list[float], list[float]]:
    """Plain torch: losses, weights and biases, and the balance and the norm of each step, sample by sample."""
    update, sampler, factor = (
        make(whole.named_parameters()),
        training.recipe().sampler,
        balance.loss or 0.0,
    )
    losses, balances, norms = [], [], []
    of_step, before, ratio = balance.over == "step", [torch.ones(EXPERTS).double() for _ in blocks], 1.0
    for step in range(training.steps):
        samples = sampler.samples(step)
        update.zero_grad()
        total, count, of_routers = torch.zeros(()), 0, torch.zeros(())
        counts, rows = [torch.zeros(EXPERTS).double() for _ in blocks], 0
        for index in samples:
            batch = training.collate([training.dataset[index]])
            with choices_of(blocks) as found:
                loss, targets = training.loss(whole(batch), batch)
            total, count = total + loss, count + targets
            rows += len(found[0][0])
            for at, (logits, index_of) in enumerate(found):
                part = torch.bincount(index_of.flatten(), minlength=EXPERTS).double()
                counts[at] += part
                probabilities = logits.softmax(-1)
                if of_step:
                    parts, weighted = before[at] / before[at].sum(), ratio * probabilities.sum(0)
                else:
                    parts, weighted = part / part.sum(), targets * probabilities.mean(0)
                of_routers = of_routers + EXPERTS * (parts * weighted).sum()
        ((total + factor * of_routers) / count).backward()
        norms.append(float(nn.utils.get_total_norm(p.grad for p in whole.parameters() if p.grad is not None)))
        update.step()
        for (_, _, bias), part in zip(blocks, counts, strict=True):
            if bias is not None and balance.bias is not None:
                bias.add_((part.mean() - part).sign().view_as(bias), alpha=balance.bias)
        before, ratio = counts, count / rows
        losses.append(float(total.detach()) / count)
        balances.append(float(of_routers.detach()) / count / len(blocks))
    biases = {name: each.detach() for name, each in whole.named_buffers()}
    return (losses, {name: p.detach() for name, p in whole.named_parameters()} | biases), balances, norms


def apart(
    training: Training, whole: nn.Module, blocks: list[Block], plan: Plan, names: Callable[[str], str]
) -> tuple[float, float]:
    """The furthest that a weight or a bias, and a balance, are from one process's."""
    balance = training.recipe().balance or Balance(loss=1e-300)
    margins = Margins()
    with margins:
        expected, balances, norms = one_process(training, whole, balance, blocks)
    assert margins.least > MARGIN, "a router's choice hangs on the last digits"
    votes: list[Vote] = []
    step = Engine.step

    def stepping(engine: Engine, *args: Any) -> StepDone:
        done = step(engine, *args)
        votes.append(done.outcome.vote)
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "step", stepping)
        losses, values = under(training, plan, within=DoubleThroughout)
    counts = {name for name in values if name.endswith(BALANCE_COUNTS)}
    assert len(counts) == (len(blocks) if balance.over == "step" else 0)
    found = losses, {name: value for name, value in values.items() if name not in counts}
    assert found[0] == pytest.approx(expected[0], rel=NEAR)
    gap, _ = furthest(found, expected, {full: names(full) for full in found[1]})
    for vote in votes:
        assert vote.norm == pytest.approx(norms[vote.step], rel=NEAR), "counts are in no norm"
    if training.recipe().balance is None or balance.loss is None:
        assert {vote.balance for vote in votes} == {None}
        return gap, 0.0
    return gap, max(abs((vote.balance or 0.0) - balances[vote.step]) for vote in votes)


def of_mixture(training: Training, plan: Plan) -> tuple[float, float]:
    torch.manual_seed(0)
    whole = Biased().double()
    own = replace(training, model=copy.deepcopy(whole).describe())
    blocks: list[Block] = [(block.router, block.experts, block.shift) for block in whole.blocks]
    return apart(own, whole, blocks, plan, lambda full: full)


def training_of(balance: Balance, **more: Any) -> Training:
    given = {"dataset": Text(VOCABULARY), "steps": STEPS} | more
    model = Biased().describe()
    return Training(model=model, loss=next_token_loss, options={"balance": balance}, **given)


@pytest.mark.parametrize(
    "name",
    sizes.beside(
        ["tp1 to tp4 and back", "interleaved, tp2", "sets, zero 2, recomputing", "over lanes"], LAYOUTS
    ),
)
def test_a_loss_of_each_sample_and_biases_are_those_of_one_process(name: str) -> None:
    dataset = Known(VOCABULARY) if LAYOUTS[name].micro_batch > 1 else Text(VOCABULARY)
    assert of_mixture(training_of(BOTH, dataset=dataset), LAYOUTS[name]) < (NEAR, NEAR)


@pytest.mark.parametrize(
    "name",
    sizes.beside(["tp1 to tp4 and back", "sets, zero 2, recomputing", "over lanes, two stages"], LAYOUTS),
)
def test_a_loss_over_a_step_is_that_of_one_process(name: str) -> None:
    """With frequencies of the step before. A sample's rows count alike, whatever its targets are."""
    dataset = Known(VOCABULARY) if LAYOUTS[name].micro_batch > 1 else Text(VOCABULARY)
    assert of_mixture(training_of(OF_STEP, dataset=dataset), LAYOUTS[name]) < (NEAR, NEAR)


#: The layouts that three families are measured under, with the experts cut in experts but in the second.
OF_FAMILIES: dict[str, Plan] = {
    "tp3 over 8 experts": PLANS["tp3 uneven beside a pipeline"],
    "expert tp": PLANS["tp3 uneven beside a pipeline"],
    "lanes of tp 2 x 2": plan_of(
        (
            (5, 3),
            [
                placed(
                    test_engine_parity.stage(
                        0, LAYERS, *((f"{n}/{i}", 1) for n in "ab" for i in (0, 1)), lanes=(2, 2)
                    ),
                    ((0, 4), (1, 5, 7), (2,), (3, 6)),
                )
            ],
        )
    ),
    "lanes (2, 1)": plan_of(((5, 3), [SHARED])),
    "replicas": plan_of((8, [placed(THREE, ((0, 1, 2, 3, 4), (2, 3, 4, 5, 6), (4, 6, 7)))])),
    "two pipelines, one with lanes": PLACED["over lanes"],
    "two stages": PLACED["over lanes, two stages"],
    "interleaved": PLACED["over lanes, interleaved"],
    "zero 1": PLACED["sets, zero 1, twice"],
    "zero 2": PLACED["over lanes"].replace(state=StatePolicy(zero=2, replicas=1)),
    "recomputation": again_in(PLACED["over lanes"]),
    "cut sequences": PLACED["over lanes, two stages"],
}
#: GPT-OSS takes no packed rows, which cut sequences are. A loss of samples is of sequences that are not cut.
FAMILIES = [
    (kind, name)
    for kind in ("Mixtral", "Qwen3Moe", "GptOss", "DeepseekV3")
    for name in OF_FAMILIES
    if (kind, name) != ("GptOss", "cut sequences")
]


def of_family(kind: str, name: str) -> tuple[float, float]:
    """How far a small model of transformers is from one process after three steps, and its balance."""
    model = with_experts(kind)
    described = elasticd.from_hf(model, experts="columns" if name == "expert tp" else "experts")
    cut = name == "cut sequences"
    has_bias = kind == "DeepseekV3"
    balance = Balance(loss=None if cut and has_bias else 0.05, bias=0.01 if has_bias else None)
    given: dict[str, Any] = {
        "model": described,
        "loss": next_token_loss,
        "dataset": Known(VOCABULARY),
        "steps": STEPS,
        "options": {"balance": None if cut and not has_bias else balance},
    }
    training = Cut(**given) if cut else Training(**given)
    whole = Whole(copy.deepcopy(model))
    sparse = [module for module in whole.modules() if isinstance(getattr(module, "experts", None), nn.Module)]
    routers = [getattr(module, "gate", None) or module.router for module in sparse]
    blocks: list[Block] = [
        (router, module.experts, getattr(router, "e_score_correction_bias", None))
        for module, router in zip(sparse, routers, strict=True)
    ]
    return apart(training, whole, blocks, fitting(OF_FAMILIES[name], described.spec), theirs)


@pytest.mark.parametrize(
    ("kind", "name"),
    sizes.beside([("DeepseekV3", "tp3 over 8 experts"), ("Mixtral", "two stages")], FAMILIES),
)
def test_models_of_transformers_are_balanced_as_in_one_process(kind: str, name: str) -> None:
    """By the logits that transformers records, and by `e_score_correction_bias`, which DeepSeek-V3 has."""
    assert of_family(kind, name) < (NEAR, NEAR)


@pytest.mark.parametrize("balance", [BOTH, replace(BOTH, bias=None), replace(BOTH, loss=None), OF_STEP])
def test_the_step_before_a_job_is_compared_without_its_balance(balance: Balance) -> None:
    recipe = training_of(balance, dataset=Known(VOCABULARY)).recipe()
    plain = refuse_differences(recipe, 2)
    assert not any(name.endswith(("shift", BALANCE_COUNTS)) for name in plain.gradients)
    assert recipe.model.counted or balance.bias is None


def test_packed_samples_are_balanced_one_by_one() -> None:
    training = training_of(Balance(loss=0.05, router="blocks.*.router"), dataset=Known(VOCABULARY))
    assert of_mixture(replace(training, packing=Packing(tokens=40, cut=False)), LAYOUTS["replicas"]) < (
        NEAR,
        NEAR,
    )


def test_sequences_that_are_cut_over_lanes_move_biases_and_have_a_loss_of_steps_and_none_of_samples() -> None:
    training = training_of(OF_STEP)
    fields = {name: getattr(training, name) for name in ("model", "loss", "dataset", "steps", "options")}
    assert of_mixture(Cut(**fields), LAYOUTS["over lanes"]) < (NEAR, NEAR)
    with pytest.raises(
        ValueError, match=r'may cut one over lanes.*Balance\(over="step"\), or Packing\(cut=False'
    ):
        replace(training_of(BOTH, dataset=Known(VOCABULARY)), packing=Packing()).recipe()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "give loss=, a factor of balance losses, or bias=, a change of biases, or both"),
        ({"loss": 0}, "loss must be a positive number, or None, not 0"),
        ({"bias": "much"}, "bias must be a positive number, or None, not 'much'"),
        ({"loss": 1.0, "over": "batch"}, 'over must be "sample" or "step", not \'batch\''),
        ({"bias": 1.0, "over": "step"}, 'over="step" is of a balance loss: give loss='),
    ],
)
def test_a_balance_of_nothing_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Balance(**given)


class TwoRouters(MixtureBlock):
    def __init__(self) -> None:
        super().__init__()
        self.router_2 = nn.Linear(mixture.WIDTH, EXPERTS)


class CoarseBlock(MixtureBlock):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(EXPERTS, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("blocks", "balance", "said"),
    [
        (
            [MixtureBlock],
            Balance(loss=1.0),
            r"needs the routers of the model, and none is known: give .*router=",
        ),
        ([MixtureBlock], replace(BOTH, router="none"), "'none' matches none"),
        ([MixtureBlock], Balance(bias=1.0), "correction_bias' matches no parameter or buffer of a block"),
        (
            [TwoRouters],
            Balance(loss=1.0, router="*.router*"),
            "blocks.0 has the routers blocks.0.router and bl",
        ),
        (
            [CoarseBlock],
            replace(BOTH, loss=None),
            "blocks.0.shift is of bfloat16, which is too coarse for a bias",
        ),
    ],
)
def test_models_that_cannot_be_balanced_so_are_refused(
    blocks: list[type[nn.Module]], balance: Balance, said: str
) -> None:
    model = Mixture().describe(blocks=[block() for block in blocks])
    training = Training(
        model=model, loss=next_token_loss, dataset=Text(VOCABULARY), options={"balance": balance}
    )
    with pytest.raises(ModelError, match=said):
        training.recipe()


def test_slices_of_tokens_are_refused() -> None:
    options = {"balance": BOTH, "parallelism": elasticd.ParallelismOptions(sequence_parallel=True)}
    torch.manual_seed(0)
    model = Biased().describe(rules={}, units={})
    with pytest.raises(ValueError, match="sequence_parallel gives a device slices of them: leave"):
        Training(model=model, loss=next_token_loss, dataset=Text(VOCABULARY), options=options).recipe()


class FlatHead(nn.Linear):
    """Gives the logits of all tokens in one dimension."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flatten(0, 1)


def test_outputs_that_do_not_begin_with_the_samples_are_of_one_sample_or_refused() -> None:
    def loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        targets = batch["targets"].flatten()
        return nn.functional.cross_entropy(output, targets, reduction="sum"), (targets != -100).sum()

    whole = Biased()
    whole.head.__class__ = FlatHead
    training = replace(training_of(BOTH, dataset=Known(VOCABULARY)), model=whole.describe(), loss=loss)
    under(training, LAYOUTS["over lanes, two stages"])
    with pytest.raises(ModelError, match="have it begin with the samples, or give micro_batch=1"):
        under(training, LAYOUTS["tp1 to tp4 and back"])


def test_padded_samples_of_unknown_lengths_are_refused() -> None:
    plan = plan_of((4, [stage(0, LAYERS, ("a/0", 1))]), micro_batch=2)
    training = training_of(Balance(loss=0.05, router="blocks.*.router"))
    with pytest.raises(ModelError, match="how long samples are is not known: give the dataset an attribute"):
        under(training, plan)


def test_a_job_of_padded_samples_of_unknown_lengths_is_refused_before_its_first_step() -> None:
    rows = [{"inputs": torch.arange(8), "targets": torch.arange(8)}] * 4
    with pytest.raises(elasticd.JobStopped, match="how long samples are is not known"):
        elasticd.Job(
            model=Biased().describe(),
            loss=next_token_loss,
            optimizer=torch.optim.AdamW,
            dataset=rows,
            global_batch=4,
            micro_batch=2,
            balance=Balance(loss=0.05, router="blocks.*.router"),
        )
