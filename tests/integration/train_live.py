"""The worker of the tests of `elasticd.live`: a small transformer in float64, trained by a plain loop."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from elasticd import State, live
from elasticd.runtime.comm.nccl import WATCHDOG
from elasticd.runtime.engine.vote import StepVote
from elasticd.runtime.live.device_groups import VARIABLE
from elasticd.runtime.live.live_copy import LiveCopy
from elasticd.runtime.live.live_state import LiveTensors
from elasticd.runtime.live.moves import LiveMoves
from elasticd.runtime.live.world import World
from elasticd.runtime.snapshot.snapshotter import Snapshotter
from elasticd.runtime.switch import move
from elasticd.runtime.switch.switcher import Switcher
from tests.accelerators import vgpu, wrapper_groups

#: Samples of a step (neither 4 nor 3 ranks have equal shares, and an epoch of 100 ends within a step), their
#: tokens, and the vocabulary.
BATCH, TOKENS, WORDS, SEED = 22, 8, 61, 3
#: The largest norm of a gradient: those of the first steps are longer. torch has none under tensor parallelism.
CLIP = 0.3
#: The learning rate after ten steps.
RATE = 3e-3
MESHES = {"ddp": ("dp",), "fsdp": ("shard",), "hsdp": ("replicate, shard", "shard"), "tp": ("dp, tp=2",)}


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


class Net(nn.Module):
    def __init__(self, width: int = 30, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, width), nn.Linear(width, WORDS)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Text:
    """Samples by their index."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(WORDS, (TOKENS + 1,), generator=torch.Generator().manual_seed(index))


def state_of(model: nn.Module, rate: float = RATE) -> State:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    return State(model=model, optimizer=optimizer, scheduler=schedule)


def build_of(
    kind: str, compiled: str = "", recomputed: bool = False, mixed: bool = False, rate: float = RATE
) -> Any:
    """The script's `build`.

    Args:
        kind: how ranks divide the work, see `MESHES`.
        compiled: the backend that compiles each block; "": none does.
        recomputed: blocks keep no activations for the backward pass.
        mixed: FSDP computes in float32 and reduces in float64, where parameters are.
        rate: the learning rate after ten steps.
    """

    def policy(**outputs: torch.dtype) -> dict[str, Any]:
        made = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64, **outputs)
        return {"mp_policy": made} if mixed else {}

    def build(mesh: Any) -> State:
        model = Net().double().to(mesh.device_type)
        for name, block in [*model.blocks.named_children()]:
            if kind == "tp":  # its names are those of the block itself
                parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            if recomputed:
                block = checkpoint_wrapper(block)
            if compiled:
                block = torch.compile(block, backend=compiled)
            model.blocks.register_module(name, block)
        if kind == "ddp":
            return state_of(nn.parallel.DistributedDataParallel(model), rate)
        over = mesh["dp"] if kind == "tp" else mesh
        for block in model.blocks:
            fully_shard(block, mesh=over, **policy())
        fully_shard(model, mesh=over, **policy(output_dtype=torch.float64))
        return state_of(model, rate)

    return build


def parts_of(state: State, step: int) -> dict[str, Any]:
    """What a checkpoint has."""
    model, optimizer = get_state_dict(state.model, state.optimizer)
    return {"model": model, "optimizer": optimizer, "schedule": state.scheduler.state_dict(), "step": step}


def save(state: State, step: int, folder: Path) -> None:
    """Call it at the begin of a step's body: a try that is lost saves again."""
    checkpoint.save(parts_of(state, step), checkpoint_id=folder / str(step))


def resume_from(folder: Path) -> Callable[[State], int]:
    def resume(state: State) -> int:
        steps = [int(path.parent.name) for path in folder.glob("*/.metadata")]
        if not steps:
            return 0
        parts = parts_of(state, max(steps))
        checkpoint.load(parts, checkpoint_id=folder / str(max(steps)))
        loaded = {"model_state_dict": parts["model"], "optim_state_dict": parts["optimizer"]}
        set_state_dict(state.model, state.optimizer, **loaded)
        state.scheduler.load_state_dict(parts["schedule"])
        return int(parts["step"])

    return resume


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


