"""Bytes of others into values: whatever they are, the one error that comes of them is `msgspec.DecodeError`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

T = TypeVar("T")

#: What else msgspec lets through: of text that is no UTF-8, of values nested too deep, and of what the checks
#: of a value do not expect.
_LEAKED = (ArithmeticError, AttributeError, LookupError, RecursionError, UnicodeError)


def decoded(decode: Callable[[bytes], T], data: bytes) -> T:
    """`decode(data)`. Raises `msgspec.DecodeError` and nothing else."""
    try:
        return decode(data)
    except _LEAKED as error:
        raise msgspec.DecodeError(f"{type(error).__name__}: {str(error)[:200]}") from None


def decoded_as(kind: type[T], data: bytes, *, strict: bool = True) -> T:
    """JSON as a value of this type. Raises `msgspec.DecodeError` and nothing else."""
    return decoded(lambda raw: msgspec.json.decode(raw, type=kind, strict=strict), data)
