"""Trains a Hugging Face model, unchanged, on the source files of Python's standard library.

    pip install '.[train,hf]'
    torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=elasticd --rdzv-id=hf examples/train_hf.py

Here it is a small one, made from a configuration (--model qwen3 for another). What
`LlamaForCausalLM.from_pretrained(...)` gives goes the same way, and starts from the pretrained weights.
"""

from __future__ import annotations

import argparse

import torch
from train_gpt2 import StandardLibrary, loss
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    torch.manual_seed(0)  # every rank makes the same model
    job = elasticd.Job(
        model=elasticd.from_hf(MODELS[options.model]()),
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
        dataset=StandardLibrary(128),
        global_batch=16,
        seed=0,
        clip=1.0,
    )
    for step in job.steps(options.steps):
        if job.rank == 0:
            print(f"step {step.index}: loss {step.loss:.4f}")


if __name__ == "__main__":
    main()
