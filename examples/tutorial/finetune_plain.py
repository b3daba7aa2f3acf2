"""Fine-tunes a model of transformers with LoRA, in one process of plain PyTorch.

python finetune_plain.py runs/base --out runs/plain-adapter
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, set_seed

LICENSE = Path(__file__).resolve().parents[2] / "LICENSE"
batch_size, learning_rate = 8, 3e-3


def load_samples(tokenizer: AutoTokenizer) -> list[dict[str, list[int]]]:
    """A question for each paragraph, whose answer is its text: the loss is on the answer alone."""
    samples = []
    paragraphs = [" ".join(text.split()) for text in LICENSE.read_text().split("\n\n")]
    for number, paragraph in enumerate(filter(None, paragraphs)):
        prompt = tokenizer.encode(f"<|user|>Paragraph {number}?<|assistant|>")
        answer = [*tokenizer.encode(paragraph[:160]), tokenizer.eos_token_id]
        labels = [-100] * len(prompt) + answer
        samples.append({"input_ids": prompt + answer, "labels": labels})
    return samples


def batch_ix(step: int, samples: int) -> list[int]:
    return [(step * batch_size + i) % samples for i in range(batch_size)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("base", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.base)
    samples, collator = load_samples(tokenizer), DataCollatorForSeq2Seq(tokenizer)
    set_seed(1)
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(options.base), lora)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)

    for step in range(options.steps):
        batch = collator([samples[i] for i in batch_ix(step, len(samples))])
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss:.4f}", flush=True)
    model.save_pretrained(options.out)


if __name__ == "__main__":
    main()
