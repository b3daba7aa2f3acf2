"""Faults drawn from a seed, some steps after each other: what a soak does to its cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from elasticd_planner.spec.cluster import node_of
from elasticd_planner.value import Value, refuse

from elasticd.chaos.faults import WAYS
from tests.soak.fault_script import Faults

#: How often each kind is drawn, beside the others.
WEIGHTS: dict[str, float] = {
    "kill": 4.0,
    "slow": 2.0,
    "recover": 1.0,
    "freeze": 2.0,
    "cut": 1.5,
    "restart": 1.5,
    "takeover": 1.5,
}
#: Those of a real cluster: the same, and what a modelled one has nothing of.
LIVE_WEIGHTS: dict[str, float] = {
    **WEIGHTS,
    "hang": 3.0,
    "pause": 2.0,
    "raise": 2.0,
    "sever": 1.5,
    "unmet": 1.5,
}
#: Of a modelled job of several modules: the same, and its samples come to have more items, or fewer.
ITEM_WEIGHTS: dict[str, float] = {**WEIGHTS, "shift": 1.5}


class Soaking(Value, frozen=True, kw_only=True):
    """`count` faults from step `first` on, each `least` to `most` steps after the one before it. freeze, cut,
    repair, hang, sever: seconds that a freeze, a cut (and an agent's absence), a (simulated) death, a hang (and
    a pause), and a broken data network last, at most."""

    count: int
    first: int = 10
    least: int = 1
    most: int = 10
    freeze: float = 4.0
    cut: float = 8.0
    repair: float = 30.0
    hang: float = 8.0
    sever: float = 12.0
    weights: Mapping[str, float] = msgspec.field(default_factory=WEIGHTS.copy)

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.least <= self.most or self.first < 1:
            refuse("count and first must be at least 1, and 0 <= least <= most")
        if min(self.freeze, self.cut, self.repair, self.hang, self.sever) < 1:
            refuse("freeze, cut, repair, hang and sever must be at least a second")
        unknown = set(self.weights) - {*LIVE_WEIGHTS, *ITEM_WEIGHTS}
        if unknown or not any(weight > 0 for weight in self.weights.values()):
            refuse(f"weights must be of {', '.join(LIVE_WEIGHTS | ITEM_WEIGHTS)}, one of them positive")


def draw(settings: Soaking, devices: Sequence[str], seed: int) -> Faults:
    """The script: the same for the same settings, devices and seed."""
    rng = np.random.default_rng([seed, 3])
    kinds = sorted(kind for kind, weight in settings.weights.items() if weight > 0)
    shares = np.array([settings.weights[kind] for kind in kinds])
    nodes = sorted({node_of(device) for device in devices})
    script, step = Faults(), settings.first
    for _ in range(settings.count):
        kind = str(rng.choice(kinds, p=shares / shares.sum()))
        if kind == "sever" and len(nodes) < 2:
            kind = "slow"
        script = _named(script, kind, str(rng.choice(devices)), list(rng.permutation(nodes)), settings, rng)
        script = script.at_step(step)
        step += int(rng.integers(settings.least, settings.most + 1))
    return script


def _named(
    script: Faults, kind: str, device: str, nodes: Sequence[str], settings: Soaking, rng: np.random.Generator
) -> Faults:
    share, node = float(rng.uniform()), str(nodes[0])
    how = str(rng.choice(WAYS[kind])) if kind in WAYS else ""
    match kind:
        case "kill":
            return script.kill(device, round(1 + share * (settings.repair - 1), 2))
        case "slow":
            return script.slow(device, round(1.5 + 2.5 * share, 2))
        case "recover":
            return script.recover(device)
        case "freeze":
            return script.freeze(device, round(0.2 + share * (settings.freeze - 0.2), 2))
        case "cut":
            return script.cut(node, _seconds(share, settings.cut))
        case "restart":
            return script.restart(node)
        case "hang":
            return script.hang(device, _seconds(share, settings.hang), how)
        case "pause":
            return script.pause(device, _seconds(share, settings.hang), how)
        case "raise":
            return script.throw(device, how)
        case "sever":
            return script.sever(node, str(nodes[1]), _seconds(share, settings.sever), how)
        case "shift":
            return script.shift(items=round(0.2 + 4 * share, 2))
        case "unmet":
            return script.unmet(node, _seconds(share, settings.cut))
        case _:
            return script.takeover()


def _seconds(share: float, most: float) -> float:
    return round(0.5 + share * (most - 0.5), 2)
