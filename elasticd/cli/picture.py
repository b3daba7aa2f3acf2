"""A plan as a picture in the terminal: pipelines down, stages across, in each cell devices, layers and load.

Each lane of a pipeline has a row of its own. Where the stages do not fit beside each other each stage has a
line.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from elasticd_planner.spec.mesh import JobPlan, MeshPlan
from elasticd_planner.spec.plan import Plan, Stage
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

#: Cells of a load bar.
BAR = 5
#: Lanes that are shown; the rest is counted. A pipeline of one lane counts as a lane.
SHOWN = 32

#: By lane, the time that each stage spends on one micro-batch, in whatever unit the plan was made.
StageTimes = Sequence[Sequence[float]]

#: By lane and stage, its busy time over that of the busiest; None where times are not known.
Loads = Sequence[Sequence[float | None]]


def picture(plan: JobPlan, rates: Mapping[str, float], times: StageTimes | None = None) -> RenderableType:
    """The plan's pipelines and what stands idle; of several modules those of each, and where each device is;
    of a plan of a mesh the lanes and their samples.
    With `times`, each stage of a plan of one module shows how busy it is of the time that the busiest one takes
    for its micro-batches."""
    if isinstance(plan, MeshPlan):
        return _mesh_picture(plan, rates)
    return module_picture(plan, rates) if len(plan.modules) > 1 else _picture(plan, rates, _loads(plan, times))


def _mesh_picture(plan: MeshPlan, rates: Mapping[str, float]) -> RenderableType:
    """A line for each lane: its place on the mesh, its devices, and its samples of a step."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("lane", plan.mesh_text, "devices"):
        table.add_column(heading)
    table.add_column("samples a step", justify="right")
    for lane, (devices, samples) in enumerate(zip(plan.lanes, plan.samples, strict=True)):
        if lane < SHOWN:
            place = ", ".join(map(str, plan.coordinates[devices[0]]))
            table.add_row(str(lane), place, named(devices, rates), str(samples))
    parts: list[RenderableType] = [table]
    if len(plan.lanes) > SHOWN:
        parts.append(Text(f"and {len(plan.lanes) - SHOWN} more lanes"))
    if plan.idle:
        parts.append(Text.assemble(("idle ", "dim"), named(plan.idle, rates)))
    return Group(*parts)


def _picture(plan: Plan, rates: Mapping[str, float], loads: Loads) -> RenderableType:
    """The picture of a plan of one module, or of a view."""
    parts: list[RenderableType] = [_Pipelines(plan, rates, loads)]
    more = len(plan.by_lane) - SHOWN
    if more > 0:
        parts.append(Text(f"and {more} more {'lanes' if plan.by_lane != plan.pipelines else 'pipelines'}"))
    state = plan.state
    if state.zero:
        count = state.replicas or 1
        parts.append(
            Text.assemble(
                ("state ", "dim"), f"ZeRO {state.zero}, {count} replica{'s' if count > 1 else ''} of each piece"
            )
        )
    if plan.carriers:
        parts.append(Text.assemble(("state alone ", "dim"), named(plan.carriers, rates)))
    if plan.idle:
        parts.append(Text.assemble(("idle ", "dim"), named(plan.idle, rates)))
    return Group(*parts)


