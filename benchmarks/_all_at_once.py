"""The vision-language model with experts of examples/all_in_one.py on eight emulated devices, one of them slow.

Engines of the runtime run in threads: its images and texts, router, losses and gradients are real, and what a
block takes is slept, by its tokens and by the rows that go to a device's experts. The planner makes a plan of
both modules for devices that are alike, and one for a device that is twice slower, with experts placed by the
rows that the router sends to them in the first step. Where N devices of slowdowns x could divide all work by
their speed, a step would take N / sum(1 / x) times as long as that of devices that are alike.
"""

from __future__ import annotations

import importlib
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch
from _module_emulated import Run, run_row
from _results import Row, row
from elasticd_planner.cost.model_profile import ModelProfile, SectionProfile, derive
from elasticd_planner.problem import ModuleProblem, Problem, SearchSpace, ideal_ratio
from elasticd_planner.search.planner import plan
from elasticd_planner.spec.batch import Sampler
from elasticd_planner.spec.cluster import Cluster, Link
from elasticd_planner.spec.expert_load import ExpertLoad, costed
from elasticd_planner.spec.model import ModelSpec
from elasticd_planner.spec.plan import Plan, StatePolicy

import elasticd
from elasticd.runtime.comm.communicators import GlooCommunicators
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.model.model import Model

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.planner.drawn_module_problems import GIB, cluster_of

#: Devices, samples of a step, and the slow device.
DEVICES, BATCH, SEED = 8, 48, 0
SLOW, FACTOR = "n0/1", 2.0
#: Seconds of a token in a block, forward and backward, and steps of a run.
FORWARD, BACKWARD, STEPS = 0.01, 0.02, 2
CHOSEN = 2


@cache
def example() -> Any:
    """The script."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
    return importlib.import_module("all_in_one")


def spec_of(module: str) -> ModelSpec:
    """The tensors of a module."""
    specs = described().specs
    assert not isinstance(specs, ModelSpec)
    return specs[module]


@cache
def described() -> Model:
    """Once for all ranks."""
    return elasticd.from_hf(example().make_model(torch.float32), experts="experts")


@cache
def recipe() -> Recipe:
    """Once for all ranks."""
    return Recipe(
        model=described(),
        loss=described().loss,
        optimizer=example().optimizer,
        dataset=example().Pictures(),
        global_batch=BATCH,
        seed=SEED,
        parallelism=elasticd.ParallelismOptions(zero=1, replicas=2),
        connect=GlooCommunicators,
    )


class Sizes(msgspec.Struct, frozen=True):
    """Means of the samples of the first step."""

    tokens: float  # of a text, with its images' rows
    items: float  # images of a sample
    rows: float  # of an image in the encoder
    load: ExpertLoad


@cache
def sizes() -> Sizes:
    """By one process."""
    all_in_one = example()
    model, data = all_in_one.make_model(torch.float32), all_in_one.Pictures()
    chosen: dict[int, torch.Tensor] = defaultdict(lambda: torch.zeros(all_in_one.EXPERTS))

    def noting(block: int) -> Any:
        def note(_: object, args: Any, kwargs: Any) -> None:
            index = args[1] if len(args) > 1 else kwargs["top_k_index"]
            chosen[block] += torch.bincount(index.flatten(), minlength=all_in_one.EXPERTS)

        return note

    for block, layer in enumerate(model.model.language_model.layers):
        layer.mlp.experts.register_forward_pre_hook(noting(block), with_kwargs=True)
    tokens, images, rows = [], 0, 0
    for index in Sampler(size=len(data), global_batch=BATCH, seed=SEED).samples(0):
        sample = data.encoded(index)
        given = {name: x for name, x in sample.items() if name != "labels"}
        given["mm_token_type_ids"] = (given["input_ids"] == model.config.image_token_id).long()
        with torch.no_grad():
            model(**given)
        tokens.append(sample["input_ids"].shape[1])
        images += len(sample.get("image_grid_thw", ()))
        rows += len(sample.get("pixel_values", ()))
    mean = sum(tokens) / BATCH
    listed = {block: tuple(counts.tolist()) for block, counts in chosen.items()}
    load = costed(spec_of("language"), mean, listed, CHOSEN)
    assert load is not None
    return Sizes(tokens=mean, items=images / BATCH, rows=rows / images, load=load)


def profile_of(name: str, tokens: float) -> ModelProfile:
    """A module's bytes by its shapes, and the emulated seconds of its blocks. Nothing else takes any."""
    each = FORWARD + BACKWARD
    profile = derive(spec_of(name), tokens, 1)
    none = {"seconds": 0.0, "fixed_seconds": 0.0, "whole_seconds": 0.0, "slowdown": {}, "collectives": 0}
    sections: dict[str, SectionProfile] = {
        part: msgspec.structs.replace(getattr(profile, part), **none) for part in ("embed", "block", "head")
    }
    sections["block"] = msgspec.structs.replace(sections["block"], seconds=each)
    return msgspec.structs.replace(
        profile, **sections, forward=FORWARD / each, collective_seconds={}, overlap=False, optimizer_seconds=0.0
    )


def asked(rates: dict[str, float]) -> Problem:
    """The emulated devices as a problem of the planner: communication takes nothing."""
    cluster, link = cluster_of(1, DEVICES, 64 * GIB), Link(bandwidth=1e15, latency=0.0)
    found = sizes()
    vision = ModuleProblem(
        name="vision",
        profile=profile_of("vision", found.rows),
        items="images",
        items_a_sample=found.items,
        rows_an_item=found.rows,
    )
    return Problem(
        cluster=Cluster(nodes=cluster.nodes, inside=link, between=link),
        profile=profile_of("language", found.tokens),
        global_batch=BATCH,
        micro_batch=1,
        rates=rates,
        module="language",
        modules=(vision,),
        experts=found.load,
        search_space=SearchSpace(states=(StatePolicy(zero=1, replicas=2),)),
    )


def answer(rates: dict[str, float]) -> Plan:
    """The planner's."""
    found = plan(asked(rates))
    assert found.plan is not None, found.refusal
    print(found.plan.reason, file=sys.stderr)
    return found.plan


def rows(smallest: bool = False) -> Iterator[Row]:
    """Throughput with the slow device over what all speed would give, predicted and emulated."""
    steps, seconds = (1, 0.1) if smallest else (STEPS, 1.0)
    torch.set_num_threads(1)
    rates = {SLOW: FACTOR}
    ideal = ideal_ratio([FACTOR, *[1.0] * (DEVICES - 1)])
    alike, slow = answer({}), answer(rates)
    assert alike.prediction is not None
    assert slow.prediction is not None
    title = "examples/all_in_one.py on 8 emulated devices, one 2 x slow: throughput over that of all speed"
    ratio = alike.prediction.step_seconds * ideal / slow.prediction.step_seconds
    yield row(f"{title}, predicted", ratio, "x", kind="simulated")
    runs = [
        Run.of(each, steps, seconds, of, recipe(), (FORWARD, BACKWARD))
        for each, of in ((alike, {}), (slow, rates))
    ]
    yield run_row(title, runs[0].step * ideal / runs[1].step, tuple(runs), least=0.90)
