"""Makes a folder with a small Qwen2 and its tokenizer, in the place of a model that one downloads.

python examples/tiny_qwen2.py FOLDER

Its tokens are digits and signs, and its weights are random.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

PAD, END = "<pad>", "</s>"
CHARACTERS = "0123456789+-="


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each character."""
    words = {word: number for number, word in enumerate([PAD, END, *CHARACTERS])}
    made = Tokenizer(WordLevel(words, unk_token=PAD))
    made.pre_tokenizer = Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token=PAD, eos_token=END)


def model(vocabulary: int) -> Qwen2ForCausalLM:
    """Four layers of width 64."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary,
        initializer_range=0.1,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    words = tokenizer()
    small = model(len(words))
    small.save_pretrained(folder)
    words.save_pretrained(folder)
    print(f"{folder}: a Qwen2 with {small.num_parameters():,} parameters")


if __name__ == "__main__":
    main()
