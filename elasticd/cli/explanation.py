"""`elasticd plan --explain`: what goes over links in a step of a plan, and in the switch to it from another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from elasticd_migration.explained_switch import ExplainedSwitch, explain_switch
from elasticd_migration.reshard import Lost
from elasticd_planner.batching.explained_keys import key_flows
from elasticd_planner.cost.expert_messages import expert_flows
from elasticd_planner.layout.channels import MOST, channels_of_modules
from elasticd_planner.layout.explained_plan import (
    BETWEEN,
    Communications,
    ModuleSizes,
    PlanOperation,
    Purpose,
    explain_modules,
    explain_step,
)
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.layout.link_traffic import Flow, Level, levels_of
from elasticd_planner.layout.surviving_layouts import SurvivingLayouts
from elasticd_planner.problem_files.convert import cluster_of
from elasticd_planner.problem_files.file_format import TableProblem
from elasticd_planner.problem_files.shapes import Shapes, shapes_of, sizes_of
from elasticd_planner.readable import readable
from elasticd_planner.spec.batch import BatchPlan
from elasticd_planner.spec.cluster import Cluster
from elasticd_planner.spec.item_batch import ItemBatch
from elasticd_planner.spec.model import ModelSpec, item_size
from elasticd_planner.spec.plan import Plan
from elasticd_planner.value import FILE_VERSION, Invalid, Value, check_file_version, refuse
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from elasticd.cli.options import plain_table
from elasticd.cli.picture import named
from elasticd.cli.profile import described
from elasticd.codec.decoding import decoded_as

#: Rows that are shown for each purpose; the rest is counted.
SHOWN = 6
#: Nodes whose devices are named in a row.
SPANS = 4

_WORDS: Mapping[str, str] = {
    "send": "send",
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
}


class Explained(Value, frozen=True, kw_only=True):
    """The traffic over links with a plan. `lost`: why there is no switch from the current one."""

    plan: Plan
    cluster: Cluster
    shapes: dict[str, Shapes]  # of each module
    step: dict[str, Communications]  # of each module, and `BETWEEN` several
    switch: ExplainedSwitch | None = None
    lost: str = ""
    communicators: dict[str, int] = msgspec.field(default_factory=dict)  # of each device
    batch: bool = False  # the sequences of the step are known

    @property
    def exact(self) -> bool:
        """Parameters are the model's own; else tensors stand for bytes."""
        return all(shapes.exact for shapes in self.shapes.values())


class _ProfileView(msgspec.Struct):
    spec: ModelSpec | None = None
    specs: dict[str, ModelSpec] = {}  # of a model of several modules
    version: int = FILE_VERSION

    def __post_init__(self) -> None:
        check_file_version(self.version)
        if self.spec is None and not self.specs:
            raise ValueError("it has neither `spec` nor `specs`")


def model_of(given: str) -> dict[str, ModelSpec]:
    """The model of a profile that `elasticd profile` wrote, or of FILE.py:NAME, by module. Raises
    ClickException."""
    path = Path(given)
    if not path.is_file() and not given.endswith(".json"):
        return described(given, "elasticd plan --model FILE.py:NAME")
    try:
        view = decoded_as(_ProfileView, path.read_bytes())
        return view.specs if view.spec is None else {"model": view.spec}
    except OSError as error:
        raise click.ClickException(f"cannot read {given}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise click.ClickException(
            f"{given} has no model: name a profile that `elasticd profile` of this release wrote, or "
            f"FILE.py:NAME as for that command ({error})"
        ) from None


def explained(
    problem: TableProblem,
    plan: Plan,
    current: Plan | None,
    model: Mapping[str, ModelSpec] | None,
    batch: BatchPlan | None = None,
    items: Mapping[str, ItemBatch] | None = None,
) -> Explained:
    """The traffic over links in a step of a problem's plan, and in the switch from the current one.

    Args:
        problem: the problem.
        plan: its plan.
        current: the plan that runs.
        model: its own parameters, by module; None: those of the problem's bytes.
        batch: the sequences of a step, which lanes may share; None: not known.
        items: those of a step, of each module of items.

    Raises:
        Invalid: the problem does not say enough, or the model cannot be cut so.
    """
    if model is None and any(each is not None and _places_experts(each) for each in (plan, current)):
        refuse("the plan places experts, and the problem says bytes alone: name the model with --model")
    shapes, cluster = shapes_of(problem, model), cluster_of(problem)
    specs = {name: each.spec for name, each in shapes.items()}
    layouts = Layouts(specs if problem.modules else specs[problem.module], plan)
    try:
        step = _step(problem, layouts, shapes, cluster, batch, items)
    except Invalid as error:
        named = ", ".join(spec.name for spec in specs.values())
        refuse(f"the plan is none for the model {named}: {error}")
    communicators = {device: len(channels_of_modules(layouts, device, cuts=True)) for device in plan.members}
    explanation = Explained(
        plan=plan,
        cluster=cluster,
        shapes=shapes,
        step=step,
        communicators=communicators,
        batch=batch is not None,
    )
    if current is None:
        return explanation
    alive = {device.name for device in cluster.devices if problem.rates.get(device.name, 1.0) is not None}
    try:
        gone = [name for name in current.members if name not in alive]
        before = SurvivingLayouts(Layouts(layouts.specs, current), gone=gone)
        switch = explain_switch(before, layouts, sizes_of(shapes, layouts), cluster)
    except Lost as error:
        return msgspec.structs.replace(explanation, lost=str(error))
    return msgspec.structs.replace(explanation, switch=switch)


