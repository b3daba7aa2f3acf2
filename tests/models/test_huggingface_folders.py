"""Models of transformers go out as folders that `from_pretrained` loads, and come in from such folders."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from elasticd_planner.layout.layouts import Layouts
from safetensors import safe_open
from torch import Tensor

import elasticd
from elasticd.checkpoints.folder import scan
from elasticd.models.huggingface import __main__ as exporting
from elasticd.models.huggingface import their_name
from elasticd.models.huggingface.described import from_description
from elasticd.models.huggingface.export import HfExporter
from elasticd.models.huggingface.folder import FolderWeights
from elasticd.runtime.engine.engine import first_state
from elasticd.runtime.model.validation import ModelError
from tests import forkserver, sizes
from tests.models import exported, families
from tests.models.chats import Chats, tokenizer
from tests.models.layouts import optimizer
from tests.models.test_huggingface_batches import described_of, qwen2, seq2seq

transformers = pytest.importorskip("transformers")

#: Fused parameters in several parts, tied ones, stacked experts, and another dense one of the same kind.
REPRESENTATIVES = ["Phi3ForCausalLM", "GPT2LMHeadModel", "MixtralForCausalLM", "Gemma3ForCausalLM"]
TRAINS = [name for name, row in families.rows().items() if row.split("|")[2].strip() == "trains"]


def small(name: str) -> Any:
    """A small model of the class, in single precision."""
    kind = families.found(name)
    return families.made(kind, families.small_config(kind)).float()


def tensors(folder: Path) -> dict[str, Tensor]:
    """All that a folder's files hold."""
    values: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            keys = file.keys()
            values |= {key: file.get_tensor(key) for key in keys}
    return values


@pytest.mark.parametrize("name", sizes.beside(REPRESENTATIVES, TRAINS))
def test_a_class_that_trains_comes_back_from_its_folder_to_the_bit(name: str, tmp_path: Path) -> None:
    model = small(name)
    described = elasticd.from_hf(model)
    for layout, plan in exported.layouts(described).items():
        folder = tmp_path / layout
        weights = exported.trained(model, described, plan, folder, max_shard_size="40KB")
        job = exported.with_weights(model, weights)
        assert list(exported.apart_in_boxes(described, job, folder)) == []
        assert list(exported.apart(job, folder)) == []


@pytest.mark.parametrize("name", sizes.beside(["GPT2LMHeadModel"], [*REPRESENTATIVES, "LlamaForCausalLM"]))
@pytest.mark.parametrize("made_in", [torch.float32, torch.bfloat16])
def test_a_model_that_computes_in_bfloat16_comes_back_in_it(
    name: str, made_in: torch.dtype, tmp_path: Path
) -> None:
    model = small(name)
    if made_in != torch.float32:  # unlike `model.to`, this keeps rotary frequencies in single precision
        values, model = model.state_dict(), type(model)._from_config(model.config, dtype=made_in)
        model.load_state_dict(values)
    described = elasticd.from_hf(model)
    plan = exported.layouts(described)["two stages"]
    precision = "bf16" if made_in == torch.float32 else None
    weights = exported.trained(model, described, plan, tmp_path, precision=precision)
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert list(exported.apart(exported.with_weights(model, weights), tmp_path)) == []


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "MixtralForCausalLM"])
def test_files_and_index_are_those_that_transformers_writes(name: str, tmp_path: Path) -> None:
    model = small(name)
    described = elasticd.from_hf(model)
    plan = exported.layouts(described)["one device"]
    weights = exported.trained(model, described, plan, tmp_path / "ours", max_shard_size="40KB")
    exported.with_weights(model, weights).save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
    names = sorted(path.name for path in (tmp_path / "theirs").iterdir())
    assert len(names) > 5
    if name == "GPT2LMHeadModel":  # experts that were stacked stay in one file there, whatever the size
        assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == names
    else:
        names = ["config.json", "generation_config.json"]
    for path in names:
        ours, theirs = tmp_path / "ours" / path, tmp_path / "theirs" / path
        if path.endswith(".json"):
            assert json.loads(ours.read_text()) == json.loads(theirs.read_text()), path
    wanted = tensors(tmp_path / "theirs")
    found = tensors(tmp_path / "ours")
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_no_more_than_the_values_of_a_file_are_read_at_once(tmp_path: Path) -> None:
    described = described_of("Qwen2")
    pretrained = described.pretrained
    assert isinstance(pretrained, HfExporter)
    sizes_read: list[int] = []
    asked: list[str] = []

    def read(names: Sequence[str]) -> Mapping[str, Tensor]:
        values = {name: torch.zeros(described.module_shape(name)) for name in names}
        sizes_read.append(sum(value.nbytes for value in values.values()))
        asked.extend(names)
        return values

    limit = 20_000
    failure = pretrained.save(tmp_path, read, dtypes={}, writes=True, base=None, max_shard_size=limit)
    assert not failure
    assert len(sizes_read) == len(list(tmp_path.glob("*.safetensors"))) > 3
    assert max(sizes_read) <= limit
    assert (
        len(asked)
        == len(set(asked))
        == len(Layouts(described.spec, exported.layouts(described)["one device"]).names)
    )


