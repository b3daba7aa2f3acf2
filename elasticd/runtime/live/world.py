"""torch.distributed's world of one plan, and the private torch APIs that a change of worlds takes.

torch has one default process group, and all that DeviceMesh, FSDP and DDP make lies beside it in tables of the
process. A `World` puts the groups of one plan there: `enter` makes or restores them, `leave` takes them out and
keeps them. So a switch that fails goes back to the old world as it was. torch's hook for backends of other
packages, `Backend.register_backend`, has every group of a world made on the gloo device of its plan's
`PlanGroups`, whose sockets are shut at a fault.

The modules of an old plan hold torch's process groups until Python's garbage collector finds those modules, and
the thread that drops the last reference to a group of gloo waits for the operation that it is stuck in. So the
groups of a plan are let go, on a thread of their own, only after that.

Groups of two worlds have equal names, since torch counts them from 0. DTensor's caches take an equal mesh for
the same one, and would give results on the mesh of the other world, whose groups they keep: `clear_caches`.
(`PointwiseSharding` has most of them filled again at no cost.)
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import _register_process_group, _unregister_all_process_groups
from torch.distributed import _functional_collectives
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, _collective_utils, _redistribute
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from elasticd.backoff import jittered
from elasticd.runtime.accelerator import CPU, Accelerator
from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.live.device_groups import DeviceGroups

#: Name of the backend, as torch has it.
BACKEND = "elasticd"
#: The tables of `torch.distributed.distributed_c10d` by process group.
_TABLES = ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_pg_to_tag", "_tags_to_pg")

#: DTensor's collectives, whose `wait_tensor` is replaced while a loop runs; and whether torch traces a graph.
functional_collectives: Any = _functional_collectives

#: Seconds between two looks for what holds process groups, and from the last holder's end to that of a group.
_LOOK_SECONDS = 0.2
#: Seconds for which process groups are waited for: a script may hold what an old `build` made for ever.
_HELD_SECONDS = 600.0

_current: World | None = None
#: Set where the loop is over: nothing is waited for any more.
_over = threading.Event()


class World:
    """The default process group of one plan, and all groups that were made beside it.

    Args:
        groups: of the plan.
        members: devices in rank order.
        accelerator: that groups are for; those of the CPU are over gloo.
    """

    def __init__(self, groups: PlanGroups, members: tuple[str, ...], accelerator: Accelerator = CPU) -> None:
        self.groups, self.members, self._type = groups, members, accelerator.device.type
        self.on_device = None if accelerator.immediate else DeviceGroups(groups, accelerator)
        self._kept: dict[str, dict[Any, Any]] | None = None
        self._default: Any = None
        self._count = 0
        self._process_groups: list[weakref.ref[dist.ProcessGroup]] = []  # torch's groups, as it was left last
        groups.helped_by(self)
        self._connected: Any = None  # the backend of the default group, until torch asks for it

    @property
    def entered(self) -> bool:
        """True while it is torch's world."""
        return _current is self

    def connect(self) -> None:
        """Makes the connections of the default group, from any thread, while another world is torch's. All
        members call it together.

        Raises:
            RuntimeError: a member did not come in time.
            Cancelled: the plan's groups were shut.
        """
        self._connected = self._group(self.members, "default")

    def _group(self, members: tuple[str, ...], name: str) -> Any:
        of_plan = self.groups.torch_backend if self.on_device is None else self.on_device.process_group
        return of_plan(members, name)

    def enter(self) -> None:
        """Makes it torch's world. The first time all members enter it together.

        Raises:
            RuntimeError: another world is there; or a member did not come.
            Cancelled: the plan's groups were shut.
        """
        global _current
        if dist.is_initialized():
            raise RuntimeError("another default process group is there")
        clear_caches()
        _current = self
        if self._kept is not None:
            self._restore()
            return
        hook = sys.excepthook
        try:
            dist.init_process_group(
                f"{self._type}:{BACKEND}",
                store=self.groups.store("world"),
                rank=self.members.index(self.groups.me),
                world_size=len(self.members),
            )
        except BaseException:
            self.leave()
            raise
        finally:
            sys.excepthook = hook  # torch puts one around it at every call

    def leave(self) -> None:
        """Takes it out of torch's tables. Its groups stay, for `enter`, until `end`."""
        global _current
        if _current is not self:
            return
        self._kept = {name: dict(getattr(c10d, name)) for name in _TABLES}
        self._default, self._count = c10d._world.default_pg, c10d._world.group_count
        self._process_groups = [weakref.ref(group) for group in c10d._world.pg_map]
        c10d._update_default_pg(None)
        for name in _TABLES:
            getattr(c10d, name).clear()
        c10d._world.pg_coalesce_state.clear()
        c10d._world.group_count = 0
        _unregister_all_process_groups()
        _current = None
        clear_caches()

    def _restore(self) -> None:
        assert self._kept is not None
        for name, table in self._kept.items():
            getattr(c10d, name).update(table)
        c10d._world.group_count = self._count
        for group, name in self._kept["_pg_names"].items():
            _register_process_group(name, group)
        c10d._update_default_pg(self._default)
        self._kept = self._default = None

    def end(self) -> None:
        """Forgets its groups, which `PlanGroups.park` destroys."""
        self.leave()
        self._kept = self._default = self._connected = None

    def is_alive(self) -> bool:
        """Returns True: its groups are waited for (`join`)."""
        return True

    def join(self) -> None:
        """Returns when nothing holds its process groups any more. The thread that lets its plan's groups go
        calls it, once no plan has this world."""
        while self.entered:  # a rank that was given up stands by with its last world
            if _over.wait(jittered(_LOOK_SECONDS)):
                return
        self._kept = self._default = self._connected = None
        deadline = time.monotonic() + _HELD_SECONDS
        while any(group() is not None for group in self._process_groups) and time.monotonic() < deadline:
            if _over.wait(jittered(_LOOK_SECONDS)):
                return
        _over.wait(jittered(_LOOK_SECONDS))  # references are gone a moment before their object

    def mesh(self, names: tuple[str, ...], shape: tuple[int, ...]) -> DeviceMesh:
        """The mesh of all members, last dimension fastest. All members call it together, in this world."""
        return init_device_mesh(self._type, shape, mesh_dim_names=names)


