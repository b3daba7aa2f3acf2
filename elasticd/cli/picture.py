"""A plan as a picture in the terminal: pipelines down, stages across, in each cell devices, layers and load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from elasticd_planner.plan import Plan, Stage
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

#: Cells of a load bar.
BAR = 4
#: Pipelines that are shown; the rest is counted.
SHOWN = 32

#: By pipeline, the time that each stage spends on one micro-batch, in whatever unit the plan was made.
StageTimes = Sequence[Sequence[float]]


def picture(plan: Plan, rates: Mapping[str, float], times: StageTimes | None = None) -> RenderableType:
    """The plan's pipelines and what stands idle. With `times`, each stage shows how busy it is of the time
    that the busiest stage of the plan takes for its micro-batches."""
    pipelines = plan.modules[0].pipelines
    table = Table(box=SIMPLE_HEAD, show_lines=True, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("pipe\nline", no_wrap=True)
    table.add_column("micro\nbatch", justify="right", no_wrap=True)
    for index in range(max(len(pipeline.stages) for pipeline in pipelines)):
        table.add_column(f"stage {index}\nlayers", overflow="fold")
    busy = [
        [seconds * pipeline.micro_batches for seconds in times[index]] if times is not None else []
        for index, pipeline in enumerate(pipelines)
    ]
    most = max((seconds for row in busy for seconds in row), default=0.0)
    for index, pipeline in enumerate(pipelines[:SHOWN]):
        cells = [
            cell(stage, rates, busy[index][place] / most if most else None)
            for place, stage in enumerate(pipeline.stages)
        ]
        table.add_row(str(index), str(pipeline.micro_batches), *cells)
    parts: list[RenderableType] = [table]
    if len(pipelines) > SHOWN:
        parts.append(Text(f"and {len(pipelines) - SHOWN} more pipelines"))
    if plan.idle:
        parts.append(Text.assemble(("idle ", "dim"), named(plan.idle, rates)))
    return Group(*parts)


def cell(stage: Stage, rates: Mapping[str, float], load: float | None) -> Text:
    """One stage: layers, devices with the rates of slow ones, unequal shares, load."""
    span = f"{stage.start}-{stage.stop - 1}" if stage.layers > 1 else str(stage.start)
    text = Text.assemble((span, "bold"), f" ({stage.layers})\n")
    text.append(named(stage.devices, rates, between="\n"))
    if len(set(stage.shares)) > 1:
        text.append(f"\n{':'.join(map(str, stage.shares))}", style="cyan")
    if load is not None:
        full = round(load * BAR)
        text.append(f"\n{'█' * full}{'·' * (BAR - full)} {load:.0%}", style="red" if load > 0.999 else "")
    return text


def named(devices: Sequence[str], rates: Mapping[str, float], between: str = " + ") -> str:
    """Device names, runs of neighbours shortened ("n0/0-3"), slow ones with their rate ("n0/7 2.57x")."""
    parts = []
    for slow, run in groupby(devices, key=lambda device: rates.get(device, 1.0)):
        mark = f" {slow:g}x" if slow != 1.0 else ""
        parts += [f"{span}{mark}" for span in _spans(list(run))]
    return between.join(parts)


def _spans(devices: Sequence[str]) -> list[str]:
    spans: list[tuple[str, int, int]] = []
    for device in devices:
        node, _, text = device.rpartition("/")
        index = int(text)
        if spans and spans[-1][0] == node and spans[-1][2] == index - 1:
            spans[-1] = (node, spans[-1][1], index)
        else:
            spans.append((node, index, index))
    return [f"{node}/{first}" if first == last else f"{node}/{first}-{last}" for node, first, last in spans]
