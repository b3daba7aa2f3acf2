"""A plan that a device's memory just holds trains in it: what is predicted of a member is what it has alive."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from elasticd_planner.cost.model_profile import derive
from elasticd_planner.layout.gradient_buckets import BUCKET
from elasticd_planner.problem import Problem, SearchSpace
from elasticd_planner.search.planner import plan
from elasticd_planner.spec.cluster import Cluster, Device, Node
from elasticd_planner.spec.plan import StatePolicy

from elasticd.models import Decoder, DecoderConfig, next_token_loss
from elasticd.runtime.engine.recipe import Recipe
from tests import sizes
from tests.runtime.live_bytes import most_live

#: Nearly all of a member's memory is state: a bucket of 4 MiB is 1.5 % of it.
CONFIG = DecoderConfig(vocabulary=64, width=512, layers=8, heads=8, kv_heads=2, hidden=1408)
TOKENS = 8
POLICIES = {
    "zero 0": StatePolicy(),
    "zero 1": StatePolicy(zero=1, replicas=1),
    "zero 2": StatePolicy(zero=2, replicas=1),
}


class Text:
    """Samples of one length, each a function of its index."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, CONFIG.vocabulary, (TOKENS + 1,), generator=torch.Generator().manual_seed(index))
        return {"inputs": ids[:-1], "targets": ids[1:]}


def recipe() -> Recipe:
    with torch.device("meta"):
        model = Decoder(CONFIG).describe()
    return Recipe(
        model=model,
        loss=next_token_loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
        dataset=Text(),
        global_batch=4,
        seed=0,
    )


def problem(made: Recipe, state: StatePolicy, memory: int) -> Problem:
    """Two devices of one node, each a pipeline."""
    devices = tuple(Device(name=f"n0/{i}", memory=memory) for i in range(2))
    return Problem(
        cluster=Cluster(nodes=(Node(name="n0", devices=devices),)),
        profile=derive(made.model.spec, TOKENS, 1),
        global_batch=made.global_batch,
        micro_batch=1,
        search_space=SearchSpace(states=(state,), fixed_dp=2),
    )


@pytest.mark.parametrize("policy", sizes.beside(["zero 2"], POLICIES))
def test_a_plan_that_fits_by_two_percent_runs_in_that_memory(policy: str) -> None:
    """Under ZeRO 2, too, a member has complete gradients until the step's reduction."""
    made, state = recipe(), POLICIES[policy]
    roomy = plan(problem(made, state, 1 << 40)).plan
    assert roomy is not None
    assert roomy.prediction is not None
    budget = round(1.02 * max(roomy.prediction.memory.values()))
    fitting: Any = plan(problem(made, state, budget)).plan
    assert msgspec.structs.replace(fitting, prediction=None) == msgspec.structs.replace(roomy, prediction=None)
    most = most_live(made, fitting, "n0/0", steps=4)
    assert 0.9 * budget < most <= budget + BUCKET, "gloo's thread may not have let go of one yet"
