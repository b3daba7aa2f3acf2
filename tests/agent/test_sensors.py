"""What an agent reads of its machine and of NVIDIA's devices: what is offered, and nothing that is not."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from ctypes import c_void_p
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest
from elasticd_agent.hardware import devices, nvml
from elasticd_agent.hardware.nvml import REASONS, NvidiaReader, Nvml, opened
from elasticd_agent.hardware.processes import WorkerProcesses
from elasticd_agent.hardware.sensors import Sensors, _allowed

from elasticd.config.tree import AgentSection, EmulateSection
from elasticd.testing.waiting import until
from elasticd.wire.node_health import DeviceHealth, Health, causes


class Driver:
    """Two devices as NVML would show them; `lacks` are the functions that this driver does not support. What it
    answers is set by each test; constants and errors are pynvml's own."""

    NVMLError = pynvml.NVMLError

    def __init__(self, *, lacks: tuple[str, ...] = (), **answers: Any) -> None:
        self.lacks, self.answers = lacks, answers
        self.reports: list[tuple[int, int]] = []
        self.open = 0

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml") or name.startswith(("nvmlEventType", "nvmlClocks")):
            return getattr(pynvml, name)
        assert hasattr(pynvml, name), f"pynvml has no {name}"
        if name in self.lacks or name not in self.answers:
            return self._refuse
        answer = self.answers[name]
        return answer if callable(answer) else lambda *arguments: answer

    def _refuse(self, *arguments: Any) -> Any:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> c_void_p:
        return c_void_p(1000 + index)

    def nvmlEventSetWait_v2(self, events: Any, milliseconds: int) -> Any:
        assert milliseconds == 0, "reading does not wait"
        if not self.reports:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        index, xid = self.reports.pop(0)
        return SimpleNamespace(device=c_void_p(1000 + index), eventData=xid)


def field(value: int) -> Any:
    return SimpleNamespace(nvmlReturn=pynvml.NVML_SUCCESS, value=SimpleNamespace(ullVal=value))


def whole() -> Driver:
    reasons = pynvml.nvmlClocksThrottleReasonHwThermalSlowdown | pynvml.nvmlClocksThrottleReasonSwPowerCap
    return Driver(
        nvmlDeviceGetUtilizationRates=SimpleNamespace(gpu=75),
        nvmlDeviceGetMemoryInfo=SimpleNamespace(used=5 << 30),
        nvmlDeviceGetClockInfo=1200,
        nvmlDeviceGetMaxClockInfo=1980,
        nvmlDeviceGetCurrentClocksEventReasons=reasons | pynvml.nvmlClocksThrottleReasonGpuIdle,
        nvmlDeviceGetTemperature=88,
        nvmlDeviceGetPowerUsage=650_000,
        nvmlDeviceGetEnforcedPowerLimit=700_000,
        nvmlDeviceGetTotalEccErrors=lambda handle, kind, counter: 7 if kind == 0 else 2,
        nvmlDeviceGetRemappedRows=(1, 2, 1, 0),
        nvmlDeviceGetPcieThroughput=lambda handle, counter: 3 + counter,
        nvmlDeviceGetPcieReplayCounter=4,
        nvmlDeviceGetFieldValues=lambda handle, ids: [field(5) for _ in ids],
        nvmlEventSetCreate=object(),
        nvmlDeviceRegisterEvents=None,
    )


def test_all_that_a_device_offers_is_read_in_plain_units() -> None:
    driver = whole()
    nvml = Nvml(driver, ("n0/0", "n0/1", "n0/2"))
    driver.reports = [(1, 79), (1, 48)]
    first, second = nvml.read()
    assert first == DeviceHealth(
        name="n0/0",
        utilisation=0.75,
        memory_used=5 << 30,
        clock=1.2e9,
        most_clock=1.98e9,
        throttled=("power limit", "heat (hardware)"),
        temperature=88.0,
        power=650.0,
        power_limit=700.0,
        corrected=7,
        uncorrected=2,
        remapped=(1, 2),
        remapping="one is to be remapped, reset the device",
        pcie=(3 << 10, 4 << 10),
        pcie_replays=4,
        nvlink=(5 << 10, 5 << 10),
        nvlink_errors=15,
    )
    assert second.xids == (79, 48)
    assert nvml.read()[1].xids == (79, 48), "remembered"
    nvml.close()
    assert driver.open == 0


@pytest.mark.parametrize("lacking", ["ClocksEventReasons", "EccErrors", "FieldValues", "RemappedRows", "Pcie"])
def test_what_a_device_does_not_support_is_left_out_alone(lacking: str) -> None:
    driver = whole()
    driver.lacks = tuple(name for name in driver.answers if lacking in name)
    assert driver.lacks
    lacks, full = Nvml(driver, ("n0/0",)).read()[0], Nvml(whole(), ("n0/0",)).read()[0]
    changed = {name for name in full.__struct_fields__ if getattr(lacks, name) != getattr(full, name)}
    assert changed
    assert all(not getattr(lacks, name) for name in changed)
    assert {"utilisation", "temperature", "power"}.isdisjoint(changed)


def test_a_driver_that_offers_nothing_gives_names_alone() -> None:
    assert Nvml(Driver(), ("a/0",)).read() == (DeviceHealth(name="a/0"),)


def test_every_reason_is_one_of_nvml() -> None:
    for name in REASONS:
        assert getattr(pynvml, f"nvmlClocksThrottleReason{name}")


