"""Compares two LoRA adapters of one model, loaded as PEFT loads them.

python compare.py runs/base runs/plain-adapter runs/adapter
"""

from __future__ import annotations

import sys

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    base, *folders = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(base)
    ids = torch.tensor([tokenizer.encode("<|user|>Paragraph 3?<|assistant|>")])
    logits, weights = [], []
    for folder in folders:
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder).eval()
        with torch.no_grad():
            logits.append(model(ids).logits)
        weights.append({name: value for name, value in model.state_dict().items() if "lora_" in name})
    one, other = weights
    assert one.keys() == other.keys()
    print(f"{len(one)} matrices of adapters")
    apart = max(float((one[name] - other[name]).abs().max()) for name in one)
    size = max(float(value.abs().max()) for value in one.values())
    print(f"values agree within a thousandth: {apart < 1e-3 * size}")
    print(f"logits agree within a thousandth: {torch.allclose(*logits, rtol=1e-3, atol=1e-3)}")


if __name__ == "__main__":
    main()
