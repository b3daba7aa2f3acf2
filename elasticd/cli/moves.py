"""The state that moves between two answers of `elasticd plan --json`: device by device, in layers and in
bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
from elasticd_planner.placement.state_bytes import PARTS, StateBytes
from elasticd_planner.placement.state_movement import Held, bytes_by_member, holders
from elasticd_planner.spec.mesh import JobPlan, MeshPlan
from elasticd_planner.spec.plan import (
    Edge,
    HeldExperts,
    ModulePlan,
    Pipeline,
    Plan,
    SplitExperts,
    Stage,
    StatePolicy,
    Strategy,
    spanned,
)
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
    experts: tuple[HeldExperts, ...] = ()
    splits: tuple[SplitExperts, ...] = ()
    slowdowns: tuple[int, ...] = ()


class _PipelineView(msgspec.Struct):
    micro_batches: int
    stages: list[_StageView]
    rows: tuple[int, ...] = ()
    serves: tuple[int, ...] = ()


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
    item_state_bytes: dict[str, StateBytes] = {}
    version: int = FILE_VERSION

    def __post_init__(self) -> None:
        check_file_version(self.version)


@dataclass(frozen=True, kw_only=True)
class Answered:
    """A plan read back, and what its state weighs where that is known."""

    plan: Plan
    state_bytes: StateBytes | None  # of the module with the loss
    item_state_bytes: Mapping[str, StateBytes] = field(default_factory=dict)  # of modules of items

    def weighs(self, module: str) -> StateBytes | None:
        """The bytes of a module's state."""
        return self.state_bytes if module == self.plan.loss_module.module else self.item_state_bytes.get(module)


def answered(text: bytes, path: str) -> Answered:
    """The plan of an answer, or of the one job in what `elasticd plan --json` prints. Raises Invalid."""
    try:
        running = decoded_as(dict[str, JobPlan], text)
    except msgspec.MsgspecError:
        running = {}  # the answer to a problem
    if len(running) == 1:
        ((job, plan),) = running.items()
        if isinstance(plan, MeshPlan):
            refuse(
                f"{path}: job {job} trains a loop of its own on a mesh ({plan.mesh_text}), and problems are of "
                "pipelines: 'elasticd why' says why it has that mesh"
            )
        return Answered(plan=plan, state_bytes=None)
    try:
        view = decoded_as(_AnswerView, text)
        plan, items = _plan(view.plan), view.item_state_bytes
        return Answered(plan=plan, state_bytes=view.state_bytes, item_state_bytes=items)
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
                    experts=stage.experts,
                    splits=stage.splits,
                    slowdowns=stage.slowdowns,
                )
                for stage in pipeline.stages
            ),
            micro_batches=pipeline.micro_batches,
            rows=pipeline.rows,
            serves=pipeline.serves,
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
    """The moves of a module between two plans: what devices hold before and after, in parts of `units`; and
    where it is known what layers weigh, the bytes that each member lacks, and would lack if it held nothing."""

    module: str
    view: Plan  # of the module under the new plan
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

    @property
    def devices(self) -> list[str]:
        """Those that hold a part before or after, and those that get state alone."""
        return sorted({*self.before, *self.view.members}, key=_by_name)

    def layers(self, device: str) -> float:
        """Layers' worth of state that a device has to fetch."""
        held = self.after.get(device)
        return lacking(self.before.get(device), held, self.units) if held is not None else 0.0

    def bytes(self, device: str) -> int:
        """Bytes that a device has to fetch, 0 where that is not known."""
        return round((self.lacks or {}).get(device, 0.0))


def differences(old: Answered, new: Answered) -> list[Difference]:
    """Of each module of the new plan what moves. Raises Invalid where the plans are of different models."""
    before, after = (sorted(module.module for module in each.plan.modules) for each in (old, new))
    if before != after:
        refuse(
            f"--diff: the two plans are of models with different modules: {', '.join(before)}, and "
            f"{', '.join(after)}"
        )
    return [_difference(old, new, module.module) for module in new.plan.modules]


