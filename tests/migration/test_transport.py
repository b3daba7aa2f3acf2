"""One contract for every transport: in memory between threads, and over gloo between processes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from elasticd_migration.transport import MemoryTransport

from tests import forkserver
from tests.migration.contract import CHECKS, Check
from tests.migration.ranks import together

SIZE = 4
SCRIPT = Path(__file__).with_name("gang.py")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_memory_keeps_the_contract(check: Check) -> None:
    ends = MemoryTransport.connect([f"n0/{i}" for i in range(SIZE)], timeout=20)
    assert together(ends, check) == [None] * SIZE


@pytest.fixture(scope="module")
def gang(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four gloo processes found."""
    folder = tmp_path_factory.mktemp("gang")
    ranks = [(str(rank), str(SIZE), str(folder / "store")) for rank in range(SIZE)]
    return [json.loads(text) for text in forkserver.outputs(SCRIPT, ranks, folder)]


@pytest.mark.slow
@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_gloo_keeps_the_contract(check: str, gang: list[dict[str, Any]]) -> None:
    assert [found[check] for found in gang] == ["kept"] * SIZE


@pytest.mark.slow
def test_gloo_processes_move_adamw_state_as_the_reference_does(gang: list[dict[str, Any]]) -> None:
    moves = [found["move"] for found in gang]
    assert [move["received"] for move in moves] == [move["lacking"] for move in moves]
    assert sum(move["sent"] for move in moves) == sum(move["lacking"] for move in moves) > 50_000


@pytest.mark.slow
def test_gloo_tells_a_waiting_rank_of_a_death(gang: list[dict[str, Any]]) -> None:
    assert all(found["bereaved"] for found in gang[:-1])


def test_a_wait_in_memory_ends_at_its_deadline_or_with_the_wire() -> None:
    first, second = MemoryTransport.connect(["n0/0", "n0/1"], timeout=0.05)
    with pytest.raises(RuntimeError, match=r"nothing for 0\.05 s"):
        first.receive(1, torch.empty(1)).wait()
    second.close("n0/1 died")
    with pytest.raises(RuntimeError, match="n0/1 died"):
        first.receive(1, torch.empty(1)).wait()


def test_ends_that_expect_different_sizes_are_told() -> None:
    first, second = MemoryTransport.connect(["n0/0", "n0/1"])
    first.send(1, torch.zeros(3))
    with pytest.raises(RuntimeError, match="sent 12 bytes, not 4"):
        second.receive(0, torch.empty(1)).wait()


def test_members_must_be_distinct_and_contain_me() -> None:
    with pytest.raises(ValueError, match="must be distinct"):
        MemoryTransport.connect(["n0/0", "n0/0"])
