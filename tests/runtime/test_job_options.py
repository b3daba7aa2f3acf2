"""A Job's groups of options: what they refuse, and the keywords of release 0.1 that they replace."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from elasticd_planner.spec.packed_sequences import PackedSequences
from elasticd_planner.spec.sample_packing import linear_of
from torch import nn
from torch.utils.data import DataLoader

import elasticd
from elasticd.models import Decoder, DecoderConfig, next_token_loss
from elasticd.runtime.api.deprecated import DEFAULTS, OldKeywords, OptionGroups, with_old_keywords
from elasticd.runtime.api.evaluation import HeldOut
from elasticd.runtime.api.hello import job_spec
from elasticd.runtime.api.job import Job
from elasticd.runtime.data import packing
from elasticd.runtime.data.collate import pad
from elasticd.runtime.engine.mixed_precision import LossScale
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.exits import JobStopped, ScriptRefusal

GROUPS = (
    elasticd.DataOptions,
    elasticd.ParallelismOptions,
    elasticd.CheckpointingOptions,
    elasticd.EvaluationOptions,
    elasticd.StabilityOptions,
)
HELD = [{"inputs": torch.arange(4)}]


def upper(samples: Any) -> Any:
    return samples


def tokens(index: int) -> int:
    return 8


#: Each keyword of release 0.1 with a value, and where that value is now.
MOVED: dict[str, tuple[Any, str, str]] = {
    "collate": (upper, "data", "collate"),
    "length": (tokens, "data", "length"),
    "readers": (0, "data", "readers"),
    "zero": (1, "parallelism", "zero"),
    "replicas": (2, "parallelism", "replicas"),
    "precision": ("bf16", "parallelism", "precision"),
    "recompute": ("plan", "parallelism", "recompute"),
    "profile": ("profile.json", "parallelism", "profile"),
    "checkpoint": ("kept", "checkpointing", "folder"),
    "checkpoint_every": (7, "checkpointing", "every"),
    "keep": (2, "checkpointing", "keep"),
    "checkpoint_keep_every": (14, "checkpointing", "keep_every"),
    "snapshot_every": (5, "checkpointing", "snapshot_every"),
    "held_out": (HELD, "evaluation", "held_out"),
}


class Reached(BaseException):
    """A Job has its arguments, and would connect to its agent now."""


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Job]]:
    """The Jobs that got as far as their agent."""
    jobs: list[Job] = []

    def connect(job: Job, optimizer: object) -> None:
        jobs.append(job)
        raise Reached

    monkeypatch.setattr(Job, "_connect", connect)
    return jobs


def job(**arguments: Any) -> None:
    with torch.device("meta"):
        config = DecoderConfig(vocabulary=16, width=16, layers=2, heads=2, kv_heads=2, hidden=8)
        model = Decoder(config).describe()
    rows = [{"inputs": torch.arange(8), "targets": torch.arange(8)}] * 4
    defaults: dict[str, Any] = {
        "model": model,
        "loss": next_token_loss,
        "optimizer": torch.optim.AdamW,
        "dataset": rows,
        "global_batch": 4,
    }
    elasticd.Job(**defaults | arguments)


def test_every_old_keyword_is_moved_and_one_warning_at_the_call_names_the_new_spelling(made: list[Job]) -> None:
    assert set(MOVED) == set(OldKeywords.__annotations__)
    old = {keyword: value for keyword, (value, _, _) in MOVED.items()}
    with pytest.warns(DeprecationWarning, match="refused from 0.3 on") as warned, pytest.raises(Reached):
        job(**old)
    (one,) = warned
    assert one.filename == __file__
    text = str(one.message)
    assert "parallelism=elasticd.ParallelismOptions(zero=..., replicas=..., precision=...," in text
    assert (
        "checkpointing=elasticd.CheckpointingOptions(folder=..., every=..., keep=..., keep_every=...," in text
    )
    recipe = made[0]._recipe
    for value, group, field in MOVED.values():
        if group != "evaluation":
            assert getattr(getattr(recipe, group), field) is value
    assert made[0]._held_out["held_out"].dataset is HELD
    assert recipe.checkpointing.path == Path("kept").absolute()
    assert recipe.model.dtype is torch.bfloat16


def test_the_new_spelling_gives_the_same_without_a_warning(
    made: list[Job], recwarn: pytest.WarningsRecorder
) -> None:
    groups: dict[str, dict[str, Any]] = {}
    for value, group, field in MOVED.values():
        groups.setdefault(group, {})[field] = value
    types = dict(zip(groups, GROUPS, strict=False))
    new = {group: types[group](**values) for group, values in groups.items()}
    with pytest.raises(Reached):
        job(**new)
    assert not [each for each in recwarn if each.category is DeprecationWarning]
    old = {keyword: value for keyword, (value, _, _) in MOVED.items()}
    with pytest.warns(DeprecationWarning, match="refused from 0.3 on"):
        assert with_old_keywords(DEFAULTS, old) == OptionGroups(**new)


@pytest.mark.parametrize(("keyword", "moved"), MOVED.items(), ids=MOVED)
def test_an_old_keyword_beside_its_group_is_refused(keyword: str, moved: tuple[Any, str, str]) -> None:
    value, group, field = moved
    others = [(value, name) for value, of, name in MOVED.values() if of == group and name != "replicas"]
    given, name = others[-1]
    groups = replace(DEFAULTS, **{group: replace(getattr(DEFAULTS, group), **{name: given})})
    with pytest.raises(
        ValueError, match=rf"Job got {group}=\.\.\. and old keywords .*Options\({field}=\.\.\.\)"
    ):
        with_old_keywords(groups, {keyword: value})


@pytest.mark.parametrize(
    ("group", "fields", "said"),
    [
        (
            elasticd.CheckpointingOptions,
            {"foldr": "x"},
            "CheckpointingOptions() got an unexpected keyword argument 'foldr': did you mean folder=...?",
        ),
        (elasticd.ParallelismOptions, {"precison": "bf16"}, "did you mean precision=...?"),
        (elasticd.DataOptions, {"packed": True}, "did you mean packing=...?"),
        (elasticd.Packing, {"color": 1}, "; it takes tokens, cut, least"),
        (elasticd.LossScale, {}, "LossScale() missing 1 required keyword-only argument: 'first'"),
        (elasticd.ParallelismOptions, {"precision": "bf61"}, "precision must be one of 'fp32', 'bf16', 'fp16'"),
        (elasticd.Balance, {"loss": -1}, "Balance: loss must be a positive number"),
        (elasticd.StabilityOptions, {"action": "skp"}, "action is 'skp'"),
    ],
)
def test_a_group_refuses_what_it_does_not_take_in_one_line(
    group: Any, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(ScriptRefusal, match=re.escape(said)):
        group(**fields)


def test_a_group_leaves_an_error_of_the_users_own_code_as_it_is() -> None:
    class Broken:
        def __len__(self) -> int:
            raise TypeError("my own")

        def __getitem__(self, index: int) -> int:
            return index

    with pytest.raises(TypeError, match="my own") as raised:
        elasticd.HeldOut(dataset=Broken())
    assert not isinstance(raised.value, ScriptRefusal)


def test_a_misspelled_keyword_is_named_rather_than_the_one_that_is_missing() -> None:
    with pytest.raises(elasticd.JobStopped, match=re.escape("'globl_batch': did you mean global_batch=...?")):
        elasticd.Job(globl_batch=4)  # type: ignore[call-arg]


def test_a_class_that_is_derived_from_job_refuses_what_job_never_had(made: list[Job]) -> None:
    class Own(Job):
        pass

    with pytest.raises(elasticd.JobStopped, match="unexpected keyword argument 'color'"):
        Own(model=None, optimizer=None, dataset=[], global_batch=1, color=1)  # type: ignore[call-arg, arg-type]


def test_a_keyword_that_job_never_had_is_named(made: list[Job]) -> None:
    for keyword in ("every", "checkpoints", "folder"):
        with pytest.raises(elasticd.JobStopped, match=f"unexpected keyword argument '{keyword}'"):
            job(**{keyword: 1})
    assert not made


@pytest.mark.parametrize(
    ("keyword", "meant"),
    [
        ("grade", "did you mean grace=...?"),
        ("reader", "did you mean data=elasticd.DataOptions(readers=...)?"),
        ("global_token", "did you mean data=elasticd.DataOptions(global_tokens=...)?"),
        ("max_steps", "the number of steps is an argument of job.steps(...)"),
        ("batch_size", "did you mean global_batch=..., the samples of a step over all devices?"),
        ("collate_fn", "did you mean data=elasticd.DataOptions(collate=...)?"),
        ("color", ""),
    ],
)
def test_a_keyword_that_is_spelled_like_one_of_todays_names_it(
    made: list[Job], keyword: str, meant: str
) -> None:
    with pytest.raises(elasticd.JobStopped) as caught:
        job(**{keyword: 1})
    assert str(caught.value).endswith(f"argument '{keyword}'" + (f": {meant}" if meant else ""))
    assert not made


class Own(elasticd.Callback):
    """A user's."""


