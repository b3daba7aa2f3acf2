"""The loop of nanoGPT's train.py over DDP, cut to a page (github.com/karpathy/nanoGPT, MIT), kept alive."""

import math
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import elasticd

sys.path.insert(0, os.path.dirname(__file__))
from model import GPT, tokens

batch_size = 24  # over all ranks
block_size = 16
gradient_accumulation_steps = 2
learning_rate, min_lr, warmup_iters, max_iters = 1e-2, 1e-3, 5, int(os.environ.get("ITERS", "40"))
weight_decay, grad_clip, log_interval = 0.1, 1.0, 1

data = tokens()


def get_batch():
    ix = step.data.tensor_split(gradient_accumulation_steps)[micro_step]
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


def build(mesh):
    model = GPT()
    optimizer = model.configure_optimizers(weight_decay, learning_rate)
    model = DDP(model)
    return elasticd.State(model=model, optimizer=optimizer)


for step in elasticd.live(build, batch=batch_size, steps=max_iters, data=range(len(data) - block_size)):
    with step:
        iter_num, model, optimizer = step.index, step.state.model, step.state.optimizer
        # determine and set the learning rate for this iteration
        lr = get_lr(iter_num)
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr
        # forward backward update, with gradient accumulation to simulate larger batch size
        for micro_step in range(gradient_accumulation_steps):
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
            X, Y = get_batch()
            logits, loss = model(X, Y)
            loss = loss * step.scale * len(X) / len(step.data)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if iter_num % log_interval == 0 and dist.get_rank() == 0:
            print(f"iter {iter_num}: loss {loss.item() * gradient_accumulation_steps:.4f}", flush=True)
