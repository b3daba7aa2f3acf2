"""The health of the state of an engine: which condition follows which."""

from __future__ import annotations

import pytest

from elasticd.runtime.engine.state_health import CONSUMED, STALE, TRANSITIONS, WHOLE, Condition, StateHealth


def test_an_update_tears_the_state_until_it_ends() -> None:
    health = StateHealth()
    for stale in (False, True):
        health.begin_update()
        assert health.torn
        assert not health.usable
        health.receive_parameters()  # of the update before: this one goes on
        assert health.torn
        health.end_update(stale=stale)
        assert (health.usable, health.stale) == (True, stale)
    health.receive_parameters()
    assert health.condition is WHOLE


@pytest.mark.parametrize("before", [WHOLE, STALE])
def test_a_move_in_place_consumes_the_state_and_gives_it_back_as_it_was(before: Condition) -> None:
    health = StateHealth()
    if before is STALE:
        health.send_parameters()
    health.consume()
    assert (health.condition, health.usable) == (CONSUMED, False)
    health.give_back()
    assert health.condition is before


def test_a_lost_device_has_no_state_whatever_it_had() -> None:
    for prepare in (lambda _: None, StateHealth.send_parameters, StateHealth.consume, StateHealth.begin_update):
        health = StateHealth()
        prepare(health)
        health.lose()
        assert health.torn


def test_every_condition_can_be_left() -> None:
    assert TRANSITIONS.keys() == {*Condition}
    assert all(following and condition not in following for condition, following in TRANSITIONS.items())
