"""What moves between two answers of `elasticd plan --json`: device by device, in layers and in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from elasticd_planner.placement import strategy
from elasticd_planner.plan import Pipeline, Plan, Stage, StatePolicy
from elasticd_planner.value import Invalid, refuse
from rich.console import Group
from rich.table import Table
from rich.text import Text

#: Shares are read back as parts of this many.
PARTS = 1 << 20


class _StageView(msgspec.Struct):
    devices: list[str]
    shares: list[float]
    layers: tuple[int, int]
    recompute: bool = False


class _PipelineView(msgspec.Struct):
    micro_batches: int
    stages: list[_StageView]


class _ModuleView(msgspec.Struct):
    module: str
    pipelines: list[_PipelineView]


class _PlanView(msgspec.Struct):
    modules: list[_ModuleView]
    idle: list[str]
    global_batch: int
    micro_batch: int
    state: StatePolicy = StatePolicy()


class StateBytes(msgspec.Struct, frozen=True):
    """Bytes that move with one whole layer, the embedding and the head. `holds` says of what."""

    layer: float
    embedding: float = 0.0
    head: float = 0.0
    holds: str = "parameters and optimizer state"


class _AnswerView(msgspec.Struct):
    plan: _PlanView
    state_bytes: StateBytes | None = None


@dataclass(frozen=True, kw_only=True)
class Answered:
    """A plan read back, and what its state weighs where that is known."""

    plan: Plan
    state_bytes: StateBytes | None


def answered(text: bytes, path: str) -> Answered:
    """The plan of an answer, or of the one job in what `elasticd plan --json` prints. Raises Invalid."""
    try:
        running = msgspec.json.decode(text, type=dict[str, Plan])
        if len(running) == 1:
            return Answered(plan=next(iter(running.values())), state_bytes=None)
    except msgspec.MsgspecError:
        pass  # the answer to a problem
    try:
        view = msgspec.json.decode(text, type=_AnswerView)
        return Answered(plan=_plan(view.plan), state_bytes=view.state_bytes)
    except (ValueError, IndexError) as error:
        what = "of a problem, or with one running job"
        raise Invalid(f"{path} is no answer of elasticd plan --json ({what}): {error}") from None


def _plan(view: _PlanView) -> Plan:
    module = view.modules[0]
    pipelines = tuple(
        Pipeline(
            stages=tuple(
                Stage(
                    start=stage.layers[0],
                    stop=stage.layers[1],
                    devices=tuple(stage.devices),
                    shares=tuple(max(1, round(share * PARTS)) for share in stage.shares),
                    recompute=stage.recompute,
                )
                for stage in pipeline.stages
            ),
            micro_batches=pipeline.micro_batches,
        )
        for pipeline in module.pipelines
    )
    return Plan(
        number=0,
        strategies=(strategy(pipelines, module.module),),
        micro_batch=view.micro_batch,
        global_batch=view.global_batch,
        state=view.state,
        idle=tuple(view.idle),
    )


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a device holds: the part [low, high) of each of the layers [start, stop), and of embedding and head
    where it has them."""

    start: int
    stop: int
    low: float
    high: float
    embed: bool = False
    head: bool = False


def held(plan: Plan) -> dict[str, Held]:
    """By device."""
    found = {}
    layers = plan.modules[0].pipelines[0].layers
    for device, place in plan.places.items():
        stage = plan.stage(place)
        low = sum(stage.shares[: place.position]) / sum(stage.shares)
        found[device] = Held(
            start=stage.start,
            stop=stage.stop,
            low=low,
            high=low + stage.fraction(place.position),
            embed=stage.start == 0,
            head=stage.stop == layers,
        )
    return found


def lacking(old: Held | None, new: Held) -> float:
    """Layers' worth of state that a holder of `new` lacks when it holds `old`."""
    size = (new.stop - new.start) * (new.high - new.low)
    if old is None:
        return size
    return size - max(0, min(old.stop, new.stop) - max(old.start, new.start)) * _common(old, new)


def lacking_bytes(old: Held | None, new: Held, weighs: StateBytes) -> float:
    """The same in bytes, embedding and head included."""
    total = lacking(old, new) * weighs.layer
    for had, has, size in (
        (old is not None and old.embed, new.embed, weighs.embedding),
        (old is not None and old.head, new.head, weighs.head),
    ):
        if has:
            kept = _common(old, new) if had and old is not None else 0.0
            total += (new.high - new.low - kept) * size
    return total


def _common(old: Held, new: Held) -> float:
    return max(0.0, min(old.high, new.high) - max(old.low, new.low))


def difference(old: Answered, new: Answered) -> Group:
    """A row for each device whose layers or part of them change, and what it has to fetch."""
    if old.plan.modules[0].pipelines[0].layers != new.plan.modules[0].pipelines[0].layers:
        refuse("--diff: the two plans are of models with different numbers of layers")
    before, after = held(old.plan), held(new.plan)
    weighs = new.state_bytes or old.state_bytes
    table = Table(box=None, header_style="dim", pad_edge=False)
    for column in ("device", "before", "after"):
        table.add_column(column)
    table.add_column("fetches\nlayers", justify="right")
    if weighs is not None:
        table.add_column("\nGiB", justify="right")
    for device in sorted({*before, *after}, key=_by_name):
        was, now = before.get(device), after.get(device)
        if was != now:
            table.add_row(device, _words(was), _words(now), *_fetched(was, now, weighs))
    whole = sum(lacking(None, h) for h in after.values())
    moved = sum(lacking(before.get(name), h) for name, h in after.items())
    parts: list[Any] = [table]
    text = Text.assemble(
        ("in all ", "dim"), f"{moved:.2f} of {whole:.0f} layers that {len(after)} devices hold"
    )
    if weighs is not None:
        size = sum(lacking_bytes(before.get(name), h, weighs) for name, h in after.items())
        every = sum(lacking_bytes(None, h, weighs) for h in after.values())
        text.append(f", {size / 2**30:,.2f} of {every / 2**30:,.2f} GiB ({weighs.holds})")
    parts.append(text)
    return Group(*parts)


def _fetched(was: Held | None, now: Held | None, weighs: StateBytes | None) -> list[str]:
    layers = lacking(was, now) if now is not None else 0.0
    cells = [f"{layers:.2f}"]
    if weighs is not None:
        size = lacking_bytes(was, now, weighs) if now is not None else 0.0
        cells.append(f"{size / 2**30:,.2f}")
    return cells


def _by_name(device: str) -> tuple[str, int]:
    node, _, index = device.rpartition("/")
    return node, int(index)


def _words(held: Held | None) -> str:
    if held is None:
        return "idle"
    part = "" if held.high - held.low > 0.9999 else f", {100 * held.low:.4g}-{100 * held.high:.4g} %"
    span = f"layer {held.start}" if held.stop - held.start == 1 else f"layers {held.start}-{held.stop - 1}"
    return f"{span}{part}"
