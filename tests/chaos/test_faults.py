"""Scripts of faults: how they read, what they refuse, and that a seed makes one script."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from elasticd_planner.value import Invalid
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticd.chaos.faults import ENDINGS, REAL, WAYS, Fault
from tests.chaos.test_soak import FIXED
from tests.sizes import examples
from tests.soak.fault_script import Faults
from tests.soak.random_faults import LIVE_WEIGHTS, WEIGHTS, Soaking, draw

DEVICES = ("alpha/0", "alpha/1", "beta/0", "beta/1")


def test_a_script_reads_as_what_happens() -> None:
    script = Faults().slow("alpha/1", 2.5).at_step(40).kill("beta/0").at_step(60)
    assert list(script) == [
        Fault(kind="slow", device="alpha/1", factor=2.5, step=40),
        Fault(kind="kill", device="beta/0", step=60),
    ]


def test_all_that_was_named_since_the_last_time_happens_at_once() -> None:
    script = Faults().kill("alpha/0").cut("beta", 3.0).at_step(7).takeover().at_seconds(9.5)
    assert [(fault.kind, fault.where, fault.when) for fault in script] == [
        ("kill", "alpha/0", "step 7"),
        ("cut", "node beta", "step 7"),
        ("takeover", "", "9.5 s"),
    ]


def test_a_longer_script_leaves_the_shorter_one_as_it_was() -> None:
    short = Faults().freeze("alpha/0", 1.0).at_step(1)
    short.thaw("alpha/0").at_step(2)
    assert len(short) == 1


def test_a_script_that_does_not_say_when_is_refused() -> None:
    with pytest.raises(Invalid, match="when does kill happen"):
        list(Faults().kill("alpha/0"))
    with pytest.raises(Invalid, match="name a fault first"):
        Faults().at_step(3)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: Faults().freeze("alpha", 1.0), "is about a device"),
        (lambda: Faults().cut("alpha/0"), "is about a node"),
        (lambda: Faults().slow("alpha/0", 1.0), "must be above 1"),
        (lambda: Faults().partition("alpha", 0.0), "until the node can be reached"),
        (lambda: Faults().kill("alpha/0", -1.0), "until it is over"),
        (lambda: Faults().shift(0), "how many a sample has"),
        (lambda: Faults().hang("alpha/0", 0.0), "seconds that kind = 'hang' lasts"),
        (lambda: Faults().hang("alpha/0", 1.0, "script"), "which has: sleep, lock"),
        (lambda: Faults().sever("alpha", "alpha", 1.0), "must be the other node"),
        (lambda: Faults().throw("alpha"), "is about a device"),
    ],
)
def test_what_cannot_be_is_refused(wrong: object, said: str) -> None:
    with pytest.raises(Invalid, match=said):
        wrong().at_step(1)  # type: ignore[operator]


def test_what_lasts_ends_by_itself_after_its_seconds() -> None:
    for kind, ending in ENDINGS.items():
        where = {"node": "alpha"} if kind == "cut" else {"device": "alpha/0"}
        after = Fault(kind=kind, lasts=2.0, step=5, **where).ending(100.0)
        assert after == Fault(kind=ending, seconds=102.0, **where)
        assert Fault(kind=kind, step=5, **where).ending(100.0) is None
    assert Fault(kind="takeover", step=5).ending(100.0) is None


@settings(max_examples=examples(50))
@given(seed=st.integers(0, 1 << 30), count=st.integers(1, 40), most=st.integers(1, 20))
def test_a_seed_draws_one_script_of_as_many_faults_in_order(seed: int, count: int, most: int) -> None:
    soaking = Soaking(count=count, most=most)
    script = draw(soaking, DEVICES, seed)
    assert script == draw(soaking, DEVICES, seed)
    assert len(script) == count
    steps = [fault.step or 0 for fault in script]
    assert steps[0] == soaking.first
    assert all(1 <= after - before <= most for before, after in pairwise(steps))


def test_every_kind_is_drawn_about_as_often_as_its_weight_says() -> None:
    found = Counter(fault.kind for fault in draw(Soaking(count=2000), DEVICES, 1))
    for kind, weight in WEIGHTS.items():
        assert found[kind] == pytest.approx(2000 * weight / sum(WEIGHTS.values()), rel=0.25)


def test_a_real_cluster_meets_every_way_of_every_kind() -> None:
    script = list(draw(Soaking(count=2000, weights=LIVE_WEIGHTS), DEVICES, 1))
    found = Counter(fault.kind for fault in script)
    for kind, weight in LIVE_WEIGHTS.items():
        assert found[kind] == pytest.approx(2000 * weight / sum(LIVE_WEIGHTS.values()), rel=0.25)
    assert {(fault.kind, fault.how) for fault in script if fault.how} == {
        (kind, how) for kind, ways in WAYS.items() for how in ways
    }
    assert all(fault.peer not in ("", fault.node) for fault in script if fault.kind == "sever")


def test_the_soak_of_every_commit_has_each_kind_that_is_real_alone() -> None:
    script = list(draw(Soaking(count=6, most=6, weights=LIVE_WEIGHTS), ("alpha/0", "beta/0"), FIXED))
    assert {fault.kind for fault in script} > set(REAL)


def test_one_node_has_no_data_network() -> None:
    script = draw(Soaking(count=200, weights=LIVE_WEIGHTS), ("alpha/0", "alpha/1"), 1)
    assert not any(fault.kind == "sever" for fault in script)


def test_weights_that_draw_nothing_are_refused() -> None:
    for weights in ({"kill": 0.0}, {"burn": 1.0}):
        with pytest.raises(Invalid, match="weights must be of"):
            Soaking(count=1, weights=weights)
