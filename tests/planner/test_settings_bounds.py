"""Detection and policy take no value with which a leader could not go on: nothing infinite, nothing beyond what
is counted, and nothing that is divided by and almost zero."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from elasticd_planner.detection.settings import DetectSettings
from elasticd_planner.policy.policy import PolicySettings
from elasticd_planner.value import Invalid

EXTREMES = (10**400, 10**5000, 10**30, -1, math.inf, -math.inf, math.nan, 1e-320, -0.5, 1e308)
DIVISORS = ("noise", "rounding", "false_alarms", "bandwidth")
FIELDS = [
    pytest.param(kind, field.name, id=f"{kind.__name__}.{field.name}")
    for kind in (DetectSettings, PolicySettings)
    for field in msgspec.structs.fields(kind)
    if type(getattr(kind(), field.name)) in (int, float)
]


@pytest.mark.parametrize(("kind", "name"), FIELDS)
def test_a_value_beyond_all_measure_is_refused_or_harmless(kind: type[Any], name: str) -> None:
    whole = isinstance(getattr(kind(), name), int)
    for value in EXTREMES:
        if whole != isinstance(value, int):
            continue
        try:
            made = kind(**{name: value})
        except Invalid:
            continue
        assert math.isfinite(value)
        assert name not in DIVISORS or value >= 1e-30
        assert whole is False or value <= 1_000_000_000
        assert msgspec.json.decode(msgspec.json.encode(made), type=kind) == made
