"""`elasticd.live` in one process: the loop, the state as boxes, torch's worlds, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from elasticd_planner.layout.mesh_layouts import MeshLayouts
from elasticd_planner.spec.mesh import AllowedMesh, MeshModel, MeshPlan, MeshTensor, Placement
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from elasticd import State, live
from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.torch_store import TorchStore
from elasticd.runtime.exits import JobStopped
from elasticd.runtime.live import world
from elasticd.runtime.live.live_loop import LiveLoop
from elasticd.runtime.live.live_state import LiveTensors, _parts
from elasticd.runtime.live.world import World, register
from tests.integration.train_live import BATCH, CLIP, MESHES, SEED, Text, build_of, loss_of, reference, whole

STEPS = 4


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    if (left := world.current()) is not None:
        left.end()


def loop(build: Any, **changes: Any) -> LiveLoop:
    options = {"batch": BATCH, "steps": STEPS, "meshes": ("dp",), "data": Text(), "seed": SEED}
    return live(build, **{**options, **changes})


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "hsdp", "tp"])
def test_one_process_without_an_agent_trains_as_plain_torch(kind: str) -> None:
    running = loop(build_of(kind), meshes=MESHES[kind])
    losses = {}
    for step in running:
        with step:
            state = step.state
            step.loss = loss = loss_of(state.model, step.data)
            (loss * step.scale).backward()
            if kind != "tp":
                nn.utils.clip_grad_norm_(state.model.parameters(), CLIP)
            state.optimizer.step()
            state.scheduler.step()
            state.optimizer.zero_grad()
        losses[step.index] = step.total
    expected, weights, _ = reference(STEPS, kind)
    assert losses == pytest.approx(expected, abs=1e-13)
    for name, parameter in LiveTensors(running.state, running.plan.names).trained.items():
        torch.testing.assert_close(whole(parameter), weights[name], atol=1e-11, rtol=0)


def test_samples_without_a_dataset_count_on_and_a_skipped_update_is_voted_at_the_end_of_the_body() -> None:
    seen = []
    for step in loop(build_of("ddp"), data=None, steps=3):
        with step:
            seen += step.indices
        assert (step.made, step.total) == (True, pytest.approx(float("nan"), nan_ok=True))
    assert seen == list(range(3 * BATCH))


def test_an_exception_of_the_body_comes_out_as_itself() -> None:
    def train() -> None:
        for step in loop(build_of("ddp")):
            with step:
                _ = 1 / 0

    with pytest.raises(ZeroDivisionError) as raised:
        train()
    assert raised.traceback[-1].name == "train"


def test_the_update_is_made_after_the_vote_and_several_optimizers_have_one_vote() -> None:
    def build(mesh: Any) -> State:
        model = nn.Linear(4, 4)
        one = torch.optim.SGD([model.weight], lr=0.1)
        return State(model=model, optimizer=[one, torch.optim.AdamW([model.bias], lr=0.1)])

    for step in loop(build, data=None, steps=2):
        with step:
            one, other = step.state.optimizers
            before = step.state.model.weight.detach().clone()
            step.loss = loss = step.state.model(torch.ones(1, 4)).square().mean()
            loss.backward()
            assert not step.decided
            one.step()
            assert step.decided
            assert not step.updated
            assert step.total == pytest.approx(float(loss.detach()))
            assert not torch.equal(before, step.state.model.weight)
            other.step()
            assert step.updated


def test_a_step_that_is_not_entered_is_refused() -> None:
    with pytest.raises(RuntimeError, match="into `with step:`"):
        for _ in loop(build_of("ddp")):
            pass


# -- state as boxes --------------------------------------------------------------------------------------------


def test_a_local_tensor_of_several_runs_is_cut_into_its_boxes() -> None:
    placements = (Placement(dim=0, strided=True), Placement(dim=0))
    tensor = MeshTensor(name="w", shape=(13, 3), dtype="float32", placements=(placements,))
    model = MeshModel(meshes=(AllowedMesh(names=("dp", "tp")),), tensors=(tensor,))
    members = tuple(f"a/{i}" for i in range(6))
    plan = MeshPlan(number=1, names=("dp", "tp"), shape=(3, 2), members=members, samples=(1, 1, 1))
    layouts, whole_tensor = MeshLayouts(model, plan), torch.arange(39.0).view(13, 3)
    several = 0
    for member in members:
        boxes = layouts.boxes(layouts.items[0], member)
        if not boxes:
            continue
        several += len(boxes) > 1
        local = torch.cat([whole_tensor[box.slices(box.whole((13, 3)))] for box in boxes])
        for box, part in zip(boxes, _parts(local, boxes), strict=True):
            assert torch.equal(part, whole_tensor[box.slices(box.whole((13, 3)))])
            assert part.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
    assert several


def in_world(work: Callable[[World], None]) -> None:
    register()
    store = TorchStore(dist.HashStore())  # type: ignore[attr-defined]
    groups = PlanGroups("one", "a/0", "127.0.0.1", store)
    made = World(groups, ("a/0",))
    made.enter()
    try:
        work(made)
    finally:
        made.end()
        groups.park().join()


def rich(mesh: Any) -> State:
    """Two groups, a frozen part, tied weights, a scalar, a buffer, an average, a scaler, two schedulers."""
    model = nn.Module()
    model.embed, model.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    model.head.weight = model.embed.weight
    model.scale, model.frozen = nn.Parameter(torch.ones(())), nn.Linear(4, 4).requires_grad_(False)
    model.register_buffer("table", torch.arange(3.0))
    average = torch.optim.swa_utils.AveragedModel(model)
    decayed = {"params": [model.embed.weight], "weight_decay": 0.1}
    adam = torch.optim.AdamW([decayed, {"params": [model.scale], "weight_decay": 0.0}], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(adam, 2)
    return State(
        model=model, optimizer=adam, scheduler=[schedule], ema=average, scaler=torch.amp.GradScaler("cpu")
    )


def rich_sharded(mesh: Any) -> State:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    fully_shard(model, mesh=mesh)
    adam = torch.optim.AdamW(model.parameters(), lr=0.1)
    return State(model=model, optimizer=adam)


@pytest.mark.parametrize("build", [rich, rich_sharded])
def test_all_of_a_state_comes_back_bit_for_bit_into_what_another_build_made(build: Any) -> None:
    def work(made: World) -> None:
        mesh = made.mesh(("dp",), (1,))
        torch.manual_seed(0)
        one = LiveTensors(build(mesh), ("dp",))
        model = MeshModel(meshes=(AllowedMesh(names=("dp",)),), tensors=one.described())
        plan = MeshPlan(number=1, names=("dp",), shape=(1,), members=("a/0",), samples=(1,))
        layouts = MeshLayouts(model, plan)
        adam = one.state.optimizers[0]
        for _ in range(3):
            for parameter in one.trained.values():
                parameter.grad = torch.ones_like(parameter)
            adam.step()
            for scheduler in one.state.schedulers:
                scheduler.step()
            if one.state.ema is not None:
                one.state.ema.update_parameters(one.state.model)
        held = one.collected(layouts, "a/0")
        torch.manual_seed(1)
        other = LiveTensors(build(mesh), ("dp",))
        assert {id(p) for p in other.trained.values()} == {
            id(p) for p in other.state.model.parameters() if p.requires_grad
        }
        other.install(held, layouts, "a/0")
        again = other.collected(layouts, "a/0")
        assert again.schema() == held.schema()
        for item, tensor in held.tensors.items():
            for shard, copied in zip(tensor.shards, again.tensors[item].shards, strict=True):
                for name, plane in shard.planes.items():
                    assert torch.equal(plane, copied.planes[name]), (item, name)
                    same = (
                        plane.untyped_storage().data_ptr() == copied.planes[name].untyped_storage().data_ptr()
                    )
                    assert not same or item.role == "state", "values are copied, never adopted"
        for parameter, fresh in zip(one.trained.values(), other.trained.values(), strict=True):
            kept = other.state.optimizers[0].state[fresh]
            assert isinstance(kept["exp_avg"], DTensor) == isinstance(parameter, DTensor)
            assert kept["step"] == 3

    in_world(work)


def test_a_world_that_was_left_comes_back_with_its_groups() -> None:
    def work(first: World) -> None:
        mesh = first.mesh(("a", "b"), (1, 1))
        group = dist.new_group([0])
        count = len(dist.distributed_c10d._world.pg_map)
        first.leave()
        assert not dist.is_initialized()
        store = TorchStore(dist.HashStore())  # type: ignore[attr-defined]
        second = World(PlanGroups("two", "a/0", "127.0.0.1", store), ("a/0",))
        world.enter(second)
        second.mesh(("a",), (1,))
        world.enter(first)
        assert not second.entered
        assert len(dist.distributed_c10d._world.pg_map) == count
        tensor = torch.ones(2)
        dist.all_reduce(tensor, group=group)
        dist.all_reduce(tensor, group=mesh["b"].get_group())
        assert dist.get_rank(group) == 0
        second.end()
        second.groups.park().join()

    in_world(work)


# -- refusals ------------------------------------------------------------------------------------------------


def linear(mesh: Any, **changes: Any) -> State:
    model = nn.Linear(2, 2)
    return State(**{"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), **changes})


class Half(torch.optim.SGD):
    """Steps on a whole parameter at once."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.sub_(parameter.grad / parameter.grad.norm())


