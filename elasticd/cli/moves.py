"""What moves between two answers of `elasticd plan --json`: device by device, in layers and in bytes."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from elasticd_planner.placement.state_bytes import PARTS, StateBytes
from elasticd_planner.placement.state_movement import Held, bytes_by_member, holders
from elasticd_planner.spec.plan import Edge, ModulePlan, Pipeline, Plan, Stage, StatePolicy, Strategy, spanned
from elasticd_planner.value import FILE_VERSION, Invalid, check_file_version, refuse
from rich.console import Group
from rich.text import Text

from elasticd.cli.options import plain_table
from elasticd.codec.decoding import decoded_as


class _StageView(msgspec.Struct):
    devices: list[str]
    shares: list[float]
    layers: tuple[int, int]
    recompute: bool = False
    sequence_parallel: bool = False
    later: tuple[tuple[int, int], ...] = ()
    lanes: tuple[int, ...] = ()


class _PipelineView(msgspec.Struct):
    micro_batches: int
    stages: list[_StageView]
    rows: tuple[int, ...] = ()


class _ModuleView(msgspec.Struct):
    module: str
    pipelines: list[_PipelineView]
    items: str = ""
    ahead: int = 1
    lead: int = 0
    trained: bool = True


class _PlanView(msgspec.Struct):
    modules: list[_ModuleView]
    idle: list[str]
    global_batch: int
    micro_batch: int
    state: StatePolicy = StatePolicy()
    carriers: list[str] = []


class _AnswerView(msgspec.Struct):
    plan: _PlanView
    state_bytes: StateBytes | None = None
    version: int = FILE_VERSION

    def __post_init__(self) -> None:
        check_file_version(self.version)


@dataclass(frozen=True, kw_only=True)
class Answered:
    """A plan read back, and what its state weighs where that is known."""

    plan: Plan
    state_bytes: StateBytes | None


def answered(text: bytes, path: str) -> Answered:
    """The plan of an answer, or of the one job in what `elasticd plan --json` prints. Raises Invalid."""
    try:
        running = decoded_as(dict[str, Plan], text)
        if len(running) == 1:
            return Answered(plan=next(iter(running.values())), state_bytes=None)
    except msgspec.MsgspecError:
        pass  # the answer to a problem
    try:
        view = decoded_as(_AnswerView, text)
        return Answered(plan=_plan(view.plan), state_bytes=view.state_bytes)
    except (ValueError, IndexError) as error:
        what = "of a problem, or with one running job"
        raise Invalid(f"{path} is no answer of elasticd plan --json ({what}): {error}") from None


def _plan(view: _PlanView) -> Plan:
    modules = tuple(map(_module, view.modules))
    loss = [module.module for module in modules if not module.items]
    edges = tuple(Edge(source=module.module, target=loss[0]) for module in modules if module.items)
    return Plan(
        number=0,
        strategies=(Strategy(modules=modules, edges=edges),),
        micro_batch=view.micro_batch,
        global_batch=view.global_batch,
        state=view.state,
        carriers=tuple(view.carriers),
        idle=tuple(view.idle),
    )


def _module(module: _ModuleView) -> ModulePlan:
    pipelines = tuple(
        Pipeline(
            stages=tuple(
                Stage(
                    start=stage.layers[0],
                    stop=stage.layers[1],
                    devices=tuple(stage.devices),
                    shares=tuple(max(1, round(share * PARTS)) for share in stage.shares),
                    recompute=stage.recompute,
                    sequence_parallel=stage.sequence_parallel,
                    later=stage.later,
                    lanes=stage.lanes,
                )
                for stage in pipeline.stages
            ),
            micro_batches=pipeline.micro_batches,
            rows=pipeline.rows,
        )
        for pipeline in module.pipelines
    )
    return ModulePlan(
        module=module.module,
        pipelines=pipelines,
        trainable=module.trained,
        items=module.items,
        ahead=module.ahead,
        lead=module.lead,
    )


def lacking(old: Held | None, new: Held, units: int) -> float:
    """Layers' worth of state that a holder of `new` lacks when it holds `old`."""
    size = new.layers * (new.high - new.low)
    if old is not None:
        layers = old.common(new.start, new.stop, new.later)
        size -= layers * max(0, min(old.high, new.high) - max(old.low, new.low))
    return size / units


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What moves between two plans: what devices hold before and after, in parts of `units`; and where it is
    known what layers weigh, the bytes that each member lacks, and would lack if it held nothing."""

    before: dict[str, Held]
    after: dict[str, Held]
    units: int
    holds: str = ""
    lacks: dict[str, float] | None = None
    whole: dict[str, float] | None = None

    @property
    def moved(self) -> int | None:
        """Bytes in all."""
        return round(sum(self.lacks.values())) if self.lacks is not None else None


def difference(old: Answered, new: Answered) -> Difference:
    """Raises Invalid where the plans are of different models."""
    layers = new.plan.pipelines[0].layers
    if old.plan.pipelines[0].layers != layers:
        refuse("--diff: the two plans are of models with different numbers of layers")
    weighs = new.state_bytes or old.state_bytes
    units = weighs.units if weighs is not None else PARTS
    before, after = holders(old.plan, units), holders(new.plan, units)
    if weighs is None:
        return Difference(before=before, after=after, units=units)
    profile = weighs.profile(layers)
    return Difference(
        before=before,
        after=after,
        units=units,
        holds=weighs.holds,
        lacks=bytes_by_member(profile, old.plan, new.plan),
        whole=bytes_by_member(profile, None, new.plan),
    )


def shown(old: Answered, new: Answered) -> Group:
    """A row for each device whose layers or part of them change, and what it has to fetch."""
    found = difference(old, new)
    table = plain_table("device", "before", "after", ">fetches\nlayers")
    if found.lacks is not None:
        table.add_column("\nGiB", justify="right")
    for device in sorted({*found.before, *new.plan.members}, key=_by_name):
        was, now = found.before.get(device), found.after.get(device)
        size = (found.lacks or {}).get(device, 0.0)
        if was != now or round(size):
            layers = lacking(was, now, found.units) if now is not None else 0.0
            words = [_words(each, found.units) for each in (was, now)]
            if device in new.plan.carriers:
                words[1] = "state alone"
            cells = [f"{size / 2**30:,.2f}"] if found.lacks is not None else []
            table.add_row(device, *words, f"{layers:.2f}", *cells)
    return Group(table, _total(found))


def moves_of(old: Answered, new: Answered) -> dict[str, object]:
    """The same for programs: by device, what it has to fetch in layers, and in bytes where it is known what
    layers weigh; then the sums."""
    found = difference(old, new)
    layers = {name: lacking(found.before.get(name), held, found.units) for name, held in found.after.items()}
    lacks = found.lacks or {}
    devices = {
        name: {"layers": layers.get(name, 0.0), "bytes": round(lacks.get(name, 0.0)) if lacks else None}
        for name in sorted({*found.before, *new.plan.members}, key=_by_name)
    }
    return {"devices": devices, "layers": sum(layers.values()), "bytes": found.moved}


def _total(found: Difference) -> Text:
    every = sum(lacking(None, held, found.units) for held in found.after.values())
    moved = sum(lacking(found.before.get(name), held, found.units) for name, held in found.after.items())
    text = Text.assemble(
        ("in all ", "dim"), f"{moved:.2f} of {every:.0f} layers that {len(found.after)} devices hold"
    )
    if found.moved is not None and found.whole is not None:
        whole = sum(found.whole.values())
        text.append(f", {found.moved / 2**30:,.2f} of {whole / 2**30:,.2f} GiB ({found.holds})")
    return text


def _by_name(device: str) -> tuple[str, int]:
    node, _, index = device.rpartition("/")
    return node, int(index)


def _words(held: Held | None, units: int) -> str:
    if held is None:
        return "idle"
    low, high = 100 * held.low / units, 100 * held.high / units
    part = "" if high - low > 99.99 else f", {low:.4g}-{high:.4g} %"
    return f"layer{'s' if held.layers > 1 else ''} {spanned(held.spans)}{part}"
