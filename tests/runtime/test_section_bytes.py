"""A job measures the bytes of its own sections, the same with values and without, and plans count with them."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from elasticd_planner.cost.model_profile import derive
from elasticd_planner.problem_files.profile_file import given_profile
from elasticd_planner.profiling.sample_profile import measured_profile
from elasticd_planner.profiling.samples import MeasuredBytes, ModelBytes, Samples
from elasticd_planner.profiling.section_bytes import with_bytes
from elasticd_planner.value import Invalid
from torch import Tensor, nn
from torch.utils.data import default_collate

import elasticd
from elasticd.cli.profile import profile_text
from elasticd.machines.job.assembly import difference
from elasticd.machines.job.replan import first_profile
from elasticd.models import Decoder, DecoderConfig, next_token_loss
from elasticd.runtime.accelerator import CPU, Accelerator
from elasticd.runtime.api.hello import job_spec
from elasticd.runtime.data.options import DataOptions
from elasticd.runtime.data.packing import Packing
from elasticd.runtime.data.stream import Stream
from elasticd.runtime.engine.parallelism import ParallelismOptions
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.model.model import Model
from elasticd.runtime.profiling.measure import measure
from elasticd.runtime.reference import section_bytes as measuring
from elasticd.runtime.reference.section_bytes import section_bytes
from elasticd.wire.profiler import Done, Request
from tests import sizes

TOKENS, VOCABULARY = 24, 64
META = Accelerator("meta")
LOGGER = "elasticd.runtime.reference.section_bytes"
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
#: Classes with a kind of layer each: heads wider than the activation, soft caps of the scores, a fused gate,
#: dropout.
CLASSES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"head_dim": 24, "tie_word_embeddings": True},
    "Gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    "Phi3": {},
    "GPTNeoX": {"hidden_dropout": 0.1},
}


class Text:
    """Samples of one length, each a function of its index."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, VOCABULARY, (TOKENS + 1,), generator=torch.Generator().manual_seed(index))
        return {"inputs": ids[:-1], "targets": ids[1:]}


def recipe(model: Model, **changes: Any) -> Recipe:
    values: dict[str, Any] = {
        "model": model,
        "loss": next_token_loss,
        "optimizer": lambda named: torch.optim.AdamW(named, lr=1e-3),
        "dataset": Text(),
        "global_batch": 4,
        "micro_batch": 2,
    }
    return Recipe(**(values | changes))


def decoder(**changes: int) -> Model:
    config = {
        "vocabulary": VOCABULARY,
        "width": 32,
        "layers": 3,
        "heads": 4,
        "kv_heads": 2,
        "hidden": 48,
    } | changes
    with torch.device("meta"):
        return Decoder(DecoderConfig(**config)).describe()


def of_transformers(name: str) -> Model:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(**(SMALL | CLASSES[name]))
    torch.manual_seed(0)
    return elasticd.from_hf(getattr(transformers, f"{name}ForCausalLM")(config))


class Ids(Text):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)["inputs"]


def ids_loss(logits: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten(), reduction="sum"), batch.numel()


class Wide(nn.Module):
    """A block of one hidden layer."""

    def __init__(self, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, hidden), nn.Linear(hidden, 32)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(x))))


def model_of(blocks: list[nn.Module]) -> Model:
    return Model(embed=nn.Embedding(VOCABULARY, 32), blocks=blocks, head=nn.Linear(32, VOCABULARY))


def dropping_model() -> Model:
    return model_of([Wide(64, dropout=0.1)])


def measured(made: Recipe, accelerator: Accelerator) -> ModelBytes:
    batch, _ = measuring._first_batch(made)
    return measuring._measured(made, batch, accelerator)


@pytest.mark.filterwarnings("ignore:elasticd. the model")
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("name", sizes.beside(["decoder", "dropping"], ["decoder", "dropping", *CLASSES]))
def test_sections_without_values_keep_what_they_keep_with_values(name: str, precision: str | None) -> None:
    own = {"decoder": decoder, "dropping": dropping_model}
    model = own[name]() if name in own else of_transformers(name)
    batches: dict[str, Any] = {"dataset": Ids(), "loss": ids_loss} if name == "dropping" else {}
    made = recipe(model, parallelism=ParallelismOptions(precision=precision), **batches)
    without_values, with_values = measured(made, META), measured(made, CPU)
    # Norms in bfloat16 keep statistics of single precision but on the CPU: two numbers of a token.
    slack = 2 * 2 * 2 * TOKENS * 2 if precision else 0
    for one, other in zip(without_values.sections, with_values.sections, strict=True):
        assert other.kept <= one.kept <= other.kept + slack
        assert one == msgspec.structs.replace(other, kept=one.kept, working=one.working)
        assert one.working == pytest.approx(other.working, abs=slack)
    assert {each.section for each in without_values.sections} == {"embed", "block", "head"}
    assert {each.share for each in without_values.sections} == ({1.0} if name == "dropping" else {1.0, 0.5})


