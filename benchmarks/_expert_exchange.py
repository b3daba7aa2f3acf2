"""One process of four with experts: a layer's rows go to them as ours do, and as transformers' own do."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from elasticd_planner.layout.channels import Channel
from elasticd_planner.spec.plan import HeldExperts, Stage
from torch import Tensor, nn

import elasticd
from elasticd import Experts, UnitsOf
from elasticd.runtime.comm.communicators import GlooCommunicators
from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.running_group import OneDevice
from elasticd.runtime.model.local_model import local_model
from elasticd.runtime.parallel.expert_exchange import ExpertExchange
from tests.models.mixture import StackedExperts
from tests.runtime.test_expert_exchange import CountedMesh

EXPERTS, CHOSEN = 8, 2
DEVICES = ("a/0", "a/1", "b/0", "b/1")
#: As transformers has them: one after the other, equally many on each.
HELD: HeldExperts = ((0, 1), (2, 3), (4, 5), (6, 7))
STAGE = Stage(start=0, stop=1, devices=DEVICES, shares=(1,) * 4, lanes=(1,) * 4, experts=(HELD,))


class Layer(nn.Module):
    """Experts alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.experts = StackedExperts(EXPERTS, width, 4 * width)


def ours(device: str, store: Any, layer: Layer, width: int) -> tuple[Callable[..., Tensor], CountedMesh]:
    """The experts of the device, which compute for all lanes."""
    model = elasticd.Model(
        embed=nn.Embedding(3, width),
        blocks=[copy.deepcopy(layer)],
        head=nn.Linear(width, 3),
        rules={"blocks.*.experts.*": Experts("experts")},
        units={"experts": UnitsOf(attribute="blocks.*.experts.count")},
    )
    place = DEVICES.index(device)
    local = local_model(model, STAGE.by_lane[place], 0, only=("blocks.0",))
    for name, held in local.parameters.items():
        whole = layer.experts.get_parameter(name.rpartition(".")[2])
        held.tensor.data = whole.detach()[list(HELD[place])].clone()
    groups = PlanGroups("exchange", device, "127.0.0.1", store)
    channel, everyone = Channel("experts", DEVICES), groups.group(DEVICES, "vote")
    mesh = CountedMesh(GlooCommunicators(groups, (channel,), everyone).mesh(channel))
    exchange = ExpertExchange(model.spec, STAGE, device, cast(Any, mesh), OneDevice(device))
    exchange.attach(model, "blocks.0", local.modules["blocks.0"])
    owner: Any = local.modules["blocks.0"].experts

    def step(*given: Tensor) -> Tensor:
        exchange.begin_step()
        output: Tensor = owner(*given)
        return output

    return step, mesh


def theirs(place: int, layer: Layer, sent: list[int]) -> Callable[..., Tensor]:
    """The same by transformers' `AllToAllEP`; notes the bytes of rows that go to other devices."""
    from transformers.distributed import expert_parallel

    mesh = dist.device_mesh.init_device_mesh("cpu", (len(DEVICES), 1), mesh_dim_names=("ep", "tp"))
    own: Any = StackedExperts(len(HELD[place]), layer.experts.up.shape[1], layer.experts.up.shape[2])
    own.num_experts = own.count
    for name, parameter in own.named_parameters():
        parameter.data = layer.experts.get_parameter(name).detach()[list(HELD[place])].clone()
    send = expert_parallel.all_to_all_single_autograd

    def counted(rows: Tensor, receives: Sequence[int], sends: Sequence[int], group: Any) -> Tensor:
        away = sum(count for other, count in enumerate(sends) if other != place)
        sent.append(away * rows.shape[1] * rows.element_size())
        came: Tensor = send(rows, receives, sends, group)
        return came

    expert_parallel.all_to_all_single_autograd = counted
    layer_of: Callable[..., Tensor] = expert_parallel.AllToAllEP(own, mesh["ep"], mesh["tp"])
    return layer_of


def worker(device: str, store: Any, file: str, rows: int, width: int, steps: int) -> dict[str, Any]:
    """Passes of a layer by both, in turn. Returns bytes of a forward pass, the least, and seconds of passes."""
    torch.set_num_threads(1)
    place = DEVICES.index(device)
    dist.init_process_group(
        "gloo", store=dist.FileStore(file, len(DEVICES)), rank=place, world_size=len(DEVICES)
    )
    torch.manual_seed(0)
    layer = Layer(width)
    torch.manual_seed(1 + place)
    x, weights = torch.randn(rows, width), torch.rand(rows, CHOSEN)
    index = torch.rand(rows, EXPERTS).topk(CHOSEN).indices
    sent: list[int] = []
    own, mesh = ours(device, store, layer, width)
    ways = {"ours": own, "theirs": theirs(place, layer, sent)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    outputs: dict[str, Tensor] = {}
    for step in range(steps):
        for name in sorted(ways, reverse=bool(step % 2)):
            dist.barrier()
            began = time.perf_counter()
            given = x.clone().requires_grad_(), index, weights.clone().requires_grad_()
            output = ways[name](*given)
            output.sum().backward()
            dist.barrier()
            seconds[name].append(time.perf_counter() - began)
            outputs[name] = output.detach()
    assert torch.allclose(outputs["ours"], outputs["theirs"], atol=1e-4)
    to = [{expert // 2 for expert in chosen} - {place} for chosen in index.tolist()]
    return {
        "ours": sum(mesh.sent[:3]),
        "theirs": sum(sent[:2]),
        "least": 2 * sum(map(len, to)) * width * 4,
        "seconds": seconds,
    }
