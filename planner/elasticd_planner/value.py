"""The base of every value in the vocabulary: frozen, keyword-only, slotted, checked when made."""

from __future__ import annotations

from typing import NoReturn

import msgspec


class Invalid(ValueError):
    """A value that breaks a rule of the vocabulary; the message names the value and what would be right."""


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """A frozen, slotted struct; subclasses repeat `frozen=True, kw_only=True` (msgspec and type checkers
    want both on each class) and check their invariants in `__post_init__`."""


def refuse(message: str) -> NoReturn:
    """Raises `Invalid`; while JSON is decoded msgspec turns it into a `ValidationError` with the path."""
    raise Invalid(message)
