"""Evaluation: the mean loss, and other measures, over a held-out set under the plan in force.

Every sample counts once under any plan. The set is distributed to the pipelines in rounds as large as a step,
the last of them smaller. Sums and counts are all-gathered after each round and divided at the end, so that all
members have the same result to the bit. The state of the training does not change.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from elasticd_planner.spec.batch import BatchLengths, BatchPlan, batch_plan, short_batch_plan
from elasticd_planner.spec.plan import Plan
from torch import Tensor
from torch.utils.data import DataLoader

from elasticd.runtime.accelerator import Accelerator
from elasticd.runtime.api.ema import ALIKE, MeasureError, averaged
from elasticd.runtime.api.pretrained_folder import all_gather_text
from elasticd.runtime.control.user_exceptions import lost_within
from elasticd.runtime.data.collate import Batch, Collate
from elasticd.runtime.data.loader import length_of
from elasticd.runtime.data.options import DataOptions
from elasticd.runtime.data.packing import Packing, deal
from elasticd.runtime.data.prefetch import Dataset, SampleError
from elasticd.runtime.data.sample_ledger import LedgerError
from elasticd.runtime.engine.engine import Engine, HeldOutReader
from elasticd.runtime.engine.vote import exact_sum
from elasticd.runtime.exits import script_options
from elasticd.runtime.model.batch_format import BatchFormat
from elasticd.runtime.model.model import Loss
from elasticd.runtime.model.validation import ModelError
from elasticd.system.user_line import described

#: The measure that every evaluation has.
LOSS = "loss"
#: The name of a held-out set that is given without one.
HELD_OUT = "held_out"
#: What a rank sends after a round before its sums: the hash of its samples, 1 + index of an unreadable one (0:
#: there is none), and whether a measure raised.
_HEAD = struct.Struct("<Qq?")


@script_options
@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """A set to evaluate on.

    Raises:
        ValueError: the dataset is empty, or a measure is called "loss".
        TypeError: it is no map-style dataset, or what is to be a function is none.
    """

    dataset: Dataset  #: map-style
    #: What is averaged beside the loss, by name: each (output, batch) -> (sum, count), as the loss is.
    measures: Mapping[str, Loss] = field(default_factory=dict)
    loss: Loss | None = None  #: None: the loss of the training
    collate: Collate | None = None  #: None: that of the training

    def __post_init__(self) -> None:
        self._check_dataset()
        if not len(self.dataset):
            raise ValueError("held_out: the dataset is empty")
        length_of(self.dataset)  # which refuses lengths of others
        for name, function in (("loss", self.loss), ("collate", self.collate), *self.measures.items()):
            if function is not None and not callable(function):
                raise TypeError(f"held_out: {name} is {function!r}; it must be a function")
        if LOSS in self.measures:
            raise ValueError(f"held_out: {LOSS!r} is the loss itself; give the measure another name")

    def _check_dataset(self) -> None:
        given = self.dataset
        kind = f"held_out: the dataset is of type {type(given).__name__}"
        if isinstance(given, DataLoader):
            raise TypeError(
                f"{kind}: give the loader's dataset, and its collate_fn as HeldOut(dataset=..., collate=...)"
            )
        if isinstance(given, Mapping):
            names = ", ".join(map(repr, given))
            raise TypeError(f"{kind} with {names}: give one of them, dataset[...]")
        if not isinstance(given, Sized) or not hasattr(given, "__getitem__"):
            raise TypeError(f"{kind}, without a length or without [index]: give one that has both")


@script_options
@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """The data and measures for evaluating a job: the argument `evaluation` of `elasticd.Job`.

    Raises:
        ValueError: a set is empty.
    """

    #: A map-style dataset or a `HeldOut`, or several of them by name. `Job.evaluate` takes the name; a single
    #: set is called "held_out" and needs none.
    held_out: Dataset | HeldOut | Mapping[str, Dataset | HeldOut] | None = None

    def __post_init__(self) -> None:
        self.sets  # noqa: B018  it refuses empty sets

    @cached_property
    def sets(self) -> dict[str, HeldOut]:
        """The sets by name, in the order in which they were given."""
        if self.held_out is None:
            return {}
        named = self.held_out if isinstance(self.held_out, Mapping) else {HELD_OUT: self.held_out}
        return {
            name: each if isinstance(each, HeldOut) else HeldOut(dataset=each) for name, each in named.items()
        }


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The result of an evaluation, the same on every member of the plan."""

    name: str  #: of the held-out set
    step: int  #: updates that the parameters had
    weights: str  #: "value": the parameters; "average": their moving average
    means: Mapping[str, float]  #: loss and measures over the set, by name
    counts: Mapping[str, float]  #: by name: the count that the sum was divided by
    samples: int  #: of the set
    plan: int  #: number of the plan

    @property
    def loss(self) -> float:
        """The mean loss."""
        return self.means[LOSS]


