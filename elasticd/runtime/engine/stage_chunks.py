"""`StageChunk`: consecutive sections that a micro-batch passes through at once, and those that are one graph.

Sections of a chunk are one autograd graph where nothing separates them: a block that recomputes its activations
enters with leaves of its own, and the terms of a parameter's gradient that several sections use are added one
after the other, in the order of the sections. Of the sections of an autograd graph, consecutive blocks can be
one graph of torch.compile, too: a `BlockRun`, which is one module for a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any, TypeVar

from elasticd_planner.layout.flows import Border, borders
from elasticd_planner.spec.plan import Plan
from torch import Tensor, nn

from elasticd.runtime.comm.communicators import Peers
from elasticd.runtime.engine.item_border import ItemSource
from elasticd.runtime.engine.p2p import NextStage, PrevStage
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.model.bundle import Bundle
from elasticd.runtime.model.model import Model
from elasticd.runtime.model.section_passes import PassPart, separate

_Stage = TypeVar("_Stage", PrevStage, NextStage)


@dataclass(kw_only=True)
class StageChunk:
    """Consecutive sections that a micro-batch passes through at once; an interleaved stage has several."""

    passes: dict[str, Callable[..., Any]]  #: by section
    graphs: list[list[PassPart]]  #: the parts that can be one autograd graph together
    before: PrevStage | None  #: None: the chunk begins with the embedding
    after: NextStage | ItemSource | None  #: None: the chunk ends with the head, whose outputs go to the loss
    #: By the identity of `graphs` or `separate`: `unseeded` of it.
    _unseeded: dict[int, list[list[PassPart]]] = field(default_factory=dict)
    _draws: bool = False  # a section drew late

    @property
    def ends_with_head(self) -> bool:
        """True if its last section is the head, whose output no member of a TP group has slices of."""
        return "head" in self.passes

    @cached_property
    def separate(self) -> list[list[PassPart]]:
        """Each section by itself."""
        return separate(self.passes)

    @property
    def name(self) -> str:
        """Its sections, for people."""
        first, last = next(iter(self.passes)), next(reversed(self.passes))
        return first if first == last else f"{first} to {last}"

    def unseeded(self, graphs: list[list[PassPart]]) -> list[list[PassPart]] | None:
        """The passes of `graphs` or `separate` without seeds of random draws; None: one draws, or may draw."""
        if self._draws:
            return None
        if (known := self._unseeded.get(id(graphs))) is not None:
            return known
        passes: list[Any] = [part.passed for parts in graphs for part in parts]
        if not all(getattr(passed, "draws_nothing", False) for passed in passes):
            return None
        made = [[PassPart(sections, passed.unseeded) for sections, passed in parts] for parts in graphs]  # type: ignore[attr-defined]
        self._unseeded[id(graphs)] = made
        return made

    @property
    def draws(self) -> bool:
        """True if a section drew random numbers, in a later pass than the first one."""
        return self._draws

    def drew(self) -> None:
        """A section drew random numbers for the first time: all have seeds from now on."""
        self._draws = True


class BlockRun(nn.Module):
    """Consecutive blocks as one module."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, entered: Bundle) -> Bundle:
        """The output of the last block. Each is called with a mapping of its own, as by a pass of its own."""
        for block in self.blocks:
            entered = block(entered if isinstance(entered, Tensor) else dict(entered))
        return entered


def autograd_graphs(model: Model, sections: Sequence[str], alone: Collection[str]) -> list[list[str]]:
    """The sections of a chunk that can be one autograd graph together. Of those of a graph one alone uses a
    parameter.

    Args:
        model: has the sections.
        sections: of the chunk.
        alone: sections that need a graph of their own.
    """
    graphs: list[list[str]] = []
    used: set[str] = set()
    for section in sections:
        rules = [rule for rule in model.spec.section(section) if rule.kind != "buffer"]
        parameters = {model.spec.owner(f"{section}.{rule.name}") for rule in rules}
        if not graphs or section in alone or graphs[-1][-1] in alone or used & parameters:
            graphs.append([])
            used = set()
        graphs[-1].append(section)
        used |= parameters
    return graphs


def block_runs(graph: Sequence[str]) -> list[tuple[str, ...]]:
    """The sections of an autograd graph in their order: its blocks together, others by themselves."""
    kinds = groupby(graph, lambda section: "blocks" if section.startswith("blocks.") else section)
    return [tuple(sections) for _, sections in kinds]


def stage_chunks(
    recipe: Recipe,
    model: Model,
    plan: Plan,
    peers: Peers,
    passes: Mapping[str, Callable[..., Any]],
    alone: Collection[str],
    run_of: Callable[[tuple[str, ...]], Callable[..., Any]] | None,
    gives: ItemSource | None = None,
    first_tag: int = 0,
) -> list[StageChunk]:
    """The chunks of this device's stage in their order, each with its connections to the adjacent stages.

    Args:
        recipe: of the job.
        model: the module whose sections these are.
        plan: the plan in force, of this module.
        peers: its other members.
        passes: of each section of the device.
        alone: sections that need an autograd graph of their own.
        run_of: makes one pass of consecutive blocks; None: each block is passed by itself.
        gives: where the outputs of the head go, of a module of items; None: to the loss.
        first_tag: of headers of this module.
    """
    me = peers.everyone.me
    place = plan.places[me]
    pipeline, stage = plan.pipeline(place), plan.stage(place)

    spans, depth = pipeline.spans, len(pipeline.stages)

    def neighbour(kind: type[_Stage], border: Border, turn: int, chunk: int) -> _Stage:
        """`turn`: the index of the other chunk among those that a micro-batch meets."""
        blocks = [f"blocks.{layer}" for layer in range(*spans[turn])]
        width = len(pipeline.stages[turn % depth].devices)
        return kind(
            peers.everyone,
            peers.communicators,
            border,
            model.dtype,
            recipe.accelerator,
            implies_all_received=width == 1 or model.communicates(blocks),
            chunk=chunk,
            chunks=pipeline.chunks,
            first_tag=first_tag,
        )

    around: Sequence[Border] = borders(pipeline, place, me) if depth > 1 else ()
    chunks = []
    for number, (start, stop) in enumerate(stage.chunks):
        turn = number * depth + place.stage
        prev: PrevStage | None = None
        next_: NextStage | ItemSource | None = gives
        if start > 0:
            prev = neighbour(PrevStage, around[0], turn - 1, number - (place.stage == 0))
        if stop < pipeline.layers:
            next_ = neighbour(NextStage, around[1], turn + 1, number)
        names = [f"blocks.{layer}" for layer in range(start, stop)]
        names = ["embed"] * (prev is None) + names + ["head"] * (stop == pipeline.layers)
        kept = {name: passes[name] for name in names}
        graphs = [_parts(graph, kept, run_of) for graph in autograd_graphs(model, names, alone)]
        chunks.append(StageChunk(passes=kept, graphs=graphs, before=prev, after=next_))
    return chunks


def _parts(
    graph: Sequence[str],
    passes: Mapping[str, Callable[..., Any]],
    run_of: Callable[[tuple[str, ...]], Callable[..., Any]] | None,
) -> list[PassPart]:
    """The parts of an autograd graph."""
    runs = [(section,) for section in graph] if run_of is None else block_runs(graph)
    return [PassPart(run, passes[run[0]] if run_of is None or len(run) == 1 else run_of(run)) for run in runs]
