"""The model of the pages: a small GPT with the functions that nanoGPT's and torchtitan's trainers call."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, -1)).unbind(-2)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(F.gelu(self.up(x)))


class GPT(nn.Module):
    def __init__(self, vocabulary: int = 64, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Any:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        if targets is None:
            return logits
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else nn.init.zeros_(parameter)
        for layer in self.layers:
            nn.init.ones_(layer.norm.weight)

    def configure_optimizers(self, decay: float, rate: float) -> torch.optim.Optimizer:
        groups = [
            {"params": [p for p in self.parameters() if p.dim() >= 2], "weight_decay": decay},
            {"params": [p for p in self.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=rate)


def tokens() -> Tensor:
    """A text of 10,000 tokens, whose next token is the last one and a small step."""
    steps = torch.randint(1, 4, (10_000,), generator=torch.Generator().manual_seed(0))
    return steps.cumsum(0) % 64