def test_a_large_model_is_measured_without_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """70 billion parameters: nothing of their size is made."""
    made = recipe(decoder(width=8192, layers=80, heads=64, kv_heads=8, hidden=28672))
    monkeypatch.setattr(measuring, "CPU", None)
    found = section_bytes(made)
    assert found is not None
    (block,) = [each for each in found.sections if each.section == "block" and each.share == 1]
    assert block.kept > 2 * TOKENS * 4 * (3 * 28672 + 4 * 8192)  # gate, up, their product; inputs of modules


@pytest.mark.filterwarnings("ignore:elasticd. the model")
def test_generators_and_parameters_stay_as_they_are() -> None:
    """A dropout draws, and so does a sample."""

    class Augmented(Ids):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            torch.rand(1), random.random(), np.random.rand()
            return super().__getitem__(index)

    model = dropping_model()
    made = recipe(model, dataset=Augmented(), loss=ids_loss)
    assert made.tokens == TOKENS  # its samples are read for that beforehand
    values = {name: value.clone() for name, value in model._own.items()}
    before = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)
    assert section_bytes(made) is not None
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert str(before[2]) == str(np.random.get_state(legacy=False))
    assert all(torch.equal(values[name], value) for name, value in model._own.items())
    assert not any(parameter.grad is not None for parameter in model.handed_over.parameters().values())


