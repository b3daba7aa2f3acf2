"""Sources: each byte from one holder, the same node first, and no link much busier than the least possible."""

from collections.abc import Sequence

import pytest
from elasticd_migration.source_choice import WHOLE_BELOW_BYTES, Share
from elasticd_planner.spec.cluster import node_of
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.migration.flows import Want, choose, least_busiest, loads
from tests.sizes import examples


@st.composite
def cases(draw: st.DrawFn) -> list[Want]:
    nodes, width = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    devices = [f"n{n}/{i}" for n in range(nodes) for i in range(width + (nodes == 1))]
    sizes = st.integers(1, 1000).map(lambda n: n * WHOLE_BELOW_BYTES)
    wants = []
    for _ in range(draw(st.integers(1, 20))):
        order = draw(st.permutations(devices))
        count = draw(st.integers(1, len(devices) - 1))
        wants.append(Want(order[0], draw(sizes), tuple(order[1 : 1 + count])))
    return wants


@settings(max_examples=examples(150))
@given(cases())
def test_the_busiest_link_is_within_a_tenth_of_the_optimum(wants: list[Want]) -> None:
    chosen = choose(wants, whole_below=1)
    check(wants, chosen, whole_below=1)
    assert loads(wants, chosen).busiest <= 1.1 * least_busiest(wants)


@settings(max_examples=examples(100))
@given(cases())
def test_what_is_not_divided_for_its_size_costs_no_more_than_its_size(wants: list[Want]) -> None:
    chosen = choose(wants)
    check(wants, chosen)
    divided = loads(wants, choose(wants, whole_below=1)).busiest
    assert loads(wants, chosen).busiest <= divided + len(wants) * WHOLE_BELOW_BYTES


def check(
    wants: Sequence[Want], chosen: Sequence[Sequence[Share]], *, whole_below: int = WHOLE_BELOW_BYTES
) -> None:
    """Every byte once, from a holder, from the same node where that is possible."""
    for want, shares in zip(wants, chosen, strict=True):
        assert sum(share.size for share in shares) == want.size
        sources = [share.source for share in shares]
        assert len(set(sources)) == len(sources)
        assert set(sources) <= set(want.holders)
        assert all(share.size >= min(want.size, whole_below // 2) for share in shares)
        near = [holder for holder in want.holders if node_of(holder) == node_of(want.destination)]
        if near:
            assert set(sources) <= set(near)


def stairs(length: int) -> list[Want]:
    """What is wanted from the first two can only be balanced by moving something at every step."""
    pairs = [(f"n{i}/0", f"n{min(i + 1, length - 1)}/0") for i in range(length)]
    sizes = [length << 20, *[1 << 20] * (length - 1)]
    return [
        Want(f"x{i}/0", size, tuple(dict.fromkeys(pair)))
        for i, (pair, size) in enumerate(zip(pairs, sizes, strict=True))
    ]


def half_taken(length: int) -> list[Want]:
    """Half of a ring has to give what nobody else holds, so the other half gives all that it can."""
    ring = [Want(f"x{i}/0", 1 << 20, (f"n{i}/0", f"n{(i + 1) % length}/0")) for i in range(length)]
    return ring + [Want(f"y{i}/0", 1 << 20, (f"n{i}/0",)) for i in range(length // 2)]


def across(nodes: int) -> list[Want]:
    """Node n0 has ten devices with copies, the others one each: by devices alone, n0's link carries ten times
    what another's does."""
    holders = (*(f"n0/{i}" for i in range(10)), *(f"n{n}/0" for n in range(1, nodes)))
    return [Want(f"x{i}/0", 10 << 20, holders) for i in range(20)]


@pytest.mark.parametrize(
    "wants", [stairs(12), stairs(100), half_taken(30), across(6)], ids=["stairs", "long", "ring", "nodes"]
)
def test_chains_and_unequal_nodes_are_balanced_too(wants: list[Want]) -> None:
    chosen = choose(wants)
    check(wants, chosen)
    assert loads(wants, chosen).busiest <= 1.1 * least_busiest(wants)


def test_few_wants_are_divided() -> None:
    holders = tuple(f"n{i}/0" for i in range(4))
    wants = [Want("x0/0", WHOLE_BELOW_BYTES, holders) for _ in range(1000)]
    chosen = choose(wants)
    assert sum(len(shares) > 1 for shares in chosen) <= 4
    given_out = loads(wants, chosen).out_of_device.values()
    assert max(given_out) - min(given_out) <= 2 * WHOLE_BELOW_BYTES


def test_small_wants_are_never_divided_and_still_shared_out() -> None:
    holders = tuple(f"n{i}/0" for i in range(3))
    wants = [Want("x0/0", 1000 + i, holders) for i in range(300)]
    chosen = choose(wants)
    assert all(len(shares) == 1 for shares in chosen)
    given_out = loads(wants, chosen).out_of_device.values()
    assert max(given_out) <= 1.05 * sum(given_out) / 3


def test_one_holder_gives_all_and_none_is_refused() -> None:
    assert choose([Want("n0/0", 5, ("n1/0",))]) == [(Share("n1/0", 5),)]
    assert choose([]) == []
    assert choose([Want("n0/0", 0, ("n1/0", "n2/0"))])[0][0].size == 0
    with pytest.raises(ValueError, match="nobody holds what n0/0 lacks"):
        choose([Want("n0/0", 5, ())])