def module_picture(
    plan: Plan, rates: Mapping[str, float], busy: Mapping[str, Sequence[Sequence[float]]] | None = None
) -> RenderableType:
    """The modules of a plan below each other, then the places of each device together.

    Args:
        plan: of several modules.
        rates: slowdown of each device that has one.
        busy: seconds that each stage computes in a step, by module and lane; with it stages and devices show
            how busy they are of the time that the busiest device computes.
    """
    parts: list[RenderableType] = []
    by_device = _by_device(plan, busy)
    most = max(by_device.values(), default=0.0)
    for module in plan.modules:
        view = plan.view(module.module)
        head = Text.assemble(("module ", "dim"), (module.module, "bold"))
        if module.items:
            head.append(
                f"   takes {module.items}, at most {module.ahead} micro-batches ahead, lead {module.lead}"
            )
        loads: Loads = _loads(view, None)
        if busy is not None and most:
            loads = [[seconds / most for seconds in row] for row in busy[module.module]]
        parts += [head, _picture(view, rates, loads)]
    parts.append(Text("devices", style="dim"))
    shown = [device for device in plan.members if device not in plan.carriers][:SHOWN]
    for device in shown:
        line = Text.assemble(f"{named([device], rates)}  ", "; ".join(_places(plan, device)))
        parts.append(Text.assemble(line, "  ", bar(by_device[device] / most)) if most else line)
    if (more := len(plan.members) - len(plan.carriers) - len(shown)) > 0:
        parts.append(Text(f"and {more} more devices"))
    if plan.idle:
        parts.append(Text.assemble(("idle ", "dim"), named(plan.idle, rates)))
    return Group(*parts)


def _by_device(plan: Plan, busy: Mapping[str, Sequence[Sequence[float]]] | None) -> dict[str, float]:
    """Seconds of each device, over all modules."""
    totals: dict[str, float] = defaultdict(float)
    for module in plan.modules if busy is not None else ():
        for lane, row in zip(module.by_lane, (busy or {})[module.module], strict=True):
            for stage, seconds in zip(lane.stages, row, strict=True):
                for device in stage.devices:
                    totals[device] += seconds
    return totals


def _places(plan: Plan, device: str) -> Iterator[str]:
    """The places of a device in all modules."""
    for module in plan.modules:
        for number, lane in enumerate(module.by_lane):
            for index, stage in enumerate(lane.stages):
                if device in stage.devices:
                    width = f", TP{len(stage.devices)}" if len(stage.devices) > 1 else ""
                    part = ("weight " if module.items else "micro-batches ") + str(lane.micro_batches)
                    yield f"{module.module} lane {number}, stage {index}: layers {stage.named}{width}, {part}"


def _loads(plan: Plan, times: StageTimes | None) -> Loads:
    if times is None:
        return [[None] * len(lane.stages) for lane in plan.by_lane]
    load = busy(plan, times)
    most = max(seconds for row in load for seconds in row)
    return [[seconds / most if most else None for seconds in row] for row in load]


def busy(plan: Plan, times: StageTimes) -> list[list[float]]:
    """By lane and stage, the time that it takes for all its micro-batches."""
    return [
        [seconds * lane.micro_batches for seconds in row] for lane, row in zip(plan.by_lane, times, strict=True)
    ]


def lane_names(plan: Plan) -> list[str]:
    """The lanes as people name them: "0" of pipeline 0 with one lane, "0, lane 1" where it has several."""
    return [
        f"{index}, lane {lane}" if pipeline.rows else str(index)
        for index, pipeline in enumerate(plan.pipelines)
        for lane in range(len(pipeline.micro_batches_by_lane))
    ]