@pytest.mark.parametrize(
    ("keyword", "value", "message"),
    [
        ("global_batch", 16.0, "global_batch is 16.0; it must be a whole number from 1 on"),
        ("global_batch", "16", "global_batch is '16'; it must be a whole number from 1 on"),
        ("global_batch", 0, "global_batch is 0; it must be a whole number from 1 on"),
        ("micro_batch", 0.5, "micro_batch is 0.5; it must be a whole number from 1 on"),
        ("micro_batch", True, "micro_batch is True; it must be a whole number from 1 on"),
        ("seed", 1.5, "seed is 1.5; it must be a whole number from"),
        ("seed", 1 << 70, "it must be a whole number from"),
        ("clip", 0, "clip must be a positive number, .* or None for no clipping, not 0"),
        ("clip", -1.0, "clip must be a positive number, .* not -1.0"),
        ("clip", "1", "clip must be a positive number, .* not '1'"),
        ("grace", -1, "grace is -1; it must be a number of seconds from 0 on"),
        ("grace", "10", "grace is '10'; it must be a number of seconds from 0 on"),
        ("grace", float("nan"), "grace is nan; it must be a number of seconds from 0 on"),
        ("callbacks", print, "give a list of objects of classes of your own that extend elasticd.Callback"),
        ("callbacks", [print], "give a list of objects of classes of your own that extend elasticd.Callback"),
        ("callbacks", Own(), r"callbacks is of type Own: give a list, callbacks=\[...\]"),
    ],
)
def test_a_job_refuses_a_wrong_number_or_callback(
    made: list[Job], keyword: str, value: Any, message: str
) -> None:
    with pytest.raises(elasticd.JobStopped, match=message):
        job(**{keyword: value})
    assert not made


