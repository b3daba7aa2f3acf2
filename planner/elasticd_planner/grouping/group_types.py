"""Types of groups as columns of the arrays of the search, and what all its pipelines have in common."""

from __future__ import annotations

from dataclasses import dataclass

from elasticd_planner.cost.model import CostModel
from elasticd_planner.cost.pipeline_time import Timing
from elasticd_planner.grouping.node_partitions import GroupType

#: What counts as impossible, in micro-batches: far below what sums of real pipelines can make up for.
NEVER = -(10**9)


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A type of group: seconds of a block, of embed and head, and the most layers that its memory holds by
    position from the end (0: the last stage), of a stage that is not the first and of one that is."""

    block: float
    embed: float
    head: float
    most: tuple[int, ...]
    most_first: tuple[int, ...]
    width: int = 1

    def ends(self, hop: float) -> set[float]:
        """Seconds besides layers of a first stage, of a last one, and of one that is both."""
        return {self.embed + hop, self.head, self.embed + self.head}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """The rules that pipelines have in common. hop: seconds between two stages. timing: of the cost. deep: a
    pipeline has at least as many micro-batches as stages. most: the micro-batches of the whole step; of one
    pipeline at most `each`, since others take at least one. fewest: devices that a pipeline has at least."""

    layers: int
    hop: float
    timing: Timing
    deep: bool
    most: int
    each: int
    fewest: int = 1


#: The most layers that groups of these shares and memory hold, first or not, by position from the end.
Limits = dict[tuple[tuple[int, ...], tuple[int, ...], bool], list[int]]


class Columns:
    """Group types as columns of the arrays; types that cost and hold the same are one. `limits`: what others
    found with the same cost and layers, and what these find."""

    def __init__(self, cost: CostModel, rules: Rules, deepest: int, limits: Limits | None = None) -> None:
        self.cost, self.rules = cost, rules
        self._limits: Limits = limits if limits is not None else {}
        self.deepest = max(1, min(deepest, rules.layers))
        self.columns: list[Column] = []
        self._of: dict[GroupType, int] = {}
        self._ids: dict[Column, int] = {}

    def of(self, kind: GroupType) -> int:
        """The index of a type's column; one that is new is added."""
        if kind not in self._of:
            column = self._made(kind)
            if column not in self._ids:
                self._ids[column] = len(self.columns)
                self.columns.append(column)
            self._of[kind] = self._ids[column]
        return self._of[kind]

    def _made(self, kind: GroupType) -> Column:
        limits = {}
        for first in (False, True):
            known = self._limits.setdefault((kind.shares, kind.memory, first), [])
            known += (
                kind.most_layers(self.cost, self.rules.layers, behind + 1, first=first)
                for behind in range(len(known), self.deepest)
            )
            limits[first] = tuple(known[: self.deepest])
        return Column(
            block=kind.cost.block,
            embed=kind.cost.embed,
            head=kind.cost.head,
            most=limits[False],
            most_first=limits[True],
            width=kind.width,
        )
