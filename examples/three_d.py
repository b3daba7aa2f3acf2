"""3D parallelism as PyTorch's tutorials have it: eight encoder layers, tensor-parallel words, a device mesh.

    elasticd run --job 3d --nnodes 2 --devices 4 examples/three_d.py
    python examples/three_d.py --mesh 8 8      # only prints the layout of a mesh of 8 x 8 devices

The model is that of "Training Transformer models using DDP and Pipeline Parallelism": torch's own
nn.TransformerEncoderLayer, with sizes for a laptop. The tutorial's are --width 4096 --hidden 4096.

    in torch                                                     here
    Pipe(nn.Sequential(*layers), chunks=8)                       Model(blocks=layers), micro_batch=
    DistributedDataParallel(model)                               global_batch=
    parallelize_module(model, mesh["tp"], plan)                  Model(tp_plan=plan)
    ZeroRedundancyOptimizer, FSDP's SHARD_GRAD_OP                ParallelismOptions(zero=1), (zero=2)
    init_device_mesh("cuda", (8, 8), mesh_dim_names=...)         the planner's plan; or --mesh 8 8 --nodes ...
"""

from __future__ import annotations

import argparse
import math
import os

import torch
from elasticd_planner.spec.batch import Sampler
from elasticd_planner.spec.plan import Plan
from elasticd_planner.spec.plan_summary import describe
from torch import Tensor, nn
from train_gpt2 import StandardLibrary, loss

import elasticd
from elasticd import Sharded
from elasticd.annotations import Annotation, plan_of
from elasticd.runtime.data.collate import pad

#: As in parallelize_module, names of modules in a layer. The one dropout between them is on cut activations.
TP_PLAN = {
    "self_attn": "colwise",  # in_proj_weight: q, k and v of some heads
    "self_attn.out_proj": "rowwise",
    "linear1": "colwise",
    "dropout": Sharded(dim=2),
    "linear2": "rowwise",
    "head": "colwise_gather_output",
}


class Embed(nn.Module):
    """Tokens and sines of their positions."""

    def __init__(self, vocabulary: int, width: int, dropout: float) -> None:
        super().__init__()
        self.tokens, self.dropout, self.width = nn.Embedding(vocabulary, width), nn.Dropout(dropout), width

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.tokens(batch["inputs"]) * math.sqrt(self.width)
        place = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)[:, None]
        rate = torch.arange(0, self.width, 2, device=x.device, dtype=x.dtype) * (-math.log(1e4) / self.width)
        angles = place * rate.exp()
        return self.dropout(x + torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1))


class Layer(nn.TransformerEncoderLayer):
    """torch's layer, causal. Its attention's own dropout draws numbers that no layout repeats: it has none."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__(width, heads, hidden, dropout, batch_first=True)
        self.self_attn.dropout = 0.0

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        future = torch.full((x.shape[1], x.shape[1]), -math.inf, device=x.device, dtype=x.dtype).triu(1)
        return super().forward(x, src_mask=future, is_causal=True)


class Transformer(nn.Module):
    def __init__(self, options: argparse.Namespace, vocabulary: int = 256) -> None:
        super().__init__()
        self.embed = Embed(vocabulary, options.width, options.dropout)
        sizes = options.width, options.heads, options.hidden, options.dropout
        self.blocks = nn.ModuleList(Layer(*sizes) for _ in range(options.layers))
        self.head = nn.Linear(options.width, vocabulary)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model(options: argparse.Namespace) -> elasticd.Model:
    torch.manual_seed(0)  # every rank makes the same model
    whole = Transformer(options)
    return elasticd.Model(
        name="transformer", embed=whole.embed, blocks=whole.blocks, head=whole.head, tp_plan=TP_PLAN
    )


def mesh(made: elasticd.Model, options: argparse.Namespace) -> Plan:
    """The plan that init_device_mesh("cuda", (dp, tp)) or (pp, dp, tp) stands for. Ranks count as torch's do,
    the last dimension first, and node after node."""
    pp, dp, tp = (1, *options.mesh) if len(options.mesh) == 2 else options.mesh
    ranks, per_node = torch.arange(pp * dp * tp).reshape(pp, dp, tp).tolist(), options.per_node
    nodes = options.nodes or [f"n{node}" for node in range(-(-pp * dp * tp // per_node))]
    named = [
        [tuple(f"{nodes[rank // per_node]}/{rank % per_node}" for rank in group) for group in stage]
        for stage in ranks
    ]
    per = math.ceil(made.layers / pp)
    stage_of = {f"blocks.{i}.*": i // per for i in range(made.layers)} | {"embed.*": 0, "head.*": pp - 1}
    annotations = {
        pattern: Annotation(groups=named[at], states=[{"tp": tp}] * dp) for pattern, at in stage_of.items()
    }
    micro_batches = options.global_batch // options.micro_batch
    given = [micro_batches // dp + (pipeline < micro_batches % dp) for pipeline in range(dp)]
    return plan_of(made, annotations, given, micro_batch=options.micro_batch)


def optimizer(named: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.5)  # type: ignore[arg-type]


def train(options: argparse.Namespace) -> None:
    made = model(options)
    job = elasticd.Job(
        model=made,
        loss=loss,
        optimizer=optimizer,
        dataset=StandardLibrary(options.tokens),
        global_batch=options.global_batch,
        micro_batch=options.micro_batch,
        seed=0,
        clip=0.5,
        parallelism=elasticd.ParallelismOptions(
            zero=options.zero,
            plan=mesh(made, options) if options.mesh else None,  # None: the planner makes one
            keep_plan=bool(options.mesh),
        ),
    )
    for step in job.steps(options.steps):
        if job.rank == 0:
            print(f"step {step.index}: loss {step.loss:.4f}", flush=True)


def train_plainly(options: argparse.Namespace) -> None:
    """One process of plain torch with the same batches, to compare with."""
    torch.manual_seed(0)
    whole, data = Transformer(options), StandardLibrary(options.tokens)
    update = optimizer(whole.parameters())
    sampler = Sampler(size=len(data), global_batch=options.global_batch, seed=0)
    for index in range(options.steps):
        batch = pad([data[i] for i in sampler.samples(index)])
        total, count = loss(whole(batch), batch)
        update.zero_grad()
        (total / count).backward()
        nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        update.step()
        print(f"step {index}: loss {float(total.detach()) / count:.4f}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=64, help="embedding (the tutorial's: 4096)")
    parser.add_argument("--hidden", type=int, default=64, help="feed-forward (the tutorial's: 4096)")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--tokens", type=int, default=35)
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--zero", type=int, choices=[0, 1, 2], default=1)
    parser.add_argument("--plain", action="store_true", help="one process, plain torch, the same batches")
    parser.add_argument(
        "--mesh",
        type=int,
        nargs="+",
        metavar="SIZE",
        help="dp tp, or pp dp tp: the layout, which the job keeps; without torchrun it is printed",
    )
    parser.add_argument("--nodes", nargs="+", default=[], help="of the mesh, as `elasticd status` calls them")
    parser.add_argument("--per-node", type=int, default=8, help="devices of a node of the mesh")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if options.mesh and "TORCHELASTIC_RUN_ID" not in os.environ:
        plan = mesh(model(options), options)
        print(describe(plan, {}))
        for name, place in plan.places.items():
            print(f"{name}: dp {place.pipeline}, pp {place.stage}, tp {place.position}")
    elif options.plain:
        train_plainly(options)
    else:
        train(options)


if __name__ == "__main__":
    main()