def reference(
    steps: int, kind: str = "ddp", rate: float = RATE
) -> tuple[dict[int, float], dict[str, Tensor], dict[str, Tensor]]:
    """The losses, weights and second moments of one process of plain torch."""
    from elasticd_planner.spec.batch import Sampler

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        state = state_of(Net().double(), rate)
    sampler, data, losses = Sampler(size=100, global_batch=BATCH, seed=SEED), Text(), {}
    for step in range(steps):
        loss = loss_of(state.model, torch.stack([data[i] for i in sampler.samples(step)]))
        loss.backward()
        if kind != "tp":
            nn.utils.clip_grad_norm_(state.model.parameters(), CLIP)
        state.optimizer.step()
        state.scheduler.step()
        state.optimizer.zero_grad()
        losses[step] = loss.item()
    named = dict(state.model.named_parameters())
    moments = {name: state.optimizer.state[p]["exp_avg_sq"] for name, p in named.items()}
    return losses, {name: p.detach() for name, p in named.items()}, moments


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(moment: str, number: int) -> Callable[[int, nn.Module], None]:
    """Has this process killed at a moment of a step, or of the switch to its plan of that number. Returns what
    the loop calls at the begin of each step."""
    step_now, entered = [-1], [0]

    def before(owner: Any, name: str, when: Callable[[], bool], after: bool = False) -> None:
        method = getattr(owner, name)

        def dies(*given: Any, **options: Any) -> Any:
            if after:
                result = method(*given, **options)
            if when():
                if moment == "unheard":
                    time.sleep(0.3)
                    raise RuntimeError("as if the outcome had not come")
                die()
            return result if after else method(*given, **options)

        setattr(owner, name, dies)

    def in_step() -> bool:
        return step_now[0] == number

    def in_switch() -> bool:
        return entered[0] == number

    def count(self: LiveCopy, *given: Any) -> None:
        entered[0] += 1  # 1: for the first plan
        build(self, *given)

    build = LiveCopy.build
    LiveCopy.build = count  # type: ignore[method-assign]
    match moment:
        case "clipping":
            before(nn.utils, "clip_grad_norm_", in_step)
        case "log" | "objects":
            before(Log, "write", in_step)
        case "vote":
            before(StepVote, "vote", in_step)
        case "after the vote" | "unheard":
            before(StepVote, "vote", in_step, after=True)
        case "update":
            before(torch.optim.AdamW, "_init_group", in_step, after=True)
        case "groups":
            before(LiveMoves, "prepare", lambda: entered[0] == number - 1, after=True)
        case "world":
            before(World, "enter", lambda: entered[0] == number)
        case "build":
            before(World, "mesh", in_switch, after=True)
        case "move":
            before(move, "migrate", in_switch)
        case "moved":
            before(move, "migrate", in_switch, after=True)
        case "adopt":
            before(LiveCopy, "adopt", in_switch)
        case "ok":
            before(Switcher, "_all_gather_ok", in_switch)
        case "swap":
            before(Switcher, "_swap", in_switch)

    handed = list[int]()  # steps of the snapshots that this process's agent has
    if moment == "kept":
        hand_over = Snapshotter._hand_over

        def note(self: Snapshotter, me: Any, step: int, *given: Any) -> None:
            hand_over(self, me, step, *given)
            handed.append(step)

        Snapshotter._hand_over = note  # type: ignore[method-assign]

    def is_kept(step: int) -> bool:
        """The state before this step is in a snapshot."""
        deadline = time.monotonic() + 0.5
        while step not in handed and time.monotonic() < deadline:
            time.sleep(0.001)
        return step in handed

    def begin(step: int, model: nn.Module) -> None:
        step_now[0] = step
        kept = moment == "kept" and step >= number and is_kept(step)
        if kept or (step == number and moment in ("forward", "backward")):
            block = getattr(model, "module", model).blocks[0]
            hook = die if moment == "forward" else lambda m, i, o: o.register_hook(die) and None
            block.register_forward_hook(hook)

    return begin


class Log:
    """What the loop does for its log, after the update."""

    @staticmethod
    def write(loss: Tensor, model: nn.Module, kind: str, objects: bool) -> None:
        if objects:  # of zeros, that stand for a failed gather, none is read: the body ends here
            torch.distributed.all_gather_object([None] * torch.distributed.get_world_size(), {"loss": 1.0})
        logged = loss.detach().clone()
        torch.distributed.all_reduce(logged)
        if kind != "ddp":  # a DTensor's waits are others
            whole(next(iter(model.parameters())).square().sum())


def main() -> None:
    options = json.loads(os.environ.get("OPTIONS", "{}"))
    if "vgpu" in options:
        wrapper_groups.take_place()
        os.environ.update({"ELASTICD_DEVICE": "vgpu", VARIABLE: "1", **dict.fromkeys(WATCHDOG, "0")})
    out, kind = Path(options["out"]), options["kind"]
    torch.set_num_threads(1)
    running = live(
        build_of(kind, **options.get("features", {})),
        batch=options.get("batch", BATCH),
        steps=options["steps"],
        meshes=MESHES[kind],
        data=Text(),
        seed=SEED,
        snapshot_every=options.get("snapshot_every"),
        resume=resume_from(Path(options["checkpoints"])) if "checkpoints" in options else None,
    )
    me = running.device.replace("/", "-")
    ledger = (out / f"ledger-{me}-{os.getpid()}").open("a", buffering=1)
    begin = die_at(*options["dies"][running.device]) if running.device in options.get("dies", {}) else None
    for step in running:
        with step:
            model, optimizer = step.state.model, step.state.optimizer
            with (out / f"tries-{me}").open("a") as tries:  # it may die before it notes a decided step
                tries.write(json.dumps([step.index, running.plan.number, list(step.indices)]) + "\n")
            if begin is not None:
                begin(step.index, model)
            if step.index == options.get("drains", {}).get(running.device):
                os.kill(os.getpid(), signal.SIGTERM)
            if "seconds" in options:
                time.sleep(options["seconds"] * len(step.indices))
            if "checkpoints" in options and step.index and step.index % 4 == 0:
                save(step.state, step.index, Path(options["checkpoints"]))
            step.loss = loss = loss_of(model, step.data.to(next(model.parameters()).device))
            (loss * step.scale).backward()
            if kind != "tp":
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            if options.get("logs"):
                Log.write(loss, model, kind, options["logs"] == "objects")
            step.state.scheduler.step()
            optimizer.zero_grad()
        if step.made:
            entry = [step.index, step.total, list(step.indices), running.plan.number, time.time()]
            ledger.write(json.dumps(entry) + "\n")
    if running.plan is None:
        return
    tensors = LiveTensors(running.state, running.plan.names)
    weights = {name: whole(p) for name, p in tensors.trained.items()}
    state = running.state.optimizer.state
    moments = {name: whole(state[p]["exp_avg_sq"]) for name, p in tensors.trained.items()}
    torch.save((weights, moments), out / f"{me}.new")
    os.replace(out / f"{me}.new", out / f"weights-{me}")
    if "vgpu" in options:
        # FSDP has streams wait where others record them, so that memory is free again while a stream uses it.
        noted = [each for each in vgpu.settled_errors() if "is freed while" not in each]
        assert not noted, noted


if __name__ == "__main__":
    main()