def test_a_job_takes_the_whole_numbers_of_numpy_and_torch(made: list[Job]) -> None:
    with pytest.raises(Reached):
        job(
            global_batch=np.int64(4), micro_batch=torch.tensor(2), seed=np.uint8(3), callbacks=(Own(),), grace=1
        )
    recipe = made[0]._recipe
    numbers = recipe.global_batch, recipe.micro_batch, recipe.seed
    assert numbers == (4, 2, 3)
    assert {type(number) for number in numbers} == {int}


def test_a_step_of_more_samples_than_there_are_is_told_once(
    made: list[Job], caplog: pytest.LogCaptureFixture
) -> None:
    for batch in (4, 5):
        with pytest.raises(Reached):
            job(global_batch=batch)
    assert [each.message for each in caplog.records if "samples" in each.message] == [
        "a step takes 5 samples, and the dataset has 4: a step takes them several times"
    ]


@pytest.mark.parametrize(
    ("group", "values", "message"),
    [
        (elasticd.DataOptions, {"readers": -1}, "readers is -1; it must be a whole number from 0 on"),
        (elasticd.DataOptions, {"readers": None}, "readers is None; it must be a whole number from 0 on"),
        (elasticd.ParallelismOptions, {"zero": 3}, "zero must be 0, 1 or 2, not 3"),
        (elasticd.ParallelismOptions, {"replicas": 2}, "replicas go with zero 1 or 2"),
        (elasticd.ParallelismOptions, {"zero": 1, "replicas": 0}, "needs replicas of at least 1, not 0"),
        (elasticd.ParallelismOptions, {"precision": "fp8"}, "precision must be one of"),
        (elasticd.ParallelismOptions, {"recompute": "always"}, "recompute must be True, False"),
        (elasticd.CheckpointingOptions, {"every": 0}, "every is 0; it must be a whole number from 1 on"),
        (elasticd.CheckpointingOptions, {"keep": 0}, "keep is 0; it must be a whole number from 1 on"),
        (
            elasticd.CheckpointingOptions,
            {"keep_every": 0},
            "keep_every is 0; it must be a whole number from 1 on",
        ),
        (
            elasticd.CheckpointingOptions,
            {"snapshot_every": 0},
            "snapshot_every is 0; it must be a whole number from 1 on",
        ),
        (elasticd.CheckpointingOptions, {"every": None}, "every is None; it must be a whole number from 1 on"),
        (elasticd.CheckpointingOptions, {"keep": 2.5}, "keep is 2.5; it must be a whole number from 1 on"),
        (elasticd.EvaluationOptions, {"held_out": []}, "the dataset is empty"),
        (elasticd.EvaluationOptions, {"held_out": {"a": HELD, "b": []}}, "the dataset is empty"),
    ],
)
def test_a_group_refuses_a_wrong_value_when_it_is_made(group: Any, values: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        group(**values)


def test_groups_are_frozen_and_take_keywords_alone() -> None:
    for group in GROUPS:
        with pytest.raises(FrozenInstanceError):
            setattr(group(), fields(group)[0].name, 1)
        with pytest.raises(TypeError):
            group(1)


def test_every_argument_of_job_has_its_entry_and_every_field_of_a_group_its_line() -> None:
    text = inspect.getdoc(elasticd.Job.__init__) or ""
    for name in inspect.signature(elasticd.Job.__init__).parameters:
        assert name == "self" or f"\n    {name}: " in text, name
    for group in GROUPS:
        lines = inspect.getsource(group).splitlines()
        for field in fields(group):
            (at,) = (i for i, line in enumerate(lines) if line.startswith(f"    {field.name}: "))
            assert lines[at - 1].startswith("    #: ") or " #: " in lines[at], field.name


@pytest.mark.parametrize("wrong", ["/shared/run", None, {"folder": "/shared/run"}])
def test_what_is_no_group_is_refused_in_one_line_that_names_the_group(wrong: Any, made: list[Job]) -> None:
    text = r"checkpointing=.*; it takes an elasticd\.CheckpointingOptions"
    with pytest.raises(JobStopped, match=text) as error:
        job(checkpointing=wrong)
    assert ("or leave checkpointing out" in str(error.value)) is (wrong is None)
    assert not made


class _Unindexed:
    """Samples that are iterated, as of datasets' IterableDataset."""

    def __iter__(self) -> Iterator[int]:
        return iter(())


_WEIGHT = nn.Parameter(torch.zeros(1))
_SGD = torch.optim.SGD([_WEIGHT], lr=1.0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model": nn.Linear(2, 2)}, r"model is of type Linear: give elasticd\.from_module"),
        ({"model": nn.Linear}, r"model is the class Linear itself: give"),
        ({"dataset": DataLoader([1, 2])}, r"dataset is of type DataLoader: give dataset=loader\.dataset"),
        ({"dataset": _Unindexed}, r"dataset is the class _Unindexed itself, without a length"),
        ({"optimizer": _SGD}, r"optimizer is of type SGD: .*optimizer=lambda named: torch\.optim\.AdamW"),
        ({"optimizer": None}, r"optimizer is of type NoneType: "),
        (
            {"scheduler": torch.optim.lr_scheduler.LambdaLR(_SGD, lambda step: 1.0)},
            r"scheduler is of type LambdaLR: .*scheduler=lambda optimizer: ",
        ),
        ({"dataset": {"train": [1], "test": [2]}}, r"dataset is a dict with 'train', 'test': give one of them"),
        ({"dataset": _Unindexed()}, r"dataset is of type _Unindexed, without a length .*elasticd\.Stream"),
        ({"dataset": []}, "dataset is empty"),
    ],
    ids=[
        "module",
        "class",
        "loader",
        "dataset class",
        "optimizer",
        "no optimizer",
        "scheduler",
        "splits",
        "iterable",
        "empty",
    ],
)
def test_arguments_as_a_plain_script_has_them_are_refused_with_what_to_write(
    wrong: Any, message: str, made: list[Job]
) -> None:
    with pytest.raises(JobStopped, match=message):
        job(**wrong)
    assert not made