def batch_norm(mesh: Any) -> State:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    return State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def by_mesh(mesh: Any) -> State:
    model = nn.Linear(2, 2 + len(mesh.mesh_dim_names))
    return State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def half(mesh: Any) -> State:
    model = nn.Linear(2, 2)
    return State(model=model, optimizer=Half(model.parameters(), lr=0.1))


def stranger(mesh: Any) -> State:
    return linear(mesh, optimizer=torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))


REFUSED = {
    "no state": (lambda mesh: nn.Linear(2, 2), {}, "let it return elasticd.State"),
    "batch norm": (batch_norm, {}, "use LayerNorm or GroupNorm"),
    "another model": (
        by_mesh,
        {"meshes": ("dp", "replicate, shard")},
        "weight is trained float32 .*on every mesh",
    ),
    "no part": (half, {}, "Half"),
    "a stranger's": (stranger, {}, r"make it of model.parameters\(\)"),
    "no mesh": (linear, {"meshes": ()}, "name the dimensions of a mesh"),
    "a mesh": (linear, {"meshes": ("dp=x",)}, "give a number of devices"),
    "a loader": (linear, {"data": torch.utils.data.DataLoader(Text())}, "data=loader.dataset"),
    "a stream": (linear, {"data": iter([])}, "give a map-style dataset"),
    "no steps": (linear, {"steps": -1}, "whole number from 0 on"),
    "extra": (lambda mesh: linear(mesh, extra={"sampler": 3}), {}, "without state_dict"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_alive_is_refused_by_name(name: str) -> None:
    build, changes, message = REFUSED[name]
    with pytest.raises((JobStopped, ValueError), match=message):
        loop(build, **changes)


def test_a_world_of_the_scripts_own_is_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        with pytest.raises((JobStopped, ValueError), match="leave it out"):
            loop(linear)
    finally:
        dist.destroy_process_group()
