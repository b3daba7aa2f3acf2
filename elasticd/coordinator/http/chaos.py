"""Chaos at the coordinator: which harm is allowed and possible, and how a cut comes to its end.

A cut agent hears no leader, so it cannot be told that it is healed: while it is cut, it keeps a connection of
its own for that alone, which ends with the cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal

import msgspec
from elasticd_planner.spec.cluster import node_of
from elasticd_planner.value import Value
from msgspec import Meta
from starlette.websockets import WebSocket, WebSocketDisconnect

from elasticd.config.security import Role
from elasticd.coordinator.auth import ANYBODY, Caller
from elasticd.coordinator.commands import Commands
from elasticd.coordinator.connections import REACH_SECONDS
from elasticd.coordinator.http.middleware import CALLER
from elasticd.coordinator.http.routing import post
from elasticd.coordinator.leader import Leader
from elasticd.machines.job.state.events import Harmed
from elasticd.system.network_addresses import is_loopback
from elasticd.wire.api_types import ApiError, Harming
from elasticd.wire.coordinator import Harm, is_first

#: What is done to a device; the rest is done to a node.
TO_DEVICES = ("slow", "recover", "kill", "freeze", "thaw")
TO_NODES = ("cut", "heal")
#: What an agent that does not hear of it is told once it is back.
TOLD_AGAIN = ("slow", "recover")


class ChaosRequest(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A device's name for what is done to devices, else a node's. factor: of slow, at least 1. seconds: how
    long a cut lasts, 0 until it is healed. other: a second node; cut and heal are about the data network
    between the two then, and one_way cuts what `node` sends alone."""

    # Documented as a choice, and refused with words of ours, by `order`.
    action: Annotated[str, Meta(extra_json_schema={"enum": [*TO_DEVICES, *TO_NODES]})]
    device: str = ""
    node: str = ""
    factor: Annotated[float, Meta(extra_json_schema={"minimum": 1})] = 1.0
    seconds: Annotated[float, Meta(extra_json_schema={"minimum": 0})] = 0.0
    other: str = ""
    one_way: bool = False


class ChaosCuts:
    """The nodes that are cut now, by the connections that they keep meanwhile, and those that are to be."""

    def __init__(self) -> None:
        self._healed: dict[str, asyncio.Event] = {}
        self._ordered: dict[str, asyncio.Event] = {}  # each set once the cut has begun

    def __contains__(self, node: str) -> bool:
        return node in self._healed

    def expect(self, node: str) -> None:
        """The node was ordered to be cut: its agent may connect, once."""
        self._ordered.setdefault(node, asyncio.Event())

    async def began(self, node: str) -> bool:
        """Returns whether the cut of a node, which was ordered, begins within `REACH_SECONDS`."""
        if node not in self._ordered:
            return True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ordered[node].wait(), REACH_SECONDS)
            return True
        return False

    def refusal(self, node: str, caller: Caller) -> str:
        """Why this caller's connection is none that a cut node keeps, or nothing."""
        if caller.role is Role.AGENT and caller.name not in ("", node):
            return f"this token or certificate is for node {caller.name!r}, not for {node!r}"
        return "" if node in self._ordered else f"this leader did not cut node {node!r} off"

    def heal(self, node: str) -> None:
        """Ends the cut of a node, which must be cut now."""
        self._healed[node].set()

    async def stay(self, node: str, socket: WebSocket) -> None:
        """Until the node is healed, or is gone."""
        self._ordered.pop(node).set()
        healed = self._healed[node] = asyncio.Event()
        await socket.accept()
        waits = {asyncio.create_task(healed.wait()), asyncio.create_task(_until_gone(socket))}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if self._healed.get(node) is healed:
                del self._healed[node]
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
            with contextlib.suppress(RuntimeError, WebSocketDisconnect):  # closed by the other side already
                await socket.close()


async def _until_gone(socket: WebSocket) -> None:
    while (await socket.receive())["type"] != "websocket.disconnect":
        pass


_EXAMPLE = ChaosRequest(action="slow", device="alpha/1", factor=3.0)