def test_a_driver_that_hangs_holds_nobody_up_and_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither as it is opened nor as a device is read, and it is read again once it answers."""
    answers = threading.Event()

    def slow(*arguments: Any) -> int:
        assert answers.wait(60)
        return 0

    driver = Driver(nvmlDeviceGetPowerUsage=slow)
    monkeypatch.setattr(nvml, "opened", lambda names: Nvml(driver, names))
    monkeypatch.setattr(nvml, "PATIENCE_SECONDS", 0.01)
    reader = NvidiaReader(("a/0",), tuple)
    assert [reader.read() for _ in range(3)] == [()] * 3
    reader.close()
    assert driver.open == 1, "it is not asked while it hangs"
    answers.set()
    monkeypatch.setattr(nvml, "PATIENCE_SECONDS", 60.0)
    until(lambda: reader.read() == (DeviceHealth(name="a/0", power=0.0),))
    reader.close()
    assert driver.open == 0
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "NVIDIA's driver does not answer",
        "NVIDIA's driver answers again",
    ]


def test_an_agent_whose_driver_hangs_as_it_starts_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(devices, "nvidia_memory", lambda: [answers.wait(60)])
    monkeypatch.setattr(devices, "DRIVER_SECONDS", 0.01)
    section = AgentSection(node="a")
    with pytest.raises(
        devices.ProbeError, match=r"driver has not said in 0.01 s what devices .* reset the devices"
    ):
        devices.devices(section, EmulateSection())
    answers.set()


def test_without_a_driver_there_is_nothing() -> None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        assert opened(("a/0",)) is None
    else:
        pynvml.nvmlShutdown()
        pytest.skip("this machine has a driver")


def test_a_device_without_sensors_is_read_by_its_workers_process() -> None:
    started = [
        subprocess.Popen([sys.executable, "-uc", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for code in ("print()\nwhile True: pass", "print()\ninput()")
    ]
    for process in started:  # its interpreter has the memory that it will have
        assert process.stdout is not None
        process.stdout.readline()
    pids = {"a/0": started[0].pid, "a/1": started[1].pid, "a/2": 2**22 + 1}  # the last is no process
    processes = WorkerProcesses(lambda: pids)
    try:
        first, second = processes.read()
        assert [(first.name, first.pid), (second.name, second.pid)] == [*pids.items()][:2]
        assert first.utilisation is None, "nothing to compare with"
        assert first.memory_used == pytest.approx(psutil.Process(first.pid).memory_info().rss, rel=0.5)
        until(lambda: sum(psutil.Process(first.pid).cpu_times()[:2]) > 0.2)
        (busy, _) = processes.read()
        assert busy.utilisation is not None
        assert 0.0 < busy.utilisation <= 1.5
        started[1].kill()
        started[1].wait()
        pids["a/1"] = os.getpid()  # another worker drives it now
        (_, other) = processes.read()
        assert (other.pid, other.utilisation) == (os.getpid(), None)
    finally:
        for process in started:
            process.kill()
            process.communicate()


def test_the_machine_is_read_and_rates_are_those_since_the_last_reading(tmp_path: Path) -> None:
    (tmp_path / "cpu").write_text("some avg10=25.50 avg60=1.00 avg300=0.50 total=123\nfull avg10=0 total=0\n")
    (tmp_path / "io").write_text("nonsense")
    sensors = Sensors(lambda: (DeviceHealth(name="a/0"),), pressure=tmp_path)
    first, second = sensors.read(), sensors.read()
    assert first.pressure == {"cpu": 0.255}
    assert first.memory_available is not None
    assert first.memory_available > 0
    assert first.network is None, "nothing to compare with"
    assert second.network is not None
    assert min(second.network) >= 0
    assert second.device("a/0") == DeviceHealth(name="a/0")


def test_causes_are_told_in_words_and_none_is_invented() -> None:
    assert causes(None, "a/0") == ()
    assert causes(Health(devices=(DeviceHealth(name="a/0"),)), "a/0") == ()
    hot = DeviceHealth(
        name="a/0", throttled=("heat",), clock=1.2e9, most_clock=1.98e9, temperature=90.0, xids=(79,)
    )
    told = causes(Health(devices=(hot,), stolen=0.2, pressure={"io": 0.5, "cpu": 0.01}), "a/0")
    assert told == (
        "its clocks are held down at 1200 of 1980 MHz: heat",
        "it is at 90 °C",
        "the driver reported XID 79",
        "others on its host take 20% of the processors' time",
        "work on its node waits for disks 50% of the time",
    )
    assert causes(Health(devices=(hot,)), "a/1") == ()


def test_a_containers_limit_counts_for_the_memory_that_is_free(tmp_path: Path) -> None:
    own = tmp_path / "self"
    own.write_text("1:name=systemd:/else\n0::/pod/agent\n")
    groups = tmp_path / "groups"
    for name, most, held in (("pod/agent", "max", 10), ("pod", "1000", 700), ("", "900000", 1000)):
        folder = groups / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{most}\n")
        (folder / "memory.current").write_text(f"{held}\n")
        (folder / "memory.stat").write_text("anon 5\ninactive_file 100\nactive_file 7\n")
    assert list(_allowed(groups, own)) == [400, 899_100]
    assert list(_allowed(groups, tmp_path / "none")) == []
    (groups / "pod" / "memory.stat").unlink()
    assert list(_allowed(groups, own)) == [899_100]