def _difference(old: Answered, new: Answered, module: str) -> Difference:
    was, now = old.plan.view(module), new.plan.view(module)
    layers = now.pipelines[0].layers
    if was.pipelines[0].layers != layers:
        of = f" in the module {module}" if len(new.plan.modules) > 1 else ""
        refuse(f"--diff: the two plans are of models with different numbers of layers{of}")
    weighs = new.weighs(module) or old.weighs(module)
    units = weighs.units if weighs is not None else PARTS
    before, after = holders(was, units), holders(now, units)
    difference = Difference(module=module, view=now, before=before, after=after, units=units)
    if weighs is None:
        return difference
    profile = weighs.profile(layers)
    lacks, whole = bytes_by_member(profile, was, now), bytes_by_member(profile, None, now)
    return replace(difference, holds=weighs.holds, lacks=lacks, whole=whole)


def shown(old: Answered, new: Answered) -> Group:
    """A row for each device and module whose layers or part of them change, and what it has to fetch. The rows
    of a device stand together."""
    parts = differences(old, new)
    several, weighed = len(parts) > 1, any(part.lacks is not None for part in parts)
    table = plain_table("device", *(["module"] if several else []), "before", "after", ">fetches\nlayers")
    if weighed:
        table.add_column("\nGiB", justify="right")
    for device in sorted({name for part in parts for name in part.devices}, key=_by_name):
        name = device  # shown once
        for part in parts:
            was, now, size = part.before.get(device), part.after.get(device), part.bytes(device)
            if was == now and not size:
                continue
            words = [_sentence(each, part.units) for each in (was, now)]
            if device in part.view.carriers:
                words[1] = "state alone"
            known = "" if part.lacks is None else f"{size / 2**30:,.2f}"
            cells = [name, *([part.module] if several else []), *words, f"{part.layers(device):.2f}"]
            table.add_row(*cells, *([known] if weighed else []))
            name = ""
    return Group(table, *(_total(part, several=several) for part in parts))


def moves_of(old: Answered, new: Answered) -> dict[str, object]:
    """The same for programs: by device, what it has to fetch in layers, and in bytes where it is known what
    layers weigh; then the sums. Of several modules that of each, too."""
    parts = differences(old, new)
    answer = _summed(parts)
    if len(parts) > 1:
        answer["modules"] = {part.module: _summed([part]) for part in parts}
    return answer


def _summed(parts: Sequence[Difference]) -> dict[str, object]:
    names = sorted({name for part in parts for name in part.devices}, key=_by_name)
    known = all(part.lacks is not None for part in parts)
    devices = {
        name: {
            "layers": sum(part.layers(name) for part in parts),
            "bytes": sum(part.bytes(name) for part in parts) if known else None,
        }
        for name in names
    }
    return {
        "devices": devices,
        "layers": sum(part.layers(name) for part in parts for name in names),
        "bytes": sum(part.moved or 0 for part in parts) if known else None,
    }


def _total(part: Difference, *, several: bool) -> Text:
    every = sum(lacking(None, held, part.units) for held in part.after.values())
    moved = sum(part.layers(name) for name in part.after)
    text = Text.assemble(
        (f"in all{f' of {part.module}' if several else ''} ", "dim"),
        f"{moved:.2f} of {every:.0f} layers that {len(part.after)} devices hold",
    )
    if part.moved is not None and part.whole is not None:
        whole = sum(part.whole.values())
        text.append(f", {part.moved / 2**30:,.2f} of {whole / 2**30:,.2f} GiB ({part.holds})")
    return text


def _by_name(device: str) -> tuple[str, int]:
    node, _, index = device.rpartition("/")
    return node, int(index)


def _sentence(held: Held | None, units: int) -> str:
    if held is None:
        return "idle"
    low, high = 100 * held.low / units, 100 * held.high / units
    part = "" if high - low > 99.99 else f", {low:.4g}-{high:.4g} %"
    return f"layer{'s' if held.layers > 1 else ''} {spanned(held.spans)}{part}"
