"""Trains a small vision-language model with experts under a plan in which hardly two devices do the same.

    pip install '.[hf]' scikit-learn
    elasticd run --job all --nnodes 2 --devices 4 examples/all_in_one.py

The model is a Qwen3-VL-MoE of transformers, made from a configuration; the samples are those of train_vlm.py.
`--devices`, with the names of eight, gives a first plan by hand: the encoder on three of them beside a language
model of two pipelines, one of two stages and one of one, with TP groups of unequal shares, whose devices have
unequal numbers of the eight experts, some of them twice. The optimizer's state is sharded, each shard on two
devices. Then slow a device down (`elasticd chaos slow`), kill one and start it again: the job goes on in the
same steps. `--checkpoints FOLDER` lets another job go on from where this one ended, on any number of devices.
`--pack` packs the samples in rows without padding; the second pipeline then has two lanes, of two devices and
of one, over which long samples are cut.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from elasticd_planner.spec.plan import (
    Edge,
    HeldExperts,
    ModulePlan,
    PackedLane,
    Pipeline,
    Plan,
    Stage,
    StatePolicy,
    Strategy,
)
from msgspec.structs import replace
from train_vlm import MERGE, PATCH, TOKEN, WORDS, Pictures
from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

import elasticd

LAYERS, EXPERTS = 4, 8
#: Tokens of a packed row of a lane, at most: the longest samples have 29.
ROW = 16


def make_model(dtype: torch.dtype) -> Qwen3VLMoeForConditionalGeneration:
    """A model of 4 layers with 8 experts each beside an encoder of 2, with random weights."""
    text = {
        "vocab_size": len(WORDS),
        "hidden_size": 64,
        "num_hidden_layers": LAYERS,
        "pad_token_id": TOKEN["<pad>"],
    }
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False}
    text |= {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 64}
    vision |= {"patch_size": PATCH, "spatial_merge_size": MERGE, "temporal_patch_size": 1}
    vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}
    config = Qwen3VLMoeConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=TOKEN["<image>"],
        video_token_id=TOKEN["<video>"],
        vision_start_token_id=TOKEN["<images>"],
        vision_end_token_id=TOKEN["</images>"],
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)  # every rank makes the same model
    model = Qwen3VLMoeForConditionalGeneration(config).to(dtype)
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # fused kernels have no double precision
    return model


def make_plan(devices: Sequence[str], batch: int, *, packed: bool = False) -> Plan:
    """A plan for eight devices, of which the first two are on one node, and the fifth to the seventh. packed:
    its samples are packed, and cut over the lanes of the second pipeline."""
    a, b = devices[:4], devices[4:]
    few: HeldExperts = ((0, 1, 2, 4, 5), (2, 3, 6, 7))  # expert 2 twice
    more: HeldExperts = ((0, 1, 3, 5, 6, 7), (0, 2, 4))
    three: HeldExperts = ((0, 1, 5), (2, 3, 5), (4, 6, 7))
    second = batch // 3
    language = [
        _pipeline(batch - second, _stage(0, 2, {a[0]: 3, a[1]: 1}, (few, more)), _stage(2, LAYERS, {a[2]: 1})),
        _pipeline(second, _stage(0, LAYERS, {b[0]: 2, b[1]: 1, b[2]: 1}, (three,) * LAYERS)),
    ]
    if packed:
        (stage,) = language[1].stages
        lanes = replace(stage, lanes=(2, 1), shares=(2, 1, 1))
        language[0] = replace(language[0], packed=(PackedLane(capacity=2 * ROW),))
        rows = (PackedLane(capacity=ROW), PackedLane(capacity=ROW, slowdown=96))
        language[1] = replace(language[1], stages=(lanes,), micro_batches=2, rows=(1, 1), packed=rows)
    encoder = tuple(_pipeline(1, _stage(0, 2, {device: 1})) for device in (a[2], a[3], b[3]))
    modules = (
        ModulePlan(module="vision", pipelines=encoder, items="images", ahead=2),
        ModulePlan(module="language", pipelines=tuple(language)),
    )
    return Plan(
        number=0,
        strategies=(Strategy(modules=modules, edges=(Edge(source="vision", target="language"),)),),
        micro_batch=1,
        global_batch=batch,
        state=StatePolicy(zero=1, replicas=2),
    )


def _stage(start: int, stop: int, shares: dict[str, int], experts: tuple[HeldExperts, ...] = ()) -> Stage:
    """A TP group of devices by their shares, which may have experts of its blocks."""
    return Stage(start=start, stop=stop, devices=tuple(shares), shares=tuple(shares.values()), experts=experts)


def _pipeline(micro_batches: int, *stages: Stage) -> Pipeline:
    return Pipeline(stages=stages, micro_batches=micro_batches)


def data(pictures: Pictures) -> elasticd.DataOptions:
    """Packed rows of samples, whose lengths are known before they are read."""
    return elasticd.DataOptions(packing=elasticd.Packing(tokens=ROW, least=4), length=pictures.tokens)


def optimizer(named: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-3)  # type: ignore[arg-type]


def make_job(options: argparse.Namespace) -> elasticd.Job:
    plan = make_plan(options.devices, options.batch, packed=options.pack) if options.devices else None
    pictures = Pictures()
    return elasticd.Job(
        model=elasticd.from_hf(make_model(getattr(torch, options.dtype)), experts="experts"),
        optimizer=optimizer,
        dataset=pictures,
        data=data(pictures) if options.pack else elasticd.DataOptions(),
        global_batch=options.batch,
        seed=options.seed,
        parallelism=elasticd.ParallelismOptions(zero=1, replicas=2, plan=plan),
        checkpointing=elasticd.CheckpointingOptions(
            folder=options.checkpoints, snapshot_every=options.snapshot_every
        ),
    )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--steps", type=int, default=50)
    made.add_argument("--batch", type=int, default=12, help="samples of a step")
    made.add_argument("--devices", nargs=8, metavar="NAME", help="of the plan by hand, n0/0 n0/1 ...")
    made.add_argument("--pack", action="store_true", help="samples are packed in rows, and cut over lanes")
    made.add_argument("--checkpoints", metavar="FOLDER")
    made.add_argument("--snapshot-every", type=int, default=20, help="steps, for a device that dies alone")
    made.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    made.add_argument("--seed", type=int, default=0, help="of the order of the samples")
    return made


def main() -> None:
    options = parser().parse_args()
    job = make_job(options)
    for step in job.steps(options.steps):
        if job.rank == 0:
            print(f"step {step.index}: loss {step.loss:.4f} under plan {step.plan}")


if __name__ == "__main__":
    main()
