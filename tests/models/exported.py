"""A class of transformers trained a step, written as a folder and loaded: the job's model comes back."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.plan import Plan
from torch import Tensor

import elasticd
from elasticd.models import next_token_loss
from elasticd.models.huggingface import their_name
from elasticd.models.huggingface.anatomy import arguments, logits_of, text_of
from elasticd.models.huggingface.folder import FolderWeights, model_on_meta
from elasticd.runtime.api import pretrained_folder
from elasticd.runtime.api.pretrained_folder import Folder
from elasticd.runtime.engine.engine import Engine
from elasticd.runtime.engine.parallelism import ParallelismOptions
from tests.models.layouts import Training, plan_of, stage, under
from tests.models.texts import Text


def layouts(described: elasticd.Model) -> dict[str, Plan]:
    """One device; two stages, TP groups of unequal shares where something is cut."""
    layers, wide = described.layers, bool(described.rules)
    first, last = [("a/0", 2), ("a/1", 1)][: 1 + wide], [("b/0", 1), ("b/1", 2)][: 1 + wide]
    stages = [stage(0, 1, *first), stage(1, layers, *last)] if layers > 1 else [stage(0, 1, *first)]
    return {
        "one device": plan_of((2, [stage(0, layers, ("a/0", 1))]), micro_batch=4),
        "two stages": plan_of((2, stages), micro_batch=4),
    }


def trained(
    model: Any, described: elasticd.Model, plan: Plan, folder: Path, *, precision: Any = None, **more: Any
) -> dict[str, Tensor]:
    """Trains a step under the plan and writes the folder. The job's weights, by their names in the model."""
    rows = min(model.get_input_embeddings().weight.shape[0], text_of(model.config).vocab_size)
    options = {"parallelism": ParallelismOptions(precision=precision)}
    training = Training(model=described, loss=next_token_loss, dataset=Text(rows), steps=1, options=options)

    def write(engine: Engine) -> None:
        asked = Folder(path=str(folder), base=None, max_shard_size=more.get("max_shard_size", "5GB"))
        assert described.pretrained is not None
        assert not pretrained_folder.save(engine, described.pretrained, "value", asked)

    several = len(plan.members) > 1
    weights = under(training, plan, threads=several, gloo=several, after=write)[1]
    return {their_name(described, full): value for full, value in weights.items()}


def with_weights(model: Any, weights: Mapping[str, Tensor]) -> Any:
    """A copy of the model in which these weights are in place, in their type."""
    made = copy.deepcopy(model)
    dtype = next(iter(weights.values())).dtype
    for parameter in made.parameters():
        parameter.data = parameter.data.to(dtype)
    for name, value in weights.items():
        parameter = made.get_parameter(name)
        parameter.data = value.reshape(parameter.shape).clone()
    return made.eval()


def apart(job: Any, folder: Path) -> Iterator[str]:
    """What of the folder's model is not the job's, to the bit; and what transformers says of its files.

    A forward pass may change the job's model: RWKV scales its weights when it is evaluated."""
    kernels = {
        name: value
        for name in ("attn_implementation", "experts_implementation")
        if (value := getattr(job.config, f"_{name}", None)) is not None
    }
    loaded, info = type(job).from_pretrained(folder, output_loading_info=True, **kernels)
    for kind, names in info.items():
        if names:
            yield f"{kind}: {names}"
    loaded.eval()
    wanted, found = dict(job.named_parameters()), dict(loaded.named_parameters())
    for name in wanted.keys() | found.keys():
        if name not in wanted or name not in found or not torch.equal(wanted[name], found[name]):
            yield f"{name} is another"
    ids = torch.arange(2, 14).view(2, 6) % job.get_input_embeddings().weight.shape[0]
    with torch.no_grad():
        logits = [logits_of(each(input_ids=ids, **arguments(each))) for each in (job, loaded)]
    if not torch.equal(*logits):
        yield f"logits are {float((logits[0] - logits[1]).abs().max()):.1e} apart"


def apart_in_boxes(described: elasticd.Model, job: Any, folder: Path) -> Iterator[str]:
    """What devices that read their boxes of the folder would not have of the job's weights, to the bit."""
    weights = FolderWeights(folder, model_on_meta(folder), partial(their_name, described))
    for section in described.sections:
        for parameter in described.spec.section(section):
            full = f"{section}.{parameter.name}"
            if described.spec.owner(full) != full or parameter.kind == "buffer":
                continue
            theirs = job.get_parameter(their_name(described, full)).detach()
            whole = Box.whole(tuple(theirs.shape))
            half = Box(start=tuple(size // 3 for size in theirs.shape), stop=tuple(theirs.shape))
            for box in (whole, half):
                if not torch.equal(weights.read(full, box).to(theirs.dtype), theirs[box.slices(whole)]):
                    yield f"{full} is read otherwise"
