"""A worker's answer to a probe: of an idle device alone, at the pace that it is emulated at."""

from __future__ import annotations

import queue
import threading

import pytest

from elasticd.runtime.telemetry import device_probe
from elasticd.runtime.telemetry.device_probe import REPEATS, Prober, product
from elasticd.runtime.telemetry.emulation import PRODUCT_SECONDS, SpeedEmulator
from elasticd.wire.worker import EmulatedSpeed, Probed


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer products are measured where the machine is busy: not here."""
    monkeypatch.setattr(device_probe, "MOST_SECONDS", 120.0)


def joined() -> None:
    """Returns when no probe is under way."""
    for thread in threading.enumerate():
        if thread.name == "elasticd-probe":
            thread.join(180)


def test_products_take_what_the_device_takes() -> None:
    real = product(SpeedEmulator(None).product)
    assert len(real) == REPEATS
    assert all(each > 0 for each in real)
    pacer = SpeedEmulator(EmulatedSpeed(forward=1e-3, backward=1e-3, factor=2.0))
    assert min(product(pacer.product)) >= 2 * PRODUCT_SECONDS
    assert pacer.take() == (0, 0), "a probe is none of the job's paced sections"


def test_an_idle_device_answers_and_one_that_computes_does_not() -> None:
    idle, said = [True], queue.Queue[Probed]()
    prober = Prober(lambda: idle[0], lambda start: None, said.put)
    prober.ask()
    assert len(said.get(timeout=180).seconds) == REPEATS
    joined()
    idle[0] = False
    prober.ask()
    joined()
    assert said.empty()


def test_a_device_that_was_given_work_meanwhile_does_not_answer() -> None:
    idle, said = [True], queue.Queue[Probed]()

    def given_work(start: float) -> None:
        idle[0] = False

    prober = Prober(lambda: idle[0], given_work, said.put)
    prober.ask()
    joined()
    assert said.empty()
    assert not idle[0]
