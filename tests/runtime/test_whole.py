"""The plan that a state is gathered under has every layer, whatever the plan in force."""

from __future__ import annotations

import pytest

from elasticd.runtime.whole import alone
from tests.runtime.test_evaluation import PLANS
from tests.runtime.test_parity import CONFIG


@pytest.mark.parametrize("name", PLANS)
def test_one_device_has_all_layers(name: str) -> None:
    plan = alone(PLANS[name])
    assert plan.members == PLANS[name].members[:1]
    assert plan.stage(plan.places[plan.members[0]]).layers == CONFIG.layers
    assert plan.global_batch == PLANS[name].global_batch