def test_old_keywords_of_checkpoints_mean_what_they_meant(made: list[Job]) -> None:
    for old in (
        {"checkpoint": "kept", "checkpoint_keep_every": 0},
        {"checkpoint": None, "checkpoint_every": 0},
    ):
        with pytest.warns(DeprecationWarning, match="checkpointing="), pytest.raises(Reached):
            job(**old)
    assert len(made) == 2


class Sentences(list[dict[str, torch.Tensor]]):
    """Samples whose lengths are known."""

    lengths: tuple[int, ...] = (8, 8, 8, 8)


def packed_job(loss: Any = next_token_loss, **packing: Any) -> None:
    with torch.device("meta"):
        config = DecoderConfig(vocabulary=16, width=16, layers=2, heads=2, kv_heads=2, hidden=8)
        model = Decoder(config).describe()
    elasticd.Job(
        model=model,
        loss=loss,
        optimizer=torch.optim.AdamW,
        dataset=Sentences([{"inputs": torch.arange(8), "targets": torch.arange(8)}] * 4),
        global_batch=4,
        data=elasticd.DataOptions(packing=elasticd.Packing(**packing)),
    )


class Unequal(Sentences):
    """Most are short, and one is long."""

    lengths = (2, 2, 4, 2, 2, 2, 2, 40)


