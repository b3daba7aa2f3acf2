"""`Recipe`: the model, data and options of a job, the same under every plan."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Real

import numpy as np
import torch
from elasticd_planner.cost.schedule import Pass, passes
from elasticd_planner.numeric import Ints
from elasticd_planner.spec.batch import Sampler, TokenBatchSampler
from elasticd_planner.spec.sample_packing import linear_of

from elasticd.runtime.accelerator import CPU, Accelerator
from elasticd.runtime.checkpoint.options import CheckpointingOptions
from elasticd.runtime.comm.communicators import Connect
from elasticd.runtime.data.loader import item_rows, length_of, sample_tokens
from elasticd.runtime.data.options import DataOptions
from elasticd.runtime.data.packing import all_lengths
from elasticd.runtime.data.prefetch import Dataset, SamplePrefetcher, reading_threads
from elasticd.runtime.data.step_samples import Feed, MapStyleSamples
from elasticd.runtime.data.stream import Stream, Streamed
from elasticd.runtime.engine.activation_checkpoint import asked
from elasticd.runtime.engine.item_rows import FirstItem, first_item
from elasticd.runtime.engine.mixed_precision import Precision, lowered, precision_of
from elasticd.runtime.engine.parallelism import ParallelismOptions
from elasticd.runtime.engine.stability import StabilityOptions
from elasticd.runtime.model.balance import Balance, BalancedBlock, balanced_blocks
from elasticd.runtime.model.batch_format import BatchFormat
from elasticd.runtime.model.model import Loss, Model
from elasticd.runtime.model.optimizer_check import MakeScheduler
from elasticd.runtime.model.parameter_groups import MakeOptimizer, ParameterGroups
from elasticd.runtime.parallel.router_balance import first_counts
from elasticd.runtime.parallel.sequence_parallel import refuse_model
from elasticd.runtime.snapshot.restore import Snapshots
from elasticd.runtime.threads import DaemonThreads

#: (stages, stage, micro-batches, chunks) -> the passes of that stage in order. Backward passes through one
#: chunk go by ascending index of the micro-batch.
Schedule = Callable[[int, int, int, int], Iterator[Pass]]


#: The least and the largest seed that torch's generators take as it is.
_SEEDS = (-(1 << 63), (1 << 63) - 1)


def _whole(name: str, value: object, least: int, largest: int | None = None) -> int:
    """An argument as a whole number, which NumPy's and torch's integers are, too."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if (
        number is None
        or isinstance(value, bool)
        or number < least
        or (largest is not None and number > largest)
    ):
        end = "on" if largest is None else f"to {largest}"
        raise ValueError(f"{name} is {value!r}; it must be a whole number from {least} {end}")
    return number


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The arguments of `elasticd.Job`, which documents them, and values that follow from them.

    Raises:
        ValueError: arguments that do not go together.
    """

    model: Model  #: the user's model; converted here to the precision that its modules compute in
    loss: Loss
    optimizer: MakeOptimizer
    dataset: Dataset | Stream
    global_batch: int  #: samples of a step
    micro_batch: int = 1  #: samples of a micro-batch
    seed: int = 0
    clip: float | None = None  #: largest norm of the gradient
    scheduler: MakeScheduler | None = None
    data: DataOptions = field(default_factory=DataOptions)
    parallelism: ParallelismOptions = field(default_factory=ParallelismOptions)
    checkpointing: CheckpointingOptions = field(default_factory=CheckpointingOptions)
    balance: Balance | None = None  #: of a mixture's experts
    stability: StabilityOptions = field(default_factory=StabilityOptions)
    snapshots: Snapshots = field(default_factory=Snapshots)  #: those that this node's agent keeps
    accelerator: Accelerator = CPU  #: where this process computes
    schedule: Schedule = passes  #: of a stage: 1F1B
    connect: Connect | None = None  #: makes the communicators for tensors of the model; None: see `agreed`
    source: Feed | None = None  #: gives the samples of each step; None: `dataset` does, by `seed`

    def __post_init__(self) -> None:
        for name, least, largest in (("global_batch", 1, None), ("micro_batch", 1, None), ("seed", *_SEEDS)):
            object.__setattr__(self, name, _whole(name, getattr(self, name), least, largest))
        if self.clip is not None and not (isinstance(self.clip, Real) and self.clip > 0):
            raise ValueError(
                f"clip must be a positive number, the largest norm of a gradient, or None for no clipping, not "
                f"{self.clip!r}"
            )
        if isinstance(self.dataset, Stream) and self.data.length is not None:
            raise ValueError("length is of a map-style dataset's samples; a stream's are dealt by their tokens")
        if isinstance(self.dataset, Stream) and self.data.global_tokens is not None:
            raise ValueError(
                "global_tokens takes samples by lengths that are known beforehand: a stream's are not; use "
                "global_batch, or a map-style dataset"
            )
        if self.data.packing is not None and not isinstance(self.dataset, Stream) and self.length is None:
            raise ValueError(
                "packing needs the tokens of each sample before it is read: give the dataset an attribute "
                "`lengths`, or give DataOptions(length=...)"
            )
        if self.parallelism.sequence_parallel:
            refuse_model(self.model)
        if self.balance is not None:
            self._check_balance()
        object.__setattr__(self, "model", lowered(self.model, self.precision))

    def _check_balance(self) -> None:
        """Has the model's biases move, if they are to."""
        if not isinstance(self.balance, Balance):
            raise ValueError(f"balance is {self.balance!r}: give elasticd.Balance(loss=0.001), say")
        if self.parallelism.sequence_parallel:
            raise ValueError(
                "balance counts rows of whole samples, and sequence_parallel gives a device slices of them: "
                "leave ParallelismOptions(sequence_parallel=...) out"
            )
        of_samples = self.balance.loss is not None and self.balance.over == "sample"
        if of_samples and self.data.packing is not None and self.data.packing.cut:
            raise ValueError(
                "Balance(loss=) is of whole samples, and packing may cut one over lanes, none of which has all "
                'of its rows: give Balance(over="step"), or Packing(cut=False), or Balance(bias=)'
            )
        counts = [
            name
            for name, there in (("bias=", self.balance.bias), ('over="step"', self.balance.over == "step"))
            if there
        ]
        if self.model.graph is not None and counts:
            raise ValueError(
                f"Balance({', '.join(counts)}) of a model of several modules is not supported: give a "
                "Balance(loss=) of each sample"
            )
        blocks = self.balanced.values()
        biases = [block.bias for block in blocks if block.bias is not None]
        dtype = torch.promote_types(self.model.dtype, torch.float32)
        first = {
            block.counts: first_counts(block.number, dtype) for block in blocks if block.counts is not None
        }
        if biases or first:
            object.__setattr__(self, "model", self.model.counting(biases, first))

    @cached_property
    def balanced(self) -> dict[str, BalancedBlock]:
        """The blocks of the module with the loss whose experts are balanced, by section."""
        if self.balance is None:
            return {}
        return balanced_blocks(self.balance, self.loss_model.sections, self.loss_model.routers)

    @property
    def loss_model(self) -> Model:
        """The module with the loss; of a model of one module that one."""
        return self.model if self.model.graph is None else self.model.graph.loss_module

    def module(self, name: str) -> Model:
        """A module of the model, by its name in the plan; of a model of one module that one."""
        return self.model if self.model.graph is None else self.model.graph.modules[name]

    @cached_property
    def tokens(self) -> float:
        """Tokens of a sample, on average."""
        if isinstance(self.dataset, Stream):
            return self.dataset.tokens
        graph = self.model.graph
        kinds = graph.items if graph is not None else ()
        return sample_tokens(self.dataset, self.data.collate, self.model.reads, kinds=kinds)

    @cached_property
    def first_items(self) -> dict[str, FirstItem]:
        """By module of items the first one that it runs on."""
        graph, dataset = self.model.graph, self.dataset
        if graph is None or isinstance(dataset, Stream):
            return {}
        return {name: first_item(dataset, graph.modules[name], self.precision) for name in graph.encoders}

    def row_ratio(self, module: str) -> float:
        """Rows of an item on which the blocks of a module work, for each that a dataset says; the same on every
        rank."""
        graph = self.model.graph
        assert graph is not None
        known = item_rows(self.dataset, graph.modules[module].items) is not None
        return self.first_items[module].whole_ratio if known else 1.0

    def step_samples(self, tokens: float) -> float:
        """Samples of a step, on average, if they have so many tokens on average."""
        return self.data.global_tokens / tokens if self.data.global_tokens else float(self.global_batch)

    @cached_property
    def precision(self) -> Precision | None:
        """The types that modules compute in; None: those that the user made them of."""
        given = self.parallelism.precision
        return precision_of(given, self.step_samples(self.tokens) * self.tokens if given == "fp16" else 1.0)

    @cached_property
    def reads(self) -> BatchFormat | None:
        """Reads samples and batches for the model; None: its sections take them as they are."""
        reads = self.model.reads
        if reads is not None and self.loss is not self.model.loss:
            reads = reads.for_other_loss()
        return reads.alone() if reads is not None and self.parallelism.sequence_parallel else reads

    @property
    def master(self) -> torch.dtype | None:
        """The type of master weights; None: there are none."""
        return self.precision.master if self.precision is not None and self.precision.separate else None

    @cached_property
    def parameter_groups(self) -> ParameterGroups:
        """The groups that `optimizer` puts the model's parameters in. Raises OptimizerError, or as it does."""
        parameters = self.model.trained_parameters()
        if (master := self.master) is not None:
            parameters = {name: parameter.to(master) for name, parameter in parameters.items()}
        return ParameterGroups.of(self.optimizer, parameters)

    @cached_property
    def recomputed(self) -> tuple[int, ...]:
        """Blocks that recompute their activations under every plan, because the user named them."""
        return asked(self.parallelism.recompute, self.model.layers)[1]

    def recomputed_in(self, module: str) -> tuple[int, ...]:
        """Those of a module, by its name in the plan: the user names blocks of the one with the loss."""
        graph = self.model.graph
        return () if graph is not None and graph.modules[module].items else self.recomputed

    @cached_property
    def length(self) -> Callable[[int], int] | None:
        """Tokens of a sample of a map-style dataset by its index; None: not known."""
        assert not isinstance(self.dataset, Stream)
        given = self.data.length
        if given is None:
            return length_of(self.dataset)
        return lambda index: int(given(index))  # NumPy's integers wrap around

    @property
    def known_length(self) -> Callable[[int], int] | None:
        """`length`; None for a stream, too."""
        return None if isinstance(self.dataset, Stream) else self.length

    @cached_property
    def lengths(self) -> Ints:
        """Tokens of every sample of a map-style dataset of known lengths."""
        assert not isinstance(self.dataset, Stream)
        if self.data.length is None:
            return all_lengths(self.dataset, len(self.dataset))
        return np.array([self.data.length(index) for index in range(len(self.dataset))], dtype=np.int64)

    @cached_property
    def planning(self) -> DaemonThreads:
        """The thread in which batches are planned beside training."""
        return DaemonThreads("batches")

    @property
    def samples(self) -> int:
        """Samples of a map-style dataset; 0 of a stream."""
        return 0 if isinstance(self.dataset, Stream) else len(self.dataset)

    @cached_property
    def sampler(self) -> Sampler | TokenBatchSampler:
        """Draws the samples of each step from a map-style dataset."""
        if self.data.global_tokens is not None:
            return TokenBatchSampler(self.lengths, self.data.global_tokens, self.seed)
        return Sampler(size=self.samples, global_batch=self.global_batch, seed=self.seed)

    @cached_property
    def feed(self) -> Feed:
        """Gives the samples of each step: one object under all plans, so that a new one finds what was read."""
        if self.source is not None:
            return self.source
        linear, packing = linear_of(self.model.spec), self.data.packing
        if isinstance(self.dataset, Stream):
            return Streamed(self.dataset, self.global_batch, linear, self.data.readers, packing, self.reads)
        reader = SamplePrefetcher(self.dataset, self._reading)
        return MapStyleSamples(self.sampler, reader, self.length, linear, packing)

    def reader_of(self, dataset: Dataset) -> SamplePrefetcher:
        """The reader of a held-out dataset, the same one for all evaluations, with the threads that read the
        training's samples."""
        return self._readers.setdefault(id(dataset), SamplePrefetcher(dataset, self._reading))

    @cached_property
    def _reading(self) -> DaemonThreads | None:
        return reading_threads(self.data.readers)

    @cached_property
    def _readers(self) -> dict[int, SamplePrefetcher]:
        """By the identity of the dataset, which its reader keeps."""
        return {}
