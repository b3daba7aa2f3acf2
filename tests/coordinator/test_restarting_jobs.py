"""Jobs in restart mode, as a leader keeps them."""

from __future__ import annotations

from elasticd.coordinator.restarting_jobs import RestartingJobs
from elasticd.wire.rendezvous import TorchrunState


def test_the_effects_of_a_jobs_first_message_count_for_its_node() -> None:
    """A node that has jobs of ever new names written would else have no share in it."""
    order: list[str] = []
    jobs = RestartingJobs(
        1,
        lambda: 100.0,
        caused=lambda job, node: order.append(f"{node} caused {job}"),
        perform=lambda effects: order.append(f"{len(list(effects))} effects"),
        put=lambda asked: None,
    )
    assert not jobs.attended("alpha", TorchrunState(job="new", torchrun="t", status="here"))
    assert [each for each in order if "effects" in each]
    assert order[0] == "alpha caused new"