def test_files_that_an_earlier_save_left_are_removed(tmp_path: Path) -> None:
    described = described_of("Qwen2")
    plan = exported.layouts(described)["one device"]
    exported.trained(qwen2(), described, plan, tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    (tmp_path / "notes.safetensors").write_text("mine")
    exported.trained(qwen2(), described, plan, tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.safetensors*")) == [
        "model.safetensors",
        "notes.safetensors",
    ]


# -- from a job, and from its checkpoint ----------------------------------------------------------------------


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A process that nobody launched trains in one process."""
    for name in ("TORCHELASTIC_RUN_ID", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ELASTICD_SOCKET", str(tmp_path / "none.sock"))
    monkeypatch.setenv("ELASTICD_DEVICE", "cpu")
    return


def base_of(folder: Path) -> Path:
    """A folder of a model with its tokenizer."""
    qwen2().float().save_pretrained(folder, max_shard_size="30KB")
    tokenizer().save_pretrained(folder)
    return folder


def job_of(model: elasticd.Model, checkpoints: Path) -> elasticd.Job:
    return elasticd.Job(
        model=model,
        optimizer=optimizer,
        dataset=Chats(),
        global_batch=8,
        data=elasticd.DataOptions(collate=seq2seq()),
        checkpointing=elasticd.CheckpointingOptions(folder=checkpoints, every=2),
    )


def test_a_job_writes_its_folder_between_steps_and_its_checkpoint_gives_the_same(
    alone: None, tmp_path: Path
) -> None:
    base = base_of(tmp_path / "base")
    job = job_of(elasticd.from_hf(base), tmp_path / "checkpoints")
    with pytest.raises(RuntimeError, match="in the body of the loop"):
        job.save_pretrained(tmp_path / "early")
    for step in job.steps(2):
        if step.index == 1:
            (tmp_path / "file").write_text("")
            with pytest.raises(OSError, match=r"save_pretrained: .*file"):
                job.save_pretrained(tmp_path / "file" / "below")  # and the loop goes on
            job.save_pretrained(tmp_path / "live", max_shard_size="30KB")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "live")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "live" / name).read_bytes() == (base / name).read_bytes()
    ours = {their_name(job._recipe.model, name): value for name, (_, value) in job.parameters().items()}
    assert all(torch.equal(value, loaded.get_parameter(name)) for name, value in ours.items())
    assert any(not torch.equal(value, qwen2().float().get_parameter(name)) for name, value in ours.items())
    command = ["checkpoint", "export", str(tmp_path / "checkpoints")]
    command += ["--hf", str(tmp_path / "later"), "--base", str(base), "--max-shard-size", "30KB"]
    said, errors = tmp_path / "said", tmp_path / "errors"
    variables = {**os.environ, "PYTHONPATH": str(forkserver.ROOT)}
    done = forkserver.start(
        "elasticd.__main__", *command, environment=variables, output=said, errors=errors
    ).wait(300)
    assert done == 0, errors.read_text()
    later = str(tmp_path / "later")
    assert said.read_text() == f"{later}: step 2; from_pretrained({later!r}) loads it\n"
    names = sorted(path.name for path in (tmp_path / "live").iterdir())
    assert sorted(path.name for path in (tmp_path / "later").iterdir()) == names
    assert [
        name
        for name in names
        if (tmp_path / "live" / name).read_bytes() != (tmp_path / "later" / name).read_bytes()
    ] == []


def test_a_checkpoint_that_describes_no_model_needs_its_base(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of an earlier release."""
    base = base_of(tmp_path / "base")
    model = elasticd.from_hf(base)
    monkeypatch.setattr(model, "pretrained", None)
    job = job_of(model, tmp_path / "checkpoints")
    with pytest.raises(ValueError, match="is no model of transformers"):
        job.save_pretrained(tmp_path / "out")
    assert [step.index for step in job.steps(2)] == [0, 1]
    (checkpoint,) = [found.path for found in scan(tmp_path / "checkpoints")]
    with pytest.raises(exporting.CannotExport, match="name the folder of the model that was trained, --base"):
        exporting.export(checkpoint, tmp_path / "out", None, "5GB")
    assert exporting.export(checkpoint, tmp_path / "out", base, "5GB") == 2
    values = tensors(tmp_path / "out")
    for name, (_, value) in job.parameters().items():
        assert torch.equal(values[their_name(model, name)], value), name
    other = base_of(tmp_path / "other")
    qwen2(num_hidden_layers=5).config.save_pretrained(other)
    with pytest.raises(exporting.CannotExport, match=r"has no blocks\.4"):
        exporting.export(checkpoint, tmp_path / "out", other, "5GB")


def test_a_checkpoint_takes_of_its_base_what_no_section_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that the class makes and its forward does not call."""
    make = transformers.Qwen2ForCausalLM.__init__

    def with_idle_module(self: Any, config: Any) -> None:
        make(self, config)
        self.idle = torch.nn.Linear(2, 2)

    monkeypatch.setattr(transformers.Qwen2ForCausalLM, "__init__", with_idle_module)
    model = qwen2()
    described = elasticd.from_hf(model)
    assert isinstance(described.pretrained, HfExporter)
    own = described.pretrained.values
    assert own
    model.save_pretrained(tmp_path)
    plain = from_description(described.pretrained.describe())
    assert not plain.values
    found = exporting.with_values_of(tmp_path, plain).values
    assert found.keys() == own.keys()
    assert all(torch.equal(found[name], own[name]) for name in own)
    assert exporting.with_values_of(None, plain) is plain


def test_a_class_that_transformers_does_not_have_is_named() -> None:
    pretrained = described_of("Qwen2").pretrained
    assert pretrained is not None
    said = json.loads(pretrained.describe()) | {"module": "os", "class": "system"}
    with pytest.raises(ModelError, match=r"no class of transformers: .*job.save_pretrained"):
        from_description(json.dumps(said))


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["out.safetensors", "--hf", "out"], "in place of OUT"),
        (["--moments", "--hf", "out"], "without moments"),
        ([], "name the file, OUT, or with --hf DIR"),
    ],
)
def test_the_command_takes_a_file_or_a_folder(arguments: list[str], why: str, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from elasticd.cli.checkpoint import checkpoint
    from tests.checkpoints.support import save

    path = save(tmp_path)
    outcome = CliRunner().invoke(checkpoint, ["export", str(path), *arguments])
    assert outcome.exit_code == 2
    assert why in outcome.output


# -- in -------------------------------------------------------------------------------------------------------


def test_each_device_reads_the_boxes_that_it_holds(tmp_path: Path) -> None:
    base = base_of(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(base)
    total = sum(parameter.nbytes for parameter in loaded.parameters())
    largest = max(parameter.nbytes for parameter in loaded.parameters())
    described = elasticd.from_hf(base)
    plan = exported.layouts(described)["two stages"]
    layouts, reader = Layouts(described.spec, plan), described._reader
    assert isinstance(reader, FolderWeights)
    read: dict[str, int] = {}
    for device in plan.members:
        before = reader.bytes_read
        state = first_state(described, layouts, device, 0)
        read[device] = reader.bytes_read - before
        held = [shard.planes["value"] for each in state.tensors.values() for shard in each.shards]
        assert read[device] == sum(value.nbytes for value in held)
        for item, tensor in state.tensors.items():
            for shard in tensor.shards:
                whole = loaded.get_parameter(their_name(described, item.name))
                part = whole[
                    tuple(slice(*edges) for edges in zip(shard.box.start, shard.box.stop, strict=True))
                ]
                assert torch.equal(shard.planes["value"], part), item
    assert reader.most_read <= largest
    assert max(read.values()) < 0.6 * total  # of two stages the one with three of four layers


def test_a_model_from_a_folder_trains_as_the_loaded_one(tmp_path: Path) -> None:
    base = base_of(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(base)
    described = elasticd.from_hf(base)
    plan = exported.layouts(described)["two stages"]
    found = exported.trained(loaded, described, plan, tmp_path / "out")
    expected = exported.trained(loaded, elasticd.from_hf(loaded), plan, tmp_path / "other")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert described.first()
    assert described.first() == elasticd.from_hf(base).first()


def test_a_configuration_takes_the_weights_of_a_folder(tmp_path: Path) -> None:
    base = base_of(tmp_path)
    described = elasticd.from_hf(qwen2().config, weights=base, dtype=torch.bfloat16)
    assert described.dtype == torch.bfloat16
    with torch.device("meta"):
        model = transformers.Qwen2ForCausalLM(qwen2().config)
    assert elasticd.from_hf(model, weights=str(base)).dtype == torch.float32
    with pytest.raises(ModelError, match="make it with torch"):
        elasticd.from_hf(qwen2(), weights=base)


def test_a_folder_of_another_model_is_refused_by_what_differs(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base")
    with pytest.raises(ModelError, match=r"lacks model.layers.4\..* \(\d+ of \d+ values of Qwen2ForCausalLM\)"):
        elasticd.from_hf(qwen2(num_hidden_layers=5).config, weights=base)
    with pytest.raises(ModelError, match=r"is of shape \[44, 32\], and the model's of \[48, 32\]"):
        elasticd.from_hf(qwen2(intermediate_size=48).config, weights=base)
    for path in base.glob("model-00001-*"):
        path.unlink()
    with pytest.raises(ModelError, match=r"names model-00001-of-.*, which is not there"):
        elasticd.from_hf(base)
    (base / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match=r"has neither model\.safetensors nor"):
        elasticd.from_hf(base)
    (base / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="transformers makes no causal language model of"):
        elasticd.from_hf(base)


def test_a_name_that_is_no_folder_is_asked_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="no/model is no folder, and the hub gives none"):
        elasticd.from_hf("no/model")
