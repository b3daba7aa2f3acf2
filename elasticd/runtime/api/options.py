"""What a script asks of its Job, and what follows from it: the job's spec, its checkpoints, the recipe."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from elasticd_planner.cost.model_profile import ModelProfile
from elasticd_planner.spec.batch import Sampler
from elasticd_planner.spec.plan import StatePolicy
from elasticd_planner.spec.sample_packing import linear_of
from elasticd_planner.value import Invalid

from elasticd.records import JobSpec
from elasticd.runtime.api.evaluation import HeldOut
from elasticd.runtime.checkpoint.loader import offered
from elasticd.runtime.checkpoint.saver import Keeping
from elasticd.runtime.data.loader import Collate, Dataset, length_of, sample_tokens
from elasticd.runtime.data.stream import Stream, Streamed
from elasticd.runtime.engine.activation_checkpoint import Recompute, asked
from elasticd.runtime.engine.mixed_precision import Name, Precision, lowered, precision_of
from elasticd.runtime.engine.pipeline_stage import Loss
from elasticd.runtime.engine.recipe import MakeOptimizer, MakeScheduler, Recipe
from elasticd.runtime.model.model import Model
from elasticd.runtime.model.optimizer_check import refuse_others
from elasticd.runtime.snapshot.restore import Snapshots
from elasticd.version import __version__
from elasticd.wire.messages import Hello
from elasticd.wire.unix_socket import SLOT_VARIABLE

#: What a held-out set is called that was given without a name.
HELD_OUT = "held_out"


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of `elasticd.Job`, which says what they mean. Raises ValueError or TypeError."""

    model: Model
    loss: Loss
    optimizer: MakeOptimizer
    dataset: Dataset | Stream
    global_batch: int
    micro_batch: int
    seed: int
    clip: float | None
    collate: Collate
    length: Callable[[int], int] | None
    readers: int
    scheduler: MakeScheduler | None
    zero: int
    replicas: int | None
    precision: Name | Precision | None
    recompute: Recompute
    profile: str | os.PathLike[str] | None
    checkpoint: str | os.PathLike[str] | None
    checkpoint_every: int
    keep: int
    checkpoint_keep_every: int | None

    def __post_init__(self) -> None:
        if self.readers < 0:
            raise ValueError(f"readers must not be negative, not {self.readers}")
        if isinstance(self.dataset, Stream) and self.length is not None:
            raise ValueError("length is of a map-style dataset's samples; a stream's are dealt by their tokens")
        spec, dims = self.model.spec, dict[str, int]()
        for section in spec.sections(0, len(spec.layers)):
            for parameter in spec.section(section):
                if parameter.kind == "trained":
                    dims[spec.owner(f"{section}.{parameter.name}")] = len(parameter.shape)
        refuse_others(self.optimizer, list(dims.items()))

    @cached_property
    def tokens(self) -> float:
        """Of a sample, on average."""
        return self.dataset.tokens if isinstance(self.dataset, Stream) else sample_tokens(self.dataset)

    @cached_property
    def numbers(self) -> Precision | None:
        return precision_of(self.precision, self.global_batch * self.tokens)

    @cached_property
    def trained(self) -> Model:
        """The model as its modules compute."""
        return lowered(self.model, self.numbers)

    def spec(self, name: str) -> JobSpec:
        may_recompute, recomputed = asked(self.recompute, self.trained.layers)
        return JobSpec(
            job=name,
            model=self.trained.spec,
            global_batch=self.global_batch,
            micro_batch=self.micro_batch,
            samples=0 if isinstance(self.dataset, Stream) else len(self.dataset),
            sample_tokens=self.tokens,
            seed=self.seed,
            state=StatePolicy(
                zero=self.zero, replicas=1 if self.zero and self.replicas is None else self.replicas
            ),
            profile=self._profile(),
            first=self.trained.first(),
            numbers=self.numbers.numbers if self.numbers is not None else None,
            recompute=may_recompute,
            recomputed=recomputed,
            shifts=hasattr(self.dataset, "at_length"),
        )

    def keeping(self) -> Keeping | None:
        if self.checkpoint is None:
            return None
        return Keeping(
            folder=Path(self.checkpoint).absolute(),
            every=self.checkpoint_every,
            keep=self.keep,
            keep_every=self.checkpoint_keep_every,
        )

    def recipe(self, checkpoints: Path | None, snapshots: Snapshots) -> Recipe:
        source, dataset = None, self.dataset
        if isinstance(dataset, Stream):
            linear = linear_of(self.trained.spec)
            source, dataset = Streamed(dataset, self.global_batch, linear, self.readers), [None]
        return Recipe(
            model=self.trained,
            loss=self.loss,
            optimizer=self.optimizer,
            dataset=dataset,
            source=source,
            collate=self.collate,
            sampler=Sampler(size=len(dataset), global_batch=self.global_batch, seed=self.seed),
            clip=self.clip,
            length=length_of(dataset) if self.length is None else self.length,
            readers=self.readers,
            scheduler=self.scheduler,
            checkpoints=checkpoints,
            snapshots=snapshots,
            recomputed=asked(self.recompute, self.trained.layers)[1],
            precision=self.numbers,
        )

    def _profile(self) -> ModelProfile | None:
        """Raises ValueError, with the file's name, where it cannot be read or is no profile of this model."""
        from elasticd_planner.problem_files.profile_file import (
            given_profile,  # of no use to jobs without a profile
        )

        if self.profile is None:
            return None
        path = os.fspath(self.profile)
        try:
            return given_profile(Path(path).read_bytes(), self.trained.spec, self.tokens, self.micro_batch)
        except OSError as error:
            raise ValueError(f"profile {path} cannot be read: {error.strerror}") from None
        except Invalid as error:
            raise ValueError(f"profile {path}: {error}") from None


def held_out_sets(given: Dataset | HeldOut | Mapping[str, Dataset | HeldOut] | None) -> dict[str, HeldOut]:
    """By name, in the order in which they were given."""
    if given is None:
        return {}
    named = given if isinstance(given, Mapping) else {HELD_OUT: given}
    return {name: each if isinstance(each, HeldOut) else HeldOut(dataset=each) for name, each in named.items()}


def hello(spec: JobSpec, keeping: Keeping | None) -> Hello:
    """What this worker says of itself first. Raises ValueError where torchrun did not start it."""
    return Hello(
        job=spec.job,
        # A torchrun for one device of several calls its worker's rank 0, whichever device that is.
        local_rank=int(os.environ.get(SLOT_VARIABLE) or environment("LOCAL_RANK")),
        world_size=int(environment("WORLD_SIZE")),
        pid=os.getpid(),
        spec=spec,
        checkpoints=offered(keeping.folder, spec) if keeping is not None else (),
        probes=True,
        rehearses=True,
        closes=True,
        release=__version__,
    )


def environment(name: str) -> str:
    value = os.environ.get(name)
    if value is None:
        raise ValueError(
            f"{name} is not set: start the script with torchrun --rdzv-backend=elasticd --rdzv-id=JOB ..."
        )
    return value
