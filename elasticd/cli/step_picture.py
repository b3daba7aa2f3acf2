"""A step of a plan of several modules as a picture in the terminal: the lanes that take its items, and all its
passes on one axis of time.

For `elasticd plan PROBLEM`: of a mean step, or with `--batch ITEMS.json` of a step with these items.
"""

from __future__ import annotations

import string
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import click
import msgspec
from elasticd_planner.problem import Problem
from elasticd_planner.readable import readable_seconds
from elasticd_planner.search.module_cost import MOST_PLAYED, ModuleCosts
from elasticd_planner.spec.item_batch import ItemBatch
from elasticd_planner.spec.plan import Plan
from rich.text import Text

from elasticd.cli.picture import named

#: Cells of the step, and of the lane that is busy the longest.
_WIDTH = 72
#: Devices, and lanes of a module, that are shown; the rest is counted.
_SHOWN = 32
_COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red")

#: Of each sample of a step the rows of its items, by what they are called in a sample.
ItemRows = Mapping[str, Sequence[Sequence[int]]]


def step_items(text: bytes, name: str, problem: Problem) -> ItemRows:
    """A file of the items of one step: for each sample how many it has, or the rows of each of them.

    Raises:
        ClickException: it is none of this problem.
    """
    kinds = {module.items: module for module in problem.modules}
    example = {kind: [2, 0, 1] for kind in kinds}
    try:
        given = msgspec.json.decode(text, type=dict[str, list[int | list[int]]])
    except msgspec.MsgspecError as error:
        raise click.ClickException(
            f"{name}: {error}. It must have the items of each sample of a step, their number or the rows of "
            f"each, as {msgspec.json.encode(example).decode()} or "
            f"{msgspec.json.encode({kind: [[256, 64], [], [256]] for kind in kinds}).decode()}"
        ) from None
    if odd := sorted({*given} - {*kinds}):
        raise click.ClickException(f"{name}: no module takes {odd[0]!r}; there are: {', '.join(kinds)}")
    items = {}
    for kind, samples in given.items():
        if len(samples) != problem.global_batch:
            raise click.ClickException(
                f"{name}: it has the {kind} of {len(samples)} samples, and a step {problem.global_batch}: give "
                "one entry for each"
            )
        mean = max(1, round(kinds[kind].rows_an_item))
        rows = [[mean] * each if isinstance(each, int) else each for each in samples]
        if any(isinstance(each, int) and each < 0 for each in samples) or any(
            row < 1 for each in rows for row in each
        ):
            raise click.ClickException(f"{name}: {kind} are counted from 0, and have at least one row each")
        items[kind] = rows
    return items


