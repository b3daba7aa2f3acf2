"""A script of Lightning over DDP, which goes on from its last checkpoint. Rows are drawn by the step."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

#: Rows of a step of one process.
BATCH = 4


class Net(lightning.LightningModule):
    """A small autoencoder."""

    def __init__(self, pause: float) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.pause = pause

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        seed = self.trainer.global_step * self.trainer.world_size + self.global_rank
        rows = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(seed)).to(self.device)
        loss = (self.net(rows) - rows).square().mean()
        time.sleep(self.pause)
        if self.trainer.is_global_zero:
            world = self.trainer.world_size
            print(f"step {self.trainer.global_step} world {world} loss {loss.item():.6f}", flush=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    lightning.seed_everything(0)
    keep = ModelCheckpoint(dirpath=options.folder, every_n_train_steps=options.save_every, save_last=True)
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=options.devices,
        strategy="ddp",
        max_steps=options.steps,
        callbacks=[keep],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = options.folder / "last.ckpt"
    steps = torch.utils.data.TensorDataset(torch.arange(options.steps * options.devices))
    data = torch.utils.data.DataLoader(steps)
    trainer.fit(Net(options.pause), data, ckpt_path=str(last) if last.exists() else None)


if __name__ == "__main__":
    main()