def _step(
    problem: TableProblem,
    layouts: Layouts,
    shapes: Mapping[str, Shapes],
    cluster: Cluster,
    batch: BatchPlan | None,
    items: Mapping[str, ItemBatch] | None,
) -> dict[str, Communications]:
    """The communications of a step over links, by module."""
    plan, own = layouts.plan, shapes[problem.module]
    tokens = round((problem.batch.sequence or 0) * plan.micro_batch)
    if problem.modules:
        outputs = {entry.name: entry.model.times.boundary_bytes for entry in problem.modules}
        sizes = {
            name: ModuleSizes(
                tokens=0 if name in outputs else tokens,
                boundary=each.boundary,
                output=outputs.get(name, 0.0),
                gradients=each.gradients,
            )
            for name, each in shapes.items()
        }
        return explain_modules(layouts, cluster, sizes, items or {})
    step = explain_step(
        layouts,
        cluster,
        tokens=tokens,
        boundary=own.boundary,
        gradients=own.gradients,
        keys=key_flows(layouts, batch) if batch is not None and own.exact else (),
        experts=_expert_flows(problem, plan, tokens, own),
    )
    return {problem.module: step}


def _expert_flows(
    problem: TableProblem, plan: Plan, tokens: int, shapes: Shapes
) -> Iterable[tuple[Purpose, Flow]]:
    """Rows that go to experts of other lanes, where the problem says how many experts a row has."""
    times = problem.model.times
    row_bytes = shapes.spec.width * (item := item_size(shapes.spec.dtype))
    if times is None or times.experts is None or not row_bytes:
        return ()
    return expert_flows(plan, times.experts, tokens, row_bytes, item)


def _places_experts(plan: Plan) -> bool:
    return any(stage.experts for _, _, stage in plan.walk())


def _shares_experts(plan: Plan) -> bool:
    return any(stage.shared_blocks for pipeline in plan.loss_view.pipelines for stage in pipeline.stages)


def _has_lanes(plan: Plan) -> bool:
    return any(stage.lanes for pipeline in plan.loss_view.pipelines for stage in pipeline.stages)


def explanation_of(found: Explained) -> dict[str, Any]:
    """The same for programs."""
    answer: dict[str, Any] = {
        "parameters": "of the model" if found.exact else "of the problem's bytes",
        "step": {name: _listed(step) for name, step in found.step.items()},
        "communicators": found.communicators,
    }
    if len(found.step) == 1:
        (answer["step"],) = answer["step"].values()
    if found.lost:
        answer["switch"] = {"lost": found.lost}
    elif found.switch is not None:
        switch = found.switch
        figures = {name: getattr(switch, name) for name in ("moved", "least", "whole", "seconds")}
        answer["switch"] = figures | _listed(switch.communications)
    return answer


def _listed(found: Communications) -> dict[str, Any]:
    return {
        "purposes": {
            purpose: {"bytes": found.bytes(purpose), "seconds": found.seconds.get(purpose)}
            for purpose in found.purposes
        },
        "operations": msgspec.to_builtins(found.operations),
    }


# -- for people ------------------------------------------------------------------------------------------------


def shown(found: Explained) -> Group:
    """A table for a step, and one for the switch."""
    parts: list[RenderableType] = []
    for name, step in found.step.items():
        of = "" if len(found.step) == 1 else f", {name}" if name == BETWEEN else f", module {name}"
        parts += [Text(f"\none step{of}", style="bold"), _table(step, found.cluster)]
        if not step.operations:
            parts[-1] = Text(_nothing(name, several=len(found.step) > 1))
    if found.lost:
        parts += [Text("\nswitch", style="bold"), Text(found.lost)]
    elif found.switch is not None:
        switch = found.switch
        parts.append(
            Text.assemble(
                ("\nswitch from the current plan ", "bold"),
                f"{readable(switch.moved)} move, {readable(switch.least)} at least; ",
                f"the whole state is {readable(switch.whole)}; {_seconds(switch.seconds)} s on the busiest ",
                "link, where the devices of a node share its link to others",
            )
        )
        if switch.moved:
            parts.append(_table(switch.communications, found.cluster))
    return Group(*parts, *(Text(line, style="dim") for line in _notes(found)))


