"""Python's and NumPy's shared generators: their states by memory, compared with what their own calls say."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticd.runtime.model import host_generators
from elasticd.runtime.model.host_generators import host_states, restore_host_states, seed_host

DRAWS: list[Callable[[], object]] = [
    random.random,
    lambda: random.gauss(0, 1),  # keeps a second draw for the next call
    lambda: random.getrandbits(32),
    lambda: random.seed(3),
    lambda: np.random.standard_normal(),  # likewise
    lambda: np.random.rand(700),  # more than a twister has words
    lambda: np.random.randint(10),
    lambda: np.random.seed(3),
]
SOME = st.lists(st.sampled_from(DRAWS), max_size=6)


def asked() -> object:
    """Both states by the calls of Python and NumPy."""
    name, key, *rest = np.random.get_state()
    return random.getstate(), name, key.tolist(), rest


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    python, numpy, bits = random.getstate(), np.random.get_state(), np.random.get_bit_generator()
    yield
    np.random.set_bit_generator(bits)
    np.random.set_state(numpy)
    random.setstate(python)


def test_the_memory_of_both_generators_is_laid_out_as_expected() -> None:
    """Else a pass asks them, which is right, and slow: look for the new layout."""
    assert host_generators._python_is_known()
    assert host_generators._normal_offset()


@pytest.mark.parametrize("by_memory", [True, False])
@given(before=SOME, between=SOME)
def test_a_restored_state_is_the_one_that_both_had(
    by_memory: bool, before: list[Callable[[], object]], between: list[Callable[[], object]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if not by_memory:
            patch.setattr(host_generators, "_python_is_known", lambda: False)
            patch.setattr(host_generators, "_normal_offset", lambda: 0)
        for draw in before:
            draw()
        states, expected = host_states(), asked()
        for draw in between:
            draw()
        assert (host_states() == states) == (asked() == expected)
        restore_host_states(states)
        assert asked() == expected
        assert host_states() == states


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**62 - 1])
def test_seeds_are_those_of_the_generators_own_calls(seed: int) -> None:
    random.gauss(0, 1)  # keeps a second draw, which a seed drops
    np.random.standard_normal()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    expected = asked()
    random.gauss(0, 1)
    np.random.standard_normal()
    seed_host(seed)
    assert asked() == expected


def test_numpys_generator_of_another_kind_is_restored() -> None:
    np.random.set_bit_generator(np.random.PCG64(5))
    np.random.standard_normal()
    states = host_states()
    expected = np.random.rand(3).tolist()
    assert host_states() != states
    restore_host_states(states)
    assert host_states() == states
    assert np.random.rand(3).tolist() == expected


def test_a_twister_that_another_one_replaced_meanwhile_passes_its_state_on() -> None:
    states, expected = host_states(), np.random.rand(3).tolist()
    np.random.set_bit_generator(np.random.MT19937(8))
    assert host_states() != states
    restore_host_states(states)
    assert np.random.rand(3).tolist() == expected