class _Sums:
    """Takes the place of the loss in forward passes, and keeps what the loss and all measures give.

    One that raises ends no pass, because other ranks would wait for ever: the round's end has all raise it.
    """

    error: Exception | None = None  #: that a measure raised first

    def __init__(self, measures: Mapping[str, Loss]) -> None:
        self._measures = measures
        self._given: list[Tensor | float] = []

    def __call__(self, output: Any, batch: Batch) -> tuple[Tensor, int]:
        given: list[Tensor | float] = []
        try:
            for measure in self._measures.values():
                total, count = measure(output, batch)
                given += (_now(total), _now(count))
        except Exception as error:
            if lost_within(error) is not None:
                raise
            self.error = self.error or error
        else:
            self._given += given
        return torch.zeros(()), 0

    def values(self, accelerator: Accelerator) -> Tensor:
        """The sum and count of each measure: [measures, 2], in double precision, on the host."""
        numbers = torch.tensor(accelerator.read(*self._given), dtype=torch.float64)
        rows = len(self._measures)
        return numbers.view(len(numbers) // (2 * rows), rows, 2).sum(0)


def _now(number: Tensor | float) -> Tensor | float:
    """The value of a measure, as it is now: it may give the same tensor again, changed."""
    if isinstance(number, Tensor) and number.device.type != "cpu":
        return number.detach().double().reshape(()).clone()
    return float(number)


def evaluate(
    engine: Engine,
    held_out: HeldOut,
    name: str,
    step: int,
    loss: Loss,
    data: DataOptions,
    weights: str,
    reads: BatchFormat | None = None,
) -> Evaluation:
    """Evaluates a held-out set. All members of the plan call it together, between two steps.

    Args:
        engine: that of the plan in force.
        held_out: the set.
        name: its name.
        step: updates that were made.
        loss: that of the training.
        data: how the training makes batches. A set with a collate of its own is padded.
        weights: "value" or "average".
        reads: makes of samples and batches what the model reads; None: they are that.

    Raises:
        SampleError: a member could not read a sample; on all members.
        LedgerError: a member saw other samples than it was to see; on all members.
        MeasureError: the loss or a measure raised on a member; on all members.
        ModelError: a forward pass changed a buffer of the state dict on a member; on all members.
        ValueError: there is no average to evaluate, or a measure counted nothing.
    """
    measures = {LOSS: held_out.loss or loss, **held_out.measures}
    reader = engine.held_out(held_out.dataset, held_out.collate or data.collate, reads)
    packing = data.packing if held_out.collate is None else None
    rows: list[Tensor] = []
    with averaged(engine, weights), _evaluating(engine):
        for dealt in rounds(engine.loss_plan, held_out.dataset, engine.linear, packing):
            try:
                rows.append(_round(engine, dealt, reader, measures))
            except ALIKE:
                raise
            except Exception:
                engine.after_recovery = True  # the others wait in this round: a script that goes on meets them
                raise
    _check_buffers(engine)
    sums = torch.cat(rows)
    totals = [exact_sum(sums[:, row, 0].tolist()) for row in range(len(measures))]
    counts = [exact_sum(sums[:, row, 1].tolist()) for row in range(len(measures))]
    if not all(counts):
        empty = [key for key, count in zip(measures, counts, strict=True) if not count]
        raise ValueError(f"evaluation on {name!r}: {', '.join(empty)} counted nothing in the set")
    return Evaluation(
        name=name,
        step=step,
        weights=weights,
        means={key: total / count for key, total, count in zip(measures, totals, counts, strict=True)},
        counts=dict(zip(measures, counts, strict=True)),
        samples=len(held_out.dataset),
        plan=engine.plan.number,
    )


def rounds(plan: Plan, dataset: Dataset, linear: int, packing: Packing | None = None) -> Iterator[BatchPlan]:
    """The micro-batches of each lane, round by round.

    A round has the samples of a step, the last one fewer. Samples of known length are dealt by it, as in
    training, and packed if those are.
    """
    length, size = length_of(dataset), len(dataset)
    for first in range(0, size, plan.global_batch):
        samples = tuple(range(first, min(size, first + plan.global_batch)))
        lengths = None
        if length is not None:
            lengths = BatchLengths(tokens=tuple(map(length, samples)), linear=linear)
        if lengths is not None and packing is not None:
            yield deal(packing, plan, 0, samples, lengths)
        elif len(samples) == plan.global_batch:
            yield batch_plan(plan, 0, samples, lengths)
        else:
            yield short_batch_plan(plan, 0, samples)


def _round(engine: Engine, dealt: BatchPlan, reader: HeldOutReader, measures: Mapping[str, Loss]) -> Tensor:
    """Evaluates a round. Returns the sums and counts of each rank, [ranks, measures, 2]."""
    sums = _Sums(measures)
    engine.meet()
    passed = engine.forward(dealt, reader, sums)
    seen, failure = passed.samples, passed.failure
    values = sums.values(engine.accelerator)
    place = engine.loss_plan.places.get(engine.device)
    if place is not None and place.position:
        values.zero_()  # all members of a TP group have the same output: only the first counts it
    said = _HEAD.pack(seen, failure.index + 1 if failure else 0, sums.error is not None)
    head = torch.frombuffer(bytearray(said), dtype=torch.uint8)
    record = torch.cat([head, values.reshape(-1).view(torch.uint8)])
    records = engine.everyone.all_gather(record)
    engine.communicators.received()
    heads = [_HEAD.unpack(each[: _HEAD.size].numpy().tobytes()) for each in records]
    if any(raised for _, _, raised in heads):
        raise _of_measure(engine, sums.error)
    for rank, (_, failed, _) in enumerate(heads):
        if failed:
            if failure is not None and failure.index == failed - 1:
                raise failure
            raise SampleError(failed - 1, f"see the output of {engine.plan.members[rank]}")
    if [seen for seen, _, _ in heads] != engine.hashes(dealt):
        raise LedgerError("an evaluation did not see the samples of its set")
    numbers = records[:, _HEAD.size :].clone(memory_format=torch.contiguous_format)
    return numbers.view(torch.float64).view(len(records), -1, 2)


def _of_measure(engine: Engine, error: Exception | None) -> Exception:
    """The error of a round whose measure raised on a member. All members call it together.

    Args:
        engine: of the plan in force.
        error: raised by a measure on this member; None: none did.
    """
    if engine.everyone.size == 1 and error is not None:
        return error
    mine = f"raised {described(error)} (on {engine.device})" if error is not None else ""
    texts = all_gather_text(engine.everyone, mine.encode("utf-8", "replace"))
    text = next(each for each in texts if each).decode()
    failed = MeasureError(f"the loss or a measure of the evaluation {text}")
    failed.__cause__ = error
    return failed


def _check_buffers(engine: Engine) -> None:
    """Checks that an evaluation changed no buffer of the state dict. All members call it together.

    Raises:
        ModelError: one did on a member; on all members.
    """
    error: ModelError | None = None
    try:
        engine.evaluated()
    except ModelError as raised:
        error = raised
    texts = all_gather_text(engine.everyone, str(error or "").encode())
    if error is not None:
        raise error
    if text := next(filter(None, texts), None):
        raise ModelError(text.decode())


@contextmanager
def _evaluating(engine: Engine) -> Iterator[None]:
    """Inside, modules are in evaluation mode, and gradients are off."""
    sections = [section for module in engine.modules.values() for section in module.local.modules.values()]
    training = [part for section in sections for part in section.modules() if part.training]
    for part in training:
        part.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for part in training:
            part.training = True
