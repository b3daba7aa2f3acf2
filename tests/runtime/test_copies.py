"""The copies that a rank holds, told by one thread while another drops them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from elasticd.runtime.engine.state_health import StateHealth
from elasticd.runtime.switch.copies import Copies
from elasticd.wire.worker import Copy


def test_what_is_held_is_told_also_while_copies_go() -> None:
    """As if the main thread dropped them just when the control thread reads of the first."""
    gone: list[int] = []
    copies = Copies(lambda number, engine: gone.append(number))

    class Read(StateHealth):
        @property
        def stale(self) -> bool:
            copies.drop()
            return False

    read: Any = SimpleNamespace(health=Read())
    for number in (1, 2, 3):
        copies.keep(number, read, 5)
    assert copies.report(4, None, 5).copies == tuple(Copy(number=number, step=5) for number in (1, 2, 3))
    assert gone == [1, 2, 3]


def test_a_state_in_the_midst_of_an_update_is_no_copy() -> None:
    """The user's optimizer raised in an update that a recovery asked for: some parameters have it, some not."""
    copies = Copies(lambda number, engine: None)
    health = StateHealth()
    health.begin_update()
    torn: Any = SimpleNamespace(health=health, reduced=None, last=None, plan=SimpleNamespace(number=2))
    copies.keep(1, torn, 5)
    assert copies.report(4, torn, 5).copies == ()
