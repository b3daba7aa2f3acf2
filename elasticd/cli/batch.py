"""The rows of one step as a picture in the terminal: lanes down, time across, in each row its sequences.

For `elasticd plan PROBLEM --batch LENGTHS.json`.
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import click
import msgspec
from elasticd_planner.batching.batch_summary import lane_work, summary_of
from elasticd_planner.batching.fold import cost
from elasticd_planner.batching.packed_batch import CutOptions, packed_batch_plan, planned_slowdown
from elasticd_planner.spec.batch import BatchLengths, BatchPlan, BatchSummary, MicroBatch
from elasticd_planner.spec.plan import Plan
from elasticd_planner.value import Invalid
from rich.text import Text

#: Cells of the lane that is busy the longest.
_WIDTH = 64
#: Lanes that are shown; the rest is counted.
_SHOWN = 32
_LETTERS = string.ascii_uppercase + string.ascii_lowercase
_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")


class StepLengths(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of the lengths of one step's sequences."""

    lengths: tuple[int, ...]  #: [tokens] of each sequence
    #: What a token's matrix products cost, in attentions of one token to another: about 12 x the width of the
    #: model, for blocks as GPT has them.
    linear: int = 12 * 4096
    tokens: int | None = None  #: the most tokens of a row; None: the longest sequence
    cut: bool = True  #: whether sequences may be cut over lanes
    least: int = 256  #: the least pairs of tokens of a piece that memory does not ask for


def step_lengths(text: bytes, name: str) -> StepLengths:
    """Reads such a file: an object of these fields, or a list of the lengths alone."""
    try:
        given = msgspec.json.decode(text, type=StepLengths | tuple[int, ...])
    except msgspec.MsgspecError as error:
        raise click.ClickException(
            f"{name}: {error}. It must have the lengths of a step's sequences, as [512, 60, 4096], or as "
            '{"lengths": [512, 60, 4096], "linear": 49152, "tokens": 8192}'
        ) from None
    return given if isinstance(given, StepLengths) else StepLengths(lengths=given)


def dealt(plan: Plan, given: StepLengths) -> BatchPlan:
    """The batch that a job under this plan would make of these sequences."""
    if not given.lengths:
        raise click.ClickException("the file of lengths has no sequence")
    samples = range(len(given.lengths))
    tokens = given.tokens if given.tokens is not None else max(given.lengths)
    cut = CutOptions(least=given.least) if given.cut else None
    lengths = BatchLengths(tokens=given.lengths, linear=given.linear)
    try:
        return packed_batch_plan(plan, 0, samples, lengths, tokens, cut=cut)
    except Invalid as error:
        raise click.ClickException(str(error)) from None


def batch_lines(plan: Plan, batch: BatchPlan, linear: int) -> Iterator[Text]:
    """The picture of a batch, and its numbers."""
    pieces = (piece.sample for rows in batch.pipelines for row in rows for lane in row.lanes for piece in lane)
    shared = [sample for sample, count in Counter(pieces).items() if count > 1]
    marks = {sample: at for at, sample in enumerate(shared)}
    slowdown = _slowdown(plan)
    most = max(work * pace for work, pace in zip(lane_work(plan, batch, linear), slowdown, strict=True))
    shown, lanes = 0, len(slowdown)
    for number, (pipeline, rows) in enumerate(zip(plan.pipelines, batch.pipelines, strict=True)):
        for lane in range(len(pipeline.micro_batches_by_lane)):
            if shown == _SHOWN:
                yield Text(f"and {lanes - shown} more lanes", style="dim")
                break
            devices = ", ".join(pipeline.by_lane[lane].stages[0].devices[:2])
            line = Text.assemble((f"pipeline {number}, lane {lane} ", "dim"), f"{devices:<14.14} ")
            cells = _WIDTH * slowdown[shown] / most  # for a unit of cost
            yield line + _bars((row.lanes[lane] for row in rows), marks, linear, cells)
            shown += 1
        if shown == _SHOWN:
            break
    yield from _numbers(summary_of(plan, batch, linear, slowdown), lanes, bool(shared))


def _slowdown(plan: Plan) -> list[int]:
    """Of each lane, as the plan has it."""
    return planned_slowdown(plan.pipelines)


def _bars(rows: Iterable[MicroBatch], marks: dict[int, int], linear: int, cells_of_one: float) -> Text:
    """A lane's rows in time: letters are sequences that other lanes have parts of, shades are whole ones."""
    text, done, shade = Text(), 0, 0
    for row in rows:
        for piece in row:
            before = round(done * cells_of_one)
            done += cost(piece.tokens, piece.length, linear)
            cells = round(done * cells_of_one) - before
            if piece.sample in marks:
                at = marks[piece.sample]
                text.append(_LETTERS[at % len(_LETTERS)] * cells, style=_COLOURS[at % len(_COLOURS)])
            else:
                shade = 1 - shade
                text.append("█▓"[shade] * cells)
        text.append("|" if row else "", style="dim")
    return text


def _numbers(summary: BatchSummary, lanes: int, shared: bool) -> Iterator[Text]:
    yield Text.assemble(
        ("sequences ", "dim"),
        f"{summary.sequences:,}",
        ("   tokens ", "dim"),
        f"{summary.tokens:,}",
        ("   lanes ", "dim"),
        f"{lanes}",
        ("   rows ", "dim"),
        f"{summary.rows}",
    )
    cut = f"{summary.cut:,} ({summary.cut / summary.sequences:.0%}), over {summary.widest} lanes at most"
    yield Text.assemble(
        ("busiest lane over even work ", "dim"),
        (f"{summary.imbalance:.3f}", "bold"),
        ("   cut ", "dim"),
        cut if shared else "none",
    )


def batch_of(plan: Plan, batch: BatchPlan, linear: int) -> dict[str, object]:
    """The same as JSON."""
    summary = summary_of(plan, batch, linear, _slowdown(plan))
    return {"summary": msgspec.to_builtins(summary), "pipelines": _pipelines(batch)}


def _pipelines(batch: BatchPlan) -> Sequence[object]:
    return [
        [[[piece._asdict() for piece in lane] for lane in row.lanes] for row in rows]
        for rows in batch.pipelines
    ]
