"""The loop of nanoGPT's train.py over DDP, cut to a page (github.com/karpathy/nanoGPT, MIT)."""

import math
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

sys.path.insert(0, os.path.dirname(__file__))
from model import GPT, tokens

batch_size = 24  # over all ranks
block_size = 16
gradient_accumulation_steps = 2
learning_rate, min_lr, warmup_iters, max_iters = 1e-2, 1e-3, 5, int(os.environ.get("ITERS", "40"))
weight_decay, grad_clip, log_interval = 0.1, 1.0, 1

dist.init_process_group("gloo")
torch.manual_seed(1337 + dist.get_rank())
data = tokens()


def get_batch():
    ix = torch.randint(
        len(data) - block_size, (batch_size // gradient_accumulation_steps // dist.get_world_size(),)
    )
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


model = GPT()
optimizer = model.configure_optimizers(weight_decay, learning_rate)
model = DDP(model)

iter_num = 0
while True:
    # determine and set the learning rate for this iteration
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    # forward backward update, with gradient accumulation to simulate larger batch size
    for micro_step in range(gradient_accumulation_steps):
        model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        X, Y = get_batch()
        logits, loss = model(X, Y)
        loss = loss / gradient_accumulation_steps
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if iter_num % log_interval == 0 and dist.get_rank() == 0:
        print(f"iter {iter_num}: loss {loss.item() * gradient_accumulation_steps:.4f}", flush=True)
    iter_num += 1
    if iter_num >= max_iters:
        break

dist.destroy_process_group()
