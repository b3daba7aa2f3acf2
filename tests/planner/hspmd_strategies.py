"""The strategies that HSPMD published, as annotations of a model's parameters, to a plan and back.

`recorded/hspmd_strategies.json` has their numbers. What becomes of them is written anew from their README: of
each pipeline's blocks the ranks of a stage, without unused ones, are the group; ranks become devices by a map.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from elasticd_planner.layout.annotated_plan import annotations_of, plan_of
from elasticd_planner.layout.annotations import Annotation
from elasticd_planner.spec.model import Cut, ModelSpec, Parameter, Units
from elasticd_planner.spec.plan import Plan

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "recorded/hspmd_strategies.json").read_text())
MODEL: dict[str, int] = RECORDED["model"]
#: Parameters of their Llama as they name them: the dimension in their annotation (of weights [in, out]).
SPLIT = {"qkv": 1, "dense": 0, "dense_h_to_4h": 1, "dense_4h_to_h": 0, "rmsnorm1": 0, "rmsnorm2": 0}

#: The groups of one pipeline: devices of each block.
Blocks = Sequence[Sequence[int]]


def spec(layers: int) -> ModelSpec:
    """Their Llama, with weights as they store them."""
    hidden, ffn, vocabulary = MODEL["hidden"], MODEL["ffn"], MODEL["vocabulary"]

    def weight(name: str, shape: tuple[int, ...], dim: int | None = None, units: str = "") -> Parameter:
        cut = None if dim is None else Cut(dim=dim, units=units)
        return Parameter(name=name, shape=shape, dtype="bfloat16", cut=cut)

    block = (
        weight("rmsnorm1", (hidden,)),
        weight("qkv", (hidden, 3 * hidden), 1, "heads"),
        weight("dense", (hidden, hidden), 0, "heads"),
        weight("rmsnorm2", (hidden,)),
        weight("dense_h_to_4h", (hidden, 2 * ffn), 1, "ffn"),
        weight("dense_4h_to_h", (ffn, hidden), 0, "ffn"),
    )
    return ModelSpec(
        name="hspmd-llama",
        embed=(weight("wte", (vocabulary, hidden), 0, "vocabulary"),),
        kinds=(block,),
        layers=(0,) * layers,
        head=(weight("rmsnorm_final", (hidden,)), weight("lm_head", (hidden, vocabulary), 1, "vocabulary")),
        units=(
            Units(kind="heads", count=MODEL["heads"]),
            Units(kind="ffn", count=ffn),
            Units(kind="vocabulary", count=vocabulary),
        ),
        width=hidden,
    )


def strategies() -> Iterator[tuple[str, list[Blocks], list[int], bool]]:
    """Name, blocks of each pipeline, micro-batches of each; whether they write like pipelines as one group."""
    for case in RECORDED["cases"]:
        if "layers" not in case:  # the same groups everywhere
            pipelines, width, depth = case["dp"] * case["cp"], case["tp"], case["pp"]
            stages = [
                [[s * pipelines * width + p * width + i for i in range(width)] for s in range(depth)]
                for p in range(pipelines)
            ]
            blocks = [[devices for devices in each for _ in range(60 // depth)] for each in stages]
            yield f"case {case['case']}", blocks, [1] * pipelines, True
            continue
        width, unused, devices = case["tp"], {*case["unused"]}, case["devices"]
        firsts = accumulate((len(layers) for layers in case["layers"]), initial=0)
        pipelines = []
        for first, layers in zip(firsts, case["layers"], strict=False):
            made: list[list[int]] = []
            for s, count in enumerate(layers):
                ranks = range((first + s) * width, (first + s + 1) * width)
                made += [[devices[rank] for rank in ranks if rank not in unused]] * count
            pipelines.append(made)
        yield f"case {case['case']}", pipelines, case["micro_batches"], False
    for name, found in RECORDED["mixed_length"].items():
        blocks = [
            [devices for devices in stages for _ in range(60 // len(stages))] for stages in found["stages"]
        ]
        yield f"mixed length {name}", blocks, [1] * len(blocks), False


def theirs(pipelines: Sequence[Blocks], merged: bool) -> dict[str, dict[str, Any]]:
    """Their annotation of each parameter, by our name of it."""
    layers = len(pipelines[0])
    names = {"embed.wte": (0, 0), "head.rmsnorm_final": (layers - 1, 0), "head.lm_head": (layers - 1, 1)}
    names |= {f"blocks.{b}.{name}": (b, dim) for b in range(layers) for name, dim in SPLIT.items()}
    return {
        name: entry([blocks[block] for blocks in pipelines], dim, merged)
        for name, (block, dim) in names.items()
    }


def entry(groups: Sequence[Sequence[int]], dim: int, merged: bool) -> dict[str, Any]:
    count = len(groups)
    split = [len(group) for group in groups]
    if merged:
        split, groups = split[:1], [[device for group in groups for device in group]]
    return {
        "split": {str(dim): split},
        "dup": [count] * len(groups),
        "device_group_union": [list(group) for group in groups],
        "type": "variable",
    }


def plan(model: ModelSpec, configs: Mapping[str, dict[str, Any]], micro_batches: Sequence[int]) -> Plan:
    """Their norms are annotated as split, which tells them the width of the group; the weight is whole."""
    read = {name: Annotation.from_hspmd(config) for name, config in configs.items()}
    for name, annotation in read.items():
        if "rmsnorm" in name:
            states = [{"same" if axis == 0 else axis: n for axis, n in s.items()} for s in annotation.states]
            whole = [{"same": len(group)} for group in annotation.groups]
            read[name] = annotation.replace(states=whole if any("same" in s for s in states) else states)
    return plan_of(model, read, micro_batches)


def back(model: ModelSpec, made: Plan, merged: bool) -> dict[str, dict[str, Any]]:
    """From a plan to their annotations."""
    found = {}
    for name, annotation in annotations_of(model, made).items():
        dim = SPLIT.get(name.rpartition(".")[2], 1 if name == "head.lm_head" else 0)
        if "rmsnorm" in name:
            states = [{dim: len(group)} if len(group) > 1 else {} for group in annotation.groups]
            annotation = annotation.replace(states=states)
        found[name] = (annotation.merged() if merged else annotation).to_hspmd((dim,))
    return found