def _nothing(name: str, *, several: bool) -> str:
    if name == BETWEEN:
        return "nothing goes over links: each item is made on the devices that need it"
    copies = "nothing goes over links: each device has a copy of the model to itself"
    return (
        copies
        if not several
        else "nothing goes over links: each device has all of the module, or it is not trained"
    )


def _notes(found: Explained) -> Iterator[str]:
    yield (
        "\n6 x: six that differ in their devices alone; the first one's are shown. Seconds are those of the "
        "busiest device, one operation after the other; purposes overlap. Not listed: what hosts tell each "
        "other (votes, headers), and logits that a head gathers."
    )
    if most := max(found.communicators.values(), default=0):
        fullest = [device for device, count in found.communicators.items() if count == most]
        yield f"A device has {MOST} communicators at most; {fullest[0]} has {most}, and none has more."
    if _has_lanes(found.plan) and not (found.batch and found.exact):
        yield (
            "A stage's lanes have one communicator for keys of sequences that they share. What these weigh is "
            "not listed: name the lengths of a step with --batch, and the model with --model."
        )
    if _shares_experts(found.plan):
        yield (
            "Rows go to experts of other lanes in the mean of all choices, where experts have equal rows."
            if any("expert rows" in step.purposes for step in found.step.values())
            else "Lanes share experts. What goes to those of other lanes is not listed: give the problem "
            "model.times.experts, as `elasticd profile` does."
        )
    if not all(shapes.spec.width for shapes in found.shapes.values()):
        yield (
            "Activations are not listed: the problem does not say what they weigh. Give it "
            "model.times.boundary_bytes, or name the model with --model."
        )
    if not found.exact:
        yield (
            "Parameters are one tensor for all that is cut in a section, and one for the rest. Name the model "
            "with --model to have its own."
        )


def _table(found: Communications, cluster: Cluster) -> Table:
    """For each purpose its sum, then what is alike in a row, the most bytes first."""
    levels = [level for level in levels_of(cluster) if level in found.bytes()]
    heads = (f">{level.replace(' ', chr(10), 1)}" for level in levels)
    table = plain_table("", ">\ntensors", *heads, ">\nseconds")
    for column in table.columns[1:]:
        column.no_wrap = True
    for purpose in found.purposes:
        seconds = Text(_seconds(found.seconds.get(purpose)), style="bold")
        table.add_row(Text(purpose, style="bold"), "", *_cells(found.bytes(purpose), levels), seconds)
        rows = _alike([operation for operation in found.operations if operation.purpose == purpose])
        for alike in rows[:SHOWN]:
            table.add_row(*_row(alike, levels))
        if len(rows) > SHOWN:
            rest = [operation for alike in rows[SHOWN:] for operation in alike]
            table.add_row(f" and {len(rest)} more", "", *_cells(_summed(rest), levels), "")
    table.add_row(Text("in all", style="bold"), "", *_cells(found.bytes(), levels), "")
    return table


def _alike(operations: Sequence[PlanOperation]) -> list[list[PlanOperation]]:
    """Operations of one kind that differ in their devices alone; those with the most bytes first."""
    groups: dict[object, list[PlanOperation]] = defaultdict(list)
    for each in operations:
        key = (
            each.operation,
            len(each.devices),
            each.times,
            each.size,
            *sorted(each.bytes.items()),
            each.seconds,
        )
        groups[key].append(each)
    return sorted(groups.values(), key=lambda alike: -sum(_summed(alike).values()))


def _row(alike: Sequence[PlanOperation], levels: Sequence[Level]) -> list[RenderableType]:
    one = alike[0]
    count = f"{len(alike)} x " if len(alike) > 1 else ""
    first, rest = one.devices[0], one.devices[1:]
    devices = f"{first} > {_some(rest)}" if one.operation == "send" else _some(one.devices)
    return [
        Padding(f"{count}{_WORDS[one.operation]} {devices}", (0, 0, 0, 1)),
        f"{one.times} x {readable(one.size / one.times)}",
        *_cells(_summed(alike), levels),
        _seconds(one.seconds),
    ]


def _some(devices: Sequence[str]) -> str:
    """Devices by name; of many nodes the first ones, and how many devices there are."""
    names = named(devices, {})
    parts = names.split(" + ")
    return names if len(parts) <= SPANS else f"{' + '.join(parts[: SPANS - 1])} + ... ({len(devices)} devices)"


def _summed(operations: Sequence[PlanOperation]) -> dict[Level, int]:
    total: dict[Level, int] = defaultdict(int)
    for operation in operations:
        for level, size in operation.bytes.items():
            total[level] += size
    return total


def _cells(by_level: Mapping[Level, int], levels: Sequence[Level]) -> list[str]:
    return [readable(by_level[level]) if by_level.get(level) else "" for level in levels]


def _seconds(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.2f}" if value >= 10 else f"{value:.3g}"
