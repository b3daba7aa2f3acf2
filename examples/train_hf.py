"""Trains a Hugging Face model, unchanged, on the source files of Python's standard library.

    pip install '.[train,hf]'
    elasticd run --job hf --nnodes 2 --devices 2 examples/train_hf.py

Here it is a small one, made from a configuration (--model qwen3 for another). `--base FOLDER` reads a
pretrained model from a folder of transformers, each device the part that it holds. The loss is the model's own,
and samples and batches are as transformers has them. `--out FOLDER` writes what `from_pretrained` loads.
"""

from __future__ import annotations

import argparse

import torch
from train_gpt2 import StandardLibrary
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM, default_data_collator

import elasticd

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)),
}


class Samples:
    """The tokens of the files as transformers has them: lists of numbers, and labels that the model shifts."""

    def __init__(self, tokens: int) -> None:
        self._files = StandardLibrary(tokens)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        ids = self._files[index]["inputs"].tolist()
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--base", metavar="FOLDER", help="a pretrained model, whose vocabulary has 256 bytes")
    parser.add_argument("--out", metavar="FOLDER")
    options = parser.parse_args()
    torch.manual_seed(0)  # every rank makes the same model
    job = elasticd.Job(
        model=elasticd.from_hf(options.base or MODELS[options.model]()),
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
        dataset=Samples(128),
        data=elasticd.DataOptions(collate=default_data_collator),
        global_batch=16,
        seed=0,
        clip=1.0,
    )
    for step in job.steps(options.steps):
        if job.rank == 0:
            print(f"step {step.index}: loss {step.loss:.4f}")
        if options.out and step.index == options.steps - 1:
            job.save_pretrained(options.out)


if __name__ == "__main__":
    main()
