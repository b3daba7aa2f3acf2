"""The layouts that `elasticd check` tries: small, and such that every kind of rule shows."""

from __future__ import annotations

from elasticd_planner.plan import ModulePlan, Pipeline, Plan, Stage, Strategy
from elasticd_planner.rules import ModelSpec


def alone(spec: ModelSpec, samples: int) -> Plan:
    """One process."""
    return _plan([_stage(0, len(spec.layers), 0, (1,))], samples)


def layouts(spec: ModelSpec, samples: int) -> dict[str, Plan]:
    """Plans by what is said of them. One pipeline, one micro-batch: its parts can be compared one by one."""
    layers, most = len(spec.layers), widest(spec)
    found: dict[str, Plan] = {}
    if most > 1:
        shares: tuple[int, ...] = (2, 1) if most > 2 else (1, 1)
        found[_tensor(shares)] = _plan([_stage(0, layers, 0, shares)], samples)
    followers = [units.count for units in spec.units if units.follows is not None]
    wide = min(followers, default=most) + 1
    if 2 < wide <= min(most, 8):
        shares = (2 if most > wide else 1, *[1] * (wide - 1))
        found[f"{_tensor(shares)}: wider than the units that follow others"] = _plan(
            [_stage(0, layers, 0, shares)], samples
        )
    if layers > 1:
        second = (1, 1) if most > 1 else (1,)
        said = f"2 stages of 1 and {layers - 1} layers" + (", the second with TP 2" if most > 1 else "")
        found[said] = _plan([_stage(0, 1, 0, (1,)), _stage(1, layers, 1, second)], samples)
    return found


def widest(spec: ModelSpec) -> int:
    """How wide a TP group can be: as many as the coarsest units that cut are; 1 where blocks are whole."""
    blocks = {p.cut.units for kind in spec.kinds for p in kind if p.cut is not None}
    edges = {p.cut.units for p in (*spec.embed, *spec.head) if p.cut is not None}
    leads = [spec.units_of(spec.units_of(kind).follows or kind).count for kind in blocks | edges]
    return min(leads) if blocks else 1


def _tensor(shares: tuple[int, ...]) -> str:
    return f"TP {len(shares)} with shares {':'.join(map(str, shares))}"


def _stage(start: int, stop: int, first: int, shares: tuple[int, ...]) -> Stage:
    devices = tuple(f"check/{first + i}" for i in range(len(shares)))
    return Stage(start=start, stop=stop, devices=devices, shares=shares)


def _plan(stages: list[Stage], samples: int) -> Plan:
    pipeline = Pipeline(stages=tuple(stages), micro_batches=1)
    strategy = Strategy(modules=(ModulePlan(module="model", pipelines=(pipeline,)),))
    return Plan(number=1, strategies=(strategy,), micro_batch=samples, global_batch=samples)
