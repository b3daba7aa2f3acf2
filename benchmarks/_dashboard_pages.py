"""The dashboard's pages at 8,000 devices, in a real Chromium: first draw, update, heap after minutes of news.

The dashboard is the real one (server, board, streams, pages); what a leader would tell it comes from here, at
the rate of a leader: of 1,000 nodes of 8 devices, 80 devices change each second.

*First draw*: from the arrival of the snapshot in the page until a screen of it is painted; the other rows of
the map follow piece by piece. *Update*: from the arrival of 80 changed devices until script, style and layout
for them are done; painting comes after it. Both are medians, with half the distance of the quartiles as noise.
*Processor*: what the browser's process of the page used, for the load and for a second of news, painting
included; it may be measured on a busy machine, the others may not. *Heap*: of JavaScript, after a collection.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from _results import Row, row
from elasticd_planner.detection.settings import DetectSettings

from elasticd.config.tree import Config, with_overrides
from elasticd.dashboard.daemon import Dashboard
from elasticd.dashboard.history import opened
from elasticd.dashboard.subscription import Told
from elasticd.wire import live_types as live
from elasticd.wire.api_types import DeviceStatus, LeaderStatus, NodeStatus

NODES, DEVICES, CHANGES, SLOW = 1000, 8, 80, 160
#: In the page, before its own scripts: when the snapshot and changes arrive, when cells are painted, and how
#: long the work is that follows from a change.
WATCH = """
window.seen = {hello: 0, painted: 0, complete: 0, updates: []};
const Stream = window.EventSource;
window.EventSource = class extends Stream {
  addEventListener(name, take, ...more) {
    super.addEventListener(name, (event) => {
      const from = performance.now();
      if (name === "hello") window.seen.hello ||= from;
      take(event);
      if (name === "devices") {
        // Elements draw themselves in microtasks, of several turns; then style and layout are asked for.
        const turn = (left) => left ? queueMicrotask(() => turn(left - 1)) : done();
        const done = () => {
          document.body.offsetHeight;
          window.seen.updates.push(performance.now() - from);
        };
        turn(64);
      }
    }, ...more);
  }
};
const after = (name) =>
  requestAnimationFrame(() => setTimeout(() => { window.seen[name] = performance.now(); }));
