"""The bound that no plan can beat at a moment: the planner's own proved bound at the true speeds of what
lives."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
from elasticd_planner.cost.model_profile import ModelProfile
from elasticd_planner.cost.profile_cost import ProfileCost
from elasticd_planner.problem import ModuleProblem, Problem
from elasticd_planner.search.module_bound import ModuleBound
from elasticd_planner.search.module_cost import ModuleCosts
from elasticd_planner.search.options import Settings
from elasticd_planner.spec.cluster import Cluster

#: No step takes as long [s].
_LONG = 1e7


class Bounds:
    """Seconds of a step by the devices' rates and the model's profile; each is worked out once. A step's noise
    is left out: the bound holds in the mean over it."""

    def __init__(self, cluster: Cluster, global_batch: int, micro_batch: int, overhead: float) -> None:
        self._cluster, self._overhead = cluster, overhead
        self._global_batch, self._micro_batch = global_batch, micro_batch
        self._known: dict[tuple[object, ...], float] = {}

    def seconds(
        self, rates: Mapping[str, float], profile: ModelProfile, modules: tuple[ModuleProblem, ...] = ()
    ) -> float:
        """`rates`: of the devices that are not normal, inf for dead ones. `modules`: of items, of a model of
        several. Infinite where nobody lives."""
        key = tuple(sorted(rates.items())), profile.tokens, tuple(each.items_a_sample for each in modules)
        if key not in self._known:
            self._known[key] = self._bound(rates, profile, modules)
        return self._known[key]

    def _bound(
        self, rates: Mapping[str, float], profile: ModelProfile, modules: tuple[ModuleProblem, ...]
    ) -> float:
        nodes = tuple(
            msgspec.structs.replace(node, devices=left)
            for node in self._cluster.nodes
            if (left := tuple(d for d in node.devices if math.isfinite(rates.get(d.name, 1.0))))
        )
        if not nodes:
            return math.inf
        problem = Problem(
            cluster=msgspec.structs.replace(self._cluster, nodes=nodes),
            profile=profile,
            global_batch=self._global_batch,
            micro_batch=self._micro_batch,
            rates={name: rate for name, rate in rates.items() if math.isfinite(rate)},
            modules=modules,
        )
        if modules:
            return ModuleBound(problem, ModuleCosts(problem)).seconds(_LONG) + self._overhead
        speeds = [problem.rates.get(device.name, 1.0) for device in problem.cluster.devices]
        work = ProfileCost(profile).bound(speeds, self._global_batch // self._micro_batch)
        settings = Settings(problem)
        proved = min(map(settings.bound, settings.listed))
        return max(work, proved) + self._overhead
