"""Adapters go out as PEFT saves them, or merged into their base, and load with the job's logits."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import elasticd
from elasticd.checkpoints.export import CannotExport
from elasticd.models import next_token_loss
from elasticd.models.huggingface import __main__ as exporting
from elasticd.models.huggingface import their_name
from elasticd.models.huggingface.anatomy import logits_of
from elasticd.models.huggingface.described import from_description
from elasticd.models.huggingface.export import failure_of, write_shard
from elasticd.runtime.api import pretrained_folder
from elasticd.runtime.api.pretrained_folder import Folder
from elasticd.runtime.engine.engine import Engine
from tests import sizes
from tests.models.layouts import Training, plan_of, stage, under
from tests.models.test_adapters import KINDS, LAYERS, adapted, base
from tests.models.test_lora_checkpoints import saved
from tests.models.texts import Text

peft = pytest.importorskip("peft")
safetensors = pytest.importorskip("safetensors.torch")

IDS = torch.arange(2, 16).view(2, 7)
TWO_STAGES = plan_of(
    (2, [stage(0, 1, ("a/0", 2), ("a/1", 1)), stage(1, LAYERS, ("b/0", 1), ("b/1", 2))]), micro_batch=4
)


def trained(model: Any, described: elasticd.Model, folder: Path) -> Any:
    """Trains a step, writes the adapter and the merged model. The PeftModel with the job's weights."""
    assert described.pretrained is not None
    training = Training(model=described, loss=next_token_loss, dataset=Text(41), steps=1)

    def write(engine: Engine) -> None:
        for name, merge in (("adapter", False), ("merged", True)):
            asked = Folder(path=str(folder / name), base=None, max_shard_size="30KB", merge=merge)
            assert not pretrained_folder.save(engine, described.pretrained, "value", asked)

    weights = under(training, TWO_STAGES, gloo=True, after=write)[1]
    job = copy.deepcopy(model)
    for name, value in weights.items():
        parameter = job.get_base_model().get_parameter(their_name(described, name))
        parameter.data = value.reshape(parameter.shape).clone()
    return job.eval()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return logits_of(model.eval()(input_ids=IDS))


def base_of(model: Any) -> Any:
    """The base of a model that `adapted` made."""
    return copy.deepcopy(model).unload()


@pytest.mark.parametrize(
    "kind",
    sizes.beside(["a trained head and embedding, tied before", "dora", "fused projections"], KINDS),
)
def test_an_adapter_loads_with_the_jobs_logits_and_merged_too(kind: str, tmp_path: Path) -> None:
    model = KINDS[kind]()
    own = base_of(model)
    job = trained(model, elasticd.from_hf(model), tmp_path)
    job.save_pretrained(tmp_path / "theirs")
    files = [
        safetensors.load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "theirs")
    ]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][key], files[1][key]) for key in files[0])
    configs = [
        json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("adapter", "theirs")
    ]
    assert [c | {"target_modules": sorted(c["target_modules"])} for c in configs[:1]] == [
        c | {"target_modules": sorted(c["target_modules"])} for c in configs[1:]
    ]
    loaded = peft.PeftModel.from_pretrained(own, tmp_path / "adapter")
    assert torch.equal(logits(loaded), logits(job))
    merged, info = type(own).from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(info.values()), info
    if kind == "beside experts":
        merged.set_experts_implementation("eager")
    torch.testing.assert_close(logits(merged), logits(job), rtol=0, atol=1e-12)


def test_a_checkpoint_describes_its_adapter_and_takes_the_base_from_a_folder(tmp_path: Path) -> None:
    model = adapted(base(), use_rslora=True, bias="all")
    base_of(model).save_pretrained(tmp_path / "base")
    described = elasticd.from_hf(model)
    path = saved(tmp_path / "checkpoints", described)
    exporting.export(path, tmp_path / "adapter", None, "5GB")
    loaded = peft.PeftModel.from_pretrained(base_of(model), tmp_path / "adapter")
    assert torch.equal(logits(loaded), logits(model))
    with pytest.raises(CannotExport, match=r"has the adapters alone: name the folder .* --base FOLDER"):
        exporting.export(path, tmp_path / "merged", None, "5GB", merge=True)
    exporting.export(path, tmp_path / "merged", tmp_path / "base", "30KB", merge=True)
    merged = type(base()).from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), logits(model), rtol=0, atol=1e-12)


def test_the_values_that_an_adapters_file_needs_are_the_adapters_alone() -> None:
    described = elasticd.from_hf(adapted(base()))
    assert described.pretrained is not None
    again = from_description(described.pretrained.describe())
    trained_names = {
        f"{section}.{p.name}"
        for section in described.sections
        for p in described.spec.section(section)
        if p.kind == "trained"
    }
    for pretrained in (described.pretrained, again):
        assert set(pretrained.wanted(merge=False)) == trained_names
        assert trained_names < set(pretrained.wanted(merge=True))


def test_a_file_that_cannot_be_written_is_an_oserror(tmp_path: Path) -> None:
    """safetensors has an error of its own for it, which the other ranks would not hear of."""
    with pytest.raises(OSError, match=r"(?i)no such file|I/O"):
        write_shard(tmp_path / "missing" / "model.safetensors", {"a": torch.zeros(2)})


def test_what_nobody_thought_of_fails_on_all_ranks_alike(tmp_path: Path) -> None:
    assert (
        failure_of(OSError(28, "No space left on device"), tmp_path) == f"No space left on device ({tmp_path})"
    )
    assert failure_of(KeyError("a"), tmp_path) == f"KeyError: 'a' ({tmp_path})"
