"""The fewest devices that hold a pipeline, beside all ways to give its stages devices and layers."""

from __future__ import annotations

import math
import random

import pytest
from elasticd_planner.cost.memory import fewest_devices, most_layers
from elasticd_planner.cost.profile_cost import ProfileCost

from tests.planner.real_models import profile_of


def counted(cost: ProfileCost, layers: int, devices: int, widths: list[int], memory: int) -> float:
    """By listing the sizes of all stages, the last first."""

    def held(width: int, place: int, *, first: bool) -> int:
        shares = cost.shares((1.0,) * width)[0]
        room = (memory,) * width
        return most_layers(cost, shares, room, layers, first=first, last=place == 0, in_flight=place + 1)

    def fewest(place: int, used: int, behind: int) -> float:
        found = math.inf
        for width in widths:
            if used + width > devices or place >= layers:
                continue
            whole, more = held(width, place, first=True), held(width, place, first=False)
            if whole and behind + whole >= layers:
                found = min(found, used + width)
            if more:
                found = min(found, fewest(place + 1, used + width, behind + more))
        return found

    return fewest(0, 0, 0)


@pytest.mark.parametrize("seed", range(12))
def test_the_fewest_devices_of_a_pipeline_are_those_of_all_ways_to_make_its_stages(seed: int) -> None:
    rng = random.Random(seed)
    name = rng.choice(["Qwen2.5-7B", "OLMo-2-7B", "Qwen2.5-0.5B"])
    cost = ProfileCost(profile_of(name, tokens=rng.choice([1024, 8192])), recompute=rng.choice([True, False]))
    memory = int(rng.choice([4, 24, 40, 80]) * 1e9)
    layers, devices = cost.profile.layers, rng.choice([3, 6])
    widths = [width for width in cost.widths(4) if width != 3]
    wanted = counted(cost, layers, devices, widths, memory)
    assert fewest_devices(cost, layers, devices, widths, memory, layers) == wanted
