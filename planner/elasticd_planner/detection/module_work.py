"""A step of a plan of several modules as one step: seconds of each device over all of its places, and its work.

Work is in seconds of a normal device: what each module's profile says of it, so that a device that only encodes
compares with one that only decodes. Where several devices compute with a module, their fleet cost in the same
step corrects the profile: what slows all of a module slows none of them. Where one does, its profile alone says
what is normal, once it is fitted. Before that its profile does, too, if it was measured before the job, as the
other modules of the step correct theirs; so a device that is slow from the first step is seen to be. Of a
profile by shapes, and while its items change their size, nothing says what is normal, and the device counts as
before.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from statistics import median
from types import MappingProxyType

import numpy as np

from elasticd_planner.cost.model_profile import ModelProfile
from elasticd_planner.detection.fleet_baseline import fleet_cost_of_many
from elasticd_planner.detection.stragglers import expectation
from elasticd_planner.numeric import Floats
from elasticd_planner.spec.cluster import NORMAL
from elasticd_planner.spec.plan import Plan
from elasticd_planner.spec.step_measurements import Step


def as_one(
    step: Step,
    plan: Plan,
    profiles: Mapping[str, ModelProfile],
    slow: Mapping[str, float],
    sigma: float,
    rises: Mapping[str, float] = MappingProxyType({}),
    resizing: Collection[str] = (),
    timed: Collection[str] = (),
) -> Step:
    """The step of all modules together, for `observe` without a function of work.

    Args:
        step: of a plan of several modules.
        plan: in force.
        profiles: of its modules, by name.
        slow: slowdowns of the stragglers.
        sigma: the noise of a cost, as the standard deviation of its logarithm.
        rises: by module by what a token costs more for each token of its sequence or item; 0 where it has none.
        resizing: modules whose items have lately another size than that of their profiles.
        timed: modules whose profiles were measured before the job, on devices like each other.
    """
    place = {device: number for number, device in enumerate(step.devices)}
    seconds, work = np.zeros(len(place)), np.zeros(len(place))
    levels = list[float]()  # of timed modules by several devices
    alone = list[tuple[list[int], Floats, float]]()  # of timed modules by one
    for module in plan.modules:
        own = step.modules.get(module.module) if module.items else step
        if own is None or module.module not in profiles:
            continue
        rise = rises.get(module.module, 0.0)
        spent, expected = _module_seconds(own, plan.view(module.module), profiles[module.module], rise)
        known = np.flatnonzero((spent > 0) & (expected > 0) & np.isfinite(spent))
        if not len(known):
            continue
        devices = [own.devices[index] for index in known.tolist()]
        spent, expected = spent[known], expected[known]
        at, level = [place[device] for device in devices], 1.0
        if len(known) > 1 or not profiles[module.module].fitted or module.module in resizing:
            level = _level(spent / expected, devices, slow, sigma)
        seconds[at] += spent
        if module.module not in timed or profiles[module.module].fitted or module.module in resizing:
            work[at] += expected * level
        elif len(known) > 1:
            levels.append(level)
            work[at] += expected * level
        else:
            alone.append((at, expected, level))
    for at, expected, level in alone:
        work[at] += expected * (median(levels) if levels else level)
    return Step.timed(step.plan, step.step, step.devices, seconds.tolist(), work.tolist())


def _module_seconds(step: Step, view: Plan, profile: ModelProfile, rise: float) -> tuple[Floats, Floats]:
    """Of each device of a module's step: seconds of its blocks, and those of a normal device."""
    work = expectation(profile, view)(step) * profile.block.seconds
    tokens, squares = step.column("tokens"), step.column("squares")
    if rise and squares.sum() > 0:
        lengths = np.divide(squares, tokens, out=np.zeros_like(squares), where=tokens > 0)
        # The profile is of items of one size; of sequences the mean in this step counts as its own.
        known = profile.tokens if view.module.items else squares.sum() / tokens.sum()
        work = work * np.where(lengths > 0, (1 + rise * lengths) / (1 + rise * known), 1.0)
    return step.column("block_seconds"), work if view.module.trainable else work * profile.forward


def _level(costs: Floats, devices: Sequence[str], slow: Mapping[str, float], sigma: float) -> float:
    """Seconds that a normal device takes in this step over those of the profile."""
    rates = np.array([slow.get(device, NORMAL) for device in devices])
    level = fleet_cost_of_many(costs, rates, sigma)
    return level if 0 < level < math.inf else 1.0
