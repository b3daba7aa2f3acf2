"""`LiveCopy`: the training state of one mesh plan on one rank, with its world, its modules and its vote."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from elasticd_migration.local_state import LocalState
from elasticd_planner.layout.layouts import Item
from elasticd_planner.layout.mesh_layouts import MeshLayouts
from elasticd_planner.spec.box import Box
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from elasticd.records import Vote
from elasticd.runtime.accelerator import CPU, Accelerator, DeviceLost
from elasticd.runtime.comm.groups import Cancelled, Group, PlanGroups
from elasticd.runtime.engine.device_rest import come_to_rest
from elasticd.runtime.engine.set_aside import NoHostMemory
from elasticd.runtime.engine.state_health import StateHealth
from elasticd.runtime.engine.vote import StepVote
from elasticd.runtime.live.live_state import LiveRefusal, LiveTensors, State, difference, on_mesh
from elasticd.runtime.live.world import World

#: The remedy where a model is a pipeline.
PIPELINES = (
    "elasticd.live takes data, sharded and tensor parallelism; elasticd.Job has pipelines, unequal ones too"
)

#: Makes what a script trains on a mesh.
Build = Callable[[DeviceMesh], State]


class LiveCopy:
    """The training state under one mesh plan on one rank: a `PlanCopy` that the user's own loop trains.

    Args:
        layouts: of the plan.
        groups: of the plan; a copy that is given `before` has those of that one.
        before: the copy of a plan that differs in the samples of lanes alone: its world, tensors and groups are
            taken over.
        accelerator: that tensors lie on.
    """

    lent = None

    def __init__(
        self,
        layouts: MeshLayouts,
        groups: PlanGroups,
        before: LiveCopy | None = None,
        accelerator: Accelerator = CPU,
    ) -> None:
        self.accelerator = accelerator
        self.layouts, self.plan, self.plan_groups = layouts, layouts.plan, groups
        self.before = before
        self.health = StateHealth()  # consumed: the copy that took this one's tensors over has trained them on
        self.device = groups.me
        self.built_for: int = layouts.plan.number if before is None else before.built_for  # plan of its `build`
        self.rank = layouts.plan.rank(groups.me)
        self.everyone: Group = groups.group(layouts.plan.members, "vote")
        self.vote = StepVote(self.everyone)
        self.world: World = World(groups, layouts.plan.members, accelerator) if before is None else before.world
        if before is None:
            self.world.connect()
        self.tensors: LiveTensors | None = None if before is None else before.tensors
        self.reduced: int | None = None
        self.last: Vote | None = None

    @property
    def user(self) -> State:
        """The state that the script's `build` returned."""
        assert self.tensors is not None
        return self.tensors.state

    @property
    def interrupted(self) -> bool:
        """True where the plan's groups are shut."""
        return self.plan_groups.dead

    def build(self, build: Build, seed: int) -> None:
        """Calls the script's `build` in this plan's world, which all members enter together.

        Raises:
            LiveRefusal: it made other tensors than it did before the first step.
        """
        self.world.enter()
        mesh = self.world.mesh(self.plan.names, self.plan.shape)
        self.tensors = built(build, mesh, seed, self.accelerator)
        model = self.layouts.specs
        index = model.mesh(self.plan.names)
        expected = on_mesh(model, index)
        described = self.tensors.described()
        why = difference(expected, described)
        if not why:
            placed = {tensor.name: tensor.placements for tensor in described}
            moved = next((t.name for t in expected if placed[t.name] != t.placements), None)
            why = f"{moved} is placed otherwise" if moved is not None else ""
        if why:
            raise LiveRefusal(
                f"build makes another model on the mesh {self.plan.mesh_text} than on one device: {why}. Let "
                "it be a function of its mesh alone"
            )
        self.tensors.refuse_other_boxes(self.layouts, self.device)

    def trains_on(self) -> None:
        """An update comes next: the tensors are those of no plan before this one any more."""
        if self.before is not None:
            self.before.health.consume()
            self.before = None

    def state(self) -> LocalState:
        """The state of this device, by reference. Raises NotElementWise."""
        assert self.tensors is not None
        return self.tensors.collected(self.layouts, self.device)

    def adopt(self, state: LocalState) -> None:
        """Copies a state into what `build` made."""
        assert self.tensors is not None
        self.tensors.install(state, self.layouts, self.device)

    def reduced_here(self) -> None:
        """Returns when the device has come to the end of what the body asked of it, as the sums of gradients.

        Raises:
            Cancelled: the plan's groups are shut, and sums may be garbage.
        """

        def check() -> None:
            if self.interrupted:
                raise Cancelled("the plan's groups are shut")

        if not self.accelerator.immediate:
            self.accelerator.passed(check)

    def rest(self) -> None:
        """Returns when the device has come to rest, after another member was lost. Raises DeviceLost."""
        if self.world.on_device is None:
            return
        try:
            come_to_rest(self.device, self.plan_groups, self.world.on_device.rest, self.accelerator)
        except DeviceLost:
            self.health.lose()
            raise

    def back(self) -> None:
        """Nothing was set aside."""

    def set_aside(self, kept: Mapping[Item, Sequence[Box]]) -> object:
        """Raises NoHostMemory: the script's own tensors stay where they are."""
        raise NoHostMemory("the tensors of a script's own loop stay where they are")

    def delivered(self) -> None:
        """Nothing is under way after a step."""

    def apply(self, vote: Vote) -> None:
        """Raises RuntimeError: the script makes its updates itself, before a move begins."""
        raise RuntimeError(f"the update of step {vote.step} is the script's own")

    def end(self) -> None:
        """Takes its world out of torch's tables, where the move to it failed. Raises DeviceLost."""
        self.world.end()
        self.rest()


def built(build: Build, mesh: DeviceMesh, seed: int, accelerator: Accelerator = CPU) -> LiveTensors:
    """Calls a script's `build`, with torch's generators seeded alike on all ranks, and restored afterwards.

    Raises:
        LiveRefusal: it returned something that cannot be kept alive.
    """
    devices = [] if accelerator.immediate else [accelerator.device.index]
    of_type = {} if accelerator.immediate else {"device_type": accelerator.device.type}
    with torch.random.fork_rng(devices=devices, **of_type):
        torch.manual_seed(seed)
        state = build(mesh)
    if not isinstance(state, State):
        raise LiveRefusal(
            f"build returned a {type(state).__name__}: let it return elasticd.State(model=..., optimizer=...)"
        )
    if not isinstance(state.model, nn.Module):
        kind = type(state.model)
        pipeline = kind.__module__.startswith("torch.distributed.pipelining")
        remedy = PIPELINES if pipeline else "give one torch.nn.Module; several go into a torch.nn.ModuleDict"
        raise LiveRefusal(f"State(model=...) is a {kind.__name__}: {remedy}")
    for each in state.optimizers:
        if not isinstance(each, torch.optim.Optimizer):
            raise LiveRefusal(
                f"State(optimizer=...) has a {type(each).__name__}: give torch.optim optimizers, and other "
                "objects with state as extra="
            )
    tensors = LiveTensors(state, mesh.mesh_dim_names or ())
    tensors.refuse_other_groups(mesh)
    return tensors
