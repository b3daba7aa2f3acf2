"""Blocks that make their activations again train to the same bits, and keep their input alone."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import cycle
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.plan import Plan, Strategy
from msgspec import structs
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import elasticd
from elasticd.models import next_token_loss
from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.in_memory import MemoryPlanGroups, MemoryWorld, Unpaced
from elasticd.runtime.engine.activation_checkpoint import asked
from elasticd.runtime.engine.engine import Engine, first_state
from elasticd.runtime.engine.parallelism import ParallelismOptions
from elasticd.runtime.model.validation import replace_dropouts
from examples import train_gpt2
from tests import sizes
from tests.models.layouts import SEED, Training, alone, furthest, layouts_of, plan_of, stage, under
from tests.models.texts import Text

LAYERS = 4
PLANS = layouts_of(LAYERS)


def recomputing(chosen: tuple[int, ...]) -> dict[str, Any]:
    """Options of a recipe by which these blocks recompute."""
    return {"parallelism": ParallelismOptions(recompute=chosen.__contains__)}


def again_in(plan: Plan, every: int = 1) -> Plan:
    """The plan with its first stage recomputing, and every so many after it."""
    (module,) = plan.modules
    marks = cycle([True, *[False] * (every - 1)])
    pipelines = tuple(
        structs.replace(
            pipeline, stages=tuple(structs.replace(each, recompute=next(marks)) for each in pipeline.stages)
        )
        for pipeline in module.pipelines
    )
    strategy = Strategy(modules=(structs.replace(module, pipelines=pipelines),))
    return plan.replace(strategies=(strategy,))


def gpt() -> tuple[Training, nn.Module]:
    torch.manual_seed(0)
    made = train_gpt2.GPT(vocabulary=41, width=32, layers=LAYERS, heads=8, longest=16, dropout=0.2).double()
    whole = copy.deepcopy(made)
    for section, module in (("embed", whole.embed), *((f"blocks.{i}", b) for i, b in enumerate(whole.blocks))):
        replace_dropouts(section, module)
    return Training(model=train_gpt2.describe(made), loss=next_token_loss, dataset=Text(41)), whole


@pytest.mark.parametrize("name", sizes.beside(["tp3 uneven beside a pipeline"], PLANS))
def test_a_plan_that_recomputes_trains_to_the_bits_of_one_that_does_not(name: str) -> None:
    """With dropout, in float64; one process says that both are right."""
    training, whole = gpt()
    plain, again = under(training, PLANS[name]), under(training, again_in(PLANS[name]))
    assert again[0] == plain[0]
    assert all(torch.equal(again[1][full], weight) for full, weight in plain[1].items())
    expected = alone(training, whole)
    assert furthest(again, expected, {full: full for full, _ in whole.named_parameters()}) < (1e-12, "")


def test_some_stages_may_recompute_and_some_blocks_by_the_users_word() -> None:
    training, _ = gpt()
    plan = PLANS["tp1 to tp4 and back"]
    plain = under(training, plan)
    chosen = replace(training, options=recomputing((0, 3)))
    for found in (under(training, again_in(plan, every=2)), under(chosen, plan)):
        assert found[0] == plain[0]
        assert all(torch.equal(found[1][full], weight) for full, weight in plain[1].items())


class Drawing(nn.Module):
    """A block that draws from torch's generator."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drawn(torch.tanh(self.inner(x)))

    def drawn(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.3)


class Seldom(Drawing):
    """Draws for long sequences alone, of which the first is none."""

    def drawn(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.3) if x.shape[1] > 11 else x


class Beside(Drawing):
    """Draws from another generator, as on an accelerator: the CPU's does not move."""

    generator = torch.Generator()

    def drawn(self, x: Tensor) -> Tensor:
        return x * torch.empty_like(x).bernoulli_(0.7, generator=self.generator)


class Embed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(23, width)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        out: Tensor = self.tokens(batch["inputs"])
        return out


