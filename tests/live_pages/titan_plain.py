"""A trainer as torchtitan's train.py, cut to a page (github.com/pytorch/torchtitan, BSD-3): HSDP, meta init,
recomputation and compilation by block."""

import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

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
    dp_replicate: int = 1
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
        dist.init_process_group("gloo")
        self.dp_degree, self.dp_rank = dist.get_world_size(), dist.get_rank()
        shard = self.dp_degree // config.dp_replicate
        world_mesh = init_device_mesh(
            "cpu", (config.dp_replicate, shard), mesh_dim_names=("dp_replicate", "dp_shard")
        )
        torch.manual_seed(config.seed)
        self.dataset = TextDataset(config.seq_len)
        sampler = torch.utils.data.DistributedSampler(self.dataset, self.dp_degree, self.dp_rank)
        self.dataloader = torch.utils.data.DataLoader(
            self.dataset, config.global_batch_size // self.dp_degree, sampler=sampler, drop_last=True
        )
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
        self.step = 0

    def batch_generator(self):
        while True:
            yield from self.dataloader

    def forward_backward_step(self, inputs, labels):
        pred = self.model(inputs)
        loss = F.cross_entropy(pred.flatten(0, 1).float(), labels.flatten())
        loss.backward()
        return loss.detach()

    def train_step(self, data_iterator):
        self.optimizer.zero_grad()
        inputs, labels = next(data_iterator)
        loss = self.forward_backward_step(inputs, labels)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_norm)
        self.optimizer.step()
        self.lr_scheduler.step()
        global_avg_loss = loss.clone()
        dist.all_reduce(global_avg_loss)
        if dist.get_rank() == 0:
            print(f"step: {self.step} loss: {global_avg_loss.item() / dist.get_world_size():.4f}", flush=True)

    def train(self):
        data_iterator = self.batch_generator()
        while self.step < self.config.steps:
            self.step += 1
            self.train_step(data_iterator)


if __name__ == "__main__":
    Trainer(JobConfig()).train()
    dist.destroy_process_group()
