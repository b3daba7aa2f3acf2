"""Process groups of a loop of its own on an accelerator: refusals, and their end with those of their plan."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

from elasticd import State
from elasticd.runtime import accelerator as accelerators
from elasticd.runtime.accelerator import CPU
from elasticd.runtime.comm.groups import Cancelled, PlanGroups
from elasticd.runtime.comm.nccl import WATCHDOG, NcclLibrary, NotUsable
from elasticd.runtime.comm.torch_store import TorchStore
from elasticd.runtime.live import device_groups, refusals
from elasticd.runtime.live.device_groups import VARIABLE, DeviceGroups, chosen
from elasticd.runtime.live.live_state import LiveRefusal
from elasticd.runtime.live.refusals import refuse_state
from tests.runtime.test_nccl import Recorded

ON = {VARIABLE: "1", **dict.fromkeys(WATCHDOG, "0")}


class Device:
    """An accelerator that is not there."""

    immediate, device = False, torch.device("cuda", 0)

    def use(self) -> None:
        self.used = True


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(device_groups, "placed", lambda asked, environ: device)
    return device


def test_a_loop_trains_on_the_cpu_unless_the_variable_is_1(device: Device) -> None:
    assert chosen({**ON, VARIABLE: ""}) is CPU
    assert chosen(dict.fromkeys(WATCHDOG, "0")) is CPU
    assert chosen(ON) is device
    assert device.used


def test_an_accelerator_that_is_not_there_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators, "driver_is_there", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    assert chosen({VARIABLE: "1"}) is CPU


@pytest.mark.parametrize("name", WATCHDOG)
@pytest.mark.parametrize("value", ["", "1", "3"])
def test_torchs_watchdog_is_refused_with_what_to_export(device: Device, name: str, value: str) -> None:
    environ = {**ON, name: value}
    if not value:
        del environ[name]
    with pytest.raises(NotUsable) as refused:
        chosen(environ)
    assert f"{name} is {value or 'not set'}" in str(refused.value)
    assert "export TORCH_NCCL_ASYNC_ERROR_HANDLING=0 TORCH_NCCL_ENABLE_MONITORING=0" in str(refused.value)


def test_a_device_without_nccl_is_refused(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "device", torch.device("xpu", 0), raising=False)
    with pytest.raises(ValueError, match="xpu has no NCCL"):
        chosen(ON)


@pytest.mark.parametrize(
    ("place", "trains_on", "says"),
    [
        ("meta", "cpu", "on meta, without values"),
        ("meta", "cuda:0", r"to_empty\(device='cuda:0'\)"),
        ("cpu", "cuda:0", f"the model is on cpu, and {VARIABLE} is 1: let `build` put all of it on cuda:0"),
    ],
)
def test_a_model_on_another_device_is_refused(place: str, trains_on: str, says: str) -> None:
    model = nn.Linear(2, 2, device=place)
    state = State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(LiveRefusal, match=says):
        refuse_state(state, torch.device(trains_on))


@pytest.mark.parametrize(
    ("trains_on", "says"), [("cpu", "trains on CPUs over gloo"), ("cuda:0", "all of it on cuda:0")]
)
def test_a_model_on_a_device_that_this_worker_does_not_train_on_is_refused(trains_on: str, says: str) -> None:
    there: Any = SimpleNamespace(device=torch.device("cuda", 1))
    model: Any = SimpleNamespace(parameters=lambda: [there], buffers=list)
    with pytest.raises(LiveRefusal, match=f"the model is on cuda:1.*{says}"):
        refusals._refuse_other_devices(model, torch.device(trains_on))


class Library(NcclLibrary):
    """Whose process groups are recorded, and whose aborts are."""

    def __init__(self) -> None:
        super().__init__(torch.device("cuda", 0), Recorded)
        self.aborted: list[Any] = []

    def abort(self, communicators: Any) -> None:
        self.aborted.append(list(communicators))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    monkeypatch.setitem(device_groups.LIBRARIES, "cuda", lambda accelerator: library)
    return library


def made(name: str) -> tuple[PlanGroups, DeviceGroups]:
    groups = PlanGroups(name, "a/0", "127.0.0.1", TorchStore(dist.HashStore()))  # type: ignore[attr-defined]
    device: Any = Device()
    return groups, DeviceGroups(groups, device)


def test_all_of_a_plan_are_aborted_in_one_call_when_its_groups_are_shut(library: Library) -> None:
    groups, on_device = made("shut")
    assert on_device.rest(0.0), "there is nothing that could write to the device"
    two = [on_device.process_group(("a/0", "b/0"), "default"), on_device.process_group(("a/0",), "1")]
    assert [group.options.group_name for group in two] == ["user a/0 b/0", "user a/0"]
    assert not on_device.rest(0.0)
    groups.shut()
    assert on_device.rest(10.0)
    assert [[each._group for each in listed] for listed in library.aborted] == [two]
    with pytest.raises(Cancelled):
        on_device.process_group(("a/0",), "2")
    groups.park().join(10.0)
    assert len(library.aborted) == 1
    assert not on_device._all, "its modules alone hold a group that has ended"


def test_a_group_that_is_made_while_its_plan_ends_is_aborted(library: Library, monkeypatch: Any) -> None:
    groups, on_device = made("late")
    begun, go_on = threading.Event(), threading.Event()
    of_library = library.process_group

    def slow(*given: Any) -> Any:
        begun.set()
        assert go_on.wait(10.0)
        return of_library(*given)

    monkeypatch.setattr(library, "process_group", slow)
    raised: list[BaseException] = []

    def make() -> None:
        try:
            on_device.process_group(("a/0",), "default")
        except Cancelled as error:
            raised.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    assert begun.wait(10.0)
    on_device.taken()
    go_on.set()
    thread.join(10.0)
    assert raised
    assert len(library.aborted) == 1
    groups.park().join(10.0)