def drawing(kind: type[Drawing]) -> Training:
    torch.manual_seed(0)
    parts = Embed(8).double(), [kind(8).double() for _ in range(3)], nn.Linear(8, 23).double()
    with pytest.warns(UserWarning, match="no tensor-parallel rules"):
        model = elasticd.Model(embed=parts[0], blocks=parts[1], head=parts[2])
    return Training(model=model, loss=next_token_loss, dataset=Text(23))


@pytest.mark.parametrize("kind", [Drawing, Seldom, Beside])
def test_draws_without_a_key_are_the_same_again(kind: type[Drawing], monkeypatch: pytest.MonkeyPatch) -> None:
    """On one thread: torch's generator is one for a process."""
    both = [torch.default_generator, Beside.generator]
    monkeypatch.setattr("elasticd.runtime.model.rng.generators", lambda: both)
    plan = plan_of((8, [stage(0, 3, ("a/0", 1))]))
    training = drawing(kind)
    before = [generator.get_state() for generator in both]
    plain = under(training, plan, threads=False)
    assert all(torch.equal(generator.get_state(), was) for generator, was in zip(both, before, strict=True))
    for generator in both:
        generator.seed()
    again = under(drawing(kind), again_in(plan), threads=False)
    assert again[0] == plain[0]
    assert all(torch.equal(again[1][full], weight) for full, weight in plain[1].items())


class Alive:
    """Bytes that autograd keeps for backward, and the most at once."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def pack(self, tensor: Tensor) -> list[Tensor]:
        class Kept(list[Tensor]):
            pass

        kept, size = Kept([tensor]), tensor.nbytes
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(kept, self._gone, size)
        return kept

    def _gone(self, size: int) -> None:
        self.now -= size


def most_kept(training: Training, plan: Plan) -> int:
    alive = Alive()
    with saved_tensors_hooks(alive.pack, lambda kept: kept[0]):  # on this thread alone
        under(training, plan, threads=False)
    assert alive.most > 0
    return alive.most


def test_blocks_that_recompute_keep_their_input_alone() -> None:
    """Of four blocks one at a time has its activations there; of the head and embedding all stays."""
    training, _ = gpt()
    plan = plan_of((1, [stage(0, LAYERS, ("a/0", 1))]), micro_batch=8)
    whole, again = most_kept(training, plan), most_kept(training, again_in(plan))
    one = replace(training, options=recomputing((0,)))
    each = whole - most_kept(one, plan)
    assert each > 0.15 * whole
    assert again <= (whole - (LAYERS - 1) * each) * 1.01


@pytest.mark.parametrize("chosen", [(), (0, 2)])
def test_making_activations_again_is_measured_and_paced_by_itself(chosen: tuple[int, ...]) -> None:
    """Detection compares what blocks take otherwise; an emulated block takes its forward time once more."""
    training, _ = gpt()
    training = replace(training, options=recomputing(chosen))
    plan = plan_of((4, [stage(0, LAYERS, ("a/0", 1))]), micro_batch=2)
    layouts, recipe = Layouts(training.model.spec, plan), training.recipe()
    plan_groups, paced = cast(PlanGroups, MemoryPlanGroups(MemoryWorld(), "a/0")), Counter[str]()

    class Counting(Unpaced):
        emulates = True

        def __call__(self, *times: Any) -> float:
            paced[times[0]] += 1
            return super().__call__(*times)

    engine = Engine(recipe, layouts, plan_groups, Counting())
    engine.adopt(first_state(recipe.model, layouts, "a/0", SEED))
    measured = engine.step(0, lambda: 0).measurement
    assert (measured.again_seconds > 0) == bool(chosen)
    assert measured.block_seconds == measured.forward_seconds + measured.backward_seconds
    assert paced == {"forward": 4 * (LAYERS + len(chosen)), "backward": 4 * LAYERS}


def test_what_a_job_can_be_asked() -> None:
    assert asked(False, 4) == (False, ())
    assert asked(True, 4) == ("always", ())
    assert asked("plan", 4) == (True, ())
    assert asked(lambda layer: layer % 2 == 0, 5) == (False, (0, 2, 4))
    wrong: Any = "always"
    with pytest.raises(ValueError, match="recompute must be True, False"):
        asked(wrong, 4)