const wait = () => {
  const count = document.querySelectorAll(".heat svg[data-band]").length;
  if (count && !window.seen.begun) { window.seen.begun = true; after("painted"); }
  if (count < COUNT) return requestAnimationFrame(wait);
  after("complete");
};
requestAnimationFrame(wait);
"""


def rows(minutes: float, draws: int) -> list[Row]:
    """The figures; `minutes` of news before the heap is measured, and the page is drawn so often."""
    with tempfile.TemporaryDirectory(prefix="elasticd-bench-") as folder:
        return asyncio.run(_measured(Path(folder), minutes, draws))


async def _measured(folder: Path, minutes: float, draws: int) -> list[Row]:
    config = with_overrides(
        Config(), {"dashboard.port": 0, "dashboard.history": str(folder / "history.db"), "coordinator.port": 0}
    )
    kept = opened(folder / "history.db")
    kept.put_meta("asks", b"0")  # the coordinator asks for no tokens
    kept.close()
    dashboard = Dashboard(config, "http://127.0.0.1:9")
    await dashboard.start()
    await asyncio.to_thread(dashboard.subscription.stop)  # what it would hear comes from here
    dashboard.subscription.keep = lambda key, value: None  # type: ignore[method-assign]
    fleet = _Fleet(dashboard)
    fleet.all()
    telling = asyncio.create_task(fleet.tell())
    command = [sys.executable, __file__, dashboard.url, str(minutes), str(draws)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    said, _ = await process.communicate()
    telling.cancel()
    await dashboard.stop()
    if process.returncode:
        raise SystemExit(f"the browser ended with {process.returncode}")
    found = msgspec.json.decode(said)
    return [
        _row("8,000 devices: first draw", found["draws"], "ms", 500),
        row(
            "8,000 devices: until all of them are drawn, piece by piece",
            round(statistics.median(found["complete"])),
            "ms",
        ),
        _row("8,000 devices: an update of 80", found["updates"], "ms", 16),
        row("8,000 devices: processor of the page until it is drawn", round(found["load"] * 1e3), "ms"),
        row("8,000 devices: processor of the page, a second of news", round(found["second"] * 1e3, 1), "ms"),
        row(
            f"8,000 devices: heap after {minutes:g} minutes of news",
            found["heap"] / 2**20,
            "MiB",
            goal="<= 150" if minutes >= 10 else None,
            met=found["heap"] <= 150 << 20 if minutes >= 10 else None,
        ),
    ]


def _row(name: str, values: Sequence[float], unit: str, most: float) -> Row:
    middle = statistics.median(values)
    low, _, high = statistics.quantiles(values, n=4)
    noise = (high - low) / 2 / middle
    return row(name, round(middle, 2), unit, goal=f"<= {most:g}", met=middle <= most, noise=round(noise, 3))


class _Fleet:
    """1,000 nodes of 8 devices, as their leader tells of them."""

    def __init__(self, dashboard: Dashboard) -> None:
        self._hear = dashboard.board.hear
        self._draw = random.Random(7)
        self._count = 0

    def _tell(self, news: live.AnyNews) -> None:
        self._count += 1
        self._hear(Told(at=time.time(), news=msgspec.structs.replace(news, id=f"1:{self._count}")))

    def all(self) -> None:
        """What a leader says first."""
        leader = LeaderStatus(name="c1", url="http://127.0.0.1:9", epoch=1)
        self._tell(
            live.LiveHello(
                id="",
                cluster="large",
                leader=leader,
                release="0",
                at=time.time(),
                chaos=False,
                newest_event=0,
                detect=DetectSettings(),
            )
        )
        for node in range(NODES):
            name = f"node-{node:04d}"
            devices = tuple(
                DeviceStatus(name=f"{name}/{at}", memory=80 << 30, rate=1.0, pace=1.0) for at in range(DEVICES)
            )
            status = NodeStatus(node=name, connected=True, address="10.0.0.1", emulated=False, devices=devices)
            self._tell(live.put("", "node", name, status))
        self._tell(live.Whole(id=""))

    async def tell(self) -> None:
        """80 devices a second change: 40 become slow, and the 40 that were slow for longest become normal."""
        slow: deque[str] = deque()
        while True:
            await asyncio.sleep(1.0)
            changed = CHANGES // 2
            fresh = [
                f"node-{self._draw.randrange(NODES):04d}/{self._draw.randrange(DEVICES)}"
                for _ in range(changed)
            ]
            normal = [slow.popleft() for _ in range(max(0, len(slow) + changed - SLOW))]
            slow.extend(fresh)
            rates = {**dict.fromkeys(normal, 1.0), **{name: self._draw.choice((1.3, 3.0)) for name in fresh}}
            self._tell(live.append("", "slowdowns", "", live.Slowdowns(rates=rates, slowness={})))
            self._tell(live.LeaderPulse(id="", at=time.time(), store_away=False, paused=False))


# -- the browser, a process of its own -----------------------------------------------------------------------


def _look(url: str, minutes: float, count: int) -> dict[str, Any]:
    from playwright.sync_api import sync_playwright

    from tests.dashboard.browser.conftest import chromium

    program = chromium()
    if program is None:
        raise SystemExit("there is no Chromium on PATH: apt-get install chromium")
    options = ["--no-sandbox", "--enable-precise-memory-info", "--js-flags=--expose-gc"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=options)
        context = browser.new_context(viewport={"width": 1600, "height": 1000})
        context.add_init_script(WATCH.replace("COUNT", str(NODES)))
        draws, complete = list[float](), list[float]()
        for _ in range(count):
            page = context.new_page()
            page.goto(url)
            page.locator(".heat svg[data-band]").nth(NODES - 1).wait_for(state="attached", timeout=120_000)
            page.wait_for_timeout(2000)
            seen = page.evaluate("window.seen")
            draws.append(seen["painted"] - seen["hello"])
            complete.append(seen["complete"] - seen["hello"])
            page.close()
        page = context.new_page()
        system = browser.new_browser_cdp_session()

        def spent() -> float:
            told = system.send("SystemInfo.getProcessInfo")["processInfo"]
            return sum(float(each["cpuTime"]) for each in told if each["type"] == "renderer")

        before = spent()
        page.goto(url)
        page.locator(".heat svg[data-band]").nth(NODES - 1).wait_for(state="attached", timeout=120_000)
        page.wait_for_timeout(1000)
        load, first = spent() - before, page.evaluate("window.seen.updates.length")
        page.wait_for_timeout(max(30_000, 60_000 * minutes))
        news = page.evaluate("window.seen.updates.length") - first
        second = (spent() - before - load) / max(1, news)
        updates = page.evaluate("window.seen.updates")
        page.evaluate("window.gc()")
        heap = page.evaluate("performance.memory.usedJSHeapSize")
        browser.close()
    return {
        "draws": draws,
        "complete": complete,
        "updates": updates[2:],
        "heap": heap,
        "load": load,
        "second": second,
    }


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.stdout.buffer.write(msgspec.json.encode(_look(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))))
