"""The bases of every value in the vocabulary: frozen, keyword-only, slotted, checked when made."""

from __future__ import annotations

from typing import NoReturn

import msgspec


class Invalid(ValueError):
    """A value that breaks a rule of the vocabulary; the message names the value and what would be right."""


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """A frozen, slotted struct; subclasses repeat `frozen=True, kw_only=True` (msgspec and type checkers
    want both on each class) and check their invariants in `__post_init__`."""


def explicit_tag(name: str) -> str:
    """`tag=` of a base class whose subclasses must each say `tag="..."`: classes are renamed, tags are not.

    Raises TypeError, when the class is made, for one that does not.
    """
    if name in ("Message", "StoredValue"):
        return name.lower()
    raise TypeError(f'{name}: name its tag on the wire or in the store, as tag="store-call"')


class StoredValue(Value, frozen=True, kw_only=True, tag=explicit_tag):
    """The base of every value that another release may read: one that outlives the process that wrote it, in
    etcd or in a file, and what a coordinator and its planner say to each other. Its JSON has its tag as "type",
    and its "version". Subclasses say `tag="..."`; one that writes a newer version than its default, where a
    value needs it, names the newest in a class variable `newest`."""

    version: int = 1


#: Version of the planner's files: problems, answers and profiles.
FILE_VERSION = 1


def check_file_version(version: int) -> None:
    """Raises `Invalid` for a file whose version is more than one newer than this release writes."""
    if not 1 <= version <= FILE_VERSION + 1:
        refuse(
            f"version {version} of the file's format, and this elasticd knows version {FILE_VERSION}: use the "
            "release that wrote it, or write it anew"
        )


def refuse(message: str) -> NoReturn:
    """Raises `Invalid`; while JSON is decoded msgspec turns it into a `ValidationError` with the path."""
    raise Invalid(message)