def current() -> World | None:
    """torch's world now, if it is one of these."""
    return _current


def enter(world: World) -> None:
    """Puts a world in the place of the current one, which is kept."""
    if _current is not world:
        if _current is not None:
            _current.leave()
        world.enter()


def _backend(options: Any, given: object) -> Any:
    """Makes the backend of a group of the current world; torch calls it."""
    world = _current
    if world is None:
        raise RuntimeError(f"the backend {BACKEND!r} is for groups that are made in `build`, or in the loop")
    if world._connected is not None:  # the first group that torch makes is the default one
        backend, world._connected = world._connected, None
        return backend
    ranks = options.global_ranks_in_group or range(len(world.members))
    members = tuple(world.members[rank] for rank in ranks)
    return world._group(members, str(options.group_id))


def over() -> None:
    """The loop is over: groups are let go without a wait for what holds them."""
    _over.set()


def register(accelerator: Accelerator = CPU) -> None:
    """Registers the backend with torch, once for a process; a loop begins."""
    _over.clear()
    if BACKEND not in dist.Backend.backend_list:
        devices = [accelerator.device.type]
        dist.Backend.register_backend(BACKEND, _backend, extended_api=True, devices=devices)


def in_world(group: dist.ProcessGroup) -> bool:
    """Returns True if a process group is one of torch's world now."""
    return group in c10d._world.pg_map


def local_shape_and_offset(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """[elements] of the part of a tensor that lies here, and where it begins in the global one."""
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offset)


def in_backward() -> bool:
    """Returns True if this thread is within a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def is_strided(placement: object) -> bool:
    """Returns True if a placement cuts inside each of the parts that later dimensions of the mesh make."""
    return isinstance(placement, _StridedShard)


def clear_caches() -> None:
    """Clears DTensor's caches, in C++ and in Python: of sharding propagation, and of redistributions. They keep
    meshes, and with them process groups."""
    torch._C._clear_DTensor_sharding_propagator_cache()
    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache.cache_clear()
    propagator._propagate_tensor_meta_cached.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