class StepPicture:
    """A step of a plan: its items dealt, and the passes of all modules played."""

    def __init__(self, problem: Problem, plan: Plan, items: ItemRows | None = None) -> None:
        """
        Args:
            problem: that was planned.
            plan: its plan, with the times of its passes.
            items: of the step; None: those of a mean step.
        """
        self.plan, self._costs, self._mean = plan, ModuleCosts(problem), items is None
        self.batches = self._costs.batches(plan, items=items)
        self._letters = _letters([module.module for module in plan.modules])

    @property
    def items(self) -> dict[str, ItemBatch]:
        """The items that each lane takes."""
        return {name: batch for name, batch in self.batches.items() if isinstance(batch, ItemBatch)}

    @property
    def played(self) -> bool:
        """Returns True if the plan is small enough for all of its passes to be played."""
        return len(self.plan.members) * self.plan.global_batch <= MOST_PLAYED

    @cached_property
    def busy(self) -> dict[str, list[list[float]]]:
        """Seconds that each stage computes, by module and lane."""
        return self._costs.busy_seconds(self.plan, self.batches)

    @cached_property
    def by_device(self) -> dict[str, dict[str, float]]:
        """Seconds that each device computes for each of its modules."""
        parts: dict[str, dict[str, float]] = defaultdict(dict)
        for module in self.plan.modules:
            for lane, row in zip(module.by_lane, self.busy[module.module], strict=True):
                for stage, seconds in zip(lane.stages, row, strict=True):
                    for device in stage.devices:
                        parts[device][module.module] = parts[device].get(module.module, 0.0) + seconds
        return dict(parts)

    @cached_property
    def seconds(self) -> float | None:
        """Of the step; None: it is too large to be played."""
        return self._times[1] if self.played else None

    @cached_property
    def _times(self) -> tuple[Any, float]:
        times = self._costs.pass_times(self.plan, self.batches)
        return times, max(one.stop for one in times) / 1e6 + self._costs.after_seconds(self.plan)

    # -- for people --------------------------------------------------------------------------------------------

    def limit(self) -> str:
        """The device that computes the longest."""
        device, parts = max(self.by_device.items(), key=lambda each: sum(each[1].values()))
        listed = ", ".join(f"{name} {readable_seconds(seconds)}" for name, seconds in parts.items())
        return f"{device}: {listed}"

    def lanes(self) -> Iterator[Text]:
        """The lanes of each module of items, and in each its items as they cost."""
        for name, batch in self.items.items():
            view, listed = self.plan.view(name), [groups for lanes in batch.pipelines for groups in lanes]
            rows = [sum(group.rows for group in groups) for groups in listed]
            seconds = [sum(row) for row in self.busy[name]]
            most = max(seconds) or 1.0
            for number, (lane, groups) in enumerate(zip(view.by_lane, listed, strict=True)):
                if number == _SHOWN:
                    yield Text(f"and {len(listed) - number} more lanes", style="dim")
                    break
                head = f"{name} lane {number} "
                line = Text.assemble((head, "dim"), f"{named(lane.stages[0].devices, {}):<14.14} ")
                cells, done, text = _WIDTH * seconds[number] / most / max(1, rows[number]), 0, Text()
                for at, group in enumerate(groups):
                    before, done = round(done * cells), done + group.rows
                    text.append("█▓"[at % 2] * (round(done * cells) - before))
                yield line + text
            even = sum(seconds) / len(seconds) or 1.0
            yield Text.assemble(
                (f"{self.plan.view(name).module.items} ", "dim"), f"{sum(map(len, listed)):,}",
                ("   rows ", "dim"), f"{sum(rows):,}", ("   lanes ", "dim"), f"{len(listed)}",
                ("   busiest lane over the mean ", "dim"), (f"{max(seconds) / even:.3f}", "bold"),
            )  # fmt: skip

    def order(self) -> Iterator[Text]:
        """The passes of all modules on one axis of time, a row for each device: small letters are forward
        passes, capital ones backward passes."""
        if not self.played:
            yield Text(f"order: not drawn for more than {MOST_PLAYED:,} devices times samples", style="dim")
            return
        times, seconds = self._times
        end = max(one.stop for one in times)
        named_modules = ", ".join(f"{letter} {name}" for name, (letter, _) in self._letters.items())
        what = "a mean step" if self._mean else "this step"
        yield Text.assemble(
            ("order of ", "dim"), what, ("   passes ", "dim"), readable_seconds(end / 1e6), ("   step ", "dim"),
            (readable_seconds(seconds), "bold"), (f"   {named_modules}; capitals are backward passes", "dim"),
        )  # fmt: skip
        spans: dict[str, list[tuple[int, int, str, str]]] = defaultdict(list)
        for start, stop, act in ((one.start, one.stop, one.act) for one in times):
            letter, colour = self._letters[act.module]
            lane = self.plan.view(act.module).pipelines[act.pipeline].by_lane[act.lane]
            for device in lane.stages[act.stage].devices:
                sign = letter if act.act.kind == "forward" else letter.upper()
                spans[device].append((start, stop, sign, colour))
        width = max(map(len, spans))
        for device in [device for device in self.plan.members if device in spans][:_SHOWN]:
            yield Text(f"{device:<{width}} ") + _row(spans[device], end)
        if (more := len(spans) - _SHOWN) > 0:
            yield Text(f"and {more} more devices", style="dim")

    # -- for programs ------------------------------------------------------------------------------------------

    def as_json(self) -> dict[str, object]:
        """The items of each lane, what devices compute, and the seconds of the step."""
        return {
            "seconds": self.seconds,
            "devices": self.by_device,
            "modules": {name: msgspec.to_builtins(batch.pipelines) for name, batch in self.items.items()},
        }


def _letters(modules: Sequence[str]) -> dict[str, tuple[str, str]]:
    """A letter and a colour for each module: of its name the first that none before it has."""
    letters: dict[str, tuple[str, str]] = {}
    for at, name in enumerate(modules):
        used = {letter for letter, _ in letters.values()}
        free = [letter for letter in name.lower() + string.ascii_lowercase if letter.isalpha()]
        letter = next((letter for letter in free if letter not in used), "x")
        letters[name] = letter, _COLOURS[at % len(_COLOURS)]
    return letters


def _row(spans: Sequence[tuple[int, int, str, str]], end: int) -> Text:
    """Each cell shows the pass that has most of its time, or a dot where the device waits for most of it."""
    cells: list[dict[tuple[str, str], float]] = [defaultdict(float) for _ in range(_WIDTH)]
    cell = end / _WIDTH
    for start, stop, sign, colour in spans:
        for at in range(int(start / cell), min(_WIDTH, int(stop / cell) + 1)):
            shared = min(stop, (at + 1) * cell) - max(start, at * cell)
            if shared > 0:
                cells[at][sign, colour] += shared
    text = Text()
    for each in cells:
        waits = cell - sum(each.values())
        sign, colour = max(each, key=lambda key: each[key], default=("·", "dim"))
        if waits > each.get((sign, colour), 0.0):
            sign, colour = "·", "dim"
        text.append(sign, style=colour)
    return text
