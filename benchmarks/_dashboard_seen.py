"""How soon a browser shows that a device is slow: a real job on emulated devices, a real dashboard, a Chromium.

From the time of the leader's event `slow` until the page's cell has another colour, by the clock of one
machine. The device is slowed, and recovers, a few times; median, with half the distance of the quartiles as
noise.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from _results import Row, row

from elasticd.chaos.client import Chaos
from elasticd.client import ApiClient

FACTOR, DEVICE = 6.0, "alpha/1"
#: Seconds for detection on a busy machine.
PATIENCE = 120.0
#: In the page: unix seconds at which the device's cell is no longer (or again) one of normal speed.
SEEN = """
(slow) => new Promise((found) => {
  const look = () => {
    const cell = document.querySelector('[data-device="DEVICE"]');
    if (cell && cell.classList.contains("s0") !== slow) return found(Date.now() / 1e3);
    requestAnimationFrame(look);
  };
  look();
})
"""


def rows(rounds: int = 5) -> list[Row]:
    """The figure."""
    delays = _delays(rounds)
    middle = statistics.median(delays)
    low, _, high = statistics.quantiles(delays, n=4)
    return [
        row(
            "a slow device is shown in the browser, after the event",
            round(middle, 3),
            "s",
            kind="emulated",
            goal="<= 1",
            met=middle <= 1.0,
            noise=round((high - low) / 2 / middle, 3),
        )
    ]


def _delays(rounds: int) -> list[float]:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from playwright.sync_api import sync_playwright

    from tests import forkserver
    from tests.dashboard.browser.conftest import chromium
    from tests.dashboard.browser.pages import Person
    from tests.dashboard.browser.stage import OPERATOR, Stage

    program = chromium()
    if program is None:
        raise SystemExit("there is no Chromium on PATH: apt-get install chromium")
    found = []
    try:
        with (
            tempfile.TemporaryDirectory(prefix="elasticd-bench-") as folder,
            sync_playwright() as playwright,
            Stage(Path(folder)) as stage,
        ):
            stage.start_job()
            browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
            person = Person(browser, stage.url)
            person.sign_in(OPERATOR)
            for _ in range(rounds):
                newest = stage.asked(_newest)
                stage.chaos(lambda chaos: chaos.slow(DEVICE, FACTOR))
                seen = float(person.page.evaluate(SEEN.replace("DEVICE", DEVICE), True))
                found.append(seen - stage.asked(lambda api, after=newest: _told(api, after)))
                stage.chaos(_recover)
                person.page.evaluate(SEEN.replace("DEVICE", DEVICE), False)
            browser.close()
    finally:
        forkserver.end_all()
    return found


def _recover(chaos: Chaos) -> None:
    chaos.recover(DEVICE)


def _newest(api: ApiClient) -> int:
    return max(event.id for event in api.events())


def _told(api: ApiClient, after: int) -> float:
    """When the leader told that the device is slow."""
    ends = time.monotonic() + PATIENCE
    while time.monotonic() < ends:
        for event in api.events(after):
            if event.kind == "slow" and event.data.get("device") == DEVICE:
                return event.time
        time.sleep(0.05)
    raise SystemExit(f"{DEVICE} was not found slow within {PATIENCE:g} s")


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(rows()).decode() + "\n")
