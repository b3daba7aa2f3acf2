"""Makes what a hub would give: the folder of a small Qwen2 with random weights, and a tokenizer of bytes.

python make_base.py runs/base
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, set_seed

LICENSE = Path(__file__).resolve().parents[2] / "LICENSE"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    tokens = Tokenizer(BPE())
    tokens.pre_tokenizer = ByteLevel()
    special = ["<|end|>", "<|user|>", "<|assistant|>"]
    trainer = BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    tokens.train([str(LICENSE)], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token=special[0], pad_token=special[0])
    set_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config).to(torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{folder}: {model.num_parameters():,} parameters, {len(tokenizer)} tokens")


if __name__ == "__main__":
    main()