class ChaosRoutes:
    """The routes of chaos, and the cuts that this server holds. `commands` gives those to the newest leader."""

    def __init__(self, commands: Callable[[], Commands]) -> None:
        self._commands = commands
        self._cuts = ChaosCuts()

    @post("/v1/chaos", refuses=(404, 409, 503), example=_EXAMPLE)
    async def chaos(self, body: ChaosRequest, caller: Caller | None) -> Harming:
        """Harms the cluster on purpose, where the configuration allows it. Answers once the agents have heard
        of it."""
        commands = self._commands()
        where = f"{body.device or body.node}{f' and {body.other}' if body.other else ''}"
        data = {"device": body.device} if body.device else {"node": body.node}
        what = f"asked chaos to {body.action} {where}"
        by = (caller or ANYBODY).words
        audit = partial(commands.audit, by, what, action=f"chaos {body.action}", **data)
        nodes = await commands.decide(lambda: order(commands, self._cuts, body), audit)
        unheard = tuple([node for node in nodes if not await self._acknowledged(commands.leader, node, body)])
        if unheard and body.action not in TOLD_AGAIN:
            raise ApiError(
                "unavailable",
                f"the agent of node {' and of '.join(unheard)} did not confirm the order to {body.action}, and "
                "may have heard it or not: look at the status, then ask again",
            )
        return Harming(**msgspec.structs.asdict(body), pending=unheard)

    async def _acknowledged(self, leader: Leader, node: str, body: ChaosRequest) -> bool:
        """Returns whether the agent of a node has heard of an order. One that is cut off says so by another
        connection."""
        if await leader.connections.reached(node):
            return True
        return body.action == "cut" and not body.other and await self._cuts.began(node)

    async def stay_cut(self, socket: WebSocket) -> None:
        """The connection that a cut agent keeps. Closed at once, which ends the cut, where there is no cut."""
        node = str(socket.path_params["node"])
        caller: Caller = socket.scope.get(CALLER) or ANYBODY
        if not self._commands().leader.chaos or self._cuts.refusal(node, caller):
            self._commands().leader.metrics.refused("impostor")
            await socket.close(1008)
            return
        await self._cuts.stay(node, socket)


def _no_worker(leader: Leader, device: str, action: str) -> str:
    """Why there is nothing that an agent can do this to."""
    if job := leader.restarting.holding(device, leader.now()):
        return (
            f"job {job} runs on {device} in restart mode without elasticd.watch(): its agent "
            f"does not know the worker's process. To {action} it, use its process id"
        )
    return f"device {device} has no worker to {action}"


def order(commands: Commands, cuts: ChaosCuts, body: ChaosRequest) -> tuple[str, ...]:
    """Carries a request out. Returns the nodes whose agents are to hear of it. Raises `ApiError` with what
    would be right."""
    commands.allow_chaos()
    if body.action in TOLD_AGAIN:
        commands.pace(body.device, body.factor if body.action == "slow" else 1.0)
        return (node_of(body.device),)
    if body.action in TO_DEVICES:
        commands.know_device(body.device)
        there = body.action == "thaw" or commands.has_worker(body.device)  # one that was frozen may be gone
        if not there:
            raise ApiError("conflict", _no_worker(commands.leader, body.device, body.action))
        return _harm(commands, node_of(body.device), Harm(how=body.action, device=body.device))  # type: ignore[arg-type]
    if body.action in TO_NODES and body.other:
        return _data(commands, body)
    if body.action == "cut":
        _check_seconds(body)
        if body.node in cuts:
            raise ApiError("conflict", f"node {body.node} is cut already: heal it first")
        ordered = _harm(commands, body.node, Harm(how="cut", seconds=body.seconds))
        cuts.expect(body.node)
        return ordered
    if body.action == "heal":
        if body.node not in cuts:
            raise ApiError(
                "conflict", f"node {body.node!r} is not cut by this leader, so there is nothing to heal"
            )
        cuts.heal(body.node)
        return ()  # the end of the connection that it keeps tells it
    known = (*TO_DEVICES, *TO_NODES)
    raise ApiError("invalid", f"action {body.action!r} must be one of {', '.join(known)}")


def _check_seconds(body: ChaosRequest) -> None:
    if not 0 <= body.seconds < math.inf:
        raise ApiError(
            "invalid", f"seconds {body.seconds} must be how long the cut lasts, 0 until it is healed"
        )


def _data(commands: Commands, body: ChaosRequest) -> tuple[str, ...]:
    """The data network between two nodes."""
    _check_seconds(body)
    addresses = {}
    for name in (body.node, body.other):
        known = commands.connected(name, f"nobody is there to {body.action} it")
        if is_first(known.release):
            raise ApiError(
                "conflict", f"the agent of node {name} (elasticd {known.release}) cannot cut the data network"
            )
        addresses[name] = known.record.address
    if len({*addresses.values()}) < 2 or any(is_loopback(address) for address in addresses.values()):
        raise ApiError(
            "conflict",
            f"nodes {body.node!r} and {body.other!r} have the data addresses {', '.join(addresses.values())}: "
            "only the network between two machines can be cut",
        )
    how: Literal["cut-data", "heal-data"] = "cut-data" if body.action == "cut" else "heal-data"
    ways = [(body.node, body.other), (body.other, body.node)]
    ways = ways[:1] if body.one_way and body.action == "cut" else ways
    for node, other in ways:
        commands.leader.apply(
            Harmed(node=node, harm=Harm(how=how, peer=addresses[other], seconds=body.seconds))
        )
    return tuple(node for node, _ in ways)


def _harm(commands: Commands, node: str, harm: Harm) -> tuple[str, ...]:
    commands.connected(node, f"nobody is there to {harm.how} it")
    commands.leader.apply(Harmed(node=node, harm=harm))
    return (node,)
