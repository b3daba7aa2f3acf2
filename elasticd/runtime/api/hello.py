"""A worker's first message to its agent, `Hello`, and the `JobSpec` in it, made of the Job's recipe."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence, Sized
from numbers import Real
from pathlib import Path
from types import MappingProxyType

import msgspec
import numpy as np
import torch
from elasticd_migration.schema import MASTER
from elasticd_planner.cost.model_profile import ModelProfile
from elasticd_planner.layout.module_passes import ROWS
from elasticd_planner.spec.packed_sequences import PackedSequences
from elasticd_planner.spec.plan_checks import check_batch, check_model
from elasticd_planner.spec.sample_packing import linear_of
from elasticd_planner.spec.sequence_lengths import Lengths
from elasticd_planner.value import Invalid
from torch.utils.data import DataLoader

from elasticd.records import AnyJobSpec, JobSpec, ModuleSpec
from elasticd.runtime.accelerator import Accelerator
from elasticd.runtime.api.evaluation import HeldOut
from elasticd.runtime.api.several_modules import check_plan_of, module_specs, taken_rows, without_items
from elasticd.runtime.checkpoint.loader import longest_trained, offered
from elasticd.runtime.data.collate import Unlike, pad, text_parts
from elasticd.runtime.data.loader import length_of, reading
from elasticd.runtime.data.packing import KnownLengths, known_lengths
from elasticd.runtime.data.prefetch import Dataset
from elasticd.runtime.data.stream import Stream
from elasticd.runtime.engine.activation_checkpoint import asked
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.model.balance import LENGTHS_UNKNOWN
from elasticd.runtime.model.model import Loss, Model
from elasticd.runtime.model.optimizer_check import NotCarried, ScriptOptimizer, refuse_others, refuse_unsaved
from elasticd.runtime.model.parameter_groups import OptimizerError
from elasticd.runtime.parallel.sequence_mixing import packable
from elasticd.runtime.reference.chosen_samples import first_items
from elasticd.runtime.reference.comparison import NotCompared, refuse_differences
from elasticd.runtime.reference.section_bytes import section_bytes
from elasticd.system.logs import is_first_worker, say
from elasticd.version import __version__
from elasticd.wire.unix_socket import ROUND_VARIABLE, SLOT_VARIABLE
from elasticd.wire.worker import MOST_NAME, Hello, WorkerDevice

log = logging.getLogger(__name__)

#: (folder, record of the job) -> the names of the checkpoints there that it can go on from, the newest first.
Offer = Callable[[Path, JobSpec], tuple[str, ...]]

#: How many times longer than the mean the sequence of a token of a stream is taken to be.
_UNLIKE = 3.0
#: Copies of the parameters that a step of the user's modules and one of the engine take: values and gradients
#: of both, what is compared, and the optimizer's state.
_COPIES = 12
#: How many times longer than those that were asked for their lengths another sample may be.
_LONGER = 2


def check_arguments(
    model: object, optimizer: object, scheduler: object, dataset: object, collate: object
) -> None:
    """Refuses arguments of a Job of another kind than it takes, as a plain script has them.

    Raises:
        TypeError: with what to write instead.
        ValueError: the dataset is empty.
    """
    if not isinstance(model, Model):
        raise TypeError(
            f"model is {_kind(model)}: give elasticd.from_module(model, blocks=...), for a "
            "model of transformers elasticd.from_hf(model), or elasticd.Model(embed=..., blocks=..., head=...)"
        )
    if isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer):
        raise TypeError(
            f"optimizer is of type {type(optimizer).__name__}: give a function that makes one of the "
            "parameters that a device holds, optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3)"
        )
    if scheduler is not None and not callable(scheduler):
        raise TypeError(
            f"scheduler is of type {type(scheduler).__name__}: give a function of the optimizer, "
            "scheduler=lambda optimizer: ..., since a device makes its optimizer anew under each plan"
        )
    if callable(getattr(collate, "convert_tokens_to_ids", None)):
        raise TypeError(
            f"collate is of type {type(collate).__name__}: give a collator, "
            "transformers.DataCollatorForSeq2Seq(tokenizer) say"
        )
    if isinstance(dataset, Stream):
        return
    if isinstance(dataset, Mapping):
        names = ", ".join(map(repr, dataset))
        raise TypeError(f"dataset is a {type(dataset).__name__} with {names}: give one of them, dataset[...]")
    if isinstance(dataset, DataLoader):
        raise TypeError(
            "dataset is of type DataLoader: give dataset=loader.dataset with global_batch=, and its collate_fn "
            "as DataOptions(collate=...); the job draws the order of the samples"
        )
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"dataset is {_kind(dataset)}, without a length or without [index]: give one that "
            "has both, or elasticd.Stream(dataset=dataset, tokens=...) for one that is read in order"
        )
    if not len(dataset):
        raise ValueError("dataset is empty: it must hold at least one sample")


def check_callbacks(callbacks: object, base: type) -> None:
    """Refuses what is no list of callbacks.

    Raises:
        TypeError: with what to write instead.
    """
    if isinstance(callbacks, base):
        raise TypeError(f"callbacks is {_kind(callbacks)}: give a list, callbacks=[...]")
    if not isinstance(callbacks, Sequence) or not all(isinstance(each, base) for each in callbacks):
        raise TypeError(
            f"callbacks is {callbacks!r}: give a list of objects of classes of your own that extend "
            "elasticd.Callback"
        )


def check_grace(grace: object) -> None:
    """Refuses what is no time.

    Raises:
        ValueError: it is no number of seconds.
    """
    if not isinstance(grace, Real) or not 0 <= float(grace) < math.inf:
        raise ValueError(f"grace is {grace!r}; it must be a number of seconds from 0 on")


def warn_of_repeats(recipe: Recipe) -> None:
    """One line where a step takes more samples than there are."""
    if isinstance(recipe.dataset, Stream) or recipe.data.global_tokens is not None or not is_first_worker():
        return
    if recipe.global_batch > (samples := len(recipe.dataset)):
        log.warning(
            "a step takes %d samples, and the dataset has %d: a step takes them several times",
            recipe.global_batch,
            samples,
        )


def _kind(given: object) -> str:
    return (
        f"the class {given.__name__} itself" if isinstance(given, type) else f"of type {type(given).__name__}"
    )


def check_optimizer(recipe: Recipe) -> ScriptOptimizer | None:
    """Tries the user's optimizer and scheduler on small parameters with the names of the model's. A function
    that raises, because it asks for what the script makes later, is not tried.

    Returns:
        Both as they begin, to compare with a checkpoint's; None: they were not tried.

    Raises:
        OptimizerError: the optimizer is of other parameters than its function got.
        NotElementWise: it would step on a part of a parameter differently than on all of it.
        NotCarried: it or the scheduler would go on otherwise after a switch or from a checkpoint.
    """
    try:
        groups = recipe.parameter_groups
    except OptimizerError:
        raise
    except Exception:
        log.debug("the optimizer's function could not be tried", exc_info=True)
        return None
    if (left_out := groups.left_out) and is_first_worker():
        names = ", ".join(left_out[:3]) + (", ..." if len(left_out) > 3 else "")
        log.warning(
            "the optimizer leaves out %d of %d parameters, which keep their first values: %s. "
            "requires_grad_(False) before the Job freezes them, and spares their gradients",
            len(left_out),
            len(groups.parameters),
            names,
        )
    refuse_others(recipe.optimizer, groups)
    kept = refuse_unsaved(recipe.optimizer, recipe.scheduler, groups)
    if kept is not None and MASTER in kept.keeps:
        raise NotCarried(
            f"{kept.kinds['optimizer']} keeps {MASTER!r} for its parameters, which is the name of a job's own "
            "master weights: give it another name"
        )
    return kept


def check_plan(recipe: Recipe) -> None:
    """Tries the plan that the user gives, if he does.

    Raises:
        Invalid: it is of another model or batch.
    """
    if (given := recipe.parallelism.plan) is not None:
        if recipe.model.graph is None:
            check_model(given, recipe.model.spec)
        else:
            check_plan_of(given, recipe.model.graph)
        check_batch(given, recipe.global_batch, recipe.micro_batch)


def loss_of(model: Model, loss: Loss | None) -> Loss:
    """The loss of a job, or that of its model where the job gives none.

    Raises:
        ValueError: there is none.
    """
    if (chosen := loss or model.loss) is None:
        own = "" if model.reads is None else ": that of this model is no cross entropy of its logits and labels"
        raise ValueError(
            f"the job has no loss{own}. Give Job(loss=...) a function of (output, batch) that returns the sum "
            "over the targets, and their count"
        )
    return chosen


def check_padding(recipe: Recipe) -> None:
    """Refuses padded samples of unknown lengths where routers are balanced, before a step would.

    Raises:
        ValueError: what would say their lengths.
    """
    padded = recipe.micro_batch > 1 and recipe.data.packing is None and not isinstance(recipe.dataset, Stream)
    if recipe.balance is not None and padded and recipe.length is None:
        raise ValueError(LENGTHS_UNKNOWN)


def check_batch_format(recipe: Recipe) -> None:
    """Makes a batch of the first samples, for a model that reads batches of its own library.

    Raises:
        ValueError: they make none, or it has no targets for the model's own loss.
    """
    reads, dataset = recipe.reads, recipe.dataset
    if reads is None or isinstance(dataset, Stream):
        return
    samples = [dataset[index] for index in range(min(2, len(dataset)))]
    items = recipe.model.graph.items if recipe.model.graph is not None else frozenset[str]()
    try:
        if items and recipe.data.collate is not pad:  # which gets what is no module's items
            for sample in samples:
                reads.sample(sample)
            samples = [without_items(sample, items) for sample in samples]
        if recipe.data.packing is not None:
            batch = next(iter([reads.row(sample) for sample in samples]))
        else:
            batch = reading(reads, recipe.data.collate)(samples)
    except Exception as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        text = text_parts(samples[0])
        if text and not isinstance(error, Unlike):
            raise ValueError(
                f"the samples have text under {', '.join(text)}, of which the collate makes no batch "
                f"({said}): leave it out, dataset.remove_columns({text!r})"
            ) from error
        raise ValueError(f"the first samples make no batch: {said}") from error
    if recipe.loss is recipe.model.loss and not reads.has_targets(batch):
        named = ", ".join(str(name) for name, part in batch.items() if part is not None)
        raise ValueError(
            f"the model's own loss needs labels, and a batch has {named}: "
            "DataCollatorForLanguageModeling(tokenizer, mlm=False) makes them of the tokens; or give "
            "Job(loss=...)"
        )


def check_packing(recipe: Recipe, held_out: Mapping[str, HeldOut] = MappingProxyType({})) -> None:
    """Tries whether the model trains on packed rows, if the job packs: a few samples in one row and apart.

    A stream is read by one rank alone, and not before the first step: its samples are not tried.

    Raises:
        ValueError: a module sees one sequence through another, the loss is no sum over tokens, or a sample is
            longer than a row.
    """
    packing = recipe.data.packing
    if packing is None:
        return
    if recipe.data.global_tokens is not None:
        _ = recipe.sampler  # refuses a sample that is longer than a step
    found = [recipe.model.unpackable] if recipe.model.unpackable else []
    sets: dict[str, Dataset] = {
        f" of held-out set {name!r}": each.dataset for name, each in held_out.items() if each.collate is None
    }
    if not isinstance(recipe.dataset, Stream):
        dataset = sets[""] = recipe.dataset
        found = _packable(recipe, dataset)
    elif not found:
        log.warning(
            "a stream's samples are not tried in packed rows before the job starts: run `elasticd check`"
        )
    for name, each in sets.items():
        lengths = np.asarray(getattr(each, "lengths", ()))
        if packing.tokens is None or packing.cut or not lengths.size:
            continue
        longest = int(lengths.argmax())
        if lengths[longest] > packing.tokens:
            found.append(
                f"sample {longest}{name} has {lengths[longest]} tokens, and a row has {packing.tokens}: raise "
                "Packing(tokens=...), or let sequences be cut over devices, Packing(cut=True)"
            )
    if found:
        raise ValueError("this job cannot pack its sequences: " + "; ".join(found))


def _packable(recipe: Recipe, dataset: Dataset) -> list[str]:
    """`packable` of a few samples of the dataset; of a model of several modules those of the fewest items, and
    one without."""
    graph = recipe.model.graph
    if graph is None:
        return packable(recipe.model, recipe.loss, [dataset[i] for i in range(min(3, len(dataset)))])
    counts = first_items(dataset, graph.items)
    chosen = sorted(range(len(counts)), key=lambda index: (not counts[index], counts[index]))
    chosen = [*chosen[:2], *chosen[2:][-1:]]
    try:
        taken = taken_rows(recipe, chosen)
    except ValueError as error:
        return [f"samples make no packed row: {error}"]
    missing = sorted(graph.loss_module.takes.keys() - taken[0].keys()) if graph.loss_module.reads else []
    packing = recipe.data.packing
    if missing and packing is not None and packing.cut:
        return [
            f"sequences may be cut over lanes, and the model does not say which tokens take rows of "
            f"{missing[0]}: keep them whole, Packing(cut=False)"
        ]
    samples = [without_items(dataset[index], graph.items) for index in chosen]
    return packable(recipe.model, recipe.loss, samples, taken=taken)


def check_modules(recipe: Recipe) -> None:
    """Compares one step of the user's own modules with one of the copies that train, where that can be done,
    and says so in one line.

    Raises:
        ModelError: they differ.
    """
    if isinstance(recipe.dataset, Stream):
        log.info("a stream's samples are not tried before the job starts: run `elasticd check`")
        return
    needed, free = _COPIES * _bytes(recipe.model), recipe.accelerator.free_bytes()
    if needed > free:
        gib = needed / (1 << 30), free / (1 << 30)
        log.info("a step of your own modules is not tried: it takes %.1f GiB, and %.1f are free", *gib)
        return
    began = time.perf_counter()
    try:
        step = refuse_differences(recipe, min(recipe.micro_batch, recipe.samples))
    except NotCompared as why:
        log.info("a step of your own modules could not be tried: %s", why)
        return
    finally:
        recipe.accelerator.give_back()
    seconds = time.perf_counter() - began
    say(
        "a step of your own modules and one of the copies that train agree: "
        f"loss {step.loss / step.targets:.6g}, {len(step.gradients)} gradients, {seconds:.1f} s; "
        "Job(check=False) leaves it out"
    )


def _bytes(model: Model) -> int:
    modules = [model] if model.graph is None else model.graph.modules.values()
    sections = [section for module in modules for section in module.sections.values()]
    return sum(parameter.nbytes for section in sections for parameter in section.parameters())


def job_spec(
    recipe: Recipe,
    job: str,
    held_out: Mapping[str, HeldOut] = MappingProxyType({}),
    *,
    measures: bool = True,
) -> JobSpec:
    """The record of a job's model, batch and options, the same from every worker.

    Args:
        recipe: of the job.
        job: its name.
        held_out: its held-out sets, by name.
        measures: runs the model's sections where there is no profile, for the bytes that plans count.

    Raises:
        ValueError: the batch does not divide into micro-batches, or the profile is not one of this model.
    """
    may_recompute, recomputed = asked(recipe.parallelism.recompute, recipe.model.layers)
    modules = module_specs(recipe)
    profile, modules = _profiles(recipe, modules)
    return JobSpec(
        job=job,
        model=recipe.model.spec,
        global_batch=recipe.global_batch,
        micro_batch=recipe.micro_batch,
        samples=recipe.samples,
        sample_tokens=recipe.tokens,
        seed=recipe.seed,
        state=recipe.parallelism.state,
        profile=profile,
        measured_bytes=section_bytes(recipe) if profile is None and measures and not modules else None,
        first=recipe.model.first(),
        numbers=recipe.precision.numbers if recipe.precision is not None else None,
        recompute=may_recompute,
        recomputed=recomputed,
        sequence_parallel=recipe.parallelism.may_slice,
        packed=packed_sequences(recipe, held_out),
        global_tokens=recipe.data.global_tokens or 0,
        plan=recipe.parallelism.plan,
        keep_plan=recipe.parallelism.keep_plan,
        shifts=hasattr(recipe.dataset, "at_length"),
        modules=modules,
    )


def packed_sequences(recipe: Recipe, held_out: Mapping[str, HeldOut]) -> PackedSequences | None:
    """The known lengths of a step's sequences before the job starts, if it packs them: for its first plan.

    Held-out sets are packed under the same plan, so that it must hold their longest one, too.
    """
    packing = recipe.data.packing
    if packing is None:
        return None
    if isinstance(recipe.dataset, Stream):
        mean, longest, sample = recipe.tokens, math.ceil(recipe.tokens), ""
        likely = math.ceil(_UNLIKE**2 * mean)
        # Nothing is known but the mean: they are taken for unlike ones until they are measured.
        lengths = Lengths(mean=mean, effective=_UNLIKE * mean, longest=_UNLIKE**2 * mean)
    else:
        assert recipe.length is not None
        given = None if recipe.data.length is not None else recipe.dataset
        if recipe.data.global_tokens is None:
            every = known_lengths(given, recipe.length, len(recipe.dataset))
        else:  # the sampler has asked for all of them
            every = KnownLengths.of_all(recipe.lengths)
        samples = max(1, round(recipe.step_samples(every.mean)))
        lengths, (at, longest) = every.of_steps(samples), every.longest
        sample, likely = f"sample {at}", 0 if every.every else _LONGER * longest
    for name, each in held_out.items():
        length = length_of(each.dataset)
        if each.collate is None and length is not None:
            asked = known_lengths(each.dataset, length, len(each.dataset))
            at, most = asked.longest
            likely = max(likely, 0 if asked.every else _LONGER * most)
            if most > longest:
                longest, sample = most, f"sample {at} of the held-out set {name!r}"
    return PackedSequences(
        sequences=recipe.step_samples(lengths.mean),
        lengths=lengths,
        longest=longest,
        sample=sample,
        likely=likely,
        linear=linear_of(recipe.model.spec),
        row_tokens=packing.tokens or 0,
        cut=packing.cut,
        least=packing.least,
    )


def _profiles(
    recipe: Recipe, modules: tuple[ModuleSpec, ...]
) -> tuple[ModelProfile | None, tuple[ModuleSpec, ...]]:
    """The profile of the model, and the modules with theirs, as a file has them that the job is given."""
    if recipe.parallelism.profile is None:
        return None, modules
    from elasticd_planner.problem_files.profile_file import (
        given_profile,
        given_rows,
    )  # other jobs do not need it

    path = os.fspath(recipe.parallelism.profile)
    try:
        text = Path(path).read_bytes()
        own = given_profile(text, recipe.model.spec, recipe.tokens, recipe.micro_batch)
        listed = []
        for each in modules:
            if each.items:
                # Rows that nothing says by itself are those of the items that were measured.
                rows = each.rows_an_item or given_rows(text, each.name)
                found = given_profile(text, each.model, rows or ROWS, 1, each.name)
                each = msgspec.structs.replace(each, profile=found, rows_an_item=rows)
            listed.append(each)
    except OSError as error:
        raise ValueError(f"profile {path} cannot be read: {error.strerror}") from None
    except Invalid as error:
        raise ValueError(f"profile {path}: {error}") from None
    return own, tuple(listed)


def hello(spec: AnyJobSpec, folder: Path | None, accelerator: Accelerator, offer: Offer = offered) -> Hello:
    """This worker's first message.

    Args:
        spec: the record of its job.
        folder: where the job keeps checkpoints; None: it keeps none, as a job on a mesh.
        accelerator: what it computes on.
        offer: gives the checkpoints of a folder that the job can go on from.

    Raises:
        ValueError: torchrun did not start this process.
    """
    packed = isinstance(spec, JobSpec) and spec.packed is not None
    return Hello(
        job=spec.job,
        # A torchrun for one device of several calls its worker's rank 0, whichever device that is.
        local_rank=int(os.environ.get(SLOT_VARIABLE) or environment("LOCAL_RANK")),
        world_size=int(environment("WORLD_SIZE")),
        pid=os.getpid(),
        spec=spec,
        checkpoints=offer(folder, spec) if folder is not None and isinstance(spec, JobSpec) else (),
        longest=longest_trained(folder) if folder is not None and packed else 0,
        probes=True,
        rehearses=True,
        closes=True,
        saves_now=folder is not None,
        release=__version__,
        computes_on=WorkerDevice(
            name=str(accelerator.device),
            model=accelerator.name[:MOST_NAME],
            identity=accelerator.identity,
            shared=accelerator.shared,
        ),
    )


def leave_torch_groups(environment: MutableMapping[str, str]) -> None:
    """Has a later `torch.distributed.init_process_group` of the script fail at once, with the remedy in torch's
    message: nobody would answer it, and it would wait for half an hour.

    Raises:
        ValueError: it was called before, and so the script was started in restart mode.
    """
    if ROUND_VARIABLE in environment:
        raise ValueError(
            "the script makes an elasticd.Job, and calls torch.distributed.init_process_group: leave that call "
            "out, since the Job makes all process groups itself (elasticd took it for a script without a Job; "
            "--mode restart and --rdzv-conf=mode=restart are for those)"
        )
    if "MASTER_PORT" in environment:
        environment["MASTER_PORT"] = "none: elasticd.Job makes all process groups, leave init_process_group out"


def environment(name: str) -> str:
    """A variable that torchrun sets.

    Raises:
        ValueError: it is not set.
    """
    value = os.environ.get(name)
    if value is None:
        raise ValueError(
            f"{name} is not set, though WORLD_SIZE is {os.environ.get('WORLD_SIZE')}: start the script with "
            "'elasticd run --job NAME SCRIPT', or on one device with 'python SCRIPT' and without WORLD_SIZE"
        )
    return value
