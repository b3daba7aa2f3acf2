"""What a new placement of experts moves, and what is left of them when a device dies."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from elasticd_migration.reshard import reshard
from elasticd_planner.cost.model_profile import derive
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.layout.surviving_layouts import SurvivingLayouts
from elasticd_planner.placement.expert_placement import BlockPlacement, arrivals, placed
from elasticd_planner.placement.state_movement import expert_bytes_beyond_shares
from elasticd_planner.spec.expert_load import costed
from elasticd_planner.spec.model import item_size
from elasticd_planner.spec.plan import HeldExperts, Plan, Stage, StatePolicy, Strategy

from tests.models.mixture import EXPERTS, LAYERS, Mixture
from tests.runtime.test_engine_parity import plan_of, stage

SPEC = Mixture().describe().spec
DEVICES = ["a/0", "a/1", "b/0"]


def plan_with(placements: list[BlockPlacement]) -> Plan:
    of: Stage = stage(0, LAYERS, *((device, 1) for device in DEVICES))
    of = msgspec.structs.replace(
        of, experts=tuple(p.held for p in placements), splits=tuple(p.splits for p in placements)
    )
    return plan_of((8, [of]))


def drifted(rng: np.random.Generator, load: list[float], by: float) -> list[float]:
    return [each * float(np.exp(rng.normal(0, by))) for each in load]


@pytest.mark.parametrize("by", [0.0, 0.1, 1.0])
def test_a_new_placement_moves_the_experts_that_devices_lack_and_nothing_else(by: float) -> None:
    rng = np.random.default_rng(3)
    loads = [rng.gamma(1.0, size=EXPERTS).tolist() for _ in range(LAYERS)]
    before = [placed(load, [1.0] * 3) for load in loads]
    after = [
        placed(drifted(rng, load, by), [1.0] * 3, old.held) for load, old in zip(loads, before, strict=True)
    ]
    moved = [arrivals(old.held, new.held) for old, new in zip(before, after, strict=True)]
    assert (sum(moved) > 0) == (by == 1.0), "a small drift is made up for by other parts of rows"
    old, new = (Layouts(SPEC, plan_with(each)) for each in (before, after))
    sizes = {item: item_size(SPEC.dtype) for item in old.items}
    sent = sum(
        transfer.box.size * sizes[item] for transfer in reshard(old, new, sizes) for item in transfer.items
    )
    kind = SPEC.kinds[0]
    expert = sum(math.prod(p.shape) * item_size(p.dtype) for p in kind if p.experts) // EXPERTS
    roles = len({item.role for item in old.items if item.role != "buffer"})
    assert sent == sum(moved) * expert * roles


def test_the_planner_counts_experts_that_stay_under_other_shares() -> None:
    """Shares say that a device gets two experts of each block more. As the plan places them none moves."""

    def plan_of_shares(shares: tuple[int, int], held: HeldExperts) -> Plan:
        of: Stage = stage(0, LAYERS, *zip(DEVICES[:2], shares, strict=True))
        return plan_of((8, [msgspec.structs.replace(of, experts=(held,) * LAYERS)]))

    profile = derive(SPEC, 50, 1)
    assert profile.share_units == EXPERTS
    load = costed(SPEC, 50, dict.fromkeys(range(LAYERS), (1.0,) * EXPERTS), 2.0)
    assert load is not None
    own, other = (0, 1, 2, 3), (4, 5, 6, 7)
    old, new = plan_of_shares((4, 4), (own, other)), plan_of_shares((6, 2), (own, other))
    each = load.expert_bytes * (1 + profile.optimizer_factor)
    assert expert_bytes_beyond_shares(profile, load, old, new) == -2 * LAYERS * each
    assert expert_bytes_beyond_shares(profile, load, old, plan_of_shares((6, 2), ((*own, 4, 5), (6, 7)))) == 0
    swapped = plan_of_shares((4, 4), (other, own))
    assert expert_bytes_beyond_shares(profile, load, old, swapped) == EXPERTS * LAYERS * each


def test_an_expert_whose_only_device_died_is_lost_by_name_and_one_with_a_copy_is_not() -> None:
    held = ((0, 1, 2, 3), (2, 3, 4, 5), (0, 1, 4, 5, 6, 7))
    plan = plan_with([BlockPlacement(held=held, splits=(), busiest=0.0)] * LAYERS)
    whole = Layouts(SPEC, plan)
    experts = {name for name, each in SPEC.parameters.items() if each.experts}

    def gone(device: str) -> set[str]:
        """Parameters of experts that are lost with a device."""
        return experts & {item.name for item, _ in SurvivingLayouts(whole, gone=[device]).lost()}

    assert gone("a/0") == gone("a/1") == set()
    assert gone("b/0") == experts
    state = plan.replace(state=StatePolicy(zero=1, replicas=2))
    left = SurvivingLayouts(Layouts(SPEC, state), gone=["b/0"])
    assert not any(item.role == "state" and item.name in experts for item, _ in left.lost()), "on node a, too"


def test_another_layout_has_a_plan_without_placements() -> None:
    plan = plan_with([placed([1.0] * EXPERTS, [1.0] * 3)] * LAYERS)
    pipelines = tuple(each.with_layers([LAYERS]) for each in plan.pipelines)
    bare = plan.replace(
        strategies=(Strategy(modules=(msgspec.structs.replace(plan.module, pipelines=pipelines),)),)
    )
    assert not any(of.experts or of.splits for _, _, of in bare.walk())
