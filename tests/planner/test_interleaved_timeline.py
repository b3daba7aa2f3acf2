"""Interleaved pipelines played out: the pass-by-pass time is that of the events, and of the longest path."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
from elasticd_planner.cost.schedule import passes
from elasticd_planner.cost.schedule_timeline import interleaved_seconds, one_f_one_b_seconds
from elasticd_planner.numeric import Floats
from elasticd_planner.value import Invalid

from tests.planner.timeline import simulate


def drawn(seed: int) -> tuple[Floats, Floats, Floats, int, int]:
    """A random pipeline: forward, backward and boundary by place, micro-batches, chunks. The boundary between
    two stages is the same in each turn."""
    rng = np.random.default_rng(seed)
    stages, chunks, micro_batches = (int(rng.integers(*limits)) for limits in ((2, 7), (1, 5), (1, 30)))
    forward = rng.uniform(0.2, 2.0, stages * chunks)
    backward = forward * rng.uniform(1.0, 3.0, stages * chunks)
    hops = rng.uniform(0, 0.5, stages) * (rng.random() < 0.7)
    return forward, backward, np.tile(hops, chunks)[:-1], micro_batches, chunks


def longest_path(forward: Floats, backward: Floats, boundary: Floats, micro_batches: int, chunks: int) -> float:
    """The schedule as a graph of passes and transfers: each after what it needs, after the one before it on its
    stage, and on its link in its direction. Shares nothing with the timeline but the order of passes."""
    stages, last = len(forward) // chunks, len(forward) - 1
    graph = nx.DiGraph()

    def follow(before: object, after: object, seconds: float) -> None:
        graph.add_edge(before, after, weight=seconds)

    for stage in range(stages):
        previous: object = "begin"
        sent: dict[tuple[str, int], object] = {}
        for kind, micro, chunk in passes(stages, stage, micro_batches, chunks):
            place = chunk * stages + stage
            begin, end = (("begin", kind, place, micro), ("end", kind, place, micro))
            follow(previous, begin, 0.0)
            follow(begin, end, float((forward if kind == "forward" else backward)[place]))
            if kind == "backward":
                follow(("end", "forward", place, micro), begin, 0.0)
            target = place + (1 if kind == "forward" else -1)
            if 0 <= target <= last:
                link = min(place, target)
                going = ("going", kind, place, micro)
                follow(end, going, 0.0)
                if (kind, link % stages) in sent:
                    follow(sent[kind, link % stages], going, 0.0)
                arrived = sent[kind, link % stages] = ("arrived", kind, target, micro)
                follow(going, arrived, float(boundary[link]))
                follow(arrived, ("begin", kind, target, micro), 0.0)
            previous = end
    return float(nx.dag_longest_path_length(graph))


def test_pass_by_pass_is_what_the_events_say_on_random_pipelines() -> None:
    for seed in range(300):
        forward, backward, boundary, micro_batches, chunks = drawn(seed)
        each = [np.repeat(times[:, None], micro_batches, axis=1) for times in (forward, backward)]
        line = simulate(each[0], each[1], boundary, chunks=chunks)
        found = interleaved_seconds(forward, backward, boundary, micro_batches, chunks)
        assert found == pytest.approx(line.seconds, rel=1e-12), seed
        for stage, done in enumerate(line.stages):
            order = [(w.kind, w.micro_batch, w.chunk) for w in done.work]
            assert order == list(passes(len(forward) // chunks, stage, micro_batches, chunks))


def test_it_is_the_longest_path_through_all_passes_and_transfers() -> None:
    for seed in range(40):
        pipeline = drawn(1000 + seed)
        assert interleaved_seconds(*pipeline) == pytest.approx(longest_path(*pipeline), rel=1e-12), seed


def test_with_one_chunk_it_is_the_plain_schedule() -> None:
    for seed in range(60):
        forward, backward, boundary, micro_batches, _ = drawn(seed)
        plain = float(one_f_one_b_seconds(forward, backward, boundary, micro_batches))
        found = interleaved_seconds(forward, backward, boundary, micro_batches, 1)
        assert found == pytest.approx(plain, rel=1e-12), seed


def test_a_slow_boundary_makes_more_chunks_take_longer() -> None:
    """What interleaving saves in filling it pays in transfers."""

    def seconds(chunks: int, hop: float) -> float:
        places = 4 * chunks
        return interleaved_seconds(
            [1 / chunks] * places, [2 / chunks] * places, [hop] * (places - 1), 8, chunks
        )

    assert seconds(2, 0.0) < seconds(1, 0.0)
    assert seconds(2, 3.0) > seconds(1, 3.0)


@pytest.mark.parametrize(
    ("places", "chunks", "micro_batches", "wrong"),
    [(5, 2, 3, "5 chunks of layers are not 2 on each"), (2, 2, 3, "two stages or more"), (4, 2, 0, "0 micro-")],
)
def test_what_is_no_interleaved_pipeline_is_refused(
    places: int, chunks: int, micro_batches: int, wrong: str
) -> None:
    with pytest.raises(Invalid, match=wrong):
        interleaved_seconds([1.0] * places, [1.0] * places, (), micro_batches, chunks)