class Reading(nn.Module):
    """Takes the tokens above a number that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x) * float(x.detach().abs().max())


def reading_model(width: int = 32) -> Model:
    return Model(
        embed=nn.Embedding(VOCABULARY, width),
        blocks=[Reading()],
        head=nn.Linear(width, VOCABULARY),
        width=width,
    )


@pytest.mark.filterwarnings("ignore:elasticd. the model")
def test_a_model_that_reads_values_is_measured_with_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = recipe(reading_model(), dataset=Ids(), loss=ids_loss)
    monkeypatch.setattr(measuring, "_SMALL_WORK", 0)  # the meta device is tried first
    found = section_bytes(made)
    assert found is not None
    assert found == measured(made, CPU)
    monkeypatch.setattr(measuring, "_MOST_WORK", 0)  # and alone
    with caplog.at_level(logging.DEBUG, LOGGER):
        assert section_bytes(made) is None
    assert "Tensor.item() cannot be called on meta tensors" in caplog.text


@pytest.mark.filterwarnings("ignore:elasticd. the model")
def test_a_dataset_that_fails_leaves_the_bytes_to_the_shapes(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Ids):
        asked = 0

        def __getitem__(self, index: int) -> Any:
            self.asked += 1
            if self.asked > len(self):  # after its tokens were counted
                raise OSError("the disk is gone")
            return super().__getitem__(index)

    made = recipe(reading_model(), dataset=Broken(), loss=ids_loss)
    assert made.tokens == TOKENS
    with caplog.at_level(logging.DEBUG, LOGGER):
        assert job_spec(made, "job").measured_bytes is None
    assert "the disk is gone" in caplog.text


def test_the_first_profile_counts_with_measured_bytes_and_workers_may_differ_in_them() -> None:
    made = recipe(decoder())
    spec = job_spec(made, "job")
    found = spec.measured_bytes
    assert found is not None
    profile, shapes = first_profile(spec, 1e12), derive(made.model.spec, TOKENS, 2, flops=1e12)
    assert profile == with_bytes(shapes, found)
    (block,) = [each for each in found.sections if each.section == "block" and each.share == 1]
    kept = profile.activation_bytes(profile.block, profile.share_units)
    assert kept == pytest.approx(block.kept)
    assert profile.working_bytes(profile.block, profile.share_units) == pytest.approx(block.working)
    assert kept > shapes.activation_bytes(shapes.block, shapes.share_units), "tables of rotary embedding"
    assert profile.block.seconds == shapes.block.seconds
    other = msgspec.structs.replace(spec, measured_bytes=None)
    assert difference(spec, other) == ""
    assert first_profile(other, 1e12) == shapes


def test_a_profile_of_a_job_in_bfloat16_has_the_bytes_that_the_job_measures() -> None:
    """Its loss sees logits in single precision, gradients add up in it, and state is that of master weights."""
    made = recipe(decoder(), parallelism=ParallelismOptions(precision="bf16"))
    asked = Request(
        target="train.py", repeats=3, threads=1, widths=(1, 2), tokens=(24, 48), sample_tokens=24, whole=True
    )
    samples = measure(
        made.model,
        asked,
        CPU,
        lambda count, _: default_collate([made.dataset[index] for index in range(count)]),
        made.loss,
        lambda part: None,
        precision=made.precision,
    )
    own = {(each.section, each.share): each for each in measured(made, CPU).sections}
    alike = [timing.bytes for timing in samples.timings if timing.tokens == 48]
    assert {(each.section, each.share): each for each in alike} == own
    profile = measured_profile(with_growing_times(samples)).profile
    assert profile.gradient_factor == 2, "four bytes beside two"
    assert profile.optimizer_factor == 6, "a master weight and two moments of four bytes"
    block = derive(made.model.spec, 24, 1).block
    assert samples.updates[0].state == 6 * block.parameter_bytes
    spec = job_spec(made, "job", measures=False)
    fitted = {"model": measured_profile(with_growing_times(samples))}
    given = given_profile(profile_text(Done(samples=samples), fitted).encode(), spec.model, 24, 2)
    assert (
        first_profile(msgspec.structs.replace(spec, profile=given), 1e12).state_factor == profile.state_factor
    )


def with_growing_times(samples: Samples) -> Samples:
    """Times by tokens alone: those of a few dozen tokens are lost in the noise."""
    return msgspec.structs.replace(
        samples,
        timings=tuple(
            msgspec.structs.replace(each, forward=1e-6 * each.tokens, backward=2e-6 * each.tokens)
            for each in samples.timings
        ),
    )


def test_a_job_with_a_profile_measures_nothing(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = recipe(decoder())
    path = tmp_path / "profile.json"
    path.write_bytes(msgspec.json.encode(derive(made.model.spec, TOKENS, 1)))
    known = derive(made.model.spec, TOKENS, 2)
    monkeypatch.setattr("elasticd.runtime.api.hello._profiles", lambda _, modules: (known, modules))
    monkeypatch.setattr("elasticd.runtime.api.hello.section_bytes", pytest.fail)
    made = replace(made, parallelism=ParallelismOptions(profile=path))
    assert job_spec(made, "job").measured_bytes is None


class Unread:
    """A stream that nobody may read."""

    def __iter__(self) -> Any:
        pytest.fail("the stream was read")

    def state_dict(self) -> dict[str, Any]:
        pytest.fail("the stream's position was asked for")

    load_state_dict = state_dict


@pytest.mark.parametrize("of_transformers", [False, True])
@pytest.mark.filterwarnings("ignore:elasticd. the model")
def test_a_stream_is_measured_by_token_ids_and_not_read(of_transformers: bool) -> None:
    model = of_transformers_model() if of_transformers else decoder()
    loss = model.loss if of_transformers else next_token_loss
    streamed = recipe(model, loss=loss, dataset=Stream(dataset=Unread(), tokens=TOKENS))  # type: ignore[arg-type]
    found = section_bytes(streamed)
    assert found is not None
    assert {each.tokens for each in found.sections} == {2 * TOKENS}
    if not of_transformers:
        assert found == section_bytes(recipe(model))
    assert job_spec(streamed, "job").measured_bytes == found


def of_transformers_model() -> Model:
    return of_transformers("Llama")


def test_packed_rows_are_measured_by_rows_as_long() -> None:
    """A token needs no more in a longer row, but for the gradient of a matrix, which is of all tokens."""
    packed = recipe(
        decoder(), data=DataOptions(packing=Packing(tokens=4 * TOKENS), length=lambda sample: TOKENS)
    )
    found = section_bytes(packed)
    assert found == section_bytes(recipe(decoder(), micro_batch=4))
    spec = job_spec(packed, "job")
    assert spec.packed is not None
    assert spec.measured_bytes == found
    profile = first_profile(spec, 1e12)
    (block,) = [each for each in found.sections if each.section == "block" and each.share == 1]
    assert profile.block.cut_activation + profile.block.whole_activation == pytest.approx(
        block.kept / block.tokens
    )


@pytest.mark.filterwarnings("ignore:elasticd. the model")
def test_the_most_of_all_kinds_of_blocks_counts() -> None:
    model = model_of([Wide(32), Wide(256), Wide(64)])
    found = section_bytes(recipe(model, dataset=Ids(), loss=ids_loss))
    assert found is not None
    (block,) = [each for each in found.sections if each.section == "block"]
    assert block.kept == 2 * TOKENS * 4 * (32 + 256), "its input, and tanh's output"


def test_bytes_that_are_none_are_refused() -> None:
    with pytest.raises(Invalid, match="must be positive"):
        MeasuredBytes(section="block", share=0.0, tokens=1)
    with pytest.raises(Invalid, match="bytes not negative"):
        MeasuredBytes(section="block", share=1.0, tokens=1, kept=-1)
