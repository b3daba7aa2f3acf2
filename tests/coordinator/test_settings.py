"""What the configuration says of devices and links is what the leading machine plans with."""

from __future__ import annotations

import asyncio

import msgspec
from elasticd_planner.spec.cluster import Link

from elasticd.config import tree
from elasticd.coordinator.daemon import Coordinator
from elasticd.machines.job.state.job_state import JobSettings
from elasticd.store.memory import MemoryServer, MemoryStore
from tests.coordinator import agents

TEXT = """
[planner]
flops = 1.5e14
memory_bandwidth = 2e12
inside = { bandwidth = "200 GB/s", latency = 1e-5 }
between = { bandwidth = "25 GB/s" }
[detect]
window = 7
[policy]
horizon_steps = 50
"""


def test_the_leading_machine_has_the_configured_devices_and_links() -> None:
    given = tree.parse(TEXT, "cluster.toml")
    base = agents.config()
    whole = msgspec.structs.replace(given, cluster=base.cluster, coordinator=base.coordinator)

    async def led() -> JobSettings:
        store = MemoryStore(MemoryServer())
        coordinator = Coordinator(whole, store, planner=agents.PLANNER)
        await agents.lead(coordinator)
        try:
            return coordinator.leading.state.settings
        finally:
            await coordinator.stop()
            store.close()

    settings = asyncio.run(led())
    assert (settings.flops, settings.memory_bandwidth) == (1.5e14, 2e12)
    assert settings.inside == Link(bandwidth=2e11, latency=1e-5)
    assert settings.between == Link(bandwidth=2.5e10)
    assert (settings.detect.window, settings.policy.horizon_steps) == (7, 50)