def told(dataset: Any, held_out: dict[str, HeldOut] | None = None, **options: Any) -> PackedSequences:
    """What the coordinator is told of a job's sequences before it starts."""
    with torch.device("meta"):
        config = DecoderConfig(vocabulary=16, width=16, layers=2, heads=2, kv_heads=2, hidden=8)
        model = Decoder(config).describe()
    data = elasticd.DataOptions(packing=elasticd.Packing(tokens=30, least=8, cut=False), **options)
    recipe = Recipe(
        model=model,
        loss=next_token_loss,
        optimizer=torch.optim.AdamW,
        dataset=dataset,
        global_batch=4,
        data=data,
    )
    found = job_spec(recipe, "job", held_out or {}).packed
    assert found is not None
    assert (found.row_tokens, found.least, found.cut) == (30, 8, False)
    assert found.linear == linear_of(model.spec)
    return found


def test_the_first_plan_is_for_the_lengths_of_the_dataset() -> None:
    samples = [{"inputs": torch.arange(8), "targets": torch.arange(8)}] * 8
    found = told(Unequal(samples))
    assert (found.longest, found.sample, found.sequences) == (40, "sample 7", 4.0)
    assert (found.lengths.mean, found.lengths.effective) == (7.0, (6 * 4 + 16 + 1600) / 56)
    # Asked for one by one, they are the same; steps of so many tokens have as many samples as these are.
    again = told(Unequal(samples), length=Unequal.lengths.__getitem__, global_tokens=70)
    assert (again.lengths.mean, again.longest, again.sequences) == (7.0, 40, 10.0)
    assert (found.lengths.longest, again.lengths.longest) == (30, 40), "that of 4 samples, and of 10"
    # A held-out set is packed under the same plan; one with a collate of its own is not packed.
    long = Sentences(samples)
    long.lengths = (8, 90, 8, 8, 8, 8, 8, 8)
    beside = told(Unequal(samples), {"long": HeldOut(dataset=long)})
    assert (beside.longest, beside.sample) == (90, "sample 1 of the held-out set 'long'")
    assert beside.lengths == found.lengths
    assert told(Unequal(samples), {"long": HeldOut(dataset=long, collate=pad)}) == found


