"""Slow links: found among others or by what they did before, and told apart from slow devices."""

import numpy as np
import pytest
from elasticd_planner.detection.links import LinkState, Transfer, observe_links
from elasticd_planner.detection.settings import DetectSettings
from elasticd_planner.detection.stragglers import Change
from elasticd_planner.spec.cluster import Link
from elasticd_planner.value import Invalid

LINK = Link(bandwidth=1e9, latency=1e-4)
SETTINGS = DetectSettings()


class Watch:
    def __init__(self, *pairs: tuple[str, str]) -> None:
        self.pairs, self.state, self.step = pairs, LinkState(), 0

    def run(self, steps: int, slow: dict[str, float] | None = None) -> list[Change]:
        told: list[Change] = []
        for _ in range(steps):
            rng = np.random.Generator(np.random.Philox(key=[3, self.step]))
            made = []
            for source, target in self.pairs:
                size = int(rng.integers(1, 1 << 24))
                seconds = (LINK.latency + size / LINK.bandwidth) * float(np.exp(0.1 * rng.standard_normal()))
                transfer = Transfer(source=source, target=target, size=size, seconds=seconds)
                factor = (slow or {}).get(transfer.name, 1.0)
                made.append(Transfer(source=source, target=target, size=size, seconds=seconds * factor))
            self.state, found = observe_links(self.state, made, self.step, LINK, SETTINGS)
            told += found
            self.step += 1
        return told


def test_one_slow_link_of_several_is_found_even_from_the_start() -> None:
    watch = Watch(("a", "b"), ("b", "c"), ("c", "d"), ("d", "a"))
    (change,) = watch.run(20, {"b - c": 3.0})
    assert (change.device, change.kind) == ("b - c", "slow")
    assert change.after == pytest.approx(3.0, rel=0.12)
    assert "a normal link for the same bytes" in change.reason
    (change,) = watch.run(20)
    assert (change.device, change.kind) == ("b - c", "recovered")


def test_the_only_link_is_compared_with_what_it_did_before() -> None:
    watch = Watch(("a", "b"), ("b", "a"))
    assert watch.run(40) == []
    (change,) = watch.run(20, {"a - b": 2.5})
    assert change.device == "a - b"
    assert change.after == pytest.approx(2.5, rel=0.15)


def test_what_strays_by_a_tenth_is_no_slow_link() -> None:
    assert Watch(("a", "b"), ("b", "c"), ("c", "a")).run(500) == []


def test_a_step_without_transfers_and_an_old_one_change_nothing() -> None:
    watch = Watch(("a", "b"))
    watch.run(5)
    assert observe_links(watch.state, [], 9, LINK, SETTINGS) == (watch.state, ())
    late = Transfer(source="a", target="b", size=1, seconds=9.0)
    assert observe_links(watch.state, [late], 2, LINK, SETTINGS) == (watch.state, ())
    with pytest.raises(Invalid, match="a - b"):
        Transfer(source="b", target="a", size=1, seconds=0.0)
