"""The states of the host's two generators that a process shares: Python's and NumPy's.

Both are Mersenne Twisters of 624 words. `random.getstate` and `np.random.get_state` make a Python object of
each word, and setting a state takes as long: more than the pass of a small section. Here their memory is
copied, 2,500 bytes each. CPython and NumPy do not promise its layout, so that it is compared with their own
calls at the first use, on generators made for that. Where it differs, or NumPy's generator is no Mersenne
Twister, those calls are used. Callers hold a lock against other threads that seed.
"""

from __future__ import annotations

import _random
import ctypes
import random
import struct
import sys
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.random import MT19937, RandomState
from numpy.random.mtrand import get_bit_generator

#: The generators behind `random.random` and `np.random.rand`.
_PYTHON: Any = vars(random)["_inst"]
_NUMPY: Any = np.random.get_state.__self__  # type: ignore[attr-defined]
#: Bytes of a Mersenne Twister: 624 words and the place of the next one, which Python has before them.
_TWISTER_BYTES = 625 * 4
#: Bytes of NumPy's second normal draw, which waits for the next call: a flag, padding, a double.
_NORMAL = struct.Struct("i4xd")


class HostStates(NamedTuple):
    """The states of both generators: equal if the next draws are."""

    python: Any
    numpy: Any


class _TwisterState(NamedTuple):
    """NumPy's generator by its memory."""

    bits: MT19937
    twister: bytes
    normal: bytes


class _AskedState:
    """NumPy's generator by its own call."""

    def __init__(self) -> None:
        self.state = np.random.get_state(legacy=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _AskedState) and str(self.state) == str(other.state)

    __hash__ = None  # type: ignore[assignment]


def host_states() -> HostStates:
    """The present states."""
    if _python_is_known():
        python: Any = ctypes.string_at(_python_address(_PYTHON), _TWISTER_BYTES), _PYTHON.gauss_next
    else:
        python = random.getstate()
    bits = get_bit_generator()
    if (offset := _normal_offset()) and type(bits) is MT19937:
        twister = ctypes.string_at(_numpy_address(bits), _TWISTER_BYTES)
        normal = ctypes.string_at(id(_NUMPY) + offset, _NORMAL.size)
        return HostStates(python, _TwisterState(bits, twister, normal))
    return HostStates(python, _AskedState())


def restore_host_states(states: HostStates) -> None:
    """Has both generators continue from these states."""
    host_seeds.restored()
    if _python_is_known():
        twister, _PYTHON.gauss_next = states.python
        ctypes.memmove(_python_address(_PYTHON), twister, _TWISTER_BYTES)
    else:
        random.setstate(states.python)
    if isinstance(states.numpy, _AskedState):
        np.random.set_state(states.numpy.state)
        return
    bits, twister, normal = states.numpy
    ctypes.memmove(_numpy_address(bits), twister, _TWISTER_BYTES)
    if get_bit_generator() is bits:
        ctypes.memmove(id(_NUMPY) + _normal_offset(), normal, _NORMAL.size)
    else:  # another one was put there meanwhile
        waits, draw = _NORMAL.unpack(normal)
        np.random.set_state({**bits.state, "has_gauss": waits, "gauss": draw})


def seed_host(seed: int) -> None:
    """Seeds both as `random.seed` and `np.random.seed` do; NumPy's stays as it is if it is no Mersenne Twister.

    Args:
        seed: less than 2^62.
    """
    host_seeds.restored()  # another thread that looks meanwhile is to see that they change
    if _python_is_known():
        _random.Random.seed(_PYTHON, seed)  # `random.seed` without its look at the kind of the seed
        _PYTHON.gauss_next = None
    else:
        random.seed(seed)
    if isinstance(get_bit_generator(), MT19937):  # else the user put another one there
        np.random.seed(seed % (1 << 32))
    host_seeds.seeded()


class HostSeeds:
    """The seeds that both have from here, and a few words of their memory after the last one: a draw changes
    them."""

    def __init__(self) -> None:
        self.changes = 0  # how often they were seeded or restored
        self._known = False  # False: they were restored since, or their memory is not as expected
        self._bits: object = None  # NumPy's
        self._numpy: Any = None  # its last word, and the place of the next one
        self._python: Any = None  # the place of Python's next word, and its first one
        self._then = 0, 0

    def seeded(self) -> None:
        """Both were seeded now."""
        self.changes, bits = self.changes + 1, get_bit_generator()
        self._known = type(bits) is MT19937 and _python_is_known() and _normal_offset() > 0
        if self._known:
            self._bits, self._python, self._numpy = bits, _python_place(), _numpy_place(bits)
            self._then = self._python.value, self._numpy.value

    def restored(self) -> None:
        """Both have other states now."""
        self.changes, self._known = self.changes + 1, False

    def undrawn(self) -> bool:
        """Returns True if nobody drew from either generator since both were seeded, as far as that is known.

        A draw after which the script puts the state back is not seen.
        """
        if not self._known or get_bit_generator() is not self._bits:
            return False
        return (self._python.value, self._numpy.value) == self._then


#: Those of this process.
host_seeds = HostSeeds()


@lru_cache(maxsize=1)
def _python_place() -> ctypes.c_uint64:
    """The place and the first word of Python's twister."""
    return ctypes.c_uint64.from_address(_python_address(_PYTHON))


@lru_cache(maxsize=4)
def _numpy_place(bits: MT19937) -> ctypes.c_uint64:
    """The last word and the place of NumPy's."""
    return ctypes.c_uint64.from_address(_numpy_address(bits) + _TWISTER_BYTES - 8)


def _python_address(generator: random.Random) -> int:
    return id(generator) + object.__basicsize__


@lru_cache(maxsize=4)
def _numpy_address(bits: MT19937) -> int:
    return int(bits.ctypes.state_address)


@lru_cache(maxsize=1)
def _python_is_known() -> bool:
    """True if the memory of Python's generator is laid out as expected."""
    needed = object.__basicsize__ + _TWISTER_BYTES
    if sys.implementation.name != "cpython" or _random.Random.__basicsize__ < needed:
        return False
    generator = random.Random(1)
    generator.random()
    place, *words = (ctypes.c_uint32 * 625).from_address(_python_address(generator))
    return (*words, place) == generator.getstate()[1]


@lru_cache(maxsize=1)
def _normal_offset() -> int:
    """The offset in a RandomState of its second normal draw; 0: the memory of NumPy's is not as expected."""
    bits = MT19937(1)
    generator = RandomState(bits)
    generator.standard_normal()
    asked: Any = generator.get_state(legacy=False)
    *words, place = (ctypes.c_uint32 * 625).from_address(_numpy_address(bits))
    memory = ctypes.string_at(id(generator), RandomState.__basicsize__)
    offset = memory.find(struct.pack("d", asked["gauss"])) - 8
    if words != asked["state"]["key"].tolist() or place != asked["state"]["pos"] or offset <= 0:
        return 0
    generator.standard_normal()
    waits, _ = _NORMAL.unpack(ctypes.string_at(id(generator) + offset, _NORMAL.size))
    return offset if _NORMAL.unpack_from(memory, offset)[0] == 1 and waits == 0 else 0
