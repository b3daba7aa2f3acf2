"""Signals to devices: one that reaches no process is no fault."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from elasticd.chaos.faults import Fault
from elasticd.wire.api_types import JobStatus
from tests.soak.chaos_cluster import ChaosCluster
from tests.soak.fault_player import FaultPlayer, LedgerSteps


class Alone:
    """A cluster whose job has no worker, as a new leader sees it that has met none yet."""

    sent: list[str]
    spaces = None

    def __init__(self) -> None:
        self.sent = []

    def job(self) -> JobStatus:
        return JobStatus(
            job="j",
            phase="running",
            reason="",
            plan=None,
            proposal=None,
            step=3,
            loss=None,
            tokens_per_second=None,
            members=(),
        )

    def chaos(self) -> Any:
        return SimpleNamespace(kill=self.sent.append, freeze=self.sent.append)


@pytest.mark.parametrize("kind", ["kill", "freeze"])
def test_a_device_whose_process_died_between_two_looks_gets_no_signal(kind: str) -> None:
    cluster = Alone()
    player = FaultPlayer(cast(ChaosCluster, cluster), cast(LedgerSteps, None))
    assert not player._signal(Fault(kind=kind, device="n0/0", lasts=1.0, step=3))
    assert not cluster.sent