class _Pipelines:
    """Stages beside each other where the terminal is wide enough, else below each other."""

    def __init__(self, plan: Plan, rates: Mapping[str, float], loads: Loads) -> None:
        self._items = plan.module.items  # whose lanes have weights
        self._shown = list(zip(lane_names(plan), plan.by_lane, strict=True))[:SHOWN]
        self._rates, self._loads = rates, loads

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        across = self._across()
        fits = Measurement.get(console, options.update(width=10_000), across).maximum <= options.max_width
        yield across if fits else self._down()

    def _across(self) -> Table:
        table = Table(box=SIMPLE_HEAD, show_lines=True, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("lane" if self._items else "pipeline", no_wrap=True)
        counts = f"weight\nin {self._items}" if self._items else "micro-\nbatches"
        table.add_column(counts, justify="right", no_wrap=True)
        for index in range(max(len(lane.stages) for _, lane in self._shown)):
            table.add_column(f"stage {index}", no_wrap=True)
        for (name, lane), row in zip(self._shown, self._loads, strict=False):
            cells = []
            for stage, load in zip(lane.stages, row, strict=True):
                loads = [bar(load)] if load is not None else []
                cells.append(Text("\n").join([layers(stage), *members(stage, self._rates), *loads]))
            table.add_row(name, str(lane.micro_batches), *cells)
        return table

    def _down(self) -> Group:
        stages = [stage for _, lane in self._shown for stage in lane.stages]
        widest = max(layers(stage).cell_len for stage in stages)
        parts: list[RenderableType] = []
        for (name, lane), row in zip(self._shown, self._loads, strict=False):
            kind = "lane" if self._items else "pipeline"
            counts = f"{lane.micro_batches} micro-batch{'es' if lane.micro_batches > 1 else ''}"
            if self._items:
                counts = f"weight {lane.micro_batches} in {self._items}"
            parts.append(Text.assemble((f"{kind} ", "dim"), (name, "bold"), (f", {counts}", "dim")))
            table = Table.grid(padding=(0, 2, 0, 0))
            table.add_column(justify="right", width=4, no_wrap=True, style="dim")
            table.add_column(width=widest, no_wrap=True)
            table.add_column(width=BAR + 5, no_wrap=True)
            table.add_column(overflow="fold")
            for place, (stage, load) in enumerate(zip(lane.stages, row, strict=True)):
                shown = bar(load) if load is not None else ""
                table.add_row(str(place), layers(stage), shown, Text(", ").join(members(stage, self._rates)))
            parts += [table, ""]
        return Group("", *parts)


def layers(stage: Stage) -> Text:
    """Which, how many, and whether they make their activations again and have sequence parallelism."""
    text = Text.assemble((stage.named, "bold"), f" ({stage.layers})")
    if stage.recompute:
        text.append(" recompute", style="yellow")
    if stage.sequence_parallel:
        text.append(" sequence parallel", style="yellow")
    return text


def members(stage: Stage, rates: Mapping[str, float]) -> list[Text]:
    """A line for each run of members that are alike in speed and share; the part of each layer that a member
    has, where these differ."""
    uneven = len(set(stage.shares)) > 1
    places = list(enumerate(stage.devices))
    rows = []
    for (rate, share), run in groupby(places, key=lambda p: (rates.get(p[1], 1.0), stage.shares[p[0]])):
        text = Text(", ".join(_spans([device for _, device in run])))
        if rate != 1.0:
            text.append(f" {rate:g}x", style="red")
        if uneven:
            text.append(f" {share / sum(stage.shares):.1%}", style="cyan")
        rows.append(text)
    return rows


def bar(load: float) -> Text:
    """A load from 0 to 1 as a bar of `BAR` characters and a percentage; red above 0.999."""
    full = round(load * BAR)
    style = "red" if load > 0.999 else ""
    return Text(f"{'█' * full}{'·' * (BAR - full)} {load:.0%}", style=style)


def named(devices: Sequence[str], rates: Mapping[str, float]) -> str:
    """Device names, neighbours shortened ("n0/0-3,5"), slow ones with their rate ("n0/7 2.57x")."""
    parts = []
    for slow, run in groupby(devices, key=lambda device: rates.get(device, 1.0)):
        mark = f" {slow:g}x" if slow != 1.0 else ""
        parts += [f"{span}{mark}" for span in _spans(list(run))]
    return " + ".join(parts)


def _spans(devices: Sequence[str]) -> list[str]:
    """One for each run of devices of a node."""
    nodes: list[tuple[str, list[tuple[int, int]]]] = []
    for device in devices:
        node, _, text = device.rpartition("/")
        index = int(text)
        if not nodes or nodes[-1][0] != node:
            nodes.append((node, []))
        spans = nodes[-1][1]
        if spans and spans[-1][1] == index - 1:
            spans[-1] = (spans[-1][0], index)
        else:
            spans.append((index, index))
    return [
        f"{node}/" + ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
        for node, spans in nodes
    ]
