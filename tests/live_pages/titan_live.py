"""A trainer as torchtitan's train.py, cut to a page (github.com/pytorch/torchtitan, BSD-3): HSDP, meta init,
recomputation and compilation by block; kept alive."""

import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

import elasticd

sys.path.insert(0, os.path.dirname(__file__))
from model import GPT, tokens


@dataclass
class JobConfig:
    steps: int = int(os.environ.get("ITERS", "20"))
    global_batch_size: int = 24
    seq_len: int = 16
    lr: float = 1e-2
    warmup_steps: int = 5
    max_norm: float = 1.0
    compile: str = os.environ.get("COMPILE", "")
    seed: int = 0


class TextDataset:
    def __init__(self, seq_len):
        self.tokens, self.seq_len = tokens(), seq_len

    def __len__(self):
        return len(self.tokens) // (self.seq_len + 1)

    def __getitem__(self, index):
        start = index * (self.seq_len + 1)
        sample = self.tokens[start : start + self.seq_len + 1]
        return sample[:-1], sample[1:]


def parallelize(model, mesh, config):
    for name, block in model.layers.named_children():
        block = checkpoint_wrapper(block)
        if config.compile:
            block = torch.compile(block, backend=config.compile)
        model.layers.register_module(name, block)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


class Trainer:
    def __init__(self, config):
        self.config = config
        self.dataset = TextDataset(config.seq_len)

    def build(self, world_mesh):
        config = self.config
        with torch.device("meta"):
            model = GPT()
        parallelize(model, world_mesh, config)
        model.to_empty(device="cpu")
        with torch.no_grad():
            model.init_weights()
        self.model = model.train()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / config.warmup_steps)
        )
        return elasticd.State(model=model, optimizer=self.optimizer, scheduler=self.lr_scheduler)

    def forward_backward_step(self, inputs, labels):
        pred = self.model(inputs)
        loss = F.cross_entropy(pred.flatten(0, 1).float(), labels.flatten())
        (loss * self.step.scale).backward()
        return loss.detach()

    def train_step(self, data_iterator):
        self.optimizer.zero_grad()
        inputs, labels = next(data_iterator)
        self.step.loss = self.forward_backward_step(inputs, labels)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_norm)
        self.optimizer.step()
        self.lr_scheduler.step()
        if dist.get_rank() == 0:
            print(f"step: {self.step.index + 1} loss: {self.step.total:.4f}", flush=True)

    def train(self):
        meshes, batch = ("dp_replicate, dp_shard", "dp_shard"), self.config.global_batch_size
        for step in elasticd.live(
            self.build, batch=batch, steps=self.config.steps, meshes=meshes, data=self.dataset
        ):
            with step:
                self.step, data_iterator = step, iter([step.data])
                self.model, self.optimizer, self.lr_scheduler = (
                    step.state.model,
                    step.state.optimizer,
                    step.state.scheduler,
                )
                self.train_step(data_iterator)


if __name__ == "__main__":
    Trainer(JobConfig()).train()
