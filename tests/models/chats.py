"""Conversations as `datasets` gives them: lists of numbers, and prompts without labels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

VOCABULARY = 41
PAD, BEGIN, END = 0, 1, 2


class Chats:
    """Prompts and answers of unequal length, each a function of its index. `lengths`: tokens of each."""

    def __init__(self, count: int = 64, **more: Any) -> None:
        self._count, self._more = count, more
        self.lengths = [len(self[index]["input_ids"]) for index in range(count)]

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        prompt, answer = 2 + index % 5, 1 + index * 7 % 6
        ids = [BEGIN, *torch.randint(3, VOCABULARY, (prompt + answer,), generator=generator).tolist(), END]
        labels = [-100] * (1 + prompt) + ids[1 + prompt :]
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels, **self._more}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))


def tokenizer(padding_side: str = "right") -> Any:
    """A tokenizer of so many words, which pads as every one of transformers does."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": PAD, "<s>": BEGIN, "</s>": END} | {f"w{i}": i for i in range(3, VOCABULARY)}
    model: Any = WordLevel(words, unk_token="w3")
    words_apart = Tokenizer(model)
    words_apart.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=words_apart,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        padding_side=padding_side,
    )