def test_of_many_samples_some_are_asked_and_a_longer_one_is_likely(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [{"inputs": torch.arange(8), "targets": torch.arange(8)}] * 8
    short = Unequal.lengths.__getitem__
    assert told(Unequal(samples), length=short).likely == 0
    assert told(Unequal(samples)).likely == 0
    monkeypatch.setattr(packing, "_MOST_ASKED", 4)  # samples 0, 2, 4 and 7
    found = told(Unequal(samples), length=lambda index: 50 if index == 3 else short(index))
    assert (found.longest, found.sample, found.likely) == (40, "sample 7", 80)
    found = told(Unequal(samples), length=lambda index: 50 if index == 3 else short(index), global_tokens=70)
    assert (found.longest, found.sample, found.likely) == (50, "sample 3", 0), "its sampler asks for all"
    assert told(Unequal(samples)).likely == 0, "a dataset with `lengths` tells all of them"


def test_the_loss_scale_of_fp16_is_that_of_the_tokens_of_a_step() -> None:
    samples = [{"inputs": torch.arange(8), "targets": torch.arange(8)}] * 8

    def scale(**options: Any) -> Any:
        config = DecoderConfig(vocabulary=16, width=16, layers=2, heads=2, kv_heads=2, hidden=8)
        recipe = Recipe(
            model=Decoder(config).describe(),
            loss=next_token_loss,
            optimizer=torch.optim.AdamW,
            dataset=Unequal(samples),
            global_batch=4,
            parallelism=elasticd.ParallelismOptions(precision="fp16"),
            data=elasticd.DataOptions(packing=elasticd.Packing(), **options),
        )
        assert recipe.precision is not None
        return recipe.precision.scale

    assert scale() == LossScale.for_steps_of(28)
    assert scale(global_tokens=1 << 20) == LossScale.for_steps_of(1 << 20) != scale()


def test_of_a_stream_the_first_plan_knows_the_mean_and_takes_sequences_for_unlike_ones() -> None:
    class Endless:
        def __iter__(self) -> Any:
            return iter(())

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            del state

    found = told(elasticd.Stream(dataset=Endless(), tokens=100.0))
    assert (found.lengths.mean, found.longest, found.sample) == (100.0, 100, "")
    assert found.likely == found.lengths.longest == 900
    assert found.lengths.effective > 2 * found.lengths.mean
    with pytest.raises(ValueError, match="global_tokens takes samples by lengths that are known beforehand"):
        told(elasticd.Stream(dataset=Endless(), tokens=100.0), global_tokens=500)


def test_a_job_that_can_pack_starts(made: list[Job]) -> None:
    with pytest.raises(Reached):
        packed_job(tokens=6)


def test_a_job_that_cannot_pack_is_refused_before_it_starts(made: list[Job]) -> None:
    def mean_of_sequences(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        return output.square().mean(1).sum(), len(output)

    with pytest.raises(JobStopped, match=r"this job cannot pack its sequences: .*loss"):
        packed_job(loss=mean_of_sequences)
    with pytest.raises(JobStopped, match="sample 0 has 8 tokens, and a row has 6: raise Packing"):
        packed_job(tokens=6, cut=False)
    assert not made
