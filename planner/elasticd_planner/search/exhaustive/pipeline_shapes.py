"""What an enumeration keeps: pipelines by classes of devices, sets of them, and their best layers on demand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elasticd_planner.cost.pipeline_time import Timing
from elasticd_planner.grouping.tp_groups import Counts, Group
from elasticd_planner.numeric import Floats
from elasticd_planner.search.balance.layer_split import Terms, best_layers, split_layers
from elasticd_planner.search.task import MANY


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A pipeline by classes of devices: its groups in order, and its seconds by micro-batches (where these
    are the schedule's: at least)."""

    groups: tuple[Group, ...]
    terms: tuple[Terms, ...]
    seconds: Floats

    def layers(self, layers: int, micro_batches: int) -> tuple[int, ...]:
        return split_layers(self.terms, layers, micro_batches)


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A shape with its best layers for some micro-batches, and the seconds of that."""

    shape: Shape
    layers: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    """Disjoint sets of devices, one for each pipeline, their micro-batches, and the seconds of a step."""

    parts: tuple[Counts, ...]
    micro_batches: tuple[int, ...]
    seconds: float
    #: Seconds of the step after its slowest pipeline.
    after: float


class Options:
    """The best layers of shapes under `timing`, each made once; without a timing they are the formula's, which
    with `steady` has the least slowest stage, as very many micro-batches would."""

    def __init__(self, *, layers: int, timing: Timing | None, steady: bool = False) -> None:
        self.layers, self.timing, self.steady = layers, timing, steady
        self._known: dict[tuple[Counts, int], tuple[int, list[Option]]] = {}

    def __call__(self, shapes: Sequence[Shape], part: Counts, micro_batches: int, limit: float) -> list[Option]:
        """The `shapes`, all on the devices `part`, that do so many micro-batches within `limit` seconds, with
        their layers, best first. Of one part shapes may be added; its limit must not rise."""
        at = micro_batches - 1
        if self.timing is None:
            many = MANY if self.steady else micro_batches
            found = [
                Option(shape=s, layers=s.layers(self.layers, many), seconds=float(s.seconds[at]))
                for s in shapes
                if s.seconds[at] <= limit
            ]
            return sorted(found, key=lambda option: option.seconds)
        seen, options = self._known.get((part, micro_batches), (0, []))
        by_depth: dict[int, list[Shape]] = {}
        for shape in shapes[seen:]:
            if shape.seconds[at] <= limit:
                by_depth.setdefault(len(shape.terms), []).append(shape)
        for alike in by_depth.values():
            terms = [shape.terms for shape in alike]
            best = best_layers(terms, self.layers, micro_batches, limit, self.timing)
            options += [
                Option(shape=shape, layers=one.layers, seconds=one.seconds)
                for shape, one in zip(alike, best, strict=True)
                if one is not None
            ]
        options = sorted((one for one in options if one.seconds <= limit), key=lambda option: option.seconds)
        self._known[part, micro_batches] = (len(shapes), options)
        return options


def slowest(curves: Sequence[Floats], given: Sequence[int]) -> float:
    """Seconds of the slowest of some pipelines, each with its micro-batches."""
    return max(float(seconds[m - 1]) for seconds, m in zip(curves, given, strict=True))
