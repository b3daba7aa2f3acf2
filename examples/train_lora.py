"""Fine-tunes a model of Hugging Face with a LoRA adapter of PEFT, and saves the adapter as PEFT does.

python examples/tiny_qwen2.py base                             # or a folder of your own
elasticd run --devices 2 examples/train_lora.py base --out adapter

The prompts are sums, "12+7=", and the loss is of the answers alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq

import elasticd


class Sums:
    """Prompts and answers as `datasets` would give them: lists of tokens, and -100 where no loss is."""

    def __init__(self, tokenizer: Any, largest: int) -> None:
        self._tokenizer, self._largest = tokenizer, largest

    def __len__(self) -> int:
        return self._largest**2

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        a, b = divmod(index, self._largest)
        prompt = self._tokenizer(f"{a}+{b}=")["input_ids"]
        answer = [*self._tokenizer(str(a + b))["input_ids"], self._tokenizer.eos_token_id]
        ids = [*prompt, *answer]
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": [-100] * len(prompt) + answer}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, help="folder of the base model")
    parser.add_argument("--out", type=Path, default=Path("adapter"), help="folder for the adapter")
    parser.add_argument("--merged", type=Path, help="folder for the model with the adapter merged into it")
    parser.add_argument("--checkpoints", type=Path, help="folder for checkpoints")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.base)
    base = AutoModelForCausalLM.from_pretrained(options.base)
    torch.manual_seed(0)  # every rank makes the same adapter
    adapter = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules="all-linear")
    model = get_peft_model(base, adapter)

    job = elasticd.Job(
        model=elasticd.from_hf(model),
        optimizer=lambda named: torch.optim.AdamW(named, lr=5e-3),
        dataset=Sums(tokenizer, largest=50),
        data=elasticd.DataOptions(collate=DataCollatorForSeq2Seq(tokenizer)),
        global_batch=16,
        micro_batch=4,
        clip=1.0,
        checkpointing=elasticd.CheckpointingOptions(folder=options.checkpoints, every=50),
    )
    for step in job.steps(options.steps):
        if job.rank == 0 and (step.index % 10 == 0 or step.index == options.steps - 1):
            print(f"step {step.index}: loss {step.loss:.4f}", flush=True)
    job.save_pretrained(options.out)  # on every rank: all have a part of the adapter
    if options.merged is not None:
        job.save_pretrained(options.merged, merge=True)


if __name__ == "__main__":
    main()
